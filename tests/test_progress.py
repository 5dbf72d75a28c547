"""Bars come out when they are due, whatever is written meanwhile, and leave nothing behind."""

import io
import sys
from threading import Event

import pytest

from weightscope import progress
from weightscope.progress import PROGRESS, Bar, phase


def drawn(delay: float, updates: int, total: int = 3) -> str:
    """What a bar has put on its stream, one line having been written beside it after the updates."""
    stream = io.StringIO()
    with Bar(
        total=total, file=stream, mininterval=0, ncols=40, **PROGRESS | {"delay": delay, "dynamic_ncols": False}
    ) as bar:
        for _ in range(updates):
            bar.update()
        with Bar.external_write_mode(stream):
            stream.write("a line\n")
    return stream.getvalue()


@pytest.mark.parametrize("updates", [0, 2])
def test_a_line_does_not_bring_out_a_bar_before_its_time(updates: int) -> None:
    assert drawn(delay=60, updates=updates) == "a line\n"


@pytest.mark.parametrize("updates", [0, 2])
def test_a_bar_that_is_due_is_drawn_and_cleared_away(updates: int) -> None:
    said = drawn(delay=1e-9, updates=updates)
    assert f"{updates}/3" in said
    assert said.rsplit("\r", 2)[1].strip() == "" and said.endswith("\r")


def test_a_bar_that_is_turned_off_says_nothing() -> None:
    stream = io.StringIO()
    with Bar(total=3, file=stream, disable=True, **PROGRESS) as bar:
        bar.update()
        bar.clear()
        bar.refresh()
    assert stream.getvalue() == ""


def test_a_bar_without_a_delay_is_drawn_at_once() -> None:
    stream = io.StringIO()
    with Bar(total=3, file=stream):
        assert "0/3" in stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_takes_long_is_said_once_above_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar that is being shown makes room for the line, and is cleared away in the end as ever."""
    terminal, said = Terminal(), Event()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "DELAY", 0)
    monkeypatch.setattr(terminal, "flush", lambda: "drawing ...\n" in terminal.getvalue() and said.set())
    with Bar(total=3, file=terminal, ncols=40, leave=False), phase("drawing"):
        assert said.wait(60)
    before, after = terminal.getvalue().split("drawing ...\n")
    assert before.endswith("\r") and before.rsplit("\r", 2)[1].strip() == ""
    assert "0/3" in before and after.endswith("\r") and after.rsplit("\r", 2)[1].strip() == ""


@pytest.mark.parametrize("stderr", [None, io.StringIO()])
def test_nothing_is_said_where_nobody_sees_it(stderr: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(progress, "DELAY", 0)
    with phase("drawing"):
        pass
    assert stderr is None or not stderr.getvalue()

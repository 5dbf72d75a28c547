"""Bars come out when they are due, whatever is written meanwhile, and leave nothing behind."""

import io

import pytest

from weightscope.progress import PROGRESS, Bar


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

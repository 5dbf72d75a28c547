"""Bars come out when they are due, whatever is written meanwhile, and leave nothing behind."""

import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import click
import pytest

import weightscope as ws
from tests.support.two_layers import TWO_LAYERS
from weightscope.cli.command import EndsInOneLine
from weightscope.core import progress
from weightscope.core.engine import ThisProcess
from weightscope.core.files import Files
from weightscope.core.progress import bar, bar_class, phase, progress_hidden, progress_shown
from weightscope.heads.audit.audit import AuditOptions, measure_task
from weightscope.heads.audit.batch import report_task
from weightscope.heads.detok.first_layer import FirstLayer
from weightscope.heads.outliers.measure import guess
from weightscope.heads.sinks.mechanisms import SinkObserver
from weightscope.pairs.compare.compare import compare

Bar = bar_class()


def drawn(delay: float, updates: int, total: int = 3) -> str:
    """What a bar writes to its stream when another line is written after the updates."""
    stream = io.StringIO()
    with Bar(total=total, file=stream, mininterval=0, ncols=40, delay=delay, leave=False) as late:
        for _ in range(updates):
            late.update()
        with Bar.external_write_mode(stream):
            stream.write("a line\n")
    return stream.getvalue()


@pytest.mark.parametrize("updates", [0, 2])
def test_printing_a_line_does_not_draw_a_bar_early(updates: int) -> None:
    assert drawn(delay=60, updates=updates) == "a line\n"


@pytest.mark.parametrize("updates", [0, 2])
def test_bar_is_drawn_and_cleared(updates: int) -> None:
    output = drawn(delay=1e-9, updates=updates)
    assert f"{updates}/3" in output
    assert output.rsplit("\r", 2)[1].strip() == "" and output.endswith("\r")


@pytest.mark.parametrize(("total", "delay"), [(3, 1), (1000, 0)])  # of the second, the end would be foretold
def test_hidden_bar_prints_nothing(total: int, delay: float) -> None:
    stream = io.StringIO()
    with Bar(total=total, file=stream, disable=True, delay=delay, leave=False) as late:
        late.update()
        late.clear()
        late.refresh()
    assert stream.getvalue() == ""


def test_a_bar_without_a_delay_is_drawn_at_once() -> None:
    stream = io.StringIO()
    with Bar(total=3, file=stream):
        assert "0/3" in stream.getvalue()


def told(total: int, taken: float, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a bar printed whose first part took some seconds, and each later part a tenth as long."""
    stream, now = io.StringIO(), [0.0]
    with Bar(total=total, desc="passes", file=stream, delay=2, leave=False) as late:
        monkeypatch.setattr(late, "_time", lambda: late.start_t + now[0])
        for part in range(3):
            now[0] += taken / (1 if part == 0 else 10)
            late.update()
    return stream.getvalue()


def test_long_work_is_announced_after_its_first_part(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(101, 6.0, monkeypatch).count("passes: about 10 min to go\n") == 1
    assert told(4001, 6.0, monkeypatch).count("passes: about 6.7 h to go\n") == 1
    assert "about" not in told(10, 6.0, monkeypatch)  # 54 seconds
    assert "about" not in told(10, 0.1, monkeypatch)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_long_work_is_announced_once_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar that is being shown makes room for the line, and is cleared away in the end as ever."""
    terminal, was_drawn = Terminal(), Event()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "DELAY", 0)
    monkeypatch.setattr(terminal, "flush", lambda: "drawing ...\n" in terminal.getvalue() and was_drawn.set())
    with progress_shown(), Bar(total=3, file=terminal, ncols=40, leave=False), phase("drawing"):
        assert was_drawn.wait(60)
    before, after = terminal.getvalue().split("drawing ...\n")
    assert before.endswith("\r") and before.rsplit("\r", 2)[1].strip() == ""
    assert "0/3" in before and after.endswith("\r") and after.rsplit("\r", 2)[1].strip() == ""


@pytest.mark.parametrize("stderr", [None, io.StringIO()])
def test_nothing_is_announced_without_a_terminal(stderr: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(progress, "DELAY", 0)
    with progress_shown(), phase("drawing"):
        assert list(bar(range(3), "layers")) == [0, 1, 2]
    assert stderr is None or not stderr.getvalue()


def said_by(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> str:
    """What is shown of work when nothing waits two seconds."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "DELAY", 0)
    work()
    return terminal.getvalue()


def test_python_calls_print_nothing_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    def library(progress: bool = False) -> None:
        with progress_shown(progress):
            assert list(bar(range(3), "layers", "layer")) == [0, 1, 2]
            with phase("drawing"):
                time.sleep(0.01)

    assert said_by(library, monkeypatch) == ""
    assert "layers" in said_by(lambda: library(progress=True), monkeypatch)

    def command() -> None:
        with progress_shown():
            library()

    output = said_by(command, monkeypatch)
    assert "layers" in output and "drawing ..." in output
    assert said_by(library, monkeypatch) == "", "the command has ended"


def test_a_notebook_shows_progress_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def library(progress: bool | None = None) -> None:
        with progress_shown(progress):
            list(bar(range(3), "layers"))
            with phase("drawing"):
                time.sleep(0.01)

    def quietly() -> None:
        with progress_hidden():
            library()

    assert said_by(library, monkeypatch) == ""
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    words = said_by(library, monkeypatch)
    assert "layers" in words and "drawing ..." in words
    assert said_by(lambda: library(progress=False), monkeypatch) == said_by(quietly, monkeypatch) == ""
    assert "layers" in said_by(lambda: [*bar(range(3), "layers")], monkeypatch)  # a call without the option
    monkeypatch.setattr(progress, "DELAY", 2)
    quick = Terminal()
    monkeypatch.setattr(sys, "stderr", quick)
    library()
    assert not quick.getvalue()  # what takes less than two seconds


def test_tasks_show_their_progress_where_their_command_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that runs them is another."""

    def tasks() -> None:
        with ThisProcess() as engine:
            engine.submit("task", lambda: list(bar(range(3), "tokens")))
            assert engine.next().value == [0, 1, 2]

    assert said_by(tasks, monkeypatch) == ""
    with progress_shown():
        assert "tokens" in said_by(tasks, monkeypatch)


def test_every_command_shows_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command(cls=EndsInOneLine)
    def counting() -> None:
        list(bar(range(3), "counting"))

    assert "counting" in said_by(lambda: counting([], standalone_mode=False), monkeypatch)


def test_an_analysis_from_python_is_silent(two_layers: ws.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def analysis() -> None:
        compare(two_layers, two_layers)
        FirstLayer(two_layers).sigma  # noqa: B018  computed on access

    assert said_by(analysis, monkeypatch) == ""


def test_phases_without_forward_passes_are_named(two_layers: ws.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """What these took in silence on a model of twelve layers was from 6 to 45 seconds."""
    result = ws.circuits(two_layers)
    layer = two_layers.layer(0)
    works = {
        "what weights tell": lambda: guess(two_layers),
        "channels": lambda: ws.circuits(two_layers),
        "drawing figures": lambda: result.write_files(Files()),
        "lengths after W_O": lambda: SinkObserver([layer], SimpleNamespace(sequences={})),
    }
    for name, work in works.items():
        with progress_shown():
            assert name in said_by(work, monkeypatch)


def test_audit_and_compare_always_show_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long steps after the last layer are reported too, by the library's own call and by the commands."""
    model = ws.open_model(TWO_LAYERS)
    now = lambda delay, say: SimpleNamespace(start=say, cancel=lambda: None)  # noqa: E731 - a timer that is up at once
    monkeypatch.setattr(progress, "Timer", now)

    def audit() -> None:
        with progress_shown():
            report_task(lambda: model, {0: measure_task(lambda: model, 0, AuditOptions())}, AuditOptions())

    output = said_by(audit, monkeypatch)
    for work in (
        "directions", "tokens along directions", "looking at embedding rows", "comparing heads", "writing tables",
        "figures",
    ):  # fmt: skip
        assert work in output, work

    def comparison() -> None:
        with progress_shown():
            compare(model, model).write(tmp_path)

    output = said_by(comparison, monkeypatch)
    assert "layers" in output and "figures" in output

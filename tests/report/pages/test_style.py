"""Figures look as ours do, and leave the caller's matplotlib as it was."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import weightscope
from weightscope.core.files import Files
from weightscope.report.pages.style import STYLE, in_our_style, save, subplots

CHECKOUT = Path(weightscope.__file__).parent.parent
DRAWING = [
    ".".join(path.relative_to(CHECKOUT).with_suffix("").parts)
    for folder in ("weightscope", "analyses")
    for path in sorted((CHECKOUT / folder).rglob("*.py"))
    if "matplotlib" in path.read_text()
]
LOUD = {"font.size": 20, "lines.linewidth": 9, "savefig.dpi": 30, "savefig.bbox": "tight", "axes.facecolor": "red"}


@pytest.fixture
def users_style() -> Iterator[None]:
    with mpl.rc_context(LOUD):
        yield


@in_our_style()
def curve() -> Figure:
    figure, (left, right) = subplots(1, 2, figsize=(3, 2), sharey=True)
    left.plot([0, 1, 4], label="squares")
    left.legend()
    right.plot([1, 2, 3])
    right.set_xlabel("$j$")
    return figure


def test_importing_what_draws_leaves_matplotlib_as_it_was() -> None:
    """In a fresh process, whose user has chosen a backend and a style."""
    code = (
        "import json, sys, importlib, matplotlib as mpl\n"
        "mpl.use('template'); mpl.rcParams['font.size'] = 20; before = dict(mpl.rcParams)\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
        "changed = {k: str(v) for k, v in mpl.rcParams.items() if v != before[k]}\n"
        "print(json.dumps([mpl.get_backend(), changed, 'matplotlib.pyplot' in sys.modules]))"
    )
    assert {"weightscope.report.pages.style", "weightscope.heads.norms.figures"} < set(DRAWING)
    command = [sys.executable, "-c", code, json.dumps(DRAWING)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["template", {}, False]


def test_a_command_draws_in_our_style_whatever_the_callers(users_style: None) -> None:
    before = dict(mpl.rcParams)
    files = Files()
    save(curve(), files, "curve")
    assert dict(mpl.rcParams) == before
    assert set(files.contents) == {"curve.png", "curve.svg", "curve.figure.csv"}

    plain = Files()
    with mpl.rc_context(mpl.rcParamsDefault):
        save(curve(), plain, "curve")
    assert files.contents == plain.contents


def test_a_figure_keeps_our_style_when_somebody_else_shows_it(users_style: None) -> None:
    def drawn(figure: Figure) -> bytes:
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        return bytes(canvas.buffer_rgba())

    under_theirs = drawn(curve())
    with in_our_style():
        assert under_theirs == drawn(curve())


def test_a_notebook_shows_a_figure_without_pyplot() -> None:
    picture = curve()._repr_png_()  # type: ignore[attr-defined]
    assert picture.startswith(b"\x89PNG")


def test_threads_that_draw_at_once_leave_the_callers_style(users_style: None) -> None:
    before = dict(mpl.rcParams)
    both_are_ready = threading.Barrier(2)

    def draw() -> None:
        both_are_ready.wait()
        for _ in range(5):
            with in_our_style():
                assert mpl.rcParams["font.size"] == STYLE["font.size"]

    threads = [threading.Thread(target=draw) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dict(mpl.rcParams) == before


def test_the_same_figure_gives_the_same_bytes() -> None:
    first, second = Files(), Files()
    assert save(curve(), first, "curve") == save(curve(), second, "curve")
    assert first.contents == second.contents

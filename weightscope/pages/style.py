"""How figures look, and how they are saved, without touching the caller's matplotlib style, backend or pyplot.

A drawing function is decorated with `@in_our_style()` and starts with `subplots`, which does not use pyplot: no figure
is registered, none has to be closed, and no window opens.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any

import matplotlib as mpl
import matplotlib.style
import numpy as np
from matplotlib import figure as figures
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.ticker import LogFormatterSciNotation, MaxNLocator

from weightscope.attention.figures import ShownFigure
from weightscope.errors import printable
from weightscope.files import Files
from weightscope.pages.drawn import description, numbers

COLUMN = 3.4  # inches: one column of a two-column paper
# Okabe and Ito's colour-blind-safe palette; black is kept for reference lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D00", "#7F7F7F")
DASHES = ("-", "--", ":", "-.")
MARKERS = "os^vDPX"
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
BY_LAYER = "cividis"  # perceptually uniform and colour-blind safe

STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.formatter.min_exponent": 3,  # on logarithmic axes 0.1, 1 and 10, not powers of ten
    "lines.linewidth": 1.1,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "path",  # looks the same whatever fonts are installed
    "svg.hashsalt": "weightscope",  # the same bytes in every run
    "savefig.dpi": 200,
}
_one_at_a_time = RLock()  # matplotlib's settings belong to the process, not to a thread


@contextmanager
def in_our_style(**more: float) -> Iterator[None]:
    """Use matplotlib's defaults and our style within a block or function; restore the caller's settings afterwards."""
    with _one_at_a_time, matplotlib.style.context(["default", STYLE | more]):
        yield


class StyledFigure(ShownFigure):
    """A figure in our style wherever it is shown; matplotlib would read the caller's settings when it draws."""

    @in_our_style()
    def draw(self, renderer: Any) -> None:
        """Draw the figure; matplotlib calls this."""
        plain_powers(self)
        super().draw(renderer)


class PlainPowers(LogFormatterSciNotation):
    """Labels of a logarithmic axis as plain text (10⁻²): parsing formulas is slow."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """The label at x."""
        label = str(super().__call__(x, pos)).removeprefix(r"$\mathdefault{").removesuffix("}$")
        return re.sub(r"\^{(.*)}", lambda power: power[1].translate(RAISED), label).replace(r"\times", " × ")


def plain_powers(figure: figures.Figure) -> None:
    """Label logarithmic axes with `PlainPowers`, unless another formatter was set."""
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        if type(axis.get_major_formatter()) is LogFormatterSciNotation:
            axis.set_major_formatter(PlainPowers())
        minor = axis.get_minor_formatter()
        if type(minor) is LogFormatterSciNotation:
            axis.set_minor_formatter(PlainPowers(labelOnlyBase=minor.labelOnlyBase))


def subplots(
    rows: int = 1, columns: int = 1, *, figsize: tuple[float, float], **options: Any
) -> tuple[figures.Figure, Any]:
    """A figure and its axes, as `matplotlib.pyplot.subplots` gives them."""
    figure = StyledFigure(figsize=figsize)
    return figure, figure.subplots(rows, columns, **options)


def head_style(head: int) -> dict[str, str]:
    """Colour and dash of a head, the same in every figure."""
    return {"color": COLOURS[head % len(COLOURS)], "linestyle": DASHES[head // len(COLOURS) % len(DASHES)]}


def kind_styles(n_kinds: int) -> list[dict[str, Any]]:
    """Colour and marker of every kind of token: special ones in order, punctuation in green, all others in grey."""
    special = (*COLOURS[:2], *COLOURS[3:7])
    colours = [*(special[kind % len(special)] for kind in range(n_kinds - 2)), COLOURS[2], COLOURS[7]]
    return [
        {"color": colour, "marker": MARKERS[kind % len(MARKERS)], "markersize": 3}
        for kind, colour in enumerate(colours)
    ]


def plain(text: str) -> str:
    """Text from a checkpoint for a figure: a dollar sign does not start a formula."""
    return printable(text).replace("$", r"\$")


def layer_colours(layers: np.ndarray) -> np.ndarray:
    """A colour for each layer, the first one darkest."""
    return mpl.colormaps[BY_LAYER](np.linspace(0, 1, len(layers)))


def layer_bar(figure: figures.Figure, axis: Axes, layers: np.ndarray, label: str = "layer") -> None:
    """Draw the key to `layer_colours` next to an axis."""
    first, last = layers[0], max(layers[-1], layers[0] + 1)
    bar = figure.colorbar(ScalarMappable(Normalize(first, last), BY_LAYER), ax=axis, label=label)
    bar.locator = whole_numbers()


def whole_numbers(most: int = 6) -> MaxNLocator:
    """Ticks of an axis of layers, heads or dimensions: about `most`, and never at a half, even if one fits."""
    return MaxNLocator(most, integer=True, min_n_ticks=1)


def index_along(axis: Axes, label: str, most: int = 6) -> None:
    """Label the x axis with what it counts, at whole numbers."""
    axis.set_xlabel(label)
    axis.xaxis.set_major_locator(whole_numbers(most))


def layers_along(axis: Axes) -> None:
    """Label the x axis with layers, at whole numbers."""
    index_along(axis, "layer")


def layer_rows(axis: Axes, layers: np.ndarray) -> None:
    """Label the rows of an image with layers, at most eight of them."""
    step = max(1, -(-len(layers) // 8))
    axis.set_yticks(range(0, len(layers), step), layers[::step].tolist())
    axis.set_ylabel("layer")


@dataclass(frozen=True)
class Drawing:
    """A saved figure, as a page shows it."""

    svg: str
    description: str = ""  # for screen readers
    files: tuple[str, ...] = ()  # next to the page: PNG, SVG and the numbers


@in_our_style()
def save(figure: figures.Figure, files: Files, name: str, numbers_in: str = "") -> Drawing:
    """Save NAME.png, NAME.svg, and NAME.figure.csv with the numbers drawn (unless `numbers_in` names their file)."""
    drawing = io.BytesIO()
    figure.set_dpi(mpl.rcParams["savefig.dpi"])
    plain_powers(figure)
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
    # The layout is final: saving with a layout engine would compute it again and draw twice.
    with mpl.rc_context({"figure.constrained_layout.use": False}):
        figure.set_layout_engine(None)
        with files.open(f"{name}.png") as picture:
            figure.savefig(picture, format="png", metadata={"Software": None})
        figure.savefig(drawing, format="svg", metadata={"Date": None})
    files.bytes(f"{name}.svg", drawing.getvalue())
    if not numbers_in:
        files.table(f"{name}.figure.csv", numbers(figure))
    saved = (f"{name}.png", f"{name}.svg", numbers_in or f"{name}.figure.csv")
    return Drawing(drawing.getvalue().decode(), description(figure), saved)

"""Style of figures, and how they are saved with their numbers and a description.

The caller's matplotlib style, backend and pyplot stay as they are. A drawing function is decorated
with `@in_our_style()` and starts with `subplots`, which does not use pyplot: no figure is
registered, none has to be closed, and no window opens.
"""

import io
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any

import matplotlib as mpl
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection, PathCollection, PolyCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation, MaxNLocator

from weightscope.core.errors import counted, expected
from weightscope.core.files import Files
from weightscope.core.results import given_axes
from weightscope.core.tables import Column, Table
from weightscope.model.layers.figures import ShownFigure

COLUMN = 3.4  # inches: one column of a two-column paper
# Okabe and Ito's colour-blind-safe palette; black is kept for reference lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D00", "#7F7F7F")
DASHES = ("-", "--", ":", "-.")
MARKERS = "os^vDPX"
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
BY_LAYER = "cividis"  # perceptually uniform and colour-blind safe
ON_GREY = "viridis"  # so is this; the middle of cividis is grey, as dots of the background are

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
    """Use our style within a block or function; restore the caller's settings afterwards."""
    with _one_at_a_time, matplotlib.style.context(["default", STYLE | more]):
        yield


class StyledFigure(ShownFigure):
    """A figure in our style; matplotlib would read the caller's settings when it draws."""

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
        raised = re.sub(r"\^{(.*)}", lambda power: power[1].translate(RAISED), label)
        return raised.replace(r"\times", " × ")


def plain_powers(figure: Figure) -> None:
    """Label logarithmic axes with `PlainPowers`, unless another formatter was set."""
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        if type(axis.get_major_formatter()) is LogFormatterSciNotation:
            axis.set_major_formatter(PlainPowers())
        minor = axis.get_minor_formatter()
        if type(minor) is LogFormatterSciNotation:
            axis.set_minor_formatter(PlainPowers(labelOnlyBase=minor.labelOnlyBase))


def subplots(
    rows: int = 1, columns: int = 1, *, figsize: tuple[float, float], **options: Any
) -> tuple[Any, Any]:
    """A figure and its axes, as `matplotlib.pyplot.subplots` gives them, or those of the caller."""
    axis = given_axes.get()
    if axis is not None:
        if not isinstance(axis, Axes):
            raise expected(axis, "ax", "a matplotlib Axes")
        if rows * columns > 1:
            problem = f"this figure has {rows * columns} panels and does not fit into one Axes"
            raise ValueError(f"{problem}; leave out `ax`")
        return axis.figure, axis if options.get("squeeze", True) else np.array([[axis]])
    figure = StyledFigure(figsize=figsize)
    return figure, figure.subplots(rows, columns, **options)


def legend_outside(figure: Figure, axis: Axes, place: str, **options: Any) -> None:
    """Draw a legend around our own figure; in a caller's, which may hold more, within the axis."""
    if isinstance(figure, StyledFigure):
        figure.legend(loc=f"outside {place}", **options)
    else:
        axis.legend(**options)


def head_style(head: int) -> dict[str, str]:
    """Colour and dash of a head, the same in every figure."""
    dash = DASHES[head // len(COLOURS) % len(DASHES)]
    return {"color": COLOURS[head % len(COLOURS)], "linestyle": dash}


def kind_styles(n_kinds: int) -> list[dict[str, Any]]:
    """Colour and marker of every kind of token; punctuation is green, other text grey."""
    special = (*COLOURS[:2], *COLOURS[3:7])
    colours = [special[kind % len(special)] for kind in range(n_kinds - 2)]
    colours += [COLOURS[2], COLOURS[7]]
    return [
        {"color": colour, "marker": MARKERS[kind % len(MARKERS)], "markersize": 3}
        for kind, colour in enumerate(colours)
    ]


def layer_colours(layers: np.ndarray) -> np.ndarray:
    """A colour for each layer, the first one darkest."""
    return mpl.colormaps[BY_LAYER](np.linspace(0, 1, len(layers)))


def layer_bar(
    figure: Figure, axis: Axes, layers: np.ndarray, label: str = "layer", colours: str = BY_LAYER
) -> None:
    """Draw the key to `layer_colours` next to an axis."""
    first, last = layers[0], max(layers[-1], layers[0] + 1)
    bar = figure.colorbar(ScalarMappable(Normalize(first, last), colours), ax=axis, label=label)
    bar.locator = whole_numbers()


def whole_numbers(most: int = 6) -> MaxNLocator:
    """Ticks of an axis of layers, heads or dimensions: about `most`, never at a half."""
    return MaxNLocator(most, integer=True, min_n_ticks=1)


def index_along(axis: Axes, label: str, most: int = 6) -> None:
    """Label the x axis of an index, at whole numbers."""
    axis.set_xlabel(label)
    axis.xaxis.set_major_locator(whole_numbers(most))


def layers_along(axis: Axes) -> None:
    """Label the x axis with layers, at whole numbers."""
    index_along(axis, "layer")


def layer_rows(axis: Axes, layers: np.ndarray) -> None:
    """Label the rows of an image with at most eight layers."""
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
def save(figure: Figure, files: Files, name: str, numbers_in: str = "") -> Drawing:
    """Save NAME.png, NAME.svg and, unless `numbers_in` names a file, NAME.figure.csv."""
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


# Numbers and a text description, read from the figure itself.

UNNAMED = "_"  # prefix of the labels that matplotlib makes up
MOST_DESCRIBED = 6  # panels
HEADER = ("panel", "series", "x", "y", "value")
# Kind, name, and the x, y and value of each point.
Series = tuple[str, str, np.ndarray, np.ndarray, np.ndarray]


def numbers(figure: Figure) -> Table:
    """Every number drawn, one row per point: panel, series, x, y, and the value of a map's cell.

    Reference lines across a panel and colour bars are left out. Where an axis has named ticks
    (bars, rows of a map), the columns `x name` and `y name` hold the names.
    """
    columns: list[list[Any]] = [[] for _ in range(len(HEADER) + 2)]
    for number, axis in enumerate(_panels(figure), 1):
        names = [_names(side) for side in (axis.xaxis, axis.yaxis)]
        for place, (_, label, x, y, value) in enumerate(_series(axis), 1):
            ticks = []
            for named, side in zip(names, (x, y), strict=True):
                ticks.append([named.get(float(place_on), "") for place_on in side])
            repeated = ([_called(axis, number)] * len(x), [label or str(place)] * len(x))
            points: tuple[Iterable[Any], ...] = (*repeated, x, y, value, *ticks)
            for column, values in zip(columns, points, strict=True):
                column.extend(values)  # `+=` would add to an array
    header = (*HEADER, "x name", "y name")
    table = [Column(name, values) for name, values in zip(header, columns, strict=True)]
    return Table([column for column in table if column.name in HEADER[:4] or _tells(column.values)])


def description(figure: Figure) -> str:
    """Describe each panel without TeX: axes, number of lines, points or cells, and ranges."""
    sentences = []
    panels = list(_panels(figure))
    for number, axis in enumerate(panels[:MOST_DESCRIBED], 1):
        kinds: dict[str, list[Series]] = {}
        for series in _series(axis):
            kinds.setdefault(series[0], []).append(series)
        drawn = [_summary(axis, kind, members) for kind, members in kinds.items()]
        sentences.append(f"{_called(axis, number)}: {'; '.join(drawn) or 'nothing'}.")
    if more := len(panels) - len(sentences):
        sentences.append(f"And {counted(more, 'panel')} more of the same kind.")
    return " ".join(sentences)


def _summary(axis: Axes, kind: str, series: list[Series]) -> str:
    x, y, value = (np.concatenate([member[k] for member in series]) for k in (2, 3, 4))
    if kind == "cell":
        return f"map of {counted(len(value), 'cell')}, {_range('values', value)}"
    across = _untexed(axis.get_xlabel()) or "x"
    up = _untexed(axis.get_ylabel()) or "y"
    logarithmic = " on a logarithmic scale" if axis.get_yscale() == "log" else ""
    count = counted(len(x), kind) if kind in {"point", "bar"} else counted(len(series), kind)
    return f"{count}, {_range(across, x)}, {_range(up, y)}{logarithmic}"


def _range(name: str, values: np.ndarray) -> str:
    known = values[np.isfinite(values)]
    if not len(known):
        return f"{name} unknown"
    return f"{name} from {known.min():.3g} to {known.max():.3g}"


def _panels(figure: Figure) -> Iterator[Axes]:
    """Axes with something drawn in them, except colour bars."""
    for axis in figure.axes:
        if axis.get_label() != "<colorbar>" and any(True for _ in _series(axis)):
            yield axis


def _called(axis: Axes, number: int) -> str:
    titles = (_untexed(axis.get_title(loc)) for loc in ("center", "left", "right"))
    fixed = (text for text in axis.texts if text.get_transform() is axis.transAxes)
    inside = (_untexed(text.get_text()) for text in fixed)
    return next(filter(None, (*titles, *inside, _untexed(axis.get_ylabel()))), f"panel {number}")


def _series(axis: Axes) -> Iterator[Series]:
    """Kind, name, x, y and value of everything drawn in data coordinates."""
    for image in axis.images:
        cells: np.ndarray = np.ma.filled(np.ma.asarray(image.get_array(), float), np.nan)
        rows, columns = np.indices(cells.shape[:2])
        value = cells.reshape(rows.size, -1)[:, 0]
        yield "cell", _named(image), columns.ravel(), rows.ravel(), value
    for line in axis.lines:
        x, y = (np.ravel(np.asarray(side, float)) for side in line.get_data(orig=False))
        if line.get_transform() is axis.transData and len(x):  # a reference line has its own
            kind = "point" if line.get_linestyle() == "None" else "line"
            yield kind, _named(line), x, y, np.full(len(x), np.nan)
    for drawn in axis.collections:
        if isinstance(drawn, PathCollection):
            offsets: np.ndarray = np.ma.filled(np.ma.asarray(drawn.get_offsets(), float), np.nan)
            colours = drawn.get_array()
            value = np.full(len(offsets), np.nan) if colours is None else np.asarray(colours, float)
            yield "point", _named(drawn), offsets[:, 0], offsets[:, 1], value
        # Bands below the axes shade the background.
        elif isinstance(drawn, PolyCollection | LineCollection) and drawn.get_zorder() > 0:
            kind = "interval" if isinstance(drawn, LineCollection) else "band"
            for path in drawn.get_paths():
                x, y = np.asarray(path.vertices, float).T
                yield kind, _named(drawn) or kind, x, y, np.full(len(x), np.nan)
    for bars in axis.containers:
        boxes = list(getattr(bars, "patches", ()))
        if boxes:
            x, y = (np.array(side) for side in zip(*(box.get_xy() for box in boxes), strict=True))
            wide = np.array([box.get_width() for box in boxes])
            high = np.array([box.get_height() for box in boxes])
            lying = getattr(bars, "orientation", "vertical") == "horizontal"
            ends = (x + wide, y + high / 2) if lying else (x + wide / 2, y + high)
            yield "bar", _named(bars), *ends, wide if lying else high


def _names(axis: Any) -> dict[float, str]:
    """Named ticks of an axis by position; empty for a numeric axis."""
    if type(axis.get_major_formatter()).__name__ not in {"FixedFormatter", "FuncFormatter"}:
        return {}
    labels = [_untexed(label.get_text()) for label in axis.get_majorticklabels()]
    places = zip(axis.get_majorticklocs(), labels, strict=False)
    return {float(tick): text for tick, text in places if text}


def _named(artist: Any) -> str:
    label = str(artist.get_label())
    return "" if label.startswith(UNNAMED) else _untexed(label)


def _tells(values: np.ndarray) -> bool:
    return bool(np.isfinite(values).any()) if values.dtype.kind == "f" else any(map(str, values))


def _untexed(text: str) -> str:
    """A label without TeX signs: `$\\sigma_i(W_{QK})$` becomes sigma_i(W_QK)."""
    kept = text.replace(r"\$", "\0")
    plain = re.sub(r"\\(?:tilde|mathrm|text|hat|bar)\b|\\[,;! ]|[{}$]", "", kept)
    bare = plain.replace(r"\|", "|").replace("\\", "")
    return " ".join(bare.replace("\0", "$").split())

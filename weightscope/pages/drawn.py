"""What a figure shows, read from the figure itself: its numbers as a table, and a text description."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection, PolyCollection
from matplotlib.figure import Figure

from weightscope.errors import counted
from weightscope.tables import Column, Table

UNNAMED = "_"  # prefix of the labels that matplotlib makes up
MOST_DESCRIBED = 6  # panels
HEADER = ("panel", "series", "x", "y", "value")
# Kind, name, and the x, y and value of each point.
Series = tuple[str, str, np.ndarray, np.ndarray, np.ndarray]


def numbers(figure: Figure) -> Table:
    """Every number drawn, one row per point: panel, series, x, y, and the value of a map's cell.

    Reference lines across a panel and colour bars are left out. Where an axis has named ticks (bars, rows of a map),
    the columns `x name` and `y name` hold the names.
    """
    columns: list[list[Any]] = [[] for _ in range(len(HEADER) + 2)]
    for number, axis in enumerate(_panels(figure), 1):
        names = [_names(side) for side in (axis.xaxis, axis.yaxis)]
        for place, (_, label, x, y, value) in enumerate(_series(axis), 1):
            ticks = [[named.get(float(c), "") for c in side] for named, side in zip(names, (x, y), strict=True)]
            repeated = ([_called(axis, number)] * len(x), [label or str(place)] * len(x))
            points: tuple[Iterable[Any], ...] = (*repeated, x, y, value, *ticks)
            for column, values in zip(columns, points, strict=True):
                column.extend(values)  # `+=` would add to an array
    table = [Column(name, values) for name, values in zip((*HEADER, "x name", "y name"), columns, strict=True)]
    return Table([column for column in table if column.name in HEADER[:4] or _tells(column.values)])


def description(figure: Figure) -> str:
    """Describe each panel: its axes, how many lines, points or cells, and their ranges; formulas without TeX signs."""
    sentences = []
    panels = list(_panels(figure))
    for number, axis in enumerate(panels[:MOST_DESCRIBED], 1):
        kinds: dict[str, list[Series]] = {}
        for series in _series(axis):
            kinds.setdefault(series[0], []).append(series)
        drawn = [_summary(axis, kind, members) for kind, members in kinds.items()]
        sentences.append(f"{_called(axis, number)}: {'; '.join(drawn) or 'nothing'}.")
    more = len(panels) - len(sentences)
    return " ".join([*sentences, *([f"And {counted(more, 'panel')} more of the same kind."] if more else [])])


def _summary(axis: Axes, kind: str, series: list[Series]) -> str:
    x, y, value = (np.concatenate([member[k] for member in series]) for k in (2, 3, 4))
    if kind == "cell":
        return f"map of {counted(len(value), 'cell')}, {_range('values', value)}"
    across, up = (_untexed(label) or name for label, name in ((axis.get_xlabel(), "x"), (axis.get_ylabel(), "y")))
    logarithmic = " on a logarithmic scale" if axis.get_yscale() == "log" else ""
    count = counted(len(x), kind) if kind in {"point", "bar"} else counted(len(series), kind)
    return f"{count}, {_range(across, x)}, {_range(up, y)}{logarithmic}"


def _range(name: str, values: np.ndarray) -> str:
    known = values[np.isfinite(values)]
    return f"{name} from {known.min():.3g} to {known.max():.3g}" if len(known) else f"{name} unknown"


def _panels(figure: Figure) -> Iterator[Axes]:
    """Axes with something drawn in them, except colour bars."""
    for axis in figure.axes:
        if axis.get_label() != "<colorbar>" and any(True for _ in _series(axis)):
            yield axis


def _called(axis: Axes, number: int) -> str:
    titles = (_untexed(axis.get_title(loc)) for loc in ("center", "left", "right"))
    inside = (_untexed(text.get_text()) for text in axis.texts if text.get_transform() is axis.transAxes)
    return next(filter(None, (*titles, *inside, _untexed(axis.get_ylabel()))), f"panel {number}")


def _series(axis: Axes) -> Iterator[Series]:
    """Kind, name, x, y and value of everything drawn in data coordinates."""
    for image in axis.images:
        cells: np.ndarray = np.ma.filled(np.ma.asarray(image.get_array(), float), np.nan)
        rows, columns = np.indices(cells.shape[:2])
        yield "cell", _named(image), columns.ravel(), rows.ravel(), cells.reshape(rows.size, -1)[:, 0]
    for line in axis.lines:
        x, y = (np.ravel(np.asarray(side, float)) for side in line.get_data(orig=False))
        if line.get_transform() == axis.transData and len(x):
            kind = "point" if line.get_linestyle() == "None" else "line"
            yield kind, _named(line), x, y, np.full(len(x), np.nan)
    for drawn in axis.collections:
        if isinstance(drawn, PathCollection):
            offsets: np.ndarray = np.ma.filled(np.ma.asarray(drawn.get_offsets(), float), np.nan)
            colours = drawn.get_array()
            value = np.full(len(offsets), np.nan) if colours is None else np.asarray(colours, float)
            yield "point", _named(drawn), offsets[:, 0], offsets[:, 1], value
        elif (
            isinstance(drawn, PolyCollection | LineCollection) and drawn.get_zorder() > 0
        ):  # others shade the background
            kind = "interval" if isinstance(drawn, LineCollection) else "band"
            for path in drawn.get_paths():
                x, y = np.asarray(path.vertices, float).T
                yield kind, _named(drawn) or kind, x, y, np.full(len(x), np.nan)
    for bars in axis.containers:
        boxes = list(getattr(bars, "patches", ()))
        if boxes:
            x, y = (np.array([getattr(box, f"get_{side}")() for box in boxes]) for side in ("x", "y"))
            wide, high = (np.array([getattr(box, f"get_{side}")() for box in boxes]) for side in ("width", "height"))
            lying = getattr(bars, "orientation", "vertical") == "horizontal"
            ends = (x + wide, y + high / 2) if lying else (x + wide / 2, y + high)
            yield "bar", _named(bars), *ends, wide if lying else high


def _names(axis: Any) -> dict[float, str]:
    """Named ticks of an axis by position; empty for a numeric axis."""
    ticks, labels = axis.get_majorticklocs(), [label.get_text() for label in axis.get_majorticklabels()]
    named = {float(tick): _untexed(text) for tick, text in zip(ticks, labels, strict=False)}
    is_named = type(axis.get_major_formatter()).__name__ in {"FixedFormatter", "FuncFormatter"}
    return {tick: text for tick, text in named.items() if text} if is_named else {}


def _named(artist: Any) -> str:
    label = str(artist.get_label())
    return "" if label.startswith(UNNAMED) else _untexed(label)


def _tells(values: np.ndarray) -> bool:
    return bool(np.isfinite(values).any()) if values.dtype.kind == "f" else any(map(str, values))


def _untexed(text: str) -> str:
    """A label without TeX signs: `$\\sigma_i(W_{QK})$` becomes sigma_i(W_QK)."""
    kept = text.replace(r"\$", "\0")
    bare = re.sub(r"\\(?:tilde|mathrm|text|hat|bar)\b|\\[,;! ]|[{}$]", "", kept).replace(r"\|", "|").replace("\\", "")
    return " ".join(bare.replace("\0", "$").split())

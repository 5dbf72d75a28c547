"""What a figure shows, read from the figure itself: its numbers as a table, and a description for who cannot see it."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection, PolyCollection
from matplotlib.figure import Figure

from weightscope.errors import counted
from weightscope.tables import Column, Table

UNNAMED = "_"  # how matplotlib's own labels begin
MOST_DESCRIBED = 6  # panels
HEADER = ("panel", "series", "x", "y", "value")
# Its kind in the description, its name, and x, y and value of each point.
Series = tuple[str, str, np.ndarray, np.ndarray, np.ndarray]


def numbers(figure: Figure) -> Table:
    """Every number that is drawn, a row a point: panel, series, x, y, and the value of a map's cell.

    Reference lines that span a panel are left out, and colour bars. Where an axis names its places, as it does those of
    bars and of a map's rows, `x name` and `y name` have the names.
    """
    columns: list[list[Any]] = [[] for _ in range(len(HEADER) + 2)]
    for number, axis in enumerate(_panels(figure), 1):
        names = [_names(own) for own in (axis.xaxis, axis.yaxis)]
        for place, (_, label, x, y, value) in enumerate(_series(axis), 1):
            of_points = [[called.get(float(at), "") for at in own] for called, own in zip(names, (x, y), strict=True)]
            repeated = ([_called(axis, number)] * len(x), [label or str(place)] * len(x))
            points: tuple[Iterable[Any], ...] = (*repeated, x, y, value, *of_points)
            for column, own in zip(columns, points, strict=True):
                column.extend(own)  # `+=` would add to an array
    table = [Column(name, own) for name, own in zip((*HEADER, "x name", "y name"), columns, strict=True)]
    return Table([column for column in table if column.name in HEADER[:4] or _tells(column.values)])


def description(figure: Figure) -> str:
    """What is drawn, panel by panel: axes, how many lines, points or cells, and from where to where they go.

    Titles and names of axes are said as they are typed, their formulas without signs of TeX.
    """
    said = []
    panels = list(_panels(figure))
    for number, axis in enumerate(panels[:MOST_DESCRIBED], 1):
        kinds: dict[str, list[Series]] = {}
        for one in _series(axis):
            kinds.setdefault(one[0], []).append(one)
        drawn = [_summary(axis, kind, own) for kind, own in kinds.items()]
        said.append(f"{_called(axis, number)}: {'; '.join(drawn) or 'nothing'}.")
    more = len(panels) - len(said)
    return " ".join([*said, *([f"And {counted(more, 'panel')} more of the same kind."] if more else [])])


def _summary(axis: Axes, kind: str, series: list[Series]) -> str:
    x, y, value = (np.concatenate([one[k] for one in series]) for k in (2, 3, 4))
    if kind == "cell":
        return f"map of {counted(len(value), 'cell')}, {_range('values', value)}"
    across, up = (_untexed(label) or name for label, name in ((axis.get_xlabel(), "x"), (axis.get_ylabel(), "y")))
    logarithmic = " on a logarithmic scale" if axis.get_yscale() == "log" else ""
    of = counted(len(x), kind) if kind in {"point", "bar"} else counted(len(series), kind)
    return f"{of}, {_range(across, x)}, {_range(up, y)}{logarithmic}"


def _range(name: str, values: np.ndarray) -> str:
    known = values[np.isfinite(values)]
    return f"{name} from {known.min():.3g} to {known.max():.3g}" if len(known) else f"{name} unknown"


def _panels(figure: Figure) -> Iterator[Axes]:
    """Axes with something drawn in them, colour bars apart."""
    for axis in figure.axes:
        if axis.get_label() != "<colorbar>" and any(True for _ in _series(axis)):
            yield axis


def _called(axis: Axes, number: int) -> str:
    titles = (_untexed(axis.get_title(loc)) for loc in ("center", "left", "right"))
    inside = (_untexed(text.get_text()) for text in axis.texts if text.get_transform() is axis.transAxes)
    return next(filter(None, (*titles, *inside, _untexed(axis.get_ylabel()))), f"panel {number}")


def _series(axis: Axes) -> Iterator[Series]:
    """Kind, name, x, y and value of everything that is drawn from numbers in a panel's own coordinates."""
    for image in axis.images:
        cells: np.ndarray = np.ma.filled(np.ma.asarray(image.get_array(), float), np.nan)
        rows, columns = np.indices(cells.shape[:2])
        yield "cell", _named(image), columns.ravel(), rows.ravel(), cells.reshape(rows.size, -1)[:, 0]
    for line in axis.lines:
        x, y = (np.ravel(np.asarray(own, float)) for own in line.get_data(orig=False))
        if line.get_transform() == axis.transData and len(x):
            kind = "point" if line.get_linestyle() == "None" else "line"
            yield kind, _named(line), x, y, np.full(len(x), np.nan)
    for drawn in axis.collections:
        if isinstance(drawn, PathCollection):
            at: np.ndarray = np.ma.filled(np.ma.asarray(drawn.get_offsets(), float), np.nan)
            colours = drawn.get_array()
            value = np.full(len(at), np.nan) if colours is None else np.asarray(colours, float)
            yield "point", _named(drawn), at[:, 0], at[:, 1], value
        elif isinstance(drawn, PolyCollection | LineCollection) and drawn.get_zorder() > 0:  # else a shade behind all
            kind = "interval" if isinstance(drawn, LineCollection) else "band"
            for path in drawn.get_paths():
                x, y = np.asarray(path.vertices, float).T
                yield kind, _named(drawn) or kind, x, y, np.full(len(x), np.nan)
    for bars in axis.containers:
        boxes = list(getattr(bars, "patches", ()))
        if boxes:
            x, y = (np.array([getattr(box, f"get_{own}")() for box in boxes]) for own in ("x", "y"))
            wide, high = (np.array([getattr(box, f"get_{own}")() for box in boxes]) for own in ("width", "height"))
            lying = getattr(bars, "orientation", "vertical") == "horizontal"
            ends = (x + wide, y + high / 2) if lying else (x + wide / 2, y + high)
            yield "bar", _named(bars), *ends, wide if lying else high


def _names(axis: Any) -> dict[float, str]:
    """What an axis calls its places, where they are named and not measured."""
    ticks, labels = axis.get_majorticklocs(), [label.get_text() for label in axis.get_majorticklabels()]
    named = {float(at): _untexed(text) for at, text in zip(ticks, labels, strict=False)}
    is_named = type(axis.get_major_formatter()).__name__ in {"FixedFormatter", "FuncFormatter"}
    return {at: text for at, text in named.items() if text} if is_named else {}


def _named(artist: Any) -> str:
    label = str(artist.get_label())
    return "" if label.startswith(UNNAMED) else _untexed(label)


def _tells(values: np.ndarray) -> bool:
    return bool(np.isfinite(values).any()) if values.dtype.kind == "f" else any(map(str, values))


def _untexed(text: str) -> str:
    """A label without signs of TeX: `$\\sigma_i(W_{QK})$` is sigma_i(W_QK)."""
    kept = text.replace(r"\$", "\0")
    bare = re.sub(r"\\(?:tilde|mathrm|text|hat|bar)\b|\\[,;! ]|[{}$]", "", kept).replace(r"\|", "|").replace("\\", "")
    return " ".join(bare.replace("\0", "$").split())

"""A pair of tensors as arrays, along rows and along columns, and what explains one by the other.

A transformation T acts along the first axis of an array: rows of a matrix, entries of a vector.
Columns are the rows of the transpose, so each is written once. It is tried on a few rows and
columns, then on all values at hand: a deed is named only if T(A) gives every value of B that
changed, up to the stored rounding, and leaves the others as they are.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import prod, sqrt
from typing import NamedTuple

import numpy as np

from weightscope.checkpoint.blocks import Block, row_width
from weightscope.checkpoint.checkpoint import Tensor, WholeTensor
from weightscope.core.results import ShowsShapes
from weightscope.model.metrics.spectra import evenly_spread
from weightscope.pairs.deeds.deed import Deed
from weightscope.pairs.deeds.pair import SAMPLED_ROWS, Pair, few_rows_each
from weightscope.pairs.deeds.recomputed import StoredCells, stored_cells
from weightscope.pairs.deeds.rounding import FRACTION, GROUPS, SMALLEST, grid_of, precision
from weightscope.pairs.deeds.thresholds import (
    CLEARER,
    EXACT,
    FARTHEST,
    FEW_ROWS,
    MARGIN,
    PACKED,
    QUANTISED,
    SMALLEST_CODES,
    TUNED,
)

OF_VOCABULARY = ("tokens", "unembedding")  # roles with a row for each token
# roles that are looked up by row
TABLES = (*OF_VOCABULARY, "positions", "relative_positions", "types")
SPREAD = 64  # rows or columns that a deed is tried on first
EVERYWHERE = slice(None), slice(None)  # all rows and columns
AT_ONCE = 1 << 20  # values compared at a time
LARGEST_CODE = 255  # largest of integers that may be codes without their scales
LARGEST_WHOLE = 1 << 24  # values of a tensor seen whole; larger ones in some rows and columns
LEAST_GROUP = min(filter(None, GROUPS))  # neighbours in a row that may share a grid of their own
FIRST_VALUES = 1 << 16  # values that show how precise a tensor is


class Sizes(NamedTuple):
    """Sizes of the row that a tensor belongs to, which deeds need."""

    role: str
    n_heads: int = 1
    n_kv_heads: int = 1
    head_dim: int = 1
    turned: int = 0  # dimensions of a head that a rotation turns; 0 without one
    stacked: int = 0  # experts of one tensor

    @property
    def plain_role(self) -> str:
        """The role of a bias's weight, or its own."""
        return self.role.removesuffix(".bias")

    @property
    def of_attention(self) -> bool:
        """True for the projections of heads."""
        return {*self.plain_role.split("+")} <= {*"qkvo"}

    @property
    def heads(self) -> int:
        """Heads along the axis that this role divides into heads."""
        return self.n_kv_heads if self.plain_role in ("k", "v", "k_norm") else self.n_heads

    @property
    def rows(self) -> str:
        """The rows in words."""
        return "rows of the vocabulary" if self.plain_role in OF_VOCABULARY else "rows"


@dataclass(frozen=True, eq=False, repr=False)
class Side(ShowsShapes):
    """Values of one tensor, (n, c), and the rounding that their dtype or grid may have cost."""

    values: np.ndarray
    unit: float = 2.0**-24  # half a step of a float, relative
    least: float = 2.0**-126  # its smallest normal number
    half: np.ndarray | None = None  # half-steps of stored grids, (n, c); None of floats

    @property
    def room(self) -> np.ndarray:
        """Half a step at each value, (n, c)."""
        if self.half is not None:
            return self.half
        return self.unit * np.maximum(np.abs(self.values), self.least)

    @property
    def turned(self) -> "Side":
        """The transpose."""
        return replace(self, values=self.values.T, half=None if self.half is None else self.half.T)

    @property
    def flat(self) -> "Side":
        """One value to a row, (n c, 1)."""
        half = None if self.half is None else self.half.reshape(-1, 1)
        return replace(self, values=self.values.reshape(-1, 1), half=half)

    def at(self, *places: np.ndarray | slice) -> "Side":
        """Some rows, and of these the columns that come second."""
        half = None if self.half is None else _at(self.half, places)
        return Side(_at(self.values, places), self.unit, self.least, half)

    def times(self, factors: np.ndarray | float) -> "Side":
        """The values multiplied, in float64."""
        half = None if self.half is None else self.half * np.abs(factors)
        return replace(self, values=self.values.astype(np.float64) * factors, half=half)


def _at(values: np.ndarray, places: Sequence[np.ndarray | slice]) -> np.ndarray:
    if len(places) == 2 and not any(isinstance(each, slice) for each in places):
        return values.T[np.ix_(*places[::-1])].T  # whole rows first would take a copy of them
    for axis, each in enumerate(places):
        values = values[(slice(None),) * axis + (each,)]
    return values


def explained(x: Side, y: Side, *, computed: bool = False) -> np.ndarray:
    """True for rows (n,) of y that are x's up to rounding, each value and all together.

    computed: x was calculated. Values that were only moved, between floats of one kind, have to be
    equal.
    """
    copied = not computed and x.half is None and y.half is None and x.unit == y.unit
    rows = max(1, AT_ONCE // max(1, y.values.shape[1]))
    places = [slice(start, start + rows) for start in range(0, len(y.values), rows)]
    parts = [_explained(x.at(each), y.at(each), copied) for each in places]
    return np.concatenate(parts) if parts else np.ones(0, bool)


def _explained(x: Side, y: Side, copied: bool) -> np.ndarray:
    p, q = x.values, y.values
    equal = (p == q) | ((p != p) & (q != q))
    if copied or equal.all():
        return np.asarray(equal.all(axis=1))
    with np.errstate(all="ignore"):
        off = np.where(equal, 0.0, np.abs(np.subtract(p, q, dtype=np.float64)))
        of_x, of_y = (np.nan_to_num(side.room.astype(np.float64), posinf=0.0) for side in (x, y))
        each = (off <= FARTHEST * (of_x + of_y)).all(axis=1)
        usual = (np.vecdot(of_x, of_x) + np.vecdot(of_y, of_y)) / 3
        return np.asarray(each & (np.vecdot(off, off) <= MARGIN**2 * usual))


def _each_explained(x: Side, y: Side, *, computed: bool = False) -> np.ndarray:
    """True for values of y that are x's up to rounding, (n, c)."""
    return explained(x.flat, y.flat, computed=computed).reshape(y.values.shape)


def error_of(x: np.ndarray, y: np.ndarray) -> float:
    """|x - y| / |y| (Frobenius); infinite where not finite, or y is zero and x is not."""
    with np.errstate(all="ignore"):
        size = float(np.linalg.norm(y))
        apart = float(np.linalg.norm(np.subtract(x, y, dtype=np.float64)))
    if not np.isfinite(apart + size):
        return np.inf
    if not size:
        return 0.0 if apart == 0 else np.inf
    return apart / size


class View:
    """Both tensors with the axis that deeds act along first, and which of its rows changed."""

    def __init__(self, x: Side, y: Side, *, columns: bool = False, is_whole: bool = True) -> None:
        self.x, self.y, self.columns, self.is_whole = x, y, columns, is_whole
        self.changed = ~explained(x, y)  # (n,)
        rows = _spread_among(self.changed)
        # and columns: tried first
        self.few = rows, _spread_among(~explained(x.at(rows).turned, y.at(rows).turned))
        self._in_place = np.arange(len(self.changed))
        self.left = float("nan")  # |T(x) - y| / |y| of the deed that gave y
        self.others: np.ndarray | None = None  # (n, c) values that a deed need not give

    @property
    def is_packed(self) -> bool:
        """True if one of both lies on a stored grid."""
        return self.x.half is not None or self.y.half is not None

    @property
    def where(self) -> str:
        """The number of rows that changed, and the first one."""
        first = np.argmax(self.changed)
        return f"{np.count_nonzero(self.changed)} of {len(self.changed)}, from {first}"

    @property
    def has_unlike(self) -> bool:
        """True if a row no longer resembles its former values."""
        x, y = (side.values.astype(np.float64) for side in (self.x, self.y))
        sizes = np.sqrt(np.vecdot(x, x) * np.vecdot(y, y))
        return bool((np.vecdot(x, y) < TUNED * sizes).any())

    @property
    def on_grids(self) -> "View":
        """With the room of the grids that floats lie on, as in a dequantised copy."""
        x, y = map(_on_its_grid, (self.x, self.y))
        return View(x, y, columns=self.columns, is_whole=self.is_whole)

    @property
    def sparing(self) -> "View":
        """This view, for deeds that give most values that changed."""
        view = copy(self)
        view.others = np.zeros(self.y.values.shape, bool)
        return view

    @property
    def where_others(self) -> str:
        """The rows or columns with other values if these are few, else their share; or none."""
        if self.others is None or not self.others.any():
            return ""
        for axis, which in ((1, "rows"), (0, "columns")):
            touched = np.atleast_1d(self.others.any(axis=axis))
            if touched.sum() <= FEW_ROWS * len(touched):
                which = "columns" if self.columns == (which == "rows") else "rows"
                return f"{touched.sum():,} of {len(touched):,} {which}"
        return f"{self.others.mean():.2g} of the values"

    def named(self, done: Deed) -> Deed:
        """A deed that gave y along this view's axis."""
        return replace(done, columns=self.columns, left=self.left)

    def moves(self, places: np.ndarray) -> bool:
        """True if y is x with its rows in these places."""
        rows, columns = self.few
        if (places == self._in_place).all():
            return False
        few, y = self.x.at(places[rows], columns), self.y.at(rows, columns)
        if self.others is None:
            is_near = explained(few, y).all()
        else:
            is_near = 2 * np.count_nonzero(_each_explained(few, y)) > few.values.size
        return bool(is_near) and self.gives(self.x.at(places), computed=False)

    def may_give(self, few: Side, *, computed: bool = True) -> bool:
        """False if T(x) at the `few` rows and columns rules out that `gives` is true."""
        y = self.y.at(*self.few)
        if self.others is None:
            return bool(explained(few, y, computed=computed).all())
        changed = np.count_nonzero(~_each_explained(self.x.at(*self.few), y))
        return bool(2 * np.count_nonzero(~_each_explained(few, y, computed=computed)) < changed)

    def gives(self, made: Side, *, computed: bool = True) -> bool:
        """True if y is T(x) up to rounding, and clearly nearer to it than to x."""
        if self.others is not None:
            return self._gives_most(made, computed)
        if not explained(made.at(*self.few), self.y.at(*self.few), computed=computed).all():
            return False  # most deeds end here
        sides = [(made, self.y)]
        if self.is_whole:
            sides.append((made.turned, self.y.turned))
        if not self.changed.any():
            return False
        if not all(explained(*side, computed=computed).all() for side in sides):
            return False
        before, after, now = (side.values[self.changed] for side in (self.x, self.y, made))
        self.left = error_of(now, after)
        return self.left <= CLEARER * error_of(before, after)

    def _gives_most(self, made: Side, computed: bool) -> bool:
        """True if more than half of the values that changed are T(x); keeps the others."""
        for places in (self.few, EVERYWHERE):
            x, y, now = (side.at(*places) for side in (self.x, self.y, made))
            others = ~_each_explained(now, y, computed=computed)
            changed = ~_each_explained(x, y)
            if 2 * np.count_nonzero(others) >= np.count_nonzero(changed):
                return False
        before, after, now_there = (side.values[changed & ~others] for side in (x, y, now))
        self.left = error_of(now_there, after)
        if not self.left <= CLEARER * error_of(before, after):
            return False
        self.others = others
        return True

    @property
    def tolerance(self) -> float:
        """|error| / |y| that rounding both may cause."""
        with np.errstate(all="ignore"):
            room = float(np.linalg.norm(self.x.room + self.y.room))
            size = float(np.linalg.norm(self.y.values))
        return max(MARGIN * room / sqrt(3) / size, EXACT) if 0 < size < np.inf else EXACT


def _on_its_grid(side: Side) -> Side:
    """Floats with the half-steps of the grids that their rows or columns lie on, if they do."""
    if side.half is not None:
        return side
    if grid_of(side.values[evenly_spread(len(side.values), SAMPLED_ROWS)]):
        return replace(side, half=_half_of_least_gaps(side.values))
    columns = side.values.T
    if grid_of(columns[evenly_spread(len(columns), SAMPLED_ROWS)]):
        return replace(side, half=_half_of_least_gaps(columns).T)
    return side


def _half_of_least_gaps(rows: np.ndarray) -> np.ndarray:
    """Half the least gap between different values of each group of neighbours: rows (n, width)."""
    width = rows.shape[1] if rows.shape[1] % LEAST_GROUP else LEAST_GROUP
    gaps = np.diff(np.sort(rows.reshape(-1, width), axis=1), axis=1)
    least = np.where(gaps > 0, gaps, np.inf).min(axis=1, keepdims=True, initial=np.inf) / 2
    half = np.where(np.isinf(least), 0.0, least).astype(np.float32)
    return half.repeat(width, axis=1).reshape(rows.shape)


def _spread_among(changed: np.ndarray) -> np.ndarray:
    """A few of all places, evenly spread, half of them among those that changed."""
    places = np.flatnonzero(changed)
    few = places[evenly_spread(len(places), SPREAD // 2)] if len(places) else places
    return np.union1d(few, evenly_spread(len(changed), SPREAD // 2)).astype(int)


def tolerance_of(pair: Pair) -> float:
    """|error| / |x| that storing both may cause."""
    errors = [EXACT]
    for tensor in (pair.a, pair.b):
        if tensor.ends() is not None:
            errors.append(_error_of_grids(tensor))
        elif tensor.dtype in FRACTION or tensor.dtype in ("F32", "F64"):
            held = precision(_first_values(tensor))
            bits = min(FRACTION.get(held, 23), FRACTION.get(tensor.dtype, 23))
            errors.append(2.0**-bits / sqrt(12))
        else:
            errors.append(PACKED)
    return MARGIN * min(max(errors), QUANTISED)


@np.errstate(all="ignore")
def _error_of_grids(tensor: Tensor) -> float:
    """|error| / |x| of rounding to the grids that a tensor stores, in its first block."""
    _, start, stop = next(Pair(tensor, tensor).blocks())
    cells = stored_cells(tensor, tensor)
    half = np.concatenate(_half_steps(tensor, cells, start, stop))
    values = Block(tensor, start, stop).values().astype(np.float64)
    finite = np.isfinite(half) & np.isfinite(values)
    errors, size = (float(np.linalg.norm(each[finite])) for each in (half, values))
    return errors / sqrt(3) / (size or 1.0)


def _half_steps(
    tensor: Tensor, cells: Iterator[StoredCells], start: int, stop: int
) -> list[np.ndarray]:
    """Half-steps of the grids of values [start, stop), taken from their cells."""
    pieces = len([*few_rows_each(stop - start, row_width(tensor.shape))])
    here = islice(cells, pieces)
    return [np.broadcast_to(each.grids.half, each.off.shape).ravel() for each in here]


def _first_values(tensor: Tensor) -> np.ndarray:
    stop = min(prod(tensor.shape), FIRST_VALUES)
    all_read = prod(tensor.shape) if isinstance(tensor, WholeTensor) else stop
    return Block(tensor, 0, all_read).values()[:stop].astype(np.float32)


def views_of(pair: Pair, most: int) -> list[View]:
    """Both along their rows and, of a matrix, along their columns.

    All values, or some rows and columns of a tensor of more than `most`.
    """
    shape, is_matrix = pair.a.shape, len(pair.a.shape) > 1
    if prod(shape) > most:
        return _some_views(pair, *_spread_rows_and_columns(pair))
    width = shape[-1] if is_matrix else 1
    x, y = (_side(tensor, [*_read(tensor)], width) for tensor in (pair.a, pair.b))
    return [View(x, y), *([View(x.turned, y.turned, columns=True)] if is_matrix else [])]


def parts_of(pair: Pair, spread: Sequence[View], most: int) -> Iterator[list[View]]:
    """Rows and columns of a large tensor, about `most` values at a time.

    Each part has the rows and columns of `spread`, its `views_of`, too, so that a deed of all
    parts is one deed.
    """
    n_rows, width = _rows_and_width(pair.a)
    count = -(-prod(pair.a.shape) // most)
    cuts = (np.array_split(np.arange(n), count) for n in (n_rows, width))
    for rows, columns in zip(*cuts, strict=True):
        yield _some_views(pair, rows, columns, spread)


def _rows_and_width(tensor: Tensor) -> tuple[int, int]:
    width = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    return prod(tensor.shape) // width, width


def _spread_rows_and_columns(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    """A few numbers of rows, and of columns."""
    n_rows, width = _rows_and_width(pair.a)
    return evenly_spread(n_rows, SPREAD), evenly_spread(width, SPREAD)


def _some_views(
    pair: Pair, rows: np.ndarray, columns: np.ndarray, spread: Sequence[View] = ()
) -> list[View]:
    """All rows with these columns only and, of a matrix, all columns with these rows.

    With the rows and columns of `spread` in their places, where given.
    """
    is_matrix = len(pair.a.shape) > 1
    width = _rows_and_width(pair.a)[1]
    known = [(view.x, view.y) for view in spread]
    spread_rows, spread_columns = _spread_rows_and_columns(pair)
    sides = []
    for number, tensor in enumerate((pair.a, pair.b)):
        across, along, row = [], [], 0
        for block in _read(tensor):
            arrays = [each.reshape(-1, width) for each in block]
            here = rows[(row <= rows) & (rows < row + len(arrays[0]))] - row
            across.append([each[:, _as_slice(columns)] for each in arrays])
            along.append([each[_as_slice(here)] for each in arrays])
            row += len(arrays[0])
        wide = [np.concatenate(each) for each in zip(*across, strict=True)]
        long = [np.concatenate(each) for each in zip(*along, strict=True)]
        if spread:
            stored = _arrays(known[0][number])[: len(wide)]
            wide = [*map(partial(_between, columns, spread_columns, axis=1), wide, stored)]
        if spread and is_matrix:
            stored = _arrays(known[1][number].turned)[: len(long)]
            long = [*map(partial(_between, rows, spread_rows, axis=0), long, stored)]
        sides.append((_side(tensor, [wide], wide[0].shape[1]), _side(tensor, [long], width).turned))
    (x, p), (y, q) = sides
    some = [View(x, y, is_whole=False)]
    if is_matrix:
        some.append(View(p, q, columns=True, is_whole=False))
    return some


def _arrays(side: Side) -> list[np.ndarray]:
    """Values and, of stored grids, half-steps."""
    return [side.values, *([] if side.half is None else [side.half])]


def _between(
    at: np.ndarray, few: np.ndarray, own: np.ndarray, spread: np.ndarray, axis: int
) -> np.ndarray:
    """Neighbours at their places among a few spread rows or columns, in order, each once."""
    if not len(at):
        return spread
    before, after = np.searchsorted(few, (at[0], at[-1] + 1))
    first, _, last = np.split(spread, (before, after), axis=axis)
    return np.concatenate([first, own, last], axis=axis)


def _as_slice(places: np.ndarray) -> slice | np.ndarray:
    """Places in order as a slice where they are neighbours, which takes no copy of each value."""
    if len(places) and places[-1] - places[0] == len(places) - 1:
        return slice(int(places[0]), int(places[-1]) + 1)
    return places


def whole_view(pair: Pair) -> View:
    """All values of both along their rows, however many there are."""
    return views_of(pair, prod(pair.a.shape))[0]


def first_views(pair: Pair) -> list[View]:
    """Views of a few of a matrix's first rows, from one block."""
    of_a, of_b = next(pair.pairs())
    few = evenly_spread(len(of_a), SAMPLED_ROWS)
    x, y = (
        _side(tensor, [[rows[few]]], rows.shape[1])
        for tensor, rows in ((pair.a, of_a), (pair.b, of_b))
    )
    views = [View(x, y, is_whole=False)]
    return [*views, View(x.turned, y.turned, columns=True, is_whole=False)]


def _read(tensor: Tensor) -> Iterator[list[np.ndarray]]:
    """Blocks of values; and of half-steps where a grid is stored."""
    cells = stored_cells(tensor, tensor) if tensor.ends() is not None else None
    for _, start, stop in Pair(tensor, tensor).blocks():
        arrays = [Block(tensor, start, stop).values().astype(np.float32, copy=False)]
        if cells is not None:
            half = np.concatenate(_half_steps(tensor, cells, start, stop))
            arrays.append(half.astype(np.float32))
        yield arrays


def _side(tensor: Tensor, blocks: Sequence[Sequence[np.ndarray]], width: int) -> Side:
    """Values (n, width), with the rounding that follows from how they are stored."""
    columns = zip(*blocks, strict=True)
    values, *halves = (np.concatenate(each).reshape(-1, width) for each in columns)
    if halves:
        return Side(values, half=halves[0])
    few = np.ascontiguousarray(values.reshape(-1)[:FIRST_VALUES])
    if tensor.dtype not in FRACTION and tensor.dtype not in ("F32", "F64"):
        with np.errstate(all="ignore"):
            size = sqrt(float(np.nan_to_num(np.mean(np.square(few, dtype=np.float64)))))
        return Side(values, half=np.full(values.shape, sqrt(3) * PACKED * size, np.float32))
    largest = np.abs(few).max(initial=0.0)
    if width > 1 and SMALLEST_CODES <= largest <= LARGEST_CODE and (few == np.rint(few)).all():
        # codes without their scales
        return Side(values, half=np.full(values.shape, 0.5, np.float32))
    held = precision(few)
    coarser = min(held, tensor.dtype, key=lambda dtype: FRACTION.get(dtype, 23))
    # zeros alone are held by any
    smallest = SMALLEST.get("F16" if held == "F16" else tensor.dtype, -126)
    return Side(values, 2.0 ** -(FRACTION.get(coarser, 23) + 1), 2.0**smallest)

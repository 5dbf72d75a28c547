"""Recompute one tensor from another that holds more: by rounding, pruning, or cutting its rank.

Rounded values lie in the cells of a float's numbers or of a grid, anywhere in them; noise around
rounded values stays near them. Every value is checked, which is what a search for a grid among some
rows (`rounding`) does not do.
"""

import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import reduce
from importlib import import_module
from math import prod, sqrt
from typing import NamedTuple

import numpy as np

from weightscope.checkpoint.blocks import Block, row_width
from weightscope.checkpoint.checkpoint import Tensor
from weightscope.core.compute.fast import numba_may_run
from weightscope.heads.tensors.measure import BITS
from weightscope.pairs.deeds.pair import Pair, few_rows_each, whole
from weightscope.pairs.deeds.rounding import CASTS, FRACTION, SMALLEST
from weightscope.pairs.deeds.thresholds import (
    FLOAT_STEPS_USED,
    STEPS_USED,
    TWO_LEVELS_SPARED,
    USED,
)

OUTER = 0.4  # steps from a rounded value to its original: a fifth of them are as far, or farther
# least share of changed values as far: small noise around rounded values never gets there
FILLED = 0.05
FEWEST = 64  # changed values that this share is judged by
GROUPS = (0, 128, 64, 32, 16)  # values that share a grid: a row, or this many neighbours in it
# from zero, or from the least value, to the last of an even grid
STEPS = (1, 3, 7, 8, 15, 16, 31, 63, 127, 128, 255)
MOST_STEPS = 255
EVEN = tuple(dict.fromkeys((*STEPS, *range(2, MOST_STEPS))))  # in the order in which they are tried
TRIED_AT_ONCE = 1 << 18  # values times numbers of steps
FINER = 0.9  # times a grid's step: the coarser of two that values lie on is theirs
ON_GRID = 0.02  # steps that a value may be off its grid
ROUNDED_AGAIN = 0.3  # the most of it where levels were rounded once more, to a float of fewer bits
FEW_STEPS = 16  # steps up to which a grid is believed without a look at chance
BY_CHANCE = 1e-6  # chance that a group's values lie on a finer grid without being its levels
FEW_VALUES = 0.5  # values over a group's size: with so few its grid need not be even
SCALE = 2.0**-11  # relative error of a scale that a quantised format stores in 16 bits
OF_MINIMUM = 0.1  # half-steps: the most that a stored minimum's own rounding moves a cell
# Half-steps that a value may lie beyond the end of a stored grid: Q4_0 and others lack the last
# level on one side, MXFP4 those from 6 to 8. An outlier of the original passes as clipped up to one
# step beyond its block's end.
CLIPPED = 2.0
# values of a K-quant whose scales are whole multiples of one: small ones are rounded by half of it
SUPER_BLOCK = 256
# the largest such multiple
SCALE_CODES = {"Q2_K": 15, "Q3_K": 31, "Q4_K": 63, "Q5_K": 63, "Q6_K": 127, "IQ4_XS": 31}
WITH_MINIMUM = ("Q2_K", "Q4_K", "Q5_K")  # and minima, multiples of another
# first and last code of ggml's types whose plain writers make a scale for the largest value, or for
# the least and the largest
PLAIN = {"Q4_0": (-8, 7), "Q4_1": (0, 15), "Q5_0": (-16, 15), "Q5_1": (0, 31), "Q8_0": (-128, 127)}
# floats that sums are rounded to: sums of float32 differ by how they were computed
COARSE = ("BF16", "F16")
ARITHMETIC = 2.0**-22  # error of a float32 sum, over its summands' sizes
TINY = 2.0**-25  # and its absolute error among the smallest
TINY_SCALES = 0.25  # half-steps that the latter may move a value by, at most
FIRST = 4  # groups that show, after one, that a matrix has no grid
SAMPLED = 64  # groups that show which grid it has
LARGEST_SVD = 1 << 24  # values of a matrix whose singular values are computed

NUMBA = "weightscope.pairs.deeds.cells_numba"
# values: less takes NumPy a fraction of a second, and importing numba half a second
WORTH_NUMBA = 1 << 23


@dataclass
class Cells:
    """Changed values, and those far out in their cells, where noise hardly gets."""

    changed: int = 0
    outer: int = 0
    # sums of squares on stored grids: of the older tensor, the newer, and their difference
    squares: float = 0.0
    squares_b: float = 0.0
    moved: float = 0.0
    wide: int = 0  # stored grids whose codes hardly use them: cells so wide that they prove nothing

    def add(self, changed: np.ndarray, outer: np.ndarray) -> "Cells":
        """Count values that changed, and those far out in their cells."""
        self.changed += int(np.count_nonzero(changed))
        self.outer += int(np.count_nonzero(changed & outer))
        return self

    def add_all(self, blocks: "Iterable[Cells | None]") -> bool:
        """Add every block, unless one of them, a None, has a value outside its cell."""
        more = Cells()
        for block in blocks:
            if block is None:
                return False
            more = more + block
        vars(self).update(vars(self + more))
        return True

    def __add__(self, more: "Cells") -> "Cells":
        return Cells(
            *(getattr(self, each.name) + getattr(more, each.name) for each in fields(Cells))
        )

    @property
    def are_filled(self) -> bool:
        return self.changed >= FEWEST and self.outer >= FILLED * self.changed


def way_from(older: Tensor, newer: Tensor, casts: Collection[str], cells: Cells) -> str:
    """The way to recompute a changed tensor: "cast", "pruned", "quantised" or "rank cut".

    Empty where it cannot, or no way is known. `casts` are the roundings that give every value of
    it; where values lie in the cells that they were rounded to is added to `cells`.
    """
    if casts:
        cast = min(casts, key=list(CASTS).index)
        with np.errstate(all="ignore"):
            for x, y in _values(older, newer):
                cells.add(x != y, np.abs(x - y) > OUTER * _float_steps(y, cast))
        return "cast"
    if len(older.shape) < 2:
        return ""
    if _is_pruned(older, newer):
        return "pruned"
    if is_quantised(older, newer, cells):
        return "quantised"
    return "rank cut" if _is_truncated(older, newer) else ""


def _values(older: Tensor, newer: Tensor) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Blocks of both as rows (n, width), float32."""
    width = row_width(older.shape) or prod(older.shape)
    for _, start, stop in Pair(older, newer).blocks():
        x, y = (Block(tensor, start, stop).values().astype(np.float32) for tensor in (older, newer))
        has_whole_rows = len(x) % width == 0
        shape = (-1, width) if has_whole_rows else (1, -1)
        yield x.reshape(shape), y.reshape(shape)


# Rounding


def _float_steps(y: np.ndarray, cast: str) -> np.ndarray:
    """The step from each value of a float to the next one farther from zero."""
    exponent = np.maximum(np.frexp(y.astype(np.float64))[1] - 1, SMALLEST.get(cast, -126))
    return np.ldexp(1.0, exponent - FRACTION[cast])


# Weighted sums


Triple = tuple[Tensor, Tensor, Tensor]  # x, z and what may be their sum


def shares_in_sum(tensors: Iterable[Triple]) -> tuple[float, float] | None:
    """The least and largest w with y = w x + (1 - w) z, rounded, in all values; None for none."""
    least, most = -np.inf, np.inf
    for triple in tensors:
        for x, z, y in _triples(triple):
            room = _float_steps(y, triple[2].dtype) / 2 + ARITHMETIC * (np.abs(x) + np.abs(z))
            apart, rest = x != z, y - z
            if not np.isfinite(rest + room).all() or (np.abs(rest) > room)[~apart].any():
                return None
            with np.errstate(over="ignore"):
                ends = np.stack([rest - room, rest + room])[:, apart] / (x - z)[apart]  # (2, n)
            ends = np.sort(ends, axis=0)
            least = max(least, ends[0].max(initial=-np.inf))
            most = min(most, ends[1].min(initial=np.inf))
            if not least <= most:
                return None
    return float(least), float(most)


def fills_cells(tensors: Iterable[Triple], share: float) -> bool:
    """True if sums with this share lie anywhere in the cells that they were rounded to.

    If a base was made from the sum instead, its sums lie near the values.
    """
    cells = Cells()
    for triple in tensors:
        for x, z, y in _triples(triple) if triple[2].dtype in COARSE else ():
            off = np.abs(share * x + (1 - share) * z - y)
            cells.add(off > 0, off > OUTER * _float_steps(y, triple[2].dtype))
    return cells.are_filled


def _triples(tensors: Triple) -> Iterator[list[np.ndarray]]:
    """Blocks of three tensors of one shape, in float64."""
    for _, start, stop in Pair(*tensors[:2]).blocks():
        yield [Block(tensor, start, stop).values().astype(np.float64) for tensor in tensors]


# Grids


def is_quantised(older: Tensor, newer: Tensor, cells: Cells) -> bool:
    """True if each value is the older one's nearest on a shared grid; adds to `cells`."""
    if len(older.shape) < 2:
        return False
    if newer.ends() is not None:
        stored = cells_on_stored(older, newer)
        return stored is not None and not stored.wide and cells.add_all([stored])
    fine = 2.0 ** -BITS.get(newer.dtype, 23)
    shape, matrix = older.shape, len(older.shape) == 2 and older.shape == newer.shape
    first_x, first_y = next(_values(older, newer))
    for turned in (False, True) if matrix and prod(shape) == first_x.size else (False,):
        sample_x, sample_y = (first_x.T, first_y.T) if turned else (first_x, first_y)
        for group in GROUPS:
            width = group or sample_y.shape[1]
            if sample_y.shape[1] % width or width < GROUPS[-1]:
                continue
            x, y = (np.ascontiguousarray(side).reshape(-1, width) for side in (sample_x, sample_y))
            apart = [max(1, len(y) // count) for count in (1, FIRST, SAMPLED)]
            if any(_nearest(x[::step], y[::step], fine) is None for step in apart):
                continue
            sides = [(x, y)] if turned else _values(older, newer)
            groups = ((p.reshape(-1, width), q.reshape(-1, width)) for p, q in sides)
            if cells.add_all(_nearest(p, q, fine) for p, q in groups):
                return True
    return False


class Grids(NamedTuple):
    """Stored grids of groups of neighbours, (n, 1) each; (n, group) if levels are uneven."""

    least: np.ndarray
    most: np.ndarray
    half: np.ndarray  # half of the step to the next level on a value's side
    end: np.ndarray  # half of the last step before the end
    room: np.ndarray  # the most that a value may be off
    lost: np.ndarray  # reach that the rounding of the grid's own scale may have cost
    # the least distance between values on it, and zero, that its scale was made for
    needed: np.ndarray
    spared: float  # share of the grids, at most, whose values are not as far apart
    # a newer value before its scale was rounded: slope times it, and shift
    slope: np.ndarray
    shift: np.ndarray


class OnGrids(NamedTuple):
    """Values of the older and the newer tensor, (n, group), and the newer one's stored grids."""

    x: np.ndarray
    y: np.ndarray
    grids: Grids


class StoredCells(NamedTuple):
    """Values on the stored grids of what they were rounded to, (n, group)."""

    off: np.ndarray  # distance of a value, within its grid's ends, from its rounded value
    beyond: np.ndarray  # distance beyond the end
    placed: OnGrids

    @property
    def grids(self) -> Grids:
        return self.placed.grids


class Used:
    """The share of the stored grids that their values use.

    A scale is made for the largest value that it multiplies, so that the codes of what shares it
    reach the grid's end, or nearly. Where they do not, cells are wider than any writer makes them,
    and nearly any original lies in them. Values in one group, or anywhere in a tensor without known
    groups, share a grid where its ends are the same.
    """

    def __init__(self) -> None:
        self._alone, self._groups, self._spared = 0, 0, 0.0
        # (6, n): a grid's ends, its values' ends, what is needed, a change
        self._shared: list[np.ndarray] = []

    def add(self, placed: OnGrids) -> None:
        """Look at a block."""
        x, y, grids = placed
        self._spared = grids.spared
        if y.shape[1] > 1:
            self._groups += len(y)
            narrow = np.flatnonzero(_used(*_ends(y), grids.least, grids.most) < grids.needed[:, 0])
            self._alone += int((x[narrow] != y[narrow]).any(axis=1).sum())
            return
        fields = (grids.least, grids.most, y, y, grids.needed, x != y)
        rows = np.stack([np.asarray(each, np.float64).ravel() for each in fields])
        self._shared.append(_joined(rows))

    @property
    def hardly(self) -> int:
        """The number of grids that changed values hardly use; 0 where these are few enough."""
        hardly, groups = self._alone, self._groups
        if self._shared:
            rows = np.concatenate(self._shared, axis=1)
            least, most, low, high, needed, changed = _joined(rows[:, np.lexsort(rows[1::-1])])
            hardly += int(((_used(low, high, least, most) < needed) & (changed > 0)).sum())
            groups += len(least)
        return hardly if hardly > self._spared * groups else 0


def _ends(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest value of each group, (n,): x (n, group)."""
    if x.dtype == np.float32 and NUMBA in sys.modules:
        return import_module(NUMBA).ends(x)
    return x.min(axis=1), x.max(axis=1)


def _used(low: np.ndarray, high: np.ndarray, least: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Distance between the ends of values, (n,), and zero where the grid has it."""
    has_zero = ((least <= 0) & (most >= 0)).ravel()
    top = np.where(has_zero, np.maximum(high, 0), high)
    return top - np.where(has_zero, np.minimum(low, 0), low)


def _joined(rows: np.ndarray) -> np.ndarray:
    """Neighbours on the same grid as one, (6, n) -> (6, m)."""
    is_new = (rows[:2, 1:] != rows[:2, :-1]).any(axis=0)
    starts = np.flatnonzero(np.append(True, is_new)) if rows.shape[1] else np.zeros(0, int)
    if len(starts) == rows.shape[1]:
        return rows
    least, most, low, high, needed, changed = rows
    ends = [np.minimum.reduceat(each, starts) for each in (low, needed)]
    tops = [np.maximum.reduceat(each, starts) for each in (high, changed)]
    return np.stack([least[starts], most[starts], ends[0], tops[0], ends[1], tops[1]])


def cells_on_stored(older: Tensor, newer: Tensor) -> Cells | None:
    """Count values by their place on the stored grids; None if one is outside its cell."""
    cells = Cells()
    return cells if cells.add_all(_nearest_stored(older, newer)) else None


def _nearest_stored(
    older: Tensor, newer: Tensor, fast: bool | None = None
) -> Iterator[Cells | None]:
    """Apply `_nearest` on stored grids; `fast`: with numba, by default for large tensors."""
    used = Used()
    if fast is None:
        fast = (prod(newer.shape) >= WORTH_NUMBA or NUMBA in sys.modules) and numba_may_run()
    if fast and isinstance((newer.ends() or (0,))[-1], int):
        count = import_module(NUMBA).count
        for x, y, grids in _on_grids(older, newer, few=False):
            far, bound = 2 * OUTER * grids.half, CLIPPED * grids.end + grids.lost
            room, made = grids.room, (grids.slope, grids.shift)
            counted = count(x, y, grids.least, grids.most, room, far, bound, *made)
            used.add(OnGrids(x, y, grids))
            yield None if counted is None else Cells(*counted)
    else:
        for placed in _on_grids(older, newer):
            (x, y, grids), (off, beyond, _) = placed, _placed(placed)
            is_near_ends = (beyond <= CLIPPED * grids.end + grids.lost).all()
            if not ((off <= grids.room).all() and is_near_ends):
                yield None
                return
            used.add(placed)
            squares, squares_b, moved = (float(np.vdot(each, each)) for each in (x, y, x - y))
            sums = Cells(squares=squares, squares_b=squares_b, moved=moved)
            yield sums.add((off > 0) | (beyond > 0), off > 2 * OUTER * grids.half)
    yield Cells(wide=used.hardly)


def stored_cells(older: Tensor, newer: Tensor) -> Iterator[StoredCells]:
    """Place every older value on the grid stored with the newer one, a few rows at a time."""
    return map(_placed, _on_grids(older, newer))


def _placed(on: OnGrids) -> StoredCells:
    grids = on.grids
    inside = np.clip(on.x, grids.least, grids.most)
    return StoredCells(
        np.abs(inside - (on.y * grids.slope + grids.shift)), np.abs(on.x - inside), on
    )


def _on_grids(older: Tensor, newer: Tensor, *, few: bool = True) -> Iterator[OnGrids]:
    """Both with the stored grids: a few rows at a time in float64, or blocks as they are read."""
    first, last, levels = newer.ends() or (newer, newer, (0.0, 1.0))
    group = max(prod(newer.shape), 1) // max(prod(first.shape), 1)
    for _, start, stop in Pair(older, newer).blocks():
        x, y = (Block(tensor, start, stop).values().reshape(-1, group) for tensor in (older, newer))
        low, high = (
            Block(end, start // group, stop // group).values()[:, None] for end in (first, last)
        )
        pieces: Iterable[slice] = [slice(0, stop - start)]
        floats = [np.result_type(each, np.float32) for each in (x, y)]
        if few:
            pieces = few_rows_each(stop - start, row_width(newer.shape))
            floats = [np.dtype(np.float64)] * 2
        for rows in pieces:
            groups = slice(rows.start // group, rows.stop // group)
            p = x[groups].astype(floats[0], copy=False)
            q = y[groups].astype(floats[1], copy=False)
            least, most = (end[groups].astype(np.float64) for end in (low, high))
            placed = OnGrids(p, q, _grids(p, q, least, most, newer.dtype, levels))
            if newer.dtype in PLAIN:
                placed = _before_its_scale_was_rounded(placed, least, most, older, newer)
            yield placed


def _before_its_scale_was_rounded(
    placed: OnGrids, low: np.ndarray, high: np.ndarray, older: Tensor, newer: Tensor
) -> OnGrids:
    """Cells under the scale that a plain writer makes for the largest value.

    Where this is not the scale that is stored, up to float16's rounding, they stay.
    """
    x, y, grids = placed
    first, last = PLAIN[newer.dtype]
    bottom, top = (each[:, None].astype(np.float64) for each in _ends(x))
    if first:  # scales of the first code have its sign; eight bits have positive ones
        farthest = np.where(top > -bottom, top, bottom)
        scale = np.abs(farthest) / last if newer.dtype == "Q8_0" else farthest / first
        bottom, top = first * scale, last * scale
    room = SCALE * (np.abs(low) + np.abs(high)) + max(-first, last) * TINY
    is_made = (np.abs(bottom - low) <= room) & (np.abs(top - high) <= room) & (low != high)
    slope = np.where(is_made, (top - bottom) / np.where(is_made, high - low, 1.0), 1.0)
    half = grids.half * np.abs(slope)
    # float16's own rounding of the largest value, where that is what older values are stored in
    rounding = 2.0 ** -(BITS["F16"] + 1) if older.dtype == "F16" else ARITHMETIC
    exact = half * (1 + 1e-4) + rounding * np.maximum(np.abs(bottom), np.abs(top))
    written = grids._replace(
        least=np.where(is_made, np.minimum(bottom, top), grids.least),
        most=np.where(is_made, np.maximum(bottom, top), grids.most),
        half=half,
        room=np.where(is_made, exact, grids.room),
        slope=slope,
        shift=np.where(is_made, bottom - slope * low, 0.0),
    )
    return OnGrids(x, y, written)


def _grids(
    x: np.ndarray,
    y: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    kind: str,
    levels: int | tuple[float, ...],
) -> Grids:
    """Grids from their first to last values, (n, 1), for values y that were x, (n, group)."""
    places = np.linspace(0, 1, levels) if isinstance(levels, int) else np.array(levels)
    places = (places - places[0]) / np.ptp(places)
    steps = np.diff(places)
    largest = len(places) if isinstance(levels, int) else max(map(abs, levels))
    enough = STEPS_USED if isinstance(levels, int) else FLOAT_STEPS_USED
    least_used = min(USED, enough * steps.min())
    spared = TWO_LEVELS_SPARED if len(places) == 2 else 0.0
    codes = SCALE_CODES.get(kind)
    is_shared = codes is not None and y.size % SUPER_BLOCK == 0  # scales are multiples of one
    if isinstance(levels, int) and NUMBA in sys.modules:
        sharing = SUPER_BLOCK // y.shape[1] if is_shared else 0
        numbers = (steps[0], least_used, SCALE, largest * TINY, TINY_SCALES)
        ends = (low, high, sharing, codes or 0, kind in WITH_MINIMUM)
        made = import_module(NUMBA).even_grids(*ends, numbers)
        return Grids._make((*made, spared, np.ones_like(low), np.zeros_like(low)))
    least, most = np.minimum(low, high), np.maximum(low, high)
    span, size = most - least, np.maximum(np.abs(low), np.abs(high))
    fine = lost = SCALE * (span + size) + largest * TINY
    unsure = largest * TINY  # reach of a scale beyond the values that it was made for
    quantum = np.zeros(1)  # step of a grid's reach
    if codes and is_shared:
        reach = (span, np.abs(low)) if kind in WITH_MINIMUM else (span,)
        groups = SUPER_BLOCK // y.shape[1]
        longest = [
            reduce(np.maximum, each.reshape(-1, groups).T).repeat(groups)[:, None] for each in reach
        ]
        quantum, unsure = longest[0] / codes, unsure + sum(longest) / (2 * codes)
        lost = fine + sum(longest) / (2 * codes)
    if isinstance(levels, int):
        half = end = span * steps[0] / 2
    else:
        step = np.where(span > 0, high - low, 1.0)
        nearest = np.searchsorted((places[1:] + places[:-1]) / 2, (y - low) / step)
        is_up = (np.clip(x, least, most) - y) / step > 0
        half = span * steps[np.clip(nearest - ~is_up, 0, len(steps) - 1)] / 2
        end = span * np.where(nearest > len(steps) / 2, steps[-1], steps[0]) / 2
    end = end + quantum / 2 * (steps[0] / 2)  # as it was before its scale was rounded
    if codes is not None:  # the code of a scale multiplies what a tiny one is off by
        more = np.minimum(largest * codes * TINY, half * TINY_SCALES)
        fine, lost = fine + more, lost + more
    needed = span * (1 - SCALE) * least_used - unsure
    slope, shift = np.ones_like(span), np.zeros_like(span)
    room = half * (1 + 1e-4) + fine
    return Grids(least, most, half, end, room, lost, needed, spared, slope, shift)


def _nearest(x: np.ndarray, y: np.ndarray, fine: float) -> Cells | None:
    """Count rounded values of y (groups, width) by cell; None if x is outside or y on no grid."""
    below, above = _even_cells(y, fine)
    rest = np.isnan(below[:, 0])
    if rest.any():
        few = _cells_of_few(y[rest])
        if few is None:
            return None
        below[rest], above[rest] = few
    d = x.astype(np.float64) - y
    room, off = np.where(d < 0, below, above), np.abs(d)
    least = np.abs(y.min(axis=1, keepdims=True))
    # Cells were drawn with a scale, and some with a minimum, that were rounded when they were
    # stored.
    slack = (2 * SCALE + fine) * np.abs(y) + np.minimum(4 * SCALE * least, OF_MINIMUM * room)
    if (off > room * (1 + 1e-4 + SCALE) + slack).any():
        return None
    return Cells().add(d != 0, off > 2 * OUTER * np.where(np.isfinite(room), room, np.inf))


def _even_cells(y: np.ndarray, fine: float) -> tuple[np.ndarray, np.ndarray]:
    """Half-steps below and above each value of an even grid, inf past its ends; NaN for none."""
    y = y.astype(np.float64)
    inner = (np.diff(np.sort(y, axis=1), axis=1) > 0).sum(axis=1) - 1  # values besides the two ends
    varies = np.ptp(y, axis=1) > 0  # a group of one value shows no grid
    steps = []
    for start in (np.zeros((len(y), 1)), y.min(axis=1, keepdims=True)):
        steps.append(_even_steps(np.where(varies[:, None], y - start, 0.0), inner, fine))
    of_zero, of_least = steps
    is_finer = of_zero < FINER * of_least  # a multiple of the minimum by chance
    step = np.where(np.isnan(of_zero) | is_finer, of_least, of_zero)
    half = np.repeat(step[:, None] / 2, y.shape[1], axis=1)
    known = ~np.isnan(step)[:, None]
    below = np.where(known & (y == y.min(axis=1, keepdims=True)), np.inf, half)
    above = np.where(known & (y == y.max(axis=1, keepdims=True)), np.inf, half)
    return below, above


def _even_steps(y: np.ndarray, inner: np.ndarray, fine: float) -> np.ndarray:
    """The step that all of a group y (n, width) are multiples of, (n,); NaN for none."""
    reach, step = np.abs(y).max(axis=1), np.full(len(y), np.nan)
    likely = np.array([n for n in EVEN if ON_GRID + fine * n <= ROUNDED_AGAIN])
    allowed = ON_GRID + fine * likely  # both a value and the reach were rounded
    tries = [likely] if y.size * len(likely) <= TRIED_AT_ONCE else np.split(likely, len(likely))
    for ns in tries:
        left = np.flatnonzero(np.isnan(step) & (reach > 0))
        is_rare = ns[0] not in STEPS and len(left) > 0.5 * len(y) and len(y) > SAMPLED
        if not len(left):
            break
        if is_rare:
            continue
        room = allowed[np.isin(likely, ns)]
        place = y[left, None] * (ns / reach[left, None])[..., None]  # (groups, tries, width)
        on = (np.abs(place - np.rint(place)) <= room[:, None]).all(axis=2)
        on &= (ns <= FEW_STEPS) | ((2 * room) ** inner[left, None] < BY_CHANCE)
        is_on = on.any(axis=1)
        step[left[is_on]] = reach[left[is_on]] / ns[on.argmax(axis=1)[is_on]]
    return step


def _cells_of_few(y: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Half the way to the next levels on both sides; None where groups have too many values."""
    order = np.argsort(y, axis=1, kind="stable")
    ordered = np.take_along_axis(y.astype(np.float64), order, axis=1)
    new = np.diff(ordered, axis=1) > 0
    constant = ~new.any(axis=1)
    if ((1 + new.sum(axis=1))[~constant] > FEW_VALUES * y.shape[1]).any():
        return None
    above, below = np.full(ordered.shape, np.inf), np.full(ordered.shape, np.inf)
    for i in range(y.shape[1] - 2, -1, -1):
        above[:, i] = np.where(new[:, i], (ordered[:, i + 1] - ordered[:, i]) / 2, above[:, i + 1])
        j = y.shape[1] - 1 - i
        below[:, j] = np.where(
            new[:, j - 1], (ordered[:, j] - ordered[:, j - 1]) / 2, below[:, j - 1]
        )
    above[constant] = below[constant] = 0.0  # a group of one value shows no grid
    sides = np.empty_like(below), np.empty_like(above)
    for side, ordered_side in zip(sides, (below, above), strict=True):
        np.put_along_axis(side, order, ordered_side, axis=1)
    return sides


# Values, directions and singular values that were dropped


def _is_pruned(older: Tensor, newer: Tensor) -> bool:
    """Detect a matrix with zeros in the places of some values, not only whole rows or columns."""
    if older.shape != newer.shape or len(older.shape) != 2:
        return False
    zeros, columns, cast = 0, np.zeros(older.shape[1], bool), CASTS.get(newer.dtype, np.positive)
    for x, y in _values(older, newer):
        if ((x != y) & (cast(x) != y) & (y != 0)).any() or x.shape[1] != len(columns):
            return False
        columns |= y.any(axis=0)
    for x, y in _values(older, newer):
        gone = (x != 0) & (y == 0) & columns
        zeros += int(gone[y.any(axis=1)].sum())
    return zeros >= FEWEST


def _noise(older: np.ndarray, dtype: str) -> float:
    """Spectral norm of the rounding errors of a matrix, with a margin."""
    m, n = older.shape
    rms = sqrt(float(np.mean(older**2)))
    return max(3 * 2.0 ** -BITS.get(dtype, 23) * rms / sqrt(12) * (sqrt(m) + sqrt(n)), 1e-5 * rms)


def _is_truncated(older: Tensor, newer: Tensor) -> bool:
    """Detect the older matrix without its smallest singular values."""
    if older.shape != newer.shape or len(older.shape) != 2 or prod(older.shape) > LARGEST_SVD:
        return False
    x, y = (whole(tensor).astype(np.float64) for tensor in (older, newer))
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return False
    noise, d = _noise(x, newer.dtype), x - y
    probe = np.random.default_rng(0).standard_normal((x.shape[1], 8))
    inside = np.linalg.norm(d @ (y.T @ (y @ probe))) / (np.linalg.norm(y) ** 2 or 1.0)
    if inside > 8 * noise * sqrt(x.shape[1]):  # most changes end here
        return False
    u, s, vt = np.linalg.svd(y, full_matrices=False)
    rank = int((s > noise).sum())
    if not 0 < rank < len(s):
        return False
    dropped = np.linalg.svd(d, compute_uv=False)
    shared = max(np.linalg.norm(u[:, :rank].T @ d, 2), np.linalg.norm(d @ vt[:rank].T, 2))
    return bool(
        3 * noise < dropped[0] <= s[rank - 1] + noise
        and shared <= max(2 * noise, 0.05 * dropped[0])
    )

"""Whether one tensor is the other with less in it: rounded twice, or quantised."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np

from weightscope.checkpoint.blocks import Block
from weightscope.checkpoint.checkpoint import DerivedTensor, Tensor
from weightscope.checkpoint.lora import LowRank, MergedTensor
from weightscope.core.errors import counted
from weightscope.heads.tensors.measure import BITS
from weightscope.model.rows.gguf import RestoredTensor, logarithm
from weightscope.pairs.deeds.change import Change, unchanged
from weightscope.pairs.deeds.pair import Pair
from weightscope.pairs.deeds.recomputed import (
    CLIPPED,
    Cells,
    OnGrids,
    Used,
    cells_on_stored,
    is_quantised,
    stored_cells,
)
from weightscope.pairs.deeds.rounding import CASTS, FRACTION, SMALLEST
from weightscope.pairs.deeds.thresholds import KEPT


class Bounds(NamedTuple):
    """How far values may be from where rounding to the nearest puts them. A change inside them is
    not seen.
    """

    how: str
    group: int  # neighbours whose error is judged together; 0: a row
    error: float  # times the error of rounding to the nearest, in each group
    farthest: float  # half-steps from its level, of one value within its grid
    in_cells: float  # the least share of values that are in their cells
    # of all values, away from zero or towards it: steps off the nearest level, along the original
    leaning: float


# What quantisers that search for a scale may do, weighted by an importance matrix too; measured on
# ggml's, see `analyses.experiments.faithful_conversions`.
SEARCHED = Bounds("quantised by search", 32, 2.0, 3.0, 0.0, 0.003)
# What GPTQ may do, which moves values by several steps to make up for the errors of those before;
# measured on llm-compressor's, with calibration on random tokens: rows to 2.7, values to 8.4, 66 %
# in their cells.
COMPENSATED = Bounds("quantised with compensated errors", 0, 3.0, 10.0, 0.6, 0.02)
# formats that GPTQ writes
WITH_COMPENSATION = ("GPTQ int", "compressed-tensors int", "AutoRound int")
BEYOND = 20.0  # half-steps beyond the end of its grid
OUTLIERS = 0.05  # of the values of a row, that are more than `CLIPPED` beyond
# Types whose groups of 4 or 8 values are entries of a codebook: no value has a cell of its own.
# |error| / |W| that ggml's quantiser makes of normal weights with an importance matrix; a change
# smaller than the error is not seen.
CODEBOOKS = {
    "IQ1_S": 0.55,
    "IQ1_M": 0.52,
    "IQ2_XXS": 0.49,
    "IQ2_XS": 0.37,
    "IQ2_S": 0.28,
    "IQ3_XXS": 0.24,
    "IQ3_S": 0.16,
}
USUAL = 1.25  # times this error, at most
FLUSHED = 2.0**-22  # values that scales in float16 are too coarse for
# Cosines of columns that have nothing in common are about 1 / sqrt(rows); ggml's coarsest codebooks
# leave 0.3.
BY_CHANCE, FEWEST_ROWS = 3.0, 256
# columns that share a scale, and how large one is that this is made for, at least
SHARED, OF_LARGEST = 32, 1 / 4
# of one row or column; and times what chance makes of as many values
LEANING, NO_CHANCE = 0.05, 6.0
TELLING = 1 / 4  # of a column's values, at least, that are nearer another level than zero
SUMMED = ("BF16", "F16")  # floats besides float32 that an adapter is merged in
ROUNDED_BEFORE = {"F16": ("BF16",), "F8_E4M3": ("BF16", "F16"), "F8_E5M2": ("BF16", "F16")}


class Proof(NamedTuple):
    """What was done to a tensor, and what shows it."""

    deed: str
    detail: str = ""


def rounded_twice(pair: Pair) -> Proof | None:
    """Whether one is the other rounded to one float and then to the one that stores it: a copy of a
    copy.
    """
    for letter, older, newer in (("B", pair.a, pair.b), ("A", pair.b, pair.a)):
        for first in ROUNDED_BEFORE.get(newer.dtype, ()):
            then = CASTS[newer.dtype]
            with np.errstate(all="ignore"):
                blocks = (Pair(older, newer).read(start, stop) for _, start, stop in pair.blocks())
                if all(
                    x.dtype == np.float32 and np.array_equal(then(CASTS[first](x)), y, True)
                    for x, y in blocks
                ):
                    return Proof(
                        f"{letter} to {first}, then to {newer.dtype}", "each to nearest even"
                    )
    return None


def merged_otherwise(pair: Pair) -> Proof | None:
    """Whether one is the other's base with the same adapter merged, summed in another order and
    precision.
    """
    for letter, exact, merged in (("B", pair.a, pair.b), ("A", pair.b, pair.a)):
        if not isinstance(exact, MergedTensor) or merged.dtype not in (*SUMMED, "F32"):
            continue
        if not isinstance(exact.change, LowRank) or exact.magnitude:
            continue
        (left, right), width = exact.change.factors(), exact.shape[-1]
        base = exact.stored.dtype if exact.stored.dtype in SUMMED else "F32"
        for _, start, stop in pair.blocks():
            x, y = (
                Block(tensor, start, stop).values().astype(np.float64) for tensor in (exact, merged)
            )
            rows = left[start // width : stop // width]
            # of what is summed, but for the base's weight
            largest = (np.abs(rows) @ np.abs(right)).reshape(-1)
            # r products and their sum in float32, the scale, and the sum with the base; then in the
            # base's own float.
            error = (exact.change.rank + 4) * _half_unit("F32") * (largest + np.abs(x))
            if base != "F32":
                error += 2 * _half_unit(base) * (largest + np.abs(x))
            exponent = np.maximum(
                np.frexp(np.maximum(np.abs(x), np.abs(y)))[1] - 1, SMALLEST.get(merged.dtype, -126)
            )
            if not (np.abs(x - y) <= np.ldexp(_half_unit(merged.dtype), exponent) + error).all():
                return None
        return Proof(
            f"{letter} merged with the adapter, in {base}", "within the rounding of its sums"
        )
    return None


def exponentiated(pair: Pair) -> Proof | None:
    """Whether one stores a state space's A = -exp(log(-A)) of the other, as right as float32's exp
    makes it.
    """
    for letter, older, newer in (("A", pair.a, pair.b), ("B", pair.b, pair.a)):
        if not (isinstance(newer, RestoredTensor) and newer.undo is logarithm):
            continue
        stored = newer.stored.read().reshape(older.shape).astype(np.float64)
        with np.errstate(all="ignore"):
            exact = -np.exp(older.read().astype(np.float64))
            if (np.abs(stored - exact) <= 2 * _half_unit("F32") * np.abs(exact)).all():
                return Proof(
                    f"{letter} to -exp in F32", "within one unit of the last place of float32"
                )
    return None


def _half_unit(dtype: str) -> float:
    """Half of the step of a float from 1 to 2."""
    return 2.0 ** -(FRACTION.get(dtype, 23) + 1)


def in_cells(pair: Pair) -> tuple[Proof, float] | None:
    """Whether B's values are in the cells of A's on the grids stored with B, and the size of the
    change; one pass.
    """
    cells = Cells()
    if (
        pair.b.ends() is None
        or len(pair.b.shape) < 2
        or rounded_twice(pair)
        or merged_otherwise(pair)
    ):
        return None
    with np.errstate(all="ignore"):
        if not is_quantised(pair.a, pair.b, cells) or not np.isfinite(cells.moved):
            return None
    change = replace(unchanged(pair.a, pair.b), squares=cells.squares, moved=cells.moved)
    return _each_in_its_cell("B", pair.b), change.change


def _each_in_its_cell(letter: str, newer: Tensor) -> Proof:
    how = f"{letter} quantised" + (f" ({newer.dtype})" if newer.dtype not in BITS else "")
    return Proof(how, "every value in the cell of its original")


def too_wide(pair: Pair) -> Proof | None:
    """Whether values are in their cells only because the stored scales are larger than any writer
    makes them.
    """
    for newer, older in ((pair.b, pair.a), (pair.a, pair.b)):
        with np.errstate(all="ignore"):
            cells = cells_on_stored(older, newer) if newer.ends() is not None else None
        if cells is not None and cells.wide:
            groups = counted(cells.wide, "group")
            return Proof(
                "scales too large for the codes that are used",
                f"of {groups} of values ({newer.dtype})",
            )
    return None


def quantised(pair: Pair, change: Change, *, may_compensate: bool = True) -> Proof | None:
    """Whether one is the other quantised: every value in its original's cell, or nearly where a
    format searches, and farther if its writer may compensate for errors.
    """
    if len(pair.a.shape) < 2 or not np.isfinite(change.moved):
        return None
    for letter, older, newer in (("B", pair.a, pair.b), ("A", pair.b, pair.a)):
        originals = [(letter, older)]
        if newer.ends() is not None and older.dtype == "F32":
            originals += [
                (f"{letter} to {cast} and", RoundedTensor(older, cast)) for cast in SUMMED
            ]
        for prove in (_by_cells, _by_error, *([_by_compensation] if may_compensate else [])):
            for how, original in originals:
                if proof := prove(how, original, newer, change):
                    return proof
    return None


@dataclass(frozen=True)
class RoundedTensor(DerivedTensor):
    """A tensor rounded to a float of fewer bits before it was quantised."""

    cast: str

    def read(self) -> np.ndarray:
        return CASTS[self.cast](self.stored.read())

    def rows(self, start: int, stop: int) -> np.ndarray:
        return CASTS[self.cast](self.stored.rows(start, stop))

    def blocks(self, n_rows: int) -> Iterator[tuple[int, np.ndarray]]:
        for start, rows in self.stored.blocks(n_rows):
            yield start, CASTS[self.cast](rows)


def _by_cells(letter: str, older: Tensor, newer: Tensor, _: Change) -> Proof | None:
    """Whether every value is in the cell of its original."""
    with np.errstate(all="ignore"):
        return _each_in_its_cell(letter, newer) if is_quantised(older, newer, Cells()) else None


def _by_error(letter: str, older: Tensor, newer: Tensor, change: Change) -> Proof | None:
    """Whether values are near enough their originals, where a format searches its codes."""
    usual = USUAL * CODEBOOKS.get(newer.dtype, 0.0)
    if usual:
        detail = f"error {change.change:.2f} |W|; ggml's own on normal weights {usual / USUAL:.2f}"
        is_near = change.change <= usual and _resembles_both_ways(older, newer)
        return Proof(f"{letter} quantised by search ({newer.dtype})", detail) if is_near else None
    return _proof_within(letter, older, newer, SEARCHED) if newer.ends() is not None else None


def _resembles(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Which rows are nearer to the original's than zeros would be: x, y (n, width)."""
    moved, size = (np.square(each, dtype=np.float64).sum(axis=1) for each in (x - y, x))
    return moved <= KEPT**2 * size + x.shape[1] * FLUSHED**2


def _resembles_both_ways(older: Tensor, newer: Tensor) -> bool:
    """Whether all rows are, and no column has nothing in common with the original's."""
    columns = Columns()
    for x, y in Pair(older, newer).pairs():
        if not _resembles(x, y).all():
            return False
        columns.add(x, y)
    return not columns.are_lost


class Columns:
    """How much the columns of two matrices have in common: a few erased ones hardly move a row."""

    def __init__(self) -> None:
        self.rows, self.sums = 0, np.zeros((3, 1))  # of squares, and of products: (3, width)
        self._telling = np.zeros(1)  # values of each that no cell of zero holds

    def add(self, x: np.ndarray, y: np.ndarray, half: np.ndarray | float = 0.0) -> None:
        """Look at rows (n, width); half of their grids' steps."""
        x, y = x.astype(np.float64), y.astype(np.float64)
        self.rows += len(x)
        self.sums = self.sums + np.stack([(p * q).sum(axis=0) for p, q in ((x, x), (y, y), (x, y))])
        self._telling = self._telling + (np.abs(x) > half).sum(axis=0)

    @property
    def are_lost(self) -> bool:
        """Whether a column resembles its original no more than chance would have it."""
        if self.rows < FEWEST_ROWS:
            return False
        of_x, of_y, both = self.sums
        groups = of_x.reshape(-1, SHARED) if len(of_x) % SHARED == 0 else of_x[None]
        is_large = (groups >= OF_LARGEST**2 * groups.max(axis=1, keepdims=True)).ravel()
        is_large &= (of_x > self.rows * FLUSHED**2) & (self._telling >= TELLING * self.rows)
        return bool(
            (is_large & (both <= BY_CHANCE / np.sqrt(self.rows) * np.sqrt(of_x * of_y))).any()
        )


class Leaning:
    """Whether values are off their nearest levels to one side, as of a factor: what a search leaves
    has no side.
    """

    def __init__(self, of_all: float) -> None:
        self._of_all, self._a_row, self._columns = of_all, False, np.zeros((3, 1))

    def add(self, x: np.ndarray, missed: np.ndarray) -> None:
        """Look at rows (n, width), and how far each value is from the nearest level."""
        sums = np.stack([missed * x, x * x, np.square(missed * x)])
        self._a_row = self._a_row or _leans(sums.sum(axis=2), LEANING)
        self._columns = self._columns + sums.sum(axis=1)

    @property
    def is_shown(self) -> bool:
        """Whether a row, a column or all values do."""
        everything = self._columns.sum(axis=1, keepdims=True)
        return self._a_row or _leans(self._columns, LEANING) or _leans(everything, self._of_all)


def _missed(placed: OnGrids) -> np.ndarray:
    """How far each value is from the nearest level, in whole steps; zero at the ends of a grid,
    which has no more.
    """
    x, y, grids = placed
    half = np.broadcast_to(grids.half, x.shape)
    is_inner = (x > grids.least + grids.end) & (x < grids.most - grids.end) & (half > 0)
    with np.errstate(all="ignore"):
        return np.where(is_inner, np.rint((x - y) / (2 * half)) * 2 * half, 0.0)


def _leans(sums: np.ndarray, most: float) -> bool:
    along, squares, chance = sums
    return bool(
        ((np.abs(along) > most * squares) & (np.abs(along) > NO_CHANCE * np.sqrt(chance))).any()
    )


def _by_compensation(letter: str, older: Tensor, newer: Tensor, _: Change) -> Proof | None:
    """Whether values are as near as a writer that compensates for errors leaves them."""
    is_written = newer.ends() is not None and newer.dtype.startswith(WITH_COMPENSATION)
    return _proof_within(letter, older, newer, COMPENSATED) if is_written else None


def _proof_within(letter: str, older: Tensor, newer: Tensor, bounds: Bounds) -> Proof | None:
    detail = _within(older, newer, bounds)
    return Proof(f"{letter} {bounds.how} ({newer.dtype})", detail) if detail else None


def _within(older: Tensor, newer: Tensor, bounds: Bounds) -> str:
    """How near values are to what they were rounded from; empty where they are not near enough."""
    worst, farthest, clipped, in_cells, width, used = 0.0, 0.0, 0.0, 0, newer.shape[-1], Used()
    group, columns, leaning = bounds.group or width, Columns(), Leaning(bounds.leaning)
    for stored in stored_cells(older, newer):
        if stored.off.size % width or width % group:
            return ""
        grids = stored.grids
        off = np.maximum(stored.off - (grids.room - grids.half), 0.0)
        beyond = np.maximum(stored.beyond - grids.lost, 0.0)
        half = np.broadcast_to(grids.half, off.shape)
        with np.errstate(all="ignore"):
            apart, usual = (np.square(each).reshape(-1, group).sum(axis=1) for each in (off, half))
            ratio = np.where(apart > 0, np.sqrt(3 * apart / usual), 0.0).max(initial=0.0)
            step = np.where(off > 0, off / half, 0.0).max(initial=0.0)
            ends = np.where(beyond > 0, beyond / grids.end, 0.0)
        is_far = (ends > CLIPPED).reshape(-1, width).mean(axis=1).max(initial=0.0)
        inside = (off <= half) & (ends <= CLIPPED)
        is_left = ~inside.reshape(-1, width).all(axis=1)
        x, y = (each.reshape(-1, width)[is_left] for each in stored.placed[:2])
        if not (
            ratio <= bounds.error
            and step <= bounds.farthest
            and ends.max(initial=0.0) <= BEYOND
            and is_far <= OUTLIERS
            and _resembles(x, y).all()
        ):
            return ""
        used.add(stored.placed)
        x, y, size = (each.reshape(-1, width) for each in (*stored.placed[:2], half))
        columns.add(x, y, size)
        leaning.add(x, _missed(stored.placed).reshape(-1, width))
        in_cells += int(np.count_nonzero(inside))
        worst, farthest, clipped = (
            max(worst, ratio),
            max(farthest, step),
            max(clipped, ends.max(initial=0.0)),
        )
    share = in_cells / prod(newer.shape)
    if share < bounds.in_cells or used.hardly or columns.are_lost or leaning.is_shown:
        return ""
    where = f"{group} values" if bounds.group else "row"
    return (
        f"{share:.1%} of values in their cells; error {worst:.2f} times that of rounding to the nearest in the "
        f"worst {where}, a value at most {farthest:.2g} half-steps from its level, clipped by at most "
        f"{clipped:.2g}"
    )

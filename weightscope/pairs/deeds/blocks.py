"""Deeds that are found block by block, in tensors of any size, up to their stored rounding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod, sqrt
from typing import NamedTuple

import numpy as np

from weightscope.checkpoint.blocks import row_width
from weightscope.checkpoint.checkpoint import Tensor
from weightscope.heads.tensors.measure import BITS
from weightscope.model.metrics.spectra import low_rank
from weightscope.pairs.deeds.change import Change
from weightscope.pairs.deeds.deed import (
    Deed,
    Proof,
    Sees,
    What,
    deed,
    find,
    in_digits,
    search,
)
from weightscope.pairs.deeds.pair import AT_ONCE, SAMPLED_ROWS, Pair, first_rows
from weightscope.pairs.deeds.rounding import (
    CASTS,
    FRACTION,
    LEAST_WIDTH,
    SMALLEST,
    Grid,
    grid_of,
    precision,
)
from weightscope.pairs.deeds.thresholds import (
    FEW_ROWS,
    KEPT,
    LEAST_CHANGED,
    LEAST_FACTOR,
    QUANTISED,
    SAME_SIZE,
    SMALL_STEP,
    STORED,
    WITHIN_A_STEP,
)

PROVED = 50  # the order of search before which a deed gives every value
on_blocks = partial(deed, sees=Sees.BLOCKS)


@dataclass(frozen=True)
class Seen:
    """A pair of tensors and how much of it changed."""

    pair: Pair
    change: Change

    @cached_property
    def low_rank(self) -> Deed | None:
        """The change as one of low rank, or of the few rows or columns that hold it."""
        return _of_low_rank(self.pair, self.change)


def plain_deed(change: Change) -> Deed | None:
    """The rounding, zeros, one value or factors that give every value that changed."""
    if change.pair is None or not change.values_changed or not np.isfinite(change.moved):
        return None
    return find(Sees.BLOCKS, Seen(change.pair, change), before=PROVED)


# Deeds that give every value


def cast_in_words(done: Deed) -> str:
    """`BF16 (to nearest even)` or `BF16 (cut off)`."""
    name = done.way.removesuffix(", cut off")
    return f"{name} ({'cut off' if name != done.way else 'to nearest even'})"


def deed_of_cast(cast: tuple[str, str]) -> Deed:
    """One checkpoint's tensor rounded to the other's; `cast` names the former."""
    dtype, original = cast
    made = "A" if original == "B" else "B"
    return Deed(What.ROUNDED, dtype, made=made, proof=Proof.VALUES)


def casts_in_order(casts: frozenset[tuple[str, str]]) -> list[tuple[str, str]]:
    """Roundings in the order in which they are named."""
    return sorted(casts, key=lambda cast: (list(CASTS).index(cast[0]), cast[1]))


@on_blocks(
    What.ROUNDED,
    lambda done: f"{done.original} to {cast_in_words(done)}",
    was=lambda done: f"rounded to {cast_in_words(done)}",
    brief="{original} to {way}",
    called="the same after rounding",
    order=10,
)
def rounded(seen: Seen) -> Deed | None:
    """One checkpoint's values rounded to a float of fewer bits."""
    casts = seen.change.casts
    return deed_of_cast(casts_in_order(casts)[0]) if casts else None


@on_blocks(What.CONSTANT, "erased: one value throughout{where}", called="set to one value")
@on_blocks(What.ZEROED, "{way}zeroed{where}{columns}", called="with values set to zero", order=20)
def one_value(seen: Seen) -> Deed | None:
    """Zero wherever values changed; or another value, throughout B."""
    pair, change = seen.pair, seen.change
    value: float | None = None if change.squares_b else 0.0
    is_everywhere = True
    for part in pair.blocks():
        x, y = pair.read(*part[1:])
        after = y[x != y]
        if not len(after):
            is_everywhere &= value is None or bool((y == value).all())
            continue
        value = float(after[0]) if value is None else value
        if not (after == value).all():
            return None
        is_everywhere &= bool((y == value).all())
    if value == 0:
        share = change.values_changed / max(1, prod(pair.a.shape))
        way, values = "some values ", f"{share:.2g} of the values"
        if share == 1:
            way, values = "", "all values"
        return Deed(What.ZEROED, way, f"{values}{_where(seen)}", proof=Proof.VALUES)
    if is_everywhere and value is not None:
        return Deed(What.CONSTANT, detail=f"to {value:.3g}", proof=Proof.VALUES)
    return None


@search(order=25, sees=Sees.BLOCKS)
def one_value_in_a(seen: Seen) -> Deed | None:
    """One value throughout A's matrix, which nothing in B was made from."""
    value: float | None = None
    if not seen.change.is_matrix:  # gains begin as ones
        return None
    for part in seen.pair.blocks():
        x, _ = seen.pair.read(*part[1:])
        value = float(x[0]) if value is None else value
        if not (x == value).all():
            return None
    if not value:
        return None
    return Deed(What.CONSTANT, detail=f"{value:.3g}", made="A", proof=Proof.VALUES)


@on_blocks(What.SCALED, "scaled by one number{way}", called="multiplied by one factor", order=30)
def one_factor(seen: Seen) -> Deed | None:
    """The factor that gives every value that changed."""
    factor, step = 0.0, RoundingStep(0.0, 0.0)
    for part in seen.pair.blocks():
        x, y = (values.astype(np.float64) for values in seen.pair.read(*part[1:]))
        x, y = x[x != y], y[x != y]
        if not len(x):
            continue
        if not factor:
            factor, step = float(x @ y) / (float(x @ x) or 1.0), RoundingStep.of(y, seen.change)
        is_enough = seen.change.values_changed >= LEAST_CHANGED
        if not (is_enough and step.is_factor(factor) and step.holds(y, factor * x)):
            return None
    return Deed(What.SCALED, detail=f"by {factor:.4g}{_where(seen)}", proof=Proof.VALUES)


@on_blocks(
    What.FACTORS,
    "scaled {way}{columns}",
    called="with rows or columns multiplied by factors",
    order=40,
)
def factors_of_rows(seen: Seen) -> Deed | None:
    """The factors of the rows, or of the columns, that give all of B."""
    pair = seen.pair
    if len(pair.a.shape) != 2 or not seen.change.is_matrix or min(pair.a.shape) < LEAST_CHANGED:
        return None
    for axis, which in ((0, "columns"), (1, "rows")):
        ends, columns = [], None
        for x, y in pair.pairs():
            x, y = x.astype(np.float64), y.astype(np.float64)
            factors = _fitted(x, y, axis) if axis or columns is None else columns
            columns, step = factors, RoundingStep.of(y, seen.change)
            if not step.holds(y, factors * x):
                break
            moved = factors[step.is_factor(factors)]
            ends += [float(moved.min()), float(moved.max())] if len(moved) else []
        else:
            if ends:
                detail = f"{which} by {in_digits(min(ends))} to {in_digits(max(ends))}"
                return Deed(What.FACTORS, detail=detail, proof=Proof.VALUES)
    return None


@on_blocks(
    What.ROUNDED_OTHERWISE,
    "rounded in another way, each value within a step of {way}",
    called="the same up to the rounding of 16 bits",
    order=45,
)
def rounded_otherwise(seen: Seen) -> Deed | None:
    """No value off by more than a step of 16 bits, where any sum would move the least further."""
    pair, change = seen.pair, seen.change
    if not change.is_matrix or not 0 < change.change < 1:
        return None
    halves, telling = set[str](), 0
    size = SMALL_STEP * sqrt(change.moved / prod(pair.a.shape))
    for part in pair.blocks():
        x, y = pair.read(*part[1:])
        if not halves:
            held = {precision(side[:AT_ONCE].astype(np.float32)) for side in (x, y)}
            halves = ({*change.dtypes} | held) & {"BF16", "F16"}
            if not halves:
                return None
        exponent = np.frexp(np.maximum(np.abs(x), np.abs(y)))[1] - 1
        exponents = [
            np.maximum(exponent, SMALLEST.get(dtype, -126)) - FRACTION[dtype] for dtype in halves
        ]
        steps = np.ldexp(1.0, np.max(exponents, axis=0))
        if not (np.abs(y.astype(np.float64) - x) <= steps).all():
            return None
        telling += int(np.count_nonzero((steps < size) & (x != 0)))
    if telling < WITHIN_A_STEP:
        return None
    return Deed(What.ROUNDED_OTHERWISE, " or ".join(sorted(halves)), proof=Proof.BOUND)


def _fitted(x: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
    """Least-squares factors along an axis, which keeps its place."""
    squares = (x * x).sum(axis, keepdims=True)
    fitted = (x * y).sum(axis, keepdims=True) / np.where(squares == 0, 1.0, squares)
    return np.where(squares == 0, 1.0, fitted)


class RoundingStep(NamedTuple):
    """The rounding of stored values: relative to each, and at least."""

    relative: float
    least: float

    @classmethod
    def of(cls, values: np.ndarray, change: Change) -> "RoundingStep":
        """The step of the coarsest float that holds some of the values or stores them."""
        sample = values.ravel()[:AT_ONCE].astype(np.float32)
        held = [precision(sample), *(dtype for dtype in change.dtypes if dtype in BITS)]
        bits = {dtype: min(23, FRACTION[dtype]) for dtype in held}
        coarsest = min(bits, key=bits.__getitem__)
        return cls(2.0 ** -bits[coarsest], 2.0 ** (SMALLEST.get(coarsest, -126) - bits[coarsest]))

    def holds(self, stored: np.ndarray, exact: np.ndarray) -> bool:
        """True if every stored value is an exact one rounded."""
        return bool((np.abs(stored - exact) <= self.relative * np.abs(stored) + self.least).all())

    def is_factor(self, factor: np.ndarray | float) -> np.ndarray:
        """True for factors that move values by more than their rounding."""
        return np.abs(np.asarray(factor) - 1) > max(4 * self.relative, LEAST_FACTOR)


def _where(seen: Seen) -> str:
    """The share of a matrix's rows, or else of its columns, that changed; empty where all did."""
    if not seen.change.is_matrix:
        return ""
    rows, changed = rows_of(seen.pair), seen.change.rows_changed
    if changed < rows:
        return f" in {changed:,} of {rows:,} rows"
    a, b = seen.pair.a, seen.pair.b
    if a.shape != b.shape or not row_width(a.shape):
        return ""
    columns = np.zeros(a.shape[-1], bool)
    for x, y in seen.pair.pairs():
        columns |= (x != y).any(axis=0)
    changed = int(columns.sum())
    return f" in {changed:,} of {len(columns):,} columns" if changed < len(columns) else ""


def rows_of(pair: Pair) -> int:
    """Number of rows that both have."""
    width = row_width(pair.a.shape)
    return min(prod(pair.a.shape), prod(pair.b.shape)) // width if width else 1


# Deeds that leave some values open


@on_blocks(
    What.FEW_ROWS,
    "other values in some {way}",
    called="changed in some rows or columns only",
    order=60,
)
def few_rows(seen: Seen) -> Deed | None:
    """Changes in so few rows that these describe it."""
    rows, changed = rows_of(seen.pair), seen.change.rows_changed
    if changed > FEW_ROWS * rows:
        return None
    return Deed(What.FEW_ROWS, "rows", f"{changed:,} of {rows:,} rows")


@on_blocks(
    What.REORDERED,
    "rows in another order{columns}",
    called="with rows or columns in another order",
    order=70,
)
def in_another_order(seen: Seen) -> Deed | None:
    """The rows or columns of A, bit for bit, in another order."""
    pair, change = seen.pair, seen.change
    is_of_other_size = abs(change.squares - change.squares_b) > SAME_SIZE * change.squares
    if pair.a.shape != pair.b.shape or is_of_other_size:
        return None
    draw = partial(np.random.default_rng(0).integers, 1, 1 << 63, dtype=np.uint64)
    width = pair.a.shape[-1]
    of_columns = draw(width)
    # for each row and column, a sum of its bits times random numbers
    rows: tuple[list[np.ndarray], ...] = ([], [])
    columns = np.zeros((2, width), np.uint64)
    for values in pair.pairs():
        of_rows = draw((len(values[0]), 1))
        for side, x in enumerate(values):
            bits = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").astype(np.uint64)
            rows[side].append((bits * of_columns).sum(axis=1))
            columns[side] += (bits * of_rows).sum(axis=0)
    of_a, of_b = (np.concatenate(each) for each in rows)
    if np.array_equal(np.sort(of_a), np.sort(of_b)):
        if pair.is_stack:
            experts = (side.reshape(pair.a.shape[0], -1) for side in (of_a, of_b))
            before, after = (sorted(map(tuple, side)) for side in experts)
            if before == after:
                return Deed(What.EXPERTS, proof=Proof.VALUES)
        return Deed(What.REORDERED, detail="rows", proof=Proof.VALUES)
    if np.array_equal(np.sort(columns[0]), np.sort(columns[1])):
        return Deed(What.REORDERED, detail="columns", columns=True, proof=Proof.VALUES)
    return None


# before grids: an edit of low rank of dequantised weights leaves their grid too
@on_blocks(
    What.LOW_RANK,
    "low-rank update, as of a LoRA merged or unmerged",
    called="changed by a matrix of low rank",
    order=80,
)
def low_rank_update(seen: Seen) -> Deed | None:
    """A change of low rank, up to the rounding of one of the dtypes."""
    done = seen.low_rank
    return done if done is not None and done.what is What.LOW_RANK else None


on_blocks(
    What.QUANTISED_IN_PART,
    "quantised in part",
    brief="{made} to {way}",
    called="quantised, with other values in some places",
)


@on_blocks(
    What.QUANTISED,
    "{made} {first}quantised{dtype}",
    was="{was_first}quantised{dtype}",
    brief="{made} to {way}",
    order=90,
)
def on_a_grid(seen: Seen) -> Deed | None:
    """The grid on which only one checkpoint's values lie."""
    pair = seen.pair
    width = row_width(pair.a.shape)
    if seen.change.change > QUANTISED or not width:
        return None
    _, start, stop = next(pair.blocks())
    step = max(1, (stop - start) // width // SAMPLED_ROWS)
    x, y = ([values.reshape(-1, width)[::step]] for values in pair.read(start, stop))
    for before, after, of_before, of_after, made in (
        (pair.a, pair.b, x, y, "B"),
        (pair.b, pair.a, y, x, "A"),
    ):
        if grid := new_grid(before, after, of_before, of_after):
            in_part = _has_other_values(pair, made)
            what = What.QUANTISED_IN_PART if in_part else What.QUANTISED
            return Deed(what, grid.words, made=made)
    return None


@search(order=95, sees=Sees.BLOCKS)
def confined(seen: Seen) -> Deed | None:
    """A change of low rank whose few rows or columns any change would have."""
    return seen.low_rank


def _has_other_values(pair: Pair, made: str) -> bool:
    """Detect erased values: as far off as strangers, by more than a step of the row's grid.

    Asked of neighbours in a row, and of columns. A code of zero covers values below one step,
    which the least other values show, or else the least distance of two: of several grids the
    coarsest.
    """
    # the largest change in rows of zeros, and the coarsest step of any row
    without, coarsest = 0.0, 0.0
    # each column's squares before, after and of the change; a value off by more than a step
    squares, is_far = np.zeros((3, pair.a.shape[-1])), np.zeros(pair.a.shape[-1], bool)
    for values in pair.pairs():
        x, y = values if made == "B" else values[::-1]
        width = x.shape[1] if x.shape[1] % LEAST_WIDTH else LEAST_WIDTH
        before, after = (v.astype(np.float64).reshape(len(v), -1, width) for v in (x, y))
        moved = after - before
        sizes = np.maximum(np.linalg.norm(before, axis=2), np.linalg.norm(after, axis=2))
        strange = np.linalg.norm(moved, axis=2) > KEPT * sizes  # (rows, groups)
        farthest = np.where(strange, np.abs(moved).max(axis=2), 0.0).max(axis=1)
        steps = _coarsest(np.abs(after))
        is_off = np.abs(moved).max(axis=(1, 2)) > steps
        if is_off.any():  # on a grid without a zero
            between = _coarsest(np.diff(np.sort(after[is_off], axis=2), axis=2))
            steps[is_off] = np.maximum(steps[is_off], between)
        if (farthest > steps)[steps > 0].any():
            return True
        by_column = (each.reshape(x.shape) for each in (before, after, moved))
        squares += [np.square(each).sum(axis=0) for each in by_column]
        is_far |= (np.abs(moved.reshape(x.shape)) > steps[:, None])[steps > 0].any(axis=0)
        without = max(without, farthest[steps == 0].max(initial=0.0))
        coarsest = max(coarsest, steps.max(initial=0.0))
    is_strange = np.sqrt(squares[2]) > KEPT * np.sqrt(squares[:2].max(axis=0))
    is_asked = rows_of(pair) >= LEAST_WIDTH
    return without > coarsest or bool(is_asked and (is_strange & is_far).any())


def _coarsest(sizes: np.ndarray) -> np.ndarray:
    """The largest of groups' least sizes beyond zero, by row (n, groups, width); else zero."""
    least = np.where(sizes == 0, np.inf, sizes).min(axis=2)
    return np.where(np.isinf(least), 0.0, least).max(axis=1)


def new_grid(
    before: Tensor, after: Tensor, xs: Sequence[np.ndarray], ys: Sequence[np.ndarray]
) -> Grid | None:
    """The grid of a matrix that was on none, or on one of more than twice as many values.

    xs, ys: rows of both, and columns where these may share a grid; of several the one with the
    least error.
    """
    grids = [
        grid
        for x, y in zip(xs, ys, strict=False)
        if (grid := grid_of(y)) and ((was := grid_of(x)) is None or was.values > 2 * grid.values)
    ]
    if after.dtype not in BITS and before.dtype in BITS:
        return Grid(after.dtype, min((grid.error for grid in grids), default=STORED), stored=True)
    return min(grids, key=lambda grid: grid.error, default=None)


def _of_low_rank(pair: Pair, change: Change) -> Deed | None:
    """Low rank, up to the rounding of one of the dtypes, the finest first.

    A stack of matrices is judged as one, with its matrices below each other or side by side.
    """
    shape = pair.a.shape
    is_small = len(shape) not in (2, 3) or min(shape[-2:]) < 4
    if is_small or any(dtype not in BITS for dtype in change.dtypes) or shape != pair.b.shape:
        return None
    rms = sqrt(max(change.squares, change.moved) / prod(shape))
    samples = (first_rows(tensor, SAMPLED_ROWS).astype(np.float32) for tensor in (pair.a, pair.b))
    # values may be coarser than what stores them
    held = [name for name in map(precision, samples) if name in BITS]
    fractions = {BITS[name] for name in (*change.dtypes, *held)}
    for bits in sorted({*fractions, 23}, reverse=True):
        # rounding errors are even within a step, a step at most 2^-bits of a value
        noise = 2.0**-bits * rms / sqrt(12)
        ranks = (
            low_rank(partial(pair.rows, turned), pair.flat(turned), noise) for turned in pair.sides
        )
        rank = min((rank for rank in ranks if rank is not None), default=None)
        if rank is not None:
            rounding = next(dtype for dtype, fraction in BITS.items() if fraction == bits)
            if where := _confined(pair, rounding, rank):
                which = [each for each in ("rows", "columns") if each in where]
                return Deed(What.FEW_ROWS, " and ".join(which), where)
            return Deed(What.LOW_RANK, detail=f"up to the rounding of {rounding}", rank=rank)
        if bits <= min(fractions):
            break
    return None


def _confined(pair: Pair, rounding: str, rank: int) -> str:
    """The rows and columns of a change, where these are so few that any change has its rank.

    A row that is not one of them changed in no more columns than there are, and the reverse.
    """
    if pair.is_stack:
        return ""
    of_rows: list[np.ndarray] = []
    of_columns = np.zeros(pair.a.shape[1], np.int64)
    for moved in _moved(pair, rounding):
        of_rows.append(moved.sum(axis=1))
        of_columns += moved.sum(axis=0)
    counts = np.concatenate(of_rows), of_columns
    for each, which in zip(counts, ("rows", "columns"), strict=True):
        if (each > 0).sum() <= rank:
            return f"{(each > 0).sum():,} of {len(each):,} {which}"
    rows, columns = (each > rank for each in counts)
    start = 0
    for moved in _moved(pair, rounding):
        if moved[~rows[start : start + len(moved)]][:, ~columns].any():
            return ""
        start += len(moved)
    if rows.sum() + columns.sum() > rank:
        return ""
    places = f"{columns.sum():,} of {len(columns):,} columns"
    return f"{rows.sum():,} of {len(rows):,} rows and {places}"


def _moved(pair: Pair, rounding: str) -> Iterator[np.ndarray]:
    """True for values that changed beyond this rounding, in blocks of rows."""
    cast = CASTS.get(rounding, np.positive)
    for values in pair.pairs():
        x, y = (cast(np.ascontiguousarray(each)) for each in values)
        yield x != y

"""One tensor as the other rounded in other ways than one cast, or quantised by a writer."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from math import prod

import numpy as np

from weightscope.checkpoint.adapters.lora import LowRank, MergedTensor
from weightscope.checkpoint.blocks import Block
from weightscope.checkpoint.checkpoint import DerivedTensor, Tensor
from weightscope.core.errors import counted
from weightscope.heads.tensors.measure import BITS
from weightscope.model.rows.gguf import RestoredTensor, logarithm, turned
from weightscope.pairs.deeds.change import Change, unchanged
from weightscope.pairs.deeds.deed import Deed, Proof, Sees, What, deed, search
from weightscope.pairs.deeds.importance import BY_IMPORTANCE, WITH_IMPORTANCE, is_searched
from weightscope.pairs.deeds.pair import Pair
from weightscope.pairs.deeds.recomputed import (
    CLIPPED,
    Cells,
    Grids,
    OnGrids,
    Used,
    cells_on_stored,
    is_quantised,
    stored_cells,
)
from weightscope.pairs.deeds.rounding import CASTS, FRACTION, SMALLEST
from weightscope.pairs.deeds.thresholds import (
    BEYOND,
    BY_CHANCE,
    CODEBOOKS,
    COMPENSATED,
    FEWEST_ROWS,
    FLUSHED,
    KEPT,
    LEANING,
    NO_CHANCE,
    NOT_ZERO,
    OF_LARGEST,
    OUTLIERS,
    PUSHED,
    SCALES_SEARCHED,
    SEARCHED,
    SHARED,
    USUAL,
    Bounds,
)

SUMMED = ("BF16", "F16")  # floats besides float32 that adapters are merged in
ROUNDED_BEFORE = {"F16": ("BF16",), "F8_E4M3": ("BF16", "F16"), "F8_E5M2": ("BF16", "F16")}
# formats that GPTQ writes
WITH_COMPENSATION = ("GPTQ int", "compressed-tensors int", "AutoRound int")
# formats that AutoRound writes, which learns how to round each value
WITH_CODES_TUNED = ("AutoRound int", "GPTQ int", "AWQ int")
# a format that is rounded plainly, or by mlx-lm's GPTQ or DWQ, which leave nothing to tell them by
PERHAPS_TUNED = ("MLX int",)
# formats whose writers find codes with a scale, and then round the scale to what is stored
SCALES_ROUNDED = ("MLX int", "NVFP4")
# ggml's types that have a search for scales alone: codes are the nearest on the stored grid
WITH_SCALES_SEARCHED = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
OF_ZERO = 0.01  # half-steps from the middle code to zero, up to which a grid has no zero point


# Other roundings than one cast


def both_ways(pair: Pair) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Either checkpoint as the one that was made, with the original and what was made of it."""
    yield "B", pair.a, pair.b
    yield "A", pair.b, pair.a


@deed(
    What.ROUNDED_TWICE,
    "{made} to {way}",
    was="rounded to {way}",
    order=12,
    sees=Sees.ORIGINALS,
)
def rounded_twice(pair: Pair, *_: object) -> Deed | None:
    """One float rounded to another and then to the one that stores it: a copy of a copy."""
    for made, older, newer in both_ways(pair):
        for first in ROUNDED_BEFORE.get(newer.dtype, ()):
            then = CASTS[newer.dtype]
            with np.errstate(all="ignore"):
                blocks = (Pair(older, newer).read(start, stop) for _, start, stop in pair.blocks())
                if all(
                    x.dtype.kind == "f" and np.array_equal(then(CASTS[first](x)), y, True)
                    for x, y in blocks
                ):
                    way, detail = f"{first}, then to {newer.dtype}", "each to nearest even"
                    return Deed(What.ROUNDED_TWICE, way, detail, made, proof=Proof.VALUES)
    return None


@deed(
    What.MERGED,
    "{made} merged with the adapter, in {way}",
    was="merged with the adapter, in {way}",
    order=14,
    sees=Sees.ORIGINALS,
)
def merged_otherwise(pair: Pair, *_: object) -> Deed | None:
    """The base with the same adapter merged, summed in another order and precision."""
    for made, exact, merged in both_ways(pair):
        if not isinstance(exact, MergedTensor) or merged.dtype not in (*SUMMED, "F32"):
            continue
        if not isinstance(exact.change, LowRank) or exact.magnitude:
            continue
        base = exact.stored.dtype if exact.stored.dtype in SUMMED else "F32"
        if not _within_sums(pair, exact, merged, base):
            return None
        detail = "within the rounding of its sums"
        return Deed(What.MERGED, base, detail, made, proof=Proof.BOUND)
    return None


def _within_sums(pair: Pair, exact: MergedTensor, merged: Tensor, base: str) -> bool:
    """True if every value is the exact sum's, up to the rounding of its terms."""
    assert isinstance(exact.change, LowRank)
    (left, right), width = exact.change.factors(), exact.shape[-1]
    for _, start, stop in pair.blocks():
        x, y = (
            Block(tensor, start, stop).values().astype(np.float64) for tensor in (exact, merged)
        )
        rows = left[start // width : stop // width]
        # sizes of the summands, but for the base's weight
        largest = (np.abs(rows) @ np.abs(right)).reshape(-1)
        # r products and their sum in float32, the scale, and the sum with the base; then in the
        # base's own float.
        error = (exact.change.rank + 4) * _half_unit("F32") * (largest + np.abs(x))
        if base != "F32":
            error += 2 * _half_unit(base) * (largest + np.abs(x))
        exponent = np.frexp(np.maximum(np.abs(x), np.abs(y)))[1] - 1
        exponent = np.maximum(exponent, SMALLEST.get(merged.dtype, -126))
        if not (np.abs(x - y) <= np.ldexp(_half_unit(merged.dtype), exponent) + error).all():
            return False
    return True


@deed(
    What.EXPONENTIATED,
    "{original} to -exp in F32",
    was="stored as -exp(A_log) in F32",
    order=16,
    sees=Sees.ORIGINALS,
)
def exponentiated(pair: Pair, *_: object) -> Deed | None:
    """A state space's A = -exp(log(-A)) of the other, as right as float32's exp makes it."""
    for made, older, newer in both_ways(pair):
        if not (isinstance(newer, RestoredTensor) and newer.undo is logarithm):
            continue
        stored = newer.stored.read().reshape(older.shape).astype(np.float64)
        with np.errstate(all="ignore"):
            exact = -np.exp(older.read().astype(np.float64))
            if (np.abs(stored - exact) <= 2 * _half_unit("F32") * np.abs(exact)).all():
                detail = "within one unit of the last place of float32"
                return Deed(What.EXPONENTIATED, "", detail, made, proof=Proof.BOUND)
    return None


def _half_unit(dtype: str) -> float:
    """Half of the step of a float from 1 to 2."""
    return 2.0 ** -(FRACTION.get(dtype, 23) + 1)


# Quantisation


def in_cells(pair: Pair) -> tuple[Deed, float] | None:
    """B quantised, every value in the cell of A's on B's stored grids; and the size of the change.

    One pass.
    """
    cells = Cells()
    if pair.b.ends() is None or len(pair.b.shape) < 2:
        return None
    if rounded_twice(pair) or merged_otherwise(pair):
        return None
    with np.errstate(all="ignore"):
        if not is_quantised(pair.a, pair.b, cells) or not np.isfinite(cells.moved):
            return None
    change = replace(unchanged(pair.a, pair.b), squares=cells.squares, moved=cells.moved)
    return replace(EACH_IN_ITS_CELL, dtype=packing_of(pair.b)), change.change


EACH_IN_ITS_CELL = Deed(
    What.QUANTISED, detail="every value in the cell of its original", proof=Proof.GRID
)


def packing_of(tensor: Tensor) -> str:
    """The name of a packing; empty for floats."""
    return "" if tensor.dtype in BITS else tensor.dtype


for what in (What.SEARCHED, What.PERHAPS_SEARCHED, What.COMPENSATED):
    words = f"{{first}}{what.value}{{dtype}}"
    deed(what, f"{{made}} {words}", was=words.replace("first", "was_first"))


@search(order=18, sees=Sees.ORIGINALS)
def quantised(pair: Pair, change: Change, may_compensate: bool = True) -> Deed | None:
    """Every value in its original's cell, or nearly where a format searches.

    Farther if its writer may compensate for errors.
    """
    if len(pair.a.shape) < 2 or not np.isfinite(change.moved):
        return None
    for made, older, newer in both_ways(pair):
        originals = [("", older)]
        if newer.ends() is not None and older.dtype == "F32":
            originals += [(cast, RoundedTensor(older, cast)) for cast in SUMMED]
        proofs = [_by_cells, _by_sums, _by_scales, _by_error]
        proofs += [_by_compensation] if may_compensate else []
        for prove in proofs:
            for first, original in originals:
                if done := prove(original, newer, change):
                    return replace(done, made=made, first=first)
    return None


@deed(What.TOO_WIDE, "scales too large for the codes that are used", order=19, sees=Sees.ORIGINALS)
def too_wide(pair: Pair, *_: object) -> Deed | None:
    """Values in their cells only because scales are larger than any writer makes them."""
    for newer, older in ((pair.b, pair.a), (pair.a, pair.b)):
        with np.errstate(all="ignore"):
            cells = cells_on_stored(older, newer) if newer.ends() is not None else None
        if cells is not None and cells.wide:
            groups = counted(cells.wide, "group")
            return Deed(What.TOO_WIDE, detail=f"of {groups} of values ({newer.dtype})")
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


def _by_cells(older: Tensor, newer: Tensor, _: Change) -> Deed | None:
    """Every value in the cell of its original."""
    with np.errstate(all="ignore"):
        is_proved = is_quantised(older, newer, Cells())
    return replace(EACH_IN_ITS_CELL, dtype=packing_of(newer)) if is_proved else None


def _by_sums(older: Tensor, newer: Tensor, _: Change) -> Deed | None:
    """Values in the cells that a writer leaves that divides and adds in BF16."""
    of_bf16 = older.dtype == "BF16" or (isinstance(older, RoundedTensor) and older.cast == "BF16")
    ends = newer.ends()
    if ends is None or not of_bf16:
        return None
    levels = ends[2]
    if isinstance(levels, int) and not any(part.dtype == "BF16" for part in newer.parts):  # scales
        return None

    def summands(placed: OnGrids) -> np.ndarray:
        x, _, grids = placed
        divided = 2 * np.abs(x)  # the scale, and the value it divides
        return divided + np.abs(x - grids.least) * _has_zero_point(grids, levels)

    is_proved = _in_wider_cells(older, newer, _half_unit("BF16"), summands)
    detail = "every value in its cell, up to the rounding of sums in BF16"
    done = Deed(What.QUANTISED, detail=detail, dtype=packing_of(newer), proof=Proof.BOUND)
    return done if is_proved else None


def _by_scales(older: Tensor, newer: Tensor, _: Change) -> Deed | None:
    """Values in the cells of a scale and an offset that were rounded once codes were found."""
    ends, packing = newer.ends(), newer.dtype
    scales = [part.dtype for part in newer.parts if part.dtype in FRACTION]
    if ends is None or not scales or not packing.startswith(SCALES_ROUNDED):
        return None
    levels, unit = ends[2], max(map(_half_unit, scales))

    def factors(placed: OnGrids) -> np.ndarray:
        _, y, grids = placed
        if not _has_zero_point(grids, levels):
            return np.abs(y) + grids.half  # a level, and the end of its cell
        from_offset = np.maximum(np.abs(y - grids.least), np.abs(y - grids.most))
        offset = np.maximum(np.abs(grids.least), np.abs(grids.most))  # either end
        return offset + from_offset + grids.half

    is_proved = _in_wider_cells(older, newer, unit, factors)
    detail = "every value in its cell, up to the rounding of its scale"
    done = Deed(What.QUANTISED, detail=detail, dtype=packing, proof=Proof.BOUND)
    return done if is_proved else None


def _has_zero_point(grids: Grids, levels: int | tuple[float, ...]) -> bool:
    """True where zero is no middle code of an even grid."""
    if not isinstance(levels, int):
        return False
    offset = np.abs(grids.least + levels * grids.half)
    return bool(np.any(offset > OF_ZERO * grids.half))


def _in_wider_cells(
    older: Tensor, newer: Tensor, unit: float, rounded: Callable[[OnGrids], np.ndarray]
) -> bool:
    """True if every value is in its cell, up to a unit of numbers that were rounded."""
    used = Used()
    for stored in stored_cells(older, newer):
        room = unit * rounded(stored.placed)
        is_near_ends = stored.beyond <= CLIPPED * stored.grids.end + stored.grids.lost + room
        if not ((stored.off <= stored.grids.room + room) & is_near_ends).all():
            return False
        used.add(stored.placed)
    return not used.hardly


def _by_error(older: Tensor, newer: Tensor, change: Change) -> Deed | None:
    """Values as a search for scales or codes leaves them, in types whose writers search."""
    packing = newer.dtype
    if packing in CODEBOOKS:
        usual = CODEBOOKS[packing]
        if change.change > USUAL * usual or not _resembles_both_ways(older, newer):
            return None
        detail = f"error {change.change:.2f} |W|; ggml's own on normal weights {usual:.2f}"
        return Deed(What.SEARCHED, detail=detail, dtype=packing, proof=Proof.BOUND)
    if packing in WITH_IMPORTANCE and is_searched(older, newer):
        return Deed(What.SEARCHED, detail=BY_IMPORTANCE, dtype=packing, proof=Proof.GRID)
    if packing in WITH_IMPORTANCE or packing.startswith(PERHAPS_TUNED):
        perhaps = _bounded(What.PERHAPS_SEARCHED, older, newer, SEARCHED)
        return perhaps and replace(perhaps, proof=Proof.NONE)
    if packing in WITH_SCALES_SEARCHED:
        return _bounded(What.SEARCHED, older, newer, SCALES_SEARCHED)
    is_tuned = packing.startswith(WITH_CODES_TUNED)
    return _bounded(What.SEARCHED, older, newer, SEARCHED) if is_tuned else None


def _by_compensation(older: Tensor, newer: Tensor, _: Change) -> Deed | None:
    """Values as near as a writer that compensates for errors leaves them."""
    is_written = newer.dtype.startswith(WITH_COMPENSATION)
    return _bounded(What.COMPENSATED, older, newer, COMPENSATED) if is_written else None


def _bounded(what: What, older: Tensor, newer: Tensor, bounds: Bounds) -> Deed | None:
    """The deed, where every value is within these bounds."""
    if newer.ends() is None:
        return None
    detail = _within(older, newer, bounds)
    return Deed(what, detail=detail, dtype=newer.dtype, proof=Proof.BOUND) if detail else None


def _resembles(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Rows nearer to the original's than zeros would be, (n,) bool: x, y (n, width)."""
    moved, size = (np.square(each, dtype=np.float64).sum(axis=1) for each in (x - y, x))
    return moved <= KEPT**2 * size + x.shape[1] * FLUSHED**2


def _resembles_both_ways(older: Tensor, newer: Tensor) -> bool:
    """True if all rows are, and no column has nothing in common with the original's."""
    columns = Columns()
    is_turned = isinstance(newer, RestoredTensor) and newer.undo is turned  # its rows are columns
    blocks = [(older.read().T, newer.read().T)] if is_turned else Pair(older, newer).pairs()
    for x, y in blocks:
        if not _resembles(x, y).all():
            return False
        columns.add(x, y)
    return not columns.are_lost


class Columns:
    """Products of the columns of two matrices: a few erased ones hardly move a row."""

    def __init__(self) -> None:
        self.rows, self.sums = 0, np.zeros((3, 1))  # squares of both and products, (3, width)
        self._telling = np.zeros(1)  # values of each that no cell of zero holds

    def add(self, x: np.ndarray, y: np.ndarray, half: np.ndarray | float = 0.0) -> None:
        """Look at rows (n, width); half of their grids' steps."""
        x, y = x.astype(np.float64), y.astype(np.float64)
        self.rows += len(x)
        self.sums = self.sums + np.stack([(p * q).sum(axis=0) for p, q in ((x, x), (y, y), (x, y))])
        self._telling = self._telling + (np.abs(x) > half).sum(axis=0)

    @property
    def are_lost(self) -> bool:
        """True if a column resembles its original no more than chance would have it."""
        if self.rows < FEWEST_ROWS:
            return False
        of_x, of_y, both = self.sums
        groups = of_x.reshape(-1, SHARED) if len(of_x) % SHARED == 0 else of_x[None]
        is_large = (groups >= OF_LARGEST**2 * groups.max(axis=1, keepdims=True)).ravel()
        is_large &= (of_x > self.rows * FLUSHED**2) & (self._telling >= NOT_ZERO * self.rows)
        return bool(
            (is_large & (both <= BY_CHANCE / np.sqrt(self.rows) * np.sqrt(of_x * of_y))).any()
        )


class Leaning:
    """Values off their nearest levels to one side, as of a factor; a search has no side."""

    def __init__(self, of_all: float) -> None:
        self._of_all, self._a_row, self._columns = of_all, False, np.zeros((3, 1))

    def add(self, x: np.ndarray, missed: np.ndarray) -> None:
        """Look at rows (n, width), and how far each value is from the nearest level."""
        sums = np.stack([missed * x, x * x, np.square(missed * x)])
        self._a_row = self._a_row or _leans(sums.sum(axis=2), LEANING)
        self._columns = self._columns + sums.sum(axis=1)

    @property
    def is_shown(self) -> bool:
        """True if a row, a column or all values lean."""
        everything = self._columns.sum(axis=1, keepdims=True)
        return self._a_row or _leans(self._columns, LEANING) or _leans(everything, self._of_all)


def _missed(placed: OnGrids) -> np.ndarray:
    """Whole steps of each value from its nearest level; zero at the ends of a grid."""
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


def mostly_unpacked(dtypes: Sequence[tuple[str, str]], equal: Sequence[bool]) -> list[int]:
    """Places of floats and packed values where most such pairs hold equal values.

    These were unpacked, so that there was nothing left to round: what differs was changed.
    """
    pairs, same = Counter(dtypes), Counter(compress(dtypes, equal))
    unpacked = {(a, b) for a, b in pairs if (a in BITS) != (b in BITS)}
    return [i for i, pair in enumerate(dtypes) if pair in unpacked and 2 * same[pair] > pairs[pair]]


def _made_up_for(off: np.ndarray, half: np.ndarray) -> bool:
    """True if errors within cells make up for those beyond, in each row: distances (n, width)."""
    within, beyond = np.where(off <= half, off, 0.0), np.maximum(off - half, 0.0)
    by_rounding, pushed = (np.square(each).sum(axis=1) for each in (within, beyond))
    return bool((by_rounding >= PUSHED * pushed).all())


def _within(older: Tensor, newer: Tensor, bounds: Bounds) -> str:
    """The distance of values from their originals, in words; empty where they are too far."""
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
        steps = [each.reshape(-1, width)[is_left] for each in (off, half)]
        if not (
            ratio <= bounds.error
            and step <= bounds.farthest
            and ends.max(initial=0.0) <= BEYOND
            and is_far <= OUTLIERS
            and _made_up_for(*steps)
            and _resembles(x, y).all()
        ):
            return ""
        used.add(stored.placed)
        x, y, size = (each.reshape(-1, width) for each in (*stored.placed[:2], half))
        columns.add(x, y, size)
        leaning.add(x, _missed(stored.placed).reshape(-1, width))
        in_cells += int(np.count_nonzero(inside))
        worst, farthest = max(worst, ratio), max(farthest, step)
        clipped = max(clipped, ends.max(initial=0.0))
    share = in_cells / prod(newer.shape)
    if share < bounds.in_cells or used.hardly or columns.are_lost or leaning.is_shown:
        return ""
    where = f"{group} values" if bounds.group else "row"
    return (
        f"{share:.1%} of values in their cells; "
        f"error {worst:.2f} times that of rounding to the nearest in the worst {where}, "
        f"a value at most {farthest:.2g} half-steps from its level, "
        f"clipped by at most {clipped:.2g}"
    )

"""One tensor as the other rounded, in the ways that converters have besides one cast."""

from collections.abc import Iterator

import numpy as np

from weightscope.checkpoint.adapters.lora import LowRank, MergedTensor
from weightscope.checkpoint.blocks import Block
from weightscope.checkpoint.checkpoint import Tensor
from weightscope.model.rows.gguf import RestoredTensor, logarithm
from weightscope.pairs.deeds.deed import Deed, Proof, Sees, What, deed
from weightscope.pairs.deeds.pair import Pair
from weightscope.pairs.deeds.rounding import CASTS, FRACTION, SMALLEST

SUMMED = ("BF16", "F16")  # floats besides float32 that an adapter is merged in
ROUNDED_BEFORE = {"F16": ("BF16",), "F8_E4M3": ("BF16", "F16"), "F8_E5M2": ("BF16", "F16")}


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
                    x.dtype == np.float32 and np.array_equal(then(CASTS[first](x)), y, True)
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

"""The one search for what was done to a tensor, and the last words where nothing explains it."""

from collections.abc import Sequence
from math import prod, sqrt

import numpy as np

from weightscope.checkpoint.blocks import Block
from weightscope.checkpoint.checkpoint import Tensor, WholeTensor
from weightscope.heads.tensors.measure import BITS
from weightscope.model.metrics.spectra import low_rank
from weightscope.pairs.deeds import orders, scales, values  # noqa: F401 - register their deeds
from weightscope.pairs.deeds.blocks import classify
from weightscope.pairs.deeds.change import Change
from weightscope.pairs.deeds.deed import Deed, Proof, Sees, What, find
from weightscope.pairs.deeds.pair import Pair
from weightscope.pairs.deeds.thresholds import LOWEST, MARGIN, OF_TOUCHED, UNEVEN
from weightscope.pairs.deeds.views import TABLES, Sizes, View, error_of, tolerance_of, views_of

# Deeds that say only how much changed, not what was done.
UNEXPLAINED = frozenset({What.TUNED, What.UNRELATED, What.FEW_ROWS})


def find_deed(views: Sequence[View], sizes: Sizes) -> Deed | None:
    """The deed that makes B of A: views of all rows, and of a matrix of all columns too."""
    return find(Sees.VIEWS, views, sizes) if any(view.changed.any() for view in views) else None


def deed_of(pair: Pair, sizes: Sizes, *, is_stacked: bool = False) -> tuple[Deed | None, int]:
    """The deed that explains a tensor, and how many of its rows or columns changed.

    is_stacked: it holds several experts, one after another.
    """
    views = views_of(pair)
    if is_stacked:
        sizes = sizes._replace(stacked=pair.b.shape[0])
    found = find_deed(views, sizes)
    if is_stacked and (found is None or found.what in UNEXPLAINED):
        found = _transposed_experts(pair, tolerance_of(pair)) or found
    return found, min(int(view.changed.sum()) for view in views)


def _transposed_experts(pair: Pair, tolerance: float) -> Deed | None:
    """Detect that the first of several square experts is transposed."""
    *_, rows, width = pair.a.shape
    if len(pair.a.shape) != 3 or rows != width:
        return None
    are_whole = isinstance(pair.a, WholeTensor) or isinstance(pair.b, WholeTensor)
    stop = prod(pair.a.shape) if are_whole else rows * width
    x, y = (
        Block(each, 0, stop).values()[: rows * width].reshape(rows, width)
        for each in (pair.a, pair.b)
    )
    if error_of(x.T, y) > tolerance:
        return None
    return Deed(What.TRANSPOSED, ", within each expert", proof=Proof.VALUES)


def last_words(pair: Pair, change: Change, role: str, found: Deed | None, touched: int) -> Deed:
    """A change that no transformation explains; touched: rows or columns that changed.

    What changed few rows, or a table of rows, has no more rank than these: a low one says nothing
    of a LoRA.
    """
    if np.isfinite(change.moved) and role.removesuffix(".bias") not in TABLES:
        change = classify(pair, change)
        rank, detail = change.rank, f"rank {change.rank}"
        if change.kind is not What.LOW_RANK:
            rank = _rank(pair, change, tolerance_of(pair))
            detail = f"rank {rank}, up to the rounding of {pair.b.dtype}"
        if rank is not None and rank <= OF_TOUCHED * touched:
            return Deed(What.LOW_RANK, detail=detail, rank=rank)
    if found is not None:
        return found
    if not np.isfinite(change.moved):
        return Deed(What.NOT_FINITE)
    for made, tensor in (("B", pair.b), ("A", pair.a)):
        if (value := _only_value(tensor)) is not None:
            return Deed(What.CONSTANT, detail=f"{value:.3g}", made=made)
    alike = f"cosine {change.cosine:.3f}" if change.is_matrix else ""
    return Deed(What.TUNED if change.is_tuned else What.UNRELATED, detail=alike)


def _only_value(tensor: Tensor) -> float | None:
    """The value that all of a tensor has; None of several."""
    value = None
    for _, start, stop in Pair(tensor, tensor).blocks():
        block = Block(tensor, start, stop).values()
        if np.ptp(block) or value not in (None, float(block[0])):
            return None
        value = float(block[0])
    return value


def _rank(pair: Pair, change: Change, tolerance: float) -> int | None:
    """The rank of a change that was quantised afterwards; None where none is, or it is not low."""
    shape = pair.a.shape
    is_quantised = bool({pair.a.dtype, pair.b.dtype} - {*BITS})
    if len(shape) != 2 or not is_quantised or not np.isfinite(change.moved):
        return None
    noise = UNEVEN * tolerance / MARGIN * sqrt(change.squares_b / prod(shape))
    rank = low_rank(pair.rows, (shape[0], shape[1]), noise)
    return rank if rank is not None and rank <= LOWEST * min(shape) else None

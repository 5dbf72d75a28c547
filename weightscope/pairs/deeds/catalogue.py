"""The one search for what was done to a tensor, and the last words where nothing explains it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod, sqrt

import numpy as np

from weightscope.checkpoint.blocks import Block
from weightscope.checkpoint.checkpoint import Checkpoint, Tensor, WholeTensor
from weightscope.core.compute.cores import in_threads
from weightscope.heads.tensors.measure import BITS
from weightscope.model.metrics.spectra import evenly_spread, low_rank
from weightscope.pairs.deeds import mixers, orders, values  # noqa: F401 - register their deeds
from weightscope.pairs.deeds.blocks import Seen
from weightscope.pairs.deeds.change import Change, first_pass, with_shown_casts
from weightscope.pairs.deeds.deed import (
    UNTOUCHED,
    Deed,
    Proof,
    Sees,
    What,
    brief,
    called,
    find,
)
from weightscope.pairs.deeds.directions import Along, first_directions
from weightscope.pairs.deeds.orders import ROTATED
from weightscope.pairs.deeds.pair import SAMPLED_ROWS, Pair
from weightscope.pairs.deeds.rounding import FRACTION
from weightscope.pairs.deeds.thresholds import (
    AT_ANGLES,
    IN_A_SAMPLE,
    LEAST_FACTOR,
    LOWEST,
    MARGIN,
    NEARLY_ONE,
    NEARLY_ONE_DIRECTION,
    OF_TOUCHED,
    UNEVEN,
)
from weightscope.pairs.deeds.views import (
    LARGEST_WHOLE,
    TABLES,
    Sizes,
    View,
    error_of,
    first_views,
    parts_of,
    tolerance_of,
    views_of,
)

FIRST_LOOK = 1 << 16  # values of a matrix that is seen whole at once
# Deeds that say only how much changed, not what was done.
UNEXPLAINED = frozenset({What.TUNED, What.UNRELATED, What.FEW_ROWS})


def compare_pairs(a: Checkpoint, b: Checkpoint, pairs: Sequence[Pair]) -> list[Change]:
    """Each pair's change, with its kind."""
    changes = with_shown_casts(pairs, first_pass(a, b, pairs))
    converted = {i: classify(pair, changes[i]) for i, pair in enumerate(pairs) if pair.is_converted}
    stored = [i for i in range(len(pairs)) if i not in converted]
    kinds = in_threads(lambda i: classify(pairs[i], changes[i]), stored)
    converted |= zip(stored, kinds, strict=True)
    return [converted[i] for i in range(len(pairs))]


def classify(pair: Pair, change: Change, *, may_look_again: bool = True) -> Change:
    """The change with its kind; the pair is read again where the first pass does not settle it.

    may_look_again: a change not explained block by block is seen whole.
    """
    if pair.problem:
        return change
    done = UNTOUCHED
    if change.values_changed and not np.isfinite(change.moved):
        done = Deed(What.NOT_FINITE)
    elif change.values_changed:
        done = find(Sees.BLOCKS, Seen(pair, change)) or Deed(What.TUNED)
        if may_look_again and done.what is What.TUNED:
            done = deed_by_views(pair, change) or done
    a, b = pair.a.shape, pair.b.shape
    is_likely = done.rank is not None and done.rank <= NEARLY_ONE
    if done.what in (What.TUNED, What.ZEROED) and a == b:
        is_likely = _may_be_along(pair)
    along = _along(pair, done.rank) if is_likely else ()
    if a != b:
        rest = brief(done) or called(done.what)
        detail = f"{a[0]:,} rows to {b[0]:,}; those that both have: {rest}"
        done = Deed(What.RESIZED, detail=detail, rank=done.rank)
    return replace(change, deed=done, along=along)


def exceeds_rounding(change: Change) -> bool:
    """True if a change exceeds a step of the coarser dtype, and a conversion's noise."""
    step = 2.0 ** -min(FRACTION.get(dtype, 23) for dtype in change.dtypes)
    return change.change > max(step, LEAST_FACTOR)


@np.errstate(all="ignore")
def deed_by_views(pair: Pair, change: Change) -> Deed | None:
    """The proved deed of a vector or a matrix, tried on a few rows and columns first.

    A matrix with rows that no longer resemble their former values may be quantised as well.
    """
    shape, is_unlike = pair.a.shape, not change.is_tuned
    if len(shape) > 2 or shape != pair.b.shape or not exceeds_rounding(change):
        return None
    # the number of heads is not known here
    sizes = Sizes("" if {*pair.role.split("+")} & ROTATED else pair.role or pair.a.name)
    may_be_cut = abs(change.squares - change.squares_b - change.moved) <= AT_ANGLES * change.moved
    if not is_unlike and not may_be_cut and len(shape) == 2:
        first = first_views(pair)
        is_unlike = any(view.has_unlike for view in first)
        is_packed = bool({pair.a.dtype, pair.b.dtype} - {*BITS})
        if not is_unlike and (is_packed or not _proved(first, sizes)):
            return None
    done = None
    views: list[View] = []
    for most in (FIRST_LOOK, LARGEST_WHOLE):
        if views and prod(shape) > LARGEST_WHOLE:
            break  # the same rows and columns would be seen again
        views = views_of(pair, most)
        done = _proved(views, sizes)
        if done is None and is_unlike:
            done = _proved([view.on_grids for view in views], sizes)
        if prod(shape) <= most or (done is None and not may_be_cut):
            return done
    return _of_all(pair, done, sizes, views)


def _proved(views: Sequence[View], sizes: Sizes) -> Deed | None:
    """The deed that makes B of A, where it is more than a likeness."""
    done = find_deed(views, sizes)
    return None if done is None or done.proof is Proof.NONE else done


def _may_be_along(pair: Pair) -> bool:
    """True if a sample of a matrix's change is nearly of rank one, as after an edit and a cut."""
    if len(pair.a.shape) != 2 or min(pair.a.shape) < 4:
        return False
    rows = next(pair.rows())
    sample = rows[np.ix_(*(evenly_spread(n, SAMPLED_ROWS) for n in rows.shape))]
    energies = np.linalg.svd(sample, compute_uv=False) ** 2
    return bool(energies[0] >= IN_A_SAMPLE * energies.sum())


def _along(pair: Pair, rank: int | None) -> tuple[Along, ...]:
    """Both directions of a change of nearly rank one; a stack's matrices share one."""
    sides = [first_directions(partial(pair.pairs, turned)) for turned in pair.sides]
    share, *along = max(sides, key=lambda side: side[0])
    # beyond rank one the rest is rounding
    if rank != 1 and share < NEARLY_ONE_DIRECTION:
        return ()
    return tuple(along[-1:] if pair.is_stack else along)


def find_deed(views: Sequence[View], sizes: Sizes) -> Deed | None:
    """The deed that makes B of A: views of all rows, and of a matrix of all columns too."""
    return find(Sees.VIEWS, views, sizes) if any(view.changed.any() for view in views) else None


def _of_all(pair: Pair, done: Deed | None, sizes: Sizes, spread: Sequence[View]) -> Deed | None:
    """A deed that was found by all values, or by some and every part of a large tensor has it."""
    if prod(pair.a.shape) <= LARGEST_WHOLE or done is None or done.proof is Proof.NONE:
        return done
    for views in parts_of(pair, spread, LARGEST_WHOLE):
        here = find_deed(views, sizes)
        if here is not None and here.proof is Proof.MOST:
            done = here
        elif here is None or (here.what is not done.what and done.proof is not Proof.MOST):
            return None
    return done


def deed_of(pair: Pair, sizes: Sizes, *, is_stacked: bool = False) -> tuple[Deed | None, int]:
    """The deed that explains a tensor, and how many of its rows or columns changed.

    is_stacked: it holds several experts, one after another.
    """
    views = views_of(pair, LARGEST_WHOLE)
    if is_stacked:
        sizes = sizes._replace(stacked=pair.b.shape[0])
    done = _of_all(pair, find_deed(views, sizes), sizes, views)
    if is_stacked and (done is None or done.what in UNEXPLAINED):
        done = _transposed_experts(pair, tolerance_of(pair)) or done
    return done, min(int(view.changed.sum()) for view in views)


def _transposed_experts(pair: Pair, tolerance: float) -> Deed | None:
    """Detect that the first of several square experts is transposed; the others are not read."""
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
    return Deed(What.TRANSPOSED, ", within each expert")


def last_words(pair: Pair, change: Change, role: str, done: Deed | None, touched: int) -> Deed:
    """A change that no transformation explains; touched: rows or columns that changed.

    What changed few rows, or a table of rows, has no more rank than these: a low one says nothing
    of a LoRA.
    """
    if np.isfinite(change.moved) and role.removesuffix(".bias") not in TABLES:
        change = classify(pair, change, may_look_again=False)
        rank, detail = change.rank, f"rank {change.rank}"
        if change.kind is not What.LOW_RANK:
            rank = _rank(pair, change, tolerance_of(pair))
            detail = f"rank {rank}, up to the rounding of {pair.b.dtype}"
        if rank is not None and rank <= OF_TOUCHED * touched:
            return Deed(What.LOW_RANK, detail=detail, rank=rank)
    if done is None and change.kind is What.FEW_ROWS:
        done = change.deed
    if done is not None:
        return done
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

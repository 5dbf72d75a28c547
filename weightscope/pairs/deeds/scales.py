"""Values multiplied by factors, and what was done with a packing's scales."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from weightscope.pairs.deeds.deed import Deed, Proof, What, deed
from weightscope.pairs.deeds.orders import BLOCKS
from weightscope.pairs.deeds.thresholds import (
    MARGIN,
    MOSTLY_ONE,
    ONE_FACTOR,
    SLIPPED,
    WITH_ONE_FACTOR,
)
from weightscope.pairs.deeds.views import Sizes, View


@deed(What.NEGATED, "negated", order=170)
def rescaled(views: Sequence[View], _: Sizes) -> Deed | None:
    """A factor for all values, each row or column, both, or blocks: the first that fits."""
    view = views[0]
    with np.errstate(all="ignore"):
        p, q = (side.at(*view.few).values.astype(np.float64) for side in (view.x, view.y))
        factor = float(np.vdot(p, q) / np.vdot(p, p))
        if view.gives(replace(view.x, values=-view.x.values), computed=False):
            return view.named(Deed(What.NEGATED, proof=Proof.VALUES))
        if np.isfinite(factor) and factor != 0 and view.gives(view.x.times(factor)):
            is_usual = 1 / SLIPPED < abs(factor) < SLIPPED
            slip = "" if is_usual else ": a scale missing, inverted or applied twice"
            return view.named(Deed(What.SCALED, slip, f"{factor:.6g}", proof=_proof(view)))
        if len(views) == 1:
            return None
        by_row = [_by_row(each) for each in views]
        by_both = None if by_row[0] else _by_row_and_column(view)
        if done := by_row[0] or by_row[1] or by_both:
            return done
        # blocks lie along the inputs: columns, or rows where inputs are these
        for offset in (False, True):
            for each in views:
                if done := _by_block(each, offset):
                    return done
    return None


def _proof(view: View) -> Proof:
    return Proof.GRID if view.is_packed else Proof.VALUES


def _factors(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Least-squares factors of groups along the last axis, (..., 1); one for zeros that stayed."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    factors = np.vecdot(x, y) / np.vecdot(x, x)
    return np.where((x == y).all(axis=-1), 1.0, factors)[..., None]


def _stand_out(made: np.ndarray, x: np.ndarray, room: np.ndarray) -> bool:
    """True if scaled groups along the last axis exceed rounding; if not, any x would do."""
    sizes, least = (np.square(each, dtype=np.float64).sum(axis=-1) for each in (made, room))
    is_scaled = (made != x).any(axis=-1)
    return bool((sizes > MARGIN**2 * least)[is_scaled].all() and np.isfinite(sizes).all())


def _by_row(view: View) -> Deed | None:
    """A factor for each row."""
    if view.y.values.shape[1] < WITH_ONE_FACTOR:
        return None
    columns = view.few[1]
    factors = _factors(*(side.at(slice(None), columns).values for side in (view.x, view.y)))
    made = view.x.times(factors)
    if not _stand_out(made.values, view.x.values, view.y.room) or not view.gives(made):
        return None
    return _named_scale("row", view, view.x.values, factors)


def _by_row_and_column(view: View) -> Deed | None:
    """Factors of rows times factors of columns, by medians."""
    if min(view.y.values.shape) < WITH_ONE_FACTOR:
        return None
    rows, columns = view.few
    of_rows, of_columns = (
        np.log(np.abs(view.y.at(*few).values.astype(np.float64) / view.x.at(*few).values))
        for few in ((slice(None), columns), (rows, slice(None)))
    )
    if np.isnan(of_rows).all(axis=1).any() or np.isnan(of_columns).all(axis=0).any():
        return None
    logs = np.nanmedian(of_rows, axis=1, keepdims=True)
    if not np.isfinite(logs).all():
        return None
    factors = np.exp(logs + np.nanmedian(of_columns - logs[rows], axis=0))  # (n, c)
    made, x, room = view.x.times(factors), view.x.values, view.y.room
    if not (_stand_out(made.values, x, room) and _stand_out(made.values.T, x.T, room.T)):
        return None
    return _named_scale("row and by column", view, x, factors) if view.gives(made) else None


def _by_block(view: View, offset: bool) -> Deed | None:
    """A factor for each block of neighbours, the widest first; with `offset`, a shift of each."""
    width = view.y.values.shape[1]
    for block in BLOCKS:
        if width % block or width == block:
            continue
        rows = view.few[0]
        if _in_blocks(View(view.x.at(rows), view.y.at(rows)), block, offset) is None:
            continue
        factors = _in_blocks(view, block, offset)
        if factors is not None:
            where = f"blocks of {block} with an offset each" if offset else f"blocks of {block}"
            x = view.x.values.reshape(*factors.shape[:2], block)
            return _named_scale("block", view, x, factors, where)
    return None


def _in_blocks(view: View, block: int, offset: bool) -> np.ndarray | None:
    """The factor of each block, (n, blocks, 1), if they explain y."""
    x, y = (
        side.values.reshape(len(side.values), -1, block).astype(np.float64)
        for side in (view.x, view.y)
    )
    means = [each.mean(axis=-1, keepdims=True) if offset else np.zeros(1) for each in (x, y)]
    factors = _factors(x - means[0], y - means[1])
    made = (x - means[0]) * factors
    if not _stand_out(made, x - means[0], view.y.room.reshape(x.shape)):
        return None
    made = (made + means[1]).reshape(view.x.values.shape)
    return factors if view.gives(replace(view.x, values=made)) else None


deed(What.BLOCK_FACTORS, "scaled {way}", called="with blocks multiplied by factors")


def _named_scale(
    along: str, view: View, x: np.ndarray, factors: np.ndarray, where: str = ""
) -> Deed | None:
    """The deed of shared factors along the last axis; those that are not one, where most are."""
    is_one = np.abs(factors - 1) <= view.tolerance
    scaled = factors[~is_one]
    if not len(scaled):
        return None
    ends = dict.fromkeys(f"{each:.3g}" for each in (scaled.min(), scaled.max()))
    spread = f"factor{'s' * (len(ends) > 1)} {' to '.join(ends)}"
    details = [where, spread]
    way = f"by {along}: scales "
    if is_one.mean() >= MOSTLY_ONE:
        way = f"in some {along.replace('row and by column', 'rows and column')}s"
        count = view.where if along == "row" else f"{len(scaled)} of {factors.size}"
        details = [where, count, spread]
    else:
        way += slip_of(x, factors)
    return Deed(
        What.BLOCK_FACTORS if along == "block" else What.FACTORS,
        way,
        ", ".join(filter(None, details)),
        columns=view.columns and along == "row",
        proof=_proof(view),
        left=view.left,
    )


def slip_of(x: np.ndarray, factors: np.ndarray) -> str:
    """The slip with scales, where y = factors x and each was made for the largest of its values.

    Scales of weights are below one. Without its scale s, x = s codes becomes x / s, and divided by
    it x / s^2, both larger; multiplied once more it is s x, smaller. Another group's scale gives
    factors around one.
    """
    sizes = np.abs(x).max(axis=-1, keepdims=True) * np.ones_like(factors)
    with np.errstate(all="ignore"):
        # (n, groups of a row)
        f, a = (np.log(np.abs(each.reshape(len(x), -1))) for each in (factors, sizes))
    is_known = np.isfinite(f) & np.isfinite(a)
    if not is_known.any() or abs(f[is_known].mean()) <= f[is_known].std():
        return "of the wrong axis or in another order"
    if f[is_known].mean() < 0:
        return "applied twice"
    points = []
    # rows that share a factor have one scale: the largest value of all counts
    for column in range(f.shape[1]):
        starts = np.flatnonzero(np.append(True, np.abs(np.diff(f[:, column])) > ONE_FACTOR))
        points += [*zip(f[starts, column], np.maximum.reduceat(a[:, column], starts), strict=True)]
    known = np.array([point for point in points if np.isfinite(point).all()])
    spread = known[:, 1].var()
    slope = float(np.cov(known.T, bias=True)[0, 1] / spread) if spread else -1.0
    return "inverted" if slope < -1.5 else "missing"

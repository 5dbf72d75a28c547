"""Values read as another dtype, transposed, erased, shifted, or multiplied by factors."""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

import numpy as np

from weightscope.pairs.deeds.deed import (
    Deed,
    Proof,
    Sees,
    What,
    deed,
    find,
    in_digits,
    search,
    sentence,
)
from weightscope.pairs.deeds.orders import ANY_ORDER, BLOCKS
from weightscope.pairs.deeds.thresholds import (
    FARTHEST,
    FEWEST_RANKS,
    MARGIN,
    MOSTLY_ONE,
    ONE_FACTOR,
    SLIPPED,
    WITH_ONE_FACTOR,
)
from weightscope.pairs.deeds.views import EVERYWHERE, Side, Sizes, View, explained


@deed(What.REINTERPRETED, "dtype reinterpreted: {way}", called="read as another dtype", order=110)
def reinterpreted(views: Sequence[View], _: Sizes) -> Deed | None:
    """A dtype read as another one, or bytes in the other order."""
    view = views[0]
    if view.x.half is not None or not view.y.values.any():  # zeros are erased
        return None
    single = np.ascontiguousarray(view.x.values, dtype=np.float32)
    few, y = _readings(np.ascontiguousarray(single[np.ix_(*view.few)])), view.y.at(*view.few)
    tries = [name for name, made in few.items() if explained(Side(made), y, computed=True).all()]
    readings = _readings(single) if tries else {}
    names = [name for name in tries if explained(Side(readings[name]), view.y, computed=True).all()]
    if not names:
        return None
    return Deed(What.REINTERPRETED, names[0].partition(", ")[0], proof=Proof.VALUES)


def _readings(single: np.ndarray) -> dict[str, np.ndarray]:
    """Float32 values as a reader sees them that takes their dtype for another."""
    bits = single.view("<u4")
    cut, nearest = (
        (bits + more >> 16).astype("<u2") for more in (np.uint32(0), 0x7FFF + (bits >> 16 & 1))
    )
    with np.errstate(all="ignore"):
        half = single.astype(np.float16)
        readings = {
            "F16 read as BF16": _from_upper(half.view("<u2")),
            "F32 with bytes in the other order": single.byteswap(),
            "F16 with bytes in the other order": half.byteswap().astype(np.float32),
        }
        for how, upper in (("cut off", cut), ("to the nearest", nearest)):
            readings[f"BF16 read as F16, {how}"] = upper.view("<f2").astype(np.float32)
            readings[f"BF16 with bytes in the other order, {how}"] = _from_upper(upper.byteswap())
    return readings


def _from_upper(bits: np.ndarray) -> np.ndarray:
    """float32 of its upper 16 bits."""
    return (bits.astype("<u4") << 16).view("<f4")


@deed(What.TRANSPOSED, "transposed{way}", order=120)
def transposed(views: Sequence[View], _: Sizes) -> Deed | None:
    """A square matrix with rows for columns."""
    view, *along_columns = views
    turned = along_columns[0].x if along_columns else None
    if turned is None or turned.values.shape != view.x.values.shape:
        return None
    if not view.gives(turned, computed=False):
        return None
    return view.named(Deed(What.TRANSPOSED, proof=Proof.VALUES))


deed(What.TRUNCATED, "zeros at the end: a truncated write{where}{columns}", called="cut short")


@search(order=130)
def erased_rows(views: Sequence[View], sizes: Sizes) -> Deed | None:
    """NaN, zeros or a cut tail in some rows, in B or else in A, where the others are as before."""
    for view in views:
        if not view.changed.any():
            continue
        for made, before, after in (("B", view.x, view.y), ("A", view.y, view.x)):
            if done := _erased(before, after, view.changed, sizes):
                return replace(done, detail=view.where, made=made, columns=view.columns)
    return None


def _erased(before: Side, after: Side, changed: np.ndarray, sizes: Sizes) -> Deed | None:
    """The erasure of rows that changed, if they were erased."""
    y = after.values
    if not np.isfinite(y).all() and not np.isfinite(y[changed]).all():
        return Deed(What.NOT_FINITE) if np.isfinite(before.values[changed]).all() else None
    places = np.flatnonzero(changed)
    if y[places[-1]].any():
        return None  # a cut tail has zeros here too
    first, is_tail = places[0], len(places) > 1 and len(places) == len(y) - places[0]
    here = after.at(slice(first, first + 1))
    # a write may end within the first row
    kept = np.flatnonzero(np.abs(here.values) > here.room)
    written = slice(first, first + 1), slice(0, kept[-1] + 1 if len(kept) else 0)
    is_tail = is_tail and len(places) < len(y) and not y[first + 1 :].any()
    if is_tail and explained(before.at(*written), after.at(*written)).all():
        return Deed(What.TRUNCATED, proof=Proof.VALUES)
    if y[changed].any():
        return None
    rows = "" if len(places) == len(y) else f"{sizes.rows} "
    return Deed(What.ZEROED, rows, proof=Proof.VALUES)


@deed(What.NORM_OFFSET, "norm: 1 {way}", called="with 1 added or subtracted", order=150)
def offset_of_norm(views: Sequence[View], sizes: Sizes) -> Deed | None:
    """One number added to the gains of a norm, once or twice."""
    view = views[0]
    if "norm" not in sizes.role or sizes.plain_role != sizes.role:
        return None
    for number in (1, -1, 2, -2):
        made = view.x.values.astype(np.float64) + number
        # gains may be stored with 1 more than they are read with
        stored = max(view.x.least, 1.0 + abs(number))
        if view.gives(replace(view.x, values=made, least=stored)):
            way = f"{'added' if number > 0 else 'subtracted'}{' twice' * (abs(number) == 2)}"
            return view.named(Deed(What.NORM_OFFSET, way, proof=Proof.VALUES))
    return None


@deed(What.OFF_BY_STEPS, "{way}{where}", called="off by whole steps of their grid", order=160)
def off_by_steps(views: Sequence[View], _: Sizes) -> Deed | None:
    """Whole steps of a stored grid added to all values alike, or to some blocks of neighbours."""
    view = views[0]
    for half, sign, made in ((view.y.half, 1, "B"), (view.x.half, -1, "A")):
        width = view.y.values.shape[1]
        block = next((each for each in reversed(BLOCKS) if width % each == 0), width)
        if half is None or block < WITH_ONE_FACTOR:
            continue
        with np.errstate(all="ignore"):
            steps = (view.y.values.astype(np.float64) - view.x.values) / (2 * half)
            blocks = np.nan_to_num(steps, posinf=0, neginf=0).reshape(len(steps), -1, block)
            counts = np.rint(blocks.mean(axis=-1)).repeat(block, axis=1)
            shifted = replace(view.x, values=view.x.values + 2 * half * counts)
        kinds = np.unique(counts)
        if not (kinds.any() and view.gives(shifted)):
            continue
        done = Deed(What.OFF_BY_STEPS, made=made, proof=Proof.GRID, left=view.left)
        if len(kinds) > 1:
            share = np.count_nonzero(counts) / counts.size
            detail = f"{share:.0%} of values, {kinds.min():+.0f} to {kinds.max():+.0f}"
            way = "some values off by whole steps of their grid, as of zero points"
            return replace(done, way=way, detail=detail)
        size, direction = abs(int(kinds[0])), "high" if kinds[0] * sign < 0 else "low"
        number = ("one", "two", "three")[size - 1] if size < 4 else str(size)
        of_its_grid = f"{number} step{'s' * (size > 1)} of its grid"
        way = f"each value off by {of_its_grid}, as of zero points {number} too {direction}"
        return replace(done, way=way)
    return None


@deed(What.NEGATED, "negated", order=170)
def rescaled(views: Sequence[View], _: Sizes) -> Deed | None:
    """A factor for all values, each row or column, both, or blocks: the first that fits."""
    view = views[0]
    with np.errstate(all="ignore"):
        x, y = (side.at(*view.few) for side in (view.x, view.y))
        factor = float(_factors(x.values.reshape(-1), y.values.reshape(-1), view)[0])
        if view.gives(replace(view.x, values=-view.x.values), computed=False):
            return view.named(Deed(What.NEGATED, proof=Proof.VALUES))
        is_likely = np.isfinite(factor) and factor != 0 and view.may_give(x.times(factor))
        if is_likely and view.gives(view.x.times(factor)):
            is_usual = 1 / SLIPPED < abs(factor) < SLIPPED
            slip = "" if is_usual else ": a scale missing, inverted or applied twice"
            return view.named(Deed(What.SCALED, slip, in_digits(factor, 6), proof=_proof(view)))
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


def _factors(x: np.ndarray, y: np.ndarray, view: View) -> np.ndarray:
    """Factors of groups along the last axis, (..., 1); one for zeros that stayed.

    Of least squares, or the middle ones where a deed need not give every value.
    """
    x, y = x.astype(np.float64), y.astype(np.float64)
    factors = np.vecdot(x, y) / np.vecdot(x, x)
    if view.others is not None:
        factors = np.nanmedian(y / x, axis=-1)
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
    for rows in (view.few[0], slice(None)):
        x, y = (side.at(rows, view.few[1]) for side in (view.x, view.y))
        factors = _factors(x.values, y.values, view)
        if rows is view.few[0] and not view.may_give(x.times(factors)):
            return None
    made = view.x.times(factors)
    if not _stand_out(made.values, view.x.values, view.y.room) or not view.gives(made):
        return None
    return _named_scale("row", view, view.x.values, factors)


def _by_row_and_column(view: View) -> Deed | None:
    """Factors of rows times factors of columns, by medians."""
    if min(view.y.values.shape) < WITH_ONE_FACTOR:
        return None
    few, of_few = view.few, None
    for here in (few, EVERYWHERE):  # factors of few rows and columns rule most changes out
        of_rows, of_columns = (
            np.log(np.abs(view.y.at(*place).values.astype(np.float64) / view.x.at(*place).values))
            for place in ((here[0], few[1]), (few[0], here[1]))
        )
        if np.isnan(of_rows).all(axis=1).any() or np.isnan(of_columns).all(axis=0).any():
            return None
        logs = np.nanmedian(of_rows, axis=1, keepdims=True)
        if not np.isfinite(logs).all():
            return None
        of_few = logs if of_few is None else of_few
        factors = np.exp(logs + np.nanmedian(of_columns - of_few, axis=0))  # (n, c)
        made = view.x.at(*here).times(factors)
        if here is few and not view.may_give(made):
            return None
    x, room = view.x.values, view.y.room
    if not (_stand_out(made.values, x, room) and _stand_out(made.values.T, x.T, room.T)):
        return None
    return _named_scale("row and by column", view, x, factors) if view.gives(made) else None


def _by_block(view: View, offset: bool) -> Deed | None:
    """A factor for each block of neighbours, the widest first; with `offset`, a shift of each."""
    width, rows = view.y.values.shape[1], view.few[0]
    few = View(view.x.at(rows), view.y.at(rows))
    for block in BLOCKS:
        if width % block or width == block or _in_blocks(few, block, offset) is None:
            continue
        factors = _in_blocks(view, block, offset)
        if factors is not None:
            where = f"blocks of {block} with an offset each" if offset else f"blocks of {block}"
            x = view.x.values.reshape(*factors.shape[:2], block)
            return _named_scale("block", view, x, factors, where)
    return None


def _in_blocks(view: View, block: int, offset: bool) -> np.ndarray | None:
    """The factor of each block, (n, blocks, 1), if they explain y."""
    first = view.few[0][:4]  # most changes end here
    for rows in (first, slice(None)):
        x, y = view.x.at(rows), view.y.at(rows)
        p, q = (each.values.reshape(len(each.values), -1, block).astype(float) for each in (x, y))
        means = [each.mean(axis=-1, keepdims=True) if offset else np.zeros(1) for each in (p, q)]
        factors = _factors(p - means[0], q - means[1], view)
        scaled = (p - means[0]) * factors
        made = replace(x, values=(scaled + means[1]).reshape(x.values.shape))
        if view.others is None and not explained(made, y, computed=True).all():
            return None
    if not _stand_out(scaled, p - means[0], y.room.reshape(p.shape)):
        return None
    return factors if view.gives(made) else None


deed(What.BLOCK_FACTORS, "scaled {way}", called="with blocks multiplied by factors")


def _named_scale(
    along: str, view: View, x: np.ndarray, factors: np.ndarray, where: str = ""
) -> Deed | None:
    """The deed of shared factors along the last axis; those that are not one, where most are."""
    if view.others is not None:
        mostly_other = view.others.reshape(*factors.shape, -1).mean(axis=-1) > 1 / 2
        factors = np.where(mostly_other, 1.0, factors)
    is_one = np.abs(factors - 1) <= view.tolerance
    scaled = factors[~is_one]
    if not len(scaled):
        return None
    ends = dict.fromkeys(in_digits(float(each)) for each in (scaled.min(), scaled.max()))
    spread = f"factor{'s' * (len(ends) > 1)} {' to '.join(ends)}"
    details = [where, spread]
    way = f"by {along}"
    if is_one.mean() >= MOSTLY_ONE:
        way = f"in some {along.replace('row and by column', 'rows and column')}s"
        count = view.where if along == "row" else f"{len(scaled)} of {factors.size}"
        details = [where, count, spread]
    elif view.others is None:
        way += f": scales {slip_of(x, factors)}"
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


@deed(What.PRUNED, "some values zeroed{where}", called="with some values zeroed", order=190)
def some_zeroed(views: Sequence[View], _: Sizes) -> Deed | None:
    """Some values zeros in B, or else in A, and the others as they were."""
    view = views[0]
    x, y = view.x.values, view.y.values
    if view.is_packed:  # rounding leaves zeros
        return None
    for made, before, after in (("B", x, y), ("A", y, x)):
        gone = (after == 0) & (np.abs(before) > FARTHEST * (view.x.room + view.y.room))
        if gone.any() and view.gives(replace(view.x, values=np.where(gone, y, x)), computed=False):
            detail = f"{np.count_nonzero(gone):,} of {gone.size:,}"
            return view.named(Deed(What.PRUNED, detail=detail, made=made, proof=Proof.VALUES))
    return None


@deed(What.RANK_CUT, "smallest singular values dropped{where}", order=195)
def cut_to_rank(views: Sequence[View], _: Sizes) -> Deed | None:
    """The largest singular values and their vectors in B, or else in A, and nothing of the others.

    Eckart and Young 1936: the nearest matrix of that rank.
    """
    view = views[0]
    if not view.is_whole or view.is_packed or min(view.y.values.shape) < FEWEST_RANKS:
        return None
    for made, seen in (("B", view), ("A", View(view.y, view.x))):
        if (cut := _projected(seen.x, seen.y)) is not None and seen.gives(cut[1]):
            detail = f"rank {cut[0]:,} of {min(view.y.values.shape):,}"
            return seen.named(Deed(What.RANK_CUT, detail=detail, made=made, proof=Proof.VALUES))
    return None


@np.errstate(all="ignore")
def _projected(before: Side, after: Side) -> tuple[int, Side] | None:
    """The rank of `after`, and `before` in its row space; None if larger singular values went.

    Room is for sums over singular vectors, and for vectors of values that were rounded.
    """
    x, y = before.values, after.values
    if not (np.isfinite(x).all() and np.isfinite(y).all()) or not np.ptp(y):
        return None
    rounded = float(np.sqrt(np.mean(np.square(after.room, dtype=np.float64))))
    probe = np.random.default_rng(0).standard_normal((x.shape[1], 8)).astype(x.dtype)
    inside, size = np.linalg.norm((x - y) @ (y.T @ (y @ probe))), float(np.linalg.norm(y))
    noise = rounded * (sqrt(x.shape[0]) + sqrt(x.shape[1])) + 2.0**-22 * size  # spectral norm
    if not size or not inside <= 8 * noise * sqrt(x.shape[1]) * size**2 < np.inf:
        return None  # most changes end here
    u, sigma, vt = np.linalg.svd(y.astype(np.float64), full_matrices=False)
    rank = int((sigma > noise).sum())
    if not 0 < rank < len(sigma):
        return None
    values = x.astype(np.float64) @ vt[:rank].T @ vt[:rank]
    rest = x - values
    # singular vectors of `before` span both spaces, else the rest has a part in one of them
    is_apart = np.linalg.norm(u[:, :rank].T @ rest, 2) <= 8 * noise
    if not is_apart or np.linalg.norm(rest, 2) > sigma[rank - 1] + noise:
        return None
    room = np.full(x.shape, rounded + 2.0**-22 * sigma[0])
    return rank, replace(before, values=values, half=room)


@deed(
    What.ALL_BUT_SOME,
    "{way}, but for some values",
    called="changed in a known way but for some values",
    order=195,
)
def all_but_some(views: Sequence[View], sizes: Sizes) -> Deed | None:
    """A deed that gives more than half of the values that changed, and leaves others open."""
    sparing = [view.sparing for view in views]
    done = find(Sees.VIEWS, sparing, sizes, before=ANY_ORDER)
    left_over = next(filter(None, (view.where_others for view in sparing)), "")
    if done is None or done.proof is Proof.NONE or not left_over:
        return None
    detail = "; ".join(filter(None, (done.detail, f"others in {left_over}")))
    what, way = What.ALL_BUT_SOME, sentence(done)
    return replace(done, what=what, way=way, detail=detail, proof=Proof.MOST)


@search(order=200)
def some_rows(views: Sequence[View], _: Sizes) -> Deed | None:
    """Some rows or columns as they were, and others that nothing explains."""
    fewest = min(views, key=lambda each: each.changed.mean())
    if fewest.changed.all():
        return None
    way = "columns" if fewest.columns else "rows"
    return Deed(What.FEW_ROWS, way, fewest.where)

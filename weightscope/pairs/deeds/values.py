"""Values read as another dtype, transposed, shifted, or erased."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from weightscope.pairs.deeds.deed import Deed, Proof, What, deed, search
from weightscope.pairs.deeds.orders import BLOCKS
from weightscope.pairs.deeds.thresholds import FARTHEST, WITH_ONE_FACTOR
from weightscope.pairs.deeds.views import Side, Sizes, View, explained


@deed(What.REINTERPRETED, "dtype reinterpreted: {way}", called="read as another dtype", order=110)
def reinterpreted(views: Sequence[View], _: Sizes) -> Deed | None:
    """A dtype read as another one, or bytes in the other order."""
    view = views[0]
    if view.x.half is not None:
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
    if not np.isfinite(y[changed]).all():
        return Deed(What.NOT_FINITE) if np.isfinite(before.values[changed]).all() else None
    places = np.flatnonzero(changed)
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


@search(order=200)
def some_rows(views: Sequence[View], _: Sizes) -> Deed | None:
    """Some rows or columns as they were, and others that nothing explains."""
    fewest = min(views, key=lambda each: each.changed.mean())
    if fewest.changed.all():
        return None
    way = "columns" if fewest.columns else "rows"
    return Deed(What.FEW_ROWS, way, fewest.where)

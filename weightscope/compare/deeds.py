"""What was done to a checkpoint's attention, in a sentence: rounded, quantised, tuned, folded, rotated ..."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from weightscope.audit.measure import MAPS, Arrays, MeasuredHeads
from weightscope.changes.basis import is_folded, is_permutation, rotation_between, turned
from weightscope.changes.heads import unmoved
from weightscope.changes.tensors import UNKNOWN_SIZE, Pair, TensorChange, between, changes_of, spread
from weightscope.errors import CheckpointError, counted
from weightscope.findings import Finding
from weightscope.metrics.spaces import relative_change
from weightscope.metrics.weight_changes import CASTS
from weightscope.model import Model

FAR = 0.9  # relative change of heads that have nothing in common as they are stored; it is about 1.41
NEAR = 0.5  # and of heads that are the same but for rounding or tuning, once both are in one basis
SPECTRA = 0.1  # |s_b - s_a| / s_1 of their singular values, which no basis changes
LINEAGE = "`weightscope lineage` looks for other orders and other bases"
IDENTICAL = "Identical"  # begins the deed where nothing was done
ROUNDED_TO = {"BF16": "bfloat16", "F16": "float16"}


def attention_changes(a: Model, b: Model) -> list[TensorChange]:
    """How the tensors that heads are read from changed, each of its kind; both are read once more, in blocks."""
    stems = [(a.attention_tensors(i), {t.name.removeprefix(b.prefix): t for t in b.attention_tensors(i)})
             for i in a.attention_layers if i in b.attention_layers]  # fmt: skip
    pairs = {
        tensor.name: Pair(tensor, theirs[key])
        for ours, theirs in stems
        for tensor in ours
        if (key := tensor.name.removeprefix(a.prefix)) in theirs
    }
    return changes_of(a, b, list(pairs.values()))


def deed(
    a: Model,
    b: Model,
    changes: Sequence[TensorChange],
    measured: tuple[MeasuredHeads, MeasuredHeads],
    moved: Sequence[Arrays],
    order: np.ndarray,
    edits: Sequence[Finding],
) -> str:
    """What was done from a to b, as far as all compared tensors and heads show one thing; empty where they do not.

    `changes` are those of every compared tensor, `moved` those of heads by layer, `order` (L, H) which head of b each
    is, and `edits` what was done to whole layers.
    """
    attention = {tensor.name for i in a.attention_layers for tensor in a.attention_tensors(i)}
    changed = [change for change in changes if change.kind != "identical" and change.kind not in UNKNOWN_SIZE]
    if any(change.kind == "not finite" for change in changed):
        return ""
    if not changed:
        alike = all(change.kind == "identical" and len(set(change.shapes)) == 1 for change in changes)
        return f"{IDENTICAL}: all {counted(len(changes), 'compared tensor')}." if alike else ""
    if all(change.kind == "rounded" for change in changed):
        return _rounded(changed)
    same = np.array([unmoved(layer) for layer in moved])  # (L, H)
    if zeroed := _zeroed(measured):
        others = "; no other head moved" if same.sum() + zeroed == same.size else ""
        return f"Heads set to zero: {zeroed} of {same.size}{others}."
    folded = [i for i in a.attention_layers if i in b.attention_layers and is_folded(a.layer(i), b.layer(i))]
    rotation = _rotated(a, b, measured, moved)
    if folded or rotation:
        is_same = "; every head computes the same" if same.all() else ""
        where = f"the gain before attention is part of the matrices after it in {len(folded)} of {len(same)} layers"
        return " ".join(filter(None, [f"Norms folded: {where}{is_same}." if folded else "", rotation]))
    matrices = {change.name: change for change in changes if change.name in attention and change.is_matrix}
    now = [change for change in matrices.values() if change in changed]
    if now and same.all():
        reordered = (order != np.arange(order.shape[-1])).any()
        return f"{'Heads in another order' if reordered else 'Another basis within heads'}: each computes the same."
    if layers := [finding.text for finding in edits if finding.kind in ("copied_layer", "swapped_layers")]:
        return " ".join(layers)
    farthest = float(np.max([layer[f"{name}_change"] for layer in moved for name in MAPS]))
    return _of_matrices(now, len(matrices), farthest) if now else ""


def _zeroed(measured: tuple[MeasuredHeads, MeasuredHeads]) -> int:
    """How many heads have a map that is zero and was not."""
    before, after = (
        np.array([heads.arrays[f"{name}_singular_values"].max(axis=-1) for name in MAPS]) for heads in measured
    )
    return int(((before > 0) & (after == 0)).any(axis=0).sum())


def _rounded(changed: Sequence[TensorChange]) -> str:
    """All that changed is one checkpoint rounded to the other's floats."""
    common = frozenset.intersection(*(change.casts for change in changed))
    if not common:
        return f"Rounded: {counted(len(changed), 'tensor')}, not all to the same floats."
    cast, rounded = min(common, key=lambda each: (list(CASTS).index(each[0]), each[1]))
    what = "Rounded" if rounded == "A" else "The first is the last rounded"
    return f"{what} to {ROUNDED_TO.get(cast, cast)}: {counted(len(changed), 'tensor')}, and nothing else changed."


def _rotated(a: Model, b: Model, measured: tuple[MeasuredHeads, MeasuredHeads], moved: Sequence[Arrays]) -> str:
    """Whether all heads are those of a in another basis of the stream, in words; empty where they are not.

    A rotation leaves every singular value alone; only where it did is it computed, from the token embeddings.
    """
    if not all((layer[f"{name}_change"] > FAR).all() for layer in moved for name in MAPS):
        return ""
    for name in MAPS:
        before, after = (heads.arrays[f"{name}_singular_values"] for heads in measured)
        if not (np.abs(after - before).max(axis=-1) <= SPECTRA * before.max(axis=-1)).all():
            return ""
    try:
        rotation = rotation_between(a, b)
    except CheckpointError:  # without embeddings of tokens a basis does not show
        return ""
    farthest = max(
        relative_change(turned(getattr(x.head(h), name), rotation), getattr(y.head(h), name))
        for x, y in ((a.layer(i), b.layer(i)) for i in a.attention_layers)
        for h in range(x.n_heads)
        for name in MAPS
    )
    if not farthest <= NEAR:
        return ""
    permuted = is_permutation(rotation)
    what = "Stream permuted: with its dimensions in the first's order" if permuted else "Stream rotated: in one basis"
    return f"{what} no head differs by more than {farthest:.2g}. What follows is of the weights as they are stored."


def _of_matrices(now: Sequence[TensorChange], total: int, farthest: float) -> str:
    """The deed that the changed matrices of attention share; `farthest` is the largest relative change of a head."""
    kinds = Counter(change.kind for change in now)
    where = f"{len(now)} of {total} attention matrices"
    if kinds.keys() <= {"quantised", "rounded"}:
        detail = Counter(change.detail for change in now if change.kind == "quantised").most_common(1)[0][0]
        which, _, grid = detail.partition(" to ")
        return f"Quantised{' in the first' * (which == 'A')}: {where}, most to {grid}, {spread(now)}."
    if kinds.keys() == {"one direction"}:
        return f"Changed along one direction, the same in each: {where}."
    if kinds.keys() <= {"low rank", "one direction"}:
        ranks = between([change.rank for change in now if change.rank is not None])
        return f"Changed by matrices of low rank, as by a merged LoRA: {where}, rank {ranks}."
    if kinds.keys() == {"few rows"}:
        return f"Changed in a few rows of {where}."
    unlike = [change for change in now if not change.is_tuned]
    if not unlike:
        return f"Fine-tuned: {where}, {spread(now)}."
    if farthest <= NEAR:
        return f"Another basis within heads, and they moved: {where} changed."
    cosines = f"cosine {between([change.cosine for change in unlike])}"
    return f"Unlike the first's as stored: {len(unlike)} of {total} attention matrices ({cosines}); {LINEAGE}."

"""Sentences on what was done to attention: rounded, quantised, tuned, folded, rotated ..."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from weightscope.core.errors import CheckpointError, counted
from weightscope.heads.audit.measure import MAPS, Arrays, MeasuredHeads
from weightscope.model.metrics.moves import relative_change
from weightscope.model.model import Model
from weightscope.pairs.changes.all_tensors import between, changes_with_directions, spread
from weightscope.pairs.changes.head import basis_by_tokens, is_folded, unmoved
from weightscope.pairs.changes.layer import layers_elsewhere
from weightscope.pairs.deeds.change import UNKNOWN_SIZE, Change
from weightscope.pairs.deeds.deed import Proof, What, sentence
from weightscope.pairs.deeds.pair import pair_up
from weightscope.pairs.deeds.rounding import CASTS
from weightscope.pairs.deeds.thresholds import FAR, NEAR, SAME_SPECTRA, UNMOVED
from weightscope.report.findings import Finding, Member, finding, listed, spans

LINEAGE = "`weightscope lineage` looks for other orders and other bases"
FAR_ON = "qk_change_far"  # the change that near tokens do not show
IDENTICAL = "Identical"  # begins the deed where nothing was done
LOW_RANKS = {What.LOW_RANK, What.ONE_DIRECTION}
# kinds that training leaves
TRAINED = {What.TUNED, What.ROUNDED, *LOW_RANKS, What.FEW_ROWS}
NAMED = 4  # factors, shares or ways in a sentence
ROUNDED_TO = {"BF16": "bfloat16", "F16": "float16"}


def attention_changes(a: Model, b: Model) -> list[Change]:
    """Changes of the tensors that heads are read from; both are read once more, in blocks."""
    layers = [i for i in a.attention_layers if i in b.attention_layers]
    tensors = (
        {t.name.removeprefix(m.prefix): t for i in layers for t in m.attention_tensors(i)}
        for m in (a, b)
    )
    return changes_with_directions(a, b, pair_up(*tensors).pairs)


def deed(
    a: Model,
    b: Model,
    changes: Sequence[Change],
    measured: tuple[MeasuredHeads, MeasuredHeads],
    moved: Sequence[Arrays],
    order: np.ndarray,
    edits: Sequence[Finding],
) -> str:
    """The one change from a to b that all compared tensors and heads show; else empty.

    `changes` has every compared tensor, `moved` every head by layer, `order` (L, H) says which head
    of b each is, and `edits` what was done to whole layers.
    """
    attention = {tensor.name for i in a.attention_layers for tensor in a.attention_tensors(i)}
    changed = [
        change
        for change in changes
        if change.kind is not What.IDENTICAL and change.kind not in UNKNOWN_SIZE
    ]
    if any(change.kind is What.NOT_FINITE for change in changed):
        return ""
    if not changed:
        alike = all(
            change.kind is What.IDENTICAL and len(set(change.shapes)) == 1 for change in changes
        )
        return f"{IDENTICAL}: all {counted(len(changes), 'compared tensor')}." if alike else ""
    if all(change.kind is What.ROUNDED for change in changed):
        return _rounded(changed)
    if all(change.is_rounding and change.name not in attention for change in changed):
        return (
            f"The same up to float32's rounding: {counted(len(changed), 'tensor')}, "
            f"{spread(changed)}."
        )
    same = np.array([unmoved(layer) for layer in moved])  # (L, H)
    if zeroed := _zeroed(measured):
        no_other = "; no other head moved" if same.sum() + zeroed == same.size else ""
        return f"Heads set to zero: {zeroed} of {same.size}{no_other}."
    layers = [i for i in measured[0].layers.tolist() if i in b.attention_layers]
    folded = [i for i in layers if is_folded(a.layer(i), b.layer(i))]
    rotation = _rotated(a, b, measured, moved)
    if folded or rotation:
        effect = "" if rotation else "; and heads moved"
        if same.all():
            effect = "; every head computes the same"
        where = (
            f"the gain before attention is part of the matrices after it in {len(folded)} of "
            f"{len(same)} layers"
        )
        folds = f"Norms folded: {where}{effect}." if folded else ""
        return " ".join(filter(None, [folds, rotation]))
    if simple := _of_one_kind(changed, "tensor"):
        return simple.removesuffix(".") + "; no other compared tensor changed."
    nearby = [{name: values for name, values in layer.items() if name != FAR_ON} for layer in moved]
    near = np.array([unmoved(layer) for layer in nearby])
    if near.all() and not same.all():
        most = float(np.max([layer[FAR_ON] for layer in moved]))
        return (
            "Heads are equal for near tokens alone: rotary pairs are in another order, or "
            f"turn at other speeds (relative change far on: up to {most:.2g})."
        )
    matrices = {
        (change.name, change.part): change
        for change in changes
        if change.name in attention and change.is_matrix
    }
    now = [change for change in matrices.values() if change in changed]
    if now and same.all():
        if (order != np.arange(order.shape[-1])).any():
            return "Heads in another order: each computes the same."
        if max(change.change for change in now) > UNMOVED:
            return "Another basis within heads: each computes the same."
        size = "Changed by little"
        if all(each.is_rounding for each in now):
            size = "The same up to float32's rounding"
        return f"{size}: {len(now)} of {len(matrices)} attention matrices, {spread(now)}."
    of_layers = ("copied_layer", "swapped_layers")
    if whole_layers := [finding.text for finding in edits if finding.kind in of_layers]:
        return " ".join(whole_layers)
    if not now:
        shared = _of_one_proof(changed, counted(len(changed), "tensor"))
        return f"{shared}; no other compared tensor changed." if shared else ""
    changes_of_maps = [*(f"{name}_change" for name in MAPS), FAR_ON]
    farthest = float(np.max([layer[name] for layer in moved for name in changes_of_maps]))
    return _of_matrices(now, len(matrices), farthest)


def _zeroed(measured: tuple[MeasuredHeads, MeasuredHeads]) -> int:
    """The number of heads with a map that is zero and was not."""
    before, after = (
        np.array([heads.arrays[f"{name}_singular_values"].max(axis=-1) for name in MAPS])
        for heads in measured
    )
    return int(((before > 0) & (after == 0)).any(axis=0).sum())


def _rounded(changed: Sequence[Change]) -> str:
    """All that changed is one checkpoint rounded to the other's floats."""
    common = frozenset.intersection(*(change.casts for change in changed))
    if not common:
        return f"Rounded: {counted(len(changed), 'tensor')}, not all to the same floats."
    cast, rounded = min(common, key=lambda each: (list(CASTS).index(each[0]), each[1]))
    what = "Rounded" if rounded == "A" else "The first is the last rounded"
    return (
        f"{what} to {ROUNDED_TO.get(cast, cast)}: {counted(len(changed), 'tensor')}, and nothing "
        "else changed."
    )


def _rotated(
    a: Model, b: Model, measured: tuple[MeasuredHeads, MeasuredHeads], moved: Sequence[Arrays]
) -> str:
    """A sentence on heads that are a's in another basis of the stream; else empty.

    A rotation leaves every singular value alone; only where it did is it computed, from the token
    embeddings.
    """
    if not all((layer[f"{name}_change"] > FAR).all() for layer in moved for name in MAPS):
        return ""
    for name in MAPS:
        before, after = (heads.arrays[f"{name}_singular_values"] for heads in measured)
        if not (np.abs(after - before).max(axis=-1) <= SAME_SPECTRA * before.max(axis=-1)).all():
            return ""
    try:
        basis = basis_by_tokens(a, b)
    except CheckpointError:  # without embeddings of tokens a basis does not show
        return ""
    farthest = max(
        relative_change(basis.turned_map(getattr(x.head(h), name)), getattr(y.head(h), name))
        for x, y in ((a.layer(i), b.layer(i)) for i in measured[0].layers.tolist())
        for h in range(x.n_heads)
        for name in MAPS
    )
    if not farthest <= NEAR:
        return ""
    what = "rotated: in one basis"
    if basis.permuted:
        what = "permuted: with its dimensions in the first's order"
    rest = "What follows is of the weights as they are stored."
    return f"Stream {what} no head differs by more than {farthest:.2g}. {rest}"


PLAIN = {  # kinds that are proved on every value
    What.ZEROED: "Values set to zero",
    What.CONSTANT: "Set to one value",
    What.SCALED: "Multiplied by one factor",
    What.FACTORS: "Rows or columns multiplied by factors",
}


def _of_one_kind(changed: Sequence[Change], what: str, total: int = 0) -> str:
    """A sentence if zeros, one value or one factor explain every changed value; else empty."""
    kind = changed[0].kind
    if kind not in PLAIN or any(change.kind is not kind for change in changed):
        return ""
    details = list(dict.fromkeys(change.detail for change in changed))
    of_all = f"{len(changed)} of {total} {what}" if total else counted(len(changed), what)
    owner = f" of {changed[0].shown_name}" if len(changed) == 1 else ""
    return f"{PLAIN[kind]}: {of_all}, {listed(details, NAMED)}{owner}."


def _of_one_proof(changed: Sequence[Change], where: str) -> str:
    """The proved deed that all of these share, and where; else empty."""
    words = {sentence(each.deed) if each.deed.proof is not Proof.NONE else "" for each in changed}
    shared = words.pop()
    return "" if words or not shared else f"{shared[:1].upper()}{shared[1:]}: {where}"


def _of_matrices(now: Sequence[Change], total: int, farthest: float) -> str:
    """The deed that changed attention matrices share; `farthest`: the largest change of a head."""
    kinds = Counter(change.kind for change in now)
    where = f"{len(now)} of {total} attention matrices"
    if simple := _of_one_kind(now, "attention matrices", total):
        return simple
    if kinds.keys() <= {What.QUANTISED, What.ROUNDED}:
        grids = Counter(
            (change.deed.made, change.deed.way) for change in now if change.kind is What.QUANTISED
        )
        ((made, grid), _), *_ = grids.most_common(1)
        in_first = " in the first" if made == "A" else ""
        return f"Quantised{in_first}: {where}, most to {grid}, {spread(now)}."
    if kinds.keys() == {What.ONE_DIRECTION}:
        return f"Changed along one direction: {where}."
    # the rest of a merged LoRA may be saved in fewer bits
    if kinds.keys() <= {*LOW_RANKS, What.ROUNDED}:
        ranks = {change.rank for change in now if change.rank is not None}
        lora = ", as by a merged LoRA" if len(ranks) == 1 else ""
        of_rounded = kinds[What.ROUNDED]
        where = f"{len(now) - of_rounded} of {total} attention matrices"
        rounded = f"; {of_rounded} only rounded" if of_rounded else ""
        return (
            f"Changed by matrices of low rank{lora}: {where}, rank "
            f"{between(sorted(ranks))}{rounded}."
        )
    if kinds.keys() == {What.REORDERED}:
        return f"Rows or columns in another order: {where}, and heads moved."
    if kinds.keys() == {What.FEW_ROWS}:
        return f"Changed in some rows or columns of {where}."
    if said := _of_one_proof(now, where):
        return f"{said}."
    unlike = [change for change in now if change.is_unlike]
    if not unlike and kinds.keys() <= TRAINED:
        return f"Fine-tuned: {where}, {spread(now)}."
    if unlike and farthest <= NEAR:
        return f"Another basis within heads, and they moved: {where} changed."
    if not unlike:
        ways = Counter(change.called for change in now)
        if len(ways) == 1:
            (way,) = ways
            return f"{way[:1].upper()}{way[1:]}: {where}."
        return (
            f"Changed in several ways: {where}, "
            f"{listed([f'{n} {way}' for way, n in ways.items()], NAMED)}."
        )
    cosines = f"cosine {between([change.cosine for change in unlike])}"
    return (
        f"Unlike the first's as stored: {len(unlike)} of {total} attention matrices ({cosines}); "
        f"{LINEAGE}."
    )


# Findings


@finding(
    "copied_layer",
    "layer that became a copy of another",
    severity="warning",
    rank=170,
    look_next="Check whether the layers were repeated on purpose; if not, the export or the merge "
    "wrote one twice.",
)
@finding(
    "swapped_layers",
    "layers in another order",
    severity="warning",
    rank=180,
    look_next="Check the export: put the layers back in order, and measure the loss of both.",
)
def moved_layers(a: Model, b: Model, moved: Sequence[int]) -> Iterator[Finding]:
    """Layers of b, among those that moved, that are other layers of a: reordered or copied."""
    source = layers_elsewhere(a, b, moved)
    while source:
        chain = [next(iter(source))]
        while (following := source.get(chain[-1], chain[0])) not in chain:
            chain.append(following)
        # every layer of it is there once, at another's place
        circle = source.get(chain[-1]) == chain[0]
        for layer in chain if circle else chain[:1]:
            origin = source.pop(layer)
            if not circle:
                text = (
                    f"Layer {layer} is now a copy of layer {origin}: all of its projections are "
                    "the same."
                )
                yield _layers_finding("copied_layer", layer, text, [origin])
        if circle:
            now = [chain[(i + 1) % len(chain)] for i in range(len(chain))]
            pairs = ", ".join(
                f"{layer} was {origin}" for layer, origin in sorted(zip(chain, now, strict=True))
            )
            text = f"{counted(len(chain), 'layer')}, {spans(chain)}, are in another order: {pairs}."
            yield _layers_finding("swapped_layers", min(chain), text, sorted(chain))


def _layers_finding(kind: str, layer: int, text: str, origins: Sequence[int]) -> Finding:
    members = tuple(Member("layer", origin) for origin in origins)
    return Finding(
        kind=kind,
        layer=layer,
        measure="layers",
        number=len(origins),
        usual=0.0,
        text=text,
        members=members,
    )

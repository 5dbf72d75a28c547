"""Differences of a suspect and a base, in words: kinds, each with its layers and evidence.

First what the match of sketches shows, layers and heads that are gone, repeated or in another
order; then what weights show: how the weights of matching layers, and of what is outside layers,
differ.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from weightscope.checkpoint.checkpoint import Tensor
from weightscope.core.errors import counted
from weightscope.core.progress import bar
from weightscope.model.model import Model
from weightscope.pairs.changes.all_tensors import TensorChanges, between
from weightscope.pairs.changes.head import Basis, basis_by_tokens
from weightscope.pairs.changes.layer import (
    LayerChange,
    TensorsOfBoth,
    compare_layers,
    tensors_of_both,
)
from weightscope.pairs.deeds.change import Change
from weightscope.pairs.deeds.deed import Proof, What, called, sentence
from weightscope.pairs.deeds.pair import SAMPLED_ROWS, first_rows, whole
from weightscope.pairs.deeds.thresholds import (
    EXPLAINED,
    EXPLAINED_IN_ANOTHER_BASIS,
    MOSTLY,
    ON_GRIDS,
    PARTLY,
    SAME_BASIS,
    UNMOVED,
    UNMOVED_IN_ANOTHER_BASIS,
)
from weightscope.pairs.lineage.matching import Match
from weightscope.pairs.lineage.sketches import Sketches
from weightscope.pairs.same.stored import equal_bytes, same_files
from weightscope.report.findings import indexed, listed, spans

FOLDED = "In {layers}, the norm's gain is constant and folded into the weights after it."
OF_LAYERS = {  # kinds that layers show, each with the field of `LayerChange` and the evidence
    "norms folded": ("folded", FOLDED),
    "norms folded: the base": ("base_folded", FOLDED),
    "gauge: basis of heads changed": (
        "gauge",
        "The factors of heads changed by {factors:.2g} of their norm, their products by "
        "{maps:.2g}.",
    ),
    "experts copied from one network": (
        "copies",
        "At least {least} experts per layer copy the base's feed-forward network.",
    ),
    "experts copied from one network: the base": (
        "base_copies",
        "At least {least} experts of a layer of the base copy the suspect's network.",
    ),
    "experts permuted": ("experts", "Experts are the base's in another order."),
    "neurons permuted": ("neurons", "Feed-forward matrices have the base's rows in another order."),
}
# kinds of change of a layer's attention that no training leaves, each as it is called
PLAIN = {
    What.ZEROED: "values set to zero",
    What.CONSTANT: "set to one value",
    What.SCALED: "multiplied by factors",
    What.FACTORS: "multiplied by factors",
    What.REORDERED: "rows or columns in another order",
    What.FEW_ROWS: "changed in some rows",
    What.QUANTISED_IN_PART: called(What.QUANTISED_IN_PART),
}
# kinds of any tensor that leave nothing of it
BROKEN = {What.NOT_FINITE: "values that are not finite", What.CONSTANT: PLAIN[What.CONSTANT]}
LOW_RANKS = {What.LOW_RANK, What.ONE_DIRECTION}
RECOMPUTED = {What.PRUNED, What.RANK_CUT}  # that B can be recomputed so is a kind of its own
CONVERTED = {What.IDENTICAL, What.ROUNDED, What.QUANTISED}  # kinds that conversions leave
UNLIKE = "attention matrices unlike the base's"
# share of the largest layer's median |W_VO|; matched layers below may have been added to be found
QUIET = 0.05
# kinds of matching layers in which nothing differs
SAME = {
    "same bytes",
    "same bytes in other files",
    "same values",
    "same values in another format",
    "same up to rounding",
}
# kinds of norms whose gain is folded into weights
FOLDS = {"norms folded", "norms folded: the base"}
# kinds of other neurons
NEURONS = {
    "neurons permuted",
    "experts permuted",
    "experts copied from one network",
    "experts copied from one network: the base",
}
VOCABULARY = {"vocabulary cut", "vocabulary extended", "vocabulary reordered"}
# kinds that change every head anyway
RESIZED = {"heads grouped", "heads grouped: the base", "width cut", "width extended"}


@dataclass(frozen=True)
class Kind:
    """One thing that differs."""

    kind: str  # in words; docs/lineage.md lists them all
    layers: list[int]  # the suspect's layers that show it; empty if it concerns no layer
    evidence: str  # a sentence with its numbers
    strength: float = 1.0  # share of the compared layers, heads or tensors that show it
    family: str = ""  # the kind without its details: `cast` of `cast to bfloat16`

    def is_one_of(self, names: Collection[str]) -> bool:
        """True if the kind or its family has one of these names."""
        return self.kind in names or self.family in names

    def as_json(self) -> dict[str, Any]:
        """Its record in lineage.json."""
        return {name: value for name, value in vars(self).items() if name != "family"}


@dataclass(frozen=True)
class WeightChanges:
    """All matching layers, and the tensors outside layers."""

    basis: Basis
    layers: Sequence[LayerChange]
    outside: TensorsOfBoth
    # the base's tensors that contain heads
    attention: frozenset[str] = field(default_factory=frozenset)

    @property
    def every(self) -> list[tuple[int | None, Change]]:
        """Every compared tensor with the suspect's layer, or None outside layers."""
        inside = [
            (layer.layer, change) for layer in self.layers for change in layer.tensors.changes
        ]
        return [*inside, *((None, change) for change in self.outside.changes)]

    @cached_property
    def along(self) -> TensorChanges:
        """Changes of every tensor without layers, for directions that they share."""
        return TensorChanges([change for _, change in self.every])

    @property
    def lost(self) -> list[Tensor]:
        """Tensors that only the base has."""
        return [
            tensor
            for part in (self.outside, *(layer.tensors for layer in self.layers))
            for tensor in part.lost
        ]

    @property
    def gained(self) -> list[Tensor]:
        """Tensors that only the suspect has."""
        return [
            tensor
            for part in (self.outside, *(layer.tensors for layer in self.layers))
            for tensor in part.gained
        ]

    @property
    def rounding(self) -> float:
        """|error| / |x| that the coarsest float or grid of any layer makes."""
        return max((layer.values.rounding for layer in self.layers), default=0.0)


def weight_changes(suspect: Model, base: Model, match: Match) -> WeightChanges:
    """Compare the weights of all matching layers."""
    basis = _basis_of(suspect, base, match)
    places = [
        (base.attention_layers[j], i, order)
        for i, j, order in zip(suspect.attention_layers, match.layers, match.heads, strict=True)
        if j is not None
    ]
    layers = [
        compare_layers(base, suspect, j, i, order, basis)
        for j, i, order in bar(places, "layers compared", "layer")
    ]
    outside = _outside(suspect, base) if basis.same else TensorsOfBoth()
    of_heads = frozenset(tensor.name for j, _, _ in places for tensor in base.attention_tensors(j))
    return WeightChanges(basis, layers, outside, of_heads)


def _basis_of(suspect: Model, base: Model, match: Match) -> Basis:
    """The basis that a match by direction, by tokens or by spectra leaves."""
    if match.route == "direct":
        return Basis()
    if match.route == "spectra" or suspect.config.d_model != base.config.d_model:
        return Basis(known=False)
    order = match.order
    basis = basis_by_tokens(base, suspect, (order.base, order.suspect) if order else None)
    turned = (
        basis.rotation is not None
        and np.abs(basis.rotation - np.eye(len(basis.rotation))).max() > SAME_BASIS
    )
    return basis if turned else Basis()


def _outside(suspect: Model, base: Model) -> TensorsOfBoth:
    """Changes outside layers, and in layers without attention if both have equally many layers."""
    names, deep = [], base.config.n_layers == suspect.config.n_layers
    for model in (base, suspect):
        compared = model.attention_layers if deep else range(model.config.n_layers)
        inside = {name for i in compared for name in model.checkpoint.names_under(model.stem(i))}
        names.append(
            {
                name.removeprefix(model.prefix): name
                for name in model.checkpoint
                if name not in inside
            }
        )
    return tensors_of_both(base, suspect, *names)


# Kinds that the match of layers and heads shows


def structure_kinds(suspect: Sketches, base: Sketches, match: Match) -> Iterator[Kind]:
    """Kinds that layers, heads, vocabulary and width show: removed, repeated, permuted, resized."""
    yield from _layer_kinds(suspect, base, match)
    yield from _silent_kinds(suspect, match)
    yield from _head_kinds(suspect, base, match)
    a, b = base.about, suspect.about
    if a["vocabulary"] and b["vocabulary"] and a["vocabulary"] != b["vocabulary"]:
        what = "extended" if b["vocabulary"] > a["vocabulary"] else "cut"
        yield Kind(
            f"vocabulary {what}",
            [],
            f"{a['vocabulary']:,} tokens in the base, {b['vocabulary']:,} here.",
        )
    if match.order is not None:
        text = (
            f"{match.order.share:.0%} of the compared tokens have a counterpart with another "
            "number."
        )
        yield Kind("vocabulary reordered", [], text, match.order.share)
    if a["d_model"] != b["d_model"]:
        what = "cut" if b["d_model"] < a["d_model"] else "extended"
        sizes = f"{a['d_model']} dimensions in the base, {b['d_model']} here"
        yield Kind(f"width {what}", [], f"The residual stream has {sizes}.")


def _layer_kinds(suspect: Sketches, base: Sketches, match: Match) -> Iterator[Kind]:
    places = [(i, j) for i, j in zip(suspect.layers, match.layers, strict=True) if j is not None]
    taken = Counter(base.layers[j] for _, j in places)
    gone = [layer for layer in base.layers if layer not in taken]
    if gone and len(places) > len(suspect.layers) * MOSTLY:
        text = f"Nothing in the suspect matches {indexed('layer', gone)} of the base."
        yield Kind("layers removed", [], text, len(gone) / len(base.layers))
    twice = sorted(layer for layer, times in taken.items() if times > 1)
    if twice:
        here = [i for i, j in places if taken[base.layers[j]] > 1]
        yield Kind(
            "layers repeated",
            here,
            f"The suspect repeats {indexed('layer', twice)} of the base.",
            len(here) / len(suspect.layers),
        )
    order = [j for _, j in places]
    back = [k for k in range(1, len(order)) if order[k] < order[k - 1]]
    if back and not _is_repeat(order):
        moved = [i for (i, j), usual in zip(places, sorted(order), strict=True) if j != usual]
        pairs = ", ".join(f"{i} was {base.layers[j]}" for i, j in places if i in moved)
        yield Kind(
            "layers reordered",
            moved,
            f"Layers are not in the base's order: {pairs}.",
            len(moved) / len(places),
        )
    new = [i for i, j in zip(suspect.layers, match.layers, strict=True) if j is None]
    if new:
        text = f"Nothing in the base matches {indexed('layer', new)}."
        yield Kind("layers replaced or added", new, text, len(new) / len(suspect.layers))


def _silent_kinds(suspect: Sketches, match: Match) -> Iterator[Kind]:
    """Matched layers that write so little that they may have been added to be found."""
    written = {i: float(np.median(suspect.norms[suspect.of_layer(i), 1])) for i in suspect.layers}
    loudest = max(written.values())
    matched = [i for i, j in zip(suspect.layers, match.layers, strict=True) if j is not None]
    quiet = [i for i in matched if 0 < written[i] < QUIET * loudest]
    if quiet and max(written[i] for i in matched) < QUIET * loudest:
        share = max(written[i] for i in matched) / loudest
        text = (
            f"The matched layers write at most {share:.2g} of what the suspect's largest layer "
            "does."
        )
        yield Kind("layers hardly used", quiet, text, len(quiet) / len(suspect.layers))


def _is_repeat(order: Sequence[int]) -> bool:
    """True if each step back leads to layers that occurred before, as in depth upscaling."""
    seen: set[int] = set()
    for k, j in enumerate(order):
        if k and j < order[k - 1] and j not in seen:
            return False
        seen.add(j)
    return True


def _head_kinds(suspect: Sketches, base: Sketches, match: Match) -> Iterator[Kind]:
    permuted, fewer, more, grouped, divided = [], [], [], [], []
    for i, j, order in zip(suspect.layers, match.layers, match.heads, strict=True):
        if j is None:
            continue
        here, there = suspect.of_layer(i), base.of_layer(base.layers[j])
        silent = (suspect.norms[here, 1] == 0).sum() - (base.norms[there, 1] == 0).sum()
        if len(here) < len(there) or silent > 0:
            fewer.append(i)
        if len(here) > len(there) or silent < 0:
            more.append(i)
        matched = order[order >= 0]
        if match.route != "spectra" and (np.diff(matched) < 0).any():
            permuted.append(i)
        kv_here, kv_there = (
            len(set(s.kv_head[heads])) for s, heads in ((suspect, here), (base, there))
        )
        if kv_here < kv_there and len(here) / kv_here > len(there) / kv_there:
            grouped.append(i)
        if kv_there < kv_here and len(there) / kv_there > len(here) / kv_here:
            divided.append(i)
    n = sum(j is not None for j in match.layers)
    if fewer:
        kept = [int((suspect.norms[suspect.of_layer(i), 1] > 0).sum()) for i in fewer]
        left = f"{min(kept)}" if min(kept) == max(kept) else f"{min(kept)} to {max(kept)}"
        sizes = (
            f"{base.about['heads']} heads in a layer of the base; here, {left} of a layer write "
            "anything"
        )
        yield Kind("heads removed", fewer, f"{sizes}.", len(fewer) / n)
    if more:
        sizes = (
            f"{base.about['heads']} heads in a layer of the base; of the suspect's, more write "
            "anything"
        )
        yield Kind("heads added", more, f"{sizes}.", len(more) / n)
    if permuted:
        yield Kind(
            "heads permuted",
            permuted,
            f"In {counted(len(permuted), 'layer')}, heads are in another order.",
            len(permuted) / n,
        )
    sizes = (
        f"{base.about['kv_heads']} key-value heads in the base, {suspect.about['kv_heads']} here"
    )
    if grouped:
        yield Kind(
            "heads grouped",
            grouped,
            f"{sizes}: several heads now share keys and values.",
            len(grouped) / n,
        )
    if divided:
        text = f"{sizes}: several heads of the base share keys and values."
        yield Kind("heads grouped: the base", divided, text, len(divided) / n)


# Kinds that weights show


def weight_kinds(
    weights: WeightChanges, structure: set[str], suspect: Model, base: Model
) -> list[Kind]:
    """Kinds that weights show; `structure` names those that the match of layers already shows."""
    if not structure and _untouched(weights):
        return [_same_values(weights, same_files(base.checkpoint, suspect.checkpoint))]
    moved_gains: dict[int, set[str]] = {}
    plain: dict[int, list[str]] = {}
    untrained: set[int] = set()
    if weights.basis.same:
        moved_gains = {layer.layer: gains_moved(layer) for layer in weights.layers}
    if not structure:
        plain = plain_layers(weights, {layer for layer, names in moved_gains.items() if names})
        untrained = {*plain, *plain_layers(weights, ())}
    explained = {name for names in moved_gains.values() for name in names}
    of_networks = [] if structure else _plain_networks(weights, explained)
    kinds = [
        *_broken(weights),
        *_basis(weights),
        *_of_layers(weights),
        *_gains(moved_gains, weights.layers),
        *_casts(weights),
        *_grids(weights),
        *_plain(weights, plain, of_networks),
        *_training(weights, structure, explained, untrained),
    ]
    return kinds or list(_same_but_for_rounding(weights, structure))


def _broken(weights: WeightChanges) -> Iterator[Kind]:
    """NaN and infinity, and matrices outside attention with one value throughout."""
    for what, name in BROKEN.items():
        broken = [
            (i, change)
            for i, change in weights.every
            if change.kind is what and change.name_a not in weights.attention
            if change.is_matrix or what is What.NOT_FINITE
        ]
        layers = sorted({i for i, _ in broken if i is not None})
        if broken:
            text = f"{listed([change.name_b for _, change in broken], 3)}: {name}."
            yield Kind(name, layers, text, len(layers) / max(1, len(weights.layers)))


def _untouched(weights: WeightChanges) -> bool:
    """True if every tensor that both have equals the base's."""
    moved = any(
        layer.drift.maps
        or layer.folded
        or layer.base_folded
        or layer.gauge
        or max(layer.copies, layer.base_copies) > 1
        for layer in weights.layers
    )
    return (
        weights.basis.same
        and all(change.kind is What.IDENTICAL for _, change in weights.every)
        and not moved
    )


def _same_values(weights: WeightChanges, are_copies: bool) -> Kind:
    n, unpaired = len(weights.every), len(weights.lost) + len(weights.gained)
    dtypes = Counter(
        change.dtypes for _, change in weights.every if change.dtypes[0] != change.dtypes[1]
    )
    pairs = [change.pair for _, change in weights.every if change.pair is not None]
    name, how = "same bytes", ""
    if dtypes or any(pair.is_converted for pair in pairs):
        name = "same values in another format"
    elif not all(equal_bytes(pair.a, pair.b) for pair in pairs):  # as with zeros of another sign
        name = "same values"
    elif not are_copies:
        name, how = "same bytes in other files", ", byte for byte"
    more = f"; {unpaired} more are in only one of the two checkpoints" if unpaired else ""
    text = f"Every value of {counted(n, 'tensor')} equals the base's{how}{more}"
    if dtypes:
        (before, after), times = dtypes.most_common(1)[0]
        text += (
            f"; {dtypes.total()} are stored in another format, {times} in {after} instead of "
            f"{before}"
        )
    return Kind(name, [layer.layer for layer in weights.layers], f"{text}.", n / (n + unpaired))


def _same_but_for_rounding(weights: WeightChanges, structure: set[str]) -> Iterator[Kind]:
    """Values that differ, but nowhere by more than rounding."""
    sizes = [change.change for _, change in weights.every] + [
        layer.drift.maps for layer in weights.layers
    ]
    if not structure and weights.basis.same and sizes and all(size <= UNMOVED for size in sizes):
        text = (
            f"No head or tensor differs by more than {UNMOVED:g} of its norm, which is float32's "
            "rounding."
        )
        yield Kind("same up to rounding", [layer.layer for layer in weights.layers], text)


def _of_layers(weights: WeightChanges) -> Iterator[Kind]:
    """Kinds of `OF_LAYERS` whose field is true, or counts more than one, in some layers."""
    for name, (shows, text) in OF_LAYERS.items():
        values = {layer.layer: getattr(layer, shows) for layer in weights.layers}
        shown = [layer for layer, value in values.items() if value is True or value > 1]
        if shown:
            drifts = [layer.drift for layer in weights.layers if layer.layer in shown]
            maps, factors = np.median(drifts, axis=0)
            least = min(int(values[layer]) for layer in shown)
            evidence = text.format(
                layers=counted(len(shown), "layer"), factors=factors, maps=maps, least=least
            )
            yield Kind(name, shown, evidence, len(shown) / len(weights.layers))


def _basis(weights: WeightChanges) -> Iterator[Kind]:
    """The stream in another basis, if that basis could be found."""
    if weights.basis.rotation is not None:
        name, how = (
            ("permuted", "a permutation") if weights.basis.permuted else ("rotated", "a rotation")
        )
        drift = float(np.median([layer.drift.maps for layer in weights.layers]))
        text = (
            f"After {how} of the stream, found from the embeddings, heads differ by {drift:.2g} "
            "of their norm."
        )
        yield Kind(f"stream {name}", [layer.layer for layer in weights.layers], text)


def gains_moved(layer: LayerChange) -> set[str]:
    """Gains that moved into matrices of a layer, and these matrices, by the base's names."""
    if layer.folded or layer.base_folded:
        return set()
    changed = [
        change
        for change in layer.tensors.changes
        if change.pair is not None and change.change > UNMOVED_IN_ANOTHER_BASIS
    ]
    vectors = [change for change in changed if len(change.shapes[0]) == len(change.shapes[1]) == 1]
    gains = {
        change.name_a: tuple(
            whole(tensor).ravel().astype(np.float64) for tensor in (change.pair.a, change.pair.b)
        )
        for change in vectors
        if change.pair
    }
    explained: set[str] = set()
    for change in changed:
        if change.pair is None or not change.is_matrix or change.shapes[0] != change.shapes[1]:
            continue
        x, y = (
            first_rows(tensor, SAMPLED_ROWS).astype(np.float64)
            for tensor in (change.pair.a, change.pair.b)
        )
        for name, (before, after) in gains.items():
            for side in (0, 1):  # the axis of the inputs
                if len(before) != len(after) or len(before) != change.shapes[0][side]:
                    continue
                of_a, of_b = (gain if side else gain[: len(x), None] for gain in (before, after))
                left = float(np.linalg.norm(y * of_b - x * of_a))
                if left <= UNMOVED_IN_ANOTHER_BASIS * float(np.linalg.norm(x * of_a)):
                    explained |= {name, change.name_a}
    return explained


def _gains(moved: Mapping[int, Collection[str]], every: Sequence[LayerChange]) -> Iterator[Kind]:
    """Gains of norms that were moved, in part, into the matrices that read through them."""
    layers = [layer for layer in every if moved.get(layer.layer)]
    if layers:
        text = (
            f"In {counted(len(layers), 'layer')}, matrices times the gain before them are "
            "unchanged, and neither is."
        )
        farthest = max(layer.drift.maps for layer in layers)
        if farthest > UNMOVED_IN_ANOTHER_BASIS:
            text += f" Heads differ by up to {farthest:.2g} of their norm."
        where = [layer.layer for layer in layers]
        yield Kind("gains moved into weights", where, text, len(layers) / len(moved))


def _casts(weights: WeightChanges) -> Iterator[Kind]:
    """Values that a coarser float holds exactly."""
    rounded = [
        change.deed
        for _, change in weights.every
        if change.kind is What.ROUNDED and change.deed.original == "A" and change.is_matrix
    ]
    casts = sum((layer.values.casts for layer in weights.layers), Counter[str]())
    matrices = sum(layer.values.matrices for layer in weights.layers)
    if (rounded or casts.total() > MOSTLY * matrices) and not _is_quantised(
        weights.layers, "base_grids"
    ):
        names, total, what = max(
            (Counter(done.way for done in rounded), len(weights.every), "tensors"),
            (casts, matrices, "attention matrices"),
            key=lambda each: each[0].total(),
        )
        dtype, count = names.most_common(1)[0][0], names.total()
        text = f"{count} of {total} {what} hold only {dtype} values; the base's do not."
        yield Kind(
            f"cast to {dtype}",
            [layer.layer for layer in weights.layers],
            text,
            count / max(1, total),
            "cast",
        )


def _grids(weights: WeightChanges) -> Iterator[Kind]:
    """Values on a quantisation grid, the suspect's or the base's."""
    for side, whose, name in (
        ("grids", "", "quantised ({})"),
        ("base_grids", " of the base", "quantised: the base"),
    ):
        if _is_quantised(weights.layers, side):
            layers = [layer for layer in weights.layers if getattr(layer.values, side)]
            grids = sum((getattr(layer.values, side) for layer in layers), Counter[str]())
            matrices = sum(layer.values.matrices for layer in weights.layers)
            grid, count = grids.most_common(1)[0]
            error = float(np.median([layer.values.grid_error for layer in layers]))
            where = f"{grids.total()} of {matrices} attention matrices{whose} lie on a grid"
            text = (
                f"{where}, {count} on this one ({grid}); its rounding error is {error:.2g} of "
                "their norm."
            )
            shown, share = [layer.layer for layer in layers], grids.total() / matrices
            yield Kind(name.format(grid), shown, text, share, "quantised")


def _is_quantised(layers: Sequence[LayerChange], side: str) -> bool:
    on_grid = sum(getattr(layer.values, side).total() for layer in layers)
    return on_grid > ON_GRIDS * sum(layer.values.matrices for layer in layers)


def plain_layers(weights: WeightChanges, explained: Collection[int]) -> dict[int, list[str]]:
    """Changes of attention tensors in words, by layer, where none looks like training."""
    named: dict[int, list[str]] = {}
    for layer in weights.layers:
        of_heads = [
            change for change in layer.tensors.changes if change.name_a in weights.attention
        ]
        changed = [change for change in of_heads if change.kind not in CONVERTED]
        ways = [_plain_way(change) for change in changed]
        is_other = layer.gauge or layer.folded or layer.base_folded or layer.layer in explained
        is_open = any(change.deed.proof is Proof.MOST for change in changed)
        if ways and all(ways) and (is_open or not is_other):
            named[layer.layer] = ways
    return named


def _plain_way(change: Change) -> str:
    """The deed of a tensor in words, where it is not as training leaves it."""
    if change.kind in PLAIN:
        return PLAIN[change.kind]
    if change.kind in RECOMPUTED:
        return ""
    if change.deed.proof is not Proof.NONE:
        return sentence(change.deed)
    return "" if change.is_tuned or change.rank else UNLIKE


def _plain_networks(weights: WeightChanges, explained: Collection[str]) -> list[tuple[int, str]]:
    """Layer and deed in words of other matrices of layers, where the deed is proved."""
    elsewhere = {*CONVERTED, *RECOMPUTED, *LOW_RANKS, *BROKEN}
    done = [
        (layer.layer, change)
        for layer in weights.layers
        if not _is_explained(layer)
        for change in layer.tensors.changes
        if change.is_matrix and change.name_a not in {*weights.attention, *explained}
    ]
    return [
        (i, _plain_way(change))
        for i, change in done
        if change.kind not in elsewhere and change.deed.proof is not Proof.NONE
    ]


def _plain(
    weights: WeightChanges,
    plain: Mapping[int, Sequence[str]],
    of_networks: Sequence[tuple[int, str]],
) -> Iterator[Kind]:
    """Deeds that are no training: to attention by layer, and to other matrices."""
    ways = {way for ways in plain.values() for way in ways} | {way for _, way in of_networks}
    unusual = sorted(ways - {*PLAIN.values(), UNLIKE})
    for name in dict.fromkeys((*PLAIN.values(), *unusual, UNLIKE)):
        layers = [layer for layer, ways in plain.items() if name in ways]
        outside = [layer for layer, way in of_networks if way == name]
        count = sum(list(plain[layer]).count(name) for layer in layers)
        counts = [(count, "of attention", layers), (len(outside), "outside attention", {*outside})]
        where = [
            f"{counted(n, 'tensor')} {what} in {indexed('layer', sorted(places))}"
            for n, what, places in counts
            if n
        ]
        if where:
            every = sorted({*layers, *outside})
            yield Kind(
                name, every, f"{'; '.join(where)}: {name}.", len(every) / len(weights.layers)
            )


def _training(
    weights: WeightChanges,
    structure: set[str],
    explained_names: Collection[str],
    untrained: Collection[int],
) -> Iterator[Kind]:
    """Low-rank updates, and other training; not of heads in `untrained` layers."""
    layers = [layer for layer in weights.layers if layer.layer not in untrained]
    n_layers = max(1, len(weights.layers))
    outside = [(i, change) for i, change in weights.every if change.name_a not in weights.attention]
    low = [(i, change) for i, change in outside if change.kind in LOW_RANKS]
    ranks = [change.rank for _, change in low if change.rank] + [
        rank for layer in layers for rank in layer.ranks
    ]
    where = sorted(
        {i for i, _ in low if i is not None} | {layer.layer for layer in layers if layer.ranks}
    )
    if ranks:
        text = f"{counted(len(ranks), 'matrix change')} of rank {spans(ranks)}."
        yield Kind("low-rank update", where, text, len(where) / n_layers)
    for shared, finding in zip(weights.along.shared, weights.along.along_directions, strict=True):
        along = sorted(
            {i for i in (weights.every[number][0] for number in shared.members) if i is not None}
        )
        name, share = f"{shared.kind} (low-rank update)", len(along) / n_layers
        yield Kind(name, along, finding.text, share, shared.kind)
    least = UNMOVED if weights.basis.same else UNMOVED_IN_ANOTHER_BASIS
    # not by training
    emptied = {i for i, change in weights.every if change.is_matrix and not change.squares_b}
    moved = {
        layer.layer
        for layer in layers
        if not layer.only_ranks
        and layer.layer not in emptied
        and not structure & RESIZED
        and _is_moved(layer, least)
    }
    tuned: list[tuple[int | None, Change]] = []
    if not any(_is_quantised(layers, side) for side in ("grids", "base_grids")):
        explained = {layer.layer for layer in layers if _is_explained(layer)}
        tuned = [
            (i, change)
            for i, change in outside
            if change.kind is What.TUNED
            and change.change > max(least, weights.rounding)
            and i not in explained
            and change.is_tuned
            and change.squares_b
            and change.name_a not in explained_names
        ]
        moved |= {i for i, _ in tuned if i is not None}
    if moved or tuned:
        drifts = [
            layer.drift.maps
            for layer in layers
            if layer.layer in moved and layer.drift.maps > least
        ]
        kept = _unchanged_share(weights)
        text = " ".join(_how_far(drifts, tuned))
        if kept:
            text += (
                f" {kept:.0%} of the values of the changed matrices are equal bit for bit, as "
                "DARE leaves."
            )
        name = "fine-tuned in part" if kept else "fine-tuned"
        yield Kind(name, sorted(moved), text, len(moved) / n_layers, "fine-tuned")


def _is_explained(layer: LayerChange) -> bool:
    """True if a gauge, folding, an order or a low rank explains a layer's matrices."""
    moved = layer.gauge or layer.folded or layer.base_folded or layer.experts or layer.neurons
    return bool(moved) or layer.only_ranks


def _unchanged_share(weights: WeightChanges) -> float:
    """Median share of values that changed float32 matrices kept; 0 if only a few."""
    every = (change for _, change in weights.every)
    tuned = (change for change in every if change.kind is What.TUNED and change.is_matrix)
    changed = [change for change in tuned if change.dtypes == ("F32", "F32")]
    if not changed or any(layer.values.rounding > UNMOVED for layer in weights.layers):
        return 0.0
    shares = [1 - change.values_changed / max(1, prod(change.shapes[0])) for change in changed]
    return float(np.median(shares)) if np.median(shares) >= PARTLY else 0.0


def _how_far(drifts: Sequence[float], tuned: Sequence[tuple[int | None, Change]]) -> Iterator[str]:
    """Sentences on how far apart heads are, and other tensors."""
    if drifts:
        middle = f"{np.median(drifts):.2g} in the median layer"
        yield f"Heads differ by {min(drifts):.2g} to {max(drifts):.2g} of their norm, {middle}."
    if tuned:
        inside = [i is not None for i, _ in tuned]
        where = "in layers" if any(inside) else "outside layers"
        if any(inside) and not all(inside):
            where = "in layers and outside them"
        sizes = between([change.change for _, change in tuned])
        yield f"{counted(len(tuned), 'other tensor')} {where} differ by {sizes} of their norm."


def _is_moved(layer: LayerChange, least: float) -> bool:
    """True if a layer's heads moved further than rounding explains."""
    times = EXPLAINED_IN_ANOTHER_BASIS if layer.gauge else EXPLAINED
    return layer.drift.maps > max(least, times * layer.values.rounding)

"""Find which of two related checkpoints came first: the one that the other can be computed from."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite, prod, sqrt

import numpy as np

from weightscope.checkpoint.checkpoint import Tensor
from weightscope.heads.tensors.measure import BITS, why_unread
from weightscope.model.layers.factored import inner
from weightscope.model.model import Model
from weightscope.pairs.deeds.change import Change
from weightscope.pairs.deeds.deed import What
from weightscope.pairs.deeds.directions import one_direction
from weightscope.pairs.deeds.pair import first_rows
from weightscope.pairs.deeds.recomputed import COARSE, Cells, fills_cells, shares_in_sum, way_from
from weightscope.pairs.deeds.thresholds import (
    CONVERTED,
    EXPLAINED,
    NEAR_COPY,
    NEAR_IDENTITY,
    ONE_DIMENSION,
    PROJECTED,
)
from weightscope.pairs.lineage.differences import WeightChanges

COMPARED_ROWS = 64  # rows of two layers' matrices that are compared
HOW = {  # kinds of change, each as a map in words
    "cast": "rounding to a coarser float",
    "quantised": "rounding to a grid",
    "pruned": "setting values to zero",
    "rank cut": "dropping the smallest singular values",
    "direction removed": "projecting out a direction",
    "layers removed": "leaving out layers",
    "merge": "rounding their weighted sum",
}


@dataclass
class Derivation:
    """A way to recompute one checkpoint from another, which holds more and so came first."""

    ways: Counter[str] = field(default_factory=Counter)  # number of tensors by a key of `HOW`
    layers: dict[str, set[int]] = field(default_factory=dict)  # the suspect's layers by such a key

    @property
    def how(self) -> str:
        """The maps in words."""
        return " and ".join(HOW[way] for way in HOW if self.ways[way])


def prove(weights: WeightChanges, which: str) -> Derivation | None:
    """Prove that the suspect follows from the base (`which` "B"), or the base from it ("A").

    None if a tensor does not follow, or if the older one would have tensors or rows that the other
    lacks: then both may come from a third. Without ways if all is equal. `without_layers` judges
    layers that were left out.
    """
    missing = weights.lost if which == "B" else weights.gained
    if not weights.basis.same or not weights.layers or any(map(_matters, missing)):
        return None
    for layer in weights.layers:
        if layer.folded or layer.base_folded or layer.gauge or layer.copies > 1 or layer.neurons:
            return None
        if not layer.in_place and not layer.drift.maps <= EXPLAINED * weights.rounding:
            return None
    proof, cells = Derivation(), Cells()
    projected = _projected([change for _, change in weights.every], which)
    for layer_b, change in sorted(weights.every, key=lambda each: -each[1].values_changed):
        is_converted = change.shapes[0] == change.shapes[1] and change.change <= CONVERTED
        if change.kind is What.IDENTICAL or is_converted:
            continue
        is_projected = change.shown_name in projected
        way = "direction removed" if is_projected else _way(change, which, cells)
        if not way:
            return None
        if way != "equal":
            proof.ways[way] += 1
            layers = proof.layers.setdefault(way, set())
            if layer_b is not None:
                layers.add(layer_b)
    is_rounded = bool({"cast", "quantised"} & set(proof.ways))
    return None if is_rounded and not cells.are_filled else proof


def _matters(tensor: Tensor) -> bool:
    """True if a tensor is a matrix of weights, not a mask or a counter."""
    is_counter = tensor.dtype.startswith(("I", "U", "BOOL"))
    return len(tensor.shape) > 1 and tensor.shape[:2] != (1, 1) and not is_counter


def _older_and_newer(change: Change, which: str) -> tuple[Tensor, Tensor]:
    assert change.pair is not None
    return (change.pair.a, change.pair.b) if which == "B" else (change.pair.b, change.pair.a)


NOT_COMPARED = {What.RESHAPED, What.UNREAD, What.NOT_FINITE}


def _way(change: Change, which: str, cells: Cells) -> str:
    """A key of `HOW` by which a tensor follows from the other; empty if none is known."""
    older, newer = _older_and_newer(change, which)
    if change.kind in NOT_COMPARED or prod(older.shape) > prod(newer.shape):
        return ""  # rows were cut here, or added to the other
    if not change.values_changed:
        return "equal"
    casts = [cast for cast, rounded in change.casts if rounded != which]
    return way_from(older, newer, casts, cells)


def _projected(changes: Sequence[Change], which: str) -> set[str]:
    """The names of the matrices, at least two, that the same direction was projected out of."""
    removed = []
    for i, change in enumerate(changes):
        if change.rank != 1:
            continue
        _, newer = _older_and_newer(change, which)
        small = max(PROJECTED, 4 * 2.0 ** -BITS.get(newer.dtype, 23))
        for along in change.along:
            left = along.left
            if which == "A":
                left = 1 / left if left else np.inf
            if left <= small and np.abs(along.direction).max() < ONE_DIMENSION:
                removed.append((i, along))
    return {changes[i].shown_name for i in one_direction(removed)[0]}


# Merges


def merge_share(suspect: Model, first: Model, second: Model) -> float | None:
    """The first base's share in a suspect that is a rounded weighted sum of two.

    None if it is not one, if one base alone gives the suspect, or if a base is such a sum of the
    suspect and the other base: then the weights do not show which came first.
    """
    models = (first, second, suspect)
    triples = []
    for name in sorted({name for model in models for name in model.checkpoint}):
        tensors = [model.checkpoint.get(name) for model in models]
        present = [tensor for tensor in tensors if tensor is not None]
        if len(present) == 3 and _can_be_summed(present):
            x, z, y = present
            triples.append((x, z, y))
        elif any(map(_matters, present)):
            return None
    triples.sort(key=lambda each: -prod(each[2].shape))  # most sums are refused by the first block
    if not any(y.dtype in COARSE for _, _, y in triples):
        return None
    shares = shares_in_sum(triples)
    if shares is None:
        return None
    share = sum(shares) / 2
    is_one_base = any(shares[0] <= whole <= shares[1] for whole in (0, 1))
    if is_one_base or not isfinite(share) or not fills_cells(triples, share):
        return None
    backwards = [(y, z, x) for x, z, y in triples], [(x, y, z) for x, z, y in triples]
    return None if any(map(shares_in_sum, backwards)) else share


def _can_be_summed(tensors: Sequence[Tensor]) -> bool:
    """True if tensors have one shape and are floats."""
    same_shape = len({tensor.shape for tensor in tensors}) == 1
    return same_shape and all(tensor.dtype in BITS for tensor in tensors)


# Layers that were left out


def without_layers(base: Model, gone: Sequence[int]) -> bool:
    """True if none of the base's extra layers may have been added: no copies or near-identities."""
    layers = base.attention_layers
    wrote = {layer: _written(base, layer) for layer in layers}
    usual = float(np.median(list(wrote.values())))
    if any(wrote[layer] < NEAR_IDENTITY * usual for layer in gone):
        return False
    return not any(_is_near_copy(base, i, j) for i in gone for j in layers if i != j)


def _written(model: Model, index: int) -> float:
    """Size of what a layer's heads write."""
    layer = model.layer(index)
    squares = 0.0
    for h in range(layer.n_heads):
        vo = layer.head(h).vo
        squares += float((inner(vo.left) * inner(vo.right)).sum())
    return sqrt(max(0.0, squares))


def _is_near_copy(model: Model, i: int, j: int) -> bool:
    """True if a matrix of one layer resembles the other layer's."""
    stem, other_stem = model.stem(i), model.stem(j)
    for name in model.checkpoint.names_under(stem):
        tensor = model.checkpoint[name]
        counterpart = model.checkpoint.get(other_stem + name.removeprefix(stem))
        if counterpart is None or counterpart.shape != tensor.shape:
            continue
        if len(tensor.shape) < 2 or why_unread(tensor):
            continue
        rows = [first_rows(t, COMPARED_ROWS).astype(np.float64) for t in (tensor, counterpart)]
        x, y = (each - each.mean() for each in rows)
        size = float(np.linalg.norm(x) * np.linalg.norm(y))
        if size and abs(float((x * y).sum())) > NEAR_COPY * size:
            return True
    return False

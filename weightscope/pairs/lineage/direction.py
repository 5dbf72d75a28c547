"""Which of two related checkpoints came first: one can be recomputed from the other, and
information was lost.
"""

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

COMPARED_ROWS = 64  # rows by which two layers' matrices are held to each other
HOW = {  # as a kind of change, and as a map
    "cast": "rounding to a coarser float",
    "quantised": "rounding to a grid",
    "pruned": "setting values to zero",
    "rank cut": "dropping the smallest singular values",
    "direction removed": "projecting out a direction",
    "layers removed": "leaving out layers",
    "merge": "rounding their weighted sum",
}


@dataclass
class Proof:
    """How one checkpoint can be recomputed from another, which holds more and therefore came
    first.
    """

    # tensors that follow in each way, a key of `HOW`
    ways: Counter[str] = field(default_factory=Counter)
    # the suspect's layers that they are in
    layers: dict[str, set[int]] = field(default_factory=dict)

    @property
    def how(self) -> str:
        """The maps in words."""
        return " and ".join(HOW[way] for way in HOW if self.ways[way])


def prove(weights: WeightChanges, which: str) -> Proof | None:
    """How one checkpoint follows from the other: the suspect from the base for `which` "B", the
    reverse for "A".

    None where a tensor does not follow, or where the one that would be older has tensors or rows
    that the other lacks: then both may come from a third. Without ways if all is equal. Layers that
    were left out are `without_layers`'.
    """
    missing = weights.lost if which == "B" else weights.gained
    if not weights.basis.same or not weights.layers or any(map(_matters, missing)):
        return None
    for layer in weights.layers:
        if layer.folded or layer.base_folded or layer.gauge or layer.copies > 1 or layer.neurons:
            return None
        if not layer.in_place and not layer.drift.maps <= EXPLAINED * weights.rounding:
            return None
    follows, cells = Proof(), Cells()
    along = _projected([change for _, change in weights.every], which)
    for layer_b, change in sorted(weights.every, key=lambda each: -each[1].values_changed):
        if change.kind is What.IDENTICAL or (
            change.shapes[0] == change.shapes[1] and change.change <= CONVERTED
        ):
            continue
        way = "direction removed" if change.shown_name in along else _way(change, which, cells)
        if not way:
            return None
        if way != "equal":
            follows.ways[way] += 1
            follows.layers.setdefault(way, set()).update(() if layer_b is None else (layer_b,))
    rounded = {"cast", "quantised"} & set(follows.ways)
    return follows if not rounded or cells.are_filled else None


def _matters(tensor: Tensor) -> bool:
    """Whether a tensor is a matrix of weights, not a mask or a counter."""
    shape = tensor.shape
    return (
        len(shape) > 1 and shape[:2] != (1, 1) and not tensor.dtype.startswith(("I", "U", "BOOL"))
    )


def _older_and_newer(change: Change, which: str) -> tuple[Tensor, Tensor]:
    assert change.pair is not None
    return (change.pair.a, change.pair.b) if which == "B" else (change.pair.b, change.pair.a)


NOT_COMPARED = {What.RESHAPED, What.UNREAD, What.NOT_FINITE}


def _way(change: Change, which: str, cells: Cells) -> str:
    """How a tensor follows from the other, as a key of `HOW`; empty where it does not, or no map is
    known.
    """
    older, newer = _older_and_newer(change, which)
    if change.kind in NOT_COMPARED or prod(older.shape) > prod(newer.shape):
        return ""  # where rows were cut, the older may also be the newer one, extended
    if not change.values_changed:
        return "equal"
    # the older one, rounded, gives the newer
    casts = [cast for cast, rounded in change.casts if rounded != which]
    return way_from(older, newer, casts, cells)


def _projected(changes: Sequence[Change], which: str) -> set[str]:
    """The names of the matrices, at least two, that the same direction was projected out of."""
    removed = []
    for i, change in enumerate(changes):
        if change.rank == 1:
            small = max(
                PROJECTED, 4 * 2.0 ** -BITS.get(_older_and_newer(change, which)[1].dtype, 23)
            )
            for along in change.along:
                left = along.left if which == "B" else 1 / along.left if along.left else np.inf
                if left <= small and np.abs(along.direction).max() < ONE_DIMENSION:
                    removed.append((i, along))
    return {changes[i].shown_name for i in one_direction(removed)[0]}


# Merges


def merge_share(suspect: Model, first: Model, second: Model) -> float | None:
    """The first base's share in a suspect that is a weighted sum of two, rounded to a coarser
    float.

    None where it is none, where one base alone gives the suspect, or where a base is such a sum of
    the suspect and the other base: then the weights do not show which came first.
    """
    models = (first, second, suspect)
    triples = []
    for name in sorted({name for model in models for name in model.checkpoint}):
        x, z, y = tensors = [model.checkpoint.get(name) for model in models]
        if (
            x
            and z
            and y
            and x.shape == z.shape == y.shape
            and all(tensor.dtype in BITS for tensor in (x, z, y))
        ):
            triples.append((x, z, y))
        elif any(tensor is not None and _matters(tensor) for tensor in tensors):
            return None
    triples.sort(key=lambda each: -prod(each[2].shape))  # most sums are refused by the first block
    if (
        not any(y.dtype in COARSE for _, _, y in triples)
        or (shares := shares_in_sum(triples)) is None
    ):
        return None
    share, backwards = (
        sum(shares) / 2,
        ([(y, z, x) for x, z, y in triples], [(x, y, z) for x, z, y in triples]),
    )
    alone = any(shares[0] <= whole <= shares[1] for whole in (0, 1))
    if (
        alone
        or not isfinite(share)
        or not fills_cells(triples, share)
        or any(map(shares_in_sum, backwards))
    ):
        return None
    return share


# Layers that were left out


def without_layers(base: Model, gone: Sequence[int]) -> bool:
    """Whether no layer that only the base has may have been added to it: a copy, or one that writes
    little.
    """
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
    """Whether a matrix of one layer is like the other layer's."""
    stems = model.stem(i), model.stem(j)
    for name in model.checkpoint.names_under(stems[0]):
        counterpart = model.checkpoint.get(stems[1] + name.removeprefix(stems[0]))
        tensor = model.checkpoint[name]
        if (
            counterpart is None
            or counterpart.shape != tensor.shape
            or len(tensor.shape) < 2
            or why_unread(tensor)
        ):
            continue
        rows = [first_rows(t, COMPARED_ROWS).astype(np.float64) for t in (tensor, counterpart)]
        x, y = (each - each.mean() for each in rows)
        size = float(np.linalg.norm(x) * np.linalg.norm(y))
        if size and abs(float((x * y).sum())) > NEAR_COPY * size:
            return True
    return False

"""Changes of one layer between two checkpoints: its tensors, its heads, and the layer as a whole.

Norms folded, heads in another order or basis, experts that copy one network, neurons in another
order, a copy of another layer.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import NamedTuple

import numpy as np

from weightscope.checkpoint.blocks import Block, row_width
from weightscope.checkpoint.checkpoint import Tensor
from weightscope.heads.tensors.measure import BITS, why_unread
from weightscope.model.model import Model
from weightscope.pairs.changes.counterparts import counterparts_among
from weightscope.pairs.changes.head import UNDRIFTED, Basis, Drift, drift, is_folded, low_ranks
from weightscope.pairs.deeds.blocks import new_grid
from weightscope.pairs.deeds.catalogue import compare_pairs
from weightscope.pairs.deeds.change import Change, first_pass
from weightscope.pairs.deeds.deed import What
from weightscope.pairs.deeds.pair import (
    SAMPLED_ROWS,
    Pair,
    first_rows,
    pair_up,
    sample_rows,
    whole,
)
from weightscope.pairs.deeds.rounding import FRACTION, precision
from weightscope.pairs.deeds.thresholds import (
    COPIED,
    COPIED_AND_TUNED,
    FOLDING,
    REORDERED,
    SAME_NORMS,
)

SAMPLE = 4096  # values of a tensor that are compared first


@dataclass(frozen=True)
class Values:
    """Marks of conversion that a layer's attention matrices show in B and not in A."""

    matrices: int  # number examined
    casts: Counter[str]  # matrices by the float that holds their values exactly
    grids: Counter[str]  # matrices by the grid that they lie on
    base_grids: Counter[str]  # matrices of A by the grid that they lie on, where B's do not
    grid_error: float  # |error| / |x| that rounding to it makes; 0 without a grid
    rounding: float  # the same of the coarsest float of both, or of the grid


class TensorsOfBoth(NamedTuple):
    """Changes of the tensors that both checkpoints have, and those that only one has."""

    changes: Sequence[Change] = ()
    lost: Sequence[Tensor] = ()  # A's
    gained: Sequence[Tensor] = ()  # B's


@dataclass(frozen=True)
class LayerChange:
    """A layer of B and its counterpart in A."""

    layer: int  # index in B
    values: Values
    tensors: TensorsOfBoth  # pairs by name; heads' tensors only if heads stayed in place
    in_place: bool = True  # heads are in A's order
    folded: bool = False  # the norm before attention has lost its gain
    base_folded: bool = False  # A's norm has lost its gain, and B's has not
    copies: int = 0  # experts that are copies of A's feed-forward network
    base_copies: int = 0  # experts of A that are copies of B's
    experts: bool = False  # experts, and the router's rows, are A's in another order
    neurons: bool = False  # neurons are A's in another order, one for each network's matrices
    drift: Drift = UNDRIFTED  # move of matched heads
    gauge: bool = False  # factors are in another basis, maps are the same
    ranks: Sequence[int] = ()  # ranks of the low-rank changes of W_Q, W_K, W_V and W_O
    only_ranks: bool = False  # no other change of heads is left


def compare_layers(
    a: Model, b: Model, j: int, i: int, order: np.ndarray, basis: Basis
) -> LayerChange:
    """Compare layer j of A with layer i of B; `order` has the head of A of each head, or -1."""
    before, after = a.layer(j), b.layer(i)
    folded, base_folded = is_folded(before, after), is_folded(after, before)
    in_place = before.n_heads == after.n_heads and np.array_equal(order, np.arange(before.n_heads))
    as_it_was = basis.same and not (folded or base_folded) and in_place
    of_heads = {tensor.name for tensor in a.attention_tensors(j)}
    tensors = TensorsOfBoth()
    if basis.same:
        names = (_names(m, layer, heads=as_it_was) for m, layer in ((a, j), (b, i)))
        tensors = tensors_of_both(a, b, *names, of_any_layer=True)
    unmoved = {
        change.name_b for change in tensors.changes if change.kind in (What.IDENTICAL, What.ROUNDED)
    }
    copies = (0, 0)
    if tensors.lost or tensors.gained:
        copies = _copies(a, b, j, i), _copies(b, a, i, j)
    moved_rows = [
        each for each in tensors.changes if each.name_a not in of_heads and _reordered(each)
    ]
    of_experts = _of_experts(a, moved_rows)
    change = LayerChange(
        i,
        _values(a, b, j, i, unmoved),
        tensors,
        in_place,
        folded,
        base_folded,
        *copies,
        experts=bool(of_experts) and _are_experts_there(tensors.changes, of_heads),
        neurons=len(moved_rows) > len(of_experts) and _are_neurons(tensors.changes, moved_rows),
    )
    same = as_it_was and all(
        each.name_b in unmoved for each in tensors.changes if each.name_a in of_heads
    )
    if same or not basis.known:
        return change
    moved = drift(before, after, order, basis)
    gauge = moved.is_other_basis and before.n_kv_heads == after.n_kv_heads
    change = replace(change, drift=moved, gauge=gauge)
    if gauge:
        return change
    ranks, only = low_ranks(before, after, order, basis, change.values.rounding)
    return replace(change, ranks=ranks, only_ranks=only)


# Tensors


def tensors_of_both(
    a: Model,
    b: Model,
    in_a: Mapping[str, str],
    in_b: Mapping[str, str],
    *,
    of_any_layer: bool = False,
) -> TensorsOfBoth:
    """Changes of tensors by their keys in both checkpoints; by role where only one has a key."""
    sides = (
        {key: m.checkpoint[name] for key, name in names.items()}
        for m, names in ((a, in_a), (b, in_b))
    )
    pairs, lost, gained = pair_up(*sides)
    if lost and gained:
        names = ([tensor.name for tensor in tensors] for tensors in (lost, gained))
        left = list(counterparts_among(a, b, *names, of_any_layer=of_any_layer))
        pairs += [pair for each in left if each.by == "role" and (pair := each.pair())]
        lost = [each.a.as_stored() for each in left if each.a and each.by != "role"]
        gained = [each.b.as_stored() for each in left if each.b and each.by != "role"]
    return TensorsOfBoth(compare_pairs(a.checkpoint, b.checkpoint, pairs), lost, gained)


def _names(model: Model, layer: int, *, heads: bool) -> dict[str, str]:
    """Names of a layer's tensors by their part within the layer; with `heads`, attention's too."""
    stem = model.stem(layer)
    left_out = set() if heads else {tensor.name for tensor in model.attention_tensors(layer)}
    return {
        n.removeprefix(stem): n for n in model.checkpoint.names_under(stem) if n not in left_out
    }


def _values(a: Model, b: Model, j: int, i: int, unmoved: Collection[str]) -> Values:
    """Casts and grids of a layer's matrices; grids only of those that moved."""
    casts, grids, base_grids = Counter[str](), Counter[str](), Counter[str]()
    errors, coarsest, count = [], "F32", 0
    matrices = [
        tensor
        for tensor in a.attention_tensors(j)
        if len(tensor.shape) > 1 and not why_unread(tensor)
    ]
    there = {tensor.name.removeprefix(a.stem(j)): tensor for tensor in matrices}
    for tensor in b.attention_tensors(i):
        if len(tensor.shape) < 2 or why_unread(tensor) or not matrices:
            continue
        count += 1
        before = there.get(tensor.name.removeprefix(b.stem(i)), matrices[0])
        xs, ys = sample_rows(before), sample_rows(tensor)
        was, now = (precision(rows[0]) for rows in (xs, ys))
        coarsest = min(coarsest, now, was, key=FRACTION.__getitem__)
        grid = None
        if tensor.name not in unmoved:
            for counts, sides in (
                (grids, (before, tensor, xs, ys)),
                (base_grids, (tensor, before, ys, xs)),
            ):
                if grid := grid or new_grid(*sides):
                    counts[grid.named] += 1
                    errors.append(grid.error)
                    break
        if grid is None and FRACTION[now] < FRACTION[was]:
            casts[now] += 1
        elif grid is None and BITS.get(tensor.dtype, 99) < BITS.get(before.dtype, 0):
            casts[tensor.dtype] += 1
    grid_error = float(np.median(errors)) if errors else 0.0
    rounding = max(grid_error, FOLDING * 2.0 ** -FRACTION[coarsest] / sqrt(12))
    return Values(count, casts, grids, base_grids, grid_error, rounding)


def _copies(a: Model, b: Model, j: int, i: int) -> int:
    """The number of experts of B's layer that copy A's feed-forward network."""
    networks, experts = (
        [m.checkpoint[name] for name in _names(m, layer, heads=False).values()]
        for m, layer in ((a, j), (b, i))
    )
    most = 0
    for network in (tensor for tensor in networks if len(tensor.shape) == 2):
        first = next(_rows_of_matrices(network, network.shape))
        readable = (each for each in experts if not why_unread(each))
        parts = (rows for each in readable for rows in _rows_of_matrices(each, network.shape))
        most = max(most, sum(_cosine(first, rows) > COPIED_AND_TUNED for rows in parts))
    return most


def _rows_of_matrices(tensor: Tensor, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """The first rows of each matrix of this shape in a tensor, which may hold several experts."""
    if tensor.shape[-2:] == shape and len(tensor.shape) < 4:
        for start in range(0, prod(tensor.shape), prod(shape)):
            values = Block(tensor, start, start + min(SAMPLED_ROWS, shape[0]) * shape[1]).values()
            yield values.astype(np.float64)


def _cosine(x: np.ndarray, y: np.ndarray) -> float:
    size = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / size if size else 0.0


def _of_experts(a: Model, moved_rows: Sequence[Change]) -> list[Change]:
    """The stacks of experts and their router, which has a row for each."""
    counts = {each.shapes[0][0] for each in moved_rows if each.kind is What.EXPERTS}
    roles = a.tensors.roles if moved_rows else {}
    return [
        each
        for each in moved_rows
        if each.shapes[0][0] in counts or roles.get(each.name_a, "").endswith("router")
    ]


def _are_experts_there(changes: Sequence[Change], of_heads: Collection[str]) -> bool:
    """True if each matrix with other values is another one of A's in this layer, by first rows."""
    tuned = [each for each in changes if each.kind is What.TUNED and each.name_a not in of_heads]
    pairs = [change.pair for change in tuned if change.pair is not None and change.is_matrix]
    known = {first_rows(pair.a, SAMPLED_ROWS).tobytes() for pair in pairs}
    return all(first_rows(pair.b, SAMPLED_ROWS).tobytes() in known for pair in pairs)


def _reordered(change: Change) -> bool:
    """Detect a changed matrix that has the rows of A, or its experts, in another order."""
    if change.kind in (What.REORDERED, What.EXPERTS) and change.is_matrix:
        return True
    if change.pair is None or change.kind is not What.TUNED:
        return False
    if change.change < REORDERED or len(change.shapes[0]) != 2:
        return False
    ordered, norms = [], []
    for tensor in (change.pair.a, change.pair.b):
        rows = whole(tensor).astype(np.float64)
        lengths = np.linalg.norm(rows, axis=1)
        order = np.argsort(lengths)
        ordered.append(rows[order[:: max(1, len(order) // SAMPLED_ROWS)]])
        norms.append(lengths[order])
    same_norms = bool(np.abs(norms[0] - norms[1]).max() <= SAME_NORMS * norms[0].max())
    if not same_norms:
        return False
    cosines = [_cosine(x, y) for x, y in zip(*ordered, strict=True)]
    return float(np.median(cosines)) > COPIED_AND_TUNED


def _are_neurons(changes: Sequence[Change], moved_rows: Sequence[Change]) -> bool:
    """True unless matrices that were only reordered show several orders, or one that stayed."""
    exact = [each for each in moved_rows if each.kind is What.REORDERED]
    matrices = [each for each in changes if len({*each.shapes[0]}) == 2 and each.squares_b]
    for network in {_network(each) for each in exact}:
        orders = [_order(each) for each in exact if _network(each) == network]
        n = min(map(len, orders))
        stayed = (each for each in matrices if each.kind is What.IDENTICAL)
        if not n or any(n in each.shapes[0] for each in stayed if _network(each) == network):
            return False
        # gate and up in one matrix have the order twice
        parts = [order[i : i + n] - i for order in orders for i in range(0, len(order), n)]
        if not all(np.array_equal(part, parts[0]) for part in parts):
            return False
    return True


def _network(change: Change) -> str:
    """The expert that a matrix belongs to; empty outside mixtures."""
    return change.name_a.rsplit(".", 2)[0] if "expert" in change.name_a else ""


def _order(change: Change) -> np.ndarray:
    """The row of A, or the column, that each of B's is; empty where some are not there."""
    if change.pair is None or len(change.shapes[0]) != 2:
        return np.empty(0, np.intp)
    x, y = (whole(each) for each in (change.pair.a, change.pair.b))
    if change.deed.columns:
        x, y = x.T, y.T
    rows = [np.ascontiguousarray(w).view(f"V{w.itemsize * w.shape[1]}").ravel() for w in (x, y)]
    of_a, of_b = (np.argsort(each, kind="stable") for each in rows)
    if not np.array_equal(rows[0][of_a], rows[1][of_b]):
        return np.empty(0, np.intp)
    order = np.empty(len(of_a), np.intp)
    order[of_b] = of_a
    return order


# Other layers


def layers_elsewhere(a: Model, b: Model, moved: Sequence[int]) -> dict[int, int]:
    """The layer of a that each moved layer of b is a copy of, where there is one.

    Projections are compared as they are stored: the norms before them, which are folded into heads,
    may differ.
    """
    layers_of_a = {layer: _projections(a, layer) for layer in a.attention_layers} if moved else {}
    samples = {
        layer: [_sample(tensor) for tensor in tensors] for layer, tensors in layers_of_a.items()
    }
    source = {}
    for layer in moved:
        tensors = _projections(b, layer)
        firsts = [_sample(tensor) for tensor in tensors]
        if _alike(samples[layer], firsts):
            continue
        for origin in (layer_a for layer_a, sample in samples.items() if _alike(sample, firsts)):
            pairs = [Pair(*pair) for pair in zip(layers_of_a[origin], tensors, strict=True)]
            if all(map(_is_copy, first_pass(a.checkpoint, b.checkpoint, pairs))):
                source[layer] = origin
                break
    return source


def _projections(model: Model, layer: int) -> list[Tensor]:
    return [tensor for tensor in model.attention_tensors(layer) if len(tensor.shape) > 1]


def _sample(tensor: Tensor) -> np.ndarray:
    """The values of the first whole rows."""
    n_rows = max(1, SAMPLE // (row_width(tensor.shape) or 1))
    return first_rows(tensor, n_rows).ravel().astype(np.float64)


def _alike(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    """True if all samples are the same up to rounding."""
    if [len(x) for x in a] != [len(x) for x in b] or not a:
        return False
    return all(
        float(np.linalg.norm(y - x)) <= COPIED * float(np.linalg.norm(x))
        for x, y in zip(a, b, strict=True)
    )


def _is_copy(change: Change) -> bool:
    """True if a whole tensor, not zero, is the same up to rounding."""
    return change.shapes[0] == change.shapes[1] and change.squares > 0 and change.change <= COPIED

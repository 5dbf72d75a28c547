"""What happened to the weights of matching layers: both checkpoints, one layer of each at a time."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod, sqrt
from typing import NamedTuple

import numpy as np

from weightscope.attention.factored import inner
from weightscope.attention.layer import Layer
from weightscope.changes.basis import is_folded, is_permutation, rotation_between
from weightscope.changes.tensors import Pair, TensorChange, first_pass, judged
from weightscope.checkpoint import Tensor
from weightscope.checkpoint.blocks import Block, row_width
from weightscope.display import ShowsShapes
from weightscope.lineage.matching import Match
from weightscope.metrics.grids import bits_of, own_grid, precision
from weightscope.metrics.weight_changes import evenly_spread, low_rank
from weightscope.model import Model
from weightscope.progress import bar
from weightscope.tensors.measure import BITS, why_unread

HEADS = 4  # of a layer whose maps are compared exactly
ROWS = 32  # rows of a tensor that are searched for a grid or a cast
OTHER_BASIS = 0.01  # |S - B| / |B| of factors whose basis may have been changed
THAN_MAPS = 3.0  # such factors differ at least this many times as much as their products
ALIKE = 0.9  # cosine of copies: an expert and the network that it was copied from, a neuron and its counterpart
REORDERED = 0.5  # |S - B| / |B| above which the base's rows may be in another order
SAME_NORMS = 1e-3  # relative difference of their sorted norms
FOLDING = 3.0  # times a value's own rounding: that of values multiplied by a norm's gain, in both checkpoints
STORED = 0.1  # |error| / |x| of a format whose grid does not show in the values: that of four bits
CLEAR = 2.0  # times the rounding error that a change has to exceed before its rank is computed


@dataclass(frozen=True, eq=False, repr=False)
class Basis(ShowsShapes):
    """How the suspect's stream follows from the base's: x_s = x_b R."""

    rotation: np.ndarray | None = None  # (d, d); None if it is the identity, or unknown
    known: bool = True
    permuted: bool = False

    @property
    def same(self) -> bool:
        """Whether tensors of both can be compared directly."""
        return self.rotation is None and self.known

    def turned(self, factor: np.ndarray) -> np.ndarray:
        """A base's factor (d, r) in the suspect's basis."""
        return factor if self.rotation is None else self.rotation.T @ factor


@dataclass(frozen=True)
class Values:
    """What the suspect's attention matrices show that the base's do not."""

    matrices: int  # how many were examined
    casts: Counter[str]  # of them, by the float that holds their values exactly
    grids: Counter[str]  # and by the grid that they lie on
    base_grids: Counter[str]  # those of the base's that lie on one, where the suspect's do not
    grid_error: float  # |error| / |x| that rounding to it makes; 0 without a grid
    rounding: float  # the same of the coarsest float of both, or of the grid


@dataclass(frozen=True)
class LayerPair:
    """A layer of the suspect and its counterpart."""

    layer: int
    values: Values
    tensors: Sequence[TensorChange] = ()  # those with the same name; heads' tensors only if heads stayed in place
    lost: Sequence[str] = ()  # those that only the base has
    gained: Sequence[str] = ()  # and those that only the suspect has
    in_place: bool = True  # heads are in the base's order
    folded: bool = False  # the norm before attention has lost its gain
    base_folded: bool = False  # that of the base has, and the suspect's has not
    copies: int = 0  # experts that are copies of the base's feed-forward network
    base_copies: int = 0  # experts of the base that are copies of the suspect's
    neurons: bool = False  # rows of a feed-forward matrix are the base's in another order
    drift: float = 0.0  # |S - B| / |B| of the maps of matched heads, the median
    of_factors: float = 0.0  # the same of W_Q, W_K, W_V and W_O
    gauge: bool = False  # factors are in another basis, maps are the same
    ranks: Sequence[int] = ()  # of the changes of W_Q, W_K, W_V and W_O that are of low rank
    only_ranks: bool = False  # no other change of heads is left

    @property
    def unpaired(self) -> int:
        """How many tensors exist in only one of the two."""
        return len(self.lost) + len(self.gained)


@dataclass(frozen=True)
class Surgery:
    """All matching layers, and the tensors outside layers."""

    basis: Basis
    layers: list[LayerPair]
    outside: Sequence[TensorChange] = ()
    lost: Sequence[str] = ()  # tensors outside layers that only the base has
    gained: Sequence[str] = ()  # and those that only the suspect has
    attention: frozenset[str] = field(default_factory=frozenset)  # the base's tensors that contain heads


def compared(suspect: Model, base: Model, match: Match) -> Surgery:
    """Compare the weights of all matching layers."""
    basis = _basis_of(suspect, base, match)
    pairs = [
        (i, base.attention_layers[j], order)
        for i, j, order in zip(suspect.attention_layers, match.layers, match.heads, strict=True)
        if j is not None
    ]
    layers = [_layer_pair(suspect, base, i, j, o, basis) for i, j, o in bar(pairs, "layers compared", "layer")]
    outside = _outside(suspect, base) if basis.same else NOTHING
    of_heads = frozenset(tensor.name for _, j, _ in pairs for tensor in base.attention_tensors(j))
    return Surgery(basis, layers, *outside, of_heads)


def _basis_of(suspect: Model, base: Model, match: Match) -> Basis:
    """The basis that a match by direction, by tokens or by spectra leaves."""
    if match.route == "direct":
        return Basis()
    if match.route == "spectra" or suspect.config.d_model != base.config.d_model:
        return Basis(known=False)
    rotation = rotation_between(base, suspect)
    return Basis(rotation, permuted=is_permutation(rotation))


def _layer_pair(suspect: Model, base: Model, i: int, j: int, order: np.ndarray, basis: Basis) -> LayerPair:
    """Compare layer i of the suspect with layer j of the base; `order` says which head each head is."""
    a, b = base.layer(j), suspect.layer(i)
    folded, base_folded = is_folded(a, b), is_folded(b, a)
    in_place = a.n_heads == b.n_heads and np.array_equal(order, np.arange(a.n_heads))
    as_it_was = basis.same and not (folded or base_folded) and in_place
    found = _tensors(suspect, base, i, j, heads=as_it_was) if basis.same else NOTHING
    unmoved = {change.name_b for change in found.changes if change.kind in ("identical", "rounded")}
    values = _values(suspect, base, i, j, unmoved)
    copies, base_copies = (
        (_copies(suspect, base, i, j), _copies(base, suspect, j, i)) if found.lost or found.gained else (0, 0)
    )
    of_heads = {tensor.name for tensor in base.attention_tensors(j)}
    neurons = any(_reordered(suspect, base, change) for change in found.changes if change.name_a not in of_heads)
    pair = LayerPair(i, values, *found, in_place, folded, base_folded, copies, base_copies, neurons)
    exact = [change.kind in ("identical", "rounded") for change in found.changes if change.name_a in of_heads]
    same = as_it_was and all(exact)
    if same or not basis.known:
        return pair
    maps, factors = _drift(a, b, order, basis)
    gauge = factors > OTHER_BASIS and factors > THAN_MAPS * maps and a.n_kv_heads == b.n_kv_heads
    ranks, only = ([], False) if gauge else _ranks(a, b, order, basis, values.rounding)
    return replace(pair, drift=maps, of_factors=factors, gauge=gauge, ranks=ranks, only_ranks=only)


# Heads


def _drift(a: Layer, b: Layer, order: np.ndarray, basis: Basis) -> tuple[float, float]:
    """How far apart the maps of matched heads are, and their factors: medians of |S - B| / |B|."""
    pairs = [(h, int(g)) for h, g in enumerate(order) if g >= 0]
    maps, factors = [], []
    for h, g in pairs[:: max(1, len(pairs) // HEADS)]:
        x, y = a.head(g), b.head(h)
        for before, after in ((x.qk, y.qk), (x.vo, y.vo)):
            sides = [(basis.turned(before.left), after.left), (basis.turned(before.right), after.right)]
            (left, left_now), (right, right_now) = sides
            squares = (inner(left) * inner(right)).sum(), (inner(left_now) * inner(right_now)).sum()
            both = (inner(left, left_now) * inner(right, right_now)).sum()
            maps.append(sqrt(max(0.0, squares[0] + squares[1] - 2 * both) / squares[0]) if squares[0] > 0 else 0.0)
            factors += [_change(*side) for side in sides if side[0].shape == side[1].shape]
    return float(np.median(maps)), float(np.median(factors)) if factors else 0.0


def _change(x: np.ndarray, y: np.ndarray) -> float:
    """|y - x| / |x|."""
    size = _rms([x])
    return _rms([y - x]) / size if size else 0.0


def _rms(matrices: Sequence[np.ndarray]) -> float:
    """Root of the mean square over matrices of one shape."""
    return sqrt(float(np.mean([np.mean(np.square(w, dtype=np.float64)) for w in matrices])))


FACTORS: tuple[Callable[[Layer, int], np.ndarray], ...] = (  # (d, r) of a query head or key-value head
    lambda layer, h: layer.head(h).w_q,
    lambda layer, h: layer.k.of(h)[0],
    lambda layer, h: layer.v.of(h)[0],
    lambda layer, h: layer.head(h).w_o.T,
)


def _ranks(a: Layer, b: Layer, order: np.ndarray, basis: Basis, rounding: float) -> tuple[list[int], bool]:
    """Ranks of the low-rank changes of W_Q, W_K, W_V and W_O, heads in the base's order; and whether no other change is
    left."""
    if (order < 0).any() or (a.n_heads, a.n_kv_heads) != (b.n_heads, b.n_kv_heads):
        return [], False
    if any(
        not layer.head(h).w_o.any() for layer in (a, b) for h in range(layer.n_heads)
    ):  # rows set to zero are a change of low rank too
        return [], False
    shared = a.n_heads // a.n_kv_heads
    groups = order[::shared] // shared
    ranks, only = [], True
    for factor, places in zip(FACTORS, (order, groups, groups, order), strict=True):
        heads = [factor(b, h) for h in range(len(places))]  # (d, r) each
        moved = [w - basis.turned(factor(a, int(g))) for w, g in zip(heads, places, strict=True)]
        size, (d, r) = _rms(heads), moved[0].shape
        if _rms(moved) <= CLEAR * rounding * size:
            continue
        rank = low_rank(lambda moved=moved: (w.T for w in moved), (r * len(moved), d), rounding * size)  # type: ignore[misc]
        if rank is None:
            only = False
        else:
            ranks.append(rank)
    return ranks, only and bool(ranks)


# Tensors


class Changes(NamedTuple):
    """How tensors that both have changed, and which exist on one side only."""

    changes: Sequence[TensorChange]
    lost: Sequence[str]  # the base's
    gained: Sequence[str]  # the suspect's


NOTHING = Changes((), (), ())


def _tensors(suspect: Model, base: Model, i: int, j: int, *, heads: bool) -> Changes:
    """How each tensor of a layer changed (heads' tensors on demand), and which exist on one side only."""
    sides = []
    for model, layer in ((base, j), (suspect, i)):
        stem = model.stem(layer)
        left_out = set() if heads else {tensor.name for tensor in model.attention_tensors(layer)}
        names = (name for name in model.checkpoint.names_under(stem) if name not in left_out)
        sides.append({name.removeprefix(stem): name for name in names})
    return _changes(suspect, base, *sides)


def _outside(suspect: Model, base: Model) -> Changes:
    """The same for tensors outside layers, and in layers without attention if both have as many layers."""
    sides, deep = [], base.config.n_layers == suspect.config.n_layers
    for model in (base, suspect):
        compared = model.attention_layers if deep else range(model.config.n_layers)
        inside = {name for i in compared for name in model.checkpoint.names_under(model.stem(i))}
        sides.append({name.removeprefix(model.prefix): name for name in model.checkpoint if name not in inside})
    return _changes(suspect, base, *sides)


def _changes(suspect: Model, base: Model, a: dict[str, str], b: dict[str, str]) -> Changes:
    """How tensors changed from a base's names to a suspect's, and which exist on one side only."""
    pairs = [Pair(base.checkpoint[a[key]], suspect.checkpoint[b[key]]) for key in a if key in b]
    seen = zip(pairs, first_pass(base, suspect, pairs), strict=True)
    changes = [change if pair.problem else judged(pair, change) for pair, change in seen]
    return Changes(changes, [a[key] for key in a if key not in b], [b[key] for key in b if key not in a])


def _values(suspect: Model, base: Model, i: int, j: int, unmoved: Collection[str]) -> Values:
    """Casts and grids of a layer's matrices; grids only of those that moved."""
    casts, grids, base_grids, errors, coarsest, count = Counter[str](), Counter[str](), Counter[str](), [], "F32", 0
    matrices = [tensor for tensor in base.attention_tensors(j) if len(tensor.shape) > 1 and not why_unread(tensor)]
    there = {tensor.name.removeprefix(base.stem(j)): tensor for tensor in matrices}
    for tensor in suspect.attention_tensors(i):
        if len(tensor.shape) < 2 or why_unread(tensor) or not matrices:
            continue
        count += 1
        before = there.get(tensor.name.removeprefix(suspect.stem(i)), matrices[0])
        ys, xs = _sampled(tensor), _sampled(before)
        held, was = (precision(rows[0]) for rows in (ys, xs))
        coarsest = min(coarsest, held, was, key=bits_of)
        moved = tensor.name not in unmoved
        if moved and (grid := _new_grid(xs, ys, before.dtype, tensor.dtype)):
            grids[grid[0]] += 1
            errors.append(grid[1])
        elif moved and (grid := _new_grid(ys, xs, tensor.dtype, before.dtype)):
            base_grids[grid[0]] += 1
            errors.append(grid[1])
        elif bits_of(held) < bits_of(was):
            casts[held] += 1
        elif tensor.dtype in BITS and before.dtype in BITS and BITS[tensor.dtype] < BITS[before.dtype]:
            casts[tensor.dtype] += 1
    grid_error = float(np.median(errors)) if errors else 0.0
    return Values(
        count, casts, grids, base_grids, grid_error, max(grid_error, FOLDING * 2.0 ** -bits_of(coarsest) / sqrt(12))
    )


def _new_grid(xs: Sequence[np.ndarray], ys: Sequence[np.ndarray], before: str, after: str) -> tuple[str, float] | None:
    """The grid of the second of two matrices, if the first is on none, and its rounding error: rows and columns."""
    found = [grid for x, y in zip(xs, ys, strict=False) if (grid := own_grid(y)) and not own_grid(x)]
    if after not in BITS and before in BITS:
        return f"stored as {after}", min((error for _, error in found), default=STORED)
    return min(found, key=lambda grid: grid[1], default=None)


def _sampled(tensor: Tensor) -> list[np.ndarray]:
    """Evenly spread rows of a matrix, and columns if it has two axes: (n, width) float32 each."""
    values = Block(tensor, 0, prod(tensor.shape)).values().astype(np.float32)
    rows = values.reshape(-1, row_width(tensor.shape) or len(values))
    sides = [rows, rows.T] if len(tensor.shape) == 2 else [rows]
    return [side[evenly_spread(len(side), ROWS)] for side in sides]


def _copies(suspect: Model, base: Model, i: int, j: int) -> int:
    """How many of a layer's experts are copies of the base's feed-forward network."""
    networks, experts = (
        [model.checkpoint[name] for name in model.checkpoint.names_under(model.stem(layer)) if name not in of_heads]
        for model, layer, of_heads in (
            (model, layer, {tensor.name for tensor in model.attention_tensors(layer)})
            for model, layer in ((base, j), (suspect, i))
        )
    )
    most = 0
    for network in (tensor for tensor in networks if len(tensor.shape) == 2):
        first = next(_first_rows(network, network.shape))
        parts = (rows for tensor in experts if not why_unread(tensor) for rows in _first_rows(tensor, network.shape))
        most = max(most, sum(_cosine(first, rows) > ALIKE for rows in parts))
    return most


def _first_rows(tensor: Tensor, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """The first rows of each matrix of this shape in a tensor, which may hold several experts."""
    if tensor.shape[-2:] == shape and len(tensor.shape) < 4:
        for start in range(0, prod(tensor.shape), prod(shape)):
            yield Block(tensor, start, start + min(ROWS, shape[0]) * shape[1]).values().astype(np.float64)


def _cosine(x: np.ndarray, y: np.ndarray) -> float:
    size = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / size if size else 0.0


def _reordered(suspect: Model, base: Model, change: TensorChange) -> bool:
    """Whether a changed matrix has the base's rows in another order."""
    if change.kind != "changed" or change.change < REORDERED or len(change.shapes[0]) != 2:
        return False
    ordered, norms = [], []
    for tensor in (base.checkpoint[change.name_a], suspect.checkpoint[change.name_b]):
        rows = Block(tensor, 0, prod(tensor.shape)).values().reshape(tensor.shape).astype(np.float64)
        lengths = np.linalg.norm(rows, axis=1)
        order = np.argsort(lengths)
        ordered.append(rows[order[:: max(1, len(order) // ROWS)]])
        norms.append(lengths[order])
    same_norms = bool(np.abs(norms[0] - norms[1]).max() <= SAME_NORMS * norms[0].max())
    return same_norms and float(np.median([_cosine(x, y) for x, y in zip(*ordered, strict=True)])) > ALIKE

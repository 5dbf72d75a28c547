"""Changes of a layer's heads between two checkpoints, and heads matched where their order changed.

Of a LoRA adapter and its base, the change is computed from the adapter's factors, not as a
difference of two weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, sqrt
from typing import NamedTuple

import numpy as np

from weightscope.checkpoint.adapters.lora import ChangeTensor, MergedTensor
from weightscope.checkpoint.checkpoint import Checkpoint, Tensor
from weightscope.core.compute.cores import in_threads, one_blas_thread
from weightscope.core.results import ShowsShapes
from weightscope.heads.audit.measure import MAPS, Arrays
from weightscope.model.layers.factored import Factored
from weightscope.model.layers.layer import Head, Layer
from weightscope.model.layers.maps import Affine
from weightscope.model.layers.read_layer import read_layer
from weightscope.model.layers.rotation import Delta, Rotation
from weightscope.model.metrics.moves import (
    Moved,
    moved_angles,
    norms_of_product,
    relative,
    relative_change,
    relative_size,
)
from weightscope.model.metrics.spectra import low_rank
from weightscope.model.model import Model
from weightscope.pairs.deeds.thresholds import (
    CLEAR,
    FAR,
    LIKELY_SAME,
    NEAR,
    OTHER_FACTORS,
    PERMUTED,
    SAME_SPECTRA,
    THAN_MAPS,
    UNMOVED,
)


def is_folded(a: Layer, b: Layer) -> bool:
    """Detect a norm's gains in a that were folded into b's q, k and v, leaving one value."""
    before, after = (
        q.norm.gamma if isinstance(q, Affine) and q.norm is not None else np.empty(0)
        for q in (a.q, b.q)
    )
    if not len(before) or len(before) != len(after) or not np.ptp(before) or np.ptp(after):
        return False
    # A gain of one may also be where training began: then the weights agree without the other's
    # gain.
    with np.errstate(divide="ignore", invalid="ignore"):
        unfolding = np.where(before == 0, 0.0, float(after[0]) / before.astype(np.float64))[:, None]
    verdicts = [_holds_gain(a, b, name, unfolding) for name in ("w_q", "w_k", "w_v")]
    if None not in verdicts:
        return all(verdicts)
    return all(_spectra_hold_gain(a, b, name, unfolding) for name in MAPS)


def _holds_gain(a: Layer, b: Layer, factor: str, unfolding: np.ndarray) -> bool | None:
    """True if b's factors are a's with their gains, not without; None in another order or basis."""
    heads = range(min(a.n_heads, b.n_heads))
    # (d, r) each
    x, y = ([getattr(layer.head(h), factor).astype(np.float64) for h in heads] for layer in (a, b))
    if any(w_a.shape != w_b.shape for w_a, w_b in zip(x, y, strict=True)):
        return None
    size = float(np.linalg.norm(y)) or 1.0
    with_gain, without = (
        float(np.linalg.norm(np.subtract(y, w))) / size for w in (x, [w * unfolding for w in x])
    )
    return None if min(with_gain, without) > FAR else with_gain < without and with_gain <= NEAR


def _spectra_hold_gain(a: Layer, b: Layer, name: str, unfolding: np.ndarray) -> bool:
    """True if b's maps have a's singular values with gains: no order, no basis changes them."""
    maps = [getattr(a.head(h), name) for h in range(a.n_heads)]
    of_b = [getattr(b.head(h), name).svdvals() for h in range(b.n_heads)]
    right = unfolding if name == "qk" else 1.0  # keys read through the norm, too
    without = [Factored(w.left * unfolding, w.right * right).svdvals() for w in maps]
    apart = [
        max(_nearest_spectrum(s, of_a) for s in of_b)
        for of_a in ([w.svdvals() for w in maps], without)
    ]
    return apart[0] < apart[1] and apart[0] <= SAME_SPECTRA


def _nearest_spectrum(s: np.ndarray, spectra: Sequence[np.ndarray]) -> float:
    """|s - s'| / |s| of the nearest spectrum."""
    size = float(np.linalg.norm(s)) or 1.0
    return min(
        (float(np.linalg.norm(s - t)) / size for t in spectra if len(t) == len(s)),
        default=float("inf"),
    )


@dataclass(frozen=True, eq=False, repr=False)
class Basis(ShowsShapes):
    """The rotation R from A's stream to B's: x_b = x_a R."""

    rotation: np.ndarray | None = None  # (d, d); None if it is the identity, or unknown
    known: bool = True

    @property
    def same(self) -> bool:
        """True if tensors of both can be compared directly."""
        return self.rotation is None and self.known

    @property
    def permuted(self) -> bool:
        """True if R only reorders dimensions and flips their signs."""
        return self.rotation is not None and bool(
            (np.abs(self.rotation).max(axis=1) > PERMUTED).all()
        )

    def turned(self, factor: np.ndarray) -> np.ndarray:
        """A factor (d, r) of A in B's basis."""
        return factor if self.rotation is None else self.rotation.T @ factor

    def turned_map(self, w: Factored) -> Factored:
        """R' W R: a map of A's stream as it acts on B's."""
        return w if self.rotation is None else Factored(self.turned(w.left), self.turned(w.right))


def basis_by_tokens(
    a: Model, b: Model, order: tuple[np.ndarray, np.ndarray] | None = None
) -> Basis:
    """The rotation by orthogonal Procrustes over the tokens that both have (Schoenemann 1966).

    `order` has the ids of counterparts in a and in b, if their numbers differ.
    """
    x, y = a.embeddings, b.embeddings
    if order is not None:
        pairs = zip((a, b), order, strict=True)
        rows = (m.ends.into_stream(m.embeddings.rows(ids)) for m, ids in pairs)
        of_a, of_b = (each.astype(np.float64) for each in rows)
        u, _, vt = np.linalg.svd(of_a.T @ of_b)
        return Basis((u @ vt).astype(np.float32))
    n = min(x.n_tokens, y.n_tokens)
    cross = np.zeros((a.config.d_model,) * 2)
    for (_, of_a), (_, of_b) in zip(x.blocks(0, n), y.blocks(0, n), strict=True):
        cross += a.ends.into_stream(of_a).astype(np.float64).T @ b.ends.into_stream(of_b)
    u, _, vt = np.linalg.svd(cross)
    return Basis((u @ vt).astype(np.float32))


FARTHEST = 1 << 17  # the longest distance that heads are compared at
SAMPLED = 4  # heads of a layer by which its drift is known
ROUNDING = 1e-12  # singular values of a change, over its factors' norms: float64's rounding
SKETCHES = ("q_sketch", "k_sketch", "v_sketch", "o_sketch")
OF_THE_LAYER = {  # arrays without an axis of heads
    "kv_head", "caveats", "unbounded", "qk_column_share", "row_energies", "row_floor",
    "factor_width", "output_bias_norm",
}  # fmt: skip
# Changes of each map in all its parts: the matrix, under rotation also at distance 1 and far on,
# and the bias.
OF_MATRICES = ("qk_change", "qk_change_delta1", "qk_change_far", "vo_change")
MOVED = (*OF_MATRICES, "qk_bias_change", "qk_key_bias_change", "vo_bias_change")
# Changes that a limit applies to.
LIMITED = (*OF_MATRICES, "qk_bias_effect", "vo_bias_effect")


@dataclass(frozen=True, eq=False, repr=False)
class LayerStage(ShowsShapes):
    """A layer in one checkpoint."""

    layer: Layer
    measured: Arrays  # from `measure_layer`
    order: np.ndarray  # (H,) the index here of each head of the first checkpoint
    base: Layer | None = None  # the layer that a LoRA was added to
    added: Layer | None = None  # the change by the LoRA; see `added_to`

    def in_order(self) -> dict[str, np.ndarray]:
        """The arrays, with heads in the first checkpoint's order."""
        return {
            name: values if name in OF_THE_LAYER else values[self.order]
            for name, values in self.measured.items()
        }


def follow_heads(
    first: LayerStage, previous: LayerStage, current: LayerStage
) -> tuple[LayerStage, Arrays, Arrays]:
    """The current stage in the first's order, and changes (H,) since first and previous.

    Heads are matched with the first checkpoint and with the previous one; the order in which more
    are the same is kept.
    """
    since_first = layer_changes(first, current)
    since_previous = since_first if previous is first else layer_changes(previous, current)
    with one_blas_thread():
        ordered, n_same = _match_heads(first, current, since_first)
        if previous is not first:
            by_previous, n_same_as_previous = _match_heads(previous, current, since_previous)
            ordered = by_previous if n_same_as_previous > n_same else ordered
    if np.array_equal(ordered.order, current.order):
        return current, since_first, since_previous
    since_first = layer_changes(first, ordered)
    if previous is first:
        return ordered, since_first, since_first
    return ordered, since_first, layer_changes(previous, ordered)


def _match_heads(a: LayerStage, b: LayerStage, changes: Arrays) -> tuple[LayerStage, int]:
    """`b` with its heads in the order of the same heads of `a`, and how many are the same."""
    same = unmoved(changes)
    left = np.flatnonzero(~same).tolist()  # places without a match yet
    order, free = b.order.copy(), list(left)
    for h, candidates in zip(left, _alike(a, b, left), strict=True):
        head = a.layer.head(int(a.order[h]))
        for candidate in candidates:
            if candidate in free and _same(head, b.layer.head(int(b.order[candidate]))):
                order[h] = b.order[candidate]
                same[h] = True
                free.remove(candidate)
                break
    for h in np.flatnonzero(~same).tolist():  # moved: each keeps its place if that is free
        place = free.pop(free.index(h) if h in free else 0)
        order[h] = b.order[place]
    return replace(b, order=order), int(same.sum())


def _alike(a: LayerStage, b: LayerStage, left: Sequence[int]) -> list[list[int]]:
    """Candidates for each place by similar sketches; an unknown sketch matches unknown ones."""
    alike = ~np.eye(len(left), dtype=bool)
    for name in SKETCHES:
        x, y = a.measured[name][a.order[left]], b.measured[name][b.order[left]]
        unknown = np.isnan(x).any(axis=1)[:, None] & np.isnan(y).any(axis=1)
        alike &= (x @ y.T >= LIKELY_SAME) | unknown
    return [[left[k] for k in np.flatnonzero(row).tolist()] for row in alike]


def _same(a: Head, b: Head) -> bool:
    return all(change <= UNMOVED for change in _moves(a, b, _factors(a, b)).values())


def layer_changes(a: LayerStage, b: LayerStage) -> dict[str, np.ndarray]:
    """Changes of a layer's heads, (H,) each: qk_change, qk_left_angle ... vo_bias_change."""
    added = b.added if b.base is a.layer else None

    def head_changes(pair: tuple[int, int]) -> dict[str, float]:
        i, j = pair
        head_added = added.head(i) if added is not None and i == j else None
        return _head_changes(a.layer.head(i), b.layer.head(j), head_added)

    heads = list(
        in_threads(head_changes, list(zip(a.order.tolist(), b.order.tolist(), strict=True)))
    )
    return {name: np.array([head[name] for head in heads]) for name in heads[0]}


def _head_changes(a: Head, b: Head, added: Head | None) -> dict[str, float]:
    factors = _factors(a, b)
    moves = _moves(a, b, factors)
    ranks = {f"{name}_change_rank": float("nan") for name in MAPS}
    if added is not None:
        exact = {"qk": qk_difference(a, added), "vo": vo_difference(a, added)}
        for name, change in exact.items():
            moves[f"{name}_change"] = relative_size(change, getattr(a, name))
            ranks[f"{name}_change_rank"] = rank_of(change)
        for name, delta in (("qk_change_delta1", 1), ("qk_change_far", far_of(a.layer.rotation))):
            turned = exact["qk"] if a.layer.rotation is None else qk_difference(a, added, delta)
            moves[name] = relative_size(turned, a.qk_at(delta))
    changes: dict[str, float] = {}
    for name in MAPS:
        changes[f"{name}_change"] = moves.pop(f"{name}_change")
        for side, of_factor in factors[name].items():
            angles = moved_angles(*of_factor)
            changes |= {
                f"{name}_{side}_angle": angles.max(),
                f"{name}_{side}_angle_mean": angles.mean(),
            }
    return changes | moves | ranks


Factors = dict[str, dict[str, tuple[Moved, np.ndarray, np.ndarray]]]


def _factors(a: Head, b: Head) -> Factors:
    """Moves of both maps' factors (d, r), with the factors before and after; at distance 0."""
    with np.errstate(invalid="ignore", over="ignore"):
        maps = {name: (getattr(a, name), getattr(b, name)) for name in MAPS}
        sides = {
            name: {"left": (x.left, y.left), "right": (x.right, y.right)}
            for name, (x, y) in maps.items()
        }
        return {
            name: {side: (Moved.of(*pair), *pair) for side, pair in pairs.items()}
            for name, pairs in sides.items()
        }


def _moves(a: Head, b: Head, factors: Factors) -> dict[str, float]:
    """The relative changes of a head, named as in `MOVED`."""
    norms = {
        name: norms_of_product(*(moved for moved, *_ in sides.values()))
        for name, sides in factors.items()
    }
    (query, *_), (key, *_) = factors["qk"].values()
    at_distances = {"qk_change_delta1": norms["qk"], "qk_change_far": norms["qk"]}
    if a.layer.rotation is not None or b.layer.rotation is not None:
        far = far_of(a.layer.rotation or b.layer.rotation)
        for name, delta in zip(at_distances, (1, far), strict=True):
            at_distances[name] = norms_of_product(
                query.times(_further(a, delta), _further(b, delta)), key
            )
    with np.errstate(invalid="ignore", over="ignore"):
        moves = {f"{name}_change": relative(moved, size) for name, (size, moved) in norms.items()}
        moves |= {name: relative(change, size) for name, (size, change) in at_distances.items()}
        before, after = _bias_terms(a), _bias_terms(b)
        for name, (size, _) in norms.items():
            lengths = {
                term: float(np.linalg.norm(before[term]))
                for term in before
                if term.startswith(name)
            }
            moved = {term: float(np.linalg.norm(after[term] - before[term])) for term in lengths}
            moves |= {f"{term}_change": relative(moved[term], lengths[term]) for term in lengths}
            effects = [relative(moved[term], np.maximum(lengths[term], size)) for term in lengths]
            moves[f"{name}_bias_effect"] = float(np.max(effects))
    return moves


def far_of(rotation: Rotation | None) -> int:
    """A distance at which the slowest pair has turned by a radian, at most `FARTHEST`."""
    if rotation is None or not rotation.frequencies.any():
        return 1
    turning = np.abs(rotation.frequencies[rotation.frequencies != 0])
    return min(FARTHEST, ceil(1 / turning.min()))


def _further(head: Head, delta: int) -> np.ndarray:
    """The matrix (r, r) that turns the head's queries from distance 0 to another."""
    rotation, identity = head.layer.rotation, np.eye(head.w_q.shape[1])
    if rotation is None:
        return identity
    angles = rotation.angles_at(1) if delta == 1 else delta * rotation.frequencies
    return np.asarray(rotation.turn(identity, angles, 1.0))


def _bias_terms(head: Head) -> dict[str, np.ndarray]:
    """Terms that biases add to a head's scores and values, (d,) in float64; at distance 0.

    W_Q b_K is the same for every key, which a softmax cannot tell, except under rotation.
    """
    of_key = head.query_at(0)[0] @ head.b_k.astype(np.float64)
    terms = {"qk_bias": head.qk_bias, "qk_key_bias": of_key, "vo_bias": head.vo_bias}
    return {name: term.astype(np.float64) for name, term in terms.items()}


def unmoved(changes: Arrays) -> np.ndarray:
    """True for heads (H,) that are the same up to rounding; unknown changes count as moved."""
    return np.all([changes[name] <= UNMOVED for name in MOVED if name in changes], axis=0)


# Changes of heads by a LoRA adapter.


def added_to(a: Model, b: Model, index: int) -> Layer | None:
    """An adapter's change to a layer of its base, as a float64 layer; None for another base.

    Both the layout of heads and the folding of a norm are linear in the weights, so a change is
    read like a weight.
    """
    family, stem = b.family, b.stem(index)
    projections = {f"{stem}{name}" for name in family.heads.projections}
    changed = False
    tensors: dict[str, Tensor] = {}
    for tensor in b.attention_tensors(index):
        module, _, kind = tensor.name.rpartition(".")
        projection = module in projections and kind == "weight"
        base = tensor.stored if isinstance(tensor, MergedTensor) and projection else tensor
        before = a.checkpoint.get(tensor.name)
        if kind != "bias" and (before is None or not _is_same(before, base)):
            return None
        changed |= base is not tensor
        tensors[tensor.name] = ChangeTensor(tensor) if projection else tensor
    if not changed:
        return None
    stored = b.checkpoint
    changes = Checkpoint(
        stored.folder, stored.files, {**dict(stored.items()), **tensors}, stored.config, stored.name
    )
    layer = read_layer(replace(b.under(), checkpoint=changes.unchecked()), family, b.config, index)
    return layer if all(isinstance(map_, Affine) for map_ in (layer.q, layer.k, layer.v)) else None


def _is_same(a: Tensor, b: Tensor) -> bool:
    """True if two tensors are the same bytes of the same file."""
    parts_a, parts_b = (
        [(dict(part.file.identity), part.entry) for part in tensor.parts] for tensor in (a, b)
    )
    return type(a) is type(b) and parts_a == parts_b


def qk_difference(a: Head, added: Head, delta: Delta = 0) -> Factored:
    """W_Q R W_K' after the change minus before: [dQ, Q] R [K + dK, dK]'."""
    d_q, d_k = added.query_at(delta)[0], added.w_k
    left = np.concatenate([d_q, a.query_at(delta)[0]], axis=1)
    return Factored(left, np.concatenate([a.w_k + d_k, d_k], axis=1))


def vo_difference(a: Head, added: Head) -> Factored:
    """W_V W_O after the change minus before: [dV, V] [O + dO; dO]."""
    d_v, d_o = added.w_v, added.w_o
    right = np.concatenate([(a.w_o + d_o).T, d_o.T], axis=1)
    return Factored(np.concatenate([d_v, a.w_v], axis=1), right)


def rank_of(difference: Factored) -> float:
    """The number of singular values of a change above rounding; NaN where it is not finite."""
    size = float(np.linalg.norm(difference.left) * np.linalg.norm(difference.right))
    if not np.isfinite(size):
        return float("nan")
    return float((difference.svdvals() > ROUNDING * size).sum())


# Heads of two layers in any basis of the stream.


class Drift(NamedTuple):
    """Medians of |B - A| / |A| over matched heads, of their maps and of their factors."""

    maps: float
    factors: float

    @property
    def is_other_basis(self) -> bool:
        """True if factors moved and their products did not: heads have another inner basis."""
        return self.factors > OTHER_FACTORS and self.factors > THAN_MAPS * self.maps


UNDRIFTED = Drift(0.0, 0.0)


def drift(a: Layer, b: Layer, order: np.ndarray, basis: Basis) -> Drift:
    """Changes of a sample of heads; `order` has the head of a for each of b, or -1."""
    pairs = [(h, int(g)) for h, g in enumerate(order) if g >= 0]
    maps, factors, far = [], [], far_of(a.rotation)
    for h, g in pairs[:: max(1, len(pairs) // SAMPLED)]:
        x, y = a.head(g), b.head(h)
        for before, after in ((basis.turned_map(x.qk), y.qk), (basis.turned_map(x.vo), y.vo)):
            maps.append(relative_change(before, after) if before.frobenius() > 0 else 0.0)
        for before, after in ((basis.turned_map(x.qk), y.qk), (basis.turned_map(x.vo), y.vo)):
            sides = ((before.left, after.left), (before.right, after.right))
            factors += [
                _rms([w - v]) / (_rms([v]) or np.inf) for v, w in sides if v.shape == w.shape
            ]
        # nor may it move far on
        near = maps[-2]
        is_asked = near <= UNMOVED or Drift(near, max(factors, default=0.0)).is_other_basis
        if a.rotation is not None and is_asked and x.qk.frobenius() > 0:
            apart = relative_change(basis.turned_map(x.qk_at(far)), y.qk_at(far))
            maps[-2] = apart if near <= UNMOVED or apart > THAN_MAPS * near else near
    return Drift(float(np.median(maps)), float(np.median(factors)) if factors else 0.0)


def _rms(matrices: Sequence[np.ndarray]) -> float:
    """Root of the mean square over matrices of one shape."""
    return sqrt(float(np.mean([np.mean(np.square(w, dtype=np.float64)) for w in matrices])))


# factors (d, r) of a query head or key-value head
FACTORS: tuple[Callable[[Layer, int], np.ndarray], ...] = (
    lambda layer, h: layer.head(h).w_q,
    lambda layer, h: layer.k.of(h)[0],
    lambda layer, h: layer.v.of(h)[0],
    lambda layer, h: layer.head(h).w_o.T,
)


def low_ranks(
    a: Layer, b: Layer, order: np.ndarray, basis: Basis, rounding: float
) -> tuple[list[int], bool]:
    """Ranks of the low-rank changes of W_Q, W_K, W_V, W_O, and True if nothing else changed."""
    if (order < 0).any() or (a.n_heads, a.n_kv_heads) != (b.n_heads, b.n_kv_heads):
        return [], False
    outputs = (layer.head(h).w_o for layer in (a, b) for h in range(layer.n_heads))
    if not all(w_o.any() for w_o in outputs):  # rows set to zero are a change of low rank too
        return [], False
    if basis.rotation is not None:  # turned factors are float32 sums
        rounding = max(rounding, sqrt(len(basis.rotation)) * float(np.finfo(np.float32).eps))
    shared = a.n_heads // a.n_kv_heads
    groups = order[::shared] // shared
    ranks, only = [], True
    for factor, places in zip(FACTORS, (order, groups, groups, order), strict=True):
        heads = [factor(b, h) for h in range(len(places))]  # (d, r) each
        moved = [w - basis.turned(factor(a, int(g))) for w, g in zip(heads, places, strict=True)]
        size, (d, r) = _rms(heads), moved[0].shape
        if _rms(moved) <= CLEAR * rounding * size:
            continue
        transposed = partial(map, np.transpose, moved)
        rank = low_rank(transposed, (r * len(moved), d), rounding * size)
        if rank is None:
            only = False
        else:
            ranks.append(rank)
    return ranks, only and bool(ranks)

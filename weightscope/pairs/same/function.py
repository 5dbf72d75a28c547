"""Detect layers that compute the same although tensors differ, on random inputs, one at a time.

Heads or neurons in another order, factors in another basis, values negated or scaled between two
matrices and norms folded into the next matrix change tensors and not what a layer adds to the
stream. Equality on random inputs proves this but for coincidence, as it does of polynomials
(Schwartz and Zippel). Layers are run in float64, so that what differs is the rounding of the stored
values, whichever processor multiplies. Closed neurons and gates, a cap and a saturated softmax hide
what stands before them, so layers are also run with these open. What depends on positions may
differ far from the first alone (pairs that turn slowly, buckets of long distances), so it is run up
to the last.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from math import prod

import numpy as np

from weightscope.core.errors import CheckpointError
from weightscope.heads.circuits.stream import activation_of, attend, rest_of_layer, why_no_stream
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.positions import WindowBias
from weightscope.model.layers.rotation import GridRotation
from weightscope.model.model import Model
from weightscope.pairs.changes.head import Basis, basis_by_tokens
from weightscope.pairs.deeds.catalogue import UNEXPLAINED
from weightscope.pairs.deeds.deed import Deed, What, deed
from weightscope.pairs.same import DIFFERENT
from weightscope.pairs.same.gauge import Gauges
from weightscope.pairs.same.judge import Judged
from weightscope.pairs.same.mixture import (
    MIXTURE,
    NORM,
    Join,
    Mixture,
    asymmetric,
    gated,
    order_of_experts,
)

TOKENS = 6  # random inputs of a layer, at positions 0 to 5
# 0 to 15 and every 16th position up to 512 have all distances between them; the rest is beyond
NEAR, FAR = 16, 512
BEYOND = 16  # positions at growing distances, up to the last
USUAL = 2048  # positions where the config names no last one
# places in a window that are all run; where distances have a vector each, 8 times as many are
MOST = 1024
# maps between what is compared: a folded norm, into a head or network, out of it, a change of basis
IN_A_ROW = 4
# times the rounding of these, where the stream was rotated and float32 embeddings alone show how
TURNED = 10
# times what a layer gives moves less than each tensor that differs, where others make up for that
SHOWN = 16


def basis_of(a: Model, b: Model) -> Basis | None:
    """The basis of B's stream by the token embeddings; None where they do not show one."""
    try:
        basis = basis_by_tokens(a, b)
        blocks = zip(a.embeddings.blocks(), b.embeddings.blocks(), strict=True)
        is_turned = all(
            _rows_turned(a, a.ends.into_stream(x), b.ends.into_stream(y), basis)
            for (_, x), (_, y) in blocks
        )
    except (CheckpointError, ValueError):
        return None
    rotation = basis.rotation
    if not is_turned:
        return None
    # exactly, without the rounding of a singular value decomposition
    if basis.permuted and rotation is not None:
        exact = np.zeros_like(rotation)
        places = np.abs(rotation).argmax(axis=1)
        exact[np.arange(len(places)), places] = np.sign(rotation[np.arange(len(places)), places])
        return Basis(exact)
    return basis


def _rows_turned(a: Model, x: np.ndarray, y: np.ndarray, basis: Basis) -> bool:
    """True if each value of y (n, d) is the value of x in the other basis."""
    if x.shape != y.shape:
        return False
    usual = np.sqrt(np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True))
    return bool((np.abs(_turned(x, basis) - y) <= allowed(a, basis) * usual).all())


# Roles outside the layers whose last axis is the stream's.
OF_STREAM = ("positions", "types", "class", "registers", "norm.inputs", "norm.inputs.bias")


def is_turned(a: Model, b: Model, judged: Judged, basis: Basis) -> bool:
    """True if a tensor outside the layers is in the other basis, as are the token embeddings."""
    if judged.stack not in (None, b.tensors.own) or judged.role == "tokens":
        return judged.verdict != DIFFERENT or judged.role == "tokens"
    if judged.role not in OF_STREAM:
        return False
    sides = ((a, judged.name_a), (b, judged.name_b))
    x, y = (np.atleast_2d(model.tensors[name].array()) for model, name in sides)
    return x.shape[-1] == a.config.d_model and _rows_turned(a, x, y, basis)


ANY = (asymmetric, asymmetric)
MATRICES = {"q", "k", "v", "o", "q+k+v", "k+v", "q_a", "q_b", "kv_a", "kv_b"}
ATTENTION = MATRICES | {"q_norm", "k_norm", "norm.before"}


def apart(
    a: Model,
    b: Model,
    index: int,
    basis: Basis,
    roles: Collection[str],
    joins: tuple[Join, Join] = ANY,
) -> float:
    """|B - A| / |A| of what a layer adds to random inputs; NaN where it cannot be run.

    Only the parts that have tensors of these roles are run; joins: what experts do between their
    matrices.
    """
    plain = {role.removesuffix(".bias") for role in roles}
    try:
        layers = [_attention(model, index, plain) for model in (a, b)]
        pairs: list[tuple[np.ndarray, np.ndarray]] = []
        for places in positions_of(layers[0], furthest(a, b)):
            x = _inputs(a, index, len(places))
            pairs += zip(
                _attended(layers[0], x, places),
                _attended(layers[1], _turned(x, basis), places),
                strict=True,
            )
        x = _inputs(a, index)
        before, rest = pairs[0][0], plain - ATTENTION
        if not is_mixture(rest) and (rest or a.family.parallel):
            after = _after(b, index, _turned(x, basis), _turned(before, basis))
            pairs += zip(_after(a, index, x, before), after, strict=True)
        # else each dimension has a rounding of its own
        mixed = basis.rotation is not None and not basis.permuted
        along = (None,) if mixed else (None, 0, 1)
        sizes = [_relative(_turned(x, basis), y, axis) for x, y in pairs for axis in along]
        if is_mixture(rest):
            sizes.append(_mixtures_apart(a, b, index, x, basis, joins))
    except CheckpointError:
        return float("nan")
    return max(sizes)


def _inputs(model: Model, index: int, n: int = TOKENS) -> np.ndarray:
    """Random inputs of a layer, (n, d); float64, so that products add no rounding."""
    return np.random.default_rng(index).standard_normal((n, model.config.d_model))


def furthest(a: Model, b: Model) -> int:
    """The number of positions that both models have."""
    return min(model.config.n_positions or USUAL for model in (a, b))


def positions_of(layer: Layer | None, most: int) -> list[np.ndarray]:
    """Positions to run a layer at: the first, and others up to `most` if it depends on them."""
    near = np.arange(TOKENS)
    if layer is None or not depends_on_positions(layer):
        return [near]
    rotation, window = layer.rotation, layer.additive
    if isinstance(rotation, GridRotation):
        side = NEAR * rotation.merge
        patches = prod(rotation.grid or (side, side))
        if patches > MOST**2:
            raise CheckpointError(f"layer {layer.index} has {patches:,} patches")
        return [spread(patches + rotation.prefix + rotation.suffix)]
    sides = [
        len(keys.every[0]) // 2 + 1
        for keys in layer.relative
        if keys.coordinate and keys.every is not None
    ]
    places = prod(sides) if sides else 0
    if isinstance(window, WindowBias):
        places = prod(window.sides) + (window.of_class is not None)
    if places:
        return [np.arange(places) if places <= MOST else spread(places)]
    if layer.relative:
        most = min(most, 8 * MOST)
    runs = [near, spread(most)]
    if rotation is not None and rotation.stretched is not None and rotation.longest < most:
        runs.append(spread(rotation.longest))
    if rotation is not None and rotation.axes is not None:
        axes = max(int(rotation.axes.max()) + 1, -int(rotation.axes.min()))
        rng = np.random.default_rng(0)
        runs.append(np.stack([rng.permutation(spread(most)) for _ in range(axes)], axis=1))
    return runs


def depends_on_positions(layer: Layer) -> bool:
    """True if scores depend on where tokens are."""
    parts = (layer.rotation, layer.additive, layer.relative_values, layer.temperature)
    return bool(layer.relative) or any(part is not None for part in parts)


def where_equal(a: Model, b: Model, judged: Iterable[Judged]) -> str:
    """The inputs and positions on which what computes the same was compared, in words."""
    of_attention = {
        each.layer or 0 for each in judged if each.role.removesuffix(".bias") in ATTENTION
    }
    for index in sorted(of_attention & {*a.attention_layers}):
        if depends_on_positions(layer := a.layer(index)):
            places = positions_of(layer, furthest(a, b))[:2][-1]
            return f"equal at {len(places)} positions up to {int(places.max()) + 1:,}"
    return f"equal on {TOKENS} random inputs"


def spread(count: int) -> np.ndarray:
    """Up to 64 of this many positions, the last among them: many distances, short and long."""
    beyond = np.rint(np.geomspace(FAR, max(FAR, count - 1), BEYOND + 1)).astype(int)
    every = np.concatenate(
        [np.arange(NEAR), np.arange(NEAR, FAR, NEAR), beyond, [max(0, count - 1)]]
    )
    return np.unique(every[every < max(1, count)])


def is_mixture(roles: Collection[str]) -> bool:
    """True if all these roles are of a mixture of experts or the norm before it."""
    return any(map(_of_mixture, roles)) and all(role == NORM or _of_mixture(role) for role in roles)


def _of_mixture(role: str) -> bool:
    return role.startswith(MIXTURE)


def _mixtures_apart(
    a: Model, b: Model, index: int, x: np.ndarray, basis: Basis, joins: tuple[Join, Join]
) -> float:
    """|B - A| / |A| of the worst expert, or of the first that differs, in the router's order."""
    before, after = Mixture(a, index, x, joins[0]), Mixture(b, index, _turned(x, basis), joins[1])
    order = order_of_experts(a, before, after, allowed(a, basis))
    if order is None:
        return float("inf")
    worst = _relative(_turned(before.shared(), basis), after.shared())
    for place, expert in enumerate(order):
        if worst > allowed(a, basis):
            break
        worst = max(worst, _relative(_turned(before.expert(expert), basis), after.expert(place)))
    return worst


def _turned(x: np.ndarray, basis: Basis) -> np.ndarray:
    """Vectors of A's stream as B has them."""
    return x if basis.rotation is None else x @ basis.rotation


def _relative(before: np.ndarray, after: np.ndarray, axis: int | None = None) -> float:
    """|B - A| / |A|, the largest along an axis; |A| is at least its root mean square."""
    with np.errstate(all="ignore"):
        size, moved = np.linalg.norm(before, axis=axis), np.linalg.norm(after - before, axis=axis)
        size = np.maximum(size, np.sqrt(np.mean(np.square(size))))
        apart = np.where(size > 0, moved / size, np.where(moved == 0, 0, np.inf))
        return float(np.nan_to_num(apart, nan=np.inf).max(initial=0))


def _attention(model: Model, index: int, roles: Collection[str]) -> Layer | None:
    """A layer's attention, if it has one; these roles may ask for it."""
    if index in model.attention_layers:
        return model.layer(index)
    if ATTENTION & {*roles}:
        raise CheckpointError(
            f"layer {index} has no attention that is run here", file=model.checkpoint.name
        )
    return None


def _attended(layer: Layer | None, x: np.ndarray, positions: np.ndarray) -> list[np.ndarray]:
    """Outputs of attention for inputs (n, d): as it is, and with nothing closed or saturated."""
    if layer is None:
        return [np.zeros_like(x)]
    never_closed = replace(layer, softcap=None, clip=None, outer_sinks=None, gate_kind="open")
    added = [
        layer.output(attend(layer, x, positions=positions), x),
        _softly(never_closed, x, positions),
    ]
    if layer.additive is not None:  # a bias by distance may be larger than all else
        added.append(_softly(replace(never_closed, additive=None), x, positions))
    return added


def _softly(layer: Layer, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The output of attention with scores of a size that does not saturate the softmax."""
    from scipy.special import softmax  # SciPy takes a while to import

    scores = layer.scores(x, positions)  # (H, n, n)
    scores = scores - scores.mean(axis=-1, keepdims=True)  # a constant over keys changes nothing
    size = scores.std(axis=(1, 2), keepdims=True)
    soft = scores * (1 + np.log1p(size)) / np.where(size > 0, 5 * size, 1)
    return layer.output(softmax(soft, axis=-1), x)


OPEN = {"relu2": "leaky_relu2"}  # a scale before which is its square behind, as of the model's own


def _after(model: Model, index: int, x: np.ndarray, attended: np.ndarray) -> list[np.ndarray]:
    """Output of the rest of a layer, (n, d): as it is, and with neurons that are never closed."""
    row = model.family.mlp
    if row is None or why_no_stream(model):
        raise CheckpointError(
            "has a feed-forward network that is not run here", file=model.checkpoint.name
        )
    never_closed = OPEN.get(activation_of(model, row), "leaky_relu")
    rows = (row, replace(row, activation=never_closed, activation_keys=()))
    return [rest_of_layer(model, each, index, x, attended) - x - attended for each in rows]


def last_apart(a: Model, b: Model, basis: Basis) -> float:
    """|B - A| / |A| of the logits of random last-layer outputs, of the token furthest apart."""
    x = _inputs(a, 0)
    try:
        both = zip(_logits(a, x), _logits(b, _turned(x, basis)), strict=True)
        return max((_relative(before, after, 1) for before, after in both), default=float("inf"))
    except (CheckpointError, ValueError):
        return float("inf")


def _logits(model: Model, x: np.ndarray) -> Iterator[np.ndarray]:
    """Logits of outputs x (n, d) that the norm has divided, biases included: blocks (rows, n)."""
    head, tensors = model.unembedding, model.tensors
    bias = np.zeros(head.n_tokens)
    if "unembedding.bias" in tensors:
        bias = tensors["unembedding.bias"].array()
    for first, rows in head.stored_blocks():
        constant = bias[first : first + len(rows)] + head.shifts(rows)
        yield head.folded(rows) @ x.T + constant[:, None]


# Deeds that others in the layer may undo; what is none of these was not done to keep the function.
MAY_CANCEL = {
    What.REORDERED,
    What.HEADS,
    What.EXPERTS,
    What.NEGATED,
    What.SCALED,
    What.FACTORS,
    What.BLOCK_FACTORS,
}


def is_unknown(
    a: Model, b: Model, index: int, basis: Basis, size: float, changed: Sequence[tuple[str, What]]
) -> bool:
    """True if a layer may still compute the same: not run, or the same as a gated mixture.

    size: see `apart`; changed: roles and deeds.
    """
    if np.isnan(size):
        return all(what in MAY_CANCEL for _, what in changed)
    if not is_mixture({role.removesuffix(".bias") for role, _ in changed} - ATTENTION):
        return False
    roles = [role for role, _ in changed]
    return apart(a, b, index, basis, roles, (gated(a), gated(b))) <= allowed(a, basis)


def allowed(model: Model, basis: Basis) -> float:
    """Largest |B - A| / |A| of equal outputs; stored values are float32 sums of d products."""
    rounding = IN_A_ROW * np.sqrt(model.config.d_model) * float(np.finfo(np.float32).eps)
    return float(rounding if basis.rotation is None or basis.permuted else TURNED * rounding)


def is_shown(model: Model, basis: Basis, size: float, changed: Sequence[Judged]) -> bool:
    """True if outputs are equal, and each of these tensors alone would have moved them far more."""
    least = min((each.size for each in changed if not np.isnan(each.size)), default=np.inf)
    return size <= min(allowed(model, basis), least / SHOWN)


def without_gauge(a: Model, b: Model, changed: Sequence[Judged], basis: Basis) -> list[Judged]:
    """Tensors, of one layer or after the last, whose values are not A's in another gauge."""
    experts, loose = None, 0.0
    if changed and any(map(_of_mixture, (each.role for each in changed))):
        index = changed[0].layer or 0
        x = _inputs(a, index)
        both = Mixture(a, index, x, asymmetric), Mixture(b, index, _turned(x, basis), asymmetric)
        experts = order_of_experts(a, *both, allowed(a, basis))
    if basis.rotation is not None and not basis.permuted:
        loose = allowed(a, basis)
    unseen = allowed(a, basis)
    return Gauges(a, b, changed, experts, basis.rotation, loose, unseen).uncertified()


deed(What.NORMS_FOLDED, "norms folded")
deed(What.NEURONS, "neurons in another order")
deed(What.SIGNS_MOVED, "signs moved between factors")
deed(What.SCALES_MOVED, "scales moved between factors")
deed(What.HEAD_BASIS, "heads in another basis")
deed(What.STREAM_BASIS, "the stream's coordinates {way}")
deed(What.NEARLY_A_GAUGE, "in another order or basis, but for some values")

NETWORK = {"gate", "up", "down", "gate+up"}
SCALED = {What.SCALED, What.FACTORS, What.BLOCK_FACTORS}
# The deed where the function stays: (roles, deeds, its name); the first fit counts, none fits all.
RENAMED: tuple[tuple[set[str], Set[What], Deed], ...] = (
    ({"norm"}, set(), Deed(What.NORMS_FOLDED)),
    (NETWORK, {What.REORDERED}, Deed(What.NEURONS)),
    (set(), {What.HEADS}, Deed(What.HEADS)),
    (set(), {What.NEGATED}, Deed(What.SIGNS_MOVED)),
    (set(), SCALED, Deed(What.SCALES_MOVED)),
    ({"q", "k", "v", "o", "q+k+v", "k+v"}, set(), Deed(What.HEAD_BASIS)),
    (NETWORK, UNEXPLAINED, Deed(What.NEURONS)),
    ({*MIXTURE}, set(), Deed(What.EXPERTS, ", or their neurons")),
)
FOLDED = {*SCALED, What.TUNED, What.FEW_ROWS}  # deeds that a folded norm leaves in a matrix


def renamed(role: str, done: Deed, *, folded: bool) -> Deed:
    """The deed of a tensor whose layer still computes the same.

    folded: a norm of the layer changed too.
    """
    if folded and done.what in FOLDED:
        return Deed(What.NORMS_FOLDED)
    plain = "norm" if role.startswith("norm.") else role.removesuffix(".bias")
    inner = plain.removeprefix("shared_").removeprefix("expert.")
    kinds = {plain, inner, *filter(plain.startswith, MIXTURE)}
    for roles, whats, name in RENAMED:
        if (not whats or done.what in whats) and (not roles or kinds & roles):
            return name
    return done

"""Whether layers whose tensors differ compute the same: both are run on the same random inputs, one layer at a time.

Heads or neurons in another order, factors in another basis, values negated or scaled between two matrices and norms
folded into the next matrix change tensors and not what a layer adds to the stream. Equality on random inputs proves
this but for coincidence, as it does of polynomials (Schwartz and Zippel): up to the rounding of float32.
"""

from collections.abc import Collection, Sequence

import numpy as np

from weightscope.changes.head import Basis, basis_by_tokens
from weightscope.circuits.stream import attend, rest_of_layer, why_no_stream
from weightscope.errors import CheckpointError
from weightscope.model import Model
from weightscope.same.mixture import EXPERTS, MIXTURE, NORM, Join, Mixture, asymmetric, gated, order_of_experts

TOKENS = 6  # random inputs of a layer
EQUAL = 1e-5  # |B - A| / |A| of what a layer adds to the stream, up to which float32's rounding explains it
EQUAL_TURNED = 1e-4  # the same where the stream was rotated and the rotation is only known from float32 embeddings
FOUND = 1e-4  # of embeddings in another basis: what the rounding of a rotation by float32 makes


def basis_of(a: Model, b: Model) -> Basis | None:
    """How B's stream follows from A's where the token embeddings say so; None where they do not."""
    try:
        basis = basis_by_tokens(a, b)
        _, x = next(iter(a.embeddings.blocks()))
        _, y = next(iter(b.embeddings.blocks()))
    except (CheckpointError, ValueError):
        return None
    n = min(len(x), len(y))
    turned = a.into_stream(x[:n]) @ basis.rotation
    apart = np.linalg.norm(turned - b.into_stream(y[:n])) / (np.linalg.norm(turned) or 1.0)
    if apart > FOUND:
        return None
    rotation = basis.rotation
    if basis.permuted and rotation is not None:  # exactly, without the rounding of a singular value decomposition
        exact = np.zeros_like(rotation)
        places = np.abs(rotation).argmax(axis=1)
        exact[np.arange(len(places)), places] = np.sign(rotation[np.arange(len(places)), places])
        return Basis(exact)
    return basis


ANY = (asymmetric, asymmetric)
ATTENTION = {"q", "k", "v", "o", "q+k+v", "k+v", "q_norm", "k_norm", "norm.before", "q_a", "q_b", "kv_a", "kv_b"}


def apart(
    a: Model, b: Model, index: int, basis: Basis, roles: Collection[str], joins: tuple[Join, Join] = ANY
) -> float:
    """|B - A| / |A| of what a layer adds to random inputs, by attention and after it; NaN where it cannot be run.

    Only the parts that have tensors of these roles are run; joins: what experts do between their matrices.
    """
    x = _inputs(a, index)
    plain = {role.removesuffix(".bias") for role in roles}
    try:
        before, after = _attended(a, index, x), _attended(b, index, _turned(x, basis))
        sizes = [_relative(_turned(before, basis), after)]
        rest = plain - ATTENTION
        if is_mixture(rest):
            sizes.append(_mixtures_apart(a, b, index, x, basis, joins))
        elif rest or a.family.parallel:
            rests = _after(a, index, x, before), _after(b, index, _turned(x, basis), _turned(before, basis))
            sizes.append(_relative(_turned(rests[0], basis), rests[1]))
    except CheckpointError:
        return float("nan")
    return max(sizes)


def _inputs(model: Model, index: int) -> np.ndarray:
    """Random inputs of a layer, (n, d)."""
    return np.random.default_rng(index).standard_normal((TOKENS, model.config.d_model)).astype(np.float32)


def is_mixture(roles: Collection[str]) -> bool:
    """Whether these roles, none of attention's, are of a mixture of experts and the norm before it."""
    return any(map(_of_mixture, roles)) and all(role == NORM or _of_mixture(role) for role in roles)


def _of_mixture(role: str) -> bool:
    return role.startswith(MIXTURE)


def _mixtures_apart(a: Model, b: Model, index: int, x: np.ndarray, basis: Basis, joins: tuple[Join, Join]) -> float:
    """The same of the worst expert, after the order of the router's rows; or of the first that differs."""
    before, after = Mixture(a, index, x, joins[0]), Mixture(b, index, _turned(x, basis), joins[1])
    order = order_of_experts(a, before, after, allowed(basis))
    if order is None:
        return float("inf")
    worst = _relative(_turned(before.shared(), basis), after.shared())
    for place, expert in enumerate(order):
        if worst > allowed(basis):
            break
        worst = max(worst, _relative(_turned(before.expert(expert), basis), after.expert(place)))
    return worst


def _turned(x: np.ndarray, basis: Basis) -> np.ndarray:
    """Vectors of A's stream as B has them."""
    return x if basis.rotation is None else x @ basis.rotation


def _relative(before: np.ndarray, after: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        size, moved = np.linalg.norm(before), np.linalg.norm(after - before)
        return float(np.nan_to_num(moved / size, nan=np.inf)) if size else float("inf" if moved else 0.0)


def _attended(model: Model, index: int, x: np.ndarray) -> np.ndarray:
    """What attention to all tokens adds to inputs (n, d)."""
    if index not in model.attention_layers:
        return np.zeros_like(x)
    layer = model.layer(index)
    return layer.output(attend(layer, x, causal=False), x)


def _after(model: Model, index: int, x: np.ndarray, attended: np.ndarray) -> np.ndarray:
    """What the rest of a layer adds after attention: (n, d) -> (n, d)."""
    row = model.family.mlp
    if row is None or why_no_stream(model):
        raise CheckpointError("has a feed-forward network that is not run here", file=model.checkpoint.name)
    return rest_of_layer(model, row, index, x, attended) - x - attended


def last_apart(a: Model, b: Model, basis: Basis) -> float:
    """|B - A| / |A| of the logits of random outputs of the last layer, token by token."""
    x = _inputs(a, 0)
    y = _turned(x, basis)
    moved, size = 0.0, 0.0
    try:
        blocks = zip(a.unembedding.blocks(), b.unembedding.blocks(), strict=True)
        for (_, before), (_, after) in blocks:
            p, q = before @ x.T, after @ y.T
            moved, size = moved + float(np.square(q - p).sum()), size + float(np.square(p).sum())
    except (CheckpointError, ValueError):
        return float("inf")
    return float(np.sqrt(moved / size)) if size else float("inf")


# Deeds that others in the layer may undo; what is none of these was not done to keep the function.
MAY_CANCEL = ("rows in another order", "heads in another order", EXPERTS, "negated", "scaled")


def is_unknown(a: Model, b: Model, index: int, basis: Basis, size: float, changed: Sequence[tuple[str, str]]) -> bool:
    """Whether a layer may compute the same all the same: it is not run, or a mixture is gated and the same if so.

    size: see `apart`; changed: roles and deeds.
    """
    if np.isnan(size):
        return all(deed.startswith(MAY_CANCEL) for _, deed in changed)
    if not is_mixture({role.removesuffix(".bias") for role, _ in changed} - ATTENTION):
        return False
    return apart(a, b, index, basis, [role for role, _ in changed], (gated(a), gated(b))) <= allowed(basis)


def allowed(basis: Basis) -> float:
    """How far apart what is computed may be."""
    return EQUAL if basis.rotation is None or basis.permuted else EQUAL_TURNED


# What a deed is called where the function stays: (roles, start of the name of the deed, name); the first fit counts.
CALLED = (
    (("norm",), "", "norms folded"),
    (("gate", "up", "down", "gate+up"), "rows in another order", "neurons in another order"),
    ((), "heads in another order", "heads in another order"),
    ((), "negated", "signs moved between factors"),
    ((), "scaled", "scales moved between factors"),
    (("q", "k", "v", "o"), "", "heads in another basis"),
    (MIXTURE, "", f"{EXPERTS}, or their neurons"),
)


def called(role: str, deed: str, *, folded: bool) -> str:
    """What was done to a tensor whose layer still computes the same; `folded` where a norm of the layer changed too."""
    if folded and deed.startswith(("scaled", "other values")):
        return "norms folded"
    plain = "norm" if role.startswith("norm.") else role.removesuffix(".bias")
    kinds = {plain, plain.removeprefix("shared_").removeprefix("expert."), *filter(plain.startswith, MIXTURE)}
    names = (name for roles, start, name in CALLED if deed.startswith(start) and (not roles or kinds & {*roles}))
    return next(names, deed)

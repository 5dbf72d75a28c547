"""What a LoRA adapter adds to the heads of its base, from its factors: no difference of two weights is ever taken."""

from dataclasses import replace

import numpy as np

from weightscope.attention.factored import Factored
from weightscope.attention.head import Head
from weightscope.attention.layer import Layer
from weightscope.attention.maps import Affine
from weightscope.attention.rotation import Delta
from weightscope.checkpoint import Checkpoint, Tensor
from weightscope.checkpoint.merged import ChangeTensor, MergedTensor
from weightscope.families.layer import read_layer
from weightscope.model import Model

ROUNDING = 1e-12  # of the factors' norms: singular values up to here are float64's rounding


def added_to(a: Model, b: Model, index: int) -> Layer | None:
    """What an adapter adds to a layer of its base, as a layer whose maps are the changes of theirs, in float64.

    How heads lie in a tensor and how a norm folds are linear in the weights, so the change goes the way that a weight
    goes.

    Parameters
    ----------
    a, b : Model
    index : int

    Returns
    -------
    Layer or None
        None where the layer of `b` is not that of `a` and a change of its projections: another checkpoint, a norm that
        was trained too, maps through a latent.
    """
    family, stem = b.family, b.prefix + b.family.stored_name(b.config, index)
    projections = {f"{stem}{name}" for name in (family.query, family.key, family.value, family.output)}
    changed = False
    tensors: dict[str, Tensor] = {}
    for tensor in b.attention_tensors(index):
        module, _, kind = tensor.name.rpartition(".")
        own = module in projections and kind == "weight"
        base = tensor.stored if isinstance(tensor, MergedTensor) and own else tensor
        before = a.checkpoint.get(tensor.name)
        if kind != "bias" and (before is None or not _is_same(before, base)):
            return None
        changed |= base is not tensor
        tensors[tensor.name] = ChangeTensor(tensor) if own else tensor
    if not changed:
        return None
    there = b.checkpoint
    changes = Checkpoint(there.folder, there.files, {**dict(there.items()), **tensors}, there.config, there.name)
    layer = read_layer(replace(b.tensors(), checkpoint=changes.unchecked()), family, b.config, index)
    return layer if all(isinstance(of, Affine) for of in (layer.q, layer.k, layer.v)) else None


def _is_same(one: Tensor, other: Tensor) -> bool:
    """The same bytes of the same file."""
    parts = ([(dict(part.file.identity), part.entry) for part in each.parts] for each in (one, other))
    return type(one) is type(other) and next(parts) == next(parts)


def qk_difference(a: Head, added: Head, delta: Delta = 0) -> Factored:
    """W_Q R W_K' after the change less before it: [dQ, Q] R [K + dK, dK]'."""
    d_q, d_k = added.query_at(delta)[0], added.w_k
    left = np.concatenate([d_q, a.query_at(delta)[0]], axis=1)
    return Factored(left, np.concatenate([a.w_k + d_k, d_k], axis=1))


def vo_difference(a: Head, added: Head) -> Factored:
    """W_V W_O after the change less before it: [dV, V] [O + dO; dO]."""
    d_v, d_o = added.w_v, added.w_o
    right = np.concatenate([(a.w_o + d_o).T, d_o.T], axis=1)
    return Factored(np.concatenate([d_v, a.w_v], axis=1), right)


def rank_of(difference: Factored) -> float:
    """How many singular values of a change are more than rounding; NaN where it is not finite."""
    size = float(np.linalg.norm(difference.left) * np.linalg.norm(difference.right))
    if not np.isfinite(size):
        return float("nan")
    return float((difference.svdvals() > ROUNDING * size).sum())

"""A layer read through its row: projections split, norms folded, what no matrix holds named."""

from dataclasses import replace
from typing import Any

import numpy as np

from weightscope.attention.folding import Affine, InverseRms
from weightscope.attention.layer import Divisor, Layer
from weightscope.attention.position_bias import Slopes
from weightscope.attention.rotation import GridRotation
from weightscope.families.config import ModelConfig, Numbers
from weightscope.families.family import Family, QkNorm
from weightscope.families.tensors import LayerTensors


def read_layer(model: LayerTensors, family: Family, config: ModelConfig, index: int, file: object) -> Layer:
    """One attention layer.

    Parameters
    ----------
    model : LayerTensors
        The model's tensors.
    family : Family
        As configured.
    config : ModelConfig
    index : int
    file : path-like
        The config's, named in errors.

    Raises
    ------
    CheckpointError
        Tensors are missing, misshapen or not finite, or the config's values absurd.
    """
    tensors = replace(model, prefix=model.prefix + family.stored_name(config, index, file))
    found = family.layout(tensors, family, config)
    rotation = family.rope.rotation(config, index, file) if family.rope else None
    layer = Layer(
        index, found.q, found.k, found.v, found.w_o, found.b_o, family.scale(config, index),
        q_rms=found.q_rms, k_rms=found.k_rms, v_rms=found.v_rms, gate=found.gate,
        rotation=rotation,
        additive=family.additive(model, config) if family.additive else None,
        softcap=_softcap(family, config, file),
        clip=_clip(family, config, file),
        sinks=tensors.read(family.sinks, (config.n_heads,)) if family.sinks else None,
    )  # fmt: skip
    norm = family.norm_of(index)
    if norm is not None:
        gamma, beta = norm.read(tensors, config.d_model)
        divisor = Divisor(norm.centred, config.norm_eps)
        layer = layer.after_norm(gamma, beta, divisor)
    if family.qk_norm is not None:
        layer = replace(layer, **_qk_normed(layer, tensors, family.qk_norm, config))
    if family.output_scale:
        scale = tensors.read(family.output_scale, (config.d_model,))
        layer = replace(layer, w_o=np.asarray(layer.w_o) * scale, output_bias=layer.output_bias * scale)
    return replace(layer, caveats=(*caveats(layer), *family.caveats))


def _softcap(family: Family, config: ModelConfig, file: object) -> float | None:
    if not family.softcap or config.raw.get(family.softcap) is None:
        return None
    return Numbers(config.raw, file).number(family.softcap, 1e-6)


def _clip(family: Family, config: ModelConfig, file: object) -> float | None:
    numbers = Numbers(config.raw, file)
    for outer in family.clip[:-1]:
        numbers = numbers.inside(outer)
    # 0 is no bound to MPT, whose code asks for the value's truth.
    return numbers.number_or(0.0, family.clip[-1]) or None if family.clip else None


def _qk_normed(layer: Layer, tensors: LayerTensors, row: QkNorm, config: ModelConfig) -> dict[str, Any]:
    """The cells of a layer that its q/k-norm changes: gammas folded, the scalars kept apart."""
    cells: dict[str, Any] = {}
    for role, module, affine in (("q", row.query, layer.q), ("k", row.key, layer.k)):
        assert isinstance(affine, Affine), "no family norms queries that come out of a latent once more"
        heads, _, r = affine.w.shape
        gain, shift = _gains(tensors, module, row, heads, r)
        plain = affine.scaled(np.ones((1, r), np.float32), centred=row.norm.centred)
        seen = plain
        if row.scope == "joint":  # one norm over all heads: (1, d, heads r)
            seen = Affine(plain.w.transpose(1, 0, 2).reshape(1, -1, heads * r), plain.b.reshape(1, -1))
        cells[role] = plain.scaled(gain, centred=False)
        cells[role + "_rms"] = InverseRms(seen, config.norm_eps)
        cells[role + "_shift"] = shift
    return cells


def _gains(tensors: LayerTensors, module: str, row: QkNorm, heads: int, r: int) -> tuple[np.ndarray, np.ndarray | None]:
    """gamma and, where there is one, beta of a q/k-norm, each (heads or 1, r)."""
    names = [f"{module}.norms.{head}" for head in range(heads)] if row.scope == "listed" else [module]
    shape = {"shared": (r,), "own": (heads, r), "listed": (r,), "joint": (heads * r,)}[row.scope]
    gamma, beta = (
        np.concatenate([tensors.read(f"{name}.{part}", shape).reshape(-1, r) for name in names]) if wanted else None
        for part, wanted in (("weight", True), ("bias", row.norm.bias))
    )
    assert gamma is not None
    return gamma + np.float32(row.norm.offset), beta


def caveats(layer: Layer) -> tuple[str, ...]:
    """What of a layer's scores and values its heads' matrices leave out, in words."""
    said = []
    if layer.k_rms is not None and layer.k_rms.dims is not None:
        said.append("the norms of latents: a scalar a token on keys' position-free part and on values")
        if layer.q_rms is not None:
            said.append("the norm of the query latent: a scalar a token on queries")
    elif layer.q_rms is not None:
        scope = "all heads together" if layer.q_rms.source.heads < layer.n_heads else "each head"
        said.append(f"the q/k-norm: scores are divided by the size of query and key, of {scope}; gamma is folded in")
    if layer.q_shift is not None:
        said.append("the q/k-norm's beta: terms of one token alone, divided by the other's size only")
    if layer.rotation is not None and layer.rotation.stretched is not None:
        longest = layer.rotation.longest
        said.append(f"slower rotation of sequences over {longest} positions; qk_at holds for shorter ones")
    if isinstance(layer.rotation, GridRotation):
        said.append(
            "rotation by row and column: qk_at holds between patches; class and register tokens do not turn, so that "
            "against a patch they see where it is"
        )
    if layer.additive is not None:
        kind = "ALiBi" if isinstance(layer.additive, Slopes) else "relative-position"
        said.append(f"the {kind} bias added to scores (layer.position_bias)")
    if layer.softcap is not None:
        said.append(f"the softcap: scores s become {layer.softcap:g} tanh(s / {layer.softcap:g})")
    if layer.clip is not None:
        said.append(f"queries, keys and values are clipped to [-{layer.clip:g}, {layer.clip:g}]")
    if layer.sinks is not None:
        said.append("the learned sink logit, one more term in each softmax (layer.sinks)")
    if layer.gate is not None:
        said.append("the output gate: what a head gathers is multiplied by a sigmoid of the query token (layer.gate)")
    return tuple(said)

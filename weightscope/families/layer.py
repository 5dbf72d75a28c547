"""A layer read through its row: projections split, norms folded, what no matrix holds named."""

from dataclasses import replace

import numpy as np

from weightscope.attention.layer import Layer
from weightscope.attention.maps import Affine, InnerNorm, Latent
from weightscope.attention.norms import Norm
from weightscope.attention.position_bias import Slopes
from weightscope.attention.rotation import GridRotation, Rotation
from weightscope.checkpoint.config import Config
from weightscope.families.cells import QkNorm, StoredNorm
from weightscope.families.config import ModelConfig
from weightscope.families.family import Family
from weightscope.families.sizes import in_layer
from weightscope.families.tensors import LayerTensors


def read_layer(model: LayerTensors, family: Family, config: ModelConfig, index: int) -> Layer:
    """One attention layer.

    Parameters
    ----------
    model : LayerTensors
        The model's tensors.
    family : Family
        As configured.
    config : ModelConfig
    index : int

    Raises
    ------
    CheckpointError
        Tensors are missing, misshapen or not finite, or the config's values absurd.
    """
    config, family = in_layer(config, family, index)
    tensors = replace(model, prefix=model.prefix + family.stored_name(config, index))
    for name, formula in family.frozen.items():
        expected = formula(config)
        if name in model and not np.allclose(model.read(name, expected.shape), expected, atol=1e-2):
            raise model.tensor(name, expected.shape).refuse(f"does not hold what {family.name}'s formula gives")
    layer = replace(
        family.layout(tensors, family, config),
        index=index,
        scale=family.scale(config, index),
        rotation=family.rope.rotation(config, index) if family.rope else None,
        additive=family.additive(model, config) if family.additive else None,
        softcap=_softcap(family, config),
        clip=_clip(family, config),
        sinks=tensors.read(family.sinks, (config.n_heads,)) if family.sinks else None,
    )
    layer = _multiplied(layer, family, config)
    norm = family.norm_of(index)
    if norm is not None:
        layer = layer.after_norm(_norm(norm, tensors, family, config))
    if family.qk_norm is not None:
        q, q_norm = _normed(layer.q, family.qk_norm.query, tensors, family.qk_norm, config)
        k, k_norm = _normed(layer.k, family.qk_norm.key, tensors, family.qk_norm, config)
        layer = replace(layer, q=q, k=k, q_norm=q_norm, k_norm=k_norm)
    if family.values_normed and isinstance(layer.v, Affine):
        layer = replace(layer, v_norm=InnerNorm(layer.v, config.norm_eps))
    if family.output_scale:
        scale = tensors.read(family.output_scale, (config.d_model,))
        layer = replace(layer, w_o=np.asarray(layer.w_o) * scale, output_bias=layer.output_bias * scale)
    return replace(layer, caveats=(*caveats(layer), *family.caveats))


def rotation_of(config: ModelConfig, family: Family, index: int) -> Rotation | None:
    """How one layer rotates queries and keys, from the config alone; None where it does not."""
    own, row = in_layer(config, family, index)
    return row.rope.rotation(own, index) if row.rope else None


def _norm(stored: StoredNorm, tensors: LayerTensors, family: Family, config: ModelConfig) -> Norm:
    """The norm before the layer, with what multiplies its output in gamma and beta."""
    norm = stored.read(tensors, config)
    if "input" not in family.multipliers:
        return norm
    factor = np.float32(config.number(family.multipliers["input"], smallest=-1e12))
    return replace(norm, gamma=factor * norm.gamma, beta=factor * norm.beta)


def _multiplied(layer: Layer, family: Family, config: ModelConfig) -> Layer:
    """The layer with its keys or values multiplied by a number from the config."""
    for name, of in (("key", "k"), ("value", "v")):
        if key := family.multipliers.get(name):
            factor = np.full((1, 1), config.number(key, smallest=-1e12), np.float32)
            layer = replace(layer, **{of: getattr(layer, of).scaled(factor)})
    return layer


def _softcap(family: Family, config: ModelConfig) -> float | None:
    if not family.softcap or not config.has(family.softcap):
        return None
    return config.number(family.softcap, smallest=1e-6)


def _clip(family: Family, config: ModelConfig) -> float | None:
    if not family.clip:
        return None
    part: Config = config
    for outer in family.clip[:-1]:
        part = part.inside(outer)
    return part.number(family.clip[-1], default=0) or None  # MPT's code asks for the value's truth: 0 is no bound


def _normed(
    of: Affine | Latent, module: str, tensors: LayerTensors, row: QkNorm, config: ModelConfig
) -> tuple[Affine, InnerNorm]:
    """The map to queries or keys with its norm's gamma folded in, and what is left of that norm."""
    if isinstance(of, Latent):
        raise TypeError("queries and keys that come out of a latent have no norm of their own")
    heads, _, r = of.shape
    gamma, beta = _gains(tensors, module, row, heads, r)
    plain = of.centred(jointly=row.scope == "joint") if row.centred else of
    seen = plain
    if row.scope == "joint":  # one norm over all heads: (1, d, heads r)
        seen = Affine(plain.w.transpose(1, 0, 2).reshape(1, -1, heads * r), plain.b.reshape(1, -1))
    return plain.scaled(gamma), InnerNorm(seen, config.norm_eps, shift=beta)


def _gains(tensors: LayerTensors, module: str, row: QkNorm, heads: int, r: int) -> tuple[np.ndarray, np.ndarray | None]:
    """gamma and, where there is one, beta of a q/k-norm, each (heads or 1, r)."""
    names = [f"{module}.norms.{head}" for head in range(heads)] if row.scope == "listed" else [module]
    shape = {"shared": (r,), "own": (heads, r), "listed": (r,), "joint": (heads * r,)}[row.scope]

    def read(part: str) -> np.ndarray:
        return np.concatenate([tensors.read(f"{name}.{part}", shape).reshape(-1, r) for name in names])

    return read("weight") + np.float32(row.offset), read("bias") if row.bias else None


def caveats(layer: Layer) -> tuple[str, ...]:
    """What of a layer's scores and values its heads' matrices leave out, in words."""
    said = []
    if layer.k_norm is not None and layer.k_norm.dims is not None:
        said.append("the norms of latents: a scalar a token on keys' position-free part and on values")
        if layer.q_norm is not None:
            said.append("the norm of the query latent: a scalar a token on queries")
    elif layer.q_norm is not None:
        scope = "all heads together" if layer.q_norm.source.shape[0] < layer.n_heads else "each head"
        said.append(f"the q/k-norm: scores are divided by the size of query and key, of {scope}; gamma is folded in")
    if layer.q_norm is not None and layer.q_norm.shift is not None:
        said.append("the q/k-norm's beta: terms of one token alone, divided by the other's size only")
    if layer.v_norm is not None and (layer.k_norm is None or layer.k_norm.dims is None):
        said.append("the norm of values: each head's value is divided by its size")
    if layer.rotation is not None and layer.rotation.stretched is not None:
        longest = layer.rotation.longest
        said.append(f"slower rotation of sequences over {longest} positions; qk_at holds for shorter ones")
    if isinstance(layer.rotation, GridRotation):
        said.append(
            "rotation by row and column: qk_at holds between patches; class and register tokens do not turn, so that "
            "against a patch they see where it is"
            if layer.rotation.prefix or layer.rotation.suffix
            else "rotation by row and column: qk_at counts columns, or takes (rows, columns)"
        )
    elif layer.rotation is not None and layer.rotation.axes is not None:
        said.append("rotation by several axes: qk_at counts positions of text, or takes a distance on each axis")
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

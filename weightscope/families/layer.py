"""A layer read through its row: projections split, norms folded, what no matrix holds named."""

from dataclasses import replace
from math import log

import numpy as np

from weightscope.attention.added import NOTHING_ADDED, Added
from weightscope.attention.gathered import HeadNorm, SubNorm
from weightscope.attention.layer import Layer
from weightscope.attention.maps import Affine, InnerNorm, Latent
from weightscope.attention.norms import Norm
from weightscope.attention.position_bias import Buckets, Slopes, WindowBias
from weightscope.attention.rotation import GridRotation, Rotation
from weightscope.checkpoint.config import Config
from weightscope.errors import CheckpointError
from weightscope.families.cells import Gate, QkNorm, StoredNorm
from weightscope.families.config import ModelConfig
from weightscope.families.differential import subtracted
from weightscope.families.family import Family
from weightscope.families.layouts import by_head, linear
from weightscope.families.sizes import in_layer
from weightscope.families.tensors import LayerTensors

ADDED = {
    Slopes: "ALiBi bias", Buckets: "relative-position bias", WindowBias: "bias by two patches' rows and columns",
}  # fmt: skip
CHOSEN = "an indexer chooses which keys a query sees: scores are the model's where it sees, as with any mask"


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
    source = family.keys_of(config, index)
    own, maker = (model.prefix + family.stored_name(config, i) for i in (index, source))
    tensors = replace(model, prefix=own, lent=dict.fromkeys(family.of_keys, maker) if source != index else {})
    for name, formula in family.frozen.items():
        expected = formula(config)
        if name in model and not np.allclose(model.read(name, expected.shape), expected, atol=1e-2):
            raise model.tensor(name, expected.shape).refuse(f"does not hold what {family.name}'s formula gives")
    layer = replace(
        family.layout(tensors, family, config),
        index=index,
        scale=family.scale(config, index),
        rotation=family.rope.rotation(config, index) if family.rope else None,
        temperature=family.temperature(config, index) if family.temperature else None,
        relative=family.relative(model, tensors, config) if family.relative else (),
        relative_values=family.relative_values(tensors, config) if family.relative_values else None,
        additive=family.additive(model, config, index) if family.additive else None,
        additive_gate=family.additive_gate(tensors, config) if family.additive_gate else None,
        softcap=_softcap(family, config),
        clip=_clip(family, config),
        sinks=tensors.read(family.sinks, (config.n_heads,)) if family.sinks else None,
        outer_sinks=tensors.read(family.outer_sinks, (config.n_heads,)) if family.outer_sinks else None,
        cross=family.memory is not None or source != index,
        keys_of=None if source == index else source,
    )
    if family.query_bias and isinstance(layer.q, Affine):
        more = tensors.read(family.query_bias, (config.n_heads, config.head_dim))
        layer = replace(layer, q=replace(layer.q, bias=layer.q.bias + more))
    if family.gate is not None:
        layer = replace(layer, gate=_gate(layer, family.gate, tensors, config), gate_kind=family.gate.kind)
    layer = _multiplied(layer, family, config)
    if family.added and layer.added is NOTHING_ADDED:
        layer = replace(layer, added=_added(layer, family))
    norm = family.norm_of(index)
    if norm is not None:
        layer = layer.after_norm(_norm(norm, tensors, family, config))
    if source != index and (norm := family.norm_of(source)) is not None:
        layer = layer.after_memory_norm(_norm(norm, replace(tensors, prefix=maker), family, config))
    if family.memory is not None and family.memory.norm is not None:
        layer = layer.after_memory_norm(family.memory.norm.read(tensors, config, layer.k.shape[1]))
    if family.qk_norm is not None and family.qk_norm.within(config, index):
        layer = _with_qk_norm(layer, family.qk_norm, tensors, config)
    if family.values_normed and isinstance(layer.v, Affine):
        layer = replace(layer, v_norm=InnerNorm(layer.v, config.norm_eps))
    if family.heads_normed:
        layer = replace(layer, gathered_norm=HeadNorm(config.norm_eps))
    if family.differences:
        layer = subtracted(layer, family.differences, tensors, config)
    if family.sub_norm is not None:
        layer = _with_sub_norm(layer, family.sub_norm, tensors, config)
    if family.output_scale:
        scale = tensors.read(family.output_scale, (config.d_model,))
        layer = replace(layer, w_o=np.asarray(layer.w_o) * scale, output_bias=layer.output_bias * scale)
    chosen = (CHOSEN,) if family.choosing else ()
    return replace(layer, caveats=(*caveats(layer), *chosen, *family.caveats))


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


def _added(layer: Layer, family: Family) -> Added:
    """What added positions become: they meet the projections behind the layer's norm, and no bias of theirs."""

    maps = {"queries": layer.q, "keys": layer.k}
    own = {side: Affine(of.stored, np.zeros_like(of.bias)) for side, of in maps.items() if isinstance(of, Affine)}
    return Added(*(own[side] if side in family.added else None for side in maps))


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


def _gate(layer: Layer, row: Gate, tensors: LayerTensors, config: ModelConfig) -> Affine:
    """The map to the gates: an output a dimension of every head, or one a head, as many as there are in the file."""
    h, r_v, _ = layer.w_o.shape
    stored = tensors.checkpoint.get(f"{tensors.prefix}{row.module}.weight")
    rows = h if stored and stored.shape[:1] == (h,) else h * r_v
    gate = by_head(*linear(tensors, config, row.module, (rows, config.d_model), row.bias), h)
    return gate if not row.of_heads else replace(gate, bias=gate.bias + tensors.read(row.of_heads, (h,))[:, None])


def _with_sub_norm(layer: Layer, row: StoredNorm, tensors: LayerTensors, config: ModelConfig) -> Layer:
    """The layer with a norm of what all heads have gathered folded into W_O, but for its sigma."""
    h, r_v, d = layer.w_o.shape
    norm = row.read(tensors, config, h * r_v)
    w_o, bias = norm.fold(np.array(layer.w_o).reshape(h * r_v, d), layer.output_bias)
    return replace(layer, w_o=w_o.reshape(h, r_v, d), output_bias=bias, gathered_norm=SubNorm(row.unread(config)))


def _with_qk_norm(layer: Layer, row: QkNorm, tensors: LayerTensors, config: ModelConfig) -> Layer:
    """The layer with the norms of queries and keys: gammas folded, the size of each query and key left."""
    rotation, eps = layer.rotation, config.norm_eps if row.eps is None else row.eps
    if not row.rotated or rotation is None:
        q, q_norm = _normed(layer.q, row.query, tensors, row, eps)
        k, k_norm = _normed(layer.k, row.key, tensors, row, eps)
        if row.log_scales:
            scales = tensors.read(row.log_scales, (layer.n_heads, 1, 1))[:, :, 0]
            q = q.scaled(np.exp(np.minimum(scales, log(row.largest_scale))))
        return replace(layer, q=q, k=k, q_norm=q_norm, k_norm=k_norm)
    if rotation.factor != 1 and len(rotation.turning) < layer.head_dim:
        raise config.error(
            "rope_parameters", "no factor of cos and sin, since a norm follows a rotation of part of a head"
        )
    # What turns and is divided by its size may be divided first: a rotation keeps sizes, but for its factor.
    bare = replace(row, query="", key="")
    q, q_norm = _normed(layer.q, "", tensors, bare, eps / rotation.factor**2)
    k, k_norm = _normed(layer.k, "", tensors, bare, eps / rotation.factor**2)
    gamma = np.prod([_gains(tensors, of, row, 1, layer.head_dim)[0] for of in (row.query, row.key)], axis=0)
    mean = rotation.over_pairs(gamma)
    if np.any((mean == 0) & (gamma != 0)):
        raise CheckpointError(
            "gammas of its q/k-norm, after rotation, cancel within a pair", file=tensors.checkpoint.name
        )
    gain = np.divide(gamma, mean, out=np.ones_like(gamma), where=mean != 0)
    return replace(
        layer, q=q.scaled(mean), k=k, q_norm=q_norm, k_norm=k_norm,
        rotation=replace(rotation, factor=1.0), gain=None if np.all(gain == 1) else gain,
    )  # fmt: skip


def _normed(
    of: Affine | Latent, module: str, tensors: LayerTensors, row: QkNorm, eps: float
) -> tuple[Affine, InnerNorm]:
    """The map to queries or keys with its norm's gamma folded in, and what is left of that norm."""
    if isinstance(of, Latent):
        raise CheckpointError(f"'{module}' is a norm of what comes out of a latent, which is not read")
    heads, _, r = of.shape
    gamma, beta = _gains(tensors, module, row, heads, r)
    plain = of.centred(jointly=row.scope == "joint") if row.centred else of
    seen = plain
    if row.scope == "joint":  # one norm over all heads: (1, d, heads r)
        seen = Affine(plain.w.transpose(1, 0, 2).reshape(1, -1, heads * r), plain.b.reshape(1, -1))
    return plain.scaled(gamma), InnerNorm(seen, eps, shift=beta)


def _gains(tensors: LayerTensors, module: str, row: QkNorm, heads: int, r: int) -> tuple[np.ndarray, np.ndarray | None]:
    """gamma and, where there is one, beta of a q/k-norm, each (heads or 1, r); gamma is 1 where there is no module."""
    if not module:
        return np.ones((1, r), np.float32), None
    names = [f"{module}.norms.{head}" for head in range(heads)] if row.scope == "listed" else [module]
    shape = {"shared": (r,), "own": (heads, r), "listed": (r,), "joint": (heads * r,)}[row.scope]

    def read(part: str) -> np.ndarray:
        return np.concatenate([tensors.read(f"{name}.{part}", shape).reshape(-1, r) for name in names])

    return read("weight") + np.float32(row.offset), read("bias") if row.bias else None


def caveats(layer: Layer) -> tuple[str, ...]:
    """What of a layer's scores and values its heads' matrices leave out, in words."""
    said = []
    if layer.keys_of is not None:
        said.append(
            f"keys and values are those of layer {layer.keys_of}: W_QK leads from what enters this layer to what "
            "enters that one, and W_VO back"
        )
    elif layer.cross:
        said.append(
            "eigenvalues and symmetric parts: cross-attention's maps lead from one space to another, W_QK from queries "
            "to the memory and W_VO back"
        )
    if layer.added is not NOTHING_ADDED:
        said.append("what positions add to scores: they are added to what queries and keys are made of (layer.added)")
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
    if layer.gain is not None:
        said.append(
            "gammas of the q/k-norm, which comes after rotation: qk_at has their mean over each pair of dimensions; "
            "what differs within pairs multiplies terms by i + j"
        )
    if layer.temperature is not None:
        said.append(
            f"the temperature of attention: scores of a query at position p are multiplied by {layer.temperature}"
        )
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
    if layer.relative:
        said.append("relative-position terms, of one token and the distance to the other (layer.relative)")
    if layer.additive is not None:
        times = ", times a factor of the query (layer.additive_gate)" if layer.additive_gate is not None else ""
        said.append(f"the {ADDED[type(layer.additive)]} added to scores (layer.position_bias){times}")
    if layer.relative_values is not None:
        said.append("values of distances, which a head gathers beside those of tokens (layer.relative_values)")
    if layer.softcap is not None:
        said.append(f"the softcap: scores s become {layer.softcap:g} tanh(s / {layer.softcap:g})")
    if layer.clip is not None:
        said.append(f"queries, keys and values are clipped to [-{layer.clip:g}, {layer.clip:g}]")
    if layer.sinks is not None:
        said.append("the learned sink logit, one more term in each softmax (layer.sinks)")
    if layer.outer_sinks is not None:
        said.append(
            "the learned sink logit, one more term in each softmax, which transformers leaves out of attention and "
            "multiplies what a head gathers by"
        )
    if layer.gate is not None:
        kind = layer.gate_kind
        said.append(f"the output gate: what a head gathers is multiplied by a {kind} of the query token (layer.gate)")
    if layer.gathered_norm is not None:
        said.append(layer.gathered_norm.caveat)
    return tuple(said)

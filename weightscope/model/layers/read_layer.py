"""A layer read as its row says, its caveats, and what must not stay unread."""

import re
from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import replace
from itertools import chain, takewhile

import numpy as np

from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.core.errors import CheckpointError
from weightscope.model.config.config import ModelConfig
from weightscope.model.config.dialects import in_layer
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.layouts import StoredHeads
from weightscope.model.layers.maps import Affine, InnerNorm, Latent, Norm
from weightscope.model.layers.positions import Buckets, Slopes, WindowBias
from weightscope.model.layers.rotation import GridRotation, Rotation
from weightscope.model.layers.steps import Place, Step
from weightscope.model.layers.steps.gates import gate_caveat
from weightscope.model.rows.cells import LayerTensors, QkNorm, StoredNorm
from weightscope.model.rows.family import Family
from weightscope.model.rows.table import NOT_COMPARED

# Unread tensors of an attention module: with weights left out every number is wrong.

# Buffers that older versions of transformers saved, and scales of caches that other programs
# quantise: no weights.
NO_WEIGHTS = re.compile(
    r"(.*\.)?(masked_bias|inv_freq|rotary_emb\..*|position_ids|relative_position_index"
    r"|[qkv]_scale|prob_output_scale)|bias",
    re.ASCII,
)


def attention_names(
    checkpoint: Checkpoint, prefix: str, row: Family, config: ModelConfig, index: int
) -> list[str]:
    """Names of the tensors of one layer's attention: projections, norms, sinks and no others."""
    family = row.in_layer(config.layer_types[index])
    source = family.keys_of(config, index)
    stem, maker = (prefix + family.stored_name(config, i) for i in (index, source))

    def inside(layer: str, modules: Iterable[str]) -> set[str]:
        by_module = (checkpoint.names_under(f"{layer}{module}.") for module in modules)
        return {*chain.from_iterable(by_module)}

    lone = [stem + name for name in family.lone]
    lone += [prefix + name for name in (*family.heads.shared, *family.reads.shared)]
    names = inside(stem, family.modules) | {name for name in lone if name in checkpoint}
    refuse_unread(checkpoint, stem, family, config, names)
    if maker != stem:  # keys and values of a layer before: its modules, and its norm
        names -= inside(stem, family.of_keys)
        names |= inside(maker, family.of_keys)
        if family.norms.before:
            names |= inside(maker, [family.norms.before.module])
    return sorted(names)


def refuse_unread(
    checkpoint: Checkpoint, stem: str, family: Family, config: ModelConfig, read: set[str]
) -> None:
    """Refuse a layer that stores more of attention than its row, as configured, reads or ignores.

    A bias that the config of a listed model_type denies is no reason: transformers passes it over.

    stem: A layer's name before its modules. read: The names that the row reads in that layer, with
    every tensor of a module that it names.
    """
    inside = _attention(family)
    ignored = tuple(f"{stem}{module}." for module in (*family.heads.ignored, *family.reads.ignored))
    names = checkpoint.names_under(stem + inside) if inside else []
    left = [name for name in names if name not in read and not name.startswith(ignored)]
    left = [name for name in left if not NO_WEIGHTS.fullmatch(name.removeprefix(stem + inside))]
    if family.origin:
        left += denied(checkpoint, stem, family, config)
    if left:
        more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        problem = (
            f"is an unsupported attention tensor{more}; family {family.called} would ignore it"
        )
        raise CheckpointError(problem, file=checkpoint.name, tensor=left[0])


def _attention(family: Family) -> str:
    """The module that all four projections are in, and its dot; empty where that is the layer."""
    paths = [module.split(".")[:-1] for module in family.heads.projections]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return "".join(f"{parts[0]}." for parts in shared)


def denied(checkpoint: Container[str], stem: str, family: Family, config: ModelConfig) -> list[str]:
    """Biases that a layer stores although its row, as configured, says that there are none."""
    has = family.heads.bias
    heads, norm, qk_norm = family.heads, family.norms.before, family.scores.qk_norm
    flags = {heads.q: has.q, heads.k: has.k, heads.v: has.v, heads.out: has.out}
    stated = {
        module: bool(config.get(flag) if isinstance(flag, str) else flag)
        for module, flag in flags.items()
    }
    if norm is not None:
        stated[norm.module] = norm.bias
    if qk_norm is not None:
        stated |= {qk_norm.query: qk_norm.bias, qk_norm.key: qk_norm.bias}
    names = [f"{stem}{module}.bias" for module, there in stated.items() if module and not there]
    return [name for name in names if name in checkpoint]


def denied_words(names: Collection[str]) -> str:
    """The caveat for such biases; empty where there are none."""
    if not names:
        return ""
    kinds = ", ".join(dict.fromkeys(".".join(name.split(".")[-2:]) for name in names))
    return (
        f"{kinds}: the file has them and config.json says no biases, so transformers ignores them"
    )


# A layer read through its row: projections split, norms folded, the rest named in caveats.

ADDED = {
    Slopes: "ALiBi bias",
    Buckets: "relative-position bias",
    WindowBias: "bias by two patches' rows and columns",
}


def read_layer(model: LayerTensors, family: Family, config: ModelConfig, index: int) -> Layer:
    """One attention layer of a configured row: its layout, its norms, then its steps by `Place`."""
    config, family = in_layer(config, family, index)
    source = family.keys_of(config, index)
    stem, maker = (model.prefix + family.stored_name(config, i) for i in (index, source))
    tensors = replace(
        model, prefix=stem, lent=dict.fromkeys(family.of_keys, maker) if source != index else {}
    )
    layer = replace(
        family.heads.layout(StoredHeads(tensors, family, config)),
        index=index,
        scale=family.scores.scale(config, index),
        rotation=family.rope.rotation(config, index) if family.rope else None,
        additive=family.positions.bias(model, config, index) if family.positions.bias else None,
        cross=family.memory is not None or source != index,
        keys_of=None if source == index else source,
    )
    steps = sorted(family.steps, key=lambda step: step.place)
    for step in steps:
        if step.place == Place.INPUTS:
            layer = step.apply(layer, tensors, config, model)
    layer = _with_norms(layer, tensors, replace(tensors, prefix=maker), family, config)
    if family.scores.qk_norm is not None and family.scores.qk_norm.within(config, index):
        layer = _with_qk_norm(layer, family.scores.qk_norm, tensors, config)
    for step in steps:
        if step.place > Place.INPUTS:
            layer = step.apply(layer, tensors, config, model)
    unproved = NOT_COMPARED if family.origin.startswith("unproved") else ""
    passed_over = denied_words(denied(model.checkpoint, stem, family, config))
    more = filter(None, (*family.notes, *config.notes, passed_over, unproved))
    return replace(layer, caveats=(*caveats(layer, steps), *more))


def rotation_of(config: ModelConfig, family: Family, index: int) -> Rotation | None:
    """The rotation of a layer's queries and keys, from the config alone, or None."""
    layer_config, row = in_layer(config, family, index)
    return row.rope.rotation(layer_config, index) if row.rope else None


def _with_norms(
    layer: Layer, tensors: LayerTensors, of_maker: LayerTensors, family: Family, config: ModelConfig
) -> Layer:
    """The layer with the norms of its input and memory folded; `of_maker` has the keys' tensors."""
    norm = family.norm_of(layer.index)
    if norm is not None:
        layer = layer.after_norm(_norm(norm, tensors, family, config))
    if layer.keys_of is not None and (norm := family.norm_of(layer.keys_of)) is not None:
        layer = layer.after_memory_norm(_norm(norm, of_maker, family, config))
    if family.memory is not None and family.memory.norm is not None:
        layer = layer.after_memory_norm(family.memory.norm.read(tensors, config, layer.k.shape[1]))
    return layer


def _norm(stored: StoredNorm, tensors: LayerTensors, family: Family, config: ModelConfig) -> Norm:
    """A norm before a layer, as the steps change it."""
    norm = stored.read(tensors, config)
    for step in family.steps:
        norm = step.on_norm(norm, config)
    return norm


def _with_qk_norm(layer: Layer, row: QkNorm, tensors: LayerTensors, config: ModelConfig) -> Layer:
    """The layer with norms of queries and keys, gammas folded; the size of each is left."""
    rotation, eps = layer.rotation, config.norm_eps if row.eps is None else row.eps
    if not row.rotated or rotation is None:
        q, q_norm = _normed(layer.q, row.query, tensors, row, eps)
        k, k_norm = _normed(layer.k, row.key, tensors, row, eps)
        return replace(layer, q=q, k=k, q_norm=q_norm, k_norm=k_norm)
    if rotation.factor != 1 and len(rotation.turning) < layer.head_dim:
        raise config.error(
            "rope_parameters",
            "no factor of cos and sin, since a norm follows a rotation of part of a head",
        )
    # The norm may come before the rotation, which keeps sizes, except for its factor.
    bare = replace(row, query="", key="")
    q, q_norm = _normed(layer.q, "", tensors, bare, eps / rotation.factor**2)
    k, k_norm = _normed(layer.k, "", tensors, bare, eps / rotation.factor**2)
    gamma = np.prod(
        [_gains(tensors, module, row, 1, layer.head_dim)[0] for module in (row.query, row.key)],
        axis=0,
    )
    mean = rotation.over_pairs(gamma)
    if np.any((mean == 0) & (gamma != 0)):
        raise CheckpointError(
            "gammas of its q/k-norm, after rotation, cancel within a pair",
            file=tensors.checkpoint.name,
        )
    gain = np.divide(gamma, mean, out=np.ones_like(gamma), where=mean != 0)
    return replace(
        layer,
        q=q.scaled(mean),
        k=k,
        q_norm=q_norm,
        k_norm=k_norm,
        rotation=replace(rotation, factor=1.0),
        gain=None if np.all(gain == 1) else gain,
    )


def _normed(
    made: Affine | Latent, module: str, tensors: LayerTensors, row: QkNorm, eps: float
) -> tuple[Affine, InnerNorm]:
    """The map to queries or keys with its norm's gamma folded in, and the rest of that norm."""
    if isinstance(made, Latent):
        raise CheckpointError(
            f"'{module}' is a norm of what comes out of a latent, which is not read"
        )
    heads, _, r = made.shape
    gamma, beta = _gains(tensors, module, row, heads, r)
    plain = made.centred(jointly=row.scope == "joint") if row.centred else made
    seen = plain
    if row.scope == "joint":  # one norm over all heads: (1, d, heads r)
        seen = Affine(plain.w.transpose(1, 0, 2).reshape(1, -1, heads * r), plain.b.reshape(1, -1))
    return plain.scaled(gamma), InnerNorm(seen, eps, shift=beta)


def _gains(
    tensors: LayerTensors, module: str, row: QkNorm, heads: int, r: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """gamma and beta (or None) of a q/k-norm, each (heads or 1, r); gamma is 1 without a module."""
    if not module:
        return np.ones((1, r), np.float32), None
    names = [module]
    if row.scope == "listed":
        names = [f"{module}.norms.{head}" for head in range(heads)]
    shape = {"shared": (r,), "own": (heads, r), "listed": (r,), "joint": (heads * r,)}[row.scope]

    def read(part: str) -> np.ndarray:
        stored = [tensors.read(f"{name}.{part}", shape) for name in names]
        return np.concatenate([array.reshape(-1, r) for array in stored])

    return read(row.gain) + np.float32(row.offset), read(row.shift) if row.bias else None


def caveats(layer: Layer, steps: Iterable[Step]) -> tuple[str, ...]:
    """Operations on a layer's scores and values that its heads' matrices leave out, by `Place`."""
    placed = [*_of_cells(layer), *((step.place, step.caveat(layer)) for step in steps)]
    texts = dict.fromkeys(text for _, text in sorted(placed, key=lambda caveat: caveat[0]))
    return tuple(filter(None, texts))


def _of_cells(layer: Layer) -> Iterator[tuple[Place, str]]:
    """Caveats of a row's cells, other than its steps."""
    if layer.cross and layer.keys_of is None:
        text = (
            "eigenvalues and symmetric parts: cross-attention's maps lead from one space to "
            "another, W_QK from queries to the memory and W_VO back"
        )
        yield Place.INPUTS, text
    if layer.k_norm is not None and layer.k_norm.dims is not None:
        text = "the norms of latents: a scalar a token on keys' position-free part and on values"
        yield Place.VECTORS, text
        if layer.q_norm is not None:
            yield Place.VECTORS, "the norm of the query latent: a scalar a token on queries"
    elif layer.q_norm is not None:
        together = layer.q_norm.source.shape[0] < layer.n_heads
        scope = "all heads together" if together else "each head"
        text = f"the q/k-norm: scores are divided by the size of query and key, of {scope};"
        yield Place.VECTORS, f"{text} gamma is folded in"
    if layer.q_norm is not None and layer.q_norm.shift is not None:
        text = "the q/k-norm's beta: terms of one token alone, divided by the other's size only"
        yield Place.VECTORS, text
    if layer.gain is not None:
        text = (
            "gammas of the q/k-norm, which comes after rotation: qk_at has their mean over each "
            "pair of dimensions; what differs within pairs multiplies terms by i + j"
        )
        yield Place.POSITIONS, text
    yield from ((Place.POSITIONS, text) for text in _of_rotation(layer.rotation))
    if layer.additive is not None:
        kind = ADDED[type(layer.additive)]
        yield Place.POSITIONS, f"the {kind} added to scores (layer.position_bias)"
    if layer.gate is not None:  # a step's, or a layout's that reads it with the queries
        yield Place.GATHERED, gate_caveat(layer)


def _of_rotation(rotation: Rotation | None) -> Iterator[str]:
    """Caveats of a rotation: parts that qk_at(delta) leaves out."""
    if rotation is None:
        return
    if rotation.stretched is not None:
        longer = f"slower rotation of sequences over {rotation.longest} positions"
        yield f"{longer}; qk_at holds for shorter ones"
    if isinstance(rotation, GridRotation) and (rotation.prefix or rotation.suffix):
        yield (
            "rotation by row and column: qk_at holds between patches; class and register tokens "
            "do not turn, so that against a patch they see where it is"
        )
    elif isinstance(rotation, GridRotation):
        yield "rotation by row and column: qk_at counts columns, or takes (rows, columns)"
    elif rotation.axes is not None:
        yield (
            "rotation by several axes: "
            "qk_at counts positions of text, or takes a distance on each axis"
        )

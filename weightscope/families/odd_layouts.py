"""Projections that lie in a file as in one family only."""

from dataclasses import replace

import numpy as np

from weightscope.attention.added import Added
from weightscope.attention.layer import Layer
from weightscope.attention.maps import Affine
from weightscope.families.config import ModelConfig
from weightscope.families.family import Family
from weightscope.families.layouts import by_head, linear, output, separate
from weightscope.families.tensors import LayerTensors

CORES = 4  # CodeGen was trained on so many at once


def in_four_blocks(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """CodeGen: one Linear in four blocks, each with the queries, the values and the keys of a fourth of the heads."""
    d, h, r = config.d_model, config.n_heads, config.head_dim
    if h % CORES:
        raise config.error("n_head", f"a multiple of {CORES}: so many blocks hold its heads")
    w, b = linear(tensors, config, family.query, (3 * h * r, d), family.biases.query)
    w, b = np.asarray(w).reshape(CORES, 3, -1, d), b.reshape(CORES, 3, -1)
    q, v, k = (by_head(w[:, i].reshape(h * r, d), b[:, i].reshape(h * r), h) for i in range(3))
    return Layer(q, k, v, *output(tensors, family, config, r))


def keys_with_values(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """Granite Speech: one Linear of queries, and one with all keys, then all values; no biases."""
    d, h, r = config.d_model, config.n_heads, config.head_dim
    q = by_head(*linear(tensors, config, family.query, (h * r, d), False), h)
    w, b = linear(tensors, config, family.key, (2 * h * r, d), False)
    k, v = (by_head(w[of], b[of], h) for of in (slice(0, h * r), slice(h * r, None)))
    return Layer(q, k, v, *output(tensors, family, config, r))


def scaled_by_dimension(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """TimesFM: queries are multiplied by a learned softplus(s) / (ln 2 sqrt(d')) a dimension, which W_Q takes in."""
    d, h, r = config.d_model, config.n_heads, config.head_dim
    gain = np.logaddexp(0, tensors.read("self_attn.scaling", (r,))) / (np.log(2) * r**0.5)
    q = by_head(*linear(tensors, config, family.query, (h * r, d), family.biases.query), h)
    return replace(separate(tensors, family, config), q=q.scaled(gain[None]))


def by_dimension_and_head(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """XLNet: tensors (d, H, r), of queries, keys, values and outputs alike, without biases."""
    d, h, r = config.d_model, config.n_heads, config.head_dim
    q, k, v, o = (tensors.read(f"rel_attn.{name}", (d, h, r)).transpose(1, 0, 2) for name in "qkvo")
    none = np.zeros((h, r), np.float32)
    return Layer(Affine(q, none), Affine(k, none), Affine(v, none), o.transpose(0, 2, 1), np.zeros(d, np.float32))


def grouped_convolutions(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """SqueezeBERT: convolutions over one token, in groups of dimensions: block-diagonal matrices."""
    d, h, r = config.d_model, config.n_heads, config.head_dim
    roles = {"q_groups": family.query, "k_groups": family.key, "v_groups": family.value}
    q, k, v = (by_head(*_convolution(tensors, config, module, key), h) for key, module in roles.items())
    w, b = _convolution(tensors, config, family.output, "post_attention_groups")
    return Layer(q, k, v, w.T.reshape(h, r, d), b)


def _convolution(tensors: LayerTensors, config: ModelConfig, module: str, key: str) -> tuple[np.ndarray, np.ndarray]:
    """The (d, d) matrix, as a Linear stores it, and bias of a grouped convolution over one token."""
    d, groups = config.d_model, config.size(key)
    if d % groups:
        raise config.error(key, f"a divisor of the width {d}")
    wide = d // groups
    blocks = tensors.read(module + ".weight", (d, wide, 1)).reshape(groups, wide, wide)
    w = np.zeros((groups, wide, groups, wide), np.float32)
    w[np.arange(groups), :, np.arange(groups)] = blocks
    return w.reshape(d, d), tensors.read(module + ".bias", (d,))


def loose_biases(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """VideoMAE: biases of queries and values in tensors of their own, none of keys."""
    d, h, r = config.d_model, config.n_heads, config.head_dim
    stem = family.query.rpartition(".")[0]

    def projected(module: str, bias: str) -> Affine:
        w, b = linear(tensors, config, module, (h * r, d), False)
        has = bias and config.get(bias_of)
        return by_head(w, tensors.read(f"{stem}.{bias}", (h * r,)) if has else b, h)

    bias_of = str(family.biases.query)
    q, k, v = projected(family.query, "q_bias"), projected(family.key, ""), projected(family.value, "v_bias")
    return Layer(q, k, v, *output(tensors, family, config, r))


def content_and_positions(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """Conditional DETR: positions have projections of their own, whose outputs are added to those of content."""
    layer = separate(tensors, family, config)
    q, k = (_of_positions(tensors, config, module) for module in (family.query, family.key))
    return _with_biases(layer, q, k, Added(_unbiased(q), _unbiased(k)))


def content_beside_positions(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """Conditional DETR, eq. 3: a head's queries are [content | where it looks], its keys [content | positions].

    Positions meet positions alone. What is added to queries is the embedding of where they look.
    """
    layer, (where, at) = separate(tensors, family, config), _places(tensors, family, config)
    return replace(layer, added=Added(_beside(None, where), _beside(None, at)))


def content_with_and_beside_positions(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """The same in its first layer, where positions are added to content, too.

    What is added to queries is twice as wide: their positions, beside the embedding of where they look.
    """
    layer, (where, at) = separate(tensors, family, config), _places(tensors, family, config)
    own, d = _of_positions(tensors, config, family.query), config.d_model
    above, below = (Affine(np.pad(of.w, ((0, 0), pad, (0, 0))), of.b) for of, pad in ((own, (0, d)), (where, (d, 0))))
    return _with_biases(layer, own, at, Added(_beside(above, below), _beside(at, at)))


def _places(tensors: LayerTensors, family: Family, config: ModelConfig) -> tuple[Affine, Affine]:
    """The maps of where queries look, and of the positions of keys."""
    return _of_positions(tensors, config, family.query, "_sine_proj"), _of_positions(tensors, config, family.key)


def _of_positions(tensors: LayerTensors, config: ModelConfig, content: str, suffix: str = "_proj") -> Affine:
    """The projection of positions that stands beside one of content: `qpos_proj` beside `qcontent_proj`."""
    d, h = config.d_model, config.n_heads
    module = content.replace("content_proj", "pos" + suffix)
    return by_head(*linear(tensors, config, module, (h * config.head_dim, d), True), h)


def _with_biases(layer: Layer, q: Affine, k: Affine, added: Added) -> Layer:
    """The layer with what positions add, whose biases are content's as well."""
    pairs = ((layer.q, q), (layer.k, k))
    queries, keys = (replace(of, bias=of.bias + more.b) for of, more in pairs if isinstance(of, Affine))
    return replace(layer, q=queries, k=keys, added=added)


def _unbiased(of: Affine) -> Affine:
    return replace(of, bias=np.zeros_like(of.bias))


def _beside(content: Affine | None, places: Affine) -> Affine:
    """A map to [what positions add to content | places], the bias of the former left out: content has it."""
    first = np.zeros_like(places.w) if content is None else content.w
    return Affine(np.concatenate((first, places.w), axis=-1), np.hstack((np.zeros_like(places.b), places.b)))

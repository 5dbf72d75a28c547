"""The layout of heads in a file's projections: from tensors to a layer."""

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from weightscope.core.compute.half import Weights
from weightscope.model.config.config import ModelConfig, OneOf
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.maps import Affine, InnerNorm, Latent
from weightscope.model.layers.positions import Added
from weightscope.model.rows.cells import LayerTensors
from weightscope.model.rows.family import Family

# Layouts of projections in a file, one function each, which gives a layer its maps, split by head.
#
# A Linear stores its weight [out, in]; here every map is in row-vector form, (heads, d, r).


def conv1d_fused(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """GPT-2's Conv1D, stored [in, out]: one (d, 3d) tensor with columns [Q | K | V]."""
    d, h, r = config.d_model, config.n_heads, config.head_dim
    fused = (
        tensors.weights(family.heads.q + ".weight", (d, 3 * h * r))
        .reshape(d, 3, h, r)
        .transpose(1, 2, 0, 3)
    )
    bias = tensors.read(family.heads.q + ".bias", (3 * h * r,)).reshape(3, h, r)
    w_o = tensors.weights(family.heads.out + ".weight", (h * r, d)).reshape(h, r, d)
    b_o = tensors.read(family.heads.out + ".bias", (d,))
    q, k, v = (Affine(fused[i], bias[i]) for i in range(3))
    return Layer(q, k, v, w_o, b_o)


def conv1d_crossing(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """GPT-2's cross-attention: a Conv1D of queries, and one whose columns are [K | V]."""
    d, h, r = config.d_model, config.n_heads, config.head_dim
    w_q = (
        tensors.weights(family.heads.q + ".weight", (d, h * r)).reshape(d, h, r).transpose(1, 0, 2)
    )
    b_q = tensors.read(family.heads.q + ".bias", (h * r,)).reshape(h, r)
    fused = (
        tensors.weights(family.heads.k + ".weight", (d, 2 * h * r))
        .reshape(d, 2, h, r)
        .transpose(1, 2, 0, 3)
    )
    bias = tensors.read(family.heads.k + ".bias", (2 * h * r,)).reshape(2, h, r)
    w_o = tensors.weights(family.heads.out + ".weight", (h * r, d)).reshape(h, r, d)
    b_o = tensors.read(family.heads.out + ".bias", (d,))
    return Layer(Affine(w_q, b_q), Affine(fused[0], bias[0]), Affine(fused[1], bias[1]), w_o, b_o)


def separate(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """One Linear each, a head's rows together; values may differ in width from queries.

    In cross-attention the keys' tensor says how wide the memory is.
    """
    d, h, g, r = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
    r_v, has = sum(map(config.size, family.heads.value_dim)) or r, family.heads.bias
    q = by_head(*linear(tensors, config, family.heads.q, (h * r, d), has.q), h)
    k = by_head(
        *linear(tensors, config, family.heads.k, (g * r, None if family.memory else d), has.k), g
    )
    v = by_head(*linear(tensors, config, family.heads.v, (g * r_v, k.shape[1]), has.v), g)
    return Layer(q, k, v, *output(tensors, family, config, r_v))


def stacked(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """One Linear with rows [Q (H d') | K (G d') | V (G d')]."""
    d, h, g, r = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
    w, b = linear(tensors, config, family.heads.q, ((h + 2 * g) * r, d), family.heads.bias.q)
    rows = slice(0, h * r), slice(h * r, (h + g) * r), slice((h + g) * r, None)
    q, k, v = (
        by_head(w[part], b[part], heads) for part, heads in zip(rows, (h, g, g), strict=True)
    )
    return Layer(q, k, v, *output(tensors, family, config, r))


ORDERS = ("kqv", "kvq", "qvk", "vkq", "vqk")  # orders within one Linear, besides the usual


@dataclass(frozen=True)
class StackedAs:
    """One Linear of all queries, keys and values in another order, given by their letters."""

    order: Annotated[str, OneOf(*ORDERS)]
    __name__ = "stacked_as"  # like a function's

    def __call__(self, tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
        d, h, g, r = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
        w, b = linear(tensors, config, family.heads.q, ((h + 2 * g) * r, d), family.heads.bias.q)
        heads, maps, start = {"q": h, "k": g, "v": g}, {}, 0
        for letter in self.order:
            stop = start + heads[letter] * r
            maps[letter] = by_head(w[start:stop], b[start:stop], heads[letter])
            start = stop
        return Layer(maps["q"], maps["k"], maps["v"], *output(tensors, family, config, r))


def packed(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """torch's own attention: rows [Q | K | V] of a tensor `..._weight`, its bias `..._bias`."""
    d, h, r = config.d_model, config.n_heads, config.head_dim
    w = tensors.weights(family.heads.q + "_weight", (3 * h * r, d)).reshape(3, h * r, d)
    b = tensors.read(family.heads.q + "_bias", (3 * h * r,)).reshape(3, h * r)
    q, k, v = (by_head(w[i], b[i], h) for i in range(3))
    return Layer(q, k, v, *output(tensors, family, config, r))


def grouped(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """One Linear, the rows of a key-value group together: its queries, its key, its value.

    With a group a head these are GPT-NeoX's and BLOOM's (H, 3, d') rows, with one group in all
    Falcon-7B's.
    """
    return Layer(
        *_groups(tensors, family, config), *output(tensors, family, config, config.head_dim)
    )


def grouped_with_loose_biases(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """DeBERTa: `grouped`, with biases of queries and values in their own tensors, none of keys."""
    h, r = config.n_heads, config.head_dim
    q, k, v = _groups(tensors, family, config)
    stem = family.heads.q.rpartition(".")[0]
    b_q, b_v = (tensors.read(f"{stem}.{name}_bias", (h * r,)).reshape(h, r) for name in ("q", "v"))
    return Layer(replace(q, bias=b_q), k, replace(v, bias=b_v), *output(tensors, family, config, r))


def _groups(
    tensors: LayerTensors, family: Family, config: ModelConfig
) -> tuple[Affine, Affine, Affine]:
    d, h, g, r = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
    w, b = linear(tensors, config, family.heads.q, ((h + 2 * g) * r, d), family.heads.bias.q)
    w, b = w.reshape(g, h // g + 2, r, d), b.reshape(g, h // g + 2, r)
    q = by_head(w[:, :-2].reshape(h * r, d), b[:, :-2].reshape(h * r), h)
    k, v = (Affine(w[:, i].transpose(0, 2, 1), b[:, i]) for i in (-2, -1))
    return q, k, v


def gated(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """Qwen3-Next: a head's rows of q_proj are its query, then a gate of its output."""
    d, h, g, r = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
    has = family.heads.bias
    w, b = linear(tensors, config, family.heads.q, (h * 2 * r, d), has.q)
    w, b = w.reshape(h, 2, r, d).transpose(1, 0, 3, 2), b.reshape(h, 2, r).transpose(1, 0, 2)
    k = by_head(*linear(tensors, config, family.heads.k, (g * r, d), has.k), g)
    v = by_head(*linear(tensors, config, family.heads.v, (g * r, d), has.v), g)
    return Layer(
        Affine(w[0], b[0]), k, v, *output(tensors, family, config, r), gate=Affine(w[1], b[1])
    )


def latent(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """DeepSeek's multi-head latent attention, whose norms always have an epsilon of 1e-6."""
    return _latent(tensors, family, config, 1e-6)


def latent_with_eps(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """Multi-head latent attention with the config's epsilon."""
    return _latent(tensors, family, config, config.norm_eps)


def latent_scaled(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """LongCat: `latent`, with the output of a latent of rank m multiplied by sqrt(d / m)."""
    return _latent(tensors, family, config, 1e-6, scaled=True)


def _latent(
    tensors: LayerTensors, family: Family, config: ModelConfig, eps: float, *, scaled: bool = False
) -> Layer:
    """Low-rank projections with an RMSNorm in the middle.

    A head's queries and keys are [position-free | rotary]; all heads share one rotary key, which
    bypasses the latent. The norms' gammas go into the maps after them, which leaves one scalar per
    token for each latent; the key's scalar affects only the position-free part and the values.
    """
    d, h, r = config.d_model, config.n_heads, config.head_dim
    widths = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    free, rotary, r_v = map(config.count, widths)
    m = config.size("kv_lora_rank")
    biased, stem = family.heads.bias.q, family.heads.k.rpartition(".")[0]
    from_kv, from_q_latent = 1.0, 1.0  # factors of the latents' outputs
    if scaled:
        from_kv, from_q_latent = (d / m) ** 0.5, (d / (config.get("q_lora_rank") or 1)) ** 0.5

    w, b = linear(tensors, config, f"{stem}.kv_a_proj_with_mqa", (m + rotary, d), biased)
    down = Affine(w.T[None], b[None])  # to the latent and the shared rotary key
    kv_latent = Affine(w[:m].T[None], b[None, :m])
    gamma = np.float32(from_kv) * tensors.read(f"{stem}.kv_a_layernorm.weight", (m,))
    up = tensors.read(f"{stem}.kv_b_proj.weight", (h * (free + r_v), m)).reshape(h, free + r_v, m)
    up = (up * gamma).transpose(0, 2, 1)  # (H, m, free + r_v)
    up_k = np.zeros((h, m + rotary, free + rotary), np.float32)
    up_k[:, :m, :free], up_k[:, m:, free:] = up[..., :free], np.eye(rotary)
    k = Latent(down, Affine(up_k, np.zeros((h, free + rotary), np.float32)))
    v = Latent(kv_latent, Affine(up[..., free:], np.zeros((h, r_v), np.float32)))

    q: Affine | Latent
    q_norm = None
    if config.get("q_lora_rank") is None:
        q = by_head(*linear(tensors, config, f"{stem}.q_proj", (h * r, d), False), h)
    else:
        m_q = config.size("q_lora_rank")
        w, b = linear(tensors, config, f"{stem}.q_a_proj", (m_q, d), biased)
        gamma = np.float32(from_q_latent) * tensors.read(f"{stem}.q_a_layernorm.weight", (m_q,))
        from_q = by_head(*linear(tensors, config, f"{stem}.q_b_proj", (h * r, m_q), False), h)
        q_latent = Affine(w.T[None], b[None])
        q = Latent(q_latent, Affine(gamma[:, None] * from_q.w, from_q.b))
        q_norm = InnerNorm(q_latent, eps)

    return Layer(
        q,
        k,
        v,
        *output(tensors, family, config, r_v),
        q_norm=q_norm,
        k_norm=InnerNorm(kv_latent, eps, dims=free),
        v_norm=InnerNorm(kv_latent, eps),
    )


def linear(
    tensors: LayerTensors,
    config: ModelConfig,
    module: str,
    shape: tuple[int, int | None],
    bias: bool | str,
) -> tuple[Weights, np.ndarray]:
    """A Linear's weight, [out, in] as stored, and its bias, zeros where it has none."""
    w = tensors.weights(module + ".weight", shape)
    if config.get(bias) if isinstance(bias, str) else bias:
        return w, tensors.read(module + ".bias", shape[:1])
    return w, np.zeros(shape[0], np.float32)


def by_head(w: Weights, b: np.ndarray, heads: int) -> Affine:
    """Rows (heads r, d), a head's together, and biases (heads r,) as a map (heads, d, r)."""
    return Affine(w.reshape(heads, -1, w.shape[1]).transpose(0, 2, 1), b.reshape(heads, -1))


def output(
    tensors: LayerTensors, family: Family, config: ModelConfig, r: int
) -> tuple[Weights, np.ndarray]:
    """W_O as (H, r, d) and its bias."""
    d, h = config.d_model, config.n_heads
    w, b = linear(tensors, config, family.heads.out, (d, h * r), family.heads.bias.out)
    return w.T.reshape(h, r, d), b


# Projections that lie in a file as in one family only.

CORES = 4  # CodeGen was trained on this many at once


def in_four_blocks(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """CodeGen: one Linear in four blocks, each with q, v and k of a fourth of the heads."""
    d, h, r = config.d_model, config.n_heads, config.head_dim
    if h % CORES:
        raise config.error("n_head", f"a multiple of {CORES}: its heads are in this many blocks")
    w, b = linear(tensors, config, family.heads.q, (3 * h * r, d), family.heads.bias.q)
    w, b = np.asarray(w).reshape(CORES, 3, -1, d), b.reshape(CORES, 3, -1)
    q, v, k = (by_head(w[:, i].reshape(h * r, d), b[:, i].reshape(h * r), h) for i in range(3))
    return Layer(q, k, v, *output(tensors, family, config, r))


def keys_with_values(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """Granite Speech: one Linear of queries, and one with all keys, then all values."""
    d, h, g, r = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
    q = by_head(*linear(tensors, config, family.heads.q, (h * r, d), family.heads.bias.q), h)
    w, b = linear(tensors, config, family.heads.k, (2 * g * r, d), family.heads.bias.k)
    k, v = (by_head(w[part], b[part], g) for part in (slice(0, g * r), slice(g * r, None)))
    return Layer(q, k, v, *output(tensors, family, config, r))


def keys_beside_values(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """One Linear of queries, and one with the keys and values of each head in turn."""
    d, h, g, r = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
    q = by_head(*linear(tensors, config, family.heads.q, (h * r, d), family.heads.bias.q), h)
    w, b = linear(tensors, config, family.heads.k, (2 * g * r, d), family.heads.bias.k)
    w, b = w.reshape(g, 2, r, d).transpose(1, 0, 3, 2), b.reshape(g, 2, r).transpose(1, 0, 2)
    return Layer(q, Affine(w[0], b[0]), Affine(w[1], b[1]), *output(tensors, family, config, r))


def scaled_by_dimension(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """TimesFM: a learned factor softplus(s) / (ln 2 sqrt(d')) per query dimension, in W_Q."""
    d, h, r = config.d_model, config.n_heads, config.head_dim
    gain = np.logaddexp(0, tensors.read("self_attn.scaling", (r,))) / (np.log(2) * r**0.5)
    q = by_head(*linear(tensors, config, family.heads.q, (h * r, d), family.heads.bias.q), h)
    return replace(separate(tensors, family, config), q=q.scaled(gain[None]))


def by_dimension_and_head(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """XLNet: tensors (d, H, r), of queries, keys, values and outputs alike, without biases."""
    d, h, r = config.d_model, config.n_heads, config.head_dim
    by_name = [tensors.read(f"rel_attn.{name}", (d, h, r)).transpose(1, 0, 2) for name in "qkvo"]
    q, k, v = (Affine(w, np.zeros((h, r), np.float32)) for w in by_name[:3])
    return Layer(q, k, v, by_name[3].transpose(0, 2, 1), np.zeros(d, np.float32))


def grouped_convolutions(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """SqueezeBERT: grouped convolutions over one token, which are block-diagonal matrices."""
    d, h, r = config.d_model, config.n_heads, config.head_dim
    roles = {"q_groups": family.heads.q, "k_groups": family.heads.k, "v_groups": family.heads.v}
    q, k, v = (
        by_head(*_convolution(tensors, config, module, key), h) for key, module in roles.items()
    )
    w, b = _convolution(tensors, config, family.heads.out, "post_attention_groups")
    return Layer(q, k, v, w.T.reshape(h, r, d), b)


def _convolution(
    tensors: LayerTensors, config: ModelConfig, module: str, key: str
) -> tuple[np.ndarray, np.ndarray]:
    """The (d, d) matrix, as a Linear stores it, and bias of a grouped convolution."""
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
    stem = family.heads.q.rpartition(".")[0]

    def projected(module: str, bias: str) -> Affine:
        w, b = linear(tensors, config, module, (h * r, d), False)
        has = bias and config.get(bias_of)
        return by_head(w, tensors.read(f"{stem}.{bias}", (h * r,)) if has else b, h)

    bias_of = str(family.heads.bias.q)
    q = projected(family.heads.q, "q_bias")
    k, v = projected(family.heads.k, ""), projected(family.heads.v, "v_bias")
    return Layer(q, k, v, *output(tensors, family, config, r))


def content_and_positions(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """Conditional DETR: positions have their own projections, added to the projected content."""
    layer = separate(tensors, family, config)
    q, k = (_of_positions(tensors, config, module) for module in (family.heads.q, family.heads.k))
    return _with_biases(layer, q, k, Added(_unbiased(q), _unbiased(k)))


def content_beside_positions(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """Conditional DETR, eq. 3: queries are [content | where they look], keys [content | positions].

    Positions meet positions alone. Queries are given the embedding of where they look.
    """
    layer, (where, places) = separate(tensors, family, config), _places(tensors, family, config)
    return replace(layer, added=Added(_beside(None, where), _beside(None, places)))


def content_with_and_beside_positions(
    tensors: LayerTensors, family: Family, config: ModelConfig
) -> Layer:
    """Conditional DETR's first layer, where positions are added to content, too.

    Queries are given twice as much: their positions, and the embedding of where they look.
    """
    layer, (where, places) = separate(tensors, family, config), _places(tensors, family, config)
    in_heads, d = _of_positions(tensors, config, family.heads.q), config.d_model
    above, below = (
        Affine(np.pad(affine.w, ((0, 0), pad, (0, 0))), affine.b)
        for affine, pad in ((in_heads, (0, d)), (where, (d, 0)))
    )
    return _with_biases(
        layer, in_heads, places, Added(_beside(above, below), _beside(places, places))
    )


def _places(tensors: LayerTensors, family: Family, config: ModelConfig) -> tuple[Affine, Affine]:
    """The maps of where queries look, and of the positions of keys."""
    where = _of_positions(tensors, config, family.heads.q, "_sine_proj")
    return where, _of_positions(tensors, config, family.heads.k)


def _of_positions(
    tensors: LayerTensors, config: ModelConfig, content: str, suffix: str = "_proj"
) -> Affine:
    """The projection of positions for one of content: `qpos_proj` for `qcontent_proj`."""
    d, h = config.d_model, config.n_heads
    module = content.replace("content_proj", "pos" + suffix)
    return by_head(*linear(tensors, config, module, (h * config.head_dim, d), True), h)


def _with_biases(layer: Layer, q: Affine, k: Affine, added: Added) -> Layer:
    """The layer with positions added; their biases join content's."""
    pairs = ((layer.q, q), (layer.k, k))
    queries, keys = (
        replace(projection, bias=projection.bias + more.b)
        for projection, more in pairs
        if isinstance(projection, Affine)
    )
    return replace(layer, q=queries, k=keys, added=added)


def _unbiased(projection: Affine) -> Affine:
    return replace(projection, bias=np.zeros_like(projection.bias))


def _beside(content: Affine | None, places: Affine) -> Affine:
    """A map to [addition to content | places], without the former's bias, which content has."""
    first = np.zeros_like(places.w) if content is None else content.w
    bias = np.hstack((np.zeros_like(places.b), places.b))
    return Affine(np.concatenate((first, places.w), axis=-1), bias)

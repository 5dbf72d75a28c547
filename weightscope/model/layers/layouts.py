"""The layout of heads in a file's projections: from tensors to a layer."""

from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

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


class StoredHeads(NamedTuple):
    """The projections of a layer as a file has them, with their row and the model's sizes."""

    tensors: LayerTensors
    family: Family
    config: ModelConfig

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The width d, the numbers H and G of query and key-value heads, a head's width r."""
        config = self.config
        return config.d_model, config.n_heads, config.n_kv_heads, config.head_dim

    def linear(self, role: str, rows: int, *columns: int | None) -> tuple[Weights, np.ndarray]:
        """A projection's weight, [out, in] as stored, and bias; it has d columns if not said."""
        shape = rows, columns[0] if columns else self.config.d_model
        module, bias = getattr(self.family.heads, role), getattr(self.family.heads.bias, role)
        return linear(self.tensors, self.config, module, shape, bias)

    def by_head(self, role: str, heads: int, r: int, *columns: int | None) -> Affine:
        """A projection whose rows are head after head, each of width r."""
        return by_head(*self.linear(role, heads * r, *columns), heads)

    def output(self, r: int) -> tuple[Weights, np.ndarray]:
        """W_O as (H, r, d) and its bias."""
        d, h, _, _ = self.sizes
        w, b = self.linear("out", d, h * r)
        return w.T.reshape(h, r, d), b

    def conv1d(self, module: str, parts: int) -> list[Affine]:
        """A Conv1D stored [in, out], with the columns of several maps one after another."""
        d, h, _, r = self.sizes
        w = self.tensors.weights(module + ".weight", (d, parts * h * r))
        b = self.tensors.read(module + ".bias", (parts * h * r,)).reshape(parts, h, r)
        w = w.reshape(d, parts, h, r).transpose(1, 2, 0, 3)
        return [Affine(w[i], b[i]) for i in range(parts)]

    def conv1d_output(self) -> tuple[Weights, np.ndarray]:
        """W_O and its bias of a Conv1D."""
        (d, h, _, r), module = self.sizes, self.family.heads.out
        w = self.tensors.weights(module + ".weight", (h * r, d)).reshape(h, r, d)
        return w, self.tensors.read(module + ".bias", (d,))


def conv1d_fused(stored: StoredHeads) -> Layer:
    """GPT-2's Conv1D, stored [in, out]: one (d, 3d) tensor with columns [Q | K | V]."""
    q, k, v = stored.conv1d(stored.family.heads.q, 3)
    return Layer(q, k, v, *stored.conv1d_output())


def conv1d_crossing(stored: StoredHeads) -> Layer:
    """GPT-2's cross-attention: a Conv1D of queries, and one whose columns are [K | V]."""
    heads = stored.family.heads
    (q,), (k, v) = stored.conv1d(heads.q, 1), stored.conv1d(heads.k, 2)
    return Layer(q, k, v, *stored.conv1d_output())


def separate(stored: StoredHeads) -> Layer:
    """One Linear each, a head's rows together; values may differ in width from queries.

    In cross-attention the keys' tensor says how wide the memory is.
    """
    (d, h, g, r), family = stored.sizes, stored.family
    r_v = sum(map(stored.config.size, family.heads.value_dim)) or r
    q = stored.by_head("q", h, r)
    k = stored.by_head("k", g, r, None if family.memory else d)
    v = stored.by_head("v", g, r_v, k.shape[1])
    return Layer(q, k, v, *stored.output(r_v))


def stacked(stored: StoredHeads) -> Layer:
    """One Linear with rows [Q (H d') | K (G d') | V (G d')]."""
    _, h, g, r = stored.sizes
    w, b = stored.linear("q", (h + 2 * g) * r)
    rows = slice(0, h * r), slice(h * r, (h + g) * r), slice((h + g) * r, None)
    q, k, v = (
        by_head(w[part], b[part], heads) for part, heads in zip(rows, (h, g, g), strict=True)
    )
    return Layer(q, k, v, *stored.output(r))


ORDERS = ("kqv", "kvq", "qvk", "vkq", "vqk")  # orders within one Linear, besides the usual


@dataclass(frozen=True)
class StackedAs:
    """One Linear of all queries, keys and values in another order, given by their letters."""

    order: Annotated[str, OneOf(*ORDERS)]
    __name__ = "stacked_as"  # like a function's

    def __call__(self, stored: StoredHeads) -> Layer:
        _, h, g, r = stored.sizes
        w, b = stored.linear("q", (h + 2 * g) * r)
        heads, maps, start = {"q": h, "k": g, "v": g}, {}, 0
        for letter in self.order:
            stop = start + heads[letter] * r
            maps[letter] = by_head(w[start:stop], b[start:stop], heads[letter])
            start = stop
        return Layer(maps["q"], maps["k"], maps["v"], *stored.output(r))


def packed(stored: StoredHeads) -> Layer:
    """torch's own attention: rows [Q | K | V] of a tensor `..._weight`, its bias `..._bias`."""
    (d, h, _, r), tensors, module = stored.sizes, stored.tensors, stored.family.heads.q
    w = tensors.weights(module + "_weight", (3 * h * r, d)).reshape(3, h * r, d)
    b = tensors.read(module + "_bias", (3 * h * r,)).reshape(3, h * r)
    q, k, v = (by_head(w[i], b[i], h) for i in range(3))
    return Layer(q, k, v, *stored.output(r))


def grouped(stored: StoredHeads) -> Layer:
    """One Linear, the rows of a key-value group together: its queries, its key, its value.

    With a group a head these are GPT-NeoX's and BLOOM's (H, 3, d') rows, with one group in all
    Falcon-7B's.
    """
    return Layer(*_groups(stored), *stored.output(stored.config.head_dim))


def grouped_with_loose_biases(stored: StoredHeads) -> Layer:
    """DeBERTa: `grouped`, with biases of queries and values in their own tensors, none of keys."""
    _, h, _, r = stored.sizes
    q, k, v = _groups(stored)
    stem = stored.family.heads.q.rpartition(".")[0]
    names = (f"{stem}.{part}_bias" for part in ("q", "v"))
    b_q, b_v = (stored.tensors.read(name, (h * r,)).reshape(h, r) for name in names)
    return Layer(replace(q, bias=b_q), k, replace(v, bias=b_v), *stored.output(r))


def _groups(stored: StoredHeads) -> tuple[Affine, Affine, Affine]:
    d, h, g, r = stored.sizes
    w, b = stored.linear("q", (h + 2 * g) * r)
    w, b = w.reshape(g, h // g + 2, r, d), b.reshape(g, h // g + 2, r)
    q = by_head(w[:, :-2].reshape(h * r, d), b[:, :-2].reshape(h * r), h)
    k, v = (Affine(w[:, i].transpose(0, 2, 1), b[:, i]) for i in (-2, -1))
    return q, k, v


def gated(stored: StoredHeads) -> Layer:
    """Qwen3-Next: a head's rows of q_proj are its query, then a gate of its output."""
    d, h, g, r = stored.sizes
    w, b = stored.linear("q", h * 2 * r)
    w, b = w.reshape(h, 2, r, d).transpose(1, 0, 3, 2), b.reshape(h, 2, r).transpose(1, 0, 2)
    k, v = (stored.by_head(role, g, r) for role in ("k", "v"))
    return Layer(Affine(w[0], b[0]), k, v, *stored.output(r), gate=Affine(w[1], b[1]))


def latent(stored: StoredHeads) -> Layer:
    """DeepSeek's multi-head latent attention, whose norms always have an epsilon of 1e-6."""
    return _latent(stored, 1e-6)


def latent_with_eps(stored: StoredHeads) -> Layer:
    """Multi-head latent attention with the config's epsilon."""
    return _latent(stored, stored.config.norm_eps)


def latent_scaled(stored: StoredHeads) -> Layer:
    """LongCat: `latent`, with the output of a latent of rank m multiplied by sqrt(d / m)."""
    return _latent(stored, 1e-6, scaled=True)


def _latent(stored: StoredHeads, eps: float, *, scaled: bool = False) -> Layer:
    """Low-rank projections with an RMSNorm in the middle.

    A head's queries and keys are [position-free | rotary]; all heads share one rotary key, which
    bypasses the latent. The norms' gammas go into the maps after them, which leaves one scalar per
    token for each latent; the key's scalar affects only the position-free part and the values.
    """
    (d, h, _, r), (tensors, family, config) = stored.sizes, stored
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
        *stored.output(r_v),
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


# Projections that lie in a file as in one family only.

CORES = 4  # CodeGen was trained on this many at once


def in_four_blocks(stored: StoredHeads) -> Layer:
    """CodeGen: one Linear in four blocks, each with a fourth of the rows of q, v and k."""
    d, h, _, r = stored.sizes
    if h * r % CORES:
        raise stored.config.error("n_embd", f"a multiple of {CORES}: heads are in this many blocks")
    w, b = stored.linear("q", 3 * h * r)
    w, b = np.asarray(w).reshape(CORES, 3, -1, d), b.reshape(CORES, 3, -1)
    q, v, k = (by_head(w[:, i].reshape(h * r, d), b[:, i].reshape(h * r), h) for i in range(3))
    return Layer(q, k, v, *stored.output(r))


def keys_with_values(stored: StoredHeads) -> Layer:
    """Granite Speech: one Linear of queries, and one with all keys, then all values."""
    _, h, g, r = stored.sizes
    q = stored.by_head("q", h, r)
    w, b = stored.linear("k", 2 * g * r)
    k, v = (by_head(w[part], b[part], g) for part in (slice(0, g * r), slice(g * r, None)))
    return Layer(q, k, v, *stored.output(r))


def keys_beside_values(stored: StoredHeads) -> Layer:
    """One Linear of queries, and one with the keys and values of each head in turn."""
    d, h, g, r = stored.sizes
    q = stored.by_head("q", h, r)
    w, b = stored.linear("k", 2 * g * r)
    w, b = w.reshape(g, 2, r, d).transpose(1, 0, 3, 2), b.reshape(g, 2, r).transpose(1, 0, 2)
    return Layer(q, Affine(w[0], b[0]), Affine(w[1], b[1]), *stored.output(r))


def scaled_by_dimension(stored: StoredHeads) -> Layer:
    """TimesFM: a learned factor softplus(s) / (ln 2 sqrt(d')) per query dimension, in W_Q."""
    _, h, _, r = stored.sizes
    gain = np.logaddexp(0, stored.tensors.read("self_attn.scaling", (r,))) / (np.log(2) * r**0.5)
    q = stored.by_head("q", h, r)
    return replace(separate(stored), q=q.scaled(gain[None]))


def by_dimension_and_head(stored: StoredHeads) -> Layer:
    """XLNet: tensors (d, H, r), of queries, keys, values and outputs alike, without biases."""
    d, h, _, r = stored.sizes
    names = (f"rel_attn.{part}" for part in "qkvo")
    by_name = [stored.tensors.read(name, (d, h, r)).transpose(1, 0, 2) for name in names]
    q, k, v = (Affine(w, np.zeros((h, r), np.float32)) for w in by_name[:3])
    return Layer(q, k, v, by_name[3].transpose(0, 2, 1), np.zeros(d, np.float32))


def grouped_convolutions(stored: StoredHeads) -> Layer:
    """SqueezeBERT: grouped convolutions over one token, which are block-diagonal matrices."""
    d, h, _, r = stored.sizes
    q, k, v = (by_head(*_convolution(stored, role, f"{role}_groups"), h) for role in "qkv")
    w, b = _convolution(stored, "out", "post_attention_groups")
    return Layer(q, k, v, w.T.reshape(h, r, d), b)


def _convolution(stored: StoredHeads, role: str, key: str) -> tuple[np.ndarray, np.ndarray]:
    """The (d, d) matrix, as a Linear stores it, and bias of a grouped convolution."""
    tensors, family, config = stored
    d, groups, module = config.d_model, config.size(key), getattr(family.heads, role)
    if d % groups:
        raise config.error(key, f"a divisor of the width {d}")
    wide = d // groups
    blocks = tensors.read(module + ".weight", (d, wide, 1)).reshape(groups, wide, wide)
    w = np.zeros((groups, wide, groups, wide), np.float32)
    w[np.arange(groups), :, np.arange(groups)] = blocks
    return w.reshape(d, d), tensors.read(module + ".bias", (d,))


def loose_biases(stored: StoredHeads) -> Layer:
    """VideoMAE: biases of queries and values in tensors of their own, none of keys."""
    (d, h, _, r), (tensors, family, config) = stored.sizes, stored
    stem = family.heads.q.rpartition(".")[0]

    def projected(module: str, bias: str) -> Affine:
        w, b = linear(tensors, config, module, (h * r, d), False)
        has = bias and config.get(bias_of)
        return by_head(w, tensors.read(f"{stem}.{bias}", (h * r,)) if has else b, h)

    bias_of = str(family.heads.bias.q)
    q = projected(family.heads.q, "q_bias")
    k, v = projected(family.heads.k, ""), projected(family.heads.v, "v_bias")
    return Layer(q, k, v, *stored.output(r))


def content_and_positions(stored: StoredHeads) -> Layer:
    """Conditional DETR: positions have their own projections, added to the projected content."""
    layer = separate(stored)
    q, k = (_of_positions(stored, role) for role in ("q", "k"))
    return _with_biases(layer, q, k, Added(_unbiased(q), _unbiased(k)))


def content_beside_positions(stored: StoredHeads) -> Layer:
    """Conditional DETR, eq. 3: queries are [content | where they look], keys [content | positions].

    Positions meet positions alone. Queries are given the embedding of where they look.
    """
    layer, (where, places) = separate(stored), _places(stored)
    return replace(layer, added=Added(_beside(None, where), _beside(None, places)))


def content_with_and_beside_positions(stored: StoredHeads) -> Layer:
    """Conditional DETR's first layer, where positions are added to content, too.

    Queries are given twice as much: their positions, and the embedding of where they look.
    """
    layer, (where, places) = separate(stored), _places(stored)
    in_heads, d = _of_positions(stored, "q"), stored.config.d_model
    above, below = (
        Affine(np.pad(affine.w, ((0, 0), pad, (0, 0))), affine.b)
        for affine, pad in ((in_heads, (0, d)), (where, (d, 0)))
    )
    return _with_biases(
        layer, in_heads, places, Added(_beside(above, below), _beside(places, places))
    )


def _places(stored: StoredHeads) -> tuple[Affine, Affine]:
    """The maps of where queries look, and of the positions of keys."""
    return _of_positions(stored, "q", "_sine_proj"), _of_positions(stored, "k")


def _of_positions(stored: StoredHeads, role: str, suffix: str = "_proj") -> Affine:
    """The projection of positions for one of content: `qpos_proj` for `qcontent_proj`."""
    (d, h, _, r), (tensors, family, config) = stored.sizes, stored
    module = getattr(family.heads, role).replace("content_proj", "pos" + suffix)
    return by_head(*linear(tensors, config, module, (h * r, d), True), h)


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

"""How projections lie in a file: one function a layout, each giving a layer its maps, split by head.

A Linear stores its weight [out, in]; here every map is in row-vector form, (heads, d, r).
"""

from dataclasses import replace

import numpy as np

from weightscope.attention.layer import Layer
from weightscope.attention.maps import Affine, InnerNorm, Latent
from weightscope.families.config import ModelConfig
from weightscope.families.family import Family
from weightscope.families.tensors import LayerTensors
from weightscope.half import Weights


def conv1d_fused(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """GPT-2's Conv1D, stored [in, out]: the columns of one (d, 3d) tensor are [Q | K | V], each (H, d')."""
    d, h, r = config.d_model, config.n_heads, config.head_dim
    fused = tensors.weights(family.query + ".weight", (d, 3 * h * r)).reshape(d, 3, h, r).transpose(1, 2, 0, 3)
    bias = tensors.read(family.query + ".bias", (3 * h * r,)).reshape(3, h, r)
    w_o = tensors.weights(family.output + ".weight", (h * r, d)).reshape(h, r, d)
    b_o = tensors.read(family.output + ".bias", (d,))
    q, k, v = (Affine(fused[i], bias[i]) for i in range(3))
    return Layer(q, k, v, w_o, b_o)


def conv1d_crossing(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """GPT-2's cross-attention: queries of a Conv1D of their own, the columns of another are [K | V]."""
    d, h, r = config.d_model, config.n_heads, config.head_dim
    w_q = tensors.weights(family.query + ".weight", (d, h * r)).reshape(d, h, r).transpose(1, 0, 2)
    b_q = tensors.read(family.query + ".bias", (h * r,)).reshape(h, r)
    fused = tensors.weights(family.key + ".weight", (d, 2 * h * r)).reshape(d, 2, h, r).transpose(1, 2, 0, 3)
    bias = tensors.read(family.key + ".bias", (2 * h * r,)).reshape(2, h, r)
    w_o = tensors.weights(family.output + ".weight", (h * r, d)).reshape(h, r, d)
    b_o = tensors.read(family.output + ".bias", (d,))
    return Layer(Affine(w_q, b_q), Affine(fused[0], bias[0]), Affine(fused[1], bias[1]), w_o, b_o)


def separate(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """One Linear each, the rows of a head together; values may have another width than queries and keys.

    In cross-attention the keys' tensor says how wide the memory is.
    """
    d, h, g, r = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
    r_v, has = sum(map(config.size, family.value_dim)) or r, family.biases
    q = by_head(*linear(tensors, config, family.query, (h * r, d), has.query), h)
    k = by_head(*linear(tensors, config, family.key, (g * r, None if family.memory else d), has.key), g)
    v = by_head(*linear(tensors, config, family.value, (g * r_v, k.shape[1]), has.value), g)
    return Layer(q, k, v, *output(tensors, family, config, r_v))


def stacked(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """One Linear with rows [Q (H d') | K (G d') | V (G d')]."""
    d, h, g, r = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
    w, b = linear(tensors, config, family.query, ((h + 2 * g) * r, d), family.biases.query)
    rows = slice(0, h * r), slice(h * r, (h + g) * r), slice((h + g) * r, None)
    q, k, v = (by_head(w[of], b[of], heads) for of, heads in zip(rows, (h, g, g), strict=True))
    return Layer(q, k, v, *output(tensors, family, config, r))


def packed(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """torch's own attention: rows [Q | K | V] of a tensor whose name ends in `_weight`, its bias in one in `_bias`."""
    d, h, r = config.d_model, config.n_heads, config.head_dim
    w = tensors.weights(family.query + "_weight", (3 * h * r, d)).reshape(3, h * r, d)
    b = tensors.read(family.query + "_bias", (3 * h * r,)).reshape(3, h * r)
    q, k, v = (by_head(w[i], b[i], h) for i in range(3))
    return Layer(q, k, v, *output(tensors, family, config, r))


def grouped(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """One Linear with the rows of a key-value group together: its queries, its key, its value.

    With a group a head these are GPT-NeoX's and BLOOM's (H, 3, d') rows, with one group in all Falcon-7B's.
    """
    return Layer(*_groups(tensors, family, config), *output(tensors, family, config, config.head_dim))


def grouped_with_loose_biases(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """DeBERTa: as `grouped`, with biases of queries and values in tensors of their own and none of keys."""
    h, r = config.n_heads, config.head_dim
    q, k, v = _groups(tensors, family, config)
    stem = family.query.rpartition(".")[0]
    b_q, b_v = (tensors.read(f"{stem}.{name}_bias", (h * r,)).reshape(h, r) for name in ("q", "v"))
    return Layer(replace(q, bias=b_q), k, replace(v, bias=b_v), *output(tensors, family, config, r))


def _groups(tensors: LayerTensors, family: Family, config: ModelConfig) -> tuple[Affine, Affine, Affine]:
    d, h, g, r = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
    w, b = linear(tensors, config, family.query, ((h + 2 * g) * r, d), family.biases.query)
    w, b = w.reshape(g, h // g + 2, r, d), b.reshape(g, h // g + 2, r)
    q = by_head(w[:, :-2].reshape(h * r, d), b[:, :-2].reshape(h * r), h)
    k, v = (Affine(w[:, i].transpose(0, 2, 1), b[:, i]) for i in (-2, -1))
    return q, k, v


def gated(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """Qwen3-Next: a head's rows of q_proj are its query, then a gate of its output."""
    d, h, g, r = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
    has = family.biases
    w, b = linear(tensors, config, family.query, (h * 2 * r, d), has.query)
    w, b = w.reshape(h, 2, r, d).transpose(1, 0, 3, 2), b.reshape(h, 2, r).transpose(1, 0, 2)
    k = by_head(*linear(tensors, config, family.key, (g * r, d), has.key), g)
    v = by_head(*linear(tensors, config, family.value, (g * r, d), has.value), g)
    return Layer(Affine(w[0], b[0]), k, v, *output(tensors, family, config, r), gate=Affine(w[1], b[1]))


def latent(tensors: LayerTensors, family: Family, config: ModelConfig) -> Layer:
    """DeepSeek's multi-head latent attention: low-rank projections with an RMSNorm in the middle.

    A head's queries and keys are [position-free | rotary]; the rotary key is one for all heads, handed through beside
    the latent. The norms' gammas go into the maps after them, and what is left is a scalar a token for each latent; the
    key's scalar touches the position-free part and the values only.
    """
    d, h, r = config.d_model, config.n_heads, config.head_dim
    free, rotary, r_v = (config.count(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    m = config.size("kv_lora_rank")
    biased, stem = family.biases.query, family.key.rpartition(".")[0]
    eps = config.norm_eps if family.latent_eps is None else family.latent_eps
    from_latents = [(d / rank) ** 0.5 if family.latents_scaled else 1.0 for rank in (m, config.get("q_lora_rank") or 1)]

    w, b = linear(tensors, config, f"{stem}.kv_a_proj_with_mqa", (m + rotary, d), biased)
    down = Affine(w.T[None], b[None])  # to the latent and the shared rotary key
    kv_latent = Affine(w[:m].T[None], b[None, :m])
    gamma = np.float32(from_latents[0]) * tensors.read(f"{stem}.kv_a_layernorm.weight", (m,))
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
        gamma = np.float32(from_latents[1]) * tensors.read(f"{stem}.q_a_layernorm.weight", (m_q,))
        from_q = by_head(*linear(tensors, config, f"{stem}.q_b_proj", (h * r, m_q), False), h)
        q_latent = Affine(w.T[None], b[None])
        q = Latent(q_latent, Affine(gamma[:, None] * from_q.w, from_q.b))
        q_norm = InnerNorm(q_latent, eps)

    return Layer(
        q, k, v, *output(tensors, family, config, r_v), q_norm=q_norm,
        k_norm=InnerNorm(kv_latent, eps, dims=free), v_norm=InnerNorm(kv_latent, eps),
    )  # fmt: skip


def linear(
    tensors: LayerTensors, config: ModelConfig, module: str, shape: tuple[int, int | None], bias: bool | str
) -> tuple[Weights, np.ndarray]:
    """A Linear's weight, [out, in] as stored, and its bias, zeros where it has none."""
    w = tensors.weights(module + ".weight", shape)
    if config.get(bias) if isinstance(bias, str) else bias:
        return w, tensors.read(module + ".bias", shape[:1])
    return w, np.zeros(shape[0], np.float32)


def by_head(w: Weights, b: np.ndarray, heads: int) -> Affine:
    """(heads r, d) rows, a head's together, and (heads r,) as a map of shape (heads, d, r)."""
    return Affine(w.reshape(heads, -1, w.shape[1]).transpose(0, 2, 1), b.reshape(heads, -1))


def output(tensors: LayerTensors, family: Family, config: ModelConfig, r: int) -> tuple[Weights, np.ndarray]:
    """W_O as (H, r, d) and its bias."""
    d, h = config.d_model, config.n_heads
    w, b = linear(tensors, config, family.output, (d, h * r), family.biases.output)
    return w.T.reshape(h, r, d), b

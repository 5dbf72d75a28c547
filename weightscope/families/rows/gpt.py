"""Decoders of GPT-2's time and line: LayerNorm before attention, biases, positions learned, rotated or sloped."""

import numpy as np

from weightscope.attention.position_bias import Slopes
from weightscope.families import ggml
from weightscope.families.cells import Biases, Inputs, Outputs, biases, layer_norm
from weightscope.families.config import ModelConfig
from weightscope.families.family import Family, When, default_scale
from weightscope.families.layouts import conv1d_fused, grouped, separate, stacked
from weightscope.families.rope import Rope
from weightscope.families.tensors import LayerTensors


def gpt2_scale(config: ModelConfig, layer: int) -> float:
    """1/sqrt(d') unless scale_attn_weights is off, divided by the layer's number where the config says so."""
    scale = default_scale(config, layer) if config.get("scale_attn_weights") else 1.0
    return scale / (layer + 1) if config.get("scale_attn_by_inverse_layer_idx") else scale


def unscaled(config: ModelConfig, layer: int) -> float:
    """GPT-Neo divides by nothing."""
    return 1.0


def mpt_scale(config: ModelConfig, layer: int) -> float:
    """attn_config.softmax_scale, or 1/sqrt(d')."""
    return config.inside("attn_config").number("softmax_scale", default=default_scale(config, layer))


def powers(heads: int) -> np.ndarray:
    """2^(-8/heads), its square, ...: ALiBi's slopes for a power of two heads, shape (heads,)."""
    return 2.0 ** (-8 * np.arange(1, heads + 1) / heads)


def alibi(tensors: LayerTensors, config: ModelConfig, layer: int) -> Slopes:
    """Slopes of a power of two heads, then every other slope of twice as many heads (ALiBi's own code, as in BLOOM)."""
    most = 1 << (config.n_heads.bit_length() - 1)
    return Slopes(np.concatenate((powers(most), powers(2 * most)[::2]))[: config.n_heads])


def alibi_falcon(tensors: LayerTensors, config: ModelConfig, layer: int) -> Slopes:
    """Falcon adds BLOOM's slopes, rounded to bfloat16, before it scales the scores.

    The eager code of transformers (4.57 to 5.23 at least) adds them a second time with the mask, which its sdpa code
    and Falcon's own do not. `Layer.scores` is defined by the eager model and follows it; `position_bias` is once.
    """
    bits = alibi(tensors, config, layer).slopes.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return Slopes(rounded.view(np.float32) * default_scale(config, 0), times=2)


GPT2 = Family(
    name="gpt2",
    model_types=("gpt2",),
    gguf=ggml.GPT2,
    prefixes=("transformer.", ""),
    layer="h.{i}.",
    layout=conv1d_fused,
    transposed=("c_attn", "c_proj", "c_fc"),
    query="attn.c_attn",
    key="attn.c_attn",
    value="attn.c_attn",
    output="attn.c_proj",
    biases=biases(True, True),
    norm=layer_norm("ln_1"),
    inputs=Inputs(tokens="wte.weight", positions="wpe.weight"),
    outputs=Outputs(layer_norm("ln_f")),
    scale=gpt2_scale,
    defaults={
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    },
)

GPT_NEO = GPT2.but(
    name="gpt_neo",
    model_types=("gpt_neo",),
    layout=separate,
    query="attn.attention.q_proj",
    key="attn.attention.k_proj",
    value="attn.attention.v_proj",
    output="attn.attention.out_proj",
    biases=Biases(output=True),
    scale=unscaled,
)

GPTJ = GPT_NEO.but(
    name="gptj",
    model_types=("gptj",),
    query="attn.q_proj",
    key="attn.k_proj",
    value="attn.v_proj",
    output="attn.out_proj",
    biases=Biases(),
    inputs=Inputs(tokens="wte.weight"),
    rope=Rope(interleaved=True, dims_key="rotary_dim"),
    scale=default_scale,
    defaults={"tie_word_embeddings": False, "rotary_dim": 64},
)

GPT_NEOX = Family(
    name="gpt_neox",
    model_types=("gpt_neox",),
    gguf=ggml.GPT_NEOX,
    prefixes=("gpt_neox.", ""),
    layer="layers.{i}.",
    layout=grouped,
    query="attention.query_key_value",
    key="attention.query_key_value",
    value="attention.query_key_value",
    output="attention.dense",
    biases=biases("attention_bias", "attention_bias"),
    norm=layer_norm("input_layernorm"),
    inputs=Inputs(tokens="embed_in.weight"),
    outputs=Outputs(layer_norm("final_layer_norm"), tokens=("embed_out.weight", "lm_head.weight")),
    rope=Rope(theta_key="rotary_emb_base", fraction_key="rotary_pct", fraction=0.25),
    defaults={
        "tie_word_embeddings": False,
        "layer_norm_eps": 1e-5,
        "attention_bias": True,
        "max_position_embeddings": 2048,
    },
)

OPT = Family(
    name="opt",
    model_types=("opt",),
    prefixes=("model.decoder.", "decoder.", ""),
    layer="layers.{i}.",
    layout=separate,
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    output="self_attn.out_proj",
    biases=biases("enable_bias", "enable_bias"),
    norm=layer_norm("self_attn_layer_norm", eps=1e-5),
    inputs=Inputs(
        tokens="embed_tokens.weight",
        positions="embed_positions.weight",
        offset=2,
        width="word_embed_proj_dim",
        before="project_in",
    ),
    outputs=Outputs(layer_norm("final_layer_norm", eps=1e-5), after="project_out"),
    variants=(
        When("layer_norm_elementwise_affine", False, norm__module="", outputs__norm=layer_norm("", eps=1e-5)),
        When("do_layer_norm_before", False, norm=None, outputs__norm=None, closing=layer_norm("final_layer_norm")),
    ),
    defaults={"do_layer_norm_before": True, "enable_bias": True, "layer_norm_elementwise_affine": True},
)

BLOOM = Family(
    name="bloom",
    model_types=("bloom",),
    gguf=ggml.BLOOM,
    prefixes=("transformer.", ""),
    layer="h.{i}.",
    layout=grouped,
    query="self_attention.query_key_value",
    key="self_attention.query_key_value",
    value="self_attention.query_key_value",
    output="self_attention.dense",
    biases=biases(True, True),
    norm=layer_norm("input_layernorm"),
    inputs=Inputs(tokens="word_embeddings.weight", norm=layer_norm("word_embeddings_layernorm")),
    outputs=Outputs(layer_norm("ln_f")),
    additive=alibi,
    defaults={"layer_norm_epsilon": 1e-5},
)

MPT = Family(
    name="mpt",
    model_types=("mpt",),
    gguf=ggml.MPT,
    prefixes=("transformer.", ""),
    layer="blocks.{i}.",
    layout=stacked,
    query="attn.Wqkv",
    key="attn.Wqkv",
    value="attn.Wqkv",
    output="attn.out_proj",
    norm=layer_norm("norm_1", bias=False),
    inputs=Inputs(tokens="wte.weight"),
    outputs=Outputs(layer_norm("norm_f", bias=False)),
    additive=alibi,
    scale=mpt_scale,
    clip=("attn_config", "clip_qkv"),
    defaults={"layer_norm_epsilon": 1e-5},
)

# Three layouts: one key-value head for all (7B), groups (40B and later), a key and a value a head (RW).
FALCON = Family(
    name="falcon",
    model_types=("falcon", "RefinedWeb", "RefinedWebModel"),
    gguf=ggml.FALCON,
    prefixes=("transformer.", ""),
    layer="h.{i}.",
    layout=grouped,
    query="self_attention.query_key_value",
    key="self_attention.query_key_value",
    value="self_attention.query_key_value",
    output="self_attention.dense",
    biases=biases("bias", "bias"),
    norm=layer_norm("input_layernorm"),
    inputs=Inputs(tokens="word_embeddings.weight"),
    outputs=Outputs(layer_norm("ln_f")),
    rope=Rope(),
    kv_heads=1,
    variants=(
        When("multi_query", False, kv_heads=()),
        When("new_decoder_architecture", True, kv_heads=("num_kv_heads", "n_head_kv"), norm=layer_norm("ln_attn")),
        When("num_ln_in_parallel_attn", 1, norm=layer_norm("input_layernorm")),
        When(
            "alibi", True, rope=None, additive=alibi_falcon,
            caveats=(
                "transformers' eager attention adds the slopes twice, as layer.scores does; position_bias has it once",
                "transformers rounds slope times position to bfloat16; the position bias here is not rounded",
            ),
        ),
    ),
    defaults={
        "layer_norm_epsilon": 1e-5,
        "multi_query": True,
        "new_decoder_architecture": False,
        "alibi": False,
        "bias": False,
        "max_position_embeddings": 2048,
    },
)  # fmt: skip

GPT_DECODERS = (GPT2, GPT_NEO, GPTJ, GPT_NEOX, OPT, BLOOM, MPT, FALCON)

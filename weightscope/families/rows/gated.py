"""Decoders whose heads' sums pass a gate or a norm before W_O, beside what else they have."""

from collections.abc import Mapping
from typing import Any

from weightscope.families.cells import Gate, Inputs, QkNorm, biases, rms_norm
from weightscope.families.config import ModelConfig, listed_sizes
from weightscope.families.family import In, When
from weightscope.families.rope import Rope
from weightscope.families.rows.hybrid import LFM2
from weightscope.families.rows.llama import LLAMA, OUTPUT_NORM, QWEN3_NEXT, query_scalar


def with_base(config: ModelConfig, layer: int) -> bool:
    """Layers that layer_rope_theta has no 0 for; all where it is not there."""
    bases = config.get("layer_rope_theta")
    if bases is None:
        return True
    if not isinstance(bases, list) or len(bases) <= layer:
        raise config.error("layer_rope_theta", "a list with a number for every layer")
    return bool(bases[layer])


def factored(config: ModelConfig, layer: int) -> float:
    """Muse: qk_scale_factor multiplies normed queries."""
    return float(config.head_dim**-0.5) * config.number("qk_scale_factor")


def twice_where_sliding(config: ModelConfig, layer: int) -> Mapping[str, Any]:
    """MiMo-V2: layers that see a window have twice the key-value heads."""
    if config.layer_types[layer] != "sliding_attention":
        return listed_sizes(config, layer)
    return {"num_key_value_heads": 2 * config.size("num_key_value_heads")}


MIMO_V2_FLASH = LLAMA.but(
    name="mimo_v2_flash",
    model_types=("mimo_v2_flash",),
    biases=biases("attention_bias", False),
    rope=Rope(theta=5e6, fraction=0.334),
    sizes=twice_where_sliding,
    value_dim=("v_head_dim",),
    multipliers={"value": "attention_value_scale"},
    in_layers=(In("sliding_attention", sinks="self_attn.attention_sink_bias"),),
    variants=(When("attention_value_scale", None, multipliers={}),),
    defaults={
        "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "attention_value_scale": 0.707,
    },
)  # fmt: skip

LFM3 = LFM2.but(
    name="lfm3",
    model_types=("lfm3",),
    output="self_attn.o_proj",
    biases=biases("attention_bias", "attention_bias"),
    qk_norm=QkNorm(),
    rope=Rope(theta=1e6),
    variants=(
        When("use_attention_gate", True, gate=Gate("self_attn.gate_proj")),
        When("use_sandwich_norm", True, caveats=(OUTPUT_NORM,)),
    ),
    defaults={
        "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 128, "use_attention_gate": True, "use_sandwich_norm": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
        },
    },
)  # fmt: skip

STEP3P5 = LLAMA.but(
    name="step3p5",
    model_types=("step3p5",),
    scale=query_scalar,
    qk_norm=QkNorm(offset=1),
    gate=Gate("self_attn.g_proj"),
    norm=rms_norm("input_layernorm", offset=1),
    outputs__norm=rms_norm("norm", offset=1),
    rope=Rope(fraction=1.0),
    defaults={
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 128000,
        "query_pre_attn_scalar": 128,
    },
)  # fmt: skip

MUSE_GLIMMER = LLAMA.but(
    name="muse_glimmer",
    model_types=("muse_glimmer_text",),
    inputs=Inputs(tokens="embed_tokens.weight", norm=rms_norm("")),
    norm=rms_norm("input_layernorm", offset=1),
    scale=factored,
    qk_norm=QkNorm("", ""),
    gate=Gate("self_attn.gate_proj"),
    rope=Rope(rotates=with_base),
    caveats=(OUTPUT_NORM,),
    defaults={
        "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
        "qk_scale_factor": 3.87,
    },
)  # fmt: skip

MUSE_SPARK = MUSE_GLIMMER.but(
    name="muse_spark",
    model_types=("muse_spark_text",),
    heads_normed=True,
    rope__theta=5e5,
    caveats=("the layer's output is gated before it joins the residual stream",),
    defaults={
        "num_key_value_heads": 16, "head_dim": 64, "max_position_embeddings": 1048576,
        "qk_scale_factor": 5.4730064863875,
    },
)  # fmt: skip

QWEN4_EXP = QWEN3_NEXT.but(
    name="qwen4_exp",
    model_types=("qwen4_exp_text",),
    norm=None,
    rope=Rope(fraction=1.0),
    choosing=("self_attn.indexer",),
    beside=("self_attn.indexer",),
    attention_types=("full_attention", "indexed_attention"),
    outputs=None,
    caveats=(
        "layers read a mixture of several streams, and their output is spread over them (hyper-connections)",
        "an index chooses which keys a query sees (self_attn.indexer): scores are the model's where it sees",
    ),
    defaults={"partial_rotary_factor": None},
)

GATED = (MIMO_V2_FLASH, LFM3, STEP3P5, MUSE_GLIMMER, MUSE_SPARK, QWEN4_EXP)

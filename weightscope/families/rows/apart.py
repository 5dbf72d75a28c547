"""Decoders of LLaMA's line with a mechanism that it lacks: gates, norms before W_O, temperatures."""

from collections.abc import Mapping
from typing import Any

from weightscope.attention.temperature import Logarithm, Power, Temperature
from weightscope.families.cells import (
    Gate,
    QkNorm,
    rms_norm,
)
from weightscope.families.config import Every, ModelConfig
from weightscope.families.family import When
from weightscope.families.rope import Rope
from weightscope.families.rows.alike import MINIMAX_M2
from weightscope.families.rows.llama import GPT_OSS, GRANITE, LLAMA, OUTPUT_NORM
from weightscope.families.within import listed, sliding, with_parameters


def without_rotation(config: ModelConfig, layer: int) -> Temperature | None:
    """Llama 4: 1 + attn_scale log(1 + floor((p + 1) / floor_scale)) in layers that do not rotate."""
    if listed(config, layer) or not config.get("attn_temperature_tuning"):
        return None
    return Logarithm(config.number("attn_scale"), config.number("floor_scale", smallest=1), first=1, counted=True)


def scalable_softmax(config: ModelConfig, layer: int) -> Temperature | None:
    """Beam: (1 + (p + 1) / 2048)^0.1 in layers that do not rotate."""
    return None if with_parameters(config, layer) else Power(0.1, 2048)


def own_heads(config: ModelConfig, layer: int) -> Mapping[str, Any]:
    """Laguna: num_attention_heads_per_layer, where there is such a list."""
    key = "num_attention_heads_per_layer"
    if not config.has(key):
        return {}
    listed = config.get(key)
    if not isinstance(listed, list) or len(listed) <= layer:
        raise config.error(key, "a list with every layer's number of heads")
    return {"num_attention_heads": listed[layer]}


LLAMA4 = LLAMA.but(
    name="llama4_text",
    model_types=("llama4_text",),
    rope=Rope(interleaved=True, theta=5e5, rotates=listed),
    qk_norm=QkNorm("", "", rotated=True, within=listed),
    temperature=without_rotation,
    variants=(When("use_qk_norm", False, qk_norm=None),),
    defaults={
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
        "no_rope_layer_interval": 4, "use_qk_norm": True, "attn_temperature_tuning": True, "floor_scale": 8192,
        "attn_scale": 0.1,
    },
)  # fmt: skip

HUNYUAN = LLAMA.but(
    name="hunyuan_v1",
    model_types=("hunyuan_v1_dense", "hunyuan_v1_moe"),
    rope=Rope(alpha=True),
    qk_norm=QkNorm("self_attn.query_layernorm", "self_attn.key_layernorm", rotated=True),
    defaults={"rms_norm_eps": 1e-5},
)

NANOCHAT = LLAMA.but(
    name="nanochat",
    model_types=("nanochat",),
    norm=rms_norm(""),
    inputs__norm=rms_norm(""),
    rope=Rope(backwards=True),
    qk_norm=QkNorm("", "", rotated=True),
    outputs__norm=rms_norm(""),
)

BITNET = LLAMA.but(
    name="bitnet",
    model_types=("bitnet",),
    sub_norm=rms_norm("self_attn.attn_sub_norm"),
    rope=Rope(theta=5e5),
    defaults={"num_key_value_heads": 5, "rms_norm_eps": 1e-5},
)

AFMOE = LLAMA.but(
    name="afmoe",
    model_types=("afmoe",),
    gate=Gate("self_attn.gate_proj"),
    rope=Rope(rotates=sliding),
    qk_norm=QkNorm(),
    layer_types=Every("global_attn_every_n_layers", -1, "full_attention", "sliding_attention"),
    caveats=(OUTPUT_NORM,),
    variants=(When("mup_enabled", True, inputs__scale="sqrt"),),
    defaults={
        "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 16384, "global_attn_every_n_layers": 4,
        "mup_enabled": False,
    },
)  # fmt: skip

LAGUNA = LLAMA.but(
    name="laguna",
    model_types=("laguna",),
    gate=Gate("self_attn.g_proj", kind="softplus"),
    sizes=own_heads,
    rope=Rope(fraction=1.0),
    qk_norm=QkNorm(),
    defaults={
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    },
)  # fmt: skip

MINIMAX_M3 = MINIMAX_M2.but(
    name="minimax_m3_vl",
    model_types=("minimax_m3_vl_text",),
    norm=rms_norm("input_layernorm", offset=1),
    qk_norm=QkNorm(offset=1),
    choosing=("self_attn.indexer",),
    outputs__norm=rms_norm("norm", offset=1),
    defaults={"num_key_value_heads": 4, "max_position_embeddings": 524288},
)

OPENAI_PRIVACY_FILTER = GPT_OSS.but(
    name="openai_privacy_filter",
    model_types=("openai_privacy_filter",),
    rope=Rope(interleaved=True, theta=150000.0),
    outputs=None,
    defaults={"num_key_value_heads": 2},
)

GRANITEMOE_SWA = GRANITE.but(
    name="granitemoe_swa",
    model_types=("granitemoe_swa",),
    outer_sinks="self_attn.sinks",
    rope=Rope(thetas="layer_rope_theta"),
)

GRANITE_SWA = GRANITEMOE_SWA.but(
    name="granite_swa",
    model_types=("granite_swa",),
    defaults={
        "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
)  # fmt: skip

BEAM = LLAMA.but(
    name="beam",
    model_types=("beam",),
    gate=Gate("self_attn.gate_proj", of_heads="self_attn.gate_bias"),
    rope=Rope(rotates=with_parameters),
    qk_norm=QkNorm(),
    temperature=scalable_softmax,
    caveats=(OUTPUT_NORM,),
    defaults={"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192},
)

DIFFLLAMA = LLAMA.but(
    name="diffllama",
    model_types=("diffllama",),
    differences="self_attn",
    loose=tuple(f"self_attn.lambda_{of}" for of in ("q1", "k1", "q2", "k2")),
    defaults={"rms_norm_eps": 1e-5},
)

HRM = LLAMA.but(
    name="hrm_text",
    model_types=("hrm_text",),
    refused="two networks that take turns at one stream, each with its gates, queries, keys and values in one tensor",
)

DOGE = LLAMA.but(
    name="doge",
    model_types=("doge",),
    refused="a dynamic mask: a network of each key's value is added to its scores, and chooses which keys are seen",
)

JETMOE = LLAMA.but(
    name="jetmoe",
    model_types=("jetmoe",),
    defaults={"num_key_value_heads": 16, "max_position_embeddings": 4096, "tie_word_embeddings": True},
    refused="a mixture of attention experts: a router picks each token's queries and W_O",
)

APART = (
    LLAMA4, HUNYUAN, NANOCHAT, BITNET, AFMOE, LAGUNA, MINIMAX_M3, OPENAI_PRIVACY_FILTER, GRANITE_SWA, GRANITEMOE_SWA,
    BEAM, DIFFLLAMA, HRM, DOGE, JETMOE,
)  # fmt: skip

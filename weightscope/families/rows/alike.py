"""Decoders that differ from LLaMA's line in a cell or two: biases, norms, which layers rotate, a scale."""

from weightscope.families.cells import (
    Biases,
    Inputs,
    Outputs,
    QkNorm,
    StoredNorm,
    biases,
    layer_norm,
    rms_norm,
)
from weightscope.families.config import Every, ModelConfig, all_full
from weightscope.families.family import Family, When, default_scale
from weightscope.families.layouts import grouped, stacked
from weightscope.families.rope import Rope
from weightscope.families.rows.gpt import GPT_NEOX
from weightscope.families.rows.llama import GEMMA2, GRANITE, LLAMA, OLMO2, OUTPUT_NORM
from weightscope.families.within import windowed, windowed_if_any


def multiplier_if_any(config: ModelConfig, layer: int) -> float:
    """HyperCLOVA X: attention_multiplier, or the usual scale where there is none."""
    return config.number("attention_multiplier", default=default_scale(config, layer))


ARCEE = LLAMA.but(
    name="arcee",
    model_types=("arcee",),
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
)

INTERNLM3 = ARCEE.but(
    name="internlm3",
    model_types=("internlm3",),
    defaults={"num_key_value_heads": 2, "max_position_embeddings": 32768},
)

IQUESTCODER = ARCEE.but(
    name="iquestcoder",
    model_types=("iquestcoder",),
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072},
)

SEED_OSS = LLAMA.but(
    name="seed_oss",
    model_types=("seed_oss",),
    biases=biases("attention_bias", "attention_out_bias"),
    defaults={
        "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "attention_out_bias": False,
        "max_position_embeddings": 524288,
    },
)  # fmt: skip

ERNIE4_5 = LLAMA.but(
    name="ernie4_5",
    model_types=("ernie4_5",),
    biases=biases("use_bias", "use_bias"),
    rope=Rope(interleaved=True, theta=5e5),
    defaults={
        "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "use_bias": False,
        "max_position_embeddings": 131072, "tie_word_embeddings": True,
    },
)  # fmt: skip

ERNIE4_5_MOE = ERNIE4_5.but(
    name="ernie4_5_moe", model_types=("ernie4_5_moe",), defaults={"num_key_value_heads": 4, "head_dim": None}
)

HY_V3 = LLAMA.but(
    name="hy_v3",
    model_types=("hy_v3",),
    rope=Rope(theta=11158840.0),
    qk_norm=QkNorm(),
    defaults={
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072
    },
)  # fmt: skip

APERTUS = LLAMA.but(
    name="apertus",
    model_types=("apertus",),
    norm=rms_norm("attention_layernorm"),
    rope=Rope(theta=12e6),
    qk_norm=QkNorm(),
    defaults={
        "rms_norm_eps": 1e-5, "max_position_embeddings": 65536,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
)  # fmt: skip

HYPERCLOVAX = GRANITE.but(
    name="hyperclovax",
    model_types=("hyperclovax",),
    scale=multiplier_if_any,
    variants=(When("use_post_norm", True, caveats=(*GRANITE.caveats, OUTPUT_NORM)),),
    defaults={"attention_multiplier": None, "use_post_norm": True},
)

EXAONE4 = LLAMA.but(
    name="exaone4",
    model_types=("exaone4",),
    biases=Biases(),
    norm=None,
    rope=Rope(rotates=windowed_if_any),
    qk_norm=QkNorm(),
    layer_types=Every("sliding_window_pattern", -1, "full_attention", "sliding_attention"),
    caveats=(OUTPUT_NORM,),
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
)

EXAONE_MOE = EXAONE4.but(name="exaone_moe", model_types=("exaone_moe",), norm=rms_norm("input_layernorm"), caveats=())

OLMOE = LLAMA.but(
    name="olmoe",
    model_types=("olmoe",),
    qk_norm=QkNorm(scope="joint"),
    clip=("clip_qkv",),
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
)

FLEX_OLMO = OLMO2.but(
    name="flex_olmo",
    model_types=("flex_olmo",),
    rope=Rope(theta=5e5),
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 4096},
)

PHIMOE = LLAMA.but(
    name="phimoe",
    model_types=("phimoe",),
    norm=layer_norm("input_layernorm"),
    rope=Rope(theta=1e6, scaled="mscale"),
    outputs=Outputs(layer_norm("norm")),
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
)

DOTS1 = LLAMA.but(name="dots1", model_types=("dots1",), qk_norm=QkNorm(), defaults={"num_key_value_heads": 32})

MELLUM = LLAMA.but(
    name="mellum",
    model_types=("mellum",),
    qk_norm=QkNorm(),
    defaults={
        "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 131072,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
)  # fmt: skip

KOLIBRI1 = EXAONE_MOE.but(
    name="kolibri1",
    model_types=("kolibri1",),
    layer_types=all_full,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 128,
        "sliding_window": 513,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
    },
)

FLINT = LLAMA.but(
    name="flint",
    model_types=("flint",),
    sinks="self_attn.softmax_offset",
    rope=Rope(rotates=windowed),
    qk_norm=QkNorm(),
    defaults={
        "num_key_value_heads": 4, "head_dim": 128, "sliding_window": 513, "max_position_embeddings": 262144
    },
)  # fmt: skip

NEMOTRON = LLAMA.but(
    name="nemotron",
    model_types=("nemotron",),
    norm=StoredNorm("input_layernorm", centred=True, bias=True, offset=1),
    rope=Rope(fraction=0.5),
    outputs__norm=StoredNorm("norm", centred=True, bias=True, offset=1),
    defaults={"norm_eps": 1e-5, "max_position_embeddings": 4096},
)

HELIUM = LLAMA.but(
    name="helium",
    model_types=("helium",),
    biases=biases("attention_bias", False),
    rope=Rope(interleaved=True, theta=1e5),
    defaults={"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8, "max_position_embeddings": 4096},
)

PERSIMMON = LLAMA.but(
    name="persimmon",
    model_types=("persimmon",),
    layout=grouped,
    query="self_attn.query_key_value",
    key="self_attn.query_key_value",
    value="self_attn.query_key_value",
    output="self_attn.dense",
    biases=biases(True, True),
    norm=layer_norm("input_layernorm"),
    rope=Rope(fraction=0.5),
    qk_norm=QkNorm("self_attn.q_layernorm", "self_attn.k_layernorm", centred=True, bias=True),
    kv_heads=(),
    head_dim=(),
    variants=(When("qk_layernorm", False, qk_norm=None),),
    outputs__norm=layer_norm("final_layernorm"),
    defaults={"layer_norm_eps": 1e-5, "max_position_embeddings": 16384},
)

JAIS2 = LLAMA.but(
    name="jais2",
    model_types=("jais2",),
    norm=layer_norm("input_layernorm"),
    outputs__norm=layer_norm("norm"),
    defaults={"layer_norm_eps": 1e-5, "attention_bias": True, "max_position_embeddings": 8192},
)

CWM = LLAMA.but(
    name="cwm",
    model_types=("cwm",),
    biases=Biases(),
    rope=Rope(theta=1e6),
    defaults={
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 16.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
)  # fmt: skip

SOLAR_OPEN = LLAMA.but(
    name="solar_open",
    model_types=("solar_open",),
    biases=biases("attention_bias", False),
    rope=Rope(theta=1e6),
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
)

VAULTGEMMA = GEMMA2.but(name="vaultgemma", model_types=("vaultgemma",), gguf=None, caveats=())

MINIMAX_M2 = LLAMA.but(
    name="minimax_m2",
    model_types=("minimax_m2",),
    biases=Biases(),
    rope=Rope(theta=5e6, fraction=1.0),
    qk_norm=QkNorm(scope="joint"),
    defaults={"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608},
)

DBRX = Family(
    name="dbrx",
    model_types=("dbrx",),
    prefixes=("transformer.", ""),
    layer="blocks.{i}.norm_attn_norm.",
    layout=stacked,
    query="attn.Wqkv",
    key="attn.Wqkv",
    value="attn.Wqkv",
    output="attn.out_proj",
    norm=layer_norm("norm_1", bias=False, eps=1e-5),
    inputs=Inputs(tokens="wte.weight"),
    outputs=Outputs(layer_norm("norm_f", bias=False, eps=1e-5)),
    rope=Rope(),
    clip=("attn_config", "clip_qkv"),
    kv_heads=("num_key_value_heads",),
    defaults={"num_key_value_heads": 1},
)

GPT_NEOX_JAPANESE = GPT_NEOX.but(
    name="gpt_neox_japanese",
    model_types=("gpt_neox_japanese",),
    gguf=None,
    prefixes=("gpt_neox_japanese.", ""),
    biases=Biases(),
    loose=("attention.dense_bias",),
    rope=Rope(theta_key="rotary_emb_base", fraction_key="rotary_pct", fraction=1.0),
    caveats=("the last layer's dense_bias, which joins the residual stream beside what attention adds",),
    defaults={"tie_word_embeddings": True},
)

ALIKE = (
    ARCEE, INTERNLM3, IQUESTCODER, SEED_OSS, ERNIE4_5, ERNIE4_5_MOE, HY_V3, APERTUS, HYPERCLOVAX, EXAONE4,
    EXAONE_MOE, OLMOE, FLEX_OLMO, PHIMOE, DOTS1, MELLUM, KOLIBRI1, FLINT, NEMOTRON, HELIUM, PERSIMMON, JAIS2, CWM,
    SOLAR_OPEN, VAULTGEMMA, MINIMAX_M2, DBRX, GPT_NEOX_JAPANESE,
)  # fmt: skip

"""Decoders that differ from LLaMA's line in a cell or two: biases, norms, which layers rotate, a scale."""

from weightscope.attention.temperature import Temperature
from weightscope.families.cells import Biases, Gate, Outputs, QkNorm, biases, layer_norm, rms_norm
from weightscope.families.config import Every, ModelConfig
from weightscope.families.family import When, default_scale
from weightscope.families.rope import Rope
from weightscope.families.rows.llama import GRANITE, LLAMA, OLMO2, OUTPUT_NORM
from weightscope.families.within import listed, sliding, windowed_if_any


def without_rotation(config: ModelConfig, layer: int) -> Temperature | None:
    """Llama 4: 1 + attn_scale log(1 + floor((p + 1) / floor_scale)) in layers that do not rotate."""
    if listed(config, layer) or not config.get("attn_temperature_tuning"):
        return None
    return Temperature(config.number("attn_scale"), config.number("floor_scale", smallest=1), first=1)


def multiplier_if_any(config: ModelConfig, layer: int) -> float:
    """HyperCLOVA X: attention_multiplier, or the usual scale where there is none."""
    return config.number("attention_multiplier", default=default_scale(config, layer))


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

ARCEE = LLAMA.but(
    name="arcee",
    model_types=("arcee", "internlm3", "iquestcoder"),
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
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
    model_types=("ernie4_5", "ernie4_5_moe"),
    biases=biases("use_bias", "use_bias"),
    rope=Rope(interleaved=True, theta=5e5),
    defaults={"rms_norm_eps": 1e-5, "use_bias": False, "max_position_embeddings": 131072, "tie_word_embeddings": True},
)

HUNYUAN = LLAMA.but(
    name="hunyuan_v1",
    model_types=("hunyuan_v1_dense", "hunyuan_v1_moe"),
    rope=Rope(alpha=True),
    qk_norm=QkNorm("self_attn.query_layernorm", "self_attn.key_layernorm", rotated=True),
    defaults={"rms_norm_eps": 1e-5},
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

HRM = LLAMA.but(
    name="hrm_text",
    model_types=("hrm_text",),
    layer="L_module.layers.{i}.",
    gate=Gate("self_attn.gate_proj", bias="attention_bias"),
    norm=rms_norm(""),
    kv_heads=(),
    outputs=None,
    keys={"n_layers": ("num_layers_per_stack",)},
    defaults={"head_dim": 128},
)

ALIKE = (
    LLAMA4, ARCEE, SEED_OSS, ERNIE4_5, HUNYUAN, HY_V3, APERTUS, HYPERCLOVAX, EXAONE4, EXAONE_MOE, OLMOE, FLEX_OLMO,
    PHIMOE, NANOCHAT, BITNET, AFMOE, LAGUNA,
)  # fmt: skip

"""Decoders of LLaMA's line: rotary positions, mostly RMSNorm and grouped queries."""

from weightscope.attention.rotation import yarn_temperature
from weightscope.families import ggml
from weightscope.families.cells import Biases, Inputs, Outputs, QkNorm, biases, layer_norm, rms_norm
from weightscope.families.config import Every, ModelConfig
from weightscope.families.family import Family, When, default_scale
from weightscope.families.layouts import gated, latent, separate, stacked
from weightscope.families.rope import Rope
from weightscope.families.within import listed


def query_scalar(config: ModelConfig, layer: int) -> float:
    """Gemma 2 and 3: 1/sqrt(query_pre_attn_scalar), which need not be the head's width."""
    return float(config.number("query_pre_attn_scalar", smallest=1e-6) ** -0.5)


def multiplier(config: ModelConfig, layer: int) -> float:
    """Granite: attention_multiplier, as it is."""
    return config.number("attention_multiplier")


def deepseek_scale(config: ModelConfig, layer: int) -> float:
    """1/sqrt(d') times the square of YaRN's temperature where the scaling has mscale_all_dim."""
    scaling = config.rope[config.layer_types[layer]]
    weight = scaling.number("mscale_all_dim", default=0)
    if not weight or scaling["rope_type"] == "default":
        return default_scale(config, layer)
    return default_scale(config, layer) * yarn_temperature(scaling.number("factor", smallest=1e-6), weight) ** 2


OUTPUT_NORM = "the layer's output passes a norm before it joins the residual stream"

LLAMA = Family(
    name="llama",
    model_types=("llama", "aria_text"),
    prefixes=("model.", "model.language_model.", "language_model.model.", ""),
    layer="layers.{i}.",
    layout=separate,
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    output="self_attn.o_proj",
    biases=biases("attention_bias", "attention_bias"),
    norm=rms_norm("input_layernorm"),
    inputs=Inputs(tokens="embed_tokens.weight"),
    outputs=Outputs(rms_norm("norm")),
    rope=Rope(),
    kv_heads=("num_key_value_heads",),
    head_dim=("head_dim",),
    gguf=ggml.LLAMA,
    defaults={
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
)

MISTRAL = LLAMA.but(
    name="mistral",
    model_types=("mistral",),
    biases=Biases(),
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 4096 * 32},
)

MIXTRAL = MISTRAL.but(
    name="mixtral",
    model_types=("mixtral",),
    rope=Rope(theta=1e6),
    defaults={"rms_norm_eps": 1e-5},
)

GRANITE = LLAMA.but(
    name="granite",
    model_types=("granite", "granitemoe", "granitemoeshared"),
    inputs__scale="embedding_multiplier",
    scale=multiplier,
    gguf=ggml.GRANITE,
    caveats=("the layer's output is multiplied by residual_multiplier before it joins the residual stream",),
    defaults={"attention_multiplier": 1.0, "embedding_multiplier": 1.0},
)

SMOLLM3 = LLAMA.but(
    name="smollm3",
    model_types=("smollm3",),
    rope=Rope(theta=2e6, rotates=listed),
    gguf=ggml.SMOLLM3,
    defaults={
        "num_key_value_heads": 4,
        "no_rope_layer_interval": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
)

QWEN2 = LLAMA.but(
    name="qwen2",
    model_types=("qwen2",),
    gguf=ggml.QWEN2,
    biases=biases(True, False),
    defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768},
)

QWEN2_MOE = QWEN2.but(
    name="qwen2_moe",
    model_types=("qwen2_moe",),
    gguf=ggml.QWEN2_MOE,
    biases=biases("qkv_bias", False),
    defaults={"num_key_value_heads": 16, "qkv_bias": True},
)

QWEN3 = LLAMA.but(
    name="qwen3",
    model_types=("qwen3",),
    gguf=ggml.QWEN3,
    qk_norm=QkNorm(),
    defaults={"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
)

QWEN3_MOE = LLAMA.but(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    gguf=ggml.QWEN3_MOE,
    qk_norm=QkNorm(),
    defaults={"num_key_value_heads": 4, "max_position_embeddings": 32768},
)

QWEN3_NEXT = LLAMA.but(
    name="qwen3_next",
    model_types=("qwen3_next",),
    layout=gated,
    norm=rms_norm("input_layernorm", offset=1),
    qk_norm=QkNorm(offset=1),
    rope=Rope(fraction=0.25),
    layer_types=Every("full_attention_interval", -1, "full_attention", "linear_attention"),
    attention_types=("full_attention",),
    outputs__norm=rms_norm("norm", offset=1),
    defaults={
        "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4, "max_position_embeddings": 32768
    },
)  # fmt: skip

GEMMA = LLAMA.but(
    name="gemma",
    model_types=("gemma",),
    gguf=ggml.GEMMA,
    norm=rms_norm("input_layernorm", offset=1),
    inputs__scale="sqrt",
    outputs__norm=rms_norm("norm", offset=1),
    defaults={
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
)

GEMMA2 = GEMMA.but(
    name="gemma2",
    model_types=("gemma2",),
    gguf=ggml.GEMMA2,
    scale=query_scalar,
    softcap="attn_logit_softcapping",
    caveats=(OUTPUT_NORM,),
    defaults={"num_key_value_heads": 4, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0},
)

GEMMA3 = GEMMA2.but(
    name="gemma3",
    model_types=("gemma3", "gemma3_text"),
    gguf=ggml.GEMMA3,
    nested="text_config",
    softcap="",  # its config has one, its code does not ask for it
    qk_norm=QkNorm(offset=1),
    rope=Rope(theta=1e6, local=("rope_local_base_freq", 1e4), local_scaled=False),
    layer_types=Every("sliding_window_pattern", -1, "full_attention", "sliding_attention"),
    defaults={
        "hidden_size": 2304,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "max_position_embeddings": 131072,
    },
)

PHI = LLAMA.but(
    name="phi",
    model_types=("phi",),
    output="self_attn.dense",
    biases=biases(True, True),
    norm=layer_norm("input_layernorm"),
    rope=Rope(fraction=0.5),
    head_dim=(),
    gguf=ggml.PHI2,
    variants=(
        When(
            "qk_layernorm", True,
            qk_norm=QkNorm("self_attn.q_layernorm", "self_attn.k_layernorm", centred=True, bias=True),
        ),
    ),
    outputs__norm=layer_norm("final_layernorm"),
    defaults={"layer_norm_eps": 1e-5, "qk_layernorm": False},
)  # fmt: skip

PHI3 = LLAMA.but(
    name="phi3",
    model_types=("phi3",),
    gguf=ggml.PHI3,
    layout=stacked,
    query="self_attn.qkv_proj",
    key="self_attn.qkv_proj",
    value="self_attn.qkv_proj",
    biases=Biases(),
    rope=Rope(scaled="longrope", fraction=1.0),
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "max_position_embeddings": 4096},
)

PHI4_MULTIMODAL = PHI3.but(
    name="phi4_multimodal",
    model_types=("phi4_multimodal",),
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072},
)

OLMO = LLAMA.but(
    name="olmo",
    model_types=("olmo",),
    norm=layer_norm("", eps=1e-5),
    clip=("clip_qkv",),
    outputs__norm=layer_norm("", eps=1e-5),
)

OLMO2 = LLAMA.but(
    name="olmo2",
    model_types=("olmo2",),
    norm=None,
    qk_norm=QkNorm(scope="joint"),
    gguf=ggml.OLMO2,
    caveats=(OUTPUT_NORM,),
    defaults={"rms_norm_eps": 1e-5},
)

OLMO3 = OLMO2.but(
    name="olmo3",
    model_types=("olmo3",),
    rope=Rope(theta=5e5, local=("rope_theta", 5e5), local_scaled=False),
    layer_types=Every("full_attention_interval", -1, "full_attention", "sliding_attention"),
    defaults={"full_attention_interval": 4},
)

STABLELM = LLAMA.but(
    name="stablelm",
    model_types=("stablelm",),
    gguf=ggml.STABLELM,
    biases=biases("use_qkv_bias", False),
    norm=layer_norm("input_layernorm"),
    rope=Rope(fraction=0.25),
    head_dim=(),
    variants=(
        When(
            "qk_layernorm", True,
            qk_norm=QkNorm("self_attn.q_layernorm", "self_attn.k_layernorm", "listed", centred=True),
        ),
    ),
    outputs__norm=layer_norm("norm"),
    defaults={"layer_norm_eps": 1e-5, "use_qkv_bias": False, "qk_layernorm": False,
              "max_position_embeddings": 4096},
)  # fmt: skip

STARCODER2 = LLAMA.but(
    name="starcoder2",
    model_types=("starcoder2",),
    gguf=ggml.STARCODER2,
    biases=biases("use_bias", "use_bias"),
    norm=layer_norm("input_layernorm"),
    outputs__norm=layer_norm("norm"),
    defaults={
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "use_bias": True,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
)

COHERE = LLAMA.but(
    name="cohere",
    model_types=("cohere",),
    norm=layer_norm("input_layernorm", bias=False),
    rope=Rope(interleaved=True, theta=5e5),
    variants=(When("use_qk_norm", True, qk_norm=QkNorm(scope="own", centred=True)),),
    outputs__norm=layer_norm("norm", bias=False),
    defaults={
        "layer_norm_eps": 1e-5, "use_qk_norm": False, "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
)  # fmt: skip

GLM4 = LLAMA.but(
    name="glm4",
    model_types=("glm4",),
    biases=biases("attention_bias", False),
    rope=Rope(interleaved=True, fraction=0.5),
    caveats=(OUTPUT_NORM,),
    defaults={
        "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07, "attention_bias": True,
        "max_position_embeddings": 131072,
    },
)  # fmt: skip

GLM = GLM4.but(name="glm", model_types=("glm",), caveats=())

GLM4_MOE = LLAMA.but(
    name="glm4_moe",
    model_types=("glm4_moe",),
    biases=biases("attention_bias", False),
    rope=Rope(fraction=0.5),
    variants=(When("use_qk_norm", True, qk_norm=QkNorm()),),
    defaults={
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "use_qk_norm": False, "max_position_embeddings": 131072
    },
)  # fmt: skip

GPT_OSS = LLAMA.but(
    name="gpt_oss",
    model_types=("gpt_oss",),
    sinks="self_attn.sinks",
    rope=Rope(theta=150000.0),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
)  # fmt: skip

DEEPSEEK_V2 = LLAMA.but(
    name="deepseek_v2",
    model_types=("deepseek_v2",),
    layout=latent,
    query="self_attn.q_a_proj",
    key="self_attn.kv_a_proj_with_mqa",
    value="self_attn.kv_b_proj",
    others=("self_attn.q_proj", "self_attn.q_b_proj", "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"),
    scale=deepseek_scale,
    rope=Rope(interleaved=True, start_key="qk_nope_head_dim", dims_key="qk_rope_head_dim"),
    kv_heads=(),
    head_dim=("qk_nope_head_dim", "qk_rope_head_dim"),
    defaults={
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128
    },
)  # fmt: skip

DEEPSEEK_V3 = DEEPSEEK_V2.but(
    name="deepseek_v3",
    model_types=("deepseek_v3",),
    rope__interleaved_key="rope_interleave",
    defaults={"rope_interleave": True, "max_position_embeddings": 4096},
)

LLAMA_DECODERS = (
    LLAMA, MISTRAL, MIXTRAL, GRANITE, SMOLLM3, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, QWEN3_NEXT, GEMMA, GEMMA2, GEMMA3,
    PHI, PHI3, PHI4_MULTIMODAL, OLMO, OLMO2, OLMO3, STABLELM, STARCODER2, COHERE, GLM, GLM4, GLM4_MOE, GPT_OSS,
    DEEPSEEK_V2, DEEPSEEK_V3,
)  # fmt: skip

"""Decoders within models that see, hear or speak, where they have a type of their own: what the text tokens pass."""

from weightscope.checkpoint.config import Config
from weightscope.families.axes import Sections, contiguous, height_and_width_first, interleaved
from weightscope.families.cells import Biases, Inputs, QkNorm, biases, rms_norm
from weightscope.families.family import When
from weightscope.families.layouts import separate, stacked
from weightscope.families.rope import Rope
from weightscope.families.rows.alike import ERNIE4_5_MOE
from weightscope.families.rows.apart import HUNYUAN
from weightscope.families.rows.encoders import MODERNBERT
from weightscope.families.rows.llama import GLM4, GRANITE, LLAMA, OUTPUT_NORM, QWEN2, QWEN3, QWEN3_MOE, QWEN3_NEXT


def mllama_layers(config: Config, n_layers: int) -> tuple[str, ...]:
    """Some layers attend to the image and to nothing else."""
    crossing = config.get("cross_attention_layers")
    if not isinstance(crossing, list):
        raise config.error("cross_attention_layers", "a list of layers")
    return tuple("cross_attention" if i in crossing else "full_attention" for i in range(n_layers))


OF_QWEN2, OF_GLM = Sections(contiguous, (16, 24, 24)), Sections(contiguous, (8, 12, 12))
OF_QWEN3, OF_QWEN3_5 = Sections(interleaved, (24, 20, 20)), Sections(interleaved, (11, 11, 10))

QWEN2_VL = QWEN2.but(
    name="qwen2_vl",
    model_types=("qwen2_vl_text", "qwen2_5_vl_text"),
    rope=Rope(theta=1e6, sections=OF_QWEN2),
    head_dim=(),
    defaults={
        "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
    },
)  # fmt: skip

QWEN2_5_OMNI = QWEN2.but(
    name="qwen2_5_omni",
    model_types=("qwen2_5_omni_text",),
    rope=Rope(theta=1e6, sections=OF_QWEN2),
    defaults={
        "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
)  # fmt: skip

QWEN2_5_OMNI_TALKER = QWEN2_5_OMNI.but(
    name="qwen2_5_omni_talker",
    model_types=("qwen2_5_omni_talker",),
    inputs__width="embedding_size",
    outputs=None,
    defaults={"head_dim": 128, "tie_word_embeddings": False, "embedding_size": 3584},
)

QWEN3_VL = QWEN3.but(
    name="qwen3_vl",
    model_types=("qwen3_vl_text",),
    rope=Rope(theta=5e5, sections=OF_QWEN3),
    defaults={
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 128000,
    },
)  # fmt: skip

QWEN3_VL_MOE = QWEN3_VL.but(
    name="qwen3_vl_moe",
    model_types=("qwen3_vl_moe_text",),
    defaults={
        "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
        "tie_word_embeddings": True,
    },
)  # fmt: skip

QWEN3_OMNI_MOE = QWEN3_MOE.but(
    name="qwen3_omni_moe",
    model_types=("qwen3_omni_moe_text",),
    rope=Rope(theta=1e6, sections=OF_QWEN3),
    defaults={"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 28},
)

QWEN3_OMNI_MOE_TALKER = QWEN3_MOE.but(
    name="qwen3_omni_moe_talker",
    model_types=("qwen3_omni_moe_talker_text",),
    inputs__tokens="codec_embedding.weight",
    outputs=None,  # it makes codes of sounds
    defaults={"hidden_size": 1024, "num_hidden_layers": 20, "num_attention_heads": 16, "num_key_value_heads": 2},
)

QWEN3_OMNI_MOE_CODES = QWEN3.but(
    name="qwen3_omni_moe_code_predictor",
    model_types=("qwen3_omni_moe_talker_code_predictor",),
    inputs__tokens="codec_embedding.0.weight",
    outputs=None,
    defaults={"hidden_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 16, "num_key_value_heads": 8},
)

QWEN3_5 = QWEN3_NEXT.but(
    name="qwen3_5",
    model_types=("qwen3_5_text",),
    rope__sections=OF_QWEN3_5,
    defaults={
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
    },
)  # fmt: skip

QWEN3_5_MOE = QWEN3_NEXT.but(
    name="qwen3_5_moe",
    model_types=("qwen3_5_moe_text",),
    rope__sections=OF_QWEN3_5,
    defaults={"hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16},
)

EMU3 = LLAMA.but(
    name="emu3",
    model_types=("emu3_text_model",),
    rope=Rope(theta=1e6),
    defaults={
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 9216,
    },
)  # fmt: skip

DEEPSEEK_OCR2 = LLAMA.but(
    name="deepseek_ocr2",
    model_types=("deepseek_ocr2_text",),
    defaults={"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
)

UNLIMITED_OCR = LLAMA.but(
    name="unlimited_ocr",
    model_types=("unlimited_ocr_text",),
    defaults={
        "hidden_size": 1280, "num_hidden_layers": 12, "num_attention_heads": 10, "head_dim": 128,
        "max_position_embeddings": 32768,
    },
)  # fmt: skip

GRANITE_DOCLING = GRANITE.but(
    name="granite_docling",
    model_types=("granite_docling_text",),
    defaults={
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625, "tie_word_embeddings": True,
    },
)  # fmt: skip

GRANITE4_VISION = GRANITE.but(
    name="granite4_vision",
    model_types=("granite4_vision_text",),
    defaults={"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
)

COSMOS3_EDGE = LLAMA.but(
    name="cosmos3_edge",
    model_types=("cosmos3_edge_text",),
    rope=Rope(theta=1e8, sections=OF_QWEN3),
    defaults={
        "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
    },
)  # fmt: skip

# As it is published, and within its wrapper.
COSMOS3_EDGE_PUBLISHED = COSMOS3_EDGE.but(
    query="self_attn.to_q", key="self_attn.to_k", value="self_attn.to_v", output="self_attn.to_out"
)

GLM4V = GLM4.but(
    name="glm4v",
    model_types=("glm4v_text",),
    biases=biases(True, False),
    rope=Rope(interleaved=True, fraction=1.0, sections=OF_GLM),
    head_dim=(),
    defaults={
        "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32, "rms_norm_eps": 1e-5,
        "head_dim": None, "max_position_embeddings": 32768,
    },
)  # fmt: skip

GLM_OCR = GLM4V.but(
    name="glm_ocr",
    model_types=("glm_ocr_text",),
    biases=Biases(),
    head_dim=("head_dim",),
    defaults={
        "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
)  # fmt: skip

GLM4V_MOE = LLAMA.but(
    name="glm4v_moe",
    model_types=("glm4v_moe_text",),
    biases=biases("attention_bias", False),
    rope=Rope(fraction=0.5, sections=OF_GLM),
    defaults={
        "hidden_size": 4096, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "attention_bias": True, "max_position_embeddings": 65536,
    },
)  # fmt: skip

GLM_IMAGE = GLM4V_MOE.but(
    name="glm_image",
    model_types=("glm_image_text",),
    rope=Rope(fraction=1.0, sections=OF_GLM),
    caveats=(OUTPUT_NORM,),
    defaults={
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2,
        "max_position_embeddings": 131072,
    },
)  # fmt: skip

PADDLEOCR_VL = LLAMA.but(
    name="paddleocr_vl",
    model_types=("paddleocr_vl_text",),
    biases=biases("use_bias", "use_bias"),
    rope=Rope(theta=5e5, sections=OF_QWEN2),
    defaults={
        "hidden_size": 1024, "num_hidden_layers": 18, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 128, "rms_norm_eps": 1e-5, "use_bias": False, "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
)  # fmt: skip

ERNIE4_5_VL = ERNIE4_5_MOE.but(
    name="ernie4_5_vl_moe",
    model_types=("ernie4_5_vl_moe_text",),
    rope__sections=Sections(height_and_width_first, (22, 22, 20)),
    defaults={
        "hidden_size": 2560, "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4,
    },
)  # fmt: skip

HUNYUAN_VL = HUNYUAN.but(
    name="hunyuan_vl",
    model_types=("hunyuan_vl_text",),
    defaults={"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "tie_word_embeddings": True},
)

CHAMELEON = LLAMA.but(
    name="chameleon",
    model_types=("chameleon",),
    qk_norm=QkNorm(scope="own", centred=True, bias=True, eps=1e-5),
    head_dim=(),
    variants=(When("swin_norm", True, norm=None, caveats=(OUTPUT_NORM,)),),
    defaults={"rms_norm_eps": 1e-5, "swin_norm": False, "max_position_embeddings": 4096},
)

MOLMO2 = LLAMA.but(
    name="molmo2",
    model_types=("molmo2_text",),
    layout=stacked,
    query="self_attn.att_proj",
    key="self_attn.att_proj",
    value="self_attn.att_proj",
    output="self_attn.attn_out",
    biases=biases("attention_bias", False),
    norm=rms_norm("attn_norm"),
    inputs=Inputs(tokens="wte.embedding"),
    outputs=None,
    rope=Rope(scaled_in="rope_scaling_layers"),
    qk_norm=QkNorm(),
    variants=(
        When("qk_norm_type", "olmo", qk_norm=QkNorm(scope="joint")),
        When("norm_after", True, norm=None, caveats=(OUTPUT_NORM,)),
    ),
    defaults={
        "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "qk_norm_type": "qwen3", "norm_after": False, "max_position_embeddings": 36864,
    },
)  # fmt: skip

MODERNBERT_DECODER = MODERNBERT.but(
    name="modernbert-decoder",
    model_types=("modernbert-decoder",),
    layout=separate,
    query="attn.q_proj",
    key="attn.k_proj",
    value="attn.v_proj",
)

MLLAMA = LLAMA.but(
    name="mllama",
    model_types=("mllama_text_model",),
    rope=Rope(theta=5e5),
    biases=Biases(),
    head_dim=(),
    layer_types=mllama_layers,
    attention_types=("full_attention",),
    defaults={
        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
        "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
    },
)  # fmt: skip

EVOLLA = LLAMA.but(
    name="evolla",
    model_types=("evolla", "EvollaModel"),
    rope=Rope(theta=5e5),
    defaults={
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
    },
)  # fmt: skip

SEEING = (
    QWEN2_VL, QWEN2_5_OMNI, QWEN2_5_OMNI_TALKER, QWEN3_VL, QWEN3_VL_MOE, QWEN3_OMNI_MOE, QWEN3_OMNI_MOE_TALKER,
    QWEN3_OMNI_MOE_CODES, QWEN3_5, QWEN3_5_MOE, EMU3, DEEPSEEK_OCR2, UNLIMITED_OCR, GRANITE_DOCLING, GRANITE4_VISION,
    COSMOS3_EDGE, COSMOS3_EDGE_PUBLISHED, GLM4V, GLM_OCR, GLM4V_MOE, GLM_IMAGE, PADDLEOCR_VL, ERNIE4_5_VL, HUNYUAN_VL,
    CHAMELEON, MOLMO2, MODERNBERT_DECODER, MLLAMA, EVOLLA,
)  # fmt: skip

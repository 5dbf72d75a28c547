"""Vision towers of language models that see: patches in any number, most of them rotated by row and column."""

from weightscope.attention.rotation import COLUMN, FRAME, ROW
from weightscope.families.cells import Inputs, QkNorm, biases, layer_norm, rms_norm
from weightscope.families.family import Family, When
from weightscope.families.grid_rope import GridRope, in_turn, odd_and_even, one_after_another
from weightscope.families.layouts import packed, separate, stacked

LAYER_SCALE = "the layer's learned scale: {} multiplies attention's output where it is added to the stream"

# Qwen's line: blocks with Q, K and V in one tensor, patches in the order of the merger's 2 x 2 blocks.
QWEN3_VL_VISION = Family(
    name="qwen3_vl_vision",
    model_types=(
        "qwen3_vl_vision", "qwen3_vl_moe_vision", "qwen3_5_vision", "qwen3_5_moe_vision", "qwen4_exp_vision",
        "qwen3_omni_moe_vision_encoder", "cohere_compass_vision",
    ),
    tower="vision",
    prefixes=("", "visual.", "model.visual."),
    layer="blocks.{i}.",
    layout=stacked,
    query="attn.qkv",
    key="attn.qkv",
    value="attn.qkv",
    output="attn.proj",
    biases=biases(True, True),
    norm=layer_norm("norm1", eps=1e-6),
    inputs=Inputs(),
    rope=GridRope(merge="spatial_merge_size"),
    keys={"n_layers": ("depth", "num_hidden_layers"), "n_heads": ("num_heads", "num_attention_heads")},
    defaults={"spatial_merge_size": 2},
)  # fmt: skip

QWEN2_VL_VISION = QWEN3_VL_VISION.but(
    name="qwen2_vl_vision",
    model_types=("qwen2_vl_vision",),
    keys={**QWEN3_VL_VISION.keys, "d_model": ("embed_dim",)},  # hidden_size is the language model's
    defaults={"embed_dim": 1280, "depth": 32, "num_heads": 16},
)

QWEN2_5_VL_VISION = QWEN3_VL_VISION.but(
    name="qwen2_5_vl_vision",
    model_types=("qwen2_5_vl_vision",),
    norm=rms_norm("norm1", eps=1e-6),
    rope=GridRope(merge="spatial_merge_size", window="window_size", window_unit="patch_size"),
    defaults={"patch_size": 14, "window_size": 112},
)

QWEN2_5_OMNI_VISION = QWEN2_5_VL_VISION.but(
    name="qwen2_5_omni_vision",
    model_types=("qwen2_5_omni_vision_encoder",),
    prefixes=("", "visual.", "thinker.visual."),
    layout=separate,
    query="attn.q",
    key="attn.k",
    value="attn.v",
)

EXAONE4_5_VISION = QWEN2_5_VL_VISION.but(
    name="exaone4_5_vision",
    model_types=("exaone4_5_vision",),
    kv_heads=("num_key_value_heads",),
    defaults={"num_key_value_heads": 8},
)

ERNIE4_5_VL_VISION = QWEN3_VL_VISION.but(
    name="ernie4_5_vl_vision",
    model_types=("ernie4_5_vl_moe_vision",),
    norm=layer_norm("norm1"),
    defaults={"rms_norm_eps": 1e-6},
)

GLM4V_VISION = QWEN3_VL_VISION.but(
    name="glm4v_vision",
    model_types=("glm4v_vision", "glm4v_moe_vision"),
    biases=biases("attention_bias", False),
    norm=rms_norm("norm1"),
    defaults={"attention_bias": False, "rms_norm_eps": 1e-5},
)

GLM_OCR_VISION = GLM4V_VISION.but(
    name="glm_ocr_vision",
    model_types=("glm_ocr_vision", "glm5_next_vision"),
    biases=biases("attention_bias", "attention_bias"),
    qk_norm=QkNorm("attn.q_norm", "attn.k_norm"),
    defaults={"attention_bias": True},
)

DOTS_VISION = GLM_OCR_VISION.but(
    name="dots3_note_vision",
    model_types=("dots3_note_vision_encoder",),
    norm=rms_norm("norm_1"),
    defaults={"attention_bias": False},
)

# As it is published, and within its wrapper.
DOTS_PUBLISHED_VISION = DOTS_VISION.but(prefixes=("vision_encoder.",), norm=rms_norm("norm_1"))

GLM_IMAGE_VISION = QWEN3_VL_VISION.but(
    name="glm_image_vision",
    model_types=("glm_image_vision",),
    biases=biases("attention_bias", "attention_bias"),
    norm=layer_norm("norm1"),
    rope=None,
    defaults={"attention_bias": True, "layer_norm_eps": 1e-6, "spatial_merge_size": 1},
)

KIMI_VISION = QWEN3_VL_VISION.but(
    name="kimi_k25_vision",
    model_types=("kimi_k25_vision",),
    prefixes=("", "vision_tower.", "model.vision_tower."),
    layer="layers.{i}.",
    layout=separate,
    query="attn.q_proj",
    key="attn.k_proj",
    value="attn.v_proj",
    norm=layer_norm("norm1", eps=1e-5),
    rope=GridRope(in_turn(COLUMN, ROW)),
    keys={},
)

# As it is published, and within its wrapper: Q, K and V in one tensor, neighbours as pairs.
KIMI_PUBLISHED_VISION = KIMI_VISION.but(
    prefixes=("vision_tower.encoder.",),
    layer="blocks.{i}.",
    layout=stacked,
    query="wqkv",
    key="wqkv",
    value="wqkv",
    output="wo",
    norm=layer_norm("norm0", eps=1e-5),
    rope=GridRope(in_turn(COLUMN, ROW), interleaved=True),
)

# What transformers writes of the model without its head.
KIMI_BARE_VISION = KIMI_PUBLISHED_VISION.but(
    prefixes=("vision_tower.",), output="attn.proj", norm=layer_norm("norm1", eps=1e-5)
)

MUSE_VISION = KIMI_VISION.but(
    name="muse_vision",
    model_types=("muse_glimmer_vision", "muse_spark_vision"),
    inputs=Inputs(norm=layer_norm("ln_pre")),
    rope=GridRope(one_after_another(COLUMN, ROW), window="pos_emb_height"),
    defaults={"layer_norm_eps": 1e-5, "pos_emb_height": 32},
)

# SigLIP's line: rotated instead of learned positions, or both.
VIDEO_LLAMA_VISION = KIMI_VISION.but(
    name="video_llama_3_vision",
    model_types=("video_llama_3_vision",),
    layer="encoder.layers.{i}.",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    output="self_attn.out_proj",
    norm=layer_norm("layer_norm1"),
    rope=GridRope(),
    defaults={"layer_norm_eps": 1e-6},
)

PADDLEOCR_VISION = VIDEO_LLAMA_VISION.but(
    name="paddleocr_vl_vision",
    model_types=("paddleocr_vl_vision",),
    prefixes=("vision_model.", "", "visual.vision_model."),
)

COSMOS_VISION = VIDEO_LLAMA_VISION.but(name="cosmos3_edge_vision", model_types=("cosmos3_edge_vision",), rope=None)

# As it is published, and within its wrapper.
COSMOS_PUBLISHED_VISION = COSMOS_VISION.but(
    prefixes=("visual.",), query="self_attn.to_q", key="self_attn.to_k", value="self_attn.to_v"
)

MINIMAX_VISION = VIDEO_LLAMA_VISION.but(
    name="minimax_m3_vl_vision",
    model_types=("minimax_m3_vl_vision",),
    layer="layers.{i}.",
    inputs=Inputs(norm=layer_norm("pre_layrnorm")),
    rope=GridRope(one_after_another(FRAME, ROW, COLUMN), merge="spatial_merge_size"),
    defaults={"layer_norm_eps": 1e-5},
)

HUNYUAN_VISION = VIDEO_LLAMA_VISION.but(
    name="hunyuan_vl_vision",
    model_types=("hunyuan_vl_vision",),
    layer="layers.{i}.",
    output="self_attn.o_proj",
    rope=None,
    defaults={"layer_norm_eps": 1e-5},
)

LFM3_VISION = VIDEO_LLAMA_VISION.but(
    name="lfm3_vl_vision",
    model_types=("lfm3_vl_vision",),
    layer="layers.{i}.",
    biases=biases(False, False),
    norm=rms_norm("operator_norm"),
    qk_norm=QkNorm("self_attn.q_layernorm", "self_attn.k_layernorm"),
    kv_heads=("num_key_value_heads",),
    attention_types=("full_attention",),
    rope=GridRope(theta=1e6, merge="spatial_merge_size"),
    defaults={"norm_eps": 1e-5, "num_key_value_heads": 8},
)

INKLING2_VISION = VIDEO_LLAMA_VISION.but(
    name="inkling2_vision",
    model_types=("inkling2_vision",),
    layer="layers.{i}.",
    norm=layer_norm("layernorm_before"),
    inputs=Inputs(norm=layer_norm("pre_layernorm")),
    rope=GridRope(
        one_after_another(COLUMN, ROW), interleaved=True, prefix=1, merge="spatial_merge_size", origin=1.0
    ),
    leading=(("CLS", 1),),
    caveats=(LAYER_SCALE.format("lambda_1"),),
    defaults={"layer_norm_eps": 1e-5},
)  # fmt: skip

LLAMA4_VISION = VIDEO_LLAMA_VISION.but(
    name="llama4_vision",
    model_types=("llama4_vision_model",),
    prefixes=("", "vision_model."),
    layer="model.layers.{i}.",
    output="self_attn.o_proj",
    norm=layer_norm("input_layernorm", eps=1e-5),
    inputs=Inputs(norm=layer_norm("layernorm_pre", eps=1e-5)),
    rope=GridRope(
        one_after_another(COLUMN, ROW), interleaved=True, image="image_size", suffix=1, origin=1.0  # class token last
    ),
    defaults={"image_size": 448, "patch_size": 14},
)  # fmt: skip

# Tiles of an image, then all of them together in layers whose outputs a learned gate multiplies.
MLLAMA_VISION = LLAMA4_VISION.but(
    name="mllama_vision",
    model_types=("mllama_vision_model",),
    layer="transformer.layers.{i}.",
    biases=biases(False, False),
    norm=layer_norm("input_layernorm"),
    inputs=Inputs(norm=layer_norm("layernorm_pre", eps=1e-5)),
    rope=None,
    keys={"n_heads": ("attention_heads",)},
    defaults={"norm_eps": 1e-5, "attention_heads": 16},
)

MLLAMA_GLOBAL = MLLAMA_VISION.but(
    tower="global",
    layer="global_transformer.layers.{i}.",
    inputs=Inputs(),
    keys={"n_heads": ("attention_heads",), "n_layers": ("num_global_layers",)},
    caveats=(LAYER_SCALE.format("the tanh of gate_attn"),),
)

STEP_VISION = VIDEO_LLAMA_VISION.but(
    name="step3p5_vision",
    model_types=("step3p5_vision",),
    prefixes=("", "vision_model."),
    layer="transformer.resblocks.{i}.",
    layout=packed,
    query="attn.in_proj",
    key="attn.in_proj",
    value="attn.in_proj",
    output="attn.out_proj",
    loose=("attn.in_proj_weight", "attn.in_proj_bias"),
    norm=layer_norm("ln_1"),
    inputs=Inputs(norm=layer_norm("ln_pre")),
    rope=GridRope(one_after_another(COLUMN, ROW), interleaved=True),
    caveats=(LAYER_SCALE.format("ls_1.gamma"),),
    defaults={"layer_norm_eps": 1e-5},
)

PIXTRAL = VIDEO_LLAMA_VISION.but(
    name="pixtral",
    model_types=("pixtral",),
    layer="transformer.layers.{i}.",
    query="attention.q_proj",
    key="attention.k_proj",
    value="attention.v_proj",
    output="attention.o_proj",
    biases=biases(False, False),
    norm=rms_norm("attention_norm", eps=1e-5),
    inputs=Inputs(norm=rms_norm("ln_pre", eps=1e-5)),
    rope=GridRope(odd_and_even),
)

# As Mistral writes it, and Mistral Large 4 is saved.
PIXTRAL_OF_MISTRAL = PIXTRAL.but(
    name="pixtral_of_mistral",
    query="attention.wq",
    key="attention.wk",
    value="attention.wv",
    output="attention.wo",
    rope=GridRope(odd_and_even, interleaved=True),
)

INTERNVL_VISION = VIDEO_LLAMA_VISION.but(
    name="internvl_vision",
    model_types=("internvl_vision",),
    layer="encoder.layer.{i}.",
    query="attention.q_proj",
    key="attention.k_proj",
    value="attention.v_proj",
    output="attention.projection_layer",
    biases=biases("attention_bias", True),
    norm=layer_norm("layernorm_before"),
    inputs=Inputs(positions="embeddings.position_embeddings", positions_batched=True),
    rope=None,
    leading=(("CLS", 1),),
    caveats=(LAYER_SCALE.format("lambda_1"),),
    variants=(
        When("use_qk_norm", True, qk_norm=QkNorm("attention.q_norm", "attention.k_norm", scope="joint", eps=1e-6)),
        When("norm_type", "rms_norm", norm=rms_norm("layernorm_before")),
        When("use_absolute_position_embeddings", False, inputs=Inputs()),
    ),
    defaults={"attention_bias": False, "use_qk_norm": False, "layer_norm_eps": 1e-6},
)

TOWERS = (
    QWEN3_VL_VISION, QWEN2_VL_VISION, QWEN2_5_VL_VISION, QWEN2_5_OMNI_VISION, EXAONE4_5_VISION, ERNIE4_5_VL_VISION,
    GLM4V_VISION, GLM_OCR_VISION, DOTS_VISION, DOTS_PUBLISHED_VISION, GLM_IMAGE_VISION, KIMI_VISION,
    KIMI_PUBLISHED_VISION, KIMI_BARE_VISION, MUSE_VISION, VIDEO_LLAMA_VISION, PADDLEOCR_VISION, COSMOS_VISION,
    COSMOS_PUBLISHED_VISION, MINIMAX_VISION, HUNYUAN_VISION, LFM3_VISION, INKLING2_VISION, LLAMA4_VISION, MLLAMA_VISION,
    MLLAMA_GLOBAL, STEP_VISION, PIXTRAL, PIXTRAL_OF_MISTRAL, INTERNVL_VISION,
)  # fmt: skip

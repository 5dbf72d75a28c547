"""Encoders of images and films like ViT, CLIP's or DINO's, under other names."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weightscope.attention.rotation import COLUMN, ROW
from weightscope.checkpoint.config import Config
from weightscope.families.cells import Biases, Inputs, Outputs, QkNorm, biases, layer_norm, rms_norm
from weightscope.families.config import ModelConfig
from weightscope.families.family import When
from weightscope.families.grid_rope import GridRope, one_after_another
from weightscope.families.layouts import packed, separate, stacked
from weightscope.families.odd_layouts import loose_biases
from weightscope.families.rows.gpt import GPT2, unscaled
from weightscope.families.rows.towers import INTERNVL_VISION, LAYER_SCALE, VIDEO_LLAMA_VISION
from weightscope.families.rows.vision import DINOV2, DINOV3, VIT

# ViT's own names.
VIT_ALIKE = replace(VIT, defaults={"layer_norm_eps": 1e-12, "qkv_bias": True}).but(
    name="vit_alike",
    model_types=("deit", "vit_mae", "ijepa", "yolos", "dpt", "audio-spectrogram-transformer"),
    prefixes=("", "deit.", "vit.", "ijepa.", "dpt.", "audio_spectrogram_transformer."),
    inputs=Inputs(),
    leading=(),
    images=None,
    in_transformers={},
)

VIVIT = VIT_ALIKE.but(
    name="vivit", model_types=("vivit", "vit_msn"), prefixes=("", "vivit.", "vit."), defaults={"layer_norm_eps": 1e-6}
)

VITPOSE = VIT_ALIKE.but(name="vitpose_backbone", model_types=("vitpose_backbone",), prefixes=("", "backbone."))

VILT = VIT_ALIKE.but(name="vilt", model_types=("vilt",), prefixes=("", "vilt."))

PIXIO = VIT_ALIKE.but(
    name="pixio",
    model_types=("pixio",),
    prefixes=("",),
    norm=layer_norm("norm1"),
    defaults={"layer_norm_eps": 1e-6},
)

VIDEOMAE = VIT_ALIKE.but(
    name="videomae",
    model_types=("videomae",),
    prefixes=("", "videomae."),
    layout=loose_biases,
    biases=Biases("qv_bias", False, "qv_bias", True),
    loose=("attention.attention.q_bias", "attention.attention.v_bias"),
    defaults={"qv_bias": True},
)

# DINO's names, and its layer scale.
RADIO = replace(DINOV2, defaults={"layer_norm_eps": 1e-6, "qkv_bias": True}).but(
    name="radio",
    model_types=("radio",),
    prefixes=("radio_model.model.", ""),
    layer="blocks.{i}.",
    layout=stacked,
    query="attn.qkv",
    key="attn.qkv",
    value="attn.qkv",
    output="attn.proj",
    inputs=Inputs(),
    leading=(),
    images=None,
)

TIPS_VISION = RADIO.but(
    name="tipsv2_vision",
    model_types=("tipsv2_vision_model",),
    prefixes=("", "vision_encoder."),
    output_scale="ls1.gamma",
)

EOMT = RADIO.but(
    name="eomt",
    model_types=("eomt", "videomt"),
    prefixes=("",),
    layer="layers.{i}.",
    layout=separate,
    query="attention.q_proj",
    key="attention.k_proj",
    value="attention.v_proj",
    output="attention.out_proj",
    biases=biases(True, True),
)

RF_DETR_DINOV2 = EOMT.but(
    name="rf_detr_dinov2",
    model_types=("rf_detr_dinov2",),
    layer="layer.{i}.",
    output="attention.o_proj",
    biases=biases("qkv_bias", True),
)

# As RF-DETR's whole checkpoints name it.
RF_DETR_BACKBONE = RF_DETR_DINOV2.but(
    name="rf_detr_backbone",
    layer="encoder.layer.{i}.",
    query="attention.attention.query",
    key="attention.attention.key",
    value="attention.attention.value",
    output="attention.output.dense",
)

LW_DETR_VIT = RF_DETR_DINOV2.but(
    name="lw_detr_vit",
    model_types=("lw_detr_vit",),
    norm=layer_norm("layernorm_before"),
    biases=Biases("qkv_bias", False, "qkv_bias", True),
    output_scale="",
    caveats=(LAYER_SCALE.format("gamma_1"),),
)
# As checkpoints of LW-DETR have it.
LW_DETR_BACKBONE = LW_DETR_VIT.but(
    prefixes=("backbone.backbone.", "model.backbone.backbone."),
    layer="encoder.layer.{i}.",
    query="attention.attention.query",
    key="attention.attention.key",
    value="attention.attention.value",
    output="attention.output",
)

# CLIP's and SigLIP's names, with and without a class token.
SIGLIP_ALIKE_VISION = VIDEO_LLAMA_VISION.but(
    name="siglip_alike_vision",
    model_types=(
        "phi4_multimodal_vision", "granite_docling_vision", "minicpmv4_6_vision", "minicpmv4_7_vision",
        "minicpm_ocr_vision",
    ),
    prefixes=("", "vision_model.", "model.vision_model."),
    rope=None,
)  # fmt: skip

IDEFICS_VISION = SIGLIP_ALIKE_VISION.but(
    name="idefics_vision",
    model_types=("idefics_vision",),
    inputs=Inputs(norm=layer_norm("pre_layrnorm")),
    leading=(("CLS", 1),),
    defaults={"layer_norm_eps": 1e-5},
)

JANUS_VISION = SIGLIP_ALIKE_VISION.but(
    name="janus_vision",
    model_types=("janus_vision_model",),
    output="self_attn.projection_layer",
    biases=biases("attention_bias", True),
    variants=(
        When(
            "use_qk_norm",
            True,
            qk_norm=QkNorm("self_attn.q_norm", "self_attn.k_norm", scope="joint", centred=True, bias=True, eps=1e-5),
        ),
    ),
    defaults={"attention_bias": True, "use_qk_norm": False},
)


def heads_of_64(config: Config) -> Mapping[str, Any]:
    """As many heads of 64 dimensions as make the width; the config does not count them."""
    return {"num_attention_heads": config.size("hidden_size") // 64}


BRIDGETOWER_VISION = IDEFICS_VISION.but(
    name="bridgetower_vision",
    model_types=("bridgetower_vision_model",),
    prefixes=("visual.", "", "vision_model.visual."),
    layer="transformer.resblocks.{i}.",
    layout=packed,
    query="attn.in_proj",
    key="attn.in_proj",
    value="attn.in_proj",
    output="attn.out_proj",
    loose=("attn.in_proj_weight", "attn.in_proj_bias"),
    norm=layer_norm("ln_1"),
    inputs=Inputs(norm=layer_norm("ln_pre")),
    derived=heads_of_64,
)

UNLIMITED_OCR_VISION = IDEFICS_VISION.but(
    name="unlimited_ocr_vision",
    model_types=("unlimited_ocr_vision_encoder",),
    prefixes=("", "vision_encoder."),
    layer="transformer.layers.{i}.",
    layout=stacked,
    query="self_attn.qkv_proj",
    key="self_attn.qkv_proj",
    value="self_attn.qkv_proj",
)

MOLMO2_VISION = SIGLIP_ALIKE_VISION.but(
    name="molmo2_vision",
    model_types=("molmo2_vision",),
    layer="layers.{i}.",
    output="self_attn.o_proj",
    head_dim=("head_dim",),
    kv_heads=("num_key_value_heads",),
)

OVIS2_VISION = SIGLIP_ALIKE_VISION.but(
    name="ovis2_vision",
    model_types=("ovis2_vision",),
    prefixes=("transformer.", ""),
    query="attention.q_proj",
    key="attention.k_proj",
    value="attention.v_proj",
    output="attention.out_proj",
    biases=biases("qkv_bias", "qkv_bias"),
    norm=rms_norm("rms_norm1"),
    defaults={"qkv_bias": False, "rms_norm_eps": 1e-5},
)

QIANFAN_VISION = INTERNVL_VISION.but(
    name="qianfan_ocr_vision",
    model_types=("qianfan_ocr_vision",),
    prefixes=("", "vision_tower."),
    layer="layers.{i}.",
    defaults={"attention_bias": True},
)

# As it is published, and within its wrapper: Q, K and V in one tensor.
QIANFAN_PUBLISHED_VISION = QIANFAN_VISION.but(
    prefixes=("vision_tower.encoder.", "vision_model.encoder."),
    layout=stacked,
    query="attn.qkv",
    key="attn.qkv",
    value="attn.qkv",
    output="attn.proj",
    norm=layer_norm("norm1"),
    inputs=Inputs(),
)

# Readers of rendered text: T5's norm, no biases.
PIX2STRUCT_VISION = SIGLIP_ALIKE_VISION.but(
    name="pix2struct_vision",
    model_types=("pix2struct_vision_model",),
    prefixes=("", "encoder."),
    layer="encoder.layer.{i}.",
    query="attention.query",
    key="attention.key",
    value="attention.value",
    output="attention.output",
    biases=biases(False, False),
    norm=rms_norm("pre_attention_layer_norm"),
    head_dim=("d_kv",),
    scale=unscaled,
)

MGP_STR = VIT_ALIKE.but(
    name="mgp-str",
    model_types=("mgp-str",),
    prefixes=("mgp_str.", ""),
    layer="encoder.blocks.{i}.",
    layout=stacked,
    query="attn.qkv",
    key="attn.qkv",
    value="attn.qkv",
    output="attn.proj",
    norm=layer_norm("norm1"),
    defaults={"layer_norm_eps": 1e-5},
)

GEMMA4_VISION = SIGLIP_ALIKE_VISION.but(
    name="gemma4_vision",
    model_types=("gemma4_vision",),
    prefixes=("", "vision_tower.", "model.vision_tower."),
    query="self_attn.q_proj.linear",
    key="self_attn.k_proj.linear",
    value="self_attn.v_proj.linear",
    output="self_attn.o_proj.linear",
    biases=biases(False, False),
    norm=rms_norm("input_layernorm"),
    qk_norm=QkNorm(),
    values_normed=True,
    head_dim=("head_dim",),
    kv_heads=("num_key_value_heads",),
    rope=GridRope(one_after_another(COLUMN, ROW), blocks=2, theta=100.0),
    scale=unscaled,
    variants=(When("use_clipped_linears", True, refused="projections clipped to ranges stored beside them"),),
    defaults={"rms_norm_eps": 1e-6, "use_clipped_linears": False},
)


def groups_by_layer(config: ModelConfig, layer: int) -> Mapping[str, Any]:
    """Sapiens 2: key-value heads of every layer, listed; or as many as query heads in the first and last layers."""
    listed = config.get("num_key_value_heads_per_layer")
    if listed is not None:
        if not isinstance(listed, list) or len(listed) <= layer:
            raise config.error("num_key_value_heads_per_layer", "a list with every layer's number")
        return {"num_key_value_heads": listed[layer]}
    first, last = (config.count(f"num_{end}_full_attention_layers") for end in ("first", "last"))
    whole = layer < first or layer >= config.n_layers - last
    return {"num_key_value_heads": config.n_heads if whole else config.size("num_key_value_attention_heads")}


SAPIENS2 = DINOV3.but(
    name="sapiens2",
    model_types=("sapiens2",),
    prefixes=("", "sapiens2.", "backbone."),
    layer="blocks.{i}.",
    query="attn.wq",
    key="attn.wk",
    value="attn.wv",
    output="attn.proj",
    norm=rms_norm("ln1"),
    output_scale="attn.gamma.weight",
    qk_norm=QkNorm("attn.q_norm", "attn.k_norm"),
    kv_heads=("num_key_value_heads",),
    sizes=groups_by_layer,
    images=None,
    variants=(When("use_qk_norm", False, qk_norm=None),),
    defaults={
        "rms_norm_eps": 1e-6, "key_bias": True, "num_register_tokens": 8, "use_qk_norm": True,
        "num_first_full_attention_layers": 8, "num_last_full_attention_layers": 8, "num_key_value_attention_heads": 8,
    },
)  # fmt: skip

IMAGEGPT = GPT2.but(
    name="imagegpt", model_types=("imagegpt",), gguf=None, norm=rms_norm("ln_1"), outputs=Outputs(rms_norm("ln_f"))
)

VIT_LINE = (
    VIT_ALIKE, VIVIT, VITPOSE, VILT, PIXIO, VIDEOMAE, RADIO, TIPS_VISION, EOMT, RF_DETR_DINOV2, RF_DETR_BACKBONE,
    LW_DETR_VIT, LW_DETR_BACKBONE, SIGLIP_ALIKE_VISION, IDEFICS_VISION, JANUS_VISION, BRIDGETOWER_VISION,
    UNLIMITED_OCR_VISION, MOLMO2_VISION, OVIS2_VISION, QIANFAN_VISION, QIANFAN_PUBLISHED_VISION, PIX2STRUCT_VISION,
    MGP_STR, GEMMA4_VISION, SAPIENS2, IMAGEGPT,
)  # fmt: skip

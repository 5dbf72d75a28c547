"""Models that detect things in images as DETR does, and cross otherwise: positions are added within every layer.

Deformable attention, in which a query looks at a few places that it chooses, has no score of every pair: where layers
cross so, only their self-attention has a row.
"""

from weightscope.checkpoint.config import Config
from weightscope.families.cells import Inputs, Memory, biases, layer_norm
from weightscope.families.family import When
from weightscope.families.layouts import packed
from weightscope.families.rows.detr import DETR_DECODER, DETR_ENCODER, OF_DECODER, OF_ENCODER

DEFORMABLE = (
    "deformable cross-attention, which looks at a few places that each query chooses and has no scores of pairs, "
    "stands beside these heads and is not read"
)


def one_level(config: Config, n_layers: int) -> tuple[str, ...]:
    """The encoder attends on one level of the image; others would be stacks of their own under one name."""
    levels = config.get("encode_proj_layers")
    if not isinstance(levels, list) or len(levels) != 1:
        raise config.error("encode_proj_layers", "a list of one level, the one on which the encoder attends")
    return ("full_attention",) * n_layers


PRE_NORM = When("normalize_before", True, norm=layer_norm("self_attn_layer_norm", eps=1e-5), closing=None)
RT_DETR_TYPES = ("rt_detr", "rt_detr_v2", "d_fine", "pp_doclayout_v2", "pp_doclayout_v3", "pp_doclayout_v4")

RT_DETR_ENCODER = DETR_ENCODER.but(
    name="rt_detr",
    model_types=RT_DETR_TYPES,
    layer="encoder.encoder.0.layers.{i}.",
    keys=OF_ENCODER | {"d_model": ("encoder_hidden_dim",)},
    layer_types=one_level,
    variants=(PRE_NORM,),
    defaults={"encode_proj_layers": [2], "normalize_before": False, "encoder_hidden_dim": 256},
)

RT_DETR_DECODER = DETR_DECODER.but(name="rt_detr", model_types=RT_DETR_TYPES, caveats=(DEFORMABLE,))

DEIMV2_ENCODER = RT_DETR_ENCODER.but(
    name="deimv2", model_types=("deimv2",), layer="encoder.aifi.0.layers.{i}.", output="self_attn.o_proj"
)
DEIMV2_DECODER = RT_DETR_DECODER.but(name="deimv2", model_types=("deimv2",), output="self_attn.o_proj")

DEFORMABLE_DECODER = RT_DETR_DECODER.but(name="deformable_detr", model_types=("deformable_detr",))

RF_DETR = DEFORMABLE_DECODER.but(
    name="rf_detr",
    model_types=("rf_detr",),
    layer="transformer.decoder.layers.{i}.",
    layout=packed,
    query="self_attn.in_proj",
    key="self_attn.in_proj",
    value="self_attn.in_proj",
    loose=("self_attn.in_proj_weight", "self_attn.in_proj_bias"),
    closing=layer_norm("norm3", eps=1e-5),
    keys=OF_DECODER | {"n_heads": ("decoder_self_attention_heads",)},
    variants=(When("attention_bias", False, refused="projections without biases in one tensor"),),
    defaults={"attention_bias": True},
)

LW_DETR = DEFORMABLE_DECODER.but(
    name="lw_detr",
    model_types=("lw_detr",),
    output="self_attn.o_proj",
    biases=biases("attention_bias", "attention_bias"),
    closing=layer_norm("layer_norm", eps=1e-5),
    keys=RF_DETR.keys,
    defaults={"attention_bias": True},
)

GROUNDING_DECODER = DEFORMABLE_DECODER.but(
    name="grounding-dino",
    model_types=("grounding-dino", "mm-grounding-dino"),
    query="self_attn.query",
    key="self_attn.key",
    value="self_attn.value",
    output="self_attn.out_proj",
)

GROUNDING_CROSS = GROUNDING_DECODER.but(
    tower="text_cross",
    query="encoder_attn_text.query",
    key="encoder_attn_text.key",
    value="encoder_attn_text.value",
    output="encoder_attn_text.out_proj",
    memory=Memory(),
    added=("queries",),
)


def half_the_heads(config: Config) -> dict[str, int]:
    """The encoder's attention of text has half as many heads as that of the image."""
    return {"text_enhancer_heads": config.size("encoder_attention_heads") // 2}


GROUNDING_TEXT = GROUNDING_DECODER.but(
    tower="text_enhancer",
    layer="encoder.layers.{i}.text_enhancer_layer.",
    closing=None,
    keys=OF_ENCODER | {"n_heads": ("text_enhancer_heads",)},
    derived=half_the_heads,
    caveats=("deformable attention of the image, and fusion of image and text, stand beside these heads, not read",),
)


def of_fusion(config: Config) -> dict[str, int]:
    """Image and text meet in half the heads of the encoder, which share half of its feed-forward network's width."""
    heads = config.size("encoder_attention_heads") // 2
    return {"fusion_heads": heads, "fusion_head_dim": config.size("encoder_ffn_dim") // 2 // max(1, heads)}


# One matrix of scores, and a softmax each way: over the text for each place of the image, and over the image.
GROUNDING_TO_TEXT, GROUNDING_TO_IMAGE = (
    GROUNDING_DECODER.but(
        tower=tower,
        layer="encoder.layers.{i}.fusion_layer.",
        query=f"attn.{own}_proj",
        key=f"attn.{other}_proj",
        value=f"attn.values_{other}_proj",
        output=f"attn.out_{own}_proj",
        beside=(f"attn.values_{own}_proj", f"attn.out_{other}_proj"),
        norm=layer_norm(f"layer_norm_{own}"),
        memory=Memory(layer_norm(f"layer_norm_{other}")),
        output_scale=f"{own}_param",
        loose=(f"{own}_param",),
        closing=None,
        added=(),
        inputs=Inputs(more=more),
        keys=OF_ENCODER | {"n_heads": ("fusion_heads",)},
        head_dim=("fusion_head_dim",),
        derived=of_fusion,
        defaults={"layer_norm_eps": 1e-5},
    )
    for tower, own, other, more in (
        ("image_to_text", "vision", "text", "an image"), ("text_to_image", "text", "vision", "text"),
    )
)  # fmt: skip

SAM3_ENCODER = DETR_ENCODER.but(
    name="sam3",
    model_types=("sam3_detr_encoder", "sam3_lite_text_detr_encoder"),
    prefixes=("detr_encoder.", "detector_model.detr_encoder.", ""),
    layer="layers.{i}.",
    output="self_attn.o_proj",
    norm=layer_norm("layer_norm1", eps=1e-5),
    closing=None,
    keys={},
)

SAM3_ENCODER_CROSS = SAM3_ENCODER.but(
    tower="encoder_cross",
    query="cross_attn.q_proj",
    key="cross_attn.k_proj",
    value="cross_attn.v_proj",
    output="cross_attn.o_proj",
    norm=layer_norm("layer_norm2", eps=1e-5),
    memory=Memory(),
    added=(),
)

SAM3_DECODER = SAM3_ENCODER.but(
    model_types=("sam3_detr_decoder", "sam3_lite_text_detr_decoder"),
    tower="decoder",
    prefixes=("detr_decoder.", "detector_model.detr_decoder.", ""),
    inputs=DETR_DECODER.inputs,
    norm=None,
    closing=layer_norm("mlp_layer_norm", eps=1e-5),
)

SAM3_TEXT_CROSS, SAM3_VISION_CROSS = (
    SAM3_DECODER.but(
        tower=f"{of}_cross", query=f"{of}_cross_attn.q_proj", key=f"{of}_cross_attn.k_proj",
        value=f"{of}_cross_attn.v_proj", output=f"{of}_cross_attn.o_proj", memory=Memory(), added=added, refused=why,
    )
    for of, added, why in (
        ("text", ("queries",), ""),
        ("vision", ("queries", "keys"), "a bias of scores that a network makes of the boxes predicted so far"),
    )
)  # fmt: skip

DETECTING = (
    RT_DETR_DECODER, RT_DETR_ENCODER, DEIMV2_DECODER, DEIMV2_ENCODER, DEFORMABLE_DECODER, RF_DETR, LW_DETR,
    GROUNDING_DECODER, GROUNDING_CROSS, GROUNDING_TEXT, GROUNDING_TO_TEXT, GROUNDING_TO_IMAGE, SAM3_DECODER,
    SAM3_TEXT_CROSS, SAM3_VISION_CROSS, SAM3_ENCODER, SAM3_ENCODER_CROSS,
)  # fmt: skip

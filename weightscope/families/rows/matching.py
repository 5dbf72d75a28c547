"""Models that match images, sounds and videos with text: their towers, where those are none that others have."""

from weightscope.families.cells import Biases, Inputs, Memory, QkNorm, StoredNorm, biases, layer_norm, rms_norm
from weightscope.families.layouts import packed, stacked
from weightscope.families.rows.encoders import BERT, ROBERTA
from weightscope.families.rows.seeing import QWEN3_VL
from weightscope.families.rows.vision import CLIP_TEXT, CLIP_VISION, SIGLIP_TEXT, SIGLIP_VISION, VIT

LIKE_CLIP_TEXT = CLIP_TEXT.but(
    name="clip_text",
    model_types=(
        "clipseg_text_model", "metaclip_2_text_model", "xclip_text_model",
    ),
    nested="",
)  # fmt: skip

GROUPVIT_TEXT = LIKE_CLIP_TEXT.but(
    name="groupvit_text",
    model_types=("groupvit_text_model",),
    defaults={"hidden_size": 256, "num_attention_heads": 4},
)

OWL_TEXT = LIKE_CLIP_TEXT.but(
    name="owl_text", model_types=("owlvit_text_model", "owlv2_text_model"), defaults={"max_position_embeddings": 16}
)

LIKE_CLIP_VISION = CLIP_VISION.but(
    name="clip_vision",
    model_types=(
        "altclip_vision_model", "chinese_clip_vision_model", "clipseg_vision_model", "metaclip_2_vision_model",
    ),
    nested="",
    images=None,
)  # fmt: skip

GIT_VISION = LIKE_CLIP_VISION.but(name="git_vision", model_types=("git_vision_model",), defaults={"patch_size": 16})

KOSMOS_VISION = LIKE_CLIP_VISION.but(
    name="kosmos_2_vision",
    model_types=("kosmos_2_vision_model",),
    defaults={"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 14},
)

OWL_VISION = LIKE_CLIP_VISION.but(
    name="owlvit_vision",
    model_types=("owlvit_vision_model",),
    inputs__norm=layer_norm("pre_layernorm"),
    defaults={"image_size": 768},
)

OWLV2_VISION = OWL_VISION.but(name="owlv2_vision", model_types=("owlv2_vision_model",), defaults={"patch_size": 16})

XCLIP_VISION = OWL_VISION.but(
    name="xclip_vision",
    model_types=("xclip_vision_model",),
    defaults={"image_size": 224},
    refused="a token of all frames, made within each layer by attention of its own, among its keys",
)

SIGLIP2_TEXT = SIGLIP_TEXT.but(name="siglip2", model_types=("siglip2", "siglip2_text_model"))

SIGLIP2_VISION = SIGLIP_VISION.but(
    name="siglip2",
    model_types=("siglip2", "siglip2_vision_model"),
    inputs=Inputs(),  # positions are resampled to every image's grid
    images=None,
)

IDEFICS2_VISION = SIGLIP2_VISION.but(
    name="idefics2_vision", model_types=("idefics2_vision",), nested="", defaults={"patch_size": 32}
)

IDEFICS3_VISION = IDEFICS2_VISION.but(
    name="idefics3_vision",
    model_types=("idefics3_vision", "smolvlm_vision"),
    defaults={"hidden_size": 1152, "num_attention_heads": 16},
)

BLIP_VISION = LIKE_CLIP_VISION.but(
    name="blip_vision",
    model_types=("blip_vision_model",),
    layout=stacked,
    query="self_attn.qkv",
    key="self_attn.qkv",
    value="self_attn.qkv",
    output="self_attn.projection",
    biases=biases("qkv_bias", True),
    inputs=Inputs(positions="embeddings.position_embedding", positions_batched=True),
    defaults={"qkv_bias": True, "layer_norm_eps": 1e-5, "image_size": 384, "patch_size": 16},
)

BLIP2_VISION = BLIP_VISION.but(
    name="blip_2_vision",
    model_types=("blip_2_vision_model", "instructblip_vision_model", "instructblipvideo_vision_model"),
    defaults={
        "hidden_size": 1408, "num_hidden_layers": 39, "num_attention_heads": 16, "layer_norm_eps": 1e-6,
        "image_size": 224, "patch_size": 14,
    },
)  # fmt: skip

AIMV2_TEXT = CLIP_TEXT.but(
    name="aimv2",
    model_types=("aimv2_text_model",),
    nested="",
    query="attention.q_proj",
    key="attention.k_proj",
    value="attention.v_proj",
    output="attention.out_proj",
    biases=biases("qkv_bias", "qkv_bias"),
    norm=rms_norm("rms_norm1"),
    defaults={
        "hidden_size": 768,
        "num_attention_heads": 6,
        "rms_norm_eps": 1e-5,
        "qkv_bias": False,
    },
)

AIMV2_VISION = AIMV2_TEXT.but(
    model_types=("aimv2_vision_model",),
    tower="vision",
    prefixes=("vision_model.", ""),
    inputs=Inputs(),
    defaults={
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8, "max_position_embeddings": None,
    },
)  # fmt: skip

BERT_TOWER = BERT.but(
    name="bert_text", model_types=("align_text_model", "chinese_clip_text_model"), prefixes=("text_model.", ""),
    tower="text",
)  # fmt: skip

ROBERTA_TOWER = ROBERTA.but(
    name="clap_text",
    model_types=("clap_text_model",),
    prefixes=("text_model.", "text_model.roberta.", "roberta.", ""),
    tower="text",
)

ALTCLIP_TEXT = ROBERTA_TOWER.but(
    name="roberta_text",
    model_types=("altclip_text_model", "bridgetower_text_model"),
    defaults={"layer_norm_eps": 1e-5},
)

FLAVA_VISION = VIT.but(
    name="flava",
    model_types=("flava_image_model",),
    tower="vision",
    prefixes=("flava.image_model.", "image_model.", ""),
    images=None,
    in_transformers={},
)

FLAVA_TEXT = FLAVA_VISION.but(
    model_types=("flava_text_model",),
    tower="text",
    prefixes=("flava.text_model.", "text_model.", ""),
    inputs=BERT.inputs,
    leading=(),
)

FLAVA_BOTH = FLAVA_TEXT.but(
    model_types=("flava_multimodal_model",),
    tower="multimodal",
    prefixes=("flava.multimodal_model.", "multimodal_model.", ""),
    inputs=Inputs(),
)

KOSMOS_TEXT = CLIP_TEXT.but(
    name="kosmos",
    model_types=("kosmos_2_text_model",),
    nested="",
    prefixes=("text_model.model.", "model.", ""),
    layer="layers.{i}.",
    norm=layer_norm("self_attn_layer_norm"),
    sub_norm=layer_norm("self_attn.inner_attn_ln"),
    keys={"n_layers": ("layers",), "d_model": ("embed_dim",), "n_heads": ("attention_heads",)},
    inputs=Inputs(tokens="embed_tokens.weight", more="positions by a formula"),
    defaults={
        "hidden_size": None, "num_hidden_layers": None, "num_attention_heads": None, "max_position_embeddings": 2048,
    },
)  # fmt: skip

KOSMOS25_TEXT = KOSMOS_TEXT.but(
    name="kosmos_2_5",
    model_types=("kosmos_2_5_text_model",),
    sub_norm=None,
    defaults={"max_position_embeddings": 4096},
)

KOSMOS25_VISION = VIT.but(
    name="kosmos_2_5",
    model_types=("kosmos_2_5_vision_model",),
    tower="vision",
    prefixes=("vision_model.",),
    query="attention.query",
    key="attention.key",
    value="attention.value",
    output="attention.output",
    biases=Biases(),
    norm=rms_norm("pre_attention_layer_norm"),
    head_dim=("head_dim",),
    inputs=Inputs(),
    images=None,
    in_transformers={},
    defaults={"layer_norm_eps": 1e-6},
)

CLVP_ENCODER = CLIP_TEXT.but(
    name="clvp",
    model_types=("clvp_encoder",),
    defaults={"hidden_size": 768, "num_hidden_layers": 20, "num_attention_heads": 12},
    nested="",
    layer="layers.{i}.",
    norm=rms_norm("input_rmsnorm"),
    refused="values that are rotated by position",
)

BRIDGED_TEXT = BERT.but(
    name="bridgetower",
    model_types=("bridgetower",),
    tower="text_with_image",
    prefixes=("bridgetower.", ""),
    layer="cross_modal_text_layers.{i}.",
    inputs=Inputs(),
    gguf=None,
    defaults={"layer_norm_eps": 1e-5},
)

BRIDGED_VISION = BRIDGED_TEXT.but(tower="image_with_text", layer="cross_modal_image_layers.{i}.")

BRIDGED_TO_IMAGE = BRIDGED_TEXT.but(
    tower="text_to_image",
    query="crossattention.self.query",
    key="crossattention.self.key",
    value="crossattention.self.value",
    output="crossattention.output.dense",
    beside=("crossattention.output.LayerNorm",),
    memory=Memory(),
    closing=None,
)

BRIDGED_TO_TEXT = BRIDGED_TO_IMAGE.but(tower="image_to_text", layer=BRIDGED_VISION.layer)

TIPS_TEXT = CLIP_TEXT.but(
    name="tipsv2",
    model_types=("tipsv2_text_model",),
    nested="",
    prefixes=("text_encoder.",),
    layer="transformer.resblocks.{i}.",
    layout=packed,
    query="attn.in_proj",
    key="attn.in_proj",
    value="attn.in_proj",
    output="attn.out_proj",
    loose=("attn.in_proj_weight", "attn.in_proj_bias"),
    norm=layer_norm("ln_1"),
    inputs=Inputs(tokens="token_embedding.weight", more="positions by a formula"),
    defaults={"hidden_size": 768, "num_attention_heads": 12, "max_position_embeddings": 64},
)

CLVP_DECODER = CLIP_TEXT.but(
    name="clvp",
    model_types=("clvp_decoder",),
    nested="",
    prefixes=("speech_decoder_model.model.decoder.",),
    layer="layers.{i}.",
    query="attn.q_proj",
    key="attn.k_proj",
    value="attn.v_proj",
    output="attn.out_proj",
    biases=biases("use_attention_bias", True),
    norm=layer_norm("input_layernorm"),
    inputs=Inputs(tokens="input_embeds_layer.weight", positions="position_embeds_layer.weight"),
    tower="decoder",
    defaults={
        "hidden_size": 1024, "num_hidden_layers": 30, "num_attention_heads": 16, "max_position_embeddings": 608,
        "layer_norm_epsilon": 1e-5, "use_attention_bias": True,
    },
)  # fmt: skip

VIDEOPRISM_TEXT = CLIP_TEXT.but(
    name="videoprism",
    model_types=("videoprism_text_model",),
    nested="",
    layer="layers.{i}.",
    query="attention.q_proj",
    key="attention.k_proj",
    value="attention.v_proj",
    output="attention.o_proj",
    biases=biases("qkv_bias", True),
    norm=StoredNorm("layernorm_before", centred=True, bias=True, offset=1.0),
    inputs=Inputs(tokens="token_embedding.weight", more="positions by a formula"),
    softcap="attn_logit_softcapping",
    defaults={
        "hidden_size": 768, "num_attention_heads": 12, "max_position_embeddings": 64, "qkv_bias": True,
        "attn_logit_softcapping": 50.0, "layer_norm_eps": 1e-6,
    },
)  # fmt: skip

VIDEOPRISM_SPACE = VIDEOPRISM_TEXT.but(
    model_types=("videoprism_vision_model",),
    tower="spatial",
    layer="spatial_layers.{i}.",
    keys={"n_layers": ("num_spatial_layers",)},
    inputs=Inputs(),
    defaults={"num_hidden_layers": None, "max_position_embeddings": None},
)

VIDEOPRISM_TIME = VIDEOPRISM_SPACE.but(
    tower="temporal", layer="temporal_layers.{i}.", keys={"n_layers": ("num_temporal_layers",)}
)

VIDEOPRISM_BESIDE = VIDEOPRISM_SPACE.but(
    tower="auxiliary", layer="auxiliary_layers.{i}.", keys={"n_layers": ("num_auxiliary_layers",)}
)

COSMOS3_OMNI = QWEN3_VL.but(
    name="cosmos3_omni",
    model_types=("cosmos3_omni",),
    nested="text_config",
    query="self_attn.to_q",
    key="self_attn.to_k",
    value="self_attn.to_v",
    output="self_attn.to_out",
    qk_norm=QkNorm("self_attn.norm_q", "self_attn.norm_k"),
)

MATCHING = (
    LIKE_CLIP_TEXT, GROUPVIT_TEXT, OWL_TEXT, LIKE_CLIP_VISION, GIT_VISION, KOSMOS_VISION, OWL_VISION, OWLV2_VISION,
    XCLIP_VISION, SIGLIP2_TEXT, SIGLIP2_VISION, IDEFICS2_VISION, IDEFICS3_VISION, BLIP_VISION, BLIP2_VISION,
    AIMV2_TEXT, AIMV2_VISION, BERT_TOWER, ROBERTA_TOWER, ALTCLIP_TEXT, FLAVA_VISION, FLAVA_TEXT,
    FLAVA_BOTH, KOSMOS_TEXT, KOSMOS25_TEXT, KOSMOS25_VISION, CLVP_ENCODER, CLVP_DECODER, BRIDGED_TEXT, BRIDGED_VISION,
    BRIDGED_TO_IMAGE, BRIDGED_TO_TEXT,
    TIPS_TEXT, VIDEOPRISM_TEXT, VIDEOPRISM_SPACE, VIDEOPRISM_TIME,
    VIDEOPRISM_BESIDE, COSMOS3_OMNI,
)  # fmt: skip

"""Vision transformers, and the two towers of models that match images with text."""

from weightscope.families.cells import Biases, Images, Inputs, biases, layer_norm
from weightscope.families.family import Family
from weightscope.families.grid_rope import GridRope
from weightscope.families.layouts import separate

IMAGENET = {"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225)}

VIT = Family(
    name="vit",
    model_types=("vit",),
    prefixes=("vit.", ""),
    layer="encoder.layer.{i}.",
    layout=separate,
    query="attention.attention.query",
    key="attention.attention.key",
    value="attention.attention.value",
    output="attention.output.dense",
    biases=biases("qkv_bias", True),
    norm=layer_norm("layernorm_before"),
    inputs=Inputs(positions="embeddings.position_embeddings", positions_batched=True),
    leading=(("CLS", 1),),
    images=Images("ViTImageProcessor"),
    in_transformers={"layer": "layers.{i}.", "output": "attention.o_proj"},
    defaults={"layer_norm_eps": 1e-12, "qkv_bias": True, "image_size": 224, "patch_size": 16},
)

DINOV2 = VIT.but(
    name="dinov2",
    model_types=("dinov2",),
    prefixes=("dinov2.", ""),
    norm=layer_norm("norm1"),
    in_transformers={},
    output_scale="layer_scale1.lambda1",
    images=Images("BitImageProcessor", IMAGENET, any_size=True),
    defaults={"layer_norm_eps": 1e-6, "patch_size": 14},
)

DINOV2_WITH_REGISTERS = DINOV2.but(
    name="dinov2_with_registers",
    model_types=("dinov2_with_registers",),
    prefixes=("dinov2_with_registers.", ""),
    leading=(("CLS", 1), ("register", "num_register_tokens")),
    defaults={"num_register_tokens": 4, "patch_size": 16},
)

DINOV3 = DINOV2.but(
    name="dinov3_vit",
    model_types=("dinov3_vit",),
    prefixes=("", "model.", "dinov3_vit."),
    layer="layer.{i}.",
    query="attention.q_proj",
    key="attention.k_proj",
    value="attention.v_proj",
    output="attention.o_proj",
    biases=Biases("query_bias", "key_bias", "value_bias", "proj_bias"),
    inputs=Inputs(),
    rope=GridRope(theta=None, image="image_size", prefix=1, registers="num_register_tokens", centred=True),
    leading=DINOV2_WITH_REGISTERS.leading,
    images=Images("ViTImageProcessor", IMAGENET, any_size=True),  # transformers' own for DINOv3 needs torchvision
    defaults={
        "layer_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "query_bias": True,
        "key_bias": False,
        "value_bias": True,
        "proj_bias": True,
        "image_size": 224,
        "patch_size": 16,
        "num_register_tokens": 0,
    },
)

CLIP_TEXT = Family(
    name="clip",
    model_types=("clip", "clip_text_model"),
    tower="text",
    nested="text_config",
    prefixes=("text_model.", ""),
    layer="encoder.layers.{i}.",
    layout=separate,
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    output="self_attn.out_proj",
    biases=biases(True, True),
    norm=layer_norm("layer_norm1"),
    inputs=Inputs(tokens="embeddings.token_embedding.weight", positions="embeddings.position_embedding.weight"),
    defaults={
        "hidden_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "max_position_embeddings": 77,
        "layer_norm_eps": 1e-5,
    },
)

CLIP_VISION = CLIP_TEXT.but(
    model_types=("clip", "clip_vision_model"),
    tower="vision",
    nested="vision_config",
    prefixes=("vision_model.", ""),
    inputs=Inputs(positions="embeddings.position_embedding.weight", norm=layer_norm("pre_layrnorm")),
    leading=(("CLS", 1),),
    images=Images("CLIPImageProcessor"),
    defaults={
        "hidden_size": 768,
        "num_attention_heads": 12,
        "max_position_embeddings": None,
        "image_size": 224,
        "patch_size": 32,
    },
)

SIGLIP_TEXT = CLIP_TEXT.but(
    name="siglip",
    model_types=("siglip", "siglip_text_model"),
    defaults={"hidden_size": 768, "num_attention_heads": 12, "max_position_embeddings": 64, "layer_norm_eps": 1e-6},
)

SIGLIP_VISION = CLIP_VISION.but(
    name="siglip",
    model_types=("siglip", "siglip_vision_model"),
    inputs__norm=None,
    leading=(),
    images=Images("SiglipImageProcessor"),
    defaults={"layer_norm_eps": 1e-6, "patch_size": 16},
)

VISION = (VIT, DINOV2, DINOV2_WITH_REGISTERS, DINOV3, CLIP_TEXT, CLIP_VISION, SIGLIP_TEXT, SIGLIP_VISION)

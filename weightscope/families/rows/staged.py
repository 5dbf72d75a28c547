"""Encoders of images in stages of several widths, each a stack of its own."""

from collections.abc import Mapping
from typing import Any

from weightscope.checkpoint.config import Config
from weightscope.families.cells import Biases, Memory, QkNorm, biases, layer_norm
from weightscope.families.config import ModelConfig
from weightscope.families.family import When
from weightscope.families.rows.llama import OUTPUT_NORM
from weightscope.families.rows.planes import SAM
from weightscope.families.rows.vit_line import SIGLIP_ALIKE_VISION, VIT_ALIKE
from weightscope.families.stages import Stage, WindowNetwork, WindowTable

STAGES = range(4)

# Windows that are shifted in every other layer: which patches share one is the mask's affair.
SWIN = VIT_ALIKE.but(
    name="swin",
    model_types=("swin", "donut-swin", "maskformer-swin"),
    prefixes=("", "swin.", "donut_swin.", "model."),
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    loose=("attention.self.relative_position_bias_table",),
    caveats=SAM.caveats,
    defaults={"layer_norm_eps": 1e-5, "embed_dim": 96, "window_size": 7},
)
SWIN_STAGES = tuple(
    SWIN.but(
        tower=f"stage{n + 1}",
        layer=f"encoder.layers.{n}.blocks.{{i}}.",
        derived=Stage(n),
        additive=WindowTable(
            {f"encoder.layers.{n}.blocks.{{i}}.attention.self.relative_position_bias_table": ""}, "window_size"
        ),
    )
    for n in STAGES
)


def of_cosines(config: ModelConfig, layer: int) -> float:
    """Queries and keys divided by their root mean squares are sqrt(r) long: cosines of r dimensions."""
    return 1 / config.head_dim


SWINV2 = SWIN.but(
    name="swinv2",
    model_types=("swinv2",),
    prefixes=("", "swinv2."),
    norm=None,
    biases=Biases("qkv_bias", False, "qkv_bias", True),
    qk_norm=QkNorm("", "", eps=1e-24, log_scales="attention.self.logit_scale"),
    scale=of_cosines,
    loose=("attention.self.logit_scale",),
    others=("attention.self.continuous_position_bias_mlp",),
    caveats=(*SAM.caveats, OUTPUT_NORM),
    defaults={"qkv_bias": True, "pretrained_window_sizes": [0, 0, 0, 0]},
)
NETWORK = "attention.self.continuous_position_bias_mlp"
SWINV2_STAGES = tuple(
    SWINV2.but(
        tower=f"stage{n + 1}",
        layer=(layer := f"encoder.layers.{n}.blocks.{{i}}."),
        derived=Stage(n),
        additive=WindowNetwork(layer + NETWORK, n, "pretrained_window_sizes"),
    )
    for n in STAGES
)
SWIN2SR_STAGES = tuple(
    SWINV2.but(
        name="swin2sr",
        model_types=("swin2sr",),
        prefixes=("", "swin2sr."),
        tower=f"stage{n + 1}",
        layer=(layer := f"encoder.stages.{n}.layers.{{i}}."),
        keys={"d_model": ("embed_dim",)},
        derived=Stage(n, width=""),
        additive=WindowNetwork(layer + NETWORK),
        defaults={"embed_dim": 180, "window_size": 8, "image_size": 64, "patch_size": 1},
    )
    for n in range(6)
)

# Stages of one width, with fewer tokens: groups that patches are assigned to.
GROUPVIT_VISION = SIGLIP_ALIKE_VISION.but(
    name="groupvit_vision",
    model_types=("groupvit_vision_model",),
    prefixes=("vision_model.", ""),
    defaults={
        "hidden_size": 384,
        "num_attention_heads": 6,
        "layer_norm_eps": 1e-5,
        "depths": [6, 3, 3],
        "num_group_tokens": [64, 8, 0],
    },
)
GROUPVIT_STAGES = tuple(
    GROUPVIT_VISION.but(
        tower=f"stage{n + 1}", layer=f"encoder.stages.{n}.layers.{{i}}.", derived=Stage(n, heads="", width="")
    )
    for n in STAGES
)


def grouping_stages(config: Config) -> Mapping[str, Any]:
    """Stages as layers: those that have tokens of groups end with attention from groups to patches."""
    groups = config.layers("num_group_tokens")
    return {
        "num_hidden_layers": len(groups),
        "layer_types": ["cross_attention" if tokens else "none" for tokens in groups],
    }


GROUPVIT_CROSS = GROUPVIT_VISION.but(
    tower="cross",
    layer="encoder.stages.{i}.downsample.",
    query="pre_assign_attn.attn.q_proj",
    key="pre_assign_attn.attn.k_proj",
    value="pre_assign_attn.attn.v_proj",
    output="pre_assign_attn.attn.out_proj",
    norm=None,
    memory=Memory(),
    derived=grouping_stages,
    attention_types=("cross_attention",),
    caveats=("patches are then assigned to groups, by a softmax over groups: that is no attention of heads",),
)

# Queries of every patch, keys and values of an image that a convolution has made smaller: the layer's memory.
SEGFORMER = VIT_ALIKE.but(
    name="segformer",
    model_types=("segformer", "glpn"),
    prefixes=("", "segformer.", "glpn."),
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    biases=biases(True, True),
    norm=layer_norm("layer_norm_1", eps=1e-5),
    memory=Memory(layer_norm("attention.self.layer_norm", eps=1e-5)),
    beside=("attention.self.sr",),
    caveats=("its memory is what a convolution of the normalised stream gives: the image, smaller by reduction_ratio",),
    variants=(When("reduction_ratio", 1, memory=None, beside=(), caveats=()),),
    defaults={
        "depths": [2, 2, 2, 2], "hidden_sizes": [32, 64, 160, 256], "num_attention_heads": [1, 2, 5, 8],
        "sr_ratios": [8, 4, 2, 1], "layer_norm_eps": 1e-6,
    },
)  # fmt: skip
PVT = SEGFORMER.but(
    name="pvt",
    model_types=("pvt",),
    prefixes=("", "pvt."),
    biases=biases("qkv_bias", True),
    norm=layer_norm("layer_norm_1"),
    memory=Memory(layer_norm("attention.self.layer_norm")),
    beside=("attention.self.sequence_reduction",),
    defaults={
        "layer_norm_eps": 1e-6, "hidden_sizes": [64, 128, 320, 512], "sequence_reduction_ratios": [8, 4, 2, 1],
    },
)  # fmt: skip
PVT_V2 = PVT.but(
    name="pvt_v2",
    model_types=("pvt_v2",),
    prefixes=("", "pvt_v2."),
    query="attention.query",
    key="attention.key",
    value="attention.value",
    output="attention.proj",
    memory=Memory(layer_norm("attention.layer_norm")),
    beside=("attention.spatial_reduction",),
    variants=(
        *SEGFORMER.variants,
        When("linear_attention", True, refused="linear_attention: keys and values of a pooled image"),
    ),
    defaults={"hidden_sizes": [32, 64, 160, 256], "linear_attention": False},
)
REDUCED_STAGES = tuple(
    row.but(
        tower=f"stage{n + 1}",
        layer=layer.format(n=n, i="{i}"),
        derived=Stage(n, heads="num_attention_heads", width="hidden_sizes", more={"reduction_ratio": ratios}),
    )
    for row, layer, ratios in (
        (SEGFORMER, "encoder.block.{n}.{i}.", "sr_ratios"),
        (PVT, "encoder.block.{n}.{i}.", "sequence_reduction_ratios"),
        (PVT_V2, "encoder.layers.{n}.blocks.{i}.", "sr_ratios"),
    )
    for n in STAGES
)

# Sequences of the patches at one place of all windows; the stages between are convolutions.
MOBILEVIT_STAGES = tuple(
    VIT_ALIKE.but(
        name="mobilevit",
        model_types=("mobilevit",),
        prefixes=("", "mobilevit."),
        tower=f"stage{n + 1}",
        layer=f"encoder.layer.{n + 2}.transformer.layer.{{i}}.",
        derived=Stage(n, layers, heads="", width="hidden_sizes"),
        caveats=("it attends between the same places of patches: a sequence has one token of each patch",),
        defaults={"layer_norm_eps": 1e-5, "hidden_sizes": [144, 192, 240], "num_attention_heads": 4},
    )
    for n, layers in enumerate((2, 4, 3))
)

STAGED = (
    *SWIN_STAGES,
    *SWINV2_STAGES,
    *SWIN2SR_STAGES,
    *GROUPVIT_STAGES,
    GROUPVIT_CROSS,
    *REDUCED_STAGES,
    *MOBILEVIT_STAGES,
)

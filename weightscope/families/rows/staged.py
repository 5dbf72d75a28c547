"""Encoders of images in stages of several widths, each a stack of its own."""

from collections.abc import Mapping
from typing import Any

from weightscope.checkpoint.config import Config
from weightscope.families.cells import Memory
from weightscope.families.rows.planes import SAM
from weightscope.families.rows.vit_line import SIGLIP_ALIKE_VISION, VIT_ALIKE
from weightscope.families.stages import Stage, WindowTable

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

STAGED = (*SWIN_STAGES, *GROUPVIT_STAGES, GROUPVIT_CROSS)

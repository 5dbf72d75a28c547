"""The table of architectures: one row a family. What differs is data; what is the same is code, once."""

from weightscope.families.config import ModelConfig
from weightscope.families.family import Family, LayerNorm, default_scale
from weightscope.families.layouts import conv1d_fused


def gpt2_scale(config: ModelConfig, layer: int) -> float:
    """1/sqrt(d') unless scale_attn_weights is off, divided by the layer's number where the config says so."""
    scale = default_scale(config, layer) if config.raw["scale_attn_weights"] else 1.0
    return scale / (layer + 1) if config.raw["scale_attn_by_inverse_layer_idx"] else scale


GPT2 = Family(
    name="gpt2",
    model_types=("gpt2",),
    prefixes=("transformer.", ""),
    layer="h.{i}.",
    layout=conv1d_fused,
    query="attn.c_attn",
    key="attn.c_attn",
    value="attn.c_attn",
    output="attn.c_proj",
    norm=LayerNorm("ln_1"),
    tokens="wte.weight",
    positions="wpe.weight",
    scale=gpt2_scale,
    defaults=(
        ("layer_norm_epsilon", 1e-5),
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
    ),
)

FAMILIES: tuple[Family, ...] = (GPT2,)

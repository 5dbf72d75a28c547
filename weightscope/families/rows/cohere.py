"""Cohere's second line: every fourth layer sees everything and does not rotate."""

from weightscope.families.axes import Sections, interleaved
from weightscope.families.cells import layer_norm, rms_norm
from weightscope.families.config import Every, ModelConfig
from weightscope.families.family import When
from weightscope.families.rope import Rope
from weightscope.families.rows.llama import COHERE
from weightscope.families.within import windowed, with_parameters


def windowed_or_leading(config: ModelConfig, layer: int) -> bool:
    """Sliding layers rotate, and so do the dense ones in front unless those have a pattern of windows of their own."""
    kinds = config.get("mlp_layer_types")
    dense = isinstance(kinds, list) and kinds[layer : layer + 1] == ["dense"]
    return windowed(config, layer) or (dense and config.get("prefix_dense_sliding_window_pattern") == 1)


COHERE2 = COHERE.but(
    name="cohere2",
    model_types=("cohere2",),
    rope=Rope(interleaved=True, rotates=windowed),
    layer_types=Every("sliding_window_pattern", -1, "full_attention", "sliding_attention"),
    variants=(),
    defaults={"sliding_window": 4096, "sliding_window_pattern": 4},
)

COHERE2_MOE = COHERE2.but(
    name="cohere2_moe",
    model_types=("cohere2_moe",),
    norm=rms_norm("input_layernorm"),
    rope__rotates=windowed_or_leading,
    outputs__norm=rms_norm("norm"),
    variants=(
        When(
            "rms_norm_eps", None,
            norm=layer_norm("input_layernorm", bias=False), outputs__norm=layer_norm("norm", bias=False),
        ),
    ),
    defaults={"head_dim": 128, "prefix_dense_sliding_window_pattern": 1},
)  # fmt: skip

COHERE_COMPASS = COHERE.but(
    name="cohere_compass_text",
    model_types=("cohere_compass_text",),
    rope=Rope(sections=Sections(interleaved, (24, 20, 20)), rotates=with_parameters),
    variants=(),
)

COHERE_DECODERS = (COHERE2, COHERE2_MOE, COHERE_COMPASS)

"""Encoders of images in windows, or whose scores may know of rows and columns in other ways than rotation."""

import numpy as np

from weightscope.attention.relative import RelativeKeys
from weightscope.attention.rotation import COLUMN, ROW
from weightscope.errors import CheckpointError
from weightscope.families.cells import Biases, Inputs, biases, layer_norm
from weightscope.families.config import ModelConfig
from weightscope.families.family import When
from weightscope.families.grid_rope import WindowRope, one_after_another
from weightscope.families.layouts import stacked
from weightscope.families.rows.towers import LAYER_SCALE, VIDEO_LLAMA_VISION
from weightscope.families.rows.vit_line import VIT_ALIKE
from weightscope.families.stages import WindowTable
from weightscope.families.tensors import LayerTensors


def keys_of_rows_and_columns(
    model: LayerTensors, tensors: LayerTensors, config: ModelConfig
) -> tuple[RelativeKeys, ...]:
    """SAM: a query meets a key of how many rows, and one of how many columns, the other token is away (MViTv2, eq. 5).

    The layer's tokens are a window of the image, or all of it, row by row.
    """
    r = config.head_dim
    tables = [tensors.read(f"attn.rel_pos_{axis}", (None, r)) for axis in "hw"]
    sides = [(len(table) + 1) // 2 for table in tables]

    def keys(axis: int) -> RelativeKeys:
        table, side = tables[axis] * np.float32(r**0.5), sides[axis]  # the model does not scale this term

        def at(distances: np.ndarray) -> np.ndarray:
            if len(distances) and max(-distances[0], distances[-1]) >= side:
                raise CheckpointError(f"tokens are more than this layer's window of {sides[0]} x {sides[1]}")
            return table[None, distances + side - 1]

        def coordinate(positions: np.ndarray) -> np.ndarray:
            return positions[:, axis] if positions.ndim > 1 else np.asarray(divmod(positions, sides[1]))[axis]

        return RelativeKeys(at, coordinate=coordinate)

    return keys(0), keys(1)


SAM = VIDEO_LLAMA_VISION.but(
    name="sam_vision",
    model_types=(
        "sam_vision_model", "sam_hq_vision_model", "got_ocr2_vision", "deepseek_ocr2_sam_vision_model",
        "slanext_vision", "pp_formulanet_vision", "pp_chart2table_vision",
    ),
    prefixes=("", "vision_encoder.", "vision_tower.", "sam_encoder."),
    layer="layers.{i}.",
    layout=stacked,
    query="attn.qkv",
    key="attn.qkv",
    value="attn.qkv",
    output="attn.proj",
    loose=("attn.rel_pos_h", "attn.rel_pos_w"),
    biases=biases("qkv_bias", True),
    rope=None,
    relative=keys_of_rows_and_columns,
    caveats=("windows at the edge of an image hold padding after the norm: keys that are the bias alone",),
    variants=(When("use_rel_pos", False, relative=None, loose=()),),
    defaults={"qkv_bias": True, "use_rel_pos": True},
)  # fmt: skip

UNLIMITED_OCR_SAM = SAM.but(
    name="unlimited_ocr_sam",
    model_types=("unlimited_ocr_sam_vision_model",),
    layer="blocks.{i}.",
    norm=layer_norm("norm1"),
)

SAM3_VIT = VIDEO_LLAMA_VISION.but(
    name="sam3_vit",
    model_types=("sam3_vit_model",),
    prefixes=("", "backbone.", "vision_encoder.backbone.", "detector_model.vision_encoder.backbone."),
    layer="layers.{i}.",
    query="attention.q_proj",
    key="attention.k_proj",
    value="attention.v_proj",
    output="attention.o_proj",
    inputs=Inputs(norm=layer_norm("layer_norm")),
    rope=WindowRope(one_after_another(COLUMN, ROW), interleaved=True, image="image_size"),
    caveats=SAM.caveats,
    defaults={"image_size": 1008, "patch_size": 14, "window_size": 24, "global_attn_indexes": [7, 15, 23, 31]},
)

VITDET = VIT_ALIKE.but(
    name="vitdet",
    model_types=("vitdet",),
    prefixes=("", "vitdet.", "backbone."),
    layout=stacked,
    query="attention.qkv",
    key="attention.qkv",
    value="attention.qkv",
    output="attention.proj",
    norm=layer_norm("norm1"),
    variants=(When("use_relative_position_embeddings", True, refused="keys of rows and columns"),),
    defaults={"layer_norm_eps": 1e-6, "use_relative_position_embeddings": False},
)

OWN_TABLE, SHARED_TABLE = (
    f"{stem}relative_position_bias.relative_position_bias_table" for stem in ("attention.attention.", "encoder.")
)
BEIT_BIASES = WindowTable(
    {
        "encoder.layer.{i}." + OWN_TABLE: "use_relative_position_bias",
        SHARED_TABLE: "use_shared_relative_position_bias",
    },
    class_token=True,
)
BEIT = VIT_ALIKE.but(
    name="beit",
    model_types=("beit", "data2vec-vision"),
    prefixes=("", "beit.", "data2vec_vision."),
    biases=Biases(True, False, True, True),
    inputs=Inputs(),
    caveats=(LAYER_SCALE.format("lambda_1"),),
    variants=(
        When("use_relative_position_bias", True, additive=BEIT_BIASES, loose=(OWN_TABLE,)),
        When("use_shared_relative_position_bias", True, additive=BEIT_BIASES, shared=(SHARED_TABLE,)),
    ),
    defaults={
        "use_relative_position_bias": False, "use_shared_relative_position_bias": False, "image_size": 224,
        "patch_size": 16,
    },
)  # fmt: skip

PLANES = (SAM, UNLIMITED_OCR_SAM, SAM3_VIT, VITDET, BEIT)

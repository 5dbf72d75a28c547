"""DETR and those after it that attend to all of the image: positions are added within every layer of attention."""

from weightscope.checkpoint.config import Config
from weightscope.families.cells import Inputs, Memory, biases, layer_norm
from weightscope.families.config import ModelConfig
from weightscope.families.family import Family, In
from weightscope.families.layouts import separate
from weightscope.families.odd_layouts import (
    content_and_positions,
    content_beside_positions,
    content_with_and_beside_positions,
)

OF_ENCODER = {"n_layers": ("encoder_layers",), "n_heads": ("encoder_attention_heads",)}
OF_DECODER = {"n_layers": ("decoder_layers",), "n_heads": ("decoder_attention_heads",)}
QUERIES_AND_KEYS = ("queries", "keys")

DETR_ENCODER = Family(
    name="detr",
    model_types=("detr", "conditional_detr", "dab-detr"),
    tower="encoder",
    prefixes=("model.", ""),
    layer="encoder.layers.{i}.",
    layout=separate,
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    output="self_attn.out_proj",
    biases=biases(True, True),
    norm=None,
    closing=layer_norm("final_layer_norm", eps=1e-5),
    inputs=Inputs(more="an image"),
    added=QUERIES_AND_KEYS,
    keys=OF_ENCODER,
)

DETR_DECODER = DETR_ENCODER.but(
    model_types=("detr",), tower="decoder", layer="decoder.layers.{i}.", inputs=Inputs(more="object queries"),
    keys=OF_DECODER,
)  # fmt: skip

DETR_CROSS = DETR_DECODER.but(
    tower="cross",
    query="encoder_attn.q_proj",
    key="encoder_attn.k_proj",
    value="encoder_attn.v_proj",
    output="encoder_attn.out_proj",
    memory=Memory(),
)

TABLE_TRANSFORMER = tuple(
    row.but(name="table-transformer", model_types=("table-transformer",), closing=None)
    .but(norm=layer_norm("encoder_attn_layer_norm" if row.memory else "self_attn_layer_norm", eps=1e-5))
    for row in (DETR_DECODER, DETR_ENCODER, DETR_CROSS)
)  # fmt: skip


def positions_first(config: Config, n_layers: int) -> tuple[str, ...]:
    """Only the first layer's cross-attention adds positions to content, unless the config keeps them."""
    kept = config.get("keep_query_pos") is True
    return tuple("positions_added" if kept or i == 0 else "positions_beside" for i in range(n_layers))


def of_doubled_heads(config: ModelConfig, layer: int) -> float:
    """Queries and keys have as many dimensions for places as for content."""
    return float((2 * config.head_dim) ** -0.5)


CONDITIONAL_DECODER = DETR_DECODER.but(
    name="conditional_detr",
    model_types=("conditional_detr",),
    layout=content_and_positions,
    query="sa_qcontent_proj",
    key="sa_kcontent_proj",
    value="sa_v_proj",
    others=("sa_qpos_proj", "sa_kpos_proj"),
)

CONDITIONAL_CROSS = CONDITIONAL_DECODER.but(
    tower="cross",
    layout=content_beside_positions,
    query="ca_qcontent_proj",
    key="ca_kcontent_proj",
    value="ca_v_proj",
    output="encoder_attn.out_proj",
    others=("ca_qpos_proj", "ca_kpos_proj", "ca_qpos_sine_proj"),
    memory=Memory(),
    scale=of_doubled_heads,
    layer_types=positions_first,
    in_layers=(In("positions_added", layout=content_with_and_beside_positions),),
    caveats=(
        "`added` is the embedding of where queries look; in layers that add positions to content, these and beside "
        "them that embedding",
    ),
)

DAB_DECODER, DAB_CROSS = (
    row.but(
        name="dab-detr", model_types=("dab-detr",), query=f"{part}.{part}_query_content_proj",
        key=f"{part}.{part}_key_content_proj", value=f"{part}.{part}_value_proj", output=f"{part}.{part}.output_proj",
        others=tuple(f"{part}.{part}_{of}_proj" for of in others), beside=(f"{part}.{part}_layer_norm",),
        closing=layer_norm("mlp.final_layer_norm", eps=1e-5), defaults={"keep_query_pos": False},
    )
    for row, part, others in (
        (CONDITIONAL_DECODER, "self_attn", ("query_pos", "key_pos")),
        (CONDITIONAL_CROSS, "cross_attn", ("query_pos", "key_pos", "query_pos_sine")),
    )
)  # fmt: skip

DETR_LINE = (
    DETR_DECODER, DETR_ENCODER, DETR_CROSS, *TABLE_TRANSFORMER, CONDITIONAL_DECODER, CONDITIONAL_CROSS, DAB_DECODER,
    DAB_CROSS,
)  # fmt: skip

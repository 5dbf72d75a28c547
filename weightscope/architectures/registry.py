"""The functions that a row may name, by cell. Everything else in a row is data."""

import re
from collections.abc import Callable
from typing import Any

from weightscope.architectures import cells, distances, gguf, layouts, rope, rules
from weightscope.architectures.cells import nothing_more
from weightscope.architectures.config import Every, all_full, listed_sizes, stated
from weightscope.architectures.family import default_scale, same_layer

LAYERS = (
    cells.always, cells.listed, cells.windowed, rules.windowed_or_leading, cells.with_parameters,
    cells.windowed_if_any, cells.sliding, rules.with_base, cells.with_a_base,
)  # fmt: skip

NAMED: dict[str, tuple[Callable[..., Any], ...]] = {
    "layout": (
        layouts.separate, layouts.stacked, layouts.StackedAs, layouts.packed, layouts.grouped,
        layouts.grouped_with_loose_biases,
        layouts.gated, layouts.latent, layouts.latent_with_eps, layouts.latent_scaled,
        layouts.conv1d_fused, layouts.conv1d_crossing,
        layouts.by_dimension_and_head, layouts.grouped_convolutions, layouts.in_four_blocks,
        layouts.keys_with_values, layouts.keys_beside_values, layouts.scaled_by_dimension, layouts.loose_biases,
        layouts.content_and_positions, layouts.content_beside_positions,
        layouts.content_with_and_beside_positions,
    ),
    "scale": (
        default_scale, rules.gpt2_scale, rules.unscaled, rules.mpt_scale, rules.multiplier, rules.query_scalar,
        rules.deepseek_scale, rules.multiplier_if_any, rules.factored, rules.deberta_scale, rules.deberta_v2_scale,
        rules.of_cosines,
        rules.of_doubled_heads,
    ),
    "rotates": LAYERS,
    "within": LAYERS,
    "arranged": (rope.interleaved, rope.contiguous, rope.height_and_width_first),
    "spelled": (rope.OneAfterAnother, rope.InTurn, rope.odd_and_even),
    "additive": (
        distances.alibi, distances.alibi_falcon, distances.relative_buckets,
        distances.Distances, distances.WindowTable, distances.WindowNetwork,
        distances.GeometricSlopes, distances.StoredSlopes,
    ),
    "formula": (distances.of_the_paper, distances.of_tensor2tensor),
    "layer_types": (
        all_full, stated, Every, rules.first_and_second, rules.mllama_layers, rules.AttentionIn, rules.ByPeriod,
        rules.by_blocks, rules.in_alternation, rules.in_turn, rules.positions_first, rules.one_level,
    ),
    "sizes": (
        listed_sizes, rules.own_heads, rules.twice_where_sliding, rules.global_sizes, rules.groups_by_layer,
    ),
    "derived": (
        rules.OfHalf, rules.heads_of_64, rules.Stage, rules.grouping_stages,
        rules.half_the_heads, rules.of_fusion, rules.heads_of_attn_config,
    ),
    "stored_layer": (same_layer, rules.half, rules.shared_groups),
    "undo": (
        cells.queries_in_halves, cells.keys_in_halves, cells.turned, cells.in_groups,
        cells.less_one,
    ),
    "config": (
        nothing_more, gguf.gemma_scalar, gguf.stablelm_config, gguf.granite_config, gguf.olmo2_config,
        gguf.falcon_config,
        gguf.mpt_config, gguf.neox_config, gguf.bert_config,
    ),
}  # fmt: skip


def name_of(function: Callable[..., Any]) -> str:
    """A function's name in a row: its own, of a class in lower case: `Every` is "every"."""
    name = function.__name__
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() if isinstance(function, type) else name


FUNCTIONS = {cell: {name_of(function): function for function in functions} for cell, functions in NAMED.items()}

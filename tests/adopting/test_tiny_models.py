"""A tiny model's sizes differ, its limits are shorter than its texts, and it has every kind of layer."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="tiny models are made by transformers, not installed")

from weightscope.adopting.config_keys import tiny_config, varied  # noqa: E402
from weightscope.adopting.tiny_models import SIZES  # noqa: E402

pytestmark = pytest.mark.check


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size.heads} heads")
def test_no_two_sizes_of_a_tiny_model_are_equal(size: Any) -> None:
    config = tiny_config(transformers.AutoConfig.for_model("qwen3"), size)
    heads, groups, r, d = (
        config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.hidden_size,
    )  # fmt: skip
    numbers = [heads, groups, r, d, heads * r, groups * r, config.intermediate_size, config.vocab_size, size.length]
    assert len(set(numbers)) == len(numbers) and heads // groups > 1


def test_texts_are_longer_than_every_limit() -> None:
    for size in SIZES:
        mistral = tiny_config(transformers.AutoConfig.for_model("ministral3"), size)
        assert mistral.rope_parameters["original_max_position_embeddings"] < size.length
        assert tiny_config(transformers.AutoConfig.for_model("gemma2"), size).sliding_window < size.length


def test_a_tiny_model_has_two_layers_of_each_kind() -> None:
    kinds = tiny_config(transformers.AutoConfig.for_model("gemma3_text"), SIZES[0]).layer_types
    assert sorted(kinds) == ["full_attention"] * 2 + ["sliding_attention"] * 2


def test_parts_of_a_composite_get_distinct_epsilons() -> None:
    parts = varied({"a": {"norm_eps": 1e-6}, "b": {"norm_eps": 1e-6}, "norm_eps": 1e-6})
    assert len({parts["norm_eps"], parts["a"]["norm_eps"], parts["b"]["norm_eps"]}) == 3

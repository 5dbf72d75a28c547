"""Heads that are read apart are the heads of the whole layer; what is read never exceeds what is allowed."""

import numpy as np
import pytest

from tests.support.tiny_models import NAMES, fixture
from weightscope.core.errors import CheckpointError
from weightscope.pairs.atlas import sampling
from weightscope.pairs.atlas.sampling import Sample, read_sample, sample_of

SPLIT = [name for name in NAMES if (model := fixture(name).model).attention_layers
         and all(sampling._is_split(model, i) for i in model.attention_layers)]  # fmt: skip


def test_most_families_are_read_by_heads() -> None:
    usual = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt_neox", "opt", "bert"}
    assert usual <= {*SPLIT} and len(SPLIT) >= 60


@pytest.mark.parametrize("name", SPLIT)
def test_heads_read_apart_are_those_of_the_whole_layer(name: str) -> None:
    model = fixture(name).model
    groups = sampling._nested(model.config.n_kv_heads)[: max(1, model.config.n_kv_heads // 2)]
    for index, (layer, heads, kv_heads) in zip(
        model.attention_layers, read_sample(model, Sample(model.attention_layers, groups, 0)), strict=True
    ):
        for place, (head, kv_head) in enumerate(zip(heads.tolist(), kv_heads.tolist(), strict=True)):
            part, whole = layer.head(place), model.layer(index).head(head)
            assert whole.kv_head == kv_head
            np.testing.assert_array_equal(part.qk_at(1).dense(), whole.qk_at(1).dense())
            np.testing.assert_array_equal(part.b_q, whole.b_q)
            np.testing.assert_array_equal(part.vo.dense(), whole.vo.dense())  # all of these are narrow


def test_of_a_wide_model_some_rows_of_the_output_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "OUTPUT_ROWS", 8)
    monkeypatch.setattr(sampling, "RUN", 4)
    model = fixture("llama").model
    (read,) = read_sample(model, Sample([0], [1], 0))
    seen, whole = read.layer.head(0).vo.dense(), model.layer(0).head(2).vo.dense()
    columns = np.flatnonzero(np.abs(seen).any(axis=0))
    assert len(columns) == 8 < model.config.d_model
    np.testing.assert_array_equal(seen[:, columns], whole[:, columns])


def test_as_much_is_read_as_is_allowed() -> None:
    model = fixture("llama").model
    everything = sample_of(model)
    assert everything.groups is None and tuple(everything.layers) == model.attention_layers
    part = sample_of(model, everything.weights - 1)
    assert part.groups is not None and part.weights < everything.weights
    rows_of_output = model.config.d_model * model.config.n_heads * model.config.head_dim
    least = rows_of_output + 3 * model.config.head_dim * model.config.d_model
    fewest = sample_of(model, least)
    assert len(fewest.layers) == 1 and fewest.groups == [0]
    with pytest.raises(CheckpointError, match="at most 5 are read of a checkpoint"):
        sample_of(model, 5)


def test_whole_layers_are_read_where_heads_do_not_lie_together() -> None:
    model = fixture("gpt2").model
    everything = sample_of(model)
    part = sample_of(model, everything.weights - 1)
    assert part.groups is None and len(part.layers) < len(everything.layers)

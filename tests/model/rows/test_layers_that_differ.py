"""Layers that differ within a model: heads of other widths, and keys and values that another layer has made."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.tiny_models import FIXTURES, fixture


def test_head_width_may_differ_by_layer() -> None:
    layers = [fixture("gemma4").model.layer(index) for index in range(3)]
    assert [(layer.head_dim, layer.n_kv_heads) for layer in layers] == [(6, 2), (8, 1), (8, 1)]


def test_keys_that_are_values_are_read_once() -> None:
    tensors = fixture("gemma4").model.attention_tensors(1)
    assert not any("v_proj" in tensor.name for tensor in tensors)


def test_a_layer_that_attends_to_anothers_keys_has_that_ones_maps(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "gemma4", tmp_path / "shared")
    path = tmp_path / "shared" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_kv_shared_layers": 1}))
    model = ws.open_model(tmp_path / "shared")
    assert model.attention_layers == (0, 1) and model.borrowing_layers == (2,)
    layer, maker, lender = model.layer(2), *(fixture("gemma4").model.layer(index) for index in (2, 1))
    assert layer.keys_of == 1 and "keys and values are layer 1's" in layer.caveats[0]
    rng = np.random.default_rng(0)
    x, before = rng.normal(size=(2, 5, layer.d_model))
    np.testing.assert_allclose(layer.queries(x), maker.queries(x))
    np.testing.assert_allclose(layer.keys(before), lender.keys(before))
    np.testing.assert_allclose(layer.inner_values(before), lender.inner_values(before))
    np.testing.assert_allclose(layer.w_o, maker.w_o)
    read = {tensor.name for tensor in model.attention_tensors(2)}
    assert {"model.layers.1.self_attn.k_proj.weight", "model.layers.2.self_attn.q_proj.weight"} <= read
    assert "model.layers.2.self_attn.k_proj.weight" not in read
    with pytest.raises(ws.CheckpointError, match="what enters layer 1"):
        layer.scores(x)


@pytest.mark.check
def test_layers_that_share_keys_and_values_are_the_eager_models() -> None:
    pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
    pytest.importorskip("transformers", reason="tiny models are made by transformers")
    from tests.census.census import census

    (row,) = census("gemma3n_text")
    assert (row.layers, row.verdict) == (4, "exact")


def test_borrowed_keys_need_a_layer_of_the_same_type(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "gemma4", tmp_path / "shared")
    path = tmp_path / "shared" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_kv_shared_layers": 3}))
    with pytest.raises(ws.CheckpointError, match="num_kv_shared_layers"):
        ws.open_model(tmp_path / "shared").attention_layers  # noqa: B018


def test_only_sliding_layers_have_sinks() -> None:
    model = fixture("mimo_v2_flash").model
    assert model.layer(0).sinks is None and model.layer(1).sinks is not None
    assert model.layer(0).w_o.shape[1] == 5 != model.layer(0).head_dim

"""Layers that differ within a model: heads of other widths, and keys and values that another layer has made."""

import json
import shutil
from pathlib import Path

import pytest

import weightscope as ws
from tests.support.tiny_models import FIXTURES, fixture


def test_heads_are_as_wide_as_the_layer_says() -> None:
    layers = [fixture("gemma4").model.layer(index) for index in range(3)]
    assert [(layer.head_dim, layer.n_kv_heads) for layer in layers] == [(6, 2), (8, 1), (8, 1)]


def test_keys_that_are_values_are_read_once() -> None:
    tensors = fixture("gemma4").model.attention_tensors(1)
    assert not any("v_proj" in tensor.name for tensor in tensors)


def test_a_layer_that_attends_to_anothers_keys_is_passed_over_and_named(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "gemma4", tmp_path / "shared")
    path = tmp_path / "shared" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_kv_shared_layers": 1}))
    model = ws.open_model(tmp_path / "shared")
    assert model.attention_layers == (0, 1)
    with pytest.raises(ws.CheckpointError, match="keys and values that layer 1 has made"):
        model.layer(2)


def test_layers_that_share_need_one_to_share_with(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "gemma4", tmp_path / "shared")
    path = tmp_path / "shared" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_kv_shared_layers": 3}))
    with pytest.raises(ws.CheckpointError, match="num_kv_shared_layers"):
        ws.open_model(tmp_path / "shared").attention_layers  # noqa: B018


def test_a_sliding_layer_alone_has_sinks() -> None:
    model = fixture("mimo_v2_flash").model
    assert model.layer(0).sinks is None and model.layer(1).sinks is not None
    assert model.layer(0).w_o.shape[1] == 5 != model.layer(0).head_dim

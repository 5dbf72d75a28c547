"""Stages of several widths are stacks of their own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightscope as ws
from weightscope.model.sources import Source

CONFIG: dict[str, Any] = {
    "model_type": "swin", "embed_dim": 8, "depths": [1, 2], "num_heads": [1, 4], "window_size": 2, "image_size": 16,
    "patch_size": 4, "qkv_bias": True, "layer_norm_eps": 1e-5, "hidden_size": 16, "num_layers": 2,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Swin of two stages, the second twice as wide."""
    rng = np.random.default_rng(0)
    tensors = {}
    for stage, (layers, heads) in enumerate(zip(CONFIG["depths"], CONFIG["num_heads"], strict=True)):
        d = CONFIG["embed_dim"] << stage
        for i in range(layers):
            stem = f"encoder.layers.{stage}.blocks.{i}."
            linears = [f"attention.self.{part}" for part in ("query", "key", "value")] + ["attention.output.dense"]
            shapes = {f"{name}.weight": (d, d) for name in linears} | {f"{name}.bias": (d,) for name in linears}
            shapes |= {"layernorm_before.weight": (d,), "layernorm_before.bias": (d,)}
            shapes["attention.self.relative_position_bias_table"] = (9, heads)
            tensors |= {stem + name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_stage_has_layers_heads_and_a_width_of_its_own(folder: Path) -> None:
    first, second = (ws.open_model(folder, tower=f"stage{n}") for n in (1, 2))
    assert [(name.config.n_layers, name.config.n_heads, name.config.d_model) for name in (first, second)] == [
        (1, 1, 8),
        (2, 4, 16),
    ]
    assert second.layer(1).scores(np.ones((4, 16), np.float32)).shape == (4, 4, 4)
    assert list(first.stacks) == ["stage1", "stage2"]


def test_all_stages_are_opened_where_none_is_language(folder: Path) -> None:
    with pytest.raises(ws.CheckpointError, match="several towers"):
        ws.open_model(folder)
    assert list(Source.named(str(folder), tower="all").of_stacks()) == ["stage1", "stage2"]


def test_stage_beyond_the_config_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_heads": [1]}))
    assert ws.open_model(folder, tower="stage1").config.n_heads == 1
    with pytest.raises(ws.CheckpointError):
        ws.open_model(folder, tower="stage2")

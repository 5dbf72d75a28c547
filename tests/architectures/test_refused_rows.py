"""Refusals name what a row cannot describe, and rows say what enters a first layer in addition to tokens."""

import json
import shutil
from pathlib import Path

import pytest

import weightscope as ws
from tests.support.tiny_models import FIXTURES
from weightscope.architectures import FAMILIES


def changed(name: str, folder: Path, **values: object) -> Path:
    """A fixture with other values in its config."""
    shutil.copytree(FIXTURES / name, folder / name)
    path = folder / name / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder / name


def test_an_architecture_without_a_row_is_refused_by_its_mechanism(tmp_path: Path) -> None:
    with pytest.raises(ws.CheckpointError, match="no row can describe mamba: it has no attention"):
        ws.open_model(changed("bert", tmp_path, model_type="mamba"))


def test_no_architecture_is_both_read_and_refused() -> None:
    assert not FAMILIES.unsupported.keys() & {kind for row in FAMILIES for kind in row.types}


def test_a_configuration_that_the_row_cannot_describe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ws.CheckpointError, match="heads are mixed before and after the softmax"):
        ws.open_model(changed("deberta", tmp_path, talking_head=True))


def test_a_table_that_does_not_follow_its_formula_is_refused(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = changed("electra", tmp_path, model_type="roformer")
    path = folder / "model.safetensors"
    tensors = {name.replace("electra.", "roformer."): values for name, values in load_file(path).items()}
    rows = tensors["roformer.embeddings.position_embeddings.weight"]
    tensors["roformer.encoder.embed_positions.weight"] = rows[:, : 16 // 4].copy()
    save_file(tensors, path)
    with pytest.raises(ws.CheckpointError, match="does not hold what roformer's formula gives"):
        ws.open_model(folder).layer(0)


def test_a_first_layer_that_sees_more_than_tokens_and_positions_says_so(tmp_path: Path) -> None:
    model = ws.open_model(changed("bert", tmp_path, model_type="layoutlm"))
    assert model.layer(0).n_heads
    with pytest.raises(ws.CheckpointError, match="where a token stands on its page"):
        model.first_layer  # noqa: B018

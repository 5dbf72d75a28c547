"""Copies in MXFP6 by their writers, and the weights that they were made of."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.files import write
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.pairs.same import QUANTISED

FIXTURES = Path(__file__).parents[2] / "fixtures"
COPIES = [
    "quark/mxfp6_e2m3",
    "quark/mxfp6_e3m2",
    "compressed_tensors/mxfp6",
]


def original(copy: Path, folder: Path) -> Path:
    """The weights that the copy was made of; one model for all of them."""
    config = json.loads((copy / "config.json").read_text())
    del config["quantization_config"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(FIXTURES / "quark" / "original.safetensors", folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("copy", COPIES)
def test_copy_in_mxfp6_is_quantised(copy: str, tmp_path: Path) -> None:
    same = ws.same(original(FIXTURES / copy, tmp_path / "original"), FIXTURES / copy)
    assert same.verdict == QUANTISED, same.lead


@pytest.mark.parametrize("copy", COPIES)
def test_one_value_off_by_a_step_is_different(copy: str, tmp_path: Path) -> None:
    folder = original(FIXTURES / copy, tmp_path / "original")
    tensors = {name: np.array(tensor.read()) for name, tensor in open_checkpoint(folder).items()}
    name = "model.layers.0.mlp.up_proj.weight"
    stored = open_checkpoint(FIXTURES / copy)[name].read()
    row = stored[5, :32]
    levels = np.unique(np.abs(row))
    tensors[name][5, np.abs(row).argmin()] = levels[len(levels) // 2] * 1.5
    write(folder / "model.safetensors", tensors)
    same = ws.same(folder, FIXTURES / copy)
    assert [each.name_a for each in same.differing] == [name]

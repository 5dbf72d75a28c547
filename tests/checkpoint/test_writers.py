"""Files by the writers of quantised formats, against the writers' own dequantisation of them.

Each folder of tests/fixtures/WRITER/ has a model, its weights as the writer reads them back (expected.npz) and the
versions that wrote them; make.py beside them writes all. A writer that computes in 16 bits rounds its weights: ours,
rounded in the same way, are equal to the bit.
"""

import json
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.rounding import rounded
from weightscope.checkpoint import open_checkpoint

FIXTURES = Path(__file__).parents[1] / "fixtures"
FOLDERS = sorted(path.parent for path in FIXTURES.glob("*/*/expected.npz"))
NAMES = [f"{path.parent.name}/{path.name}" for path in FOLDERS]


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_weights_are_to_the_bit_what_their_writer_reads_back(folder: Path) -> None:
    checkpoint, expected = open_checkpoint(folder), np.load(folder / "expected.npz")
    (dtype,) = json.loads((folder / "written_by.json").read_text())["dtypes"]
    assert expected.files
    for name in expected.files:
        read = checkpoint[name].read()
        assert read.shape == expected[name].shape == checkpoint[name].shape
        np.testing.assert_array_equal(rounded(read, dtype), expected[name], err_msg=name)


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_every_tensor_has_a_role_and_the_model_is_audited(folder: Path) -> None:
    model = ws.open_model(folder)
    unnamed = [tensor.name for tensor in model.tensors if tensor.role == tensor.name]
    assert not [name for name in unnamed if not name.endswith(("input_scale", "input_global_scale"))]
    assert "packed" in model.tensors["layer 0 up"].stored
    config = model.config
    assert model.tensors["layer 0 q"].array().shape == (config.n_heads * config.head_dim, config.d_model)
    assert len(ws.audit(model).heads) == config.n_layers * config.n_heads

"""Files by the writers of quantised formats, against the writers' own dequantisation.

Each folder of tests/fixtures/WRITER/ has a model, its weights as the writer reads them back (expected.npz) and the
versions that wrote them; its make.py wrote all of it. A writer that computes in 16 bits rounds its weights: ours,
rounded in the same way, are equal to the bit.
"""

import json
import random
import re
import struct
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.fuzz.checkpoints import repaired
from tests.fuzz.mutate import mutated_value
from tests.support.rounding import rounded
from tests.support.slow import mostly_checked
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.core.errors import CheckpointError

FIXTURES = Path(__file__).parents[1] / "fixtures"
WRITERS = ("compressed_tensors", "gpt_oss", "llmcompressor", "modelopt", "quark")
FOLDERS = sorted(path.parent for writer in WRITERS for path in (FIXTURES / writer).glob("*/expected.npz"))


def name(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_weights_are_to_the_bit_what_their_writer_reads_back(folder: Path) -> None:
    checkpoint, expected = open_checkpoint(folder), np.load(folder / "expected.npz")
    (dtype,) = json.loads((folder / "written_by.json").read_text())["dtypes"]
    assert expected.files
    for key in expected.files:
        read = checkpoint[key].read()
        assert read.shape == expected[key].shape == checkpoint[key].shape
        np.testing.assert_array_equal(rounded(read, dtype), expected[key], err_msg=key)


def test_documented_counts_are_those_of_the_fixtures() -> None:
    """Every row of the table in docs/files.md that these writers have."""
    text, counts = (FIXTURES.parents[1] / "docs" / "files.md").read_text(encoding="utf-8"), dict[str, list[int]]()
    for folder in FOLDERS:
        versions = json.loads((folder / "written_by.json").read_text())
        writers = ("llmcompressor", "compressed-tensors", "nvidia-modelopt", "amd-quark", "transformers")
        writer = next(name for name in writers if name in versions)
        n_files, n_tensors = counts.setdefault(f"{writer} {versions[writer]}", [0, 0])
        counts[f"{writer} {versions[writer]}"] = [n_files + 1, n_tensors + len(np.load(folder / "expected.npz").files)]
    rows = re.findall(r"^\| `[^|]+ \| ([^|]+) \| (\d+) \| (\d+) \| (\d+) \|", text, re.M)
    assert {writer: [int(n_files), int(n_tensors)] for writer, n_files, n_tensors, _ in rows} == counts
    assert all(n_tensors == n_equal for _, _, n_tensors, n_equal in rows)


MODELS = [folder for folder in FOLDERS if "model_type" in json.loads((folder / "config.json").read_text())]


@pytest.mark.parametrize("folder", mostly_checked(MODELS, fast=MODELS[::8]), ids=name)
def test_every_tensor_has_a_role_and_the_model_is_audited(folder: Path) -> None:
    model = ws.open_model(folder)
    unnamed = [tensor.name for tensor in model.tensors if tensor.role == tensor.name]
    assert not [name for name in unnamed if not name.endswith(("input_scale", "input_global_scale"))]
    up = "up" if "layer 0 up" in model.tensors else "expert.gate+up"
    assert "packed" in model.tensors[f"layer 0 {up}"].stored
    config = model.config
    assert model.tensors["layer 0 q"].array().shape == (config.n_heads * config.head_dim, config.d_model)
    assert len(ws.audit(model).heads) == config.n_layers * config.n_heads


@pytest.mark.parametrize("folder", mostly_checked(FOLDERS, fast=FOLDERS[::8]), ids=name)
def test_mutants_are_read_or_refused(folder: Path, tmp_path: Path, mutants: int = 15) -> None:
    """Other dtypes, shapes and missing parts, in legal files, under settings with other values."""
    rng, content = random.Random(folder.name), (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    for _ in range(mutants):
        config = json.loads((folder / "config.json").read_text())
        settings = config.get("quantization_config", {})
        for _ in range(rng.choice((0, 1, 1, 2))):
            settings = mutated_value(settings, rng)
        mutant, body = repaired(header, rng) if rng.random() < 0.7 else (header, content[8 + length :])
        text = json.dumps(mutant).encode()
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
        try:
            checkpoint = open_checkpoint(tmp_path)
        except CheckpointError as error:
            assert str(error).isprintable()
            continue
        for tensor in checkpoint.values():
            try:
                read = tensor.read()
            except CheckpointError as error:
                assert str(error).isprintable()
            else:
                assert read.shape == tensor.shape and np.isfinite(read).all()

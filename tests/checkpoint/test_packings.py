"""Files by the writers of quantised formats, against digests of the writers' own dequantisation.

Each folder of tests/fixtures/WRITER/ with an expected.json has a model, the SHA-256 of each packed weight in float32
and the versions that wrote them; the scripts there wrote them all. Equal digests are equal bits.
"""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.commands import run_undrawn
from tests.support.slow import mostly_checked
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.core.errors import CheckpointError

FIXTURES = Path(__file__).parents[1] / "fixtures"
FOLDERS = sorted(path.parent for path in FIXTURES.glob("*/*/expected.json"))
MODELS = [folder for folder in FOLDERS if folder.name != "options"]
FIRST = {folder.parent: folder for folder in reversed(MODELS)}  # of each writer, which every change is tried on


def name(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def expected(folder: Path) -> dict[str, str]:
    digests: dict[str, str] = json.loads((folder / "expected.json").read_text())
    return digests


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_weights_are_to_the_bit_what_their_writer_makes_of_them(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    read = {key: checkpoint[key].read() + np.float32(0) for key in expected(folder)}  # no zero has a sign
    assert all(weight.shape == checkpoint[key].shape for key, weight in read.items())
    assert {key: hashlib.sha256(weight.tobytes()).hexdigest() for key, weight in read.items()} == expected(folder)


@pytest.mark.parametrize("folder", MODELS, ids=name)
def test_every_tensor_has_a_role(folder: Path) -> None:
    """No scale, zero or setting is left as a tensor of its own; rows do not name what is in a state-space layer."""
    tensors = ws.open_model(folder).tensors
    assert not [tensor.name for tensor in tensors if tensor.role == tensor.name and ".linear_attn." not in tensor.name]
    assert {tensor.name for tensor in tensors if tensor.stored.startswith("packed")} == expected(folder).keys()


@pytest.mark.parametrize("folder", mostly_checked(MODELS, fast=FIRST.values()), ids=name)
def test_commands_read_it(folder: Path, tmp_path: Path) -> None:
    for arguments in (["inspect", folder], ["inspect", folder, "--tensors"]):
        result = run_undrawn(*arguments)
        assert result.exit_code == 0, result.stderr
    assert "packed" in result.stdout
    result = run_undrawn("audit", folder, "--all", "--out", tmp_path / "audit")
    assert result.exit_code == 0, result.stderr


def test_documented_counts_are_those_of_the_fixtures() -> None:
    """Every row of the table in docs/files.md, and its versions."""
    text = (FIXTURES.parents[1] / "docs" / "files.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w-]+) \| ([^|]+\d) \| (\d+) \| (\d+) \| (\d+) \|", text, re.M)
    assert len(rows) == len({folder.parent for folder in FOLDERS})
    for container, writers, n_files, n_tensors, n_equal in rows:
        folders = [folder for folder in FOLDERS if folder.parent.name.replace("_", "") == container.lower()]
        counts = len(folders), sum(len(expected(folder)) for folder in folders)
        assert counts == (int(n_files), int(n_tensors)) and n_tensors == n_equal, container
        for folder in folders:
            versions = json.loads((folder / "written_by.json").read_text())
            assert all(versions[name] == version for name, version in (part.split() for part in writers.split(", ")))


def part_names(folder: Path) -> list[str]:
    """The stored tensors that packed weights are made of."""
    checkpoint = open_checkpoint(folder)
    return sorted(part.name for name in expected(folder) for part in checkpoint[name].parts)


def without(folder: Path, target: Path, name: str, n_rows: int) -> Path:
    """A copy without a tensor, or with only the first rows of it."""
    content = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header, body, kept = json.loads(content[8:start]), content[start:], b""
    for key in [key for key in header if key != "__metadata__"]:
        first, last = header[key]["data_offsets"]
        if key == name and not n_rows:
            del header[key]
            continue
        part = body[first:last]
        if key == name:
            shape = header[key]["shape"]
            part = part[: len(part) // shape[0] * n_rows]
            header[key]["shape"] = [n_rows, *shape[1:]]
        header[key]["data_offsets"] = [len(kept), len(kept) + len(part)]
        kept += part
    text = json.dumps(header).encode()
    (target / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + kept)
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target


@pytest.mark.parametrize("folder", mostly_checked(FOLDERS, fast=FIRST.values()), ids=name)
def test_a_part_that_is_missing_or_cut_is_refused(folder: Path, tmp_path: Path) -> None:
    """Unless the weight does not need it: then its values are the same. Without its main part a weight is not there.

    Rows cut off the main part may leave a smaller weight, whose shape the model refuses.
    """
    checkpoint = open_checkpoint(folder)
    main = {key: checkpoint[key].parts[0].name for key in expected(folder)}
    for part in part_names(folder):
        shape = next(file.tensors[part].shape for file in checkpoint.files if part in file.tensors)
        for n_rows in (0, shape[0] - 1) if shape and shape[0] > 1 else (0,):
            try:
                spoilt = open_checkpoint(without(folder, tmp_path, part, n_rows))
                read = {key: spoilt[key].read() for key in expected(folder) if key in spoilt}
            except CheckpointError as error:
                assert len(str(error).splitlines()) == 1
                continue
            assert {main[key] for key in main.keys() - read.keys()} <= {part}
            for key, weight in read.items():
                if main[key] != part or weight.shape == checkpoint[key].shape:
                    np.testing.assert_array_equal(weight, checkpoint[key].read(), f"{key} without {part}")

"""Files of identities that someone changed."""

import json
from pathlib import Path

import pytest

from weightscope.core.errors import CheckpointError
from weightscope.pairs.identity.identity import read_identity

FILE = Path("tests/fixtures/identity/model.id.json")


def changed(folder: Path, change) -> Path:
    value = json.loads(FILE.read_text())
    change(value["tensors"])
    path = folder / "changed.id.json"
    path.write_text(json.dumps(value))
    return path


def test_file_without_a_rounded_digest_is_refused(tmp_path: Path) -> None:
    def without_f16(tensors: dict[str, dict[str, str]]) -> None:
        del tensors["layer 1 up"]["f16"]  # its exact kind is bf16 alone

    with pytest.raises(CheckpointError, match="a SHA-256 as bf16, f16 and its exact kind"):
        read_identity(changed(tmp_path, without_f16))


def test_label_that_stands_for_two_lines_is_refused(tmp_path: Path) -> None:
    def join(tensors: dict[str, dict[str, str]]) -> None:
        first = tensors.pop("layer 0 down")
        shape = "x".join(map(str, first["shape"]))
        joined = f"layer 0 down {shape} bf16 {first['bf16']}\nlayer 0 gate"
        tensors[joined] = tensors.pop("layer 0 gate")

    with pytest.raises(CheckpointError, match="a label has a control character"):
        read_identity(changed(tmp_path, join))


@pytest.mark.parametrize("key", ["f16", "exact"])
def test_identity_covers_rounded_digests(key: str, tmp_path: Path) -> None:
    def forge(tensors: dict[str, dict[str, str]]) -> None:
        tensors["layer 1 up"] |= {"f16": "0" * 64} if key == "f16" else {"exact": "bf16 f16"}

    with pytest.raises(CheckpointError, match="its tensors give"):
        read_identity(changed(tmp_path, forge))


def test_identity_does_not_cover_sketches(tmp_path: Path) -> None:
    def forge(tensors: dict[str, dict[str, str]]) -> None:
        tensors["layer 1 up"]["sketch"] = "1" + " 0" * 16

    assert read_identity(changed(tmp_path, forge)).wsid == read_identity(FILE).wsid

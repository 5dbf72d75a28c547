"""Parts of a whole: empty tensors of sharded states, parts of split files, changes without their base."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.commands import is_one_line, run
from tests.support.tiny_models import FIXTURES

# States of ZeRO-3 that were not gathered


def emptied(folder: Path, words: tuple[str, ...]) -> int:
    """A tiny Llama, some of whose tensors have shape (0,); how many."""
    shutil.copytree(FIXTURES / "llama", folder)
    weights = load_file(folder / "model.safetensors")
    names = [name for name in weights if any(word in name for word in words)]
    save_file(weights | {name: np.empty(0, np.float32) for name in names}, folder / "model.safetensors")
    return len(names)


@pytest.mark.parametrize("words", [("q_proj",), ("q_proj", "o_proj"), ("embed_tokens",), ("model.",)])
def test_empty_tensors_are_counted_in_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    count = emptied(tmp_path / "bad", words)
    for command in ("inspect", "audit", "circuits"):
        result = run(command, tmp_path / "bad", *(() if command == "inspect" else ("--out", tmp_path / "out")))
        assert is_one_line(result), result.output
        assert f"{count} tensor" in result.stderr
        assert "empty (shape (0,)), as of a sharded (ZeRO-3) state that was not gathered" in result.stderr
    assert ws.same(FIXTURES / "llama", tmp_path / "bad").verdict == "different"
    assert f"{count} tensor" in run("inspect", tmp_path / "bad", "--check").stdout


def test_an_empty_buffer_that_no_role_needs_is_no_fault(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "llama", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    save_file(weights | {"model.buffer": np.empty(0, np.float32)}, tmp_path / "model" / "model.safetensors")
    assert run("inspect", tmp_path / "model").exit_code == 0

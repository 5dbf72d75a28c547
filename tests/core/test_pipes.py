"""Pipes, sockets and devices in the place of files: refused or passed over, and never waited for."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.commands import run
from weightscope.checkpoint.hub import BlockCache
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.core.engine import open_engine
from weightscope.core.errors import CheckpointError
from weightscope.core.files import HIDDEN, OutputFolder, new_file
from weightscope.heads.audit.batch import FinishedLayers, read_checkpoints
from weightscope.heads.audit.reference import Reference
from weightscope.model.run_identity import RunIdentity
from weightscope.model.sources import read_list
from weightscope.model.text.corpus import corpus_files
from weightscope.model.text.counts import load_counts
from weightscope.model.text.tokenizer import Tokenizer


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(path))  # its path may have a hundred letters


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


def _written(path: Path) -> None:
    with new_file(path):
        pass


def _image(path: Path) -> None:
    pytest.importorskip("PIL", reason="images need Pillow")
    from weightscope.runner.images import read_images

    read_images(path.parent, 1)


def _scheduler(path: Path) -> None:
    pytest.importorskip("distributed", reason="Dask comes with the extra `cluster`")
    open_engine("dask", str(path))


# What is read (or written) under a name: what opens it, as a user names it.
READ: dict[str, tuple[str, Callable[[Path], object]]] = {
    "list": ("steps.txt", read_list),
    "checkpoint": ("model.safetensors", open_checkpoint),
    "gguf": ("model.gguf", open_checkpoint),
    "tokenizer": ("tokenizer.json", lambda path: Tokenizer.load(path.parent)),
    "counts": ("counts.npz", load_counts),
    "text": ("text.jsonl", lambda path: corpus_files([path])),
    "text in a folder": ("text.jsonl", lambda path: corpus_files([path.parent])),
    "image in a folder": ("a.png", _image),
    "scheduler": ("scheduler.json", _scheduler),
    "results": ("heads.csv", _written),
    "reference": ("reference.npz", Reference.load),
    "reference's list": ("list.csv", read_checkpoints),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", READ)
def test_input_that_is_not_a_regular_file_is_refused(
    what: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, read = READ[what]
    KINDS[kind](tmp_path / name)
    with pytest.raises(CheckpointError):
        read(tmp_path / name)


def test_kept_layers_that_are_pipes_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    with OutputFolder(tmp_path) as out:
        out.text("heads.csv", "head\n")
    layers, blocks = FinishedLayers(tmp_path, RunIdentity.of(), [0], resume=False), BlockCache("a", "b")
    layers.put(0, {"x": np.ones(2)})
    blocks.put("0-3", b"abc")
    (layer,) = layers.folder.iterdir()
    (block,) = (path for path in (tmp_path / "assets").rglob("*") if path.is_file())
    for path in (layer, block, tmp_path / "heads.csv"):
        path.unlink()
        os.mkfifo(path)
    assert layers.get(0) is None and blocks.get("0-3") is None and not OutputFolder(tmp_path).is_finished()
    (tmp_path / HIDDEN / "manifest.json").unlink()
    os.mkfifo(tmp_path / HIDDEN / "manifest.json")
    assert not OutputFolder(tmp_path).is_finished()


def test_command_refuses_a_pipe_in_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "steps.txt")
    result = run("audit", tmp_path / "steps.txt", "--out", tmp_path / "out")
    assert (result.exit_code, result.stderr) == (2, "weightscope: steps.txt: is not a regular file\n")

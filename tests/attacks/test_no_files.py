"""What is no file that can be read, given to each option that takes a file: one line, and nothing is waited for."""

import errno
import os
import shutil
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.commands import is_one_line, run
from weightscope.checkpoint.hub import BlockCache
from weightscope.core.engine import open_engine
from weightscope.core.errors import CheckpointError
from weightscope.core.files import HIDDEN, OutputFolder, new_file, regular_file
from weightscope.heads.audit.batch import FinishedLayers
from weightscope.model.run_identity import RunIdentity
from weightscope.model.text.corpus import corpus_files

SMALL = Path(ws.__file__).parent / "core" / "embedded"
KINDS = ("pipe", "socket", "folder", "/dev/zero", "/proc/self/mem", "/proc/self/pagemap", "/proc/kmsg", "a loop")
OPTIONS: dict[str, Callable[[str], list[str]]] = {
    "--families": lambda name: ["inspect", "embedded", "--families", name],
    "--accept": lambda name: ["audit", "embedded", "--out", "out", "--accept", name],
    "--baseline": lambda name: ["audit", "embedded", "--out", "out", "--baseline", name],
    "findings.csv": lambda name: ["audit", "embedded", "--out", "out", "--baseline", "."],
    "--reference": lambda name: ["audit", "embedded", "--out", "out", "--reference", name],
    "--counts": lambda name: ["detok", "embedded", "--out", "out", "--counts", name],
    "--text": lambda name: ["circuits", "embedded", "--out", "out", "--measure", "--text", name],
    "--tokenizer": lambda name: ["neighbours", "embedded", "the", "--tokenizer", name],
    "x.txt": lambda name: ["bigrams", name, "--tokenizer", "embedded", "--out", "counts.npz"],
    "x.jsonl.gz": lambda name: ["bigrams", name, "--tokenizer", "embedded", "--out", "counts.npz"],
    "x.parquet": lambda name: ["bigrams", name, "--tokenizer", "embedded", "--out", "counts.npz"],
    "SOURCE": lambda name: ["inspect", name],
    "x.safetensors": lambda name: ["inspect", name, "--check"],
    "x.gguf": lambda name: ["inspect", name],
    "list.txt": lambda name: ["audit", name, "--out", "out"],
    "B": lambda name: ["compare", "embedded", name, "--out", "out"],
    "x.wsf": lambda name: ["lineage", "embedded", name, "--out", "out"],
    "x.id.json": lambda name: ["same", name, "embedded"],
    "CLAIM": lambda name: ["verify", name, "embedded", "embedded"],
    "--key": lambda name: ["verify", "claim.json", "embedded", "embedded", "--key", name],
    "--sign-key": lambda name: ["id", "embedded", "--out", "x.id.json", "--sign-key", name],
    "atlas list": lambda name: ["atlas", name, "--out", "atlas"],
    "LIST": lambda name: ["reference", name, "--out", "reference.npz"],
    "config.json": lambda name: ["inspect", "."],
    "model.safetensors": lambda name: ["inspect", "."],
    "adapter_config.json": lambda name: ["inspect", "."],
    "tokenizer.json": lambda name: ["neighbours", ".", "the"],
}  # fmt: skip
CHECKPOINTS = ("config.json", "model.safetensors", "adapter_config.json", "tokenizer.json")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(kind: str, path: Path) -> None:
    """Make something at `path` that is no file to read."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with closing(socket.socket(socket.AF_UNIX)) as made:
            made.bind(path.name)
    elif kind == "folder":
        path.mkdir()
    elif Path(kind).exists() or kind == "a loop":
        path.symlink_to(path.name if kind == "a loop" else kind)
    else:
        pytest.skip(f"no {kind} on this system")


@pytest.mark.check
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_path_that_is_not_a_regular_file_is_one_line(option: str, kind: str, here: Path) -> None:
    if option in CHECKPOINTS:
        shutil.copytree(SMALL, here, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py", "__pycache__", option))
    name = option if "." in option else "x"
    put(kind, here / name)
    result = run(*OPTIONS[option](name))
    usage = "Usage: " in result.stderr and "Error: " in result.stderr.splitlines()[-1]
    optional = (option == "adapter_config.json" and result.exit_code == 0) or (option, kind) == ("--baseline", "folder")
    assert is_one_line(result) or usage or optional, f"{result.output} {result.exception!r}"


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


# What no option names itself: a file of a folder, or one that is written.
READ: dict[str, tuple[str, Callable[[Path], object]]] = {
    "text in a folder": ("text.jsonl", lambda path: corpus_files([path.parent])),
    "image in a folder": ("a.png", _image),
    "scheduler": ("scheduler.json", _scheduler),
    "results": ("heads.csv", _written),
}


@pytest.mark.parametrize("kind", ["pipe", "socket", "/dev/zero"])
@pytest.mark.parametrize("what", READ)
def test_file_in_a_folder_that_is_not_a_regular_one_is_refused(what: str, kind: str, here: Path) -> None:
    name, read = READ[what]
    put(kind, here / name)
    with pytest.raises(CheckpointError):
        read(here / name)


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


def test_a_read_that_fails_is_one_line(tmp_path: Path) -> None:
    """A broken disk answers with EIO, after the file was opened."""
    (tmp_path / "x").write_bytes(b"words")

    with regular_file(tmp_path / "x") as file:
        folder = os.open("/", os.O_RDONLY)
        os.dup2(folder, file.fileno())
        os.close(folder)
        with pytest.raises(CheckpointError, match=r"^x: cannot be read \(Is a directory\)$"):
            file.read()
        with pytest.raises(CheckpointError, match=r"^x: cannot be read \(Is a directory\)$"):
            file.read(3)


@pytest.mark.check
@pytest.mark.parametrize("reads", [0, 1, 3, 10, 30])
@pytest.mark.parametrize("command", [
    "id {a} --out out/x.id.json", "card {a} --base {b} --out out/README.md", "same {a} {b}",
    "learned {a} {b} --out out/r", "lineage {b} {a} --attest out/claim.json", "compare {a} {b} --all --out out/r",
    "rank {a} --for peft --out out/ranks.json", "audit {a} --all --out out/r",
    "fingerprint {a} --out out/x.wsf",
])  # fmt: skip
def test_a_disk_that_breaks_is_one_line(command: str, reads: int, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that cannot be read any more: what was to be written is not there."""
    for name, factor in (("a", 1.0), ("b", 1.01)):
        shutil.copytree(SMALL, here / name, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        weights = load_file(SMALL / "model.safetensors")
        save_file({key: factor * w for key, w in weights.items()}, here / name / "model.safetensors")
    (here / "out").mkdir()
    left, read = [reads], os.preadv

    def broken(*args: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(*args)

    monkeypatch.setattr(os, "preadv", broken)
    result = run(*command.format(a="a", b="b").split())
    if left[0] >= 0:
        pytest.skip(f"{command} needs {reads - left[0]} reads")
    assert is_one_line(result) and "Input/output error" in result.stderr, f"{result.output} {result.exception!r}"
    written = [path for path in (here / "out").rglob("*") if path.is_file() and HIDDEN not in path.parts]
    assert not written


def test_a_file_of_proc_is_refused() -> None:
    """It counts as regular and empty, and may be endless: a link in a checkpoint's folder would be hashed for ever."""
    path = Path("/proc/version")
    if not path.exists():
        pytest.skip("no /proc on this system")
    with pytest.raises(CheckpointError, match=r"^version: is not a regular file$"):
        regular_file(path)

"""Every attack ends in one CheckpointError: without a hang, within 200 MB, and with no escape in the message."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.attacks import (
    CONFIGS,
    GGUFS,
    HEADERS,
    HUBS,
    INDEXES,
    LAYOUTS,
    ONE,
    PACKED,
    PACKINGS,
    TOKENIZERS,
    whole,
    zeros,
)
from tests.support.files import encode
from tests.support.hub_server import COMMIT, Hub
from weightscope.checkpoint import http
from weightscope.checkpoint.hub import Repository
from weightscope.checkpoint.opening import open_checkpoint, resolve_folder
from weightscope.checkpoint.storage import LocalFile
from weightscope.core.errors import CheckpointError
from weightscope.model.config.reading import as_published
from weightscope.model.text.tokenizer import Tokenizer

# Each takes under a second of processor time on a laptop. The bound is there for the attack that never ends, or
# whose cost grows with the square of its size: a slow or busy machine must not fail it.
FIXTURES = Path(__file__).parents[1] / "fixtures"
SECONDS, MEGABYTES = 15.0, 200


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good checkpoint, to be spoilt."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(whole({"w": ONE}))
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    return folder


def refused(source: Path) -> str:
    """The message that opening and reading it ends in."""
    started = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        for tensor in as_published(open_checkpoint(source)).values():
            tensor.read()
    assert time.process_time() - started < SECONDS
    message = str(caught.value)
    assert message.isprintable() and len(message) < 3000
    return message


def test_unchanged_checkpoint_opens(folder: Path) -> None:
    assert open_checkpoint(folder)["w"].read().tolist() == [0, 0]


@pytest.mark.parametrize("attack", PACKINGS)
def test_packing(attack: str, folder: Path) -> None:
    fixture, spoil, expected = PACKINGS[attack]
    original = LocalFile(FIXTURES / fixture / "model.safetensors")
    stored: dict[str, Any] = {}
    for name, entry in original.tensors.items():
        stored[name] = entry.dtype, entry.shape, original.bytes_of(entry, 0, entry.stop - entry.start).tobytes()
    config = json.loads((FIXTURES / fixture / "config.json").read_text())
    spoil(stored, config["quantization_config"])
    (folder / "model.safetensors").write_bytes(encode(stored))
    (folder / "config.json").write_text(json.dumps(config))
    assert expected in refused(folder)


@pytest.mark.parametrize("attack", HEADERS)
def test_header(attack: str, folder: Path) -> None:
    content, expected = HEADERS[attack]
    (folder / "model.safetensors").write_bytes(content)
    message = refused(folder)
    assert expected in message and message.startswith("model.safetensors: ")


@pytest.mark.parametrize("attack", INDEXES)
def test_index(attack: str, folder: Path) -> None:
    content, expected = INDEXES[attack]
    (folder / "model.safetensors").rename(folder / "shard.safetensors")  # next to a model.safetensors, no index is read
    content = content.replace(b"model.safetensors", b"shard.safetensors")
    (folder / "model.safetensors.index.json").write_bytes(content)
    (folder.parent / "outside.safetensors").write_bytes(whole({"w": ONE}))
    message = refused(folder)
    assert expected in message and message.startswith("model.safetensors.index.json: ")


@pytest.mark.parametrize("attack", CONFIGS)
def test_config(attack: str, folder: Path) -> None:
    content, expected = CONFIGS[attack]
    (folder / "config.json").write_bytes(content)
    message = refused(folder)
    assert expected in message and message.startswith("config.json: ")


@pytest.mark.parametrize("attack", GGUFS)
def test_gguf(attack: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    content, expected = GGUFS[attack]
    (tmp_path / "model.gguf").write_bytes(content)
    message = refused(tmp_path / "model.gguf")
    assert expected in message and message.startswith("model.gguf: ")


@pytest.mark.parametrize("attack", TOKENIZERS)
def test_tokenizer(attack: str, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    content, expected = TOKENIZERS[attack]
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(tmp_path).encode("ab" + "a" * 50, special=False)
    message = str(caught.value)
    assert expected in message and message.startswith("tokenizer.json: ")
    assert message.isprintable() and len(message) < 1000


@pytest.mark.parametrize("attack", LAYOUTS)
def test_layout(attack: str, folder: Path) -> None:
    change, expected = LAYOUTS[attack]
    change(folder)
    assert expected in refused(folder)


@pytest.mark.parametrize("attack", PACKED)
def test_packed(attack: str, folder: Path) -> None:
    tensors, config, expected = PACKED[attack]
    (folder / "model.safetensors").write_bytes(zeros(tensors))
    (folder / "config.json").write_text(json.dumps(config))
    message = refused(folder)
    assert expected in message
    assert message.isprintable() and len(message) < 1000


@pytest.mark.parametrize("attack", HUBS)
def test_hub(attack: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written anywhere but in the Hub's cache, and nothing there but under commits."""
    changes, expected = HUBS[attack]
    hub.repositories["owner/model"] = {"model.safetensors": whole({"w": ONE}), "config.json": b'{"model_type": "gpt2"}'}
    slow = "a second are expected" in expected
    monkeypatch.setattr(http, "PATIENCE", 0.3 if slow else 30.0)  # a busy machine may take long over the others
    monkeypatch.setattr(http, "LEAST_RATE", 10**9)
    for name, value in changes.items():
        setattr(hub, name, value)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint("owner/model")["w"].read()
    assert expected in str(caught.value) and str(caught.value).isprintable()
    written = {path.relative_to(tmp_path).parts[:4] for path in tmp_path.rglob("*") if path.is_file()}
    kept = ("hub", "models--owner--model")
    assert written <= {(*kept, "snapshots", COMMIT), (*kept, "refs", "main")}


def test_another_commit_than_the_pinned_one_is_refused(hub: Hub, tmp_path: Path) -> None:
    """Neither from the server, in a file or in its list, nor from a reference in the cache that has a commit's name."""
    hub.repositories["owner/model"] = {"other.safetensors": whole({"w": ONE}), "config.json": b"{}"}
    another_commit = COMMIT[::-1]
    open_checkpoint(f"owner/model@{COMMIT}")
    hub.headers = {"X-Repo-Commit": another_commit}
    for read in (open_checkpoint, resolve_folder):
        source = f"owner/model@{COMMIT}"
        shutil.rmtree(tmp_path / "hub", ignore_errors=True)
        with pytest.raises(CheckpointError, match=f"^owner/model@{COMMIT}: this commit .* answers '{another_commit}'"):
            read(source)
    hub.headers = {}
    cache = tmp_path / "hub" / "models--owner--model"
    (cache / "snapshots" / another_commit).mkdir(parents=True)
    (cache / "snapshots" / another_commit / "model.safetensors").write_bytes(whole({"w": ONE}))
    (cache / "refs").mkdir()
    (cache / "refs" / COMMIT).write_text(another_commit)
    assert Repository("owner/model", COMMIT).cached("model.safetensors") is None
    assert Repository("owner/model", another_commit).cached("model.safetensors") is not None


def test_a_list_of_files_of_another_commit_is_refused(hub: Hub) -> None:
    hub.repositories["owner/model"] = {"model.safetensors": b""}
    assert Repository("owner/model", COMMIT).file_names() == ["model.safetensors"]
    hub.headers = {"X-Repo-Commit": COMMIT[::-1]}
    with pytest.raises(CheckpointError, match="for the list of its files the server answers"):
        Repository("owner/model", COMMIT).file_names()


@pytest.mark.check
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system tells no process its peak memory")
def test_memory_of_the_costliest(tmp_path: Path) -> None:
    """The peak memory of a process that meets them one after another, interpreter and NumPy included."""
    costly = [("model.safetensors", content) for content, _ in HEADERS.values() if len(content) > 1_000_000]
    costly += [("model.safetensors.index.json", content) for content, _ in INDEXES.values() if len(content) > 1_000_000]
    costly += [("config.json", content) for content, _ in CONFIGS.values() if len(content) > 100_000]
    for number, (name, content) in enumerate(costly):
        (tmp_path / str(number)).mkdir()
        if name == "config.json":
            (tmp_path / str(number) / "model.safetensors").write_bytes(whole({"w": ONE}))
        (tmp_path / str(number) / name).write_bytes(content)
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from weightscope.checkpoint.opening import open_checkpoint
        from weightscope.core.errors import CheckpointError
        refused = 0
        for folder in Path(sys.argv[1]).iterdir():
            try:
                open_checkpoint(folder)
            except CheckpointError:
                refused += 1
        status = Path("/proc/self/status").read_text().split()
        print(refused, int(status[status.index("VmHWM:") + 1]) // 1024)
    """)
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, env=environment)
    refusals, megabytes = map(int, run.stdout.split())
    assert refusals == len(costly)
    assert megabytes < MEGABYTES


def test_names_are_escaped_where_a_good_file_has_them(folder: Path) -> None:
    """A legal file may have any name; it is escaped when a message shows it."""
    (folder / "model.safetensors").write_bytes(whole({"\x1b[2J": {**ONE, "dtype": "I32"}}))
    assert "'\\x1b[2J' dtype I32" in refused(folder)


def test_the_folder_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "\x1b[2J\n"
    folder.mkdir()
    assert "\\x1b[2J\\n" in refused(folder)


def test_links_of_the_hub_cache_are_followed(folder: Path) -> None:
    """The cache's snapshots are links into its blobs, which lie outside the snapshot's own folder."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    (folder / "model.safetensors").rename(blobs / "abc")
    (folder / "model.safetensors").symlink_to("../blobs/abc")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "model.safetensors"}}))
    assert open_checkpoint(folder)["w"].read().tolist() == [0, 0]

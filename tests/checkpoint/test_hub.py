"""Repositories on the Hub, by the real client against a local server that also plays each fault."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.files import encode, write_shards
from tests.support.hub_server import COMMIT, Hub
from tests.support.large_models import GB, shape_of_70b
from weightscope.checkpoint import http
from weightscope.checkpoint.hub import Ahead, BlockCache, Repository
from weightscope.checkpoint.opening import downloaded, open_checkpoint, resolve_folder
from weightscope.core.errors import CheckpointError
from weightscope.model.text.tokenizer import Tokenizer

RANDOM = np.random.default_rng(0)
LAYERS = 8
D = 128
BIG = 3_000_000  # elements: some blocks and requests of the sizes below
CONFIG = json.dumps({"model_type": "llama", "hidden_size": D}).encode()
QUERIES_AND_KEYS = [f"model.layers.0.self_attn.{which}_proj.weight" for which in "qkvo"]


def tensors_of(layer: int) -> dict[str, np.ndarray]:
    """A layer whose attention is a tenth of it, stored in the order of names as on the Hub."""
    shapes = {f"mlp.{which}_proj.weight": (8 * D, D) for which in ("down", "gate", "up")}
    shapes |= {f"self_attn.{which}_proj.weight": (D, D) for which in "kqvo"}
    shapes |= {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
    names = sorted(shapes)
    return {f"model.layers.{layer}.{n}": RANDOM.standard_normal(shapes[n]).astype(np.float32) for n in names}


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a repository of two shards."""
    folder = tmp_path_factory.mktemp("sharded")
    layers = [tensors_of(layer) for layer in range(LAYERS)]
    half = LAYERS // 2
    shards = [{name: w for layer in part for name, w in layer.items()} for part in (layers[:half], layers[half:])]
    write_shards(folder, *shards)
    return {path.name: path.read_bytes() for path in folder.iterdir()} | {"config.json": CONFIG, "README.md": b"#"}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 1 MB and requests of 4, so that 12 MB are many."""
    monkeypatch.setattr("weightscope.checkpoint.hub.BLOCK", 1 << 20)
    monkeypatch.setattr("weightscope.checkpoint.hub.LARGEST_REQUEST", 4 << 20)


@pytest.fixture
def remote(hub: Hub, sharded: dict[str, bytes]) -> Hub:
    hub.repositories["owner/model"] = dict(sharded)
    return hub


@pytest.fixture
def local(sharded: dict[str, bytes], tmp_path: Path) -> Path:
    """The same files in a folder."""
    folder = tmp_path / "local"
    folder.mkdir()
    for name, content in sharded.items():
        (folder / name).write_bytes(content)
    return folder


def test_every_tensor_is_what_the_file_has(remote: Hub, local: Path) -> None:
    near, far = open_checkpoint(local), open_checkpoint("owner/model")
    assert list(far) == list(near) and far.nbytes == near.nbytes and far.config == near.config
    assert far.name == "owner/model"
    for name, tensor in far.items():
        np.testing.assert_array_equal(tensor.read(), near[name].read())
    name = QUERIES_AND_KEYS[0]
    np.testing.assert_array_equal(far[name].rows(3, 9), near[name].rows(3, 9))
    blocks = np.concatenate([block for _, block in far[name].blocks(50)])
    np.testing.assert_array_equal(blocks, near[name].read())


def test_opening_fetches_headers_alone(remote: Hub) -> None:
    checkpoint = open_checkpoint("owner/model")
    headers = sum(8 + int.from_bytes(content[:8], "little") for content in weights(remote))
    assert checkpoint.bytes_fetched <= 1.3 * headers < checkpoint.nbytes / 100
    assert len(remote.data_requests()) == 2  # one a shard


def weights(hub: Hub) -> list[bytes]:
    files = hub.repositories["owner/model"]
    return [content for name, content in files.items() if name.endswith(".safetensors")]


def test_a_layer_costs_its_own_bytes_in_few_requests(remote: Hub) -> None:
    """Headers included, what comes over the wire is at most 1.02 x what is read."""
    checkpoint = open_checkpoint("owner/model")
    names = [name for name in checkpoint if ".layers.0." in name or ".layers.7." in name]
    needed, files = checkpoint.bytes_to_read(names), remote.repositories["owner/model"]
    assert checkpoint.bytes_to_fetch(names) == needed
    opened = len(remote.data_requests())
    checkpoint.prefetch(names)
    assert len(remote.data_requests()) - opened == 2  # a run of neighbours in each shard
    assert checkpoint.bytes_to_fetch(names) == 0
    for name in names:
        checkpoint[name].read()
    assert len(remote.data_requests()) - opened == 2  # reading found everything there
    assert needed <= checkpoint.bytes_fetched <= 1.02 * needed
    listing = {"id": "owner/model", "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]}
    small = len(json.dumps(listing)) + sum(len(files[f]) for f in SMALL)
    assert remote.sent - small == checkpoint.bytes_fetched


SMALL = ("config.json", "model.safetensors.index.json")


def test_attention_alone_is_fetched_without_the_rest(remote: Hub) -> None:
    checkpoint = open_checkpoint("owner/model")
    opened = checkpoint.bytes_fetched
    for name in QUERIES_AND_KEYS:
        checkpoint[name].read()
    assert checkpoint.bytes_fetched - opened == checkpoint.bytes_to_read(QUERIES_AND_KEYS) < checkpoint.nbytes / 50


def test_a_model_of_70b_is_opened_for_its_headers_and_read_for_what_is_wanted(hub: Hub) -> None:
    hub.repositories["big/model"] = shape_of_70b()
    checkpoint = open_checkpoint("big/model")
    assert len(checkpoint.files) >= 29 and 140 * GB < checkpoint.nbytes < 142 * GB
    assert checkpoint.bytes_fetched < 150_000
    queries_and_keys = [name for name in checkpoint if "q_proj" in name or "k_proj" in name]
    assert 12.0 * GB < checkpoint.bytes_to_fetch(queries_and_keys) < 12.2 * GB
    of_layer_0 = [name for name in queries_and_keys if ".layers.0." in name]
    needed = checkpoint.bytes_to_read(of_layer_0)
    assert 0.15 * GB < needed < 0.152 * GB
    checkpoint.prefetch(of_layer_0)
    assert needed <= checkpoint.bytes_fetched < 1.002 * needed  # the headers of all 30 files included
    assert checkpoint[of_layer_0[0]].rows(0, 2).shape == (2, 8192)


def test_an_audit_of_70b_takes_as_many_requests_as_the_page_says(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for the headers are sent, those for the layers and the embedding counted."""
    hub.repositories["big/model"] = shape_of_70b()
    checkpoint, groups = open_checkpoint("big/model"), []
    opening = sum("/resolve/" in request.path or "/storage/" in request.path for request in hub.requests)
    monkeypatch.setattr(http.RangedFile, "fetch", lambda source, group, *_: groups.append(group))
    for layer in range(80):
        names = checkpoint.names_under(f"model.layers.{layer}.")
        checkpoint.prefetch(name for name in names if "attn" in name or "input_layernorm" in name)
    checkpoint.prefetch(["model.embed_tokens.weight"])
    read = 80 * (2 * 8192 + 2 * 1024 + 1) + 128_256  # rows of 8192 in BF16
    assert sum(group[-1][1] - group[0][0] for group in groups) == read * 8192 * 2
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    assert f"{opening + len(groups)} requests for the {read * 8192 * 2 / GB:.1f} GB" in page


def test_the_storage_is_asked_at_once_where_its_address_is_known(remote: Hub) -> None:
    checkpoint = open_checkpoint("owner/model")
    for name in QUERIES_AND_KEYS:
        checkpoint[name].read()
    redirected = [r for r in remote.requests if r.method == "GET" and "/resolve/" in r.path and "-of-" in r.path]
    assert len(redirected) == 2  # one a shard, for its header


def test_what_was_fetched_ahead_is_read_from_memory(
    remote: Hub, local: Path, monkeypatch: pytest.MonkeyPatch, small_blocks: None
) -> None:
    near, far = open_checkpoint(local), open_checkpoint("owner/model")
    far.prefetch(near)
    with monkeypatch.context() as patch:
        patch.setattr(BlockCache, "get", lambda *_: pytest.fail("a block was read back"))
        for name, tensor in near.items():
            half = tensor.shape[0] // 2
            for rows in ((0, half), (half, tensor.shape[0])):
                np.testing.assert_array_equal(far[name].rows(*rows), tensor.rows(*rows))
    np.testing.assert_array_equal(far[name].read(), tensor.read())  # read once more: from the cache


def test_the_memory_for_what_was_fetched_ahead_is_bounded(
    remote: Hub, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, checkpoint, room = Ahead(), open_checkpoint("owner/model"), 5 * D * D * 4
    monkeypatch.setattr("weightscope.checkpoint.hub.AHEAD", room)
    for file in checkpoint.files:
        monkeypatch.setattr(file, "_ahead", ahead)
    checkpoint.prefetch(checkpoint)
    assert 0 <= ahead.room < room
    for name, tensor in open_checkpoint(local).items():
        np.testing.assert_array_equal(checkpoint[name].read(), tensor.read())
    assert ahead.room == room


def test_a_tensor_that_came_in_part_is_not_kept(hub: Hub, small_blocks: None) -> None:
    w = np.arange(BIG, dtype=np.float32)
    hub.repositories["m"] = {"model.safetensors": encode({"w": w})}
    checkpoint = open_checkpoint("m")
    hub.faults = ["breaks off", "404", "404", "404"]
    with pytest.raises(CheckpointError, match="answered 404"):
        checkpoint.prefetch(["w"])
    hub.faults = []
    np.testing.assert_array_equal(checkpoint["w"].read(), w)


def test_what_was_fetched_is_not_fetched_again(remote: Hub) -> None:
    open_checkpoint("owner/model").prefetch(QUERIES_AND_KEYS)
    again = open_checkpoint("owner/model")
    again[QUERIES_AND_KEYS[0]].read()
    assert again.bytes_fetched == again.bytes_to_fetch(QUERIES_AND_KEYS) == 0  # not even the headers


@pytest.mark.parametrize("spoil", [lambda c: c[:-1], lambda c: b"", lambda c: bytes([c[0] ^ 1]) + c[1:]])
def test_a_spoilt_block_is_fetched_again(spoil: Callable[[bytes], bytes], remote: Hub, local: Path) -> None:
    name = QUERIES_AND_KEYS[0]
    open_checkpoint("owner/model")[name].read()
    from huggingface_hub import constants

    for block in Path(constants.HF_ASSETS_CACHE).rglob("*-*"):
        block.write_bytes(spoil(block.read_bytes()))
    again = open_checkpoint("owner/model")
    np.testing.assert_array_equal(again[name].read(), open_checkpoint(local)[name].read())
    assert again.bytes_fetched == again.bytes_to_read([name])


def test_a_changed_file_finds_no_block_of_its_former_self(remote: Hub) -> None:
    name, files = QUERIES_AND_KEYS[0], remote.repositories["owner/model"]
    before = open_checkpoint("owner/model")[name].read()
    shard = "model-00001-of-00002.safetensors"
    files[shard] = files[shard][:-4] + b"\0\0\0\0"
    after = open_checkpoint("owner/model")
    np.testing.assert_array_equal(after[name].read(), before)
    assert after.bytes_fetched > after.bytes_to_read([name])


def test_a_cache_that_cannot_be_written_is_done_without(
    remote: Hub, monkeypatch: pytest.MonkeyPatch, local: Path
) -> None:
    from huggingface_hub import constants

    (local / "file").touch()
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(local / "file" / "not-a-folder"))
    checkpoint = open_checkpoint("owner/model")
    checkpoint.prefetch(QUERIES_AND_KEYS)
    np.testing.assert_array_equal(
        checkpoint[QUERIES_AND_KEYS[0]].read(), open_checkpoint(local)[QUERIES_AND_KEYS[0]].read()
    )


def test_a_large_tensor_comes_in_several_requests_at_once(hub: Hub, small_blocks: None) -> None:
    w = np.arange(BIG, dtype=np.float32).reshape(-1, 1000)
    hub.repositories["m"] = {"model.safetensors": encode({"w": w})}
    checkpoint = open_checkpoint("m")
    np.testing.assert_array_equal(checkpoint["w"].rows(5, 7), w[5:7])  # one block of it
    assert checkpoint.bytes_fetched < 2 << 20
    seen = np.concatenate([block for _, block in checkpoint["w"].blocks(1000)])
    np.testing.assert_array_equal(seen, w)
    assert checkpoint.bytes_fetched < 1.02 * w.nbytes
    assert len(hub.data_requests()) == 2 + 3  # the header, the two rows, 12 MB in requests of 4


SURVIVED = [
    "500", "503", "429", "403", "drop", "breaks off", "other range", "other size", "no range", "encoded",
    "short length", "longer", "shorter", "slow",
]  # fmt: skip


@pytest.mark.parametrize("fault", SURVIVED)
def test_a_fault_that_passes_is_survived(fault: str, remote: Hub, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint("owner/model")
    if fault == "slow":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 1)
    remote.faults = [fault, None, fault, fault]
    for name in QUERIES_AND_KEYS:
        np.testing.assert_array_equal(checkpoint[name].read(), open_checkpoint(local)[name].read())
    assert not remote.faults


REPORTED = {fault: "in a row; try again later" for fault in SURVIVED if fault != "slow"} | {
    "ignores range": "ignores Range",
    "page instead": "ignores Range",
    "404": "answered 404",
    "416": "answered 416",
    "other etag": "has changed on the server",
}


@pytest.mark.parametrize("fault", REPORTED)
def test_a_fault_that_stays_is_reported(fault: str, remote: Hub) -> None:
    checkpoint = open_checkpoint("owner/model")
    checkpoint[QUERIES_AND_KEYS[3]].read()
    remote.faults, remote.forever = [fault], True
    before = remote.sent
    with pytest.raises(CheckpointError, match=rf"model-00001-of-00002.safetensors: .*{REPORTED[fault]}"):
        checkpoint[QUERIES_AND_KEYS[0]].read()
    if fault != "other etag":  # who has not seen the storage's etag before cannot know
        with pytest.raises(CheckpointError):
            open_checkpoint("owner/model").prefetch(QUERIES_AND_KEYS)
    if fault != "ignores range":  # which sends all it has until the reader hangs up
        assert remote.sent - before < 2 << 20


@pytest.mark.parametrize("fault", ["503", "drop", "other range", "page instead", "ignores range", "404"])
def test_a_fault_while_opening_is_reported(fault: str, remote: Hub) -> None:
    remote.faults, remote.forever = [fault], True
    with pytest.raises(CheckpointError, match=r"model-0000\d-of-00002.safetensors"):
        open_checkpoint("owner/model")


def test_a_large_transfer_that_keeps_breaking_off_is_taken_up_where_it_broke(hub: Hub, small_blocks: None) -> None:
    w = np.arange(BIG, dtype=np.float32)
    hub.repositories["m"] = {"model.safetensors": encode({"w": w})}
    checkpoint = open_checkpoint("m")
    hub.faults = ["breaks off"] * 6
    np.testing.assert_array_equal(checkpoint["w"].read(), w)
    assert checkpoint.bytes_fetched < 2 * w.nbytes


def test_the_token_does_not_follow_to_another_host(remote: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    remote.private.add("owner/model")
    open_checkpoint("owner/model")[QUERIES_AND_KEYS[0]].read()
    asked = [r.token for r in remote.requests if "/storage/" not in r.path]
    assert set(asked) == {"Bearer secret"}
    followed = [r.token for r in remote.requests if "/storage/" in r.path]
    assert followed and set(followed) == {None}


def test_a_hub_that_serves_weights_itself_does_as_well(remote: Hub, local: Path) -> None:
    remote.redirect = False
    name = QUERIES_AND_KEYS[0]
    np.testing.assert_array_equal(open_checkpoint("owner/model")[name].read(), open_checkpoint(local)[name].read())


def test_redirects_without_end_are_reported(remote: Hub) -> None:
    checkpoint = open_checkpoint("owner/model")
    remote.storage = remote.hub + "/owner/model/resolve/main/model-00001-of-00002.safetensors?"
    remote.faults = ["403"]  # the storage's address that is known has expired
    with pytest.raises(CheckpointError, match="redirects more than"):
        checkpoint[QUERIES_AND_KEYS[0]].read()


def test_a_page_that_redirects_is_not_decoded(remote: Hub, local: Path) -> None:
    """92 kB of gzip would decode to 234 MB, although the page is never used."""
    remote.page_headers = {"Content-Encoding": "gzip"}  # which it is not, so that decoding it would fail
    name = QUERIES_AND_KEYS[0]
    np.testing.assert_array_equal(open_checkpoint("owner/model")[name].read(), open_checkpoint(local)[name].read())


def test_a_transfer_takes_no_longer_than_its_deadline(remote: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the little is that comes."""
    checkpoint = open_checkpoint("owner/model")
    monkeypatch.setattr(http, "LEAST_RATE", 1e-3)
    monkeypatch.setattr(http, "DEADLINE", 0.5)
    remote.faults, remote.forever = ["trickles"], True
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002.safetensors: the server sent \d+ bytes in"):
        checkpoint[QUERIES_AND_KEYS[0]].read()


@pytest.mark.parametrize("revision", ["../../../x", "/x", "a//b", "a..b", "\x1b[2J", "-x"])
def test_a_revision_that_git_could_not_have_is_refused(revision: str, remote: Hub) -> None:
    with pytest.raises(CheckpointError, match="no revision of owner/model can be called"):
        open_checkpoint(f"owner/model@{revision}")
    assert not remote.requests


def test_a_whole_repository_comes_through_the_same_reader(remote: Hub) -> None:
    """For PyTorch, which reads files. The Hub's own client finds them where it would have put them itself."""
    from huggingface_hub import hf_hub_download

    folder = downloaded(Repository("owner/model"))
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(name for name in remote.repositories["owner/model"] if name != "README.md")
    for name in names:
        assert (folder / name).read_bytes() == remote.repositories["owner/model"][name]
        assert hf_hub_download("owner/model", name) == str(folder / name)


@pytest.mark.parametrize("revision", ["v1", COMMIT])
def test_revisions(revision: str, remote: Hub) -> None:
    assert open_checkpoint(f"owner/model@{revision}").name == f"owner/model@{revision}"
    assert open_checkpoint("owner/model", revision=revision)[QUERIES_AND_KEYS[0]].shape == (D, D)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("owner/absent", "owner/absent: is neither a local path nor a repository on the Hub"),
        ("owner/model@v9", "owner/model@v9: the repository has no revision 'v9'"),
        ("owner/gated", "owner/gated: is gated: accept its terms on the Hub and set HF_TOKEN"),
        ("owner/private", "owner/private: is neither .* needs HF_TOKEN"),
        (
            "owner/pickle",
            "pickle: no .safetensors file here; there is pytorch_model.bin: pickled files can run any code",
        ),
        (
            "owner/ggml",
            "ggml: no .safetensors file here; there is imatrix.bin, model.gguf: a .gguf file must be on this machine",
        ),
        ("owner/text", "text: no .safetensors file here; there is README.md"),
        ("owner/two", "several .safetensors files"),
    ],
)
def test_what_the_hub_does_not_give_is_said(source: str, message: str, remote: Hub) -> None:
    remote.repositories |= {"owner/gated": {"model.safetensors": b""}, "owner/private": {"model.safetensors": b""}}
    remote.repositories |= {"owner/pickle": {"pytorch_model.bin": b"", "config.json": b"{}"}}
    remote.repositories["owner/ggml"] = {"model.gguf": b"", "imatrix.bin": b""}
    remote.repositories |= {"owner/text": {"README.md": b""}, "owner/two": {"a.safetensors": b"", "b.safetensors": b""}}
    remote.gated.add("owner/gated")
    remote.private.add("owner/private")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(source)


def test_a_lone_file_of_another_name_is_found(hub: Hub) -> None:
    hub.repositories["m"] = {"adapter.safetensors": encode({"w": np.ones(3, np.float32)})}
    assert open_checkpoint("m")["w"].read().tolist() == [1, 1, 1]


def test_a_hub_that_stumbles_is_asked_again(remote: Hub) -> None:
    remote.head_faults = [503, 429]
    assert len(open_checkpoint("owner/model")) == 9 * LAYERS
    remote.head_faults = [500] * 20
    with pytest.raises(CheckpointError, match="the Hub answered 500, 3 times in a row"):
        open_checkpoint("owner/model@v1")


def test_a_hostile_index_on_the_hub(remote: Hub) -> None:
    index = {"weight_map": {"w": "../../../secret.safetensors"}}
    remote.repositories["owner/model"]["model.safetensors.index.json"] = json.dumps(index).encode()
    with pytest.raises(CheckpointError, match="points outside its folder"):
        open_checkpoint("owner/model")
    assert not any("secret" in request.path for request in remote.requests)


def test_an_index_that_names_what_is_not_there(remote: Hub) -> None:
    del remote.repositories["owner/model"]["model-00002-of-00002.safetensors"]
    with pytest.raises(
        CheckpointError, match=r"names model-00002-of-00002.safetensors, which is not in the repository"
    ):
        open_checkpoint("owner/model")


def test_a_config_of_17_megabytes_is_not_downloaded(remote: Hub) -> None:
    remote.repositories["owner/model"]["config.json"] = b" " * 17_000_000
    with pytest.raises(CheckpointError, match=r"config.json has 17000000 bytes"):
        open_checkpoint("owner/model")
    assert remote.sent < 1_000_000


def test_a_hostile_header_on_the_hub_is_not_fetched(hub: Hub) -> None:
    hub.repositories["m"] = {"model.safetensors": (90_000_000).to_bytes(8, "little") + b" " * 90_000_001}
    with pytest.raises(CheckpointError, match="header of 90000000 bytes"):
        open_checkpoint("m")
    assert hub.sent < 1_000_000


def test_a_cached_snapshot_is_used_without_a_word_to_the_hub(remote: Hub) -> None:
    from huggingface_hub import hf_hub_download

    for name in remote.repositories["owner/model"]:
        hf_hub_download("owner/model", name)
    remote.requests.clear()
    checkpoint = open_checkpoint("owner/model")
    checkpoint[QUERIES_AND_KEYS[0]].read()
    assert not remote.requests and checkpoint.bytes_fetched == 0 and checkpoint.name == "owner/model"


def test_a_snapshot_that_lacks_a_shard_is_completed_by_ranges(remote: Hub, local: Path) -> None:
    from huggingface_hub import hf_hub_download

    hf_hub_download("owner/model", "model.safetensors.index.json")
    hf_hub_download("owner/model", "model-00001-of-00002.safetensors")
    checkpoint = open_checkpoint("owner/model")
    last = QUERIES_AND_KEYS[0].replace(".0.", f".{LAYERS - 1}.")
    for name, fetched in ((QUERIES_AND_KEYS[0], False), (last, True)):
        before = checkpoint.bytes_fetched
        np.testing.assert_array_equal(checkpoint[name].read(), open_checkpoint(local)[name].read())
        assert (checkpoint.bytes_fetched > before) is fetched


def test_the_folder_of_small_files_holds_no_weights(remote: Hub) -> None:
    remote.repositories["owner/model"]["tokenizer.json"] = b"{}"
    folder = resolve_folder("owner/model")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "tokenizer.json"]
    assert folder == open_checkpoint("owner/model").folder
    remote.requests.clear()
    assert resolve_folder("owner/model") == folder and not remote.requests


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer.json": b"{}", "vocab.txt": b"a\nb\n"},
        {"vocab.json": b"{}", "merges.txt": b"", "tokenizer.model": b"x"},
        {"vocab.json": b"{}", "vocab.txt": b"a\nb\n"},  # without merges.txt no tokenizer
        {"tokenizer.model": b"x"},
    ],
)
def test_a_repository_and_a_folder_have_the_same_tokenizer(remote: Hub, files: dict[str, bytes], local: Path) -> None:
    """Of each the most informative file; nothing that says less is downloaded."""
    remote.repositories["owner/model"] |= files
    for name, content in files.items():
        (local / name).write_bytes(content)
    file = Tokenizer.find("owner/model")
    assert file.name == Tokenizer.find(local).name
    fetched = {path.name for path in file.parent.iterdir()}
    assert fetched & {"tokenizer.json", "vocab.txt", "tokenizer.model"} <= {file.name}


def test_a_repository_of_weights_alone_has_no_such_folder(hub: Hub) -> None:
    hub.repositories["m"] = {"model.safetensors": encode({"w": np.ones(3, np.float32)})}
    with pytest.raises(CheckpointError, match=r"has none of config.json"):
        resolve_folder("m")


SECONDS = 60  # an interpreter's start on a starved machine included; the client's own retries would take minutes


def ask(code: str, **environment: str) -> tuple[str, float]:
    """What a fresh interpreter prints, and how long it took; the client reads its environment when it is imported."""
    lines = ("from weightscope.checkpoint.opening import open_checkpoint, resolve_folder", f"try: print({code})")
    code = "\n".join([*lines, "except Exception as e: print(type(e).__name__, e)"])
    started = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )
    return run.stdout + run.stderr, time.monotonic() - started


def test_the_environment_names_the_hub(remote: Hub, tmp_path: Path) -> None:
    remote.private.add("owner/model")
    environment = {"HF_ENDPOINT": remote.hub, "HF_TOKEN": "secret", "HF_HOME": str(tmp_path / "home")}
    assert ask("len(open_checkpoint('owner/model'))", **environment)[0] == f"{9 * LAYERS}\n"


def test_offline_is_respected_and_said(remote: Hub, tmp_path: Path) -> None:
    environment = {"HF_ENDPOINT": remote.hub, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    for call in ("open_checkpoint", "resolve_folder"):
        refusal, seconds = ask(f"{call}('owner/model')", **environment)
        assert refusal.startswith("CheckpointError owner/model: is not in the Hub's cache, and HF_HUB_OFFLINE is set")
        assert seconds < SECONDS
    assert not remote.requests


def test_a_hub_that_says_nothing_is_given_up_after_one_wait(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_ETAG_TIMEOUT": "1"}
        refusal, seconds = ask("open_checkpoint('owner/model')", **environment)
        assert "the Hub cannot be reached" in refusal
        assert seconds < SECONDS


def test_a_hub_that_cannot_be_reached_is_said_in_seconds(tmp_path: Path) -> None:
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")}
    for call in ("open_checkpoint", "resolve_folder"):
        refusal, seconds = ask(f"{call}('owner/model')", **environment)
        assert refusal.startswith(
            "CheckpointError owner/model: is not a local path, not in the Hub's cache, and the Hub cannot"
        )
        assert seconds < SECONDS

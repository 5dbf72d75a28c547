"""Copies on the Hub: equal digests end it without a tensor, and of what differs only its bytes are fetched."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightscope as ws
from tests.support.hub_server import Hub
from tests.support.plants.families import random_llama
from weightscope.checkpoint.opening import open_checkpoint

PLANTED = random_llama()
NAMES = list(PLANTED.tensors)
FILES = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
CHANGED = next(name for name in NAMES if "layers.1.mlp.down_proj" in name)


def files(folder: Path, *, changed: bool = False, packed: bool = False) -> dict[str, bytes]:
    """A small Llama of random weights in three shards, one value changed or its matrices in MLX's four bits."""
    folder.mkdir()
    tensors = {name: w.copy() for name, w in PLANTED.tensors.items()}
    tensors[CHANGED][3, 5] += changed
    config = PLANTED.config
    if packed:
        config = config | {"quantization": {"group_size": 32, "bits": 4}}
        for name in [name for name in NAMES if "_proj" in name]:
            w, module = tensors.pop(name), name.removesuffix(".weight")
            codes = np.random.default_rng(0).integers(0, 2**32, (len(w), w.shape[1] // 8), np.uint32)
            scales = np.abs(w[:, ::32]) + np.float32(0.01)
            tensors |= {name: codes, f"{module}.scales": scales, f"{module}.biases": -scales}
    shards = [dict([*tensors.items()][i::3]) for i in range(3)]
    for file, shard in zip(FILES, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, shard in zip(FILES, shards, strict=True) for name in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def headers(hub: Hub) -> int:
    """Bytes of the headers of all weights on the Hub, with room for what is fetched beyond them."""
    contents = [content for each in hub.repositories.values() for name, content in each.items() if name in FILES]
    return sum(int(1.5 * (8 + int.from_bytes(content[:8], "little"))) for content in contents)


def fetched(hub: Hub) -> int:
    """Bytes of weights that the Hub was asked for."""
    spans = [request.range.removeprefix("bytes=").split("-") for request in hub.data_requests() if request.range]
    return sum(int(stop) + 1 - int(start) for start, stop in spans)


@pytest.mark.parametrize("packed", [False, True], ids=["floats", "MLX"])
@pytest.mark.parametrize("sample", [1.0, 0.5])
def test_two_repositories_of_equal_digests_are_not_read(hub: Hub, tmp_path: Path, packed: bool, sample: float) -> None:
    content = files(tmp_path / "a", packed=packed)
    hub.repositories |= {"owner/a": content, "owner/b": dict(content)}
    same = ws.same("owner/a", "owner/b", sample=sample)
    assert same.verdict == ("same bytes" if sample == 1 else "same values"), same.lead
    assert fetched(hub) <= headers(hub)


@pytest.mark.parametrize("packed", [False, True], ids=["floats", "MLX"])
@pytest.mark.parametrize("here_first", [True, False])
def test_a_local_copy_is_known_by_its_digest(hub: Hub, tmp_path: Path, here_first: bool, packed: bool) -> None:
    hub.repositories["owner/a"] = files(tmp_path / "a", packed=packed)
    pair = [tmp_path / "a", "owner/a"]
    assert ws.same(*(pair if here_first else reversed(pair))).verdict == "same bytes"
    assert fetched(hub) <= headers(hub)


def test_of_one_changed_value_its_file_is_fetched_and_no_other(hub: Hub, tmp_path: Path) -> None:
    hub.repositories |= {"owner/a": files(tmp_path / "a"), "owner/b": files(tmp_path / "b", changed=True)}
    same = ws.same("owner/a", "owner/b")
    assert same.verdict == "different"
    assert [each.name for each in same.differing] == [CHANGED]
    asked = {name for request in hub.data_requests() for name in FILES if request.path.endswith(name)}
    tensors = open_checkpoint(tmp_path / "a")
    (file,) = {tensors[CHANGED].file.path.name}
    size = 2 * sum(tensor.nbytes for tensor in tensors.values() if tensor.file.path.name == file)
    assert size <= fetched(hub) <= size + headers(hub)
    assert asked == {*FILES}  # for the headers


def test_a_rounded_copy_is_read_by_ranges_once(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["owner/a"] = files(tmp_path / "a")
    (tmp_path / "half").mkdir()
    half = {name: w.astype(np.float16) for name, w in PLANTED.tensors.items()}
    save_file(half, tmp_path / "half" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "half" / "config.json").write_text(json.dumps(PLANTED.config))
    assert ws.same("owner/a", tmp_path / "half").verdict == "rounded"
    assert fetched(hub) <= open_checkpoint(tmp_path / "a").nbytes + headers(hub)

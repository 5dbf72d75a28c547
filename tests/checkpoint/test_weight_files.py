"""Of a folder with several files of weights, what transformers loads is read, and the others are named."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightscope as ws
from tests.support.commands import run_undrawn
from tests.support.hub_server import Hub
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.checkpoint.opening import open_checkpoint

WEIGHT = "h.0.attn.c_attn.weight"
LONE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = {f"model-0000{i}-of-00002.safetensors": 2 for i in (1, 2)}
SHARDED = {INDEX: 2, **SHARDS}
VARIANT = {"model.fp16.safetensors.index.json": 3, "fp16-1.safetensors": 3, "fp16-2.safetensors": 3}
ADAPTER = {"adapter_config.json": 0, "adapter_model.safetensors": 3}


class Case(NamedTuple):
    """A folder: the seed of each file's weights, which of them transformers loads, and what is said."""

    files: dict[str, int]
    loaded: int  # the seed that transformers loads; 0 where it loads nothing
    unread: list[str]  # weight files that are named as not read
    names: str = ""  # transformers_weights of config.json
    read: int | None = None  # the seed that weightscope reads, where it is another
    differs: bool = False  # transformers loads other weights, or may


CASES = {
    "one file": Case({LONE: 1}, 1, []),
    "shards": Case(SHARDED, 2, []),
    "one file and shards": Case({LONE: 1, **SHARDED}, 1, [*SHARDS]),
    "a variant of one file": Case({LONE: 1, "model.fp16.safetensors": 3}, 1, ["model.fp16.safetensors"]),
    "a variant of shards": Case({**SHARDED, "model.fp16.safetensors": 3}, 2, ["model.fp16.safetensors"]),
    "a consolidated file": Case({**SHARDED, "consolidated.safetensors": 3}, 2, ["consolidated.safetensors"]),
    "two indexes": Case({**SHARDED, **VARIANT}, 2, ["fp16-1.safetensors", "fp16-2.safetensors"]),
    "a subfolder": Case({LONE: 1, "fp16/model.safetensors": 3}, 1, ["fp16/model.safetensors"]),
    "a file that the config names": Case({LONE: 1, "b.safetensors": 3}, 3, [LONE], names="b.safetensors"),
    "an index that the config names": Case({LONE: 1, **SHARDED}, 2, [LONE], names=INDEX),
    "an adapter": Case({LONE: 1, **ADAPTER}, 1, ["adapter_model.safetensors"], differs=True),
    "an adapter and shards": Case({**SHARDED, **ADAPTER}, 2, ["adapter_model.safetensors"], differs=True),
    "pickled": Case({LONE: 1, "pytorch_model.bin": 3}, 1, ["pytorch_model.bin"]),
    "pickled, and a variant": Case(
        {"model.fp16.safetensors": 3, "pytorch_model.bin": 1}, 1, ["pytorch_model.bin"], read=3, differs=True
    ),
    "a variant and no other": Case({"model.fp16.safetensors": 3}, 0, [], read=3),
    "a subfolder and no other": Case({"fp16/model.safetensors": 3}, 0, []),
    "an optimizer": Case({LONE: 1, "optimizer.pt": 3, "training_args.bin": 3}, 1, []),
}


def write(folder: Path, case: Case) -> Path:
    """The folder of a case; pickled files hold no pickle."""
    named = {"transformers_weights": case.names} if case.names else {}
    write_checkpoint(folder, gpt2_weights(), tie_word_embeddings=True, **named)
    (folder / LONE).unlink()
    for name, seed in case.files.items():
        path, weights = folder / name, gpt2_weights(seed=seed)
        path.parent.mkdir(exist_ok=True)
        if name.endswith(".index.json"):
            first, second = (file for file in case.files if file.endswith("s") and case.files[file] == seed)
            where = {tensor: first if tensor.startswith("h.0") else second for tensor in weights}
            path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
            for file in (first, second):
                held = {tensor: weights[tensor] for tensor in weights if where[tensor] == file}
                save_file(held, folder / file, {"format": "pt"})
        elif name == "adapter_config.json":
            path.write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "", "r": 1}))
        elif not path.exists() and path.suffix == ".safetensors":
            save_file(weights, path, {"format": "pt"})
        elif not path.exists():
            path.write_bytes(b"PK\x03\x04")
    return folder


def seed_of(weight: np.ndarray) -> int:
    return next(seed for seed in range(4) if np.array_equal(weight, gpt2_weights(seed=seed)[WEIGHT]))


@pytest.mark.parametrize("name", CASES)
def test_what_transformers_loads_is_read_and_the_rest_is_named(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = write(tmp_path, case)
    wanted = case.loaded if case.read is None else case.read
    if not wanted:
        with pytest.raises(ws.CheckpointError, match=r"no \.safetensors file here"):
            ws.open_model(folder)
        return
    checkpoint = ws.open_model(folder).checkpoint
    assert seed_of(checkpoint[WEIGHT].read()) == wanted
    assert [*checkpoint.weight_files.unread] == case.unread and checkpoint.weight_files.is_other == case.differs
    assert all(file in checkpoint.weight_files.sentence for file in case.unread)


@pytest.mark.check
@pytest.mark.parametrize("name", CASES)
def test_transformers_itself_loads_what_the_table_says(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="asks transformers, which needs PyTorch")
    transformers = pytest.importorskip("transformers", reason="asks transformers, which is not installed")
    case = CASES[name]
    folder = write(tmp_path, case)
    for file, seed in case.files.items():
        if file == "pytorch_model.bin":
            weights = {tensor: torch.from_numpy(array) for tensor, array in gpt2_weights(seed=seed).items()}
            torch.save(weights, folder / file)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 50}
    (folder / "config.json").write_text(json.dumps(config))
    if not case.loaded:
        with pytest.raises(OSError, match="no file named"):
            transformers.GPT2Model.from_pretrained(folder)
        return
    model = transformers.GPT2Model.from_pretrained(folder)
    assert seed_of(model.h[0].attn.c_attn.weight.detach().numpy()) == case.loaded


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.files.keys() - {"adapter_config.json"}])
def test_the_same_is_read_from_the_hub(name: str, tmp_path: Path, hub: Hub) -> None:
    case = CASES[name]
    folder = write(tmp_path, case)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    hub.repositories["owner/several"] = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    wanted = case.loaded if case.read is None else case.read
    if not wanted:
        with pytest.raises(ws.CheckpointError, match=r"no \.safetensors file here"):
            open_checkpoint("owner/several")
        return
    checkpoint = open_checkpoint("owner/several")
    assert seed_of(checkpoint[WEIGHT].read()) == wanted
    assert [*checkpoint.weight_files.unread] == case.unread and checkpoint.weight_files.is_other == case.differs


def test_of_a_snapshot_in_the_hubs_cache_the_single_file_is_read(tmp_path: Path, hub: Hub) -> None:
    from weightscope.checkpoint.hub import Repository
    from weightscope.checkpoint.opening import downloaded

    folder = write(tmp_path, CASES["one file and shards"])
    hub.publish("owner/both", folder)
    for name in (LONE, INDEX, *SHARDS, "config.json"):
        Repository("owner/both").file(name, 10**6)
    asked = len(hub.requests)
    assert seed_of(open_checkpoint("owner/both")[WEIGHT].read()) == 1
    assert len(hub.requests) == asked and (downloaded(Repository("owner/both")) / LONE).is_file()


@pytest.mark.parametrize("named", ["../model.safetensors", "weights.bin", 3, "absent.safetensors"])
def test_a_config_that_names_no_file_of_its_folder_is_refused(named: Any, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, gpt2_weights(), transformers_weights=named)
    with pytest.raises(ws.CheckpointError, match="'transformers_weights'"):
        ws.open_model(folder)


def test_every_command_names_what_lies_beside(tmp_path: Path) -> None:
    folder = write(tmp_path / "both", CASES["one file and shards"])
    shard = next(iter(SHARDS))
    for command in (["inspect", folder], ["inspect", folder, "--check"], ["audit", folder, "--out", tmp_path / "out"]):
        shown = run_undrawn(*command)
        assert shown.exit_code == 0 and shard in shown.stdout, command
    compared = run_undrawn("compare", folder, folder, "--out", tmp_path / "same", "--fail-on", "note")
    assert compared.exit_code == 3 and shard in compared.stderr
    adapted = write(tmp_path / "adapted", CASES["an adapter"])
    audited = run_undrawn("audit", adapted, "--out", tmp_path / "adapted-out", "--fail-on", "other_weights")
    assert (
        audited.exit_code == 3 and "with PEFT installed, transformers adds adapter_model.safetensors" in audited.stderr
    )


def test_the_gate_sees_the_file_that_transformers_loads(tmp_path: Path) -> None:
    """Both folders have the same shards; one has another model.safetensors too."""
    good = write(tmp_path / "good", CASES["shards"])
    shutil.copytree(good, tmp_path / "bad")
    negated = {name: -array for name, array in gpt2_weights(seed=2).items()}
    save_file(negated, tmp_path / "bad" / LONE)
    limits = ["--max-change", 0.001, "--fail-on", "note"]
    compared = run_undrawn("compare", good, tmp_path / "bad", "--out", tmp_path / "out", "--all", *limits)
    assert compared.exit_code == 3 and "dentical" not in compared.stdout

"""The command printed for pickled weights: every tensor arrives, under names that are read, and no code runs."""

import json
import pickle
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import weightscope as ws
from tests.support.commands import run
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint

pytestmark = pytest.mark.check
FIXTURES = Path(__file__).parents[1] / "fixtures"

Tensors = dict[str, Any]


def converted(source: Path) -> Path:
    """Run the command that `inspect` prints for a source; the file that it wrote."""
    refusal = run("inspect", source).stderr.strip()
    assert refusal.count("\n") == 0
    (command,) = re.findall(r"none of its code: weightscope (convert .*)", refusal)
    result = run(*shlex.split(command))
    assert result.exit_code == 0, result.output
    return Path(result.stdout.splitlines()[-1])


@pytest.fixture
def tensors() -> Tensors:
    torch = pytest.importorskip("torch", reason="torch.save is torch's, which is not installed")
    weights = {name: torch.from_numpy(np.array(array)) for name, array in gpt2_weights().items()}
    weights["classifier.weight"], weights["classifier.bias"] = torch.randn(3, 24), torch.randn(3)
    weights["tied"] = next(iter(weights.values()))  # the same memory under two names
    weights["turned"] = torch.arange(6.0).reshape(2, 3).T  # not contiguous
    return weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that a careless command would not find again."""
    folder = write_checkpoint(tmp_path / 'it\'s "a" $model', gpt2_weights())
    (folder / "model.safetensors").unlink()
    return folder


def check(written: Path, tensors: Tensors, at: str = "") -> None:
    stored = load_file(written)
    assert stored.keys() == {at + name for name in tensors}
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(stored[at + name], tensor.numpy())


@pytest.mark.parametrize("named", [True, False])
def test_a_folder_keeps_every_tensor_with_and_without_model_type(named: bool, folder: Path, tensors: Tensors) -> None:
    import torch

    config = json.loads((folder / "config.json").read_text())
    if not named:
        del config["model_type"]
        (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / "pytorch_model.bin")
    torch.save({"lr": 1}, folder / "training_args.bin")
    written = converted(folder)
    assert written.name == "model.safetensors"
    check(written, tensors)
    command = ["inspect", str(written.parent), *([] if named else ["--family", "gpt2"])]
    result = run(*command)
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("asked", ["folder", "a shard"])
def test_shards_become_shards(asked: str, folder: Path, tensors: Tensors) -> None:
    import torch

    names = sorted(tensors)
    shards = {f"pytorch_model-0000{i + 1}-of-00002.bin": names[i::2] for i in range(2)}
    for shard, held in shards.items():
        torch.save({name: tensors[name] for name in held}, folder / shard)
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    written = converted(folder if asked == "folder" else folder / next(iter(shards)))
    assert written.name == "model.safetensors.index.json"
    stored: Tensors = {}
    for part in written.parent.glob("*.safetensors"):
        stored |= load_file(part)
    assert stored.keys() == {*tensors} == {*json.loads(written.read_text())["weight_map"]}
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(stored[name], tensor.numpy())
    assert run("inspect", written.parent).exit_code == 0


def test_parts_of_a_model_stay_parts(tmp_path: Path) -> None:
    """Each has a part of every tensor, under the same names."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load

    parts = sorted((FIXTURES / "meta" / "llama2").glob("consolidated.*"))
    for part in parts:
        torch.save(load(part), tmp_path / f"{part.stem}.pth")
    shutil.copy(parts[0].parent / "params.json", tmp_path)
    written = converted(tmp_path)
    for part in parts:
        stored = load(written.parent / part.name)
        assert all(torch.equal(stored[name], w) for name, w in load(part).items())
    same = ws.same(written.parent, parts[0].parent / "converted")
    assert same.verdict == "same values", same.lead


FILES: dict[str, Any] = {
    "plain.pt": lambda tensors: tensors,
    "legacy.pt": lambda tensors: tensors,
    "model.pt": lambda tensors: {
        "model": tensors,
        "optimizer": {"state": {0: {"exp_avg": tensors["tied"]}}},
        "epoch": 3,
    },
    "state_dict.pth": lambda tensors: {"state_dict": tensors, "optim": {"m": tensors["tied"]}},
    "lightning.ckpt": lambda tensors: {
        "epoch": 1,
        "pytorch-lightning_version": "2.0",
        "state_dict": {f"model.{name}": tensor for name, tensor in tensors.items()},
        "optimizer_states": [{"state": {0: {"exp_avg": tensors["tied"]}}}],
        "hyper_parameters": {"lr": 0.1},
    },
    "net.pt": lambda tensors: {"net": tensors},
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_keeps_every_tensor_whatever_is_around_them(name: str, folder: Path, tensors: Tensors) -> None:
    import torch

    torch.save(FILES[name](tensors), folder / name, _use_new_zipfile_serialization=name != "legacy.pt")
    written = converted(folder / name)
    assert written.name == "model.safetensors"
    check(written, tensors, {"lightning.ckpt": "model.", "net.pt": "net."}.get(name, ""))


def test_tensors_of_a_gpu_are_converted_without_one(folder: Path, tensors: Tensors) -> None:
    import torch

    tensors = {"a": tensors["turned"].contiguous()}
    torch.save(tensors, folder / "cpu.pt", _use_new_zipfile_serialization=False)
    stored = (folder / "cpu.pt").read_bytes()
    assert stored.count(b"X\x03\x00\x00\x00cpu") == 1
    (folder / "gpu.pt").write_bytes(stored.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0"))
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA"):
            torch.load(folder / "gpu.pt", weights_only=True)
    check(converted(folder / "gpu.pt"), tensors)


def test_dtypes_and_shapes_of_all_kinds_arrive(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch.save is torch's, which is not installed")
    kinds = [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]
    tensors = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in kinds}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4), "view": torch.arange(9.0)[2:5]}
    torch.save(tensors, tmp_path / "all.pt")
    stored = safetensors_torch().load_file(converted(tmp_path / "all.pt"))
    assert {name: (each.dtype, each.tolist()) for name, each in stored.items()} == {
        name: (each.dtype, each.tolist()) for name, each in tensors.items()
    }


def safetensors_torch() -> Any:
    return pytest.importorskip("safetensors.torch", reason="needs torch, which is not installed")


class Runs:
    """A pickle that runs code where it is loaded carelessly."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("as_zip", [True, False])
def test_no_code_runs_and_nothing_is_written(as_zip: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch.save is torch's, which is not installed")
    file = tmp_path / "evil.pt"
    torch.save({"a": Runs(tmp_path / "ran")}, file) if as_zip else file.write_bytes(
        pickle.dumps(Runs(tmp_path / "ran"))
    )
    result = run("convert", file, "--out", tmp_path / "out")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "cannot be loaded without running code of its own" in result.stderr
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


def test_what_cannot_be_converted_is_refused_in_one_line(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch.save is torch's, which is not installed")
    contents: dict[str, Any] = {
        "holds no tensor": {"epoch": 3},
        "of a kind that safetensors does not have (complex64": {"a": torch.zeros(2, dtype=torch.complex64)},
        "of a kind that safetensors does not have (float32, sparse": {"a": torch.eye(3).to_sparse()},
    }
    for number, (problem, content) in enumerate(contents.items()):
        torch.save(content, tmp_path / f"{number}.pt")
        result = run("convert", tmp_path / f"{number}.pt", "--out", tmp_path / "out")
        assert result.exit_code == 2 and problem in result.stderr and result.stderr.count("\n") == 1
    torch.save({"a": torch.zeros(2)}, tmp_path / "good.pt")
    assert run("convert", tmp_path / "good.pt", "--out", tmp_path / "out").exit_code == 0
    assert "is there already" in run("convert", tmp_path / "good.pt", "--out", tmp_path / "out").stderr
    (tmp_path / "cut.pt").write_bytes((tmp_path / "good.pt").read_bytes()[:200])
    assert "or is damaged" in run("convert", tmp_path / "cut.pt", "--out", tmp_path / "new").stderr
    assert "no such file or folder" in run("convert", tmp_path / "none.pt", "--out", tmp_path / "new").stderr


def test_weights_of_another_model_stay_as_they_are(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch.save is torch's, which is not installed")
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    out.mkdir()
    for number in (1, 2):
        torch.save({f"layer.{number}": torch.ones(2)}, model / f"pytorch_model-{number:05d}-of-00002.bin")
    other = out / "model-00002-of-00002.safetensors"  # without an index
    other.write_bytes(b"another model")
    result = run("convert", model, "--out", out)
    assert result.exit_code == 2 and f"{other.name}: is there already" in result.stderr
    assert [*out.iterdir()] == [other] and other.read_bytes() == b"another model"


def test_what_is_left_out_is_named(folder: Path, tensors: Tensors) -> None:
    import torch

    torch.save({"model": tensors, "optimizer": {"state": {}}, "epoch": 3}, folder / "last.pt")
    result = run("convert", folder / "last.pt", "--out", folder / "new")
    assert "Left out, as no tensors of the model: optimizer, epoch." in result.stdout
    printed = json.loads(run("convert", folder / "last.pt", "--out", folder / "newer", "--json").stdout)
    assert {each["name"] for each in printed["tensors"]} == {*tensors}
    assert [each["name"] for each in printed["left_out"]] == ["optimizer", "epoch"]

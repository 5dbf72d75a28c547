"""Files that people have instead of a checkpoint: each is opened, or its kind is named in one line."""

import io
import json
import pickle
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.commands import run
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.two_layers import FOLDER
from weightscope.checkpoint.opening import locate
from weightscope.model.text.tokenizer import Tokenizer

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548105171\n"


def pointer_to(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(POINTER)
        if name.endswith(".json"):
            write_checkpoint(folder, gpt2_weights())
            (folder / name).write_bytes(POINTER)
        return folder / name if name.endswith(".gguf") else folder

    return write


def file(name: str, content: bytes, sibling: str = "") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        if sibling:
            (folder / sibling).write_text("{}")
        return folder / name

    return write


def in_folder(**contents: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        for name, content in contents.items():
            (folder / name.replace("__", ".")).write_text(content)
        return folder

    return write


def llama2_c(shared: bool) -> bytes:
    d, hidden, layers, heads, kv, vocabulary, positions = 8, 12, 2, 2, 1, 16, 4
    floats = vocabulary * d * (1 if shared else 2) + d + positions * (d // heads)
    floats += layers * (2 * d + 2 * d * d + 2 * d * (d // heads) * kv + 3 * d * hidden)
    sizes = d, hidden, layers, heads, kv, vocabulary if shared else -vocabulary, positions
    return struct.pack("<7i", *sizes) + bytes(4 * floats)


def torch_saved(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "weights.safetensors", "w") as archive:
        archive.writestr("archive/data.pkl", b"")
    return folder / "weights.safetensors"


def zip_of(name: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(name, b"")
    return packed.getvalue()


def folder_of_torch(folder: Path) -> Path:
    """As transformers' trainer leaves one: the weights are neither its first file nor its only pickle."""
    for name in ("optimizer.pt", "pytorch_model.bin", "rng_state.pth", "scheduler.pt", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps({}))
    return folder


def folder_of_llama2_c(folder: Path) -> Path:
    (folder / "a_tokenizer.bin").write_bytes(b"\x1b\0\0\0")
    (folder / "stories15M.bin").write_bytes(llama2_c(True))
    return folder


def parts_of_gguf(folder: Path) -> Path:
    (folder / "part01.bin").write_bytes(b"GGUF" + bytes(60))
    (folder / "part02.bin").write_bytes(bytes(30))
    return folder


UNNAMED = {"n_layer": 2, "n_head": 4, "n_embd": 24, "n_positions": 32}
PIPELINE = {
    "_class_name": "StableDiffusionPipeline",
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
}


def without_model_type(folder: Path) -> Path:
    write_checkpoint(folder, gpt2_weights())
    (folder / "config.json").write_text(json.dumps(UNNAMED))
    return folder


CASES = {
    "a pointer to weights": (
        pointer_to("model.safetensors"),
        "is a Git LFS pointer to a file of 548105171 bytes; run `git lfs",
    ),
    "a pointer to a config": (pointer_to("config.json"), r"config\.json: is a Git LFS pointer"),
    "a pointer to ggml's": (pointer_to("model.gguf"), "is a Git LFS pointer"),
    "an adapter": (
        in_folder(adapter_config__json="{}", adapter_model__safetensors=""),
        "is a LoRA adapter: .*`weightscope audit ADAPTER --base BASE`",
    ),
    "an adapter's file": (file("adapter_model.safetensors", b""), "is a LoRA adapter"),
    "a pipeline": (
        in_folder(model_index__json=json.dumps(PIPELINE)),
        r"is a diffusers pipeline, .*: text_encoder \(CLIPTextModel\)$",
    ),
    "no model_type": (without_model_type, r"config\.json: has no model_type; .*its tensors .* --family gpt2"),
    "an onnx file": (file("model.onnx", b"\x08\x07"), "is an ONNX graph"),
    "an onnx folder": (in_folder(model__onnx="x"), r"there is model\.onnx: is an ONNX graph"),
    "llama2.c": (file("stories15M.bin", llama2_c(True)), "is a checkpoint of llama2.c"),
    "llama2.c untied": (file("stories15M.bin", llama2_c(False)), r"is a checkpoint of llama2.c.*\(version -1\)"),
    "llama2.c versioned": (file("model.bin", b"24ka" + bytes(60)), "is a checkpoint of llama2.c"),
    "a pickle": (
        file("pytorch_model.bin", pickle.dumps({})),
        r"can run any code.* none of its code: weightscope convert \S+/pytorch_model\.bin --out \S+/\S+-safetensors$",
    ),
    "another": (
        file("epoch-3.pt", pickle.dumps({})),
        r"none of its code: weightscope convert \S+/epoch-3\.pt --out \S+/epoch-3-safetensors$",
    ),
    "a folder of torch": (folder_of_torch, r"\.\.\.; pytorch_model\.bin: pickled .*/pytorch_model\.bin --out \S+$"),
    "a zip": (file("model.bin", zip_of("weights/a.onnx")), "is a zip; unpack it first"),
    "a numpy archive": (file("weights.bin", zip_of("a.npy")), "is a NumPy archive"),
    "an array": (file("weights.bin", b"\x93NUMPY" + bytes(30)), "is a NumPy archive"),
    "a compressed file": (file("model.bin", b"\x1f\x8b" + bytes(30)), "is compressed; unpack it first"),
    "keras under another name": (file("model.bin", b"\x89HDF\r\n\x1a\n"), "holds TensorFlow weights"),
    "a gguf under another name": (
        file("model.bin", b"GGUF" + bytes(30)),
        r"is a GGUF file; .* ends in \.gguf$",
    ),
    "a safetensors file under another name": (
        file("weights.bin", (2).to_bytes(8, "little") + b"{}"),
        r"is a safetensors file; .* ends in \.safetensors$",
    ),
    "the first part of a gguf": (
        file("part01.bin", b"GGUF" + bytes(30)),
        r"is one part of a GGUF file that was split; join the parts in order: cat PARTS > model\.gguf$",
    ),
    "a further part": (file("part02.bin", bytes(30)), "is one part of a file that was split"),
    "a part that says of what": (file("big.gguf.part00", b"GGUF" + bytes(30)), r"cat PARTS > big\.gguf$"),
    "the parts in a folder": (parts_of_gguf, r"; part0\d\.bin: is one part of .* that was split"),
    "llama2.c in a folder": (folder_of_llama2_c, r"; stories15M\.bin: is a checkpoint of llama2\.c"),
    "unknown bytes": (
        file("model.bin", b"abcdefgh"),
        r"knows; it begins with b'abcdefgh'$",
    ),
    "a .pt": (file("model.pt", b"x"), "pickled files"),
    "a .pth": (file("model.pth", b"x"), "pickled files"),
    "a .ckpt": (file("model.ckpt", b"x"), "pickled files"),
    "torch.save under another name": (torch_saved, "pickled files"),
    "keras": (file("tf_model.h5", b"\x89HDF\r\n\x1a\n"), r"holds TensorFlow weights.*from_tf=True"),
    "flax": (file("flax_model.msgpack", b"\x81"), r"holds Flax weights.*from_flax=True"),
    "ggml of old": (file("ggml-model.bin", b"tjgg" + bytes(20)), "from before GGUF"),
    "a web page": (file("model.safetensors", b"<!DOCTYPE html><html>"), "is a web page"),
    "something": (file("notes.md", b"# hello"), r"is neither a \.safetensors nor a \.gguf file"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_it_is_is_said_in_one_line(case: str, tmp_path: Path) -> None:
    write, message = CASES[case]
    result = run("inspect", write(tmp_path))
    assert result.exit_code == 2 and not result.stdout
    assert result.stderr.count("\n") == 1
    assert re.search(message, result.stderr.strip()), result.stderr


def test_a_root_of_sentence_transformers_opens_its_transformer(tmp_path: Path) -> None:
    inner = write_checkpoint(tmp_path / "0_Transformer", gpt2_weights())
    (inner / "tokenizer.json").write_text((FOLDER / "tokenizer.json").read_text())
    modules = [
        {"idx": 0, "path": "0_Transformer", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    opened = ws.open_model(tmp_path)
    assert np.array_equal(opened.layer(1).head(0).w_q, ws.open_model(inner).layer(1).head(0).w_q)
    assert Tokenizer.load(tmp_path).size == 8000
    (tmp_path / "modules.json").write_text(json.dumps(modules[1:]))
    with pytest.raises(ws.CheckpointError, match=r"names no Transformer among .* \(Pooling\)"):
        ws.open_model(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps([modules[0] | {"path": "../0_Transformer"}]))
    with pytest.raises(ws.CheckpointError, match="outside its folder"):
        ws.open_model(tmp_path)


URLS = {
    "https://huggingface.co/openai-community/gpt2": "openai-community/gpt2",
    "https://huggingface.co/gpt2/": "gpt2",
    "http://www.huggingface.co/openai-community/gpt2?library=transformers": "openai-community/gpt2",
    "https://hf.co/openai-community/gpt2/tree/v2": "openai-community/gpt2@v2",
    "https://huggingface.co/a/b/tree/refs%2Fpr%2F7/onnx": "a/b@refs/pr/7",
    "https://huggingface.co/a/b/blob/main/model.safetensors#x": "a/b",
    "https://huggingface.co/a/b/resolve/0123abc/config.json?download=true": "a/b@0123abc",
    "hf://a/b": "a/b",
}


@pytest.mark.parametrize("url", URLS)
def test_an_address_on_the_hub_is_its_id(url: str) -> None:
    assert str(locate(url)) == URLS[url]


def test_other_addresses_are_refused() -> None:
    with pytest.raises(ws.CheckpointError, match="among the Hub's datasets, not its models"):
        locate("https://huggingface.co/datasets/a/b")
    with pytest.raises(ws.CheckpointError, match="says revision v2, and v3 is asked for"):
        locate("https://huggingface.co/a/b/tree/v2", "v3")
    with pytest.raises(ws.CheckpointError, match="no such file or folder: https://example"):
        locate("https://example.org/a/b")


@pytest.mark.parametrize("written", ["embeded", "Embedded", "embeddded", "embedding", "embed", "bert", "owner/gpt"])
def test_a_slip_in_writing_embedded_is_named_and_nothing_else_is(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = run("inspect", written).stderr
    assert ("did you mean 'embedded'?" in message) == (written in ("embeded", "Embedded", "embeddded")), message


def test_a_word_of_the_help_and_a_name_without_a_network_lead_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "'embedded' opens without a network" in run("audit", "gpt2").stderr
    refused = run("audit", "SOURCE")
    assert refused.exit_code == 2 and "'embedded' is one that is always there" in refused.stderr

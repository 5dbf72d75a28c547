"""Parts of a whole: empty tensors of sharded states, parts of split files, changes without their base."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.commands import is_one_line, run, run_undrawn
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


# Split GGUF files


def gguf_of(keys: dict[str, object], tensors: dict[str, np.ndarray]) -> bytes:
    """A GGUF file of float32 tensors, written by hand."""
    head, offset, body = [], 0, b""
    for name, value in keys.items():
        kind, packed = (8, text(value)) if isinstance(value, str) else (4, struct.pack("<I", value))
        head.append(text(name) + struct.pack("<I", kind) + packed)
    for name, values in tensors.items():
        sizes = values.shape[::-1]
        head.append(text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, 0, offset))
        raw = values.astype("<f4").tobytes()
        body += raw + bytes(-len(raw) % 32)
        offset = len(body)
    start = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(head)
    return start + bytes(-len(start) % 32) + body


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


KEYS = {"general.architecture": "llama", "llama.block_count": 2, "llama.embedding_length": 32,
        "llama.attention.head_count": 4, "llama.context_length": 64, "llama.feed_forward_length": 48}  # fmt: skip
SHAPES = {"attn_norm": (32,), "attn_q": (32, 32), "attn_k": (32, 32), "attn_v": (32, 32), "attn_output": (32, 32),
          "ffn_norm": (32,), "ffn_gate": (48, 32), "ffn_up": (48, 32), "ffn_down": (32, 48)}  # fmt: skip
PART = "m-{:05}-of-00003.gguf"


def gguf_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (40, 32), "output_norm.weight": (32,), "output.weight": (40, 32)}
    shapes |= {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in SHAPES.items()}
    return {name: 1 + rng.standard_normal(shape).astype(np.float32) / 8 for name, shape in shapes.items()}


def split(folder: Path) -> Path:
    """The same model in three parts: architecture in the first, head in the last."""
    folder.mkdir()
    tensors = gguf_tensors()
    names = [name for name in tensors if name != "output.weight"] + ["output.weight"]
    for number, part in enumerate((names[:7], names[7:14], names[14:])):
        keys = {"split.no": number, "split.count": 3, "split.tensors.count": len(names)} | (KEYS if number == 0 else {})
        (folder / PART.format(number + 1)).write_bytes(gguf_of(keys, {name: tensors[name] for name in part}))
    return folder


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    (tmp_path / "whole.gguf").write_bytes(gguf_of(KEYS, gguf_tensors()))
    return tmp_path / "whole.gguf"


def test_a_split_gguf_opens_from_its_folder_or_any_part(whole: Path, tmp_path: Path) -> None:
    folder = split(tmp_path / "split")
    for source in (folder, *sorted(folder.iterdir())):
        assert ws.same(whole, source).verdict == ws.same(source, whole).verdict == "same values"
        assert ws.open_model(source).ends.head_name == "lm_head.weight"
    assert run_undrawn("audit", folder, "--out", tmp_path / "out").exit_code == 0


def drop(folder: Path, number: int) -> Path:
    path = folder / PART.format(number)
    path.unlink()
    return path


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a part is absent": (lambda folder: drop(folder, 2), f"{PART.format(2)} is not in its folder"),
    "the first is absent": (lambda folder: drop(folder, 1), f"{PART.format(1)} is not in its folder"),
    "a part is empty": (lambda folder: drop(folder, 2).touch(), "is empty (0 bytes): part 2 of 3"),
    "a part is another's": (lambda folder: shutil.copy(folder / PART.format(3), drop(folder, 2)), "not part 2 of 3"),
    "a part is no part": (
        lambda folder: drop(folder, 2).write_bytes(gguf_of(KEYS, gguf_tensors())), "not part 2 of 3"),
    "a tensor is in two parts": (
        lambda folder: drop(folder, 2).write_bytes(gguf_of(
            {"split.no": 1, "split.count": 3}, {"token_embd.weight": np.ones((40, 32), np.float32)})), "is also in"),
    "tensors are missing": (
        lambda folder: drop(folder, 2).write_bytes(gguf_of({"split.no": 1, "split.count": 3}, {})),
        "says split.tensors.count"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_part_that_is_missing_or_wrong_is_named_in_one_line(damage: str, tmp_path: Path) -> None:
    folder = split(tmp_path / "split")
    do, words = DAMAGED[damage]
    do(folder)
    for source in (folder, sorted(folder.iterdir())[-1]):
        result = run("inspect", source)
        assert is_one_line(result), result.output
        assert words in result.stderr


def test_a_part_alone_says_which_it_is(tmp_path: Path) -> None:
    folder = split(tmp_path / "split")
    lone = tmp_path / "lone"
    lone.mkdir()
    shutil.copy(folder / PART.format(2), lone)
    shutil.copy(folder / PART.format(2), tmp_path / "renamed.gguf")
    for source, words in ((lone, "1 more are not in its folder"), (tmp_path / "renamed.gguf", "does not say so")):
        result = run("inspect", source)
        assert is_one_line(result), result.output
        assert "is part 2 of 3 of a split GGUF file" in result.stderr
        assert words in result.stderr


@pytest.mark.check
def test_the_runner_refuses_a_gguf_by_our_reader_first(tmp_path: Path) -> None:
    """The gguf package's reader would not come back from some files of a few bytes."""
    pytest.importorskip("torch")
    from weightscope.runner.framing import gguf_tokenizer
    from weightscope.runner.loading import check_gguf

    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 2**62) + bytes(19))
    folder = split(tmp_path / "split")
    for path, words in ((broken, "GGUF header"), (folder / PART.format(1), "is one of 3 parts")):
        with pytest.raises(ws.CheckpointError, match=words):
            check_gguf(path)
        with pytest.raises(ws.CheckpointError, match=words):
            gguf_tokenizer(str(path), (0, 0))


def test_a_ctranslate2_folder_is_named_as_such(tmp_path: Path) -> None:
    """The file begins with its version and the length and name of its specification."""
    name = b"TransformerDecoderSpec\0"
    (tmp_path / "model.bin").write_bytes(struct.pack("<IH", 6, len(name)) + name + struct.pack("<II", 8, 3) + bytes(99))
    (tmp_path / "config.json").write_text('{"bos_token": "<s>", "layer_norm_epsilon": 1e-05}')
    (tmp_path / "vocabulary.json").write_text("[]")
    for source in (tmp_path, tmp_path / "model.bin"):
        result = run("inspect", source)
        assert is_one_line(result), result.output
        assert "is a model of CTranslate2 (TransformerDecoderSpec)" in result.stderr


def test_a_vision_tower_without_registers_is_read(tmp_path: Path) -> None:
    """DINOv3's default config has none of them, and its file a tensor of shape (1, 0, d)."""
    shutil.copytree(FIXTURES / "dinov3_vit", tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "a" / "config.json").write_text(json.dumps(config | {"num_register_tokens": 0}))
    weights = load_file(tmp_path / "a" / "model.safetensors")
    (name,) = (name for name in weights if "register" in name)
    save_file(weights | {name: weights[name][:, :0]}, tmp_path / "a" / "model.safetensors")
    assert ws.open_model(tmp_path / "a").layer(1).heads

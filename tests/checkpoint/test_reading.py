"""Files to float32 arrays: every dtype against the reference library, little memory, one clear error."""

import json
import os
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tests.support.files import bfloat16, encode, write, write_shards
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.core.compute.half import CHECKED_AT_ONCE, Half
from weightscope.core.errors import CheckpointError

GIB = 1 << 30


@pytest.mark.check
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_every_float_dtype_is_read_as_torch_reads_it(dtype: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    tensor = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    tensor[0, 0], tensor[0, 1], tensor[0, 2] = 0.0, -0.0, torch.finfo(tensor.dtype).tiny
    save_file({"w": tensor, "after": tensor + 1}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    read = checkpoint["w"].read()
    assert read.dtype == np.float32 and read.shape == (7, 5)
    np.testing.assert_array_equal(read, tensor.float().numpy())
    np.testing.assert_array_equal(checkpoint["after"].rows(2, 5), (tensor + 1).float().numpy()[2:5])


@given(bits=st.integers(0, 2**16 - 1))
@settings(max_examples=200)
def test_bfloat16_is_the_upper_half_of_a_float32(bits: int) -> None:
    from weightscope.checkpoint.storage import decode

    (value,) = decode(np.frombuffer(struct.pack("<H", bits), np.uint8), "BF16")
    assert struct.pack("<f", value)[2:] == struct.pack("<H", bits) or np.isnan(value)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_weights_are_the_tensor_however_they_are_cut(dtype: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((6, 4), np.float32)
    stored = {"F32": values, "F16": values.astype(np.float16), "BF16": bfloat16(values)}[dtype]
    tensor = open_checkpoint(write(tmp_path / "a.safetensors", {"w": stored}))["w"]
    as_floats, weights = tensor.read(), tensor.weights()
    assert weights.shape == as_floats.shape and len(weights) == len(as_floats)
    for cut in (
        lambda w: w,
        lambda w: w.T.reshape(2, 2, 6)[1],
        lambda w: w.reshape(3, 2, 4).transpose(0, 2, 1)[2],
        lambda w: w[1:5, None],
    ):
        piece = np.asarray(cut(weights))
        assert piece.dtype == np.float32
        np.testing.assert_array_equal(piece, cut(as_floats))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_weights_that_are_not_finite_are_refused_as_any_tensor_is(dtype: str, value: float, tmp_path: Path) -> None:
    values = np.ones((3, 4), np.float32)
    values[1, 2] = value
    stored = {"F32": values, "F16": values.astype(np.float16), "BF16": bfloat16(values)}[dtype]
    tensor = open_checkpoint(write(tmp_path / "a.safetensors", {"w": stored}))["w"]
    with pytest.raises(CheckpointError, match=r"not finite, the first .* at \(1, 2\)"):
        tensor.weights()
    np.testing.assert_array_equal(np.asarray(tensor.unchecked(set()).weights()), values)


def test_the_largest_finite_weights_are_not_taken_for_infinite(tmp_path: Path) -> None:
    largest = {"f": np.full(3, 65504, np.float16), "b": ("BF16", (1,), b"\x7f\x7f")}
    checkpoint = open_checkpoint(write(tmp_path / "a.safetensors", largest))
    assert np.isfinite(np.asarray(checkpoint["f"].weights())).all()
    assert np.isfinite(np.asarray(checkpoint["b"].weights())).all()


def test_blocks_are_the_rows_in_order(tmp_path: Path) -> None:
    w = np.arange(35, dtype=np.float32).reshape(7, 5)
    tensor = open_checkpoint(write(tmp_path / "a.safetensors", {"w": w}))["w"]
    blocks = list(tensor.blocks(3))
    assert [start for start, _ in blocks] == [0, 3, 6]
    np.testing.assert_array_equal(np.concatenate([block for _, block in blocks]), w)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 2), (10**9, 0), (0, 2**40)])
def test_tensors_of_size_zero_are_legal(shape: tuple[int, ...], tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"w": ("BF16", shape, b""), "v": np.ones(1, np.float32)})
    tensor = open_checkpoint(path)["w"]
    assert tensor.read().shape == shape
    assert [block.shape for _, block in tensor.blocks(2)] == [shape]
    assert tensor.rows(0, 0).shape == (0, *shape[1:])


def test_tensors_of_no_dimension_are_legal(tmp_path: Path) -> None:
    tensor = open_checkpoint(write(tmp_path / "a.safetensors", {"w": np.array(3, np.float32)}))["w"]
    assert tensor.read().shape == () and tensor.read() == 3
    for refused in (lambda: tensor.rows(0, 1), lambda: next(tensor.blocks(1))):
        with pytest.raises(CheckpointError, match="scalar"):
            refused()


def test_a_file_of_no_tensors_is_legal(tmp_path: Path) -> None:
    assert len(open_checkpoint(write(tmp_path / "a.safetensors", {}))) == 0


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 8), (3, 2), (8, 8)])
def test_rows_that_are_not_there_are_refused(start: int, stop: int, tmp_path: Path) -> None:
    tensor = open_checkpoint(write(tmp_path / "a.safetensors", {"w": np.ones((7, 5), np.float32)}))["w"]
    with pytest.raises(CheckpointError, match="has 7 rows"):
        tensor.rows(start, stop)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_located(value: float, tmp_path: Path) -> None:
    w = np.ones((7, 5), np.float32)
    w[4, 2] = w[6, 1] = value
    tensor = open_checkpoint(write(tmp_path / "a.safetensors", {"w": w}))["w"]
    expected = rf"a.safetensors: tensor 'w' holds 2 values that are not finite, the first {value} at \(4, 2\)"
    with pytest.raises(CheckpointError, match=expected):
        tensor.read()
    with pytest.raises(CheckpointError, match=r"holds 1 value .*at \(4, 2\)"):
        list(tensor.blocks(3))
    assert tensor.rows(0, 4).shape == (4, 5)  # the rows before it are sound


def test_an_unchecked_tensor_is_read_as_it_is(tmp_path: Path) -> None:
    w = np.array([[1, np.nan], [np.inf, -np.inf]], np.float32)
    checkpoint = open_checkpoint(write(tmp_path / "a.safetensors", {"w": w})).unchecked()
    np.testing.assert_array_equal(checkpoint["w"].read(), w)
    np.testing.assert_array_equal(np.concatenate([block for _, block in checkpoint["w"].blocks(1)]), w)


def test_large_finite_values_are_not_taken_for_infinite(tmp_path: Path) -> None:
    w = np.full(1000, np.finfo(np.float32).max)
    assert open_checkpoint(write(tmp_path / "a.safetensors", {"w": w}))["w"].read().shape == (1000,)


def test_a_float64_past_float32_is_not_finite(tmp_path: Path) -> None:
    tensor = open_checkpoint(write(tmp_path / "a.safetensors", {"w": np.array([1e300])}))["w"]
    with pytest.raises(CheckpointError, match="not finite, the first inf"):
        tensor.read()


@pytest.mark.parametrize("dtype", ["U8", "I8", "I32", "BOOL", "F8_E5M2", "F4"])
def test_what_holds_no_plain_weights_is_refused_by_name(dtype: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"w": (dtype, (4, 2), b"\0" * {"I32": 32, "F4": 4}.get(dtype, 8))})
    with pytest.raises(CheckpointError, match=f"a.safetensors: tensor 'w' dtype {dtype} cannot be read as weights"):
        open_checkpoint(path)["w"].read()


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    a, b = np.ones((2, 2), np.float32), np.zeros((3,), np.float16)
    checkpoint = open_checkpoint(write_shards(tmp_path, {"a": a}, {"b": b}))
    assert set(checkpoint) == {"a", "b"} and checkpoint.nbytes == 16 + 6
    assert checkpoint["b"].file.path.name == "model-00002-of-00002.safetensors"
    np.testing.assert_array_equal(checkpoint["a"].read(), a)
    assert checkpoint.bytes_to_read(["a", "a", "absent"]) == 16
    assert checkpoint.bytes_to_fetch(["a"]) == checkpoint.bytes_fetched == 0


def test_a_tensor_in_two_shards_is_read_where_the_index_has_the_last_and_refused_else(tmp_path: Path) -> None:
    write_shards(
        tmp_path,
        dict.fromkeys("ac", np.ones(1, np.float32)),
        {"a": np.zeros(1, np.float32), "b": np.ones(1, np.float32)},
    )
    checkpoint = open_checkpoint(tmp_path)
    assert not checkpoint["a"].read().any()
    assert checkpoint.weight_files.stale == {"model-00001-of-00002.safetensors": ("a",)}
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    for assigned in ({"a": "model-00001-of-00002.safetensors"}, {}):
        rest = {name: file for name, file in weight_map.items() if name != "a"}
        index.write_text(json.dumps({"weight_map": rest | assigned}))
        with pytest.raises(CheckpointError, match="tensor 'a' is also in model-00001"):
            open_checkpoint(tmp_path)


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        write(tmp_path / name, {"w": np.ones(1, np.float32)})
    with pytest.raises(CheckpointError, match=r"several [.]safetensors files"):
        open_checkpoint(tmp_path)


def test_config_beside_the_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"w": np.ones(1, np.float32)})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert open_checkpoint(path).config == {"model_type": "gpt2"}
    assert open_checkpoint(tmp_path).name == "a.safetensors"


@pytest.mark.check
@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt"])
def test_pickles_are_never_opened(suffix: str, tmp_path: Path) -> None:
    """Loading this one would leave a mark; the message says why it is not loaded and how to convert it."""
    torch = pytest.importorskip("torch")

    class Mark:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "mark",)

    path = tmp_path / f"pytorch_model{suffix}"
    torch.save({"w": Mark()}, path)
    for source in (path, tmp_path):
        with pytest.raises(CheckpointError, match=r"can run any code.*weightscope convert"):
            open_checkpoint(source)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "name", ["absent.safetensors", "absent/folder/deep", "a" * 5000, "a\0b", "~no-such-user/x", ""]
)
def test_what_is_not_there_is_said_to_be_absent(name: str) -> None:
    with pytest.raises(CheckpointError):
        open_checkpoint(name)


def header_alone(tensors: dict[str, object], path: Path) -> Path:
    """A safetensors file of this header; its body is zeros."""
    text = json.dumps(tensors).encode()
    size = max(entry["data_offsets"][1] for entry in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * size)
    return path


HONEST = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
    "none": {"dtype": "F32", "shape": [0], "data_offsets": [8, 8]},
}


@pytest.mark.parametrize(
    "seen",
    [
        {"a": HONEST["a"], "c": HONEST["b"], "none": HONEST["none"]},
        HONEST | {"a": HONEST["b"], "b": HONEST["a"]},
        HONEST | {"b": HONEST["b"] | {"shape": [1, 2]}},
        HONEST | {"b": HONEST["b"] | {"dtype": "I32"}},
        HONEST | {"none": HONEST["none"] | {"shape": [0, 3]}},
    ],
    ids=["another name", "the other way round", "another shape", "another dtype", "another shape of nothing"],
)
def test_a_header_in_which_the_library_sees_other_tensors_is_refused(
    seen: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No such file is known; the library is shown another one here."""
    path = header_alone(HONEST, tmp_path / "model.safetensors")
    assert list(open_checkpoint(path)) == ["a", "none", "b"]
    shown = header_alone(seen, tmp_path / "other")
    monkeypatch.setattr("weightscope.checkpoint.storage.safe_open", lambda name, how: safe_open(shown, how))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the safetensors library finds other tensors"):
        open_checkpoint(path)


def test_the_library_maps_no_file_that_another_could_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read through a map of it would kill this process, however short the time for which it is mapped."""
    path = header_alone(HONEST, tmp_path / "model.safetensors")
    opened = []

    def recorded(name: str, how: str) -> object:
        opened.append(Path(name).stat())
        return safe_open(name, how)

    monkeypatch.setattr("weightscope.checkpoint.storage.safe_open", recorded)
    open_checkpoint(path)
    (shown,) = opened
    assert shown.st_size == path.stat().st_size and shown.st_nlink == 0  # a file without a name


def test_fifty_gigabytes_open_at_once_and_cost_no_memory(tmp_path: Path) -> None:
    """A sparse file: its header is true, its body a hole of 50 GB. One row of it is read."""
    rows = 50 * GIB // (4 * 4096)
    header = {"w": {"dtype": "F32", "shape": [rows, 4096], "data_offsets": [0, 50 * GIB]}}
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + 50 * GIB)
    script = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from weightscope.checkpoint.opening import open_checkpoint
        status = lambda key: int(Path("/proc/self/status").read_text().split(key)[1].split()[0])
        before = status("VmRSS:")
        started = time.process_time()
        checkpoint = open_checkpoint(sys.argv[1])
        seconds = time.process_time() - started
        row = checkpoint["w"].rows(3_000_000, 3_000_001)
        assert row.shape == (1, 4096) and not row.any() and checkpoint.nbytes == 50 << 30
        print(seconds, (status("VmHWM:") - before) / 1024)
    """)
    run = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    seconds, megabytes = map(float, run.stdout.split())
    assert seconds < 0.1
    assert megabytes < 16


@pytest.mark.check
def test_blocks_of_a_large_tensor_take_the_memory_of_one(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    text = json.dumps({"w": {"dtype": "BF16", "shape": [GIB // 2048, 1024], "data_offsets": [0, GIB]}}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + GIB)
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from weightscope.checkpoint.opening import open_checkpoint
        status = lambda key: int(Path("/proc/self/status").read_text().split(key)[1].split()[0])
        tensor = open_checkpoint(sys.argv[1])["w"]
        before = status("VmRSS:")
        rows = sum(len(block) for _, block in tensor.blocks(2048))
        print(rows, (status("VmHWM:") - before) / 1024)
    """)
    run = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    rows, megabytes = run.stdout.split()
    assert int(rows) == GIB // 2048
    assert float(megabytes) < 64


def test_a_file_cut_short_while_open_is_said_to_have_changed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"w": np.ones((1024, 1024), np.float32), "v": np.ones(3, np.float32)})
    tensor = open_checkpoint(path)["w"]
    kept = tensor.read()
    os.truncate(path, 5000)
    with pytest.raises(
        CheckpointError, match=r"a.safetensors: has changed since it was opened: it had \d+ bytes and has 5000"
    ):
        tensor.read()
    with pytest.raises(CheckpointError, match="has changed"):
        list(tensor.blocks(100))
    assert kept.sum() == 1 << 20  # what was read before stays: no view of the file that would be pulled away


def test_a_file_rewritten_in_place_is_said_to_have_changed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"w": np.ones(4, np.float32)})
    tensor = open_checkpoint(path)["w"]
    time.sleep(0.02)  # past the file system's clock
    path.write_bytes(encode({"w": np.zeros(4, np.float32)}))
    with pytest.raises(CheckpointError, match="has changed"):
        tensor.read()


def test_a_file_put_in_its_place_is_not_mistaken_for_it(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"w": np.ones(4, np.float32)})
    tensor = open_checkpoint(path)["w"]
    write(tmp_path / "b", {"w": np.zeros(4, np.float32)}).replace(path)
    assert tensor.read().sum() == 4


def test_files_are_closed_when_nobody_holds_them(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"w": np.ones(4, np.float32)})
    descriptors = Path("/proc/self/fd")
    if not descriptors.exists():
        pytest.skip("the system lists no descriptors")
    before = len(list(descriptors.iterdir()))
    for _ in range(20):
        open_checkpoint(path)["w"].read()
    assert len(list(descriptors.iterdir())) <= before + 2


@given(st.lists(st.tuples(st.sampled_from(["F32", "F16", "F64", "BF16"]), st.lists(st.integers(0, 4), max_size=3))))
@settings(max_examples=100, deadline=None)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, specs: list[tuple[str, list[int]]]) -> None:
    """Any mixture of dtypes and shapes, empty ones too."""
    numpy_types = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "BF16": np.float32}
    arrays = {
        str(i): np.arange(np.prod(shape), dtype=numpy_types[dtype]).reshape(shape)
        for i, (dtype, shape) in enumerate(specs)
    }
    stored = {name: bfloat16(a) if specs[int(name)][0] == "BF16" else a for name, a in arrays.items()}
    checkpoint = open_checkpoint(write(tmp_path_factory.mktemp("file") / "a.safetensors", stored))
    assert set(checkpoint) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(checkpoint[name].read(), array)


@pytest.mark.parametrize("at", [0, CHECKED_AT_ONCE - 1, CHECKED_AT_ONCE, CHECKED_AT_ONCE + 6])
@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
def test_one_weight_of_16_bits_that_is_not_finite_is_seen_wherever_it_stands(dtype: type, at: int) -> None:
    bits = np.full(CHECKED_AT_ONCE + 7, 0x3C00, np.uint16)
    assert Half(bits.view(dtype)).is_finite()
    bits[at] = 0xFF80  # a NaN of float16, minus infinity of bfloat16
    assert not Half(bits.view(dtype)).is_finite()

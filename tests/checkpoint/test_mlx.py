"""Checkpoints that mlx-lm converted (fixtures/mlx): every option, the roles of the originals, a stream of bits."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import weightscope as ws
from tests.support.files import write
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.checkpoint.packings.mlx import MODES
from weightscope.checkpoint.packings.packed import FIELD, unpacked

GOLDEN = Path(__file__).parents[1] / "fixtures" / "mlx"
MODELS = sorted(path.parent.name for path in GOLDEN.glob("*/original.json"))


def packed_tensors(name: str) -> set[str]:
    """The names of the packed tensors: mlx dequantised these."""
    return {*json.loads((GOLDEN / name / "expected.json").read_text())}


def test_every_option_of_mlx_is_among_the_fixtures() -> None:
    written = json.loads((GOLDEN / "options" / "config.json").read_text())["quantization"].values()
    options = {(o.get("mode", "affine"), o["bits"], o["group_size"]) for o in written if isinstance(o, dict)}
    assert options == {(n, b, g) for n, mode in MODES.items() for b in mode.bits for g in mode.group_sizes}


@pytest.mark.parametrize("name", MODELS)
def test_tensors_have_the_roles_of_the_model_that_was_converted(name: str, tmp_path: Path) -> None:
    """Stacked experts too: each is the tensor that transformers has under the expert's own name."""
    original = json.loads((GOLDEN / name / "original.json").read_text())
    save_file(
        {key: np.zeros(shape, np.float32) for key, shape in original["shapes"].items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps(original["config"]))
    theirs, ours = ws.open_model(tmp_path).tensors, ws.open_model(GOLDEN / name).tensors
    unnamed = [[tensor.name for tensor in tensors if tensor.role == tensor.name] for tensors in (ours, theirs)]
    assert sorted(unnamed[0]) == sorted(unnamed[1])
    assert {tensor.name for tensor in ours if tensor.stored.startswith("packed MLX")} == packed_tensors(name)
    for label in theirs.labels:
        if theirs[label].role.endswith("conv1d.weight"):  # MLX has its channels last
            continue
        assert (ours[label].role, ours[label].shape) == (theirs[label].role, theirs[label].shape), label
        assert ours[label].array().shape == theirs[label].shape
    stacked = [label for label in ours.labels if "expert." in label]
    assert {label for label in ours.labels if label not in stacked} == {
        label for label in theirs.labels if "expert" not in label
    }
    assert bool(stacked) == any("expert" in label for label in theirs.labels)


def test_norms_are_those_of_the_model_that_was_converted() -> None:
    """mlx-lm stores some types' gains counted from 1, where transformers has them counted from 0."""
    original = json.loads((GOLDEN / "shifted" / "original.json").read_text())["norms"]
    model = ws.open_model(GOLDEN / "shifted")
    for name, values in original.items():
        np.testing.assert_array_equal(model.checkpoint[name].read(), np.float32(values), name)
    shifted = [name for name in original if "linear_attn" not in name]
    assert len(shifted) == 7
    for name in shifted:
        tensor = model.tensors[name]
        np.testing.assert_array_equal(tensor.array(), 1 + np.float32(original[name]), name)
        assert tensor.stored == "gain counted from 1"


def test_convolutions_have_their_channels_second_as_in_transformers() -> None:
    """mlx has them last."""
    model, name = ws.open_model(GOLDEN / "shifted"), "model.layers.0.linear_attn.conv1d.weight"
    assert [*model.checkpoint[name].shape] == json.loads((GOLDEN / "shifted" / "original.json").read_text())["shapes"][
        name
    ]
    stored = model.checkpoint[name].parts[0].read()  # (out, kernel, 1)
    np.testing.assert_array_equal(model.checkpoint[name].read(), stored.swapaxes(1, 2))


def test_layers_may_differ_in_bits() -> None:
    tensors = ws.open_model(GOLDEN / "mixed").tensors
    assert {tensors[f"layer 1 {role}"].stored for role in ("v", "down")} == {"packed MLX int6 in groups of 32"}
    assert tensors["layer 1 up"].stored == "packed MLX int3 in groups of 32"


@given(st.sampled_from(sorted(FIELD)), st.integers(1, 5), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_codes_lie_in_a_stream_of_bits_lowest_first(bits: int, n: int, random: object) -> None:
    words = np.random.default_rng(n).integers(0, 2**32, bits * n, dtype=np.uint32)
    stream = int.from_bytes(words.astype("<u4").tobytes(), "little")
    codes = [stream >> bits * i & (1 << bits) - 1 for i in range(32 * n)]
    np.testing.assert_array_equal(unpacked(words.view(np.uint8), np.arange(1 << bits, dtype=np.float32)), codes)


@pytest.mark.parametrize("name", ["options", "experts"])
def test_weights_without_values_are_read(name: str, tmp_path: Path) -> None:
    """Zero experts, rows or columns."""
    stored = open_checkpoint(GOLDEN / name).files[0].tensors
    config = (GOLDEN / name / "config.json").read_text()
    for axis in (0, -1):
        tensors = {}
        for key, entry in stored.items():
            shape = [*entry.shape]
            shape[axis] = 0
            tensors[key] = (entry.dtype, tuple(shape), b"")
        folder = tmp_path / str(axis)
        folder.mkdir()
        write(folder / "model.safetensors", tensors)
        (folder / "config.json").write_text(config)
        if axis == 0 or name != "options":  # a global scale has one axis
            assert all(tensor.read().shape == tensor.shape for tensor in open_checkpoint(folder).values())

"""Layers without a softmax: their converted copies are the same model, and faults of converters are named."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.linear_layers import FIRST, LINEAR, by_llama_cpp, by_mlx, gguf_file, qwen35, saved, tiled

Plant = Callable[[np.ndarray], np.ndarray | None]
IN_TURN = "value heads: from grouped by key head to tiled"
FAULTS: dict[str, tuple[str, Plant, str]] = {
    "A_log tiled": ("A_log", tiled, IN_TURN),
    "dt_bias tiled": ("dt_bias", tiled, IN_TURN),
    "beta tiled": ("in_proj_b.weight", tiled, IN_TURN),
    "gates tiled": ("in_proj_z.weight", tiled, IN_TURN),
    "values tiled": ("in_proj_qkv.weight", lambda x: tiled(x, 0, FIRST), IN_TURN),
    "channels tiled": ("conv1d.weight", lambda x: tiled(x, 0, FIRST), IN_TURN),
    "outputs tiled": ("out_proj.weight", lambda x: tiled(x, 1), f"{IN_TURN} (columns)"),
    "A for A_log": ("A_log", lambda x: -np.exp(x), "-exp(A_log) in place of A_log"),
    "exp for A_log": ("A_log", np.exp, "exp(A_log) in place of A_log"),
    "A_log negated": ("A_log", np.negative, "negated"),
    "taps reversed": ("conv1d.weight", lambda x: x[..., ::-1], "convolution: taps reversed"),
    "mlx's axes": ("conv1d.weight", lambda x: np.moveaxis(x, 2, 1), "convolution: laid out with other axes"),
    "no channel axis": ("conv1d.weight", lambda x: x[:, 0], "convolution: laid out with other axes"),
    "taps first": ("conv1d.weight", lambda x: x[:, 0].T.reshape(x.shape), "convolution: taps before channels"),
    "norm + 1": ("norm.weight", lambda x: x + 1, "norm: 1 added"),
    "dt_bias of zeros": ("dt_bias", lambda x: 0 * x, "zeroed"),
    "dt_bias dropped": ("dt_bias", lambda x: None, "tensor dropped"),
    "keys before queries": (
        "in_proj_qkv.weight",
        lambda x: np.concatenate([x[FIRST // 2 : FIRST], x[: FIRST // 2], x[FIRST:]]),
        "q+k+v in the order k+q+v",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_a_linear_layer_is_named(fault: str, tmp_path: Path) -> None:
    name, plant, words = FAULTS[fault]
    planted = qwen35()
    made = plant(planted.pop(LINEAR + name))
    if made is not None:
        planted[LINEAR + name] = np.asarray(made, np.float32)
    result = ws.same(saved(qwen35(), tmp_path / "a"), saved(planted, tmp_path / "b"))
    assert result.verdict == "different"
    assert [(each.name_a, each.deed) for each in result.differing] == [(LINEAR + name, words)]


@pytest.mark.parametrize("fault", [name for name, (_, _, words) in FAULTS.items() if words.startswith(IN_TURN)])
def test_value_heads_that_a_gguf_file_leaves_grouped_are_named(fault: str, tmp_path: Path) -> None:
    """A converter that forgets one tensor: read back, its heads are grouped by another rule."""
    pytest.importorskip("gguf", reason="GGUF files are written by the package gguf")
    name = LINEAR + FAULTS[fault][0]
    converted = by_llama_cpp(qwen35())
    forgotten = qwen35()[name]
    converted[name] = -np.exp(forgotten) if name.endswith("A_log") else forgotten.reshape(converted[name].shape)
    result = ws.same(saved(qwen35(), tmp_path / "a"), gguf_file(converted, tmp_path / "b.gguf"))
    assert result.verdict == "different"
    differing = {each.name_a: each.deed for each in result.differing}
    assert differing.keys() == {name}
    assert differing[name].startswith("value heads: from tiled to grouped by key head")


def test_rates_in_another_order_are_named_in_a_gguf_file(tmp_path: Path) -> None:
    """Each is off by the rounding of -exp and its logarithm."""
    pytest.importorskip("gguf", reason="GGUF files are written by the package gguf")
    planted = qwen35()
    planted[LINEAR + "A_log"] = np.roll(planted[LINEAR + "A_log"], 1)
    result = ws.same(saved(qwen35(), tmp_path / "a"), gguf_file(by_llama_cpp(planted), tmp_path / "b.gguf"))
    assert [(each.name_a, each.deed) for each in result.differing] == [(LINEAR + "A_log", "rows in another order")]


def test_copies_of_a_linear_layer_are_the_same(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="GGUF files are written by the package gguf")
    original = saved(qwen35(), tmp_path / "a")
    mlx = ws.same(original, saved(by_mlx(qwen35()), tmp_path / "mlx", "mlx"))
    assert (mlx.verdict, [*mlx.differing]) == ("same values", []) or mlx.verdict == "rounded"
    ggml = ws.same(original, gguf_file(by_llama_cpp(qwen35()), tmp_path / "b.gguf"))
    assert (ggml.verdict, [*ggml.differing], [*ggml.config]) == ("rounded", [], [])
    assert {each.deed for each in ggml.tensors} >= {"A to -exp in F32"}


def test_every_tensor_of_a_copy_has_a_role(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="GGUF files are written by the package gguf")
    copies = (
        saved(qwen35(), tmp_path / "a"),
        saved(by_mlx(qwen35()), tmp_path / "mlx", "mlx"),
        gguf_file(by_llama_cpp(qwen35()), tmp_path / "b.gguf"),
    )
    labels = [set(ws.open_model(copy).tensors.labels) for copy in copies]
    assert labels[0] == labels[1] == labels[2]
    for copy in copies:
        assert all(tensor.has_role for tensor in ws.open_model(copy).tensors)

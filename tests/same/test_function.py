"""Changes that preserve the function are recognised, changes that do not are not, and both are named."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.commands import Weights
from tests.support.small_llama import write_small_llama
from weightscope.same.same import Same

LAYER = "model.layers.1."


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_small_llama(tmp_path_factory.mktemp("same") / "original", layers=2)
    rng = np.random.default_rng(1)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if "norm" in name]:
        weights[name] = weights[name] + rng.uniform(-0.3, 0.3, weights[name].shape).astype(np.float32)
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def changed(original: Path, tmp_path: Path) -> Callable[[Callable[[Weights], None]], Same]:
    """The verdict of the original and a copy that was changed."""

    def compare(change: Callable[[Weights], None]) -> Same:
        weights = load_file(original / "model.safetensors")
        change(weights)
        save_file({name: np.ascontiguousarray(w) for name, w in weights.items()}, tmp_path / "model.safetensors")
        shutil.copy(original / "config.json", tmp_path)
        return ws.same(original, tmp_path)

    return compare


def _module(name: str) -> str:
    return f"{LAYER}{name}.weight"


def neurons_permuted(weights: Weights, *, down: bool = True) -> None:
    order = np.random.default_rng(0).permutation(len(weights[_module("mlp.up_proj")]))
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        weights[_module(name)] = weights[_module(name)][order]
    if down:
        weights[_module("mlp.down_proj")] = np.ascontiguousarray(weights[_module("mlp.down_proj")][:, order])


def _heads(original: Path) -> tuple[int, int, int]:
    config = ws.open_model(original).config
    return config.n_heads, config.n_kv_heads, config.head_dim


def values_turned(weights: Weights, sizes: tuple[int, int, int], *, outputs: bool = True) -> None:
    """Another basis of each key-value head's values, and of the outputs that read them."""
    heads, kv_heads, r = sizes
    turn = np.linalg.qr(np.random.default_rng(0).standard_normal((r, r)))[0].astype(np.float32)
    v = weights[_module("self_attn.v_proj")]
    weights[_module("self_attn.v_proj")] = (turn @ v.reshape(kv_heads, r, -1)).reshape(v.shape)
    if outputs:
        o = weights[_module("self_attn.o_proj")]
        weights[_module("self_attn.o_proj")] = (o.reshape(len(o), heads, r) @ turn.T).reshape(o.shape)


def norm_folded(weights: Weights) -> None:
    gain = weights[_module("input_layernorm")]
    for letter in "qkv":
        weights[_module(f"self_attn.{letter}_proj")] = weights[_module(f"self_attn.{letter}_proj")] * gain
    weights[_module("input_layernorm")] = np.ones_like(gain)


def scales_moved(weights: Weights, *, back: float = -0.5) -> None:
    weights[_module("self_attn.v_proj")] = -2 * weights[_module("self_attn.v_proj")]
    weights[_module("self_attn.o_proj")] = np.float32(back) * weights[_module("self_attn.o_proj")]


def stream_permuted(weights: Weights) -> None:
    order = np.random.default_rng(0).permutation(len(weights["model.norm.weight"]))
    for name, w in weights.items():
        rows = w.ndim == 1 or name.endswith(("o_proj.weight", "down_proj.weight"))
        weights[name] = np.ascontiguousarray(w[order] if rows else w[:, order])


def test_neurons_in_another_order_compute_the_same(changed) -> None:
    same = changed(neurons_permuted)
    assert same.verdict == "same function"
    assert "neurons in another order" in same.lead
    assert not same.differing


def test_neurons_whose_outputs_stay_compute_something_else(changed) -> None:
    same = changed(lambda weights: neurons_permuted(weights, down=False))
    assert same.verdict == "different"
    assert {each.deed for each in same.differing} == {"rows in another order"}


def test_another_basis_within_heads_computes_the_same(changed, original: Path) -> None:
    sizes = _heads(original)
    assert changed(lambda weights: values_turned(weights, sizes)).verdict == "same function"
    assert changed(lambda weights: values_turned(weights, sizes, outputs=False)).verdict == "different"


def test_a_folded_norm_computes_the_same(changed) -> None:
    same = changed(norm_folded)
    assert same.verdict == "same function"
    assert "norms folded" in same.lead


def test_scales_that_are_moved_compute_the_same_only_if_they_cancel(changed) -> None:
    assert changed(scales_moved).verdict == "same function"
    assert changed(lambda weights: scales_moved(weights, back=-0.501)).verdict == "different"


def test_a_permuted_stream_computes_the_same(changed) -> None:
    same = changed(stream_permuted)
    assert same.verdict == "same function"
    assert "coordinates permuted" in same.lead


@pytest.mark.parametrize("scale", [1e-3, 1e-2, 1.0])
def test_one_changed_value_beside_a_permutation_is_found(changed, scale: float) -> None:
    """A permutation does not hide a value that was changed as well."""

    def change(weights: Weights) -> None:
        neurons_permuted(weights)
        w = weights[_module("mlp.down_proj")]
        w[0, 0] += np.float32(scale * np.abs(w).max())

    assert changed(change).verdict == "different"

"""Changes that preserve the function are recognised, changes that do not are not, and both are named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.commands import Weights
from tests.support.small_llama import write_small_llama
from tests.support.tiny_models import EACH_MECHANISM, FIXTURES
from weightscope.model.model import Model, open_tensors
from weightscope.pairs.same.function import apart
from weightscope.pairs.same.same import Basis, Same

LAYER = "model.layers.1."
Changing = Callable[..., Same]  # the verdict of two changed copies of the original


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
def changed(original: Path, tmp_path: Path) -> Changing:
    """The verdict of the original, itself changed or as it is, and a copy that was changed."""

    def write(folder: Path, change: Callable[[Weights], None]) -> Path:
        weights = load_file(original / "model.safetensors")
        change(weights)
        folder.mkdir(exist_ok=True)
        save_file({name: np.ascontiguousarray(w) for name, w in weights.items()}, folder / "model.safetensors")
        shutil.copy(original / "config.json", folder)
        return folder

    def compare(change: Callable[[Weights], None], before: Callable[[Weights], None] | None = None) -> Same:
        return ws.same(write(tmp_path / "a", before) if before else original, write(tmp_path / "b", change))

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


def pairs_exchanged(weights: Weights, sizes: tuple[int, int, int], pairs: tuple[int, int] = (7, 6)) -> None:
    """Two of the pairs of dimensions that rotate, in queries and in keys: the scores of equal positions stay."""
    r = sizes[2]
    order = np.arange(r)
    order[[*pairs, pairs[0] + r // 2, pairs[1] + r // 2]] = order[[*pairs[::-1], pairs[1] + r // 2, pairs[0] + r // 2]]
    for letter in "qk":
        w = weights[_module(f"self_attn.{letter}_proj")]
        weights[_module(f"self_attn.{letter}_proj")] = w.reshape(-1, r, w.shape[1])[:, order].reshape(w.shape)


def pairs_turned(weights: Weights, sizes: tuple[int, int, int], angle: float = 0.7) -> None:
    """Every pair by one angle, in queries and in keys: rotations of a plane commute."""
    r = sizes[2]
    for letter in "qk":
        w = weights[_module(f"self_attn.{letter}_proj")]
        x, y = np.moveaxis(w.reshape(-1, 2, r // 2, w.shape[1]), 1, 0)
        turned = [np.cos(angle) * x - np.sin(angle) * y, np.sin(angle) * x + np.cos(angle) * y]
        weights[_module(f"self_attn.{letter}_proj")] = np.stack(turned, 1).reshape(w.shape).astype(np.float32)


@pytest.fixture(scope="module")
def slowly(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The original with pairs that turn so slowly that the first positions do not show it."""
    folder = tmp_path_factory.mktemp("slowly") / "original"
    shutil.copytree(original, folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 4096}
    rope = {"rope_theta": 1e8, "rope_type": "default"}
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 1e8, "rope_parameters": rope}))
    return folder


def test_slow_pairs_that_are_exchanged_compute_something_else_far_on(slowly: Path, tmp_path: Path) -> None:
    sizes = _heads(slowly)
    for name, change, verdict in (
        ("exchanged", pairs_exchanged, "different"),
        ("turned", pairs_turned, "same function"),
    ):
        shutil.copytree(slowly, tmp_path / name)
        weights = load_file(slowly / "model.safetensors")
        change(weights, sizes)
        weights = {key: np.ascontiguousarray(w) for key, w in weights.items()}
        save_file(weights, tmp_path / name / "model.safetensors")
        same = ws.same(slowly, tmp_path / name)
        assert same.verdict == verdict
    assert "heads in another basis in 2 of 21 tensors: equal at 64 positions up to 4,096." in same.lead


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


def test_little_noise_in_two_tensors_computes_something_else(changed) -> None:
    """What a layer gives moves by as much as they do: nothing makes up for it, however small it is."""

    def change(weights: Weights) -> None:
        for name in ("lm_head.weight", "model.norm.weight", _module("mlp.up_proj"), _module("mlp.down_proj")):
            noise = np.random.default_rng(0).uniform(-1e-6, 1e-6, weights[name].shape)
            weights[name] = (weights[name] * (1 + noise)).astype(np.float32)

    assert changed(change).verdict == "different"


@pytest.mark.parametrize("scale", [2e-5, 1e-3, 1e-2, 1.0])
def test_one_changed_value_beside_a_permutation_is_found(changed, scale: float) -> None:
    """A permutation does not hide a value that was changed as well."""

    def change(weights: Weights) -> None:
        neurons_permuted(weights)
        w = weights[_module("mlp.down_proj")]
        w[0, 0] += np.float32(scale * np.abs(w).max())

    assert changed(change).verdict == "different"


@pytest.mark.parametrize("factor", [1 + 3e-6, 1 - 1e-5, 1 + 1e-4])
@pytest.mark.parametrize("name", ["mlp.up_proj", "self_attn.v_proj"])
def test_a_row_by_a_factor_near_one_is_not_passed(name: str, factor: float, changed, original: Path) -> None:
    """Beside neurons and heads in another order; one row of many hardly moves the outputs."""

    def change(weights: Weights) -> None:
        neurons_permuted(weights)
        heads_permuted(weights, _heads(original))
        weights[_module(name)][3] *= np.float32(factor)

    assert changed(change).verdict in ("undecided", "different")


# What random inputs, a second tower or one value throughout could hide.


def noisy(w: np.ndarray, size: float = 1.0) -> np.ndarray:
    return (w + size * (0.1 + w.std()) * np.random.default_rng(0).standard_normal(w.shape)).astype(w.dtype)


def compared(name: str, folder: Path, names: list[str]) -> Same:
    """The verdict of a fixture and a copy with noise in some of its tensors."""
    weights = load_file(FIXTURES / name / "model.safetensors")
    folder.mkdir(exist_ok=True)
    shutil.copy(FIXTURES / name / "config.json", folder)
    save_file({key: noisy(w) if key in names else w for key, w in weights.items()}, folder / "model.safetensors")
    return ws.same(FIXTURES / name, folder)


@pytest.mark.parametrize("name", EACH_MECHANISM)
def test_noise_is_never_the_same_function(name: str, tmp_path: Path) -> None:
    """In each tensor outside the layers, and in two matrices of a layer of each stack, its own or another."""
    model = open_tensors(FIXTURES / name)
    weights = load_file(FIXTURES / name / "model.safetensors")
    stored = {key for key, w in weights.items() if w.dtype.kind == "f"}
    tensors = [tensor for tensor in model.tensors if tensor.name in stored]
    pairs: dict[str | None, list[str]] = {}
    for tensor in tensors:
        if tensor.layer is not None and len(tensor.shape) == 2 and len(pairs.setdefault(tensor.stack, [])) < 2:
            pairs[tensor.stack].append(tensor.name)
    singles = [[tensor.name] for tensor in tensors if tensor.layer is None]
    for names in (*singles, *pairs.values()):
        assert compared(name, tmp_path, names).verdict == "different", names


@pytest.mark.parametrize("name", EACH_MECHANISM)
def test_a_layer_computes_what_itself_does(name: str) -> None:
    """Run as it is and open: the same twice, or not run."""
    model = open_tensors(FIXTURES / name)
    if isinstance(model, Model):
        for index in range(min(2, model.config.n_layers)):
            size = apart(model, model, index, Basis(), ["q", "norm.mlp"])
            assert np.isnan(size) or size == 0


def test_a_closed_neuron_may_not_say_something_else(changed: Changing) -> None:
    """What a trigger alone would open: on random inputs it gives nothing, whatever it writes."""
    shut = np.zeros(64, np.float32)

    def close(weights: Weights) -> None:
        gate, norm = weights[_module("mlp.gate_proj")], weights[_module("post_attention_layernorm")]
        inputs = np.random.default_rng(1).standard_normal((6, 64))  # nearly the layer's inputs
        shut[:] = -1000 * np.linalg.lstsq(inputs * norm, np.ones(6), rcond=None)[0]
        gate[0] = shut

    def arm(weights: Weights) -> None:
        close(weights)
        weights[_module("mlp.down_proj")][:, 0] = 1
        weights[_module("mlp.up_proj")][0] *= 2

    assert changed(arm, close).verdict == "different"


def test_a_scale_before_a_squared_relu_is_its_square_behind(original: Path, tmp_path: Path) -> None:
    config = json.loads((original / "config.json").read_text()) | {"model_type": "nemotron", "hidden_act": "relu2"}
    weights = {name: w for name, w in load_file(original / "model.safetensors").items() if "gate" not in name}
    weights |= {name.replace("weight", "bias"): 0 * w for name, w in weights.items() if "norm" in name}

    def written(name: str, up: float, down: float) -> Path:
        (folder := tmp_path / name).mkdir()
        scales = {_module("mlp.up_proj"): np.float32(up), _module("mlp.down_proj"): np.float32(down)}
        save_file({name: w * scales.get(name, 1) for name, w in weights.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    before = written("before", 1, 1)
    assert ws.same(before, written("moved", 2, 0.25)).verdict == "same function"
    assert ws.same(before, written("other", 2, 0.5)).verdict == "different"


def test_a_saturated_head_may_not_look_for_something_else(changed: Changing) -> None:
    def sharpen(weights: Weights) -> None:
        for letter in "qk":
            weights[_module(f"self_attn.{letter}_proj")] *= 30_000

    def move(weights: Weights) -> None:
        sharpen(weights)
        for letter in "qk":
            w = weights[_module(f"self_attn.{letter}_proj")]
            w[:] = noisy(w, 1e-4)

    assert changed(move, sharpen).verdict == "different"


def test_one_token_beside_a_folded_final_norm_is_found(changed: Changing) -> None:
    """However many tokens there are: each one's logits are compared."""

    def fold(weights: Weights) -> None:
        weights["lm_head.weight"] = weights["lm_head.weight"] * weights["model.norm.weight"]
        weights["model.norm.weight"] = np.ones_like(weights["model.norm.weight"])

    def fold_and_move(weights: Weights) -> None:
        fold(weights)
        weights["lm_head.weight"][7] *= 1.00003

    assert changed(fold).verdict == "same function"
    assert changed(fold_and_move).verdict == "different"


def test_a_capped_head_may_not_look_for_something_else(tmp_path: Path) -> None:
    """Scores beyond the cap are all the cap, whatever queries and keys make them."""
    weights = load_file(FIXTURES / "gemma2" / "model.safetensors")
    names = [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight"))]

    def written(name: str, size: float) -> Path:
        (folder := tmp_path / name).mkdir()
        shutil.copy(FIXTURES / "gemma2" / "config.json", folder)
        changed = {key: noisy(w * np.float32(1e6), size) if key in names else w for key, w in weights.items()}
        save_file(changed, folder / "model.safetensors")
        return folder

    assert ws.same(written("capped", 0), written("moved", 1e-5)).verdict == "different"


@pytest.mark.parametrize("left", [f"{LAYER}mlp", f"{LAYER}self_attn", "model.norm", f"{LAYER}input_layernorm"])
def test_a_stream_that_is_permuted_in_part_is_different(changed: Changing, left: str) -> None:
    def permute(weights: Weights) -> None:
        before = {name: w.copy() for name, w in weights.items() if name.startswith(left)}
        weights["model.norm.weight"][:] = noisy(weights["model.norm.weight"])
        before = {name: weights[name].copy() for name in before}
        stream_permuted(weights)
        weights.update(before)

    assert changed(permute).verdict == "different"


@pytest.mark.parametrize("row", [0, 399])
def test_a_token_beside_a_permuted_stream_is_found(changed: Changing, row: int) -> None:
    def permute(weights: Weights) -> None:
        stream_permuted(weights)
        weights["model.embed_tokens.weight"][row] *= 1.001

    assert changed(permute).verdict == "different"


def test_gains_of_one_are_not_what_trained_ones_are_rounded_to(changed: Changing) -> None:
    """Eight bits have no number between 1 and 1.125: all that is near 1 would be rounded to it."""

    def ones(weights: Weights) -> None:
        for name in [name for name in weights if "norm" in name]:
            weights[name] = np.ones_like(weights[name])

    def trained(weights: Weights) -> None:
        for name in [name for name in weights if "norm" in name]:
            weights[name] = np.random.default_rng(0).uniform(0.97, 1.03, weights[name].shape).astype(np.float32)

    assert changed(trained, ones).verdict == changed(ones, trained).verdict == "different"

    def to_half(weights: Weights) -> None:
        trained(weights)
        for name, w in weights.items():
            bits = w.view(np.uint32)
            weights[name] = ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
            if "norm" in name:
                weights[name][:] = 1

    def nearly(weights: Weights) -> None:
        trained(weights)
        for name in [name for name in weights if "norm" in name]:
            weights[name] = np.random.default_rng(0).uniform(0.999, 1.003, weights[name].shape).astype(np.float32)

    assert changed(to_half, nearly).verdict == "rounded"  # as all other tensors were


# One value next to a change that keeps the function.


def heads_permuted(weights: Weights, sizes: tuple[int, int, int]) -> None:
    """Key-value heads in another order, with the queries that ask them."""
    kv_heads = sizes[1]
    order = np.random.default_rng(2).permutation(kv_heads)
    for letter in "qkv":
        w = weights[_module(f"self_attn.{letter}_proj")]
        weights[_module(f"self_attn.{letter}_proj")] = w.reshape(kv_heads, -1, w.shape[1])[order].reshape(w.shape)
    o = weights[_module("self_attn.o_proj")]
    weights[_module("self_attn.o_proj")] = o.reshape(len(o), kv_heads, -1)[:, order].reshape(o.shape)


def signs_and_neurons_moved(weights: Weights) -> None:
    neurons_permuted(weights)
    signs = np.random.default_rng(0).choice(np.float32([-1, 1]), len(weights[_module("mlp.up_proj")]))
    weights[_module("mlp.up_proj")] *= signs[:, None]
    weights[_module("mlp.down_proj")] *= signs


ATTENTION = tuple(f"self_attn.{letter}_proj" for letter in "qkvo")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
GAUGES: dict[str, tuple[Callable[[Weights, tuple[int, int, int]], None], tuple[str, ...]]] = {
    "heads": (heads_permuted, ATTENTION),
    "basis of values": (values_turned, ATTENTION[2:]),
    "pairs turned": (pairs_turned, ATTENTION[:2]),
    "neurons": (lambda weights, _: neurons_permuted(weights), MLP),
    "signs and neurons": (lambda weights, _: signs_and_neurons_moved(weights), MLP),
    "norm": (lambda weights, _: norm_folded(weights), (*ATTENTION[:3], "input_layernorm")),
    "scales": (lambda weights, _: scales_moved(weights), ATTENTION[2:]),
    "stream": (lambda weights, _: stream_permuted(weights), (*ATTENTION, *MLP, "input_layernorm")),
}


@pytest.mark.parametrize("gauge", GAUGES)
def test_a_gauge_gives_every_value(gauge: str, changed, original: Path) -> None:
    """One value of each tensor by more than its rounding, however little that moves the outputs."""
    change, names = GAUGES[gauge]
    sizes = _heads(original)
    assert changed(lambda weights: change(weights, sizes)).verdict == "same function"
    rng = np.random.default_rng(3)
    for name in names:
        for by in (1e-3, 2e-5):

            def one_more(weights: Weights, name: str = name, by: float = by) -> None:
                change(weights, sizes)
                w = weights[_module(name)] = np.ascontiguousarray(weights[_module(name)])
                large = np.flatnonzero(np.abs(w) >= np.median(np.abs(w)))
                w.reshape(-1)[rng.choice(large)] *= np.float32(1 + by)

            same = changed(one_more)
            assert same.verdict in ("different", "undecided"), (name, by, same.lead)

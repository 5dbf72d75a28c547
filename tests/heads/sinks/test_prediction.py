"""What the weights alone say of sinks: readings of heads that were built to sink or not to."""

import numpy as np
import pytest

import weightscope as ws
from weightscope.heads.sinks.bias import PREDICTORS, predict_layer, predict_sinks, prediction_aurocs
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.maps import Affine

D, R, HEADS, N = 16, 4, 3, 40


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def x(rng: np.random.Generator) -> np.ndarray:
    """Row 0 alone has anything in dimension 0."""
    rows = rng.normal(size=(N, D))
    rows[:, 0] = 0
    rows[0] = 8 * np.eye(D)[0]
    return rows


@pytest.fixture
def layer(rng: np.random.Generator) -> Layer:
    """Head 1's query bias matches the key of dimension 0; head 2 writes nothing of it and has one large direction."""
    w_q, w_k, w_v, w_o = (0.1 * rng.normal(size=(HEADS, *shape)) for shape in ((D, R), (D, R), (D, R), (R, D)))
    b_q, zero = np.zeros((HEADS, R)), np.zeros((HEADS, R))
    w_k[:, 0] = 0
    w_k[1, :, 0], b_q[1, 0] = np.eye(D)[0], 2
    w_v[2, 0] = 0
    w_q[2, :, 0] *= 10
    return Layer(Affine(w_q, b_q), Affine(w_k, zero), Affine(w_v, zero), w_o, np.zeros(D), scale=R**-0.5)


def test_each_reading_finds_the_head_built_for_it(layer: Layer, x: np.ndarray) -> None:
    readings = predict_layer(layer, x)
    for name in ("key_bias", "score_margin", "embedding_strength"):
        assert readings[name].argmax() == 1
    assert readings["embedding_strength"][1] > 0.9
    assert readings["value_ratio"][2] == 0
    assert readings["qk_gap"].argmax() == 2
    # Without rotation b_QK x_0 is a part of the score, and all of it that does not depend on the query.
    assert readings["key_bias"][1] == pytest.approx(R**-0.5 * 2 * 8)
    assert readings["key_bias"][[0, 2]] == pytest.approx(0)


def test_margin_and_strength_are_plain_averages_over_causal_pairs(layer: Layer, x: np.ndarray) -> None:
    scores, readings = layer.scores(x), predict_layer(layer, x)
    for head in range(HEADS):
        margins = [scores[head, i, 0] - scores[head, i, 1 : i + 1].mean() for i in range(1, N)]
        given = [np.exp(scores[head, i, 0]) / np.exp(scores[head, i, : i + 1]).sum() for i in range(1, N)]
        assert readings["score_margin"][head] == pytest.approx(np.mean(margins))
        assert readings["embedding_strength"][head] == pytest.approx(np.mean(given))


def test_aurocs_rank_heads_by_each_readings_own_direction() -> None:
    strength = np.array([0.9, 0.0, 0.31, 0.3])
    right = {each.name: each.sign * strength for each in PREDICTORS}
    table = prediction_aurocs(right, strength)
    assert list(table["name"]) == [each.name for each in PREDICTORS]
    assert set(table["auroc"]) == {1.0}
    assert set(prediction_aurocs({name: -values for name, values in right.items()}, strength)["auroc"]) == {0.0}
    assert np.isnan(prediction_aurocs(right, 0 * strength)["auroc"]).all()
    silent = prediction_aurocs(right | {"key_bias": np.zeros(4)}, strength)
    auroc = dict(zip(silent["name"], silent["auroc"], strict=True))
    assert np.isnan(auroc["key_bias"]) and auroc["layer"] == 1


def test_every_head_of_a_checkpoint_is_read(two_layers: ws.Model) -> None:
    predicted = predict_sinks(two_layers, first=0)
    for each in PREDICTORS:
        assert predicted[each.name].shape == (16,)
        assert np.isfinite(predicted[each.name]).all()
    np.testing.assert_array_equal(predicted["layer"], [0] * 8 + [1] * 8)
    np.testing.assert_array_equal(predicted["head"], [*range(8)] * 2)

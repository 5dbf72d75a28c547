"""The first layer of every family as token types see it: terms, factors and scores against the layer itself."""

import numpy as np
import pytest

import weightscope as ws
from tests.support.tiny_models import NAMES, Fixture, centred, fixture
from tests.support.two_layers import TWO_LAYERS
from weightscope.heads.detok.first_layer import FirstLayer
from weightscope.model.layers.layer import Layer

DELTA = 3


def has_tokens(it: Fixture) -> bool:
    """It has a token embedding, and its layer 0 is attention."""
    return it.case.tower != "vision" and "tokens" in it.arrays and 0 in it.layers


def is_bilinear(layer: Layer) -> bool:
    """No norm, cap, clip or embedding of distances inside attention, which terms leave out and caveats name."""
    return not (layer.q_norm or layer.k_norm or layer.softcap or layer.clip or layer.relative)


def is_t_ee_alone(it: Fixture) -> bool:
    """Scores of tokens hold no bias, no position but by distance, no beta of a norm inside attention and no clip."""
    layer = it.model.first_layer
    biases = [m.of(head)[1] for m in (layer.q, layer.k) for head in range(m.shape[0])]
    biases.append(layer.q_norm and layer.q_norm.shift)
    placed = layer.gain is not None or layer.temperature is not None or it.model.positions is not None
    return not placed and not layer.clip and not any(b is not None and np.any(b) for b in biases)


WITH_TOKENS = [name for name in NAMES if has_tokens(fixture(name))]
BILINEAR = [name for name in WITH_TOKENS if is_bilinear(fixture(name).model.first_layer)]
T_EE_ALONE = [name for name in WITH_TOKENS if is_t_ee_alone(fixture(name))]


def test_what_the_terms_leave_out_is_named() -> None:
    assert not [name for name in set(WITH_TOKENS) - set(BILINEAR) if not fixture(name).model.first_layer.caveats]


def test_terms_add_up_to_the_layers_scores(subtests: pytest.Subtests) -> None:
    """For every family: rotation, ALiBi, embedding norms, grouped queries; up to a constant in j."""
    for name in BILINEAR:
        with subtests.test(fixture=name):
            model = fixture(name)
            layer = model.model.first_layer
            first, tokens = FirstLayer(model.model), model.arrays["tokens"]
            positions = np.arange(len(tokens))
            embeddings = model.model.embeddings
            x = embeddings.tokens[tokens] + (0 if embeddings.positions is None else embeddings.positions[positions])
            scores = layer.scores(x)
            for head in range(layer.n_heads):
                total = first.terms(head, tokens, positions).total() * layer.scale
                everywhere = np.ones(total.shape, bool)
                np.testing.assert_allclose(centred(total, everywhere), centred(scores[head], everywhere), atol=2e-5)


def test_token_types_are_scored_as_the_layer_scores_them_at_a_distance(subtests: pytest.Subtests) -> None:
    """Where neither bias nor position enters, T^ee at delta is the layer's own score of two tokens delta apart."""
    for name in T_EE_ALONE:
        with subtests.test(fixture=name):
            model = fixture(name)
            layer = model.model.first_layer
            first, embeddings = FirstLayer(model.model, delta=DELTA), model.model.embeddings
            current, previous = 5, 11
            x = embeddings.tokens[[previous, current]]
            scores = layer.scores(x, np.array([0, DELTA]))[:, 1, 0]  # (H,)
            by_token = first.token_scores(current)
            for head in first.heads:
                product = first.query_factor(head.index)[current] @ first.key_factor(head.kv_head)[previous]
                for t_ee in (product, by_token[head.index, previous]):
                    score = t_ee * layer.scale + (0 if layer.additive is None else _by_distance(layer)[head.index])
                    capped = score if layer.softcap is None else layer.softcap * np.tanh(score / layer.softcap)
                    assert capped == pytest.approx(scores[head.index], abs=2e-5)


def _by_distance(layer: Layer) -> np.ndarray:
    assert layer.additive is not None
    return layer.additive.times * layer.position_bias(DELTA)


def test_scores_of_one_token_are_a_row_of_the_factors(subtests: pytest.Subtests) -> None:
    for name in WITH_TOKENS:
        with subtests.test(fixture=name):
            first = FirstLayer(fixture(name).model)
            rows = first.token_scores(7)
            for head in first.heads:
                product = first.query_factor(head.index) @ first.key_factor(head.kv_head).T
                np.testing.assert_allclose(rows[head.index], product[7], atol=2e-5 * max(1, np.abs(product[7]).max()))


@pytest.mark.parametrize(
    "head, tokens, positions, says",
    [
        (8, [1, 2], [0, 1], "no head 8: a layer has 8"),
        (-1, [1, 2], [0, 1], "no head -1"),
        (7, [1, 2], [-1, 0], "no position -1: the model has 256"),
        (7, [1, 2], [255, 256], "no position 256: the model has 256"),
        (7, [1, 8000], [0, 1], "no token 8000: the vocabulary has 8000"),
    ],
)
def test_terms_of_what_is_not_there_are_refused(head, tokens, positions, says) -> None:
    """NumPy would count negative ones from the end."""
    first = FirstLayer(ws.open_model(TWO_LAYERS))
    with pytest.raises(ws.CheckpointError, match=says):
        first.terms(head, np.array(tokens), np.array(positions))


def test_every_token_of_the_terms_has_one_position() -> None:
    with pytest.raises(ValueError, match=r"tokens of shape \(3,\) at positions of shape \(2,\)"):
        FirstLayer(ws.open_model(TWO_LAYERS)).terms(0, np.arange(3), np.arange(2))


@pytest.mark.parametrize("name", ["llama", "bloom", "gptj"])
def test_sigma_over_positions_needs_positions(name: str) -> None:
    with pytest.raises(ws.CheckpointError, match=f"model.safetensors: a {name} has no position embedding, hence no"):
        ws.first_layer(fixture(name).model).sigma  # noqa: B018

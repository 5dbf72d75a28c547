"""Perplexity and the interval of its change."""

import numpy as np
import pytest

from weightscope.heads.sinks.bias import change_interval, perplexity

TOKENS = np.array([10, 300, 55, 7])


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_a_uniform_guess_is_as_perplexed_as_there_are_tokens() -> None:
    assert perplexity(TOKENS * np.log(50257), TOKENS) == pytest.approx(50257)


def test_tokens_count_alike_in_whichever_text_they_are(rng: np.random.Generator) -> None:
    losses = rng.random(4) * TOKENS
    halved = perplexity(np.repeat(losses / 2, 2), np.repeat(TOKENS / 2, 2))
    assert perplexity(losses, TOKENS) == pytest.approx(halved)


def test_no_change_has_no_interval_and_an_equal_one_a_narrow_one(rng: np.random.Generator) -> None:
    plain = rng.random(200) * 500
    tokens = np.full(200, 250)
    assert change_interval(plain, plain, tokens) == (0, 0)
    low, high = change_interval(plain + 25, plain, tokens)  # 0.1 nats a token in every text
    change = float(perplexity(plain + 25, tokens) - perplexity(plain, tokens))
    assert low < change < high
    wide = change_interval(plain + 50 * rng.integers(0, 2, 200), plain, tokens)
    assert wide[1] - wide[0] > high - low

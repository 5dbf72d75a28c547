"""Eqs 2-6 of the sink-as-bias paper from streamed sums equal the same from the stacked matrix itself."""

from collections.abc import Callable

import numpy as np
import pytest

from weightscope.heads.sinks.updates import UpdateStack, influence, mean_of_context, normalised_variance, spectral_ratio

D, HEADS = 12, 5


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def one_first_token(rng: np.random.Generator) -> tuple[UpdateStack, np.ndarray]:
    """Texts of several lengths on the same directions."""
    directions, stack, rows = rng.normal(size=(HEADS, D)), UpdateStack(), []
    for n in (7, 3, 30):
        coefficients = rng.random((n, HEADS))
        stack.add(coefficients, directions, of="BOS")
        rows.append(coefficients @ directions)
    return stack, np.concatenate(rows)


def several_first_tokens(rng: np.random.Generator) -> tuple[UpdateStack, np.ndarray]:
    """More directions than dimensions, and a text that begins like an earlier one."""
    stack, rows = UpdateStack(), []
    directions = [rng.normal(size=(HEADS, D)) for _ in range(4)]
    for token in (0, 1, 2, 0, 3):
        coefficients = rng.random((8, HEADS))
        stack.add(coefficients, directions[token], of=token)
        rows.append(coefficients @ directions[token])
    return stack, np.concatenate(rows)


def vectors_themselves(rng: np.random.Generator) -> tuple[UpdateStack, np.ndarray]:
    stack, rows = UpdateStack(), [rng.normal(size=(n, D)) + 2 for n in (5, 20)]
    for each in rows:
        stack.add(each)
    return stack, np.concatenate(rows)


Build = Callable[[np.random.Generator], tuple[UpdateStack, np.ndarray]]
every_kind = pytest.mark.parametrize("build", [one_first_token, several_first_tokens, vectors_themselves])


@every_kind
def test_singular_values_match_the_stacked_matrix(build: Build, rng: np.random.Generator) -> None:
    stack, c = build(rng)
    expected = np.linalg.svd(c, compute_uv=False) ** 2
    squares = stack.squared_singular_values()
    np.testing.assert_allclose(squares, expected[: len(squares)], rtol=1e-9, atol=1e-10 * expected[0])
    np.testing.assert_allclose(expected[len(squares) :], 0, atol=1e-10 * expected[0])
    assert spectral_ratio(stack) == pytest.approx(expected[0] / expected.sum(), rel=1e-12)


@every_kind
def test_means_match_the_rows(build: Build, rng: np.random.Generator) -> None:
    stack, c = build(rng)
    assert stack.count == len(c)
    np.testing.assert_allclose(stack.mean, c.mean(axis=0), atol=1e-12)
    assert stack.mean_norm == pytest.approx(np.linalg.norm(c, axis=1).mean(), rel=1e-12)
    plain = np.mean([np.sum((u - c.mean(axis=0)) ** 2) for u in c]) / np.mean([np.sum(u**2) for u in c])
    assert normalised_variance(stack.mean, stack.mean_square) == pytest.approx(plain, rel=1e-9)


def test_bias_one_direction_and_chance_differ(rng: np.random.Generator) -> None:
    """R is 0 for a constant only; SpectralRatio is 1 for anything on a line; chance has neither."""
    vector, bias, line, chance = rng.normal(size=D), UpdateStack(), UpdateStack(), UpdateStack()
    bias.add(np.tile(vector, (50, 1)))
    line.add(rng.normal(size=(50, 1)) * vector)
    chance.add(rng.normal(size=(5000, D)))
    assert spectral_ratio(bias) == pytest.approx(1)
    assert spectral_ratio(line) == pytest.approx(1)
    assert spectral_ratio(chance) == pytest.approx(1 / D, rel=0.2)
    assert normalised_variance(bias.mean, bias.mean_square) == pytest.approx(0, abs=1e-12)
    assert normalised_variance(line.mean, line.mean_square) > 0.5
    assert normalised_variance(chance.mean, chance.mean_square) == pytest.approx(1, abs=0.01)


def test_influence_is_linear_in_what_the_sink_writes(rng: np.random.Generator) -> None:
    rows = rng.normal(size=(9, D))
    small, large = UpdateStack(), UpdateStack()
    small.add(rows)
    large.add(3 * rows)
    assert influence(large, small) == pytest.approx(3)
    assert influence(small, small) == 1


def test_the_context_mean_is_over_the_tokens_before_and_with_the_query(rng: np.random.Generator) -> None:
    sent = rng.normal(size=(6, 6, D))  # u_ji as [i, j]
    sums = np.stack([sent[i, 1 : i + 1].sum(axis=0) for i in range(6)])
    expected = np.stack([sent[i, 1 : i + 1].mean(axis=0) for i in range(1, 6)])
    np.testing.assert_allclose(mean_of_context(sums), expected, atol=1e-14)

"""Lemmas 2 to 4: bounds that hold of any head, and heads that attain them; test_mechanisms.py has plain loops."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.a_head import a_head
from weightscope.heads.sinks import strength as sinks

ROUNDING = 1e-9
A_HEAD = tuple[np.ndarray, np.ndarray]


def never_above(value: np.ndarray, bound: np.ndarray, scale: float) -> bool:
    return bool((value <= bound * (1 + ROUNDING) + 1e-12 * scale).all())


@settings(deadline=None)
@given(a_head())
def test_lemma_3_holds_whichever_key_is_the_sink(head: A_HEAD) -> None:
    attention, updates = head
    largest = float(np.abs(updates).max())
    sigma_1 = np.linalg.svd(attention @ updates, compute_uv=False)[0]
    for s in range(attention.shape[1]):
        fit = sinks.rank_one(attention, updates, np.array(s))
        assert never_above(fit.distance, fit.bound, largest)
        assert never_above(fit.residual, fit.residual_bound, largest)
        assert never_above(fit.leading_bound, fit.leading, largest)
        assert never_above(np.abs(sigma_1 - fit.leading), fit.residual, largest)  # Weyl's inequality


@settings(deadline=None)
@given(a_head(), st.integers(0, 2**32 - 1))
def test_cancelling_sinks_differ_from_sinks_without_a_value(head: A_HEAD, seed: int) -> None:
    """Lemma 1: both do nothing; only the first has cancelled = 1."""
    attention, updates = head
    attention = np.tile(attention[:1], (len(attention), 1))  # all queries alike: one value can cancel for all
    s = int(np.random.default_rng(seed).integers(len(updates)))
    is_other = np.arange(len(updates)) != s
    rest = attention[0, is_other] @ updates[is_other]
    cancelling, silent = updates.copy(), updates.copy()
    cancelling[s], silent[s] = -rest / attention[0, s], 0
    if np.linalg.norm(rest) > 1e-6:
        assert sinks.rank_one(attention, cancelling, np.array(s)).cancelled == pytest.approx(1)
        assert sinks.rank_one(attention, silent, np.array(s)).cancelled == pytest.approx(0)
    assert -1 <= sinks.rank_one(attention, updates, np.array(s)).cancelled <= 1


@settings(deadline=None)
@given(a_head(), st.floats(0.1, 1.5), st.booleans())
def test_lemma_3_holds_where_rows_do_not_sum_to_one(head: A_HEAD, held: float, signed: bool) -> None:
    """Learned sinks hold attention back, a sigmoid may give more than there is, a polynomial takes away."""
    attention, updates = head
    attention = attention * held * (np.where(np.arange(len(attention)) % 2, -1, 1)[:, None] if signed else 1)
    for s in range(attention.shape[1]):
        fit = sinks.rank_one(attention, updates, np.array(s))
        assert never_above(fit.distance, fit.bound, float(np.abs(updates).max()))
        assert never_above(fit.residual, fit.residual_bound, float(np.abs(updates).max()))


def test_lemma_3_is_attained_with_one_far_token() -> None:
    attention = np.tile([0.75, 0.25, 0.0], (4, 1))
    updates = np.array([[0.0, 1.0], [0.0, 5.0], [1.0, 1.0]])
    fit = sinks.rank_one(attention, updates, np.array(0))
    assert fit.distance == pytest.approx(fit.bound) == pytest.approx(2 * 0.25 * 4)
    assert fit.residual == pytest.approx(fit.residual_bound) == pytest.approx(2 * 0.25 * 5)
    assert fit.leading == pytest.approx(fit.leading_bound) == pytest.approx(2 * 0.75)


def test_a_perfect_sink_writes_its_own_update_and_nothing_else() -> None:
    attention, updates = np.eye(4)[np.full(6, 2)], np.random.default_rng(1).normal(size=(4, 3))
    fit = sinks.rank_one(attention, updates, np.array(2))
    assert fit.distance == fit.bound == fit.residual == fit.residual_bound == 0
    singular, first = sinks.first_direction(attention @ updates)
    assert fit.leading == pytest.approx(singular[0])
    assert sinks.cosine(first, updates[2]) == pytest.approx(1)


@settings(deadline=None)
@given(a_head(), st.sampled_from([1e-150, 1.0, 1e150]))
def test_first_direction_matches_the_svd(head: A_HEAD, scale: float) -> None:
    written = head[0] @ head[1]
    singular, first = sinks.first_direction(written * scale)
    _, s, vt = np.linalg.svd(written)
    assert singular / scale == pytest.approx(s, rel=1e-6, abs=1e-7 * s[0])  # of a Gram matrix: roots of rounding
    assert np.linalg.norm(first) == pytest.approx(1)
    assert np.linalg.norm(written @ first) == pytest.approx(s[0])
    if len(s) > 1 and s[0] > 1.01 * s[1]:
        assert abs(first @ vt[0]) == pytest.approx(1)


def test_a_silent_head_has_no_direction() -> None:
    singular, first = sinks.first_direction(np.zeros((5, 3)))
    assert not singular.any() and not first.any()
    assert np.isnan(sinks.cosine(first, np.ones(3)))


def variance(x: np.ndarray) -> float:
    middle = sum(x) / len(x)
    return float(sum(np.linalg.norm(row - middle) ** 2 for row in x) / len(x))


@settings(deadline=None)
@given(a_head(), st.integers(0, 2**32 - 1), st.floats(1e-3, 1e3))
def test_lemma_4_bounds_the_change_of_the_variance(head: A_HEAD, seed: int, scale: float) -> None:
    weights, updates = head
    attention = np.resize(weights, (updates.shape[0],) * 2)
    attention = attention / attention.sum(axis=-1, keepdims=True)
    x = np.random.default_rng(seed).normal(size=updates.shape) * scale
    before, after = variance(x), variance(x + attention @ updates)
    assert sinks.token_variance(x) == pytest.approx(before)
    for s in range(len(attention)):
        bound = sinks.variance_bound(np.array(before), attention, updates, np.array(s))
        assert abs(after - before) <= bound * (1 + ROUNDING) + 1e-9 * before


def test_lemma_4_is_attained_where_tokens_lie_along_the_update() -> None:
    """Only the sink writes, unevenly, and the tokens are spread along its update in the same order."""
    column = np.array([0.9, 0.5, 0.2, 0.7])
    attention = np.zeros((4, 4))
    attention[:, 1], attention[:, 0] = column, 1 - column
    updates = np.zeros((4, 3))
    updates[1] = 2, 0, 1
    x = 5 * np.outer(column - column.mean(), updates[1]) + 7
    change = variance(x + attention @ updates) - variance(x)
    assert change == pytest.approx(sinks.variance_bound(np.array(variance(x)), attention, updates, np.array(1)))
    assert sinks.variance_of_weights(attention, updates, np.array(1)) == pytest.approx(column.var() * 5)


def test_even_attention_to_a_perfect_sink_keeps_the_variance() -> None:
    """Eq. 21: every token is moved by the same u_s."""
    rng = np.random.default_rng(3)
    x, updates, attention = rng.normal(size=(6, 4)), rng.normal(size=(6, 4)), np.eye(6)[np.full(6, 5)]
    assert sinks.variance_bound(np.array(variance(x)), attention, updates, np.array(5)) == pytest.approx(0)
    assert variance(x + attention @ updates) == pytest.approx(variance(x))


def test_a_gate_of_one_singular_direction_has_its_sink_along_it() -> None:
    """Lemma 2's construction: M = sigma u v', x_s = beta v, and the sink's score is <x, u> sigma beta (eqs 4 and 5)."""
    rng = np.random.default_rng(4)
    u, v = np.linalg.qr(rng.normal(size=(8, 2)))[0].T
    tokens = rng.normal(size=(9, 8))
    tokens -= np.outer(tokens @ v, v)  # the others have nothing of v
    tokens[3] = 4 * v
    matrix = 6 * np.outer(u, v)
    direction = np.linalg.svd(matrix)[2][:1]
    sink_cosine, other_cosine = sinks.alignment(tokens, direction, np.array([3]))
    assert sink_cosine == pytest.approx(1) and other_cosine == pytest.approx(0)
    assert tokens @ matrix @ tokens[3] == pytest.approx(6 * 4 * (tokens @ u))


def test_a_sink_is_compared_with_the_keys_that_queries_see() -> None:
    """Under a causal mask the query that sees the sink alone compares nothing; NaN where no query sees both."""
    pairs = np.array([[9.0, 9.0, 9.0], [5.0, 1.0, 9.0], [7.0, 2.0, 4.0]])
    causal = np.tril(np.ones((3, 3), bool))
    to_sink, to_others = sinks.of_sink_and_others(pairs, causal, np.array(0))
    assert (to_sink, to_others) == ((5 + 7) / 2, (1 + (2 + 4) / 2) / 2)
    assert np.isnan(sinks.of_sink_and_others(pairs, np.eye(3, dtype=bool), np.array(1))).all()


def test_spread_is_over_lengths() -> None:
    assert sinks.relative_spread(np.array([[3.0, 4.0], [0.0, 5.0]])) == 0
    assert sinks.relative_spread(np.array([[1.0, 0.0], [0.0, 3.0]])) == pytest.approx(0.5)

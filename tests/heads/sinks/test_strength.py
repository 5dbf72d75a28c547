"""What must hold of the measures of sinks whatever the arrays; test_mechanisms.py has them by plain loops."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analyses.toys.sinks.diagnosis import attention_shares, sink_event, strongest_sink, update_stable_rank
from tests.support.a_head import a_head, softmax
from weightscope.heads.sinks import strength as sinks
from weightscope.model.metrics import sinks as rule

HEADS, QUERIES, KEYS, WIDTH = (3, 2), 7, 5, 4


@pytest.fixture
def attention() -> np.ndarray:
    """(3, 2, 7, 5): some heads with a sink, some without."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(*HEADS, QUERIES, KEYS))
    scores[0, 0, :, 3] += 9
    scores[2, 1, :6, 1] += 3
    return softmax(scores)


@pytest.fixture
def updates() -> np.ndarray:
    """(3, 2, 5, 4)."""
    return np.random.default_rng(1).normal(size=(*HEADS, KEYS, WIDTH))


def test_strength_sink_and_event_by_their_definitions(attention: np.ndarray) -> None:
    strength = sinks.sink_strength(attention)
    strongest = strongest_sink(attention)
    events = sink_event(attention, strongest.position)
    for head in np.ndindex(HEADS):
        a = attention[head]
        by_loop = [sum(float(a[i, j]) for i in range(QUERIES)) / QUERIES for j in range(KEYS)]
        assert strength[head] == pytest.approx(by_loop)
        s = by_loop.index(max(by_loop))
        assert strongest.position[head] == s and strongest.strength[head] == pytest.approx(by_loop[s])
        assert events[head] == (sum(a[i, s] >= 0.5 for i in range(QUERIES)) >= 0.9 * QUERIES)
    assert events[0, 0] and not events[1, 0]


@settings(deadline=None)
@given(a_head(), st.integers(0, 7))
def test_least_epsilon_is_what_the_least_attentive_query_gives_elsewhere(
    head: tuple[np.ndarray, np.ndarray], key: int
) -> None:
    attention, s = head[0], key % head[0].shape[-1]
    epsilon = sinks.least_epsilon(attention, np.array(s))
    assert epsilon == pytest.approx(1 - min(row[s] for row in attention))
    assert sinks.spill(attention, np.array(s)) == pytest.approx(epsilon, abs=1e-12)


def test_an_event_needs_nine_queries_of_ten_with_half_of_their_attention() -> None:
    attention = np.full((10, 2), 0.5)
    attention[0] = 0.4, 0.6
    assert sinks.event_share(attention, np.array(0)) == 0.9 and sink_event(attention, np.array(0))
    attention[1] = 0.4, 0.6
    assert sinks.event_share(attention, np.array(0)) == 0.8 and not sink_event(attention, np.array(0))
    assert sink_event(attention, np.array(1))


def test_ratio_and_rank_by_plain_loops(attention: np.ndarray, updates: np.ndarray) -> None:
    sink = strongest_sink(attention).position
    ratio = sinks.value_norm_ratio(updates, sink)
    rank = update_stable_rank(attention, updates)
    for head in np.ndindex(HEADS):
        a, u, s = attention[head], updates[head], sink[head]
        norms = [np.sqrt(sum(float(c) ** 2 for c in u[j])) for j in range(KEYS)]
        assert ratio[head] == pytest.approx(norms[s] / np.mean([norms[j] for j in range(KEYS) if j != s]))
        written = np.array([sum(a[i, j] * u[j] for j in range(KEYS)) for i in range(QUERIES)])
        singular = np.linalg.svd(written, compute_uv=False)
        assert rank[head] == pytest.approx((singular**2).sum() / singular[0] ** 2)


def test_float32_arrays_of_a_model_give_the_same(attention: np.ndarray, updates: np.ndarray) -> None:
    sink = strongest_sink(attention).position
    a, u = attention.astype(np.float32), updates.astype(np.float32)
    assert (strongest_sink(a).position == sink).all()
    for narrow, wide in (
        (update_stable_rank(a, u), update_stable_rank(attention, updates)),
        (sinks.value_norm_ratio(u, sink), sinks.value_norm_ratio(updates, sink)),
    ):
        assert narrow.dtype == np.float64 and narrow == pytest.approx(wide, rel=1e-5)


@settings(deadline=None)
@given(a_head(), st.integers(0, 2**32 - 1))
def test_orthonormal_coordinates_of_the_updates_change_nothing(head: tuple[np.ndarray, np.ndarray], seed: int) -> None:
    attention, updates = head
    d = updates.shape[1]
    basis = np.linalg.qr(np.random.default_rng(seed).normal(size=(d + 3, d)))[0].T  # (d, d + 3), rows orthonormal
    sink = strongest_sink(attention).position
    assert sinks.value_norm_ratio(updates @ basis, sink) == pytest.approx(sinks.value_norm_ratio(updates, sink))
    assert update_stable_rank(attention, updates @ basis) == pytest.approx(
        update_stable_rank(attention, updates), rel=1e-6
    )


def test_a_perfect_sink_writes_its_own_update_everywhere(updates: np.ndarray) -> None:
    attention = np.zeros((*HEADS, QUERIES, KEYS))
    attention[..., 2] = 1
    assert (sinks.least_epsilon(attention, np.full(HEADS, 2)) == 0).all()
    assert update_stable_rank(attention, updates) == pytest.approx(np.ones(HEADS))


def test_a_silent_head_has_no_ratio_and_no_rank() -> None:
    attention, zero = np.full((6, 6), 1 / 6), np.zeros((6, 3))
    assert np.isnan(sinks.value_norm_ratio(zero, np.array(0)))
    assert np.isnan(update_stable_rank(attention, zero))
    assert rule.mechanism(np.array(np.nan), np.array(np.nan)) == rule.NEITHER


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_a_rank_does_not_depend_on_scale(attention: np.ndarray, updates: np.ndarray, scale: float) -> None:
    rank = update_stable_rank(attention, updates)
    assert update_stable_rank(attention, updates * scale) == pytest.approx(rank)


@pytest.mark.parametrize(
    ("ratio", "rank", "expected"),
    [
        (0.0, 9.0, rule.NOP),
        (0.2, 1.0, rule.NOP),
        (0.21, 1.0, rule.NEITHER),
        (0.49, 1.0, rule.NEITHER),
        (0.5, 1.5, rule.BROADCAST),
        (3.0, 1.0, rule.BROADCAST),
        (3.0, 1.51, rule.NEITHER),
    ],
)
def test_the_rule_at_its_thresholds(ratio: float, rank: float, expected: str) -> None:
    mechanisms = rule.mechanism(np.array([ratio, ratio]), np.array([rank, rank]))
    assert mechanisms.tolist() == [expected, expected]


def test_shares_put_any_attention_on_one_scale(attention: np.ndarray) -> None:
    assert attention_shares(attention) == pytest.approx(attention)
    assert attention_shares(-7 * attention) == pytest.approx(attention)
    with_an_empty_row = attention.copy()
    with_an_empty_row[0, 0, 0] = 0
    assert (attention_shares(with_an_empty_row)[0, 0, 0] == 0).all()


def test_a_no_op_keeps_tokens_and_a_broadcast_makes_them_alike() -> None:
    x = np.random.default_rng(3).normal(size=(20, 8))
    broadcast = x + 10 * x[0]
    assert sinks.similarity_through(x, x) == pytest.approx(1)
    assert sinks.similarity_between_tokens(broadcast) > 0.9 > 0.3 > sinks.similarity_between_tokens(x)

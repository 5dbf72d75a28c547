"""Spearman's rho from counted bins, against SciPy's from sorted values."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from weightscope.model.metrics.rank_correlation import RankCorrelation, Spearman


def counted(first: np.ndarray, second: np.ndarray, groups: np.ndarray, n_groups: int = 1) -> list[Spearman]:
    ranks = RankCorrelation(n_groups)
    ranks.add(first, second, groups)
    return ranks.results()


def exact(first: np.ndarray, second: np.ndarray) -> float:
    pairs = first.astype(np.float64).ravel(), np.broadcast_to(second[:, None], first.shape).astype(np.float64).ravel()
    return float(spearmanr(*pairs).statistic)


@pytest.mark.check
@settings(deadline=None)  # a table of 65 MB is made and swept each time
@given(st.integers(0, 2**32 - 1), st.floats(0.05, 6), st.floats(0.02, 2), st.floats(-3, 3), st.booleans())
def test_rho_is_scipys_within_the_bound(seed: int, wide: float, narrow: float, slope: float, ties: bool) -> None:
    """Whether values fill many bins or few, and with ties."""
    rng = np.random.default_rng(seed)
    second = np.exp(narrow * rng.standard_normal((2, 30))).astype(np.float32)
    first = np.exp(wide * rng.standard_normal((2, 8, 30)) + slope * np.log(second)[:, None]).astype(np.float32)
    if ties:
        first, second = first.round(1) + np.float32(0.01), second.round(1)
    (result,) = counted(first, second, np.zeros((2, 30), int))
    assert result.pairs == first.size
    if not np.isnan(result.rho):
        assert abs(result.rho - exact(first, second)) <= result.error + 1e-12


def test_attention_weights_are_ranked_far_better_than_the_bound() -> None:
    rng = np.random.default_rng(0)
    second = rng.lognormal(1, 0.3, (16, 128)).astype(np.float32)
    scores = 2 * rng.standard_normal((16, 128, 128)) - np.log(second)[:, None]
    first = np.exp(scores - scores.max(axis=-1, keepdims=True)).astype(np.float32)
    first /= first.sum(axis=-1, keepdims=True)
    (result,) = counted(first, second, np.zeros((16, 128), int))
    assert result.error < 0.01
    assert abs(result.rho - exact(first, second)) < 2e-4


def test_values_with_a_bin_each_give_the_exact_rho_ties_included() -> None:
    rng = np.random.default_rng(1)
    steps = np.float32(1) + np.arange(30, dtype=np.float32) / 32
    first, second = rng.choice(steps, (5, 7, 11)), rng.choice(steps, (5, 11))
    (result,) = counted(first, second, np.zeros((5, 11), int))
    assert result.rho == pytest.approx(exact(first, second), abs=1e-12)


def test_groups_and_batches_are_kept_apart_and_put_together() -> None:
    rng = np.random.default_rng(2)
    first, second = rng.random((6, 9, 12), np.float32), rng.random((6, 12), np.float32)
    groups = rng.integers(0, 2, (6, 12))
    ranks = RankCorrelation(3)
    for b in range(6):
        ranks.add(first[b], second[b], groups[b])
    assert ranks.results()[:2] == counted(first, second, groups, 2)
    assert ranks.results()[2].pairs == 0
    everywhere = np.broadcast_to(groups[:, None], first.shape)
    for group, result in enumerate(ranks.results()[:2]):
        of_group = first[everywhere == group]
        values = np.broadcast_to(second[:, None], first.shape)[everywhere == group]
        assert result.rho == pytest.approx(spearmanr(of_group, values).statistic, abs=result.error)


def test_masked_pairs_do_not_count_and_tiny_weights_do() -> None:
    first = np.array([[0.0, 1e-30, 0.5], [0.0, 0.0, 1.0]], np.float32)
    (result,) = counted(first, np.array([1, 2, 3], np.float32), np.zeros(3, int))
    assert result.pairs == 3


def test_rho_is_unknown_where_all_values_are_one() -> None:
    (result,) = counted(np.full((4, 5), 0.2, np.float32), np.arange(1, 6, dtype=np.float32), np.zeros(5, int))
    assert result.pairs == 20
    assert np.isnan(result.rho)


def test_tenths_by_the_first_quantity_are_those_of_the_sorted_pairs() -> None:
    """Variation of the second within them, dense; at one value of the first it is what was planted, 0.2."""
    rng = np.random.default_rng(4)
    second = rng.lognormal(1, 0.5, (20, 60)).astype(np.float32)
    first = (second[:, None] ** -2 * rng.lognormal(0, 0.4, (20, 50, 60))).astype(np.float32)
    groups = rng.integers(0, 2, (20, 60))
    ranks = RankCorrelation(2)
    ranks.add(first, second, groups)
    everything, *tenths = ranks.parts()
    alpha, length = first.ravel(), np.broadcast_to(second[:, None], first.shape).ravel().astype(float)
    assert abs(everything.ranks.rho - exact(first, second)) <= everything.ranks.error
    assert everything.variation == pytest.approx(length.std() / length.mean(), rel=1e-3)
    for expected, tenth in zip(np.array_split(length[np.argsort(alpha)], 10), tenths, strict=True):
        assert tenth.ranks.pairs == pytest.approx(len(expected), rel=0.1)
        assert tenth.mean == pytest.approx(expected.mean(), rel=0.01)
        assert tenth.variation == pytest.approx(expected.std() / expected.mean(), rel=0.05)
    planted = np.sqrt(np.exp(1 / (1 / 0.2**2 + 1 / 0.5**2)) - 1)  # sd of log second at one first: 0.4 / 2 and 0.5
    assert everything.at_one == pytest.approx(planted, rel=0.05)


def test_shuffling_within_groups_leaves_what_groups_make() -> None:
    rng = np.random.default_rng(5)
    groups = np.array([[0] * 10 + [1] * 30])
    second = (1 + 2 * groups + rng.random((1, 40))).astype(np.float32)
    first = (rng.random((1, 500, 40)) * np.where(groups, 1, 3)[:, None]).astype(np.float32)
    ranks = RankCorrelation(2)
    ranks.add(first, second, groups)
    for members in (slice(10), slice(10, 40)):  # each query's weights in another order
        first[0, :, members] = rng.permuted(first[0, :, members], axis=0)
    assert ranks.parts()[0].by_group == pytest.approx(exact(first, second), abs=0.02)
    assert ranks.parts()[0].by_group < -0.3

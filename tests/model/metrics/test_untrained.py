"""Rows that training never met are told from trained ones whichever are more, by norm and by where they point."""

import numpy as np
import pytest

from weightscope.model.metrics.outliers import judge_rows, row_norms, two_groups, undertrained_rows

D = 96
RNG = np.random.default_rng(0)


def initial(n: int, std: float = 0.02) -> np.ndarray:
    return std * RNG.standard_normal((n, D))


def walk(n: int) -> np.ndarray:
    """Trained positions: each near the one before it, the first hardly longer than at initialisation."""
    return initial(1, 0.03) + np.cumsum(initial(n, 0.01), axis=0)


def loud(n: int) -> np.ndarray:
    """Trained rows that share no direction, all far longer."""
    return initial(n, 0.3)


def quiet(n: int) -> np.ndarray:
    """Trained rows that became shorter than they began, in few directions."""
    return initial(n, 0.004)[:, :4] @ RNG.standard_normal((4, D))


@pytest.mark.parametrize(("untrained", "std"), [(321, 0.02), (40, 0.02), (321, None)])
@pytest.mark.parametrize("trained", [walk, loud, quiet], ids=lambda trained: trained.__name__)
def test_the_untrained_are_found_whichever_are_more(trained, untrained: int, std: float | None) -> None:
    rows = np.concatenate([trained(191), initial(untrained)])
    assert undertrained_rows(rows, std).tolist() == [*range(191, 191 + untrained)]
    judged = judge_rows(row_norms(rows), lambda: [(0, rows[:100]), (100, rows[100:])], std)
    assert judged.initial == pytest.approx(0.02 * D**0.5, rel=0.02)
    assert judged.usual == pytest.approx(np.median(np.linalg.norm(rows[:191], axis=1)))
    assert len(judged.oversized) == 0


def test_trained_rows_as_long_as_initial_ones_are_told_by_where_they_point() -> None:
    directions = RNG.standard_normal((200, 5)) @ RNG.standard_normal((5, D))
    trained = 0.02 * D**0.5 * directions / np.linalg.norm(directions, axis=1, keepdims=True)
    rows = np.concatenate([initial(100), trained])
    assert undertrained_rows(rows, 0.02).tolist() == [*range(100)]
    assert len(undertrained_rows(trained, 0.02)) == 0


@pytest.mark.parametrize("std", [0.02, 0.5, None])
@pytest.mark.parametrize("n", [1, 20, 1024])
def test_where_all_look_alike_none_is_named(n: int, std: float | None) -> None:
    assert len(undertrained_rows(initial(n), std)) == 0
    assert len(undertrained_rows(loud(n), std)) == 0


def test_single_rows_are_found_beside_trained_ones() -> None:
    fresh = initial(1024)
    trained = fresh + np.linspace(1, 2, 1024)[:, None] * np.ones(D)
    trained[[100, 1023]] = fresh[[100, 1023]]
    assert undertrained_rows(trained).tolist() == undertrained_rows(trained, 0.02).tolist() == [100, 1023]


def test_rows_of_zeros_are_untrained_however_many() -> None:
    assert undertrained_rows(np.concatenate([np.zeros((300, D)), walk(50)])).tolist() == [*range(300)]
    assert len(undertrained_rows(np.zeros((30, D)))) == 0


def test_two_groups_are_seen_where_they_are_clear() -> None:
    low, high = RNG.normal(0, 0.05, 300), RNG.normal(1, 0.3, 100)
    assert 0.1 < two_groups(np.concatenate([low, high])) < 0.5
    for values in (low, RNG.uniform(size=500), RNG.exponential(size=500), np.ones(50), np.arange(3.0)):
        assert two_groups(values) is None

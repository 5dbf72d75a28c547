"""Copies among points: which they are, and that a large group of them is not compared pair by pair."""

from typing import Any

import numpy as np
import pytest
import scipy.spatial

from weightscope.model.metrics import copies
from weightscope.model.metrics.copies import CENTRES, STILL_LARGE, copies_within

LIMIT = 0.3
RNG = np.random.default_rng(0)
STRANGERS = RNG.standard_normal((1200, 24))
MADE = {
    "equal": np.repeat(STRANGERS[:1], 1200, axis=0),
    "equal but for noise": STRANGERS[0] + 0.01 * STRANGERS,
    "of twenty": STRANGERS[RNG.integers(0, 20, 1200)],
    "in pairs": np.concatenate([STRANGERS[:600], STRANGERS[:600] + 0.001]),
    "strangers": STRANGERS,
    "half equal": np.concatenate([STRANGERS[:600], np.repeat(STRANGERS[:1], 600, axis=0)]),
}


def by_pairs(points: np.ndarray) -> list[int]:
    """Points near an earlier one, from all distances."""
    distances = scipy.spatial.distance.cdist(points, points)
    return [i for i in range(len(points)) if (distances[i, :i] < LIMIT).any()]


@pytest.mark.parametrize("made", MADE)
def test_copies_are_the_points_near_an_earlier_one(made: str) -> None:
    assert copies_within(MADE[made], LIMIT).tolist() == by_pairs(MADE[made])


@pytest.mark.parametrize("made", MADE)
def test_no_tree_holds_a_large_group(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work: distances computed, and neighbours that a query of the tree meets."""
    computed, met = [0], [0]
    measure, tree = copies._distances, scipy.spatial.cKDTree

    def measured(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        computed[0] += len(x) * len(y)
        return measure(x, y)

    def grown(points: np.ndarray) -> Any:
        within = tree(points).query_ball_point(points, LIMIT, return_length=True)
        met[0] = int(within.max())
        return tree(points)

    monkeypatch.setattr(copies, "_distances", measured)
    monkeypatch.setattr(scipy.spatial, "cKDTree", grown)
    copies_within(MADE[made], LIMIT)
    n = len(MADE[made])
    assert computed[0] <= n * CENTRES / STILL_LARGE
    assert met[0] <= n / CENTRES


@pytest.mark.parametrize("n", [0, 1, 2, CENTRES, CENTRES + 1])
def test_any_number_of_points_is_taken(n: int) -> None:
    assert len(copies_within(np.ones((n, 3)), LIMIT)) == max(n - 1, 0)

"""Points that are copies of earlier ones, found in less than the square of their number.

A tree is slow where very many points are near each other: a query then meets them all. So the balls
around some points are taken out first, until what is left has no large group.
"""

import numpy as np

CENTRES = 64  # points whose balls are taken out at once
STILL_LARGE = 1 / 8  # share of the points in balls above which other balls are taken out


def copies_within(points: np.ndarray, limit: float) -> np.ndarray:
    """Ascending indices of points (n, p) within `limit` of an earlier point that is no copy."""
    from scipy.spatial import cKDTree  # takes a while to import

    rng, left, copies = np.random.default_rng(0), np.arange(len(points)), [np.empty(0, int)]
    taken_out = len(left) > CENTRES
    while taken_out and len(left) > CENTRES:
        centres = points[rng.choice(left, CENTRES, replace=False)]
        near = _distances(points[left], centres) < limit  # (left, centres)
        near[near.argmax(axis=0), np.arange(CENTRES)] = False  # the first of each ball is no copy
        in_a_ball = near.any(axis=1)
        taken_out = in_a_ball.mean() >= STILL_LARGE
        copies.append(left[in_a_ball])
        left = left[~in_a_ball]
    if len(left) > 1:
        tree = cKDTree(points[left])
        distances, nearest = tree.query(points[left], k=2, distance_upper_bound=limit)
        near_another = np.flatnonzero(distances[:, 1] < limit)
        copies.append(left[[max(i, *nearest[i]) for i in near_another]])
    return np.unique(np.concatenate(copies)).astype(int)


def _distances(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(n, m) distances of points x (n, p) from y (m, p)."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    squares = (x**2).sum(axis=1)[:, None] + (y**2).sum(axis=1) - 2 * (x @ y.T)
    return np.asarray(np.sqrt(np.maximum(squares, 0)))

"""C of eq. 7 against plain loops, and its sum over dimensions."""

import numpy as np
import pytest

from weightscope.heads.outliers.measure import column_norms, contributions_by_kind, mean_queries, summed_contributions
from weightscope.model.layers.rotation import Rotation, inverse_powers

N, D, R, H, G = 6, 10, 4, 6, 2
KINDS = np.array([0, 2, 1, 2, 2, 1])
MASKS = {"all": np.ones((N, N), bool), "causal": np.tril(np.ones((N, N), bool))}
rng = np.random.default_rng(0)
X, W_Q, B_Q, W_K = (rng.standard_normal(shape) for shape in ((N, D), (H, D, R), (H, R), (G, D, R)))


def queries() -> np.ndarray:
    return X @ W_Q + B_Q[:, None]  # (H, n, r)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_means_match_a_loop_over_queries_and_keys(mask: np.ndarray) -> None:
    """C_mn = (x_m W + b_Q W_K') * x_n, one query, key, head and dimension after the other."""
    contributions = contributions_by_kind(X, mean_queries(queries(), mask), W_K, KINDS, 4)
    expected = np.zeros((4, H, D))
    for h in range(H):
        w = W_Q[h] @ W_K[h // (H // G)].T
        b = B_Q[h] @ W_K[h // (H // G)].T
        for n in range(N):
            seeing = [m for m in range(N) if mask[m, n]]
            for j in range(D):
                c = [(sum(X[m, i] * w[i, j] for i in range(D)) + b[j]) * X[n, j] for m in seeing]
                expected[KINDS[n], h, j] += sum(c) / len(c)
    np.testing.assert_allclose(contributions, expected, atol=1e-12)


def test_without_a_mask_means_come_apart() -> None:
    """The mean over queries and keys of (x_m W + b) * x_n is (mean x W + b) * mean x."""
    contributions = summed_contributions(X, mean_queries(queries(), MASKS["all"]), W_K) / N
    for h in range(H):
        w_k = W_K[h // (H // G)]
        expected = ((X.mean(axis=0) @ W_Q[h] + B_Q[h]) @ w_k.T) * X.mean(axis=0)
        np.testing.assert_allclose(contributions[h], expected, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("start", [None, 0, 2])
def test_dimensions_add_up_to_the_mean_score(mask: np.ndarray, start: int | None) -> None:
    """A key's C, summed over dimensions, is its mean score with the queries that see it; rotation included."""
    rotation = None if start is None else Rotation(inverse_powers(10.0, R - start), start=start, factor=1.3)
    met = mean_queries(queries(), mask, rotation)
    q, k, places = queries(), np.repeat(X @ W_K, H // G, axis=0), np.arange(N)
    if rotation is not None:
        q, k = rotation.rotate(q, places), rotation.rotate(k, places)
    scores = q @ k.transpose(0, 2, 1)  # (H, queries, keys)
    expected = np.where(mask, scores, 0).sum(axis=1) / mask.sum(axis=0)  # (H, n)
    for n in range(N):
        contributions = summed_contributions(X[n : n + 1], met[:, n : n + 1], W_K).sum(axis=1)
        np.testing.assert_allclose(contributions, expected[:, n], atol=1e-12)


def test_column_norms_match_the_dense_matrix() -> None:
    for h, row in enumerate(column_norms(W_Q, W_K)):
        np.testing.assert_allclose(row, np.linalg.norm(W_Q[h] @ W_K[h // (H // G)].T, axis=0), rtol=1e-12)

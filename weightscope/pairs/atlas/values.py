"""Find relatives whose stream was rotated, permuted or cut, by the norms of rows of W_V.

An orthogonal change of the stream keeps the norm of every row of W_V (the layer's norm folded in),
and a cut of the width most of it. A head's value dimensions have no order of their own: of networks
that were trained apart, one has them in an order that is independent of the other's, so ranks of
norms correlate as after a random permutation, whatever the networks are like. That gives a p-value,
as `lineage.neurons` has for neurons.
"""

import numpy as np

from weightscope.model.layers.layer import Layer

SORTED = 0.5  # correlation of ranks with places from which an order is not a network's own
DUPLICATE = 0.5  # correlation from which a layer repeats another one, as in upscaled models
TINY = 1e-300  # smallest p-value, since its logarithm is taken
CHANCE = 1e-3  # probability that strangers are joined: p times the number of comparisons


def value_ranks(layer: Layer) -> np.ndarray:
    """Twice the rank of each value dimension's norm, summed over key-value heads: (r,).

    A head counts as zeros if most of its norms are equal, or if they are sorted, as a decomposition
    leaves them.
    """
    from scipy.stats import rankdata

    total = np.zeros(0, np.int32)
    for group in range(layer.n_kv_heads):
        norms = np.linalg.norm(layer.v.of(group)[0].astype(np.float64), axis=0)  # (d, r) -> (r,)
        doubled = 2 * rankdata(norms)
        place = np.arange(len(norms)) - (len(norms) - 1) / 2
        size = np.linalg.norm(doubled - doubled.mean()) * np.linalg.norm(place)
        trend = abs(doubled @ place) / max(size, 1.0)
        is_free = trend < SORTED and len(np.unique(norms)) > len(norms) // 2
        ranks = (doubled * is_free).astype(np.int32)
        total = ranks if not len(total) else total + ranks
    return total


def distinct(rows: np.ndarray) -> np.ndarray:
    """A checkpoint's layers (L, V) less near-repeats of earlier ones, as in upscaled models."""
    alike = np.tril(rows @ rows.T, -1) > DUPLICATE
    return rows[~alike.any(axis=1)]


def best_of_each(mine: np.ndarray, stacked: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The highest correlation of each of L layers with each of n checkpoints' layers: (n, L)."""
    return np.maximum.reduceat(stacked @ mine.T, np.cumsum([0, *counts])[:-1], axis=0)


def log_p_of(best: np.ndarray, counts: np.ndarray, width: int) -> np.ndarray:
    """The logarithm of the p-value of such correlations (n, L): (n,).

    A layer's is the best one's times the number of layers that it was chosen from; Fisher's method
    combines them. Far out, the normal tail is above the tail of a correlation of permuted ranks,
    which cannot exceed 1.
    """
    from scipy.special import gammaincc, log_ndtr

    log_p = np.minimum(0, np.log(counts)[:, None] + log_ndtr(-best * np.sqrt(width - 1)))
    return np.log(np.maximum(gammaincc(best.shape[1], -log_p.sum(axis=1)), TINY))

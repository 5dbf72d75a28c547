"""sigma, the one part of a LayerNorm that no folding can absorb, over the whole vocabulary and every position."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

POSITIONS_A_BLOCK = 32  # a block of sigma is (32, vocab): 6.4 MB for GPT-2
BAND = (2.5, 97.5)  # percentiles of the spread shown over tokens: the central 95 %


def sigma(x: np.ndarray, eps: float) -> np.ndarray:
    """sqrt(Var(x) + eps) over the last axis (detokenization paper, eq. 3).

    Parameters
    ----------
    x : array of shape (..., d)

    Returns
    -------
    array of shape (...)
    """
    return np.sqrt(x.var(axis=-1) + np.asarray(eps, x.dtype))


def rms(x: np.ndarray, eps: float) -> np.ndarray:
    """sqrt(mean of squares + eps) over the last axis: what an RMSNorm divides by, as `sigma` is for a LayerNorm.

    Parameters
    ----------
    x : array of shape (..., d)

    Returns
    -------
    array of shape (...)
    """
    return np.sqrt((x**2).mean(axis=-1) + np.asarray(eps, x.dtype))


@dataclass(frozen=True)
class SigmaStatistics:
    """sigma(e_t + p_j) summarised over every token t and position j, all float64.

    Attributes
    ----------
    token_mean : (vocab,) array
        Mean over positions: c_t, which the paper's code divides e_t by.
    mean, minimum, maximum : (n_positions,) arrays
        Over tokens, at each position.
    inverse_mean : (n_positions,) array
        Mean of 1/sigma over tokens: what scales a position's bare term to its mean over tokens.
    inverse_low, inverse_high : (n_positions,) arrays
        2.5th and 97.5th percentile of 1/sigma over tokens.
    """

    token_mean: np.ndarray
    mean: np.ndarray
    minimum: np.ndarray
    maximum: np.ndarray
    inverse_mean: np.ndarray
    inverse_low: np.ndarray
    inverse_high: np.ndarray


def sigma_statistics(
    token_blocks: Callable[[], Iterator[tuple[int, np.ndarray]]],
    n_tokens: int,
    positions: np.ndarray,
    eps: float,
    progress: Callable[[int], object] = lambda done: None,
) -> SigmaStatistics:
    """Statistics of sigma over the vocabulary times the positions, never holding that table.

    Var(e + p) = Var(e) + Var(p) + 2 Cov(e, p), so a block of 32 positions costs one matrix product. Peak memory is two
    (32, vocab) float32 blocks, 13 MB for GPT-2, beside what `token_blocks` holds.

    Parameters
    ----------
    token_blocks : function returning an iterator of (first row, (n, d) array)
        Called once for every 32 positions.
    n_tokens : int
    positions : (n_positions, d) array
    eps : float
    progress : function, optional
        Told how many more positions are done.
    """
    n_positions, d = positions.shape
    centred = positions - positions.mean(axis=1, keepdims=True)  # (L, d)
    position_variance = (centred**2).mean(axis=1, dtype=np.float64)  # (L,)
    token_variance = np.concatenate([block.var(axis=1, dtype=np.float64) for _, block in token_blocks()])  # (V,)
    token_variance = (token_variance + eps).astype(np.float32)

    token_sum = np.zeros(n_tokens)
    per_position = np.empty((6, n_positions))
    block_of_sigma = np.empty((POSITIONS_A_BLOCK, n_tokens), np.float32)
    for start in range(0, n_positions, POSITIONS_A_BLOCK):
        here = slice(start, min(start + POSITIONS_A_BLOCK, n_positions))
        scaled = centred[here] * np.float32(2 / d)  # (b, d)
        table = block_of_sigma[: len(scaled)]  # (b, V)
        for first, block in token_blocks():
            np.matmul(scaled, block.T, out=table[:, first : first + len(block)])
        table += token_variance
        table += position_variance[here, None].astype(np.float32)
        np.sqrt(table, out=table)
        token_sum += table.sum(axis=0, dtype=np.float64)
        inverse = np.reciprocal(table)
        low, high = _percentiles(inverse)
        per_position[:, here] = (
            table.mean(axis=1, dtype=np.float64), table.min(axis=1), table.max(axis=1),
            inverse.mean(axis=1, dtype=np.float64), low, high,
        )  # fmt: skip
        progress(len(scaled))
    return SigmaStatistics(token_sum / n_positions, *per_position)


def _percentiles(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The BAND percentiles of each row, by the nearest rank; partitions `table` in place."""
    ranks = [round(percent / 100 * (table.shape[1] - 1)) for percent in BAND]
    table.partition(ranks, axis=1)
    return table[:, ranks[0]], table[:, ranks[1]]

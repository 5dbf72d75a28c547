"""sigma, the part of a LayerNorm that cannot be folded, over all tokens and positions."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightscope.core.compute.cores import in_threads
from weightscope.core.compute.device import CPU, Device, rows_that_fit
from weightscope.core.results import ShowsShapes

POSITIONS_A_BLOCK = 64  # a block of sigma is (64, vocab): 13 MB for GPT-2
BYTES_A_SIGMA = 48  # bytes on a device, where nothing is in place and whole rows are sorted
TOKENS_ON_THEIR_WAY = 100_000_000  # bytes of the blocks of tokens on the device meanwhile
BAND = (2.5, 97.5)  # percentiles of the spread shown over tokens: the central 95 %

TokenBlocks = Callable[[], Iterable[tuple[int, np.ndarray]]]
BlockOfSigma = tuple[np.ndarray, list[np.ndarray]]


@dataclass(frozen=True, eq=False, repr=False)
class SigmaStatistics(ShowsShapes):
    """sigma(e_t + p_j) summarised over every token t and position j, all float64."""

    token_mean: np.ndarray  # (vocab,), mean over positions: c_t, the paper's divisor of e_t
    mean: np.ndarray  # (n_positions,), over tokens
    minimum: np.ndarray
    maximum: np.ndarray
    inverse_mean: np.ndarray  # (n_positions,), 1/sigma: scales a position's term to its mean
    inverse_low: np.ndarray  # (n_positions,), 2.5th and 97.5th percentile of 1/sigma
    inverse_high: np.ndarray

    @classmethod
    def of_no_norm(cls, n_tokens: int, n_positions: int) -> "SigmaStatistics":
        """The statistics if nothing divides the embeddings: sigma is 1 throughout."""
        return cls(np.ones(n_tokens), *(np.ones(n_positions) for _ in range(6)))


def sigma_statistics(
    token_blocks: TokenBlocks,
    n_tokens: int,
    positions: np.ndarray,
    eps: float,
    progress: Callable[[int], object] = lambda done: None,
    device: Device = CPU,
) -> SigmaStatistics:
    """Statistics of sigma over all tokens and positions, without ever holding the full table.

    token_blocks (n, d), positions (n_positions, d).

    Var(e + p) = Var(e) + Var(p) + 2 Cov(e, p), so a block of positions costs one matrix product, in
    float32: where e and -p nearly cancel, the error of sigma^2 is 1e-6 of Var(e) + Var(p). Each
    core's thread works on its own block; peak memory is one (64, vocab) float32 block a thread, 13
    MB for GPT-2, plus what `token_blocks` holds.
    """
    variances = [block.var(axis=1, dtype=np.float64) for _, block in token_blocks()]
    token_variance = (np.concatenate(variances) + eps).astype(np.float32)  # (V,)
    if device is CPU:
        blocks = _on_cores(token_blocks, token_variance, positions, eps)
    else:
        blocks = _on_device(device, token_blocks, token_variance, positions, eps)
    token_sum = np.zeros(n_tokens)
    sums = []
    for block_sum, statistics in blocks:
        token_sum += block_sum
        sums.append(statistics)
        progress(len(statistics[0]))
    of_positions = map(np.concatenate, zip(*sums, strict=True))
    return SigmaStatistics(token_sum / len(positions), *of_positions)


def _on_cores(
    token_blocks: TokenBlocks, token_variance: np.ndarray, positions: np.ndarray, eps: float
) -> Iterator[BlockOfSigma]:
    """sigma summed over each block of positions, (V,), and the statistics of each position."""

    def of_block(block: np.ndarray) -> BlockOfSigma:
        table = _sigma_table(block, token_blocks(), token_variance, eps)  # (b, V)
        return table.sum(axis=0, dtype=np.float64), _over_tokens(table)

    starts = range(0, len(positions), POSITIONS_A_BLOCK)
    return in_threads(of_block, [positions[start:][:POSITIONS_A_BLOCK] for start in starts])


def _of_positions(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose product with a token's is 2 Cov(e, p), (b, d), and Var(p), (b, 1)."""
    centred = positions - positions.mean(axis=1, keepdims=True)  # (b, d)
    variance = (centred**2).mean(axis=1, keepdims=True, dtype=np.float64).astype(np.float32)
    return centred * np.float32(2 / positions.shape[1]), variance


def _sigma_table(
    positions: np.ndarray,
    token_blocks: Iterable[tuple[int, np.ndarray]],
    token_variance: np.ndarray,
    eps: float,
) -> np.ndarray:
    """sigma(e_t + p_j) for a few positions and all tokens, float32 (b, V).

    `token_variance` includes eps.
    """
    scaled, position_variance = _of_positions(positions)
    table = np.empty((len(positions), len(token_variance)), np.float32)
    for first, block in token_blocks:
        np.matmul(scaled, block.T, out=table[:, first : first + len(block)])
    table += token_variance
    table += position_variance
    np.maximum(table, eps, out=table)  # rounding may take what cancels below eps
    return np.sqrt(table, out=table)


def _over_tokens(table: np.ndarray) -> list[np.ndarray]:
    """The statistics of each row of a sigma table in SigmaStatistics' order; `table` is used up."""
    mean = table.mean(axis=1, dtype=np.float64)
    minimum, maximum = table.min(axis=1), table.max(axis=1)
    inverse = np.reciprocal(table, out=table)
    inverse_mean = inverse.mean(axis=1, dtype=np.float64)
    low, high = _ends_of_band(table.shape[1])
    inverse.partition((low, high), axis=1)
    statistics = (mean, minimum, maximum, inverse_mean, inverse[:, low], inverse[:, high])
    return [np.asarray(values, np.float64) for values in statistics]


def _ends_of_band(n: int) -> tuple[int, int]:
    """Nearest ranks of the ends of `BAND` among n sorted values."""
    low, high = (round(percent / 100 * (n - 1)) for percent in BAND)
    return low, high


def _on_device(
    device: Device,
    token_blocks: TokenBlocks,
    token_variance: np.ndarray,
    positions: np.ndarray,
    eps: float,
) -> Iterator[BlockOfSigma]:
    """Compute `_on_cores` by the array API standard, with as many positions a block as fit."""
    xp, n = device.xp, len(token_variance)
    low, high = _ends_of_band(n)
    variance, least = device.put(token_variance), device.put(np.array(eps, np.float32))
    free, a_row = device.free_bytes(), BYTES_A_SIGMA * n
    a_block = rows_that_fit(free, TOKENS_ON_THEIR_WAY, a_row, len(positions))

    def mean(x: Any) -> Any:
        return xp.sum(x, axis=1, dtype=xp.float64) / n

    for start in range(0, len(positions), a_block):
        scaled, position_variance = map(device.put, _of_positions(positions[start:][:a_block]))
        blocks = device.put_ahead((block,) for _, block in token_blocks())
        products = [scaled @ rows.T for (rows,) in blocks]
        squared = xp.concat(products, axis=1) + variance + position_variance  # (b, V)
        table = xp.sqrt(xp.maximum(squared, least))
        inverse = xp.sort(1 / table, axis=1)
        statistics = mean(table), xp.min(table, axis=1), xp.max(table, axis=1), mean(inverse)
        band = inverse[:, low], inverse[:, high]
        token_sum = device.get(xp.sum(table, axis=0, dtype=xp.float64))
        yield token_sum, [device.get(s).astype(np.float64) for s in (*statistics, *band)]

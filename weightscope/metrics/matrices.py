"""A matrix next to a random one: functions of its singular values s (r,), descending, and of its shape (m, n).

The zero matrix, and one that is not finite, give NaN.
"""

from collections.abc import Iterable
from math import prod, sqrt

import numpy as np

from weightscope.compute import lapack

FEWEST_VALUES = 20  # positive ones; a power law of fewer says nothing
QUARTILES_OF_NORMAL = 1.349  # the interquartile range of a normal distribution, in standard deviations


def random_edge(s: np.ndarray, shape: tuple[int, int]) -> float:
    """The largest singular value of a large matrix of independent entries with the same mean square.

    rms (sqrt(m) + sqrt(n)): Marchenko and Pastur 1967. Permuting the entries of a matrix makes it such a one.
    """
    return _of_nonzero(s, sqrt(float((s**2).sum()) / prod(shape)) * sum(map(sqrt, shape)))


def beyond_edge(s: np.ndarray, shape: tuple[int, int]) -> float:
    """How many singular values are above `random_edge`."""
    return _of_nonzero(s, int(np.count_nonzero(s > random_edge(s, shape))))


def signal_to_noise(s: np.ndarray, shape: tuple[int, int]) -> float:
    """Spectrum's ratio (Hartford et al. 2024, arXiv 2406.06623), by which it chooses the matrices to train.

    The sum of the singular values above t over the sum of the others, over sigma_1; t is e (1 + sqrt(beta)) with beta
    the ratio of the sides and e the interquartile range of the singular values over 1.349. Infinite if all are above.
    """
    low, high = np.quantile(s, (0.25, 0.75))
    above = s > (high - low) / QUARTILES_OF_NORMAL * (1 + sqrt(min(shape) / max(shape)))
    signal, noise = float(s[above].sum()), float(s[~above].sum())
    return _of_nonzero(s, (signal / noise if noise > 0 else np.inf) / s[0] if s[0] > 0 else np.nan)


def condition(s: np.ndarray, shape: tuple[int, int]) -> float:
    """sigma_1 over the smallest singular value; infinite where that is zero."""
    return _of_nonzero(s, s[0] / s[-1] if s[-1] > 0 else np.inf)


def _of_nonzero(s: np.ndarray, value: float) -> float:
    return float(value) if s[0] > 0 else float("nan")


def power_law(values: np.ndarray) -> tuple[float, float]:
    """The exponent alpha of a tail with the density x^-alpha, and the tail's Kolmogorov distance from it.

    Clauset, Shalizi and Newman 2009: each value may be the least of the tail; the exponent of maximum likelihood
    follows, and the tail that is nearest to its law is taken. Values that are not positive are left out.

    Examples
    --------
    >>> alpha, distance = power_law(np.random.default_rng(0).pareto(1.5, 4000) + 1)  # density x^-2.5
    >>> round(alpha, 1), distance < 0.02
    (2.5, True)
    """
    logs = np.sort(np.log(values[values > 0]))
    alpha, nearest = np.nan, np.inf
    if len(logs) < FEWEST_VALUES:
        return float("nan"), float("nan")
    ranks = np.arange(len(logs))
    for start in range(len(logs) - 1):
        tail = logs[start:] - logs[start]
        if not tail[-1] > 0:  # all equal
            break
        slope = len(tail) / tail.sum()
        distance = np.abs(1 - np.exp(-slope * tail) - ranks[: len(tail)] / len(tail)).max()
        if distance < nearest:
            alpha, nearest = 1 + slope, distance
    return float(alpha), float(nearest) if np.isfinite(nearest) else float("nan")


# Singular values of any matrix from blocks of its rows: as roots of the eigenvalues of its smaller Gram matrix.
GRAM_ROWS = 1024  # rows of a block, or columns


def singular_values(chunks: Iterable[np.ndarray], shape: tuple[int, int]) -> np.ndarray:
    """Singular values, descending, from the values in storage order: chunks (any,), shape (m, n) -> (min(m, n),).

    Those below sqrt(r eps) sigma_1, which a Gram matrix cannot tell from zero, are zero; where a value is not finite
    all are NaN.
    """
    gram = gram_matrix(chunks, shape)
    if not np.isfinite(gram).all():
        return np.full(len(gram), np.nan)
    values = lapack.symmetric_eigenvalues(gram)[::-1]
    return np.sqrt(np.where(values > len(values) * np.finfo(np.float64).eps * values[0], values, 0.0))


def gram_matrix(chunks: Iterable[np.ndarray], shape: tuple[int, int]) -> np.ndarray:
    """W'W, or WW' where W has fewer rows than columns, in float64: shape (m, n) -> (r, r).

    Memory is two such matrices and a block of rows; of a wide matrix all of it.
    """
    m, n = shape
    side = min(m, n)
    gram, part = np.zeros((side, side)), np.empty((side, side))
    if m >= n:
        for rows in _in_rows(chunks, n, GRAM_ROWS):
            gram += np.matmul(rows.T, rows, out=part)  # (n, n)
        return gram
    w = np.concatenate([*chunks]).reshape(m, n)
    for start in range(0, n, GRAM_ROWS):
        columns = w[:, start : start + GRAM_ROWS].astype(np.float64)
        gram += np.matmul(columns, columns.T, out=part)  # (m, m)
    return gram


def _in_rows(chunks: Iterable[np.ndarray], width: int, n_rows: int) -> Iterable[np.ndarray]:
    """Whole rows in float64, (at most n_rows, width), in a buffer that the next block overwrites."""
    buffer, filled = np.empty(n_rows * width), 0
    for chunk in chunks:
        while len(chunk):
            taken = min(len(buffer) - filled, len(chunk))
            buffer[filled : filled + taken] = chunk[:taken]
            chunk, filled = chunk[taken:], filled + taken
            if filled == len(buffer):
                yield buffer.reshape(-1, width)
                filled = 0
    if filled:
        yield buffer[:filled].reshape(-1, width)

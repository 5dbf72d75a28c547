"""A matrix next to a random one, by its singular values s (r,), descending, and shape (m, n).

The zero matrix, and one that is not finite, give NaN.
"""

from collections.abc import Callable, Iterable, Iterator
from math import prod, sqrt
from typing import NamedTuple

import numpy as np

from weightscope.core.compute import lapack
from weightscope.model.metrics.spectra import evenly_spread

FEWEST_VALUES = 20  # positive ones; a power law of fewer says nothing
QUARTILES_OF_NORMAL = 1.349  # interquartile range of a normal distribution, in standard deviations


def random_edge(s: np.ndarray, shape: tuple[int, int]) -> float:
    """The largest singular value of a large matrix of independent entries (same mean square).

    rms (sqrt(m) + sqrt(n)): Marchenko and Pastur 1967. Permuting the entries of a matrix makes it
    such a one.
    """
    return _of_nonzero(s, sqrt(float((s**2).sum()) / prod(shape)) * sum(map(sqrt, shape)))


def beyond_edge(s: np.ndarray, shape: tuple[int, int]) -> float:
    """The number of singular values above `random_edge`."""
    return _of_nonzero(s, int(np.count_nonzero(s > random_edge(s, shape))))


SHUFFLED_SIDE = 512  # rows and columns that are shuffled, evenly spread
SHUFFLES = 3


def like_its_shuffled_entries(w: np.ndarray) -> bool:
    """True if sigma_1 is within `shuffled_error` of the shuffled entries', at one norm.

    Rows and columns are brought to one norm, so that gains before or after the matrix do not count.
    Independent entries of any law are like theirs, and so are orthogonal matrices; of a trained
    layer one matrix at least was 0.1 or more beyond. False where a value is not finite, or all are
    zero.
    """
    error = shuffled_error(w)
    rows, columns = (evenly_spread(side, SHUFFLED_SIDE) for side in w.shape)
    w = w[np.ix_(rows, columns)].astype(np.float64)
    if not np.isfinite(w).all():
        return False
    for axis in (0, 1):
        w = w / np.maximum(np.linalg.norm(w, axis=axis, keepdims=True), np.finfo(float).tiny)
    rng, largest = np.random.default_rng(0), _largest(w)
    drawn = (rng.permuted(w.ravel()).reshape(w.shape) for _ in range(SHUFFLES))
    return any(0 < largest <= (1 + error) * _largest(shuffled) for shuffled in drawn)


def _largest(w: np.ndarray) -> float:
    """sigma_1, from the smaller of the Gram matrices."""
    gram = w @ w.T if len(w) <= w.shape[1] else w.T @ w
    return sqrt(max(0.0, np.linalg.eigvalsh(gram)[-1]))


def shuffled_error(w: np.ndarray) -> float:
    """The fluctuation of sigma_1 of independent entries, a few n^(-2/3) of it (Johnstone 2001)."""
    return 2 * float(min(*w.shape, SHUFFLED_SIDE)) ** (-2 / 3)


def signal_to_noise(s: np.ndarray, shape: tuple[int, int]) -> float:
    """Spectrum's ratio, by which it chooses matrices to train (Hartford et al. 2024, 2406.06623).

    The sum of the singular values above t over the sum of the others, over sigma_1; t is e (1 +
    sqrt(beta)) with beta the ratio of the sides and e the interquartile range of the singular
    values over 1.349. Infinite if all are above.
    """
    low, high = np.quantile(s, (0.25, 0.75))
    above = s > (high - low) / QUARTILES_OF_NORMAL * (1 + sqrt(min(shape) / max(shape)))
    signal, noise = float(s[above].sum()), float(s[~above].sum())
    if not s[0] > 0:
        return float("nan")
    return float((signal / noise if noise > 0 else np.inf) / s[0])


def condition(s: np.ndarray, shape: tuple[int, int]) -> float:
    """sigma_1 over the smallest singular value; infinite where that is zero."""
    return _of_nonzero(s, s[0] / s[-1] if s[-1] > 0 else np.inf)


def _of_nonzero(s: np.ndarray, value: float) -> float:
    return float(value) if s[0] > 0 else float("nan")


def power_law(values: np.ndarray) -> tuple[float, float]:
    """The exponent alpha of a tail with density x^-alpha, and its Kolmogorov distance from it.

    Clauset, Shalizi and Newman 2009: each value may be the least of the tail; the exponent of
    maximum likelihood follows, and the tail that is nearest to its law is taken. As in their code,
    the distance is taken at the lower step of the empirical distribution at each value. Values that
    are not positive are left out.

    Examples
    --------
    >>> values = np.random.default_rng(0).pareto(1.5, 4000) + 1  # density x^-2.5
    >>> alpha, distance = power_law(values)
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


# Singular values of any matrix from blocks of its rows: as roots of the eigenvalues of its smaller
# Gram matrix.
GRAM_ROWS = 1024  # rows of a block, or columns


def singular_values(chunks: Iterable[np.ndarray], shape: tuple[int, int]) -> np.ndarray:
    """Singular values, descending, from values in storage order: (any,), shape (m, n) -> (r,).

    Those below sqrt(r eps) sigma_1, which a Gram matrix cannot tell from zero, are zero; where a
    value is not finite all are NaN.
    """
    gram = gram_matrix(chunks, shape)
    if not np.isfinite(gram).all():
        return np.full(len(gram), np.nan)
    values = lapack.symmetric_eigenvalues(gram)[::-1]
    rounding = len(values) * np.finfo(np.float64).eps * values[0]
    return np.sqrt(np.where(values > rounding, values, 0.0))


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


def _in_rows(
    chunks: Iterable[np.ndarray], width: int, n_rows: int, dtype: type[np.floating] = np.float64
) -> Iterator[np.ndarray]:
    """Whole rows, (at most n_rows, width): of a chunk, or in a buffer that is used again."""
    buffer, filled = np.empty(n_rows * width, dtype), 0
    for chunk in chunks:
        while len(chunk):
            if not filled and len(chunk) == len(buffer) and chunk.dtype == dtype:
                yield chunk.reshape(-1, width)
                break
            taken = min(len(buffer) - filled, len(chunk))
            buffer[filled : filled + taken] = chunk[:taken]
            chunk, filled = chunk[taken:], filled + taken
            if filled == len(buffer):
                yield buffer.reshape(-1, width)
                filled = 0
    if filled:
        yield buffer[:filled].reshape(-1, width)


# A sketch of the spectrum, where both sides are large: stochastic Lanczos quadrature (Golub and
# Meurant 2010; Ubaru, Chen and Saad 2017). A random vector sees the eigenvalues of the Gram matrix
# with random weights of mean 1 / r; k products with the matrix give the k nodes and weights of a
# Gauss quadrature of that distribution.
PROBES, STEPS = 4, 48
SKETCH_VALUES = 1 << 20  # values of a block of rows: it stays in the cache for both products
CONVERGED = 1e-3  # residual of an eigenvalue, relative to it
NO_WEIGHT = 1e-14  # weight of a node past the matrix's last
STANDARD_ERRORS = 3  # standard errors of the probes in the estimated error

Chunks = Callable[[], Iterable[np.ndarray]]


class Sketch(NamedTuple):
    """Singular values (r,), descending: the largest exactly, others at evenly spaced ranks."""

    s: np.ndarray
    rank_error: float  # estimated largest error of the share of values below a value; no bound


def sketched_singular_values(chunks: Chunks, shape: tuple[int, int], squares: float) -> Sketch:
    """A sketch of the singular values of a matrix with this sum of `squares`.

    `chunks` gives the values in storage order each time. In a probe's quadrature, the share of
    eigenvalues below a node is right up to the node's weight (Chebyshev, Markov and Stieltjes), and
    between two nodes up to half as much again; a probe's share p of r has the variance
    2 p (1 - p) / (r + 2). Eigenvalues that have converged are taken by themselves, and the others
    are scaled to the exact Frobenius norm. Memory is a block of rows and the probes.
    """
    r = min(shape)
    if not 0 < squares < np.inf:
        return Sketch(np.full(r, 0.0 if squares == 0 else np.nan), 0.0)
    diagonals, betas = _lanczos(lambda x: _times_gram(chunks, shape, x, sqrt(squares)), r)
    probes = [Probe.of(*tridiagonal) for tridiagonal in zip(diagonals, betas, strict=True)]
    top = max((probe.converged for probe in probes), key=len)[: r - 1]  # (c,)
    inner = [probe.below(top[-1] * (1 - CONVERGED)) if len(top) else probe for probe in probes]
    seen = float(np.mean([1 - probe.weights.sum() for probe in inner])) * r  # converged, by weight
    has_repeated = seen > len(top) + STANDARD_ERRORS * sqrt(2 * len(top) / PROBES)
    if has_repeated:
        top, inner = top[:0], probes
    rest = _at_even_ranks(inner, r - len(top))
    left = max(1 - float(top.sum()), 0.0)  # in units of the Frobenius norm
    rest *= sqrt(left / float((rest**2).sum())) if rest.any() else 0.0
    error = 1.5 * np.mean([probe.weights.max(initial=0.0) for probe in inner])
    sampling_error = STANDARD_ERRORS * sqrt(0.5 / (PROBES * (r + 2)))
    s = np.sort(np.concatenate([np.sqrt(top), rest]))[::-1]
    return Sketch(s * sqrt(squares), min(1.0, float(error) + sampling_error))


class Probe(NamedTuple):
    """The quadrature that a random vector gives."""

    nodes: np.ndarray  # (k,) ascending
    weights: np.ndarray  # (k,)
    converged: np.ndarray  # (c,) the nodes that are eigenvalues, from the largest on, descending

    @classmethod
    def of(cls, diagonal: np.ndarray, beta: np.ndarray) -> "Probe":
        """The quadrature of a tridiagonal matrix: diagonal, beta (k,)."""
        tridiagonal = np.diag(diagonal) + np.diag(beta[:-1], 1) + np.diag(beta[:-1], -1)
        nodes, vectors = np.linalg.eigh(tridiagonal)
        residuals = beta[-1] * np.abs(vectors[-1])
        settled = (residuals <= CONVERGED * nodes) & (nodes > CONVERGED * nodes[-1])
        count = len(nodes) if settled.all() else int(np.argmin(settled[::-1]))
        weights = vectors[0] ** 2
        kept = weights > NO_WEIGHT
        return cls(nodes[kept], weights[kept], nodes[::-1][:count])

    def below(self, limit: float) -> "Probe":
        """The nodes below a limit."""
        kept = self.nodes < limit
        return self._replace(nodes=self.nodes[kept], weights=self.weights[kept])


def _times_gram(chunks: Chunks, shape: tuple[int, int], x: np.ndarray, scale: float) -> np.ndarray:
    """W'W x / scale^2, or WW' x / scale^2 where W is wide: x (r, p) -> (r, p)."""
    m, n = shape
    n_rows = max(1, SKETCH_VALUES // n)
    unit = (x / scale).astype(np.float32)
    if m >= n:
        product = np.zeros(x.shape)
        for rows in _in_rows(chunks(), n, n_rows, np.float32):
            product += rows.T @ (rows @ unit)
        return product / scale
    inner, parts = np.zeros((n, x.shape[1]), np.float32), []
    blocks = _in_rows(chunks(), n, n_rows, np.float32)
    for start, rows in zip(range(0, m, n_rows), blocks, strict=True):
        inner += rows.T @ unit[start : start + n_rows]
    for rows in _in_rows(chunks(), n, n_rows, np.float32):
        parts.append(rows @ inner)
    return np.concatenate(parts) / scale


def _lanczos(times: Callable[[np.ndarray], np.ndarray], r: int) -> tuple[np.ndarray, np.ndarray]:
    """Diagonals and off-diagonals, (p, k) each, of tridiagonal matrices of random vectors."""
    steps = min(STEPS, r)
    basis = np.zeros((PROBES, steps, r))
    diagonals, betas = np.zeros((PROBES, steps)), np.zeros((PROBES, steps))
    q = np.random.default_rng(r).standard_normal((PROBES, r))
    q /= np.linalg.norm(q, axis=1, keepdims=True)
    for step in range(steps):
        basis[:, step] = q
        following = times(q.T).T.astype(np.float64)  # (p, r)
        diagonals[:, step] = (q * following).sum(axis=1)
        for _ in range(2):  # against all before, twice: float32's residue would bring values back
            overlaps = basis[:, : step + 1] @ following[:, :, None]  # (p, step + 1, 1)
            following -= (overlaps.swapaxes(1, 2) @ basis[:, : step + 1])[:, 0]
        beta = np.linalg.norm(following, axis=1)
        beta[beta < 1e-6 * diagonals.max(axis=1)] = 0.0  # nothing is left but rounding
        betas[:, step] = beta
        has_more, nothing = beta[:, None] > 0, np.zeros_like(following)
        q = np.divide(following, beta[:, None], out=nothing, where=has_more)
    return diagonals, betas


def _at_even_ranks(probes: Iterable[Probe], count: int) -> np.ndarray:
    """(count,) roots of nodes at evenly spaced ranks of the probes' mean distribution."""
    probes = [probe for probe in probes if probe.weights.sum() > 0]
    if not probes:
        return np.zeros(count)
    roots = [np.sqrt(np.maximum(probe.nodes, 0.0)) for probe in probes]
    every = np.unique(np.concatenate(roots))
    distributions = []
    for root, (_, weights, _) in zip(roots, probes, strict=True):
        middles = (np.cumsum(weights) - weights / 2) / weights.sum()
        distributions.append(np.interp(every, root, middles))
    shares = np.concatenate([[0.0], np.mean(distributions, axis=0), [1.0]])
    values = np.concatenate([every[:1], every, every[-1:]])
    return np.interp((np.arange(count) + 0.5) / count, shares, values)

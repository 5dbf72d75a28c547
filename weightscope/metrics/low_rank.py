"""The rank of a matrix up to noise, from blocks of its rows."""

from collections.abc import Callable, Iterable
from math import sqrt

import numpy as np

MOST_RANK = 128  # a rank above this, or above half the smaller side, is not called low
SPARE = 16  # columns of a sketch past the largest rank it is to tell
CORNER = 256  # rows and columns of a part that is looked at first
MARGIN = 1.5  # times the noise's expected spectral norm and energy

Blocks = Callable[[], Iterable[np.ndarray]]


def low_rank(blocks: Blocks, shape: tuple[int, int], noise: float) -> int | None:
    """The rank of a matrix up to noise, or None where it is not low: blocks (rows, n), shape (m, n).

    A matrix of independent errors of standard deviation e has a spectral norm of about e (sqrt(m) + sqrt(n)): singular
    values above that, with a margin, are counted. What the counted ones leave has to have no more energy than the
    errors. The blocks are gone through three times at most: a part of the first, which rules most matrices out, a
    random sketch of the row space (Halko, Martinsson and Tropp 2011, algorithm 4.1), and the matrix within that space,
    whose singular values are exact.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> w = rng.standard_normal((300, 3)) @ rng.standard_normal((3, 200))
    >>> low_rank(lambda: [w[:100], w[100:]], w.shape, 1e-12)
    3
    """
    m, n = shape
    most = min(MOST_RANK, min(m, n) // 2)
    first = _first_rows(blocks(), CORNER)
    part = first[np.ix_(evenly_spread(len(first), CORNER), evenly_spread(n, CORNER))].T.astype(np.float64)
    if _counted(np.linalg.svd(part, compute_uv=False), part.shape, noise) > most:
        return None
    rng = np.random.default_rng(n)
    width = min(most + SPARE, m, n)
    sketch = np.zeros((width, n))
    for block in blocks():
        sketch += rng.standard_normal((len(block), width)).T @ block
    basis = np.linalg.qr(sketch.T)[0]  # (n, width)
    gram, left = np.zeros((basis.shape[1],) * 2), 0.0
    for block in blocks():
        inside = block @ basis
        gram += inside.T @ inside
        left += float(((block - inside @ basis.T) ** 2).sum())
    values = np.sqrt(np.maximum(np.linalg.eigvalsh(gram)[::-1], 0.0))
    rank = _counted(values, shape, noise)
    left += float((values[rank:] ** 2).sum())
    return rank if 0 < rank <= most and left <= MARGIN * m * n * noise**2 else None


def _counted(values: np.ndarray, shape: tuple[int, ...], noise: float) -> int:
    floor = max(MARGIN * noise * sum(map(sqrt, shape)), 1e-7 * float(values.max(initial=0.0)))
    return int((values > floor).sum())


def _first_rows(blocks: Iterable[np.ndarray], least: int) -> np.ndarray:
    """The first blocks that together have this many rows: fewer could not distinguish a high rank from a low one."""
    rows = []
    for block in blocks:
        rows.append(block)
        if sum(map(len, rows)) >= least:
            break
    return np.concatenate(rows)


def evenly_spread(count: int, most: int) -> np.ndarray:
    """At most this many of the indices below `count`, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(most, count)).astype(int))

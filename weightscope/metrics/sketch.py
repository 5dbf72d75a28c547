"""Which heads use the same space: a small sketch of every head's, compared with every other; then exact angles."""

import numpy as np
from scipy.linalg import solve_triangular

from weightscope.attention.factored import orthonormal

ROWS_AT_ONCE = 256  # heads compared with all others at a time
PROBES = 24  # a sketch is 24 * 25 / 2 = 300 numbers: unrelated spaces correlate by 0.06 or so, equal ones by 1


def probes(d: int) -> np.ndarray:
    """The fixed directions (PROBES, d) that every space of this width is sketched with."""
    return (np.random.default_rng(d).standard_normal((PROBES, d)) / np.sqrt(d)).astype(np.float32)


def space_sketch(factor: np.ndarray, r: np.ndarray, omega: np.ndarray) -> np.ndarray:
    """Omega (P - (r/d) I) Omega' of the projection P onto the factor's columns, as a unit vector.

    P = Q Q' with Q = factor R^-1, so P does not depend on how the columns are chosen within their space, and the inner
    product of two sketches estimates the correlation of the two projections.

    Parameters
    ----------
    factor : (d, r) array
    r : (r, r) array
        Its upper triangle, factor = Q R.
    omega : (m, d) array

    Returns
    -------
    (m (m + 1) / 2,) array
        NaN where the columns are not independent, or are so many that every space is nearly the whole.
    """
    d, width = factor.shape
    m = len(omega)
    upper = np.triu_indices(m)
    diagonal = np.abs(r.diagonal())
    if width > 0.9 * d or not diagonal.min() > 1e-6 * diagonal.max():
        return np.full(len(upper[0]), np.nan)
    projected = (omega @ factor).astype(np.float64)  # (m, r); in the factor's own precision, which is enough for this
    inside = solve_triangular(r, projected.T, trans="T")  # Q' Omega', (r, m)
    centred = inside.T @ inside - width / d * (omega @ omega.T)  # (m, m)
    sketch = (centred * np.where(np.eye(m, dtype=bool), 1.0, np.sqrt(2.0)))[upper]  # keeps the Frobenius inner product
    return sketch / np.linalg.norm(sketch)


def alike(first: np.ndarray, second: np.ndarray, least: float) -> np.ndarray:
    """Pairs (i, j), i < j, that correlate by at least `least` in both of two sketches.

    Parameters
    ----------
    first, second : (n, s) arrays
        Of the two spaces of each head; rows with NaN are like nothing.

    Returns
    -------
    (n_pairs, 2) int array
    """
    first, second = np.nan_to_num(first), np.nan_to_num(second)
    pairs = [np.empty((0, 2), np.int64)]
    for start in range(0, len(first), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        both = (first[rows] @ first.T >= least) & (second[rows] @ second.T >= least)  # (rows, n)
        pairs.append(np.argwhere(np.triu(both, start + 1)) + np.array([start, 0]))
    return np.concatenate(pairs)


def principal_angles(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Principal angles between two column spaces in radians, ascending (Golub and Van Loan, section 6.4.3).

    Parameters
    ----------
    a : (d, r) array
    b : (d, s) array

    Returns
    -------
    (min(r, s),) array
    """
    (q_a, _), (q_b, _) = orthonormal(a), orthonormal(b)
    inside = q_a.T @ q_b
    cosines = np.linalg.svd(inside, compute_uv=False)
    # arccos loses small angles: cos 1e-8 is 1 in float64. Their sines are the singular values of what b has outside a,
    # read off along its own right singular vectors so that they are not squared.
    outside = q_b - q_a @ inside  # (d, s)
    vectors = np.linalg.eigh(outside.T @ outside)[1]
    sines = np.sort(np.linalg.norm(outside @ vectors, axis=0))[: len(cosines)]
    return np.arctan2(sines, cosines)


def frobenius_cosine(left_a: np.ndarray, right_a: np.ndarray, left_b: np.ndarray, right_b: np.ndarray) -> float:
    """<A, B>_F / (|A|_F |B|_F) of A = left_a right_a' and B = left_b right_b'; NaN for a zero one."""
    la, ra, lb, rb = (x.astype(np.float64) for x in (left_a, right_a, left_b, right_b))

    def inner(l1: np.ndarray, r1: np.ndarray, l2: np.ndarray, r2: np.ndarray) -> float:
        return float(((l1.T @ l2) * (r1.T @ r2)).sum())

    lengths = np.sqrt(inner(la, ra, la, ra) * inner(lb, rb, lb, rb))
    return inner(la, ra, lb, rb) / lengths if lengths > 0 else float("nan")

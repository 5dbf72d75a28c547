"""How alike a head's matrix and its transpose are: symmetric and antisymmetric parts, from r x r products alone.

For W = L R' with Gram matrices A = L'L, B = R'R and C = R'L: |W|_F^2 = <A, B> and tr W^2 = tr C^2.
"""

import numpy as np

JITTER = 1e-13  # of the mean diagonal: keeps a Cholesky alive, moves a leading eigenvalue by no more than about itself


def symmetric_share(gram_left: np.ndarray, gram_right: np.ndarray, cross: np.ndarray) -> float:
    """|(W + W')/2|_F^2 / |W|_F^2 = (1 + tr W^2 / |W|_F^2) / 2, from 0 (antisymmetric) to 1 (symmetric); NaN for zero.

    The antisymmetric part has the rest: the two are orthogonal.

    Parameters
    ----------
    gram_left, gram_right : (r, r) arrays
        L'L and R'R.
    cross : (r, r) array
        R'L.
    """
    squared = float((gram_left * gram_right).sum())
    if not squared > 0:
        return float("nan")
    return float(np.clip((1 + (cross * cross.T).sum() / squared) / 2, 0.0, 1.0))


def symmetric_eigenvalues(gram_left: np.ndarray, gram_right: np.ndarray, cross: np.ndarray) -> np.ndarray:
    """Eigenvalues of (W + W')/2 that can be non-zero, largest magnitude first, shape (2r,).

    (W + W')/2 = [L R] J [L R]' / 2 with J swapping the halves, so they are those of G'JG / 2 with GG' the Gram matrix
    of [L R]. A positive one: tokens along that direction attend to their like; a negative one: to their opposite.

    Parameters
    ----------
    gram_left, gram_right, cross : (r, r) arrays
        L'L, R'R and R'L.
    """
    r = len(cross)
    trace_left, trace_right = gram_left.trace(), gram_right.trace()
    if not (np.isfinite(trace_left + trace_right) and np.isfinite(cross).all()):
        return np.full(2 * r, np.nan)
    if trace_left == 0 or trace_right == 0:
        return np.zeros(2 * r)
    balance = np.sqrt(trace_right / trace_left)  # L t and R / t give the same W; equal lengths round best
    joint = np.block([[gram_left * balance, cross.T], [cross, gram_right / balance]])  # (2r, 2r)
    joint[np.diag_indices(2 * r)] += JITTER * joint.trace() / (2 * r)
    g = np.linalg.cholesky(joint)
    upper = g[:r].T @ g[r:]  # G'JG = G1'G2 + G2'G1
    values = np.linalg.eigvalsh((upper + upper.T) / 2)
    return values[np.argsort(-np.abs(values), kind="stable")]

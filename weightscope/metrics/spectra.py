"""What a spectrum says of a matrix: one number a question, each a function of the singular values alone.

Every function takes singular values (..., r), descending, and gives an array of shape (...). The zero matrix and
spectra that are not finite give NaN.
"""

import numpy as np

# Singular values nearer than this, relative to the larger, share a block of directions: a perturbation of that size
# turns the vectors within it at will. Stored weights carry about as much: bfloat16 rounds by up to 0.4 %.
NEAR_EQUAL = 0.01


def spectral_gap(s: np.ndarray) -> np.ndarray:
    """sigma_1 / sigma_2; infinite for a matrix of rank one.

    A large one is the spectral spike by which a head can gate (two-sink-mechanisms paper, Lemma 2).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return s[..., 0] / s[..., 1] if s.shape[-1] > 1 else np.where(s[..., 0] > 0, np.inf, np.nan)


def frobenius(s: np.ndarray) -> np.ndarray:
    """sqrt(sum_i sigma_i^2)."""
    return np.sqrt((s**2).sum(axis=-1))


def stable_rank(s: np.ndarray) -> np.ndarray:
    """sum_i sigma_i^2 / sigma_1^2, from 1 to r."""
    return _divided((_unit(s) ** 2).sum(axis=-1), 1.0)


def effective_rank(s: np.ndarray) -> np.ndarray:
    """exp(-sum_i p_i ln p_i) with p_i = sigma_i / sum_j sigma_j, from 1 to r (Roy and Vetterli 2007)."""
    shares = _divided(s, s.sum(axis=-1, keepdims=True))  # (..., r)
    logs = np.log(np.where(shares > 0, shares, 1.0))  # 0 ln 0 = 0
    return np.exp(-(shares * logs).sum(axis=-1))


def participation_ratio(s: np.ndarray) -> np.ndarray:
    """(sum_i sigma_i^2)^2 / sum_i sigma_i^4, from 1 to r."""
    squares = _unit(s) ** 2
    return _divided(squares.sum(axis=-1) ** 2, (squares**2).sum(axis=-1))


def null_tolerance(s: np.ndarray, d: int) -> np.ndarray:
    """The largest singular value that rounding alone could have left: d eps sigma_1, eps that of float64."""
    return d * np.finfo(np.float64).eps * s[..., 0]


def numerical_rank(s: np.ndarray, d: int) -> np.ndarray:
    """How many singular values lie above `null_tolerance`; 0 for the zero matrix, -1 where they are not finite."""
    above = (s > null_tolerance(s, d)[..., None]).sum(axis=-1)
    return np.where(np.isfinite(s).all(axis=-1), above, -1)


def condition_number(s: np.ndarray, d: int) -> np.ndarray:
    """sigma_1 over the smallest singular value above `null_tolerance`: the ratio of norm-based-attention's Fig. 2."""
    smallest = np.where(s > null_tolerance(s, d)[..., None], s, np.inf).min(axis=-1)
    return np.where(np.isfinite(smallest), _divided(s[..., 0], smallest), np.nan)


def near_equal_blocks(s: np.ndarray, tolerance: float = NEAR_EQUAL) -> list[tuple[int, int]]:
    """Runs [start, stop) of singular values that are too near each other for a direction of one alone to mean anything.

    Two neighbours are in one block when they differ by less than `tolerance` of the larger; the null space is left out.

    Parameters
    ----------
    s : (r,) array, descending
    tolerance : float

    Returns
    -------
    list of (int, int)
        They cover the non-zero singular values in order; a block of one has start + 1 == stop.
    """
    kept = int(np.count_nonzero(s > 0))
    cuts = [i for i in range(1, kept) if s[i - 1] - s[i] >= tolerance * s[i - 1]]
    return [(start, stop) for start, stop in zip([0, *cuts], [*cuts, kept], strict=True) if start < stop]


def _unit(s: np.ndarray) -> np.ndarray:
    """sigma_i / sigma_1, so that no square over- or underflows; NaN for the zero matrix."""
    return _divided(s, s[..., :1])


def _divided(numerator: np.ndarray, denominator: np.ndarray | float) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(np.asarray(denominator) > 0, numerator / np.asarray(denominator), np.nan))

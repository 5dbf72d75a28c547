"""What attention owes to position alone: T^p and T^pp (detokenization paper, section 4 and Fig. 3)."""

from dataclasses import dataclass

import numpy as np
from scipy.stats import spearmanr

from weightscope.attention.factored import Factored
from weightscope.detokenization.sigma import SigmaStatistics
from weightscope.metrics.outliers import ROW_Z, norm_outliers, row_norms


def position_numerators(
    qk: Factored, qk_bias: np.ndarray, positions: np.ndarray, query: int
) -> tuple[np.ndarray, np.ndarray]:
    """b_QK p_j' and p_i W_QK p_j' for every j: T^p and T^pp before any sigma divides them.

    Parameters
    ----------
    qk : Factored of shape (d, d)
    qk_bias : (d,) array
    positions : (n_positions, d) array
    query : int
        The position i.

    Returns
    -------
    t_p : (n_positions,) array
    t_pp : (n_positions,) array
    """
    return positions @ qk_bias, (positions @ qk.right) @ (positions[query] @ qk.left)


@dataclass(frozen=True)
class Curve:
    """A position term over j: its mean over tokens at j, and the band that holds 95 % of them.

    Attributes
    ----------
    mean, low, high : (n,) arrays
    """

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def spread_over_tokens(numerator: np.ndarray, sigma: SigmaStatistics) -> Curve:
    """numerator_j / sigma_j with sigma_j spread over the tokens that may stand at j (Fig. 3's band).

    The numerator knows no token, so its mean and percentiles are those of 1/sigma_j times the numerator, with the ends
    swapped where it is negative.

    Parameters
    ----------
    numerator : (n,) array
        For j = 0 .. n-1.
    sigma : SigmaStatistics
        Of at least n positions.
    """
    n = len(numerator)
    ends = np.stack([numerator * sigma.inverse_low[:n], numerator * sigma.inverse_high[:n]])
    return Curve(numerator * sigma.inverse_mean[:n], ends.min(axis=0), ends.max(axis=0))


def softmax(scores: np.ndarray) -> np.ndarray:
    """softmax over the last axis, in float64."""
    shifted = np.exp(scores.astype(np.float64) - scores.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


@dataclass(frozen=True)
class Trend:
    """What the paper says of a position curve, as numbers.

    Attributes
    ----------
    slope : float
        Of the least-squares line, per position: ALiBi's bias is a positive slope in j.
    linear_share : float
        Share of the curve's variance that the line explains (R^2).
    period : float
        Period in positions of the strongest sinusoid that is left when the line is taken out.
    sinusoid_share : float
        Share of the curve's variance which that one sinusoid explains beyond the line.
    """

    slope: float
    linear_share: float
    period: float
    sinusoid_share: float


def trends(curves: np.ndarray) -> list[Trend]:
    """Split each curve into an ALiBi-like line and a sinusoid (detokenization paper, section 4).

    The sinusoid is fitted by least squares at every period of a dense grid, orthogonal to the line, so that periods
    that do not divide the length are found as they are. A constant curve has slope 0 and no sinusoid (NaN period).
    Memory: 32 n^2 bytes, 34 MB for GPT-2's 1,024 positions.

    Parameters
    ----------
    curves : (n_curves, n) array, n >= 8
    """
    n = curves.shape[1]
    if n < 8:
        raise ValueError(f"a trend needs at least 8 positions, not {n}")
    j = np.arange(n) - (n - 1) / 2
    line = np.stack([np.full(n, n**-0.5), j / np.linalg.norm(j)])  # (2, n), orthonormal
    y = curves.astype(np.float64)
    y -= y.mean(axis=1, keepdims=True)  # (c, n)
    remainder = y - (y @ line.T) @ line
    total, left = (y**2).sum(axis=1), (remainder**2).sum(axis=1)  # (c,)

    periods = n / np.arange(1, n / 4, 0.125)  # from the length down to 4 positions, eight to each cycle more that fits
    explained = _explained_by_sinusoids(remainder, line, j, periods)  # (c, n_periods)
    best = explained.argmax(axis=1)
    found = []
    for c in range(len(y)):
        if total[c] <= 1e-24 * n * np.abs(curves[c]).max(initial=1.0) ** 2:  # constant up to rounding
            found.append(Trend(0.0, 0.0, float("nan"), 0.0))
            continue
        wavy = left[c] > 1e-12 * total[c]
        found.append(
            Trend(
                slope=float(y[c] @ j / (j @ j)),
                linear_share=float(1 - left[c] / total[c]),
                period=float(periods[best[c]]) if wavy else float("nan"),
                sinusoid_share=float(explained[c, best[c]] / total[c]) if wavy else 0.0,
            )
        )
    return found


def _explained_by_sinusoids(remainder: np.ndarray, line: np.ndarray, j: np.ndarray, periods: np.ndarray) -> np.ndarray:
    """Sum of squares that a sinusoid of each period takes out of what a line left: (n_curves, n_periods)."""
    angles = 2 * np.pi * j / periods[:, None]  # (p, n)
    sine, cosine = np.sin(angles), np.cos(angles)
    sine -= (sine @ line.T) @ line
    cosine -= (cosine @ line.T) @ line
    # Gram-Schmidt on the pair; near the longest period what the line leaves of the sine is short but not zero.
    sine /= np.linalg.norm(sine, axis=1, keepdims=True)
    cosine -= (cosine * sine).sum(axis=1, keepdims=True) * sine
    cosine /= np.linalg.norm(cosine, axis=1, keepdims=True)
    return (remainder @ sine.T) ** 2 + (remainder @ cosine.T) ** 2


def recency(scores: np.ndarray) -> float:
    """Spearman correlation of a score with j: 1 where attention falls with distance all the way, 0 without a trend.

    Parameters
    ----------
    scores : (n,) array
        For j = 0 .. i; any monotone function of them, such as the softmax, gives the same number.
    """
    if np.ptp(scores) == 0:
        return 0.0
    return float(spearmanr(np.arange(len(scores)), scores).statistic)


def near_mass(attention: np.ndarray, share: float = 0.1) -> np.ndarray:
    """Attention that the nearest tenth of the positions gets; a tenth where position does not matter.

    Parameters
    ----------
    attention : (..., n) array
        Over j = 0 .. i.

    Returns
    -------
    (...) array
    """
    return attention[..., -max(1, round(share * attention.shape[-1])) :].sum(axis=-1)


def undertrained_rows(embedding: np.ndarray) -> np.ndarray:
    """Rows whose norm is far below the others': positions or tokens that training hardly ever met.

    A robust z-score of the log norm (median and MAD, the latter at least 2 %) below -8. GPT-2's last position is one:
    its norm is 0.12, the others' median 3.37.

    Parameters
    ----------
    embedding : (n, d) array

    Returns
    -------
    int array
        Their indices.
    """
    low, _ = norm_outliers(row_norms(embedding), ROW_Z)
    return np.sort(low)

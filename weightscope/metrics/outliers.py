"""Outliers of a distribution, judged by medians so that the outliers do not set the standard themselves.

Measures of heads are compared on a logarithmic scale, as value = median of the layer + difference of the head: scaling
a whole layer shows in the first part alone, an odd head in the second.
"""

import numpy as np


def known_median(values: np.ndarray) -> float:
    """The median of those values that are not NaN; NaN where none is, without NumPy's warning."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else float("nan")


NEIGHBOURS = 4  # layers a layer is compared with: as many at the ends, so that one odd layer among them does no harm
ROW_Z = 8.0  # robust z-score of an embedding row's log norm, beyond which training hardly met it or swelled it
LEAST_SPREAD = 0.02  # of a log: values that agree to 2 % have no outliers, whatever their z-scores


def robust_z(values: np.ndarray, least_spread: float = LEAST_SPREAD) -> np.ndarray:
    """(x - median) / (1.4826 MAD) over all finite elements."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return np.full(values.shape, np.nan)
    median = np.median(finite)
    spread = max(least_spread, 1.4826 * float(np.median(np.abs(finite - median))))
    return (values - median) / spread


def log_measure(values: np.ndarray) -> np.ndarray:
    """ln of a positive measure; NaN where it is zero or not finite."""
    return np.log(np.where((values > 0) & np.isfinite(values), values, np.nan))


def layer_medians(logs: np.ndarray) -> np.ndarray:
    """Median over the heads of each layer, NaN for layers without a finite one: (L, H) -> (L,)."""
    return np.array([np.median(row[np.isfinite(row)]) if np.isfinite(row).any() else np.nan for row in logs])


def off_trend(medians: np.ndarray) -> np.ndarray:
    """Each layer's distance from the median of its nearest finite neighbours (a Hampel filter): medians (L,) ->
    (L,).
    """
    finite = np.flatnonzero(np.isfinite(medians))
    differences = np.full(len(medians), np.nan)
    for i, median in enumerate(medians):
        place = int(np.searchsorted(finite, i))
        near = finite[max(0, place - NEIGHBOURS) : place + NEIGHBOURS + 1]  # includes the nearest
        near = near[near != i]
        nearest = near[np.argsort(np.abs(near - i), kind="stable")][:NEIGHBOURS]
        if len(nearest):
            differences[i] = median - np.median(medians[nearest])
    return differences


def row_norms(block: np.ndarray) -> np.ndarray:
    """Euclidean norms of rows in float64, (n, d) -> (n,)."""
    return np.sqrt(np.einsum("nd,nd->n", block, block, dtype=np.float64))


def norm_outliers(norms: np.ndarray, z: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows with unusually small and large norms, by the robust z-score of log norm: norms (n,)."""
    scores = robust_z(np.log(np.maximum(norms, 1e-30)))
    order = np.argsort(scores, kind="stable")
    return order[scores[order] < -z], order[::-1][scores[order[::-1]] > z]

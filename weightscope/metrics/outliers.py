"""What stands outside a distribution, judged by medians so that the odd ones do not set the standard themselves.

Measures of heads are compared on a logarithmic scale, as value = layer's median + the head's own difference: a layer
that is scaled as a whole shows in the first part alone, a head that is in the second alone.
"""

import numpy as np

NEIGHBOURS = 4  # layers a layer is compared with: as many at the ends, so that one odd layer among them does no harm
ROW_Z = 8.0  # robust z-score of an embedding row's log norm, beyond which training hardly met it or swelled it
LEAST_SPREAD = 0.02  # of a log: values that agree to 2 % have no outliers, whatever their z-scores


def robust_z(values: np.ndarray, least_spread: float = LEAST_SPREAD) -> np.ndarray:
    """(x - median) / (1.4826 MAD) over all elements; what is not finite does not count.

    Parameters
    ----------
    values : array
    least_spread : float
        The divisor is no smaller; 0.02 suits logarithms.
    """
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
    """Each layer's distance from the median of its nearest finite neighbours (a Hampel filter).

    Parameters
    ----------
    medians : (L,) array

    Returns
    -------
    (L,) array
        NaN where no neighbour is finite.
    """
    finite = np.flatnonzero(np.isfinite(medians))
    differences = np.full(len(medians), np.nan)
    for i, median in enumerate(medians):
        at = int(np.searchsorted(finite, i))
        others = finite[max(0, at - NEIGHBOURS) : at + NEIGHBOURS + 1]  # the nearest are among these
        others = others[others != i]
        nearest = others[np.argsort(np.abs(others - i), kind="stable")][:NEIGHBOURS]
        if len(nearest):
            differences[i] = median - np.median(medians[nearest])
    return differences


def row_norms(block: np.ndarray) -> np.ndarray:
    """Euclidean norms of rows in float64, (n, d) -> (n,)."""
    return np.sqrt(np.einsum("nd,nd->n", block, block, dtype=np.float64))


def norm_outliers(norms: np.ndarray, z: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows with a norm far below and far above the others', by the robust z-score of its log.

    Parameters
    ----------
    norms : (n,) array
    z : float

    Returns
    -------
    low, high : int arrays
        Zero rows are the lowest; the farthest come first.
    """
    scores = robust_z(np.log(np.maximum(norms, 1e-30)))
    order = np.argsort(scores, kind="stable")
    return order[scores[order] < -z], order[::-1][scores[order[::-1]] > z]

"""The permutation test of Zhu et al. (ICML 2025, arXiv 2502.12292) on feed-forward neurons.

The neurons of two networks are assigned twice, by their gate and by their up projection. Of networks that were trained
apart, the two assignments are independent, whatever the networks are like, so Spearman's correlation between them has a
known distribution: its p-value is uniform. Of networks with neurons in common, in any order, both are the same.
"""

from math import log

import numpy as np

from weightscope.lineage.neurons import Network, networks_of, usable
from weightscope.metrics.spectra import evenly_spread
from weightscope.model import Model

NEURONS = 256  # of a network, evenly spread, that are assigned among all of the other's
LAYERS = 8  # evenly spread, that are tested
LEAST = -700.0  # logarithm of a probability: less is no number of float64


def permutation_log_p(suspect: Model, base: Model) -> float | None:
    """The logarithm of the p-value over layers of the same index, by Fisher's method; None where shapes differ."""
    if suspect.config.n_layers != base.config.n_layers:
        return None
    pairs = [(a, b) for a, b in zip(_dense(suspect), _dense(base), strict=False) if _can_be_tested(a, b)]
    tested = [pairs[k] for k in evenly_spread(len(pairs), LAYERS)]
    return fisher([layer_log_p(a, b) for a, b in tested]) if tested else None


def _dense(model: Model) -> list[Network]:
    """One network for each layer that is not a mixture, in order."""
    return sorted((each for each in networks_of(model) if each.place[1] is None), key=lambda each: each.place[0])


def _sides(network: Network) -> list[str]:
    """The matrices that neurons are assigned by."""
    return ["gate", "up"] if "gate" in network.matrices else ["up", "down"]


def _can_be_tested(a: Network, b: Network) -> bool:
    return a.place == b.place and _sides(a) == _sides(b) and all(
        a.matrices[side].shape == b.matrices[side].shape for side in _sides(a)
    )  # fmt: skip


def layer_log_p(a: Network, b: Network) -> float:
    """The logarithm of the p-value of one pair of networks."""
    orders = [assigned(*(_rows(each, side) for each in (a, b))) for side in _sides(a)]
    return spearman_log_p(*orders)


def _rows(network: Network, side: str) -> np.ndarray:
    w = network.matrices[side].array()
    return np.asarray(usable(w.T if side == "down" else w), np.float32)  # (neurons, d)


def assigned(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The row of y (m, d) for each of some rows of x (n, d): the assignment with the largest sum of cosines."""
    from scipy.optimize import linear_sum_assignment

    chosen = x[evenly_spread(len(x), NEURONS)]
    a, b = (rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30) for rows in (chosen, y))
    return np.asarray(linear_sum_assignment(a @ b.T, maximize=True)[1])


def spearman_log_p(x: np.ndarray, y: np.ndarray) -> float:
    """The logarithm of the one-sided p-value of Spearman's correlation, by Student's t."""
    from scipy.special import stdtr
    from scipy.stats import rankdata

    ranks = [rankdata(each) for each in (x, y)]
    r = float(np.corrcoef(*ranks)[0, 1])
    n = len(x)
    if n < 4 or not np.isfinite(r):
        return 0.0
    t = r * np.sqrt((n - 2) / max(1 - r * r, 1e-300))
    return log(max(float(stdtr(n - 2, -t)), np.exp(LEAST)))


def fisher(log_p: list[float]) -> float:
    """Fisher's combination of independent p-values, given and returned as logarithms."""
    from scipy.special import gammaincc

    return log(max(float(gammaincc(len(log_p), -sum(log_p))), np.exp(LEAST)))

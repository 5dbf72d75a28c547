"""The permutation test of Zhu et al. (ICML 2025, arXiv 2502.12292) on feed-forward neurons.

The neurons of two networks are assigned twice, by their gate and by their up projection. Of
networks that were trained apart, the two assignments are independent if gate and up of a neuron
are, so Spearman's correlation between them has a known distribution: its p-value is uniform. Of
networks with neurons in common, in any order, both are the same.

Where gate and up are alike, or networks of one basis share directions, strangers' assignments are
alike, too. Networks of other layers show how much: they share all that but neurons. What they have
in common is taken off.
"""

from collections.abc import Sequence
from math import log, sqrt

import numpy as np

from weightscope.model.metrics.spectra import evenly_spread
from weightscope.model.model import Model
from weightscope.pairs.lineage.neurons import Network, networks_of, usable

NEURONS = 256  # of a network, evenly spread, that are assigned among all of the other's
LAYERS = 8  # evenly spread, that are tested
BEYOND_CHANCE = 1.0  # standard errors of the mean correlation of networks of other layers
NEARLY_ONE = 1 - 1e-12
LEAST = -700.0  # logarithm of a probability: less is no number of float64
Orders = tuple[np.ndarray, np.ndarray]  # what neurons are assigned to by gate, and by up


def permutation_log_p(suspect: Model, base: Model) -> float | None:
    """Log p-value over layers of one index, by Fisher's method; None if shapes differ."""
    if suspect.config.n_layers != base.config.n_layers:
        return None
    pairs = [
        (a, b) for a, b in zip(_dense(suspect), _dense(base), strict=False) if _can_be_tested(a, b)
    ]
    tested = [pairs[k] for k in evenly_spread(len(pairs), LAYERS)]
    if not tested:
        return None
    found = [_orders(a, b) for a, b in tested]
    apart = [(a, b) for (a, _), (_, b) in zip(tested, [*tested[1:], *tested[:1]], strict=True)]
    usual = [
        _orders(a, b)
        for a, b in apart
        if a.place != b.place and _can_be_tested(a, b._replace(place=a.place))
    ]
    n = len(found[0][0])
    if (
        usual
        and np.mean([spearman(*orders) for orders in usual]) * sqrt(n * len(usual)) > BEYOND_CHANCE
    ):
        return log_p_beyond(found, usual)
    return fisher([spearman_log_p(*orders) for orders in found])


def log_p_beyond(found: Sequence[Orders], usual: Sequence[Orders]) -> float:
    """One-sided log p-value that correlations are no higher than usual, by Fisher's z.

    The variance is that of Fieller, Hartley and Pearson (1957).
    """
    from scipy.special import log_ndtr

    n = len(found[0][0])
    means = [
        np.mean(np.arctanh(np.minimum([spearman(*orders) for orders in side], NEARLY_ONE)))
        for side in (found, usual)
    ]
    variance = 1.06 / max(n - 3, 1) * (1 / len(found) + 1 / len(usual))
    return max(float(log_ndtr(-(means[0] - means[1]) / sqrt(variance))), LEAST)


def _dense(model: Model) -> list[Network]:
    """One network for each layer that is not a mixture, in order."""
    return sorted(
        (each for each in networks_of(model) if each.place[1] is None),
        key=lambda each: each.place[0],
    )


def _sides(network: Network) -> list[str]:
    """The matrices that neurons are assigned by."""
    return ["gate", "up"] if "gate" in network.matrices else ["up", "down"]


def _can_be_tested(a: Network, b: Network) -> bool:
    return (
        a.place == b.place
        and _sides(a) == _sides(b)
        and all(a.matrices[side].shape == b.matrices[side].shape for side in _sides(a))
    )


def _orders(a: Network, b: Network) -> Orders:
    """The assignments by both sides of a network."""
    first, second = (assigned(*(_rows(each, side) for each in (a, b))) for side in _sides(a))
    return first, second


def _rows(network: Network, side: str) -> np.ndarray:
    w = network.matrices[side].array()
    return np.asarray(usable(w.T if side == "down" else w), np.float32)  # (neurons, d)


def assigned(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Rows of y (m, d) assigned to some rows of x (n, d), with the largest sum of cosines."""
    from scipy.optimize import linear_sum_assignment

    chosen = x[evenly_spread(len(x), NEURONS)]
    a, b = (
        rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
        for rows in (chosen, y)
    )
    return np.asarray(linear_sum_assignment(a @ b.T, maximize=True)[1])


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's correlation."""
    from scipy.stats import rankdata

    return float(np.corrcoef(rankdata(x), rankdata(y))[0, 1])


def spearman_log_p(x: np.ndarray, y: np.ndarray) -> float:
    """One-sided log p-value of Spearman's correlation, by Student's t."""
    from scipy.special import stdtr

    r, n = spearman(x, y), len(x)
    if n < 4 or not np.isfinite(r):
        return 0.0
    t = r * np.sqrt((n - 2) / max(1 - r * r, 1e-300))
    return log(max(float(stdtr(n - 2, -t)), np.exp(LEAST)))


def fisher(log_p: list[float]) -> float:
    """Fisher's combination of independent p-values, given and returned as logarithms."""
    from scipy.special import gammaincc

    return log(max(float(gammaincc(len(log_p), -sum(log_p))), np.exp(LEAST)))

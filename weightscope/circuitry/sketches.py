"""Estimates of both measures from a few rows a head, and how far they can be off.

Of what a head writes the LEADING directions are kept, and PROBES random combinations of the others, once with equal
weights and once weighted by the directions' use. Their products with what another head reads give estimates of PK and
of CS^2 without bias, at a cost of (LEADING + 2 PROBES) / r of the exact one.

An estimate is a sum of lambda_i times a chi-squared variable of PROBES degrees of freedom over PROBES. The lambda_i add
up to the true value v, and none exceeds a scale s: 1 for PK, whose lambda_i are squared cosines, and for CS^2 the
largest share of a sketched direction times the largest share on the reader's side. By Chernoff's bound, and because
ln(1 + t) is concave, the probability of an estimate of at most x < v is at most

    exp(-PROBES / (2 s) * (x - v + v ln(v / x)))

which is that of a chi-squared variable of PROBES v / s degrees of freedom; directions that are kept, and so not random,
make it no larger. `doubt` is the exponent, and grows with v. A pair is left an estimate where it exceeds
ln(n / FAILURE) at the value that the last of the strongest known pairs has. Each of the n pairs that truly are the
strongest has at least that value, so that with probability 1 - FAILURE none of them is left out.
"""

import numpy as np

from weightscope.circuitry.products import Written
from weightscope.circuitry.spaces import Spaces
from weightscope.device import CPU

LEADING = 8
PROBES = 8
FAILURE = 1e-4  # probability that any of the strongest pairs is left out


def sketched(spaces: Spaces, layer: int) -> Written:
    """Rows that stand for what the heads of a layer write; the same at every call."""
    h, r, d = spaces.directions.shape
    rows = np.empty((h, LEADING + 2 * PROBES, d), np.float32)
    weights = np.zeros((h, 2, LEADING + 2 * PROBES), np.float32)
    use = spaces.use[:, 0]  # (H, r)
    for head in range(h):
        drawn = np.random.default_rng([layer, head]).standard_normal((2, PROBES, r - LEADING))
        drawn[1] *= np.sqrt(use[head, LEADING:])
        own = spaces.directions[head]
        rows[head, :LEADING] = own[:LEADING]
        rows[head, LEADING:] = drawn.reshape(-1, r - LEADING).astype(np.float32) @ own[LEADING:]
    weights[:, 0, :LEADING], weights[:, 1, :LEADING] = 1, use[:, :LEADING]
    weights[:, 0, LEADING : LEADING + PROBES] = weights[:, 1, LEADING + PROBES :] = 1 / PROBES
    return Written(CPU.put(rows), weights)


def doubt(estimate: np.ndarray, value: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    """How unlikely so low an estimate is if the truth is `value` or more: the probability is at most exp(-doubt).

    Parameters
    ----------
    estimate, value, scale : arrays that broadcast
        `scale` is s above.

    Returns
    -------
    array
        0 where the estimate is no less than the value.
    """
    low = np.clip(estimate, 0, value)
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = PROBES / (2 * np.asarray(scale)) * (low - value + value * np.log(value / low))
    return np.where(low >= value, 0.0, exponent)

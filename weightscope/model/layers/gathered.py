"""Operations on heads' weighted sums of values, before W_O: gates, sinks and norms over heads."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from weightscope.model.layers.maps import Norm, rms

Gathered = np.ndarray  # (H, n, r_v): sum_j alpha_ij v(x_j) of every head and query token


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    with np.errstate(over="ignore"):  # exp(-x) overflows where the quotient is 0
        return 1 / (1 + np.exp(-x))


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + exp(x))."""
    return np.logaddexp(0, x)


GATES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "sigmoid": sigmoid,
    "softplus": softplus,
    "open": lambda x: x,
}


def mass_beside(sinks: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Share of each softmax over scores (H, n, n) and a sink (H,) left to scores, (H, n, 1)."""
    top = scores.max(axis=-1, keepdims=True)
    total = top + np.log(np.exp(scores - top).sum(axis=-1, keepdims=True))
    return sigmoid(total - sinks[:, None, None])


@dataclass(frozen=True, eq=False)
class AllHeadsNorm:
    """A norm over all heads' weighted sums of a token (BitNet); all but its sigma is folded into
    W_O.
    """

    norm: Norm  # over H r_v dimensions

    def sizes(self, gathered: Gathered) -> np.ndarray:
        """Divisors of heads' weighted sums, (1, n, 1)."""
        by_token = gathered.transpose(1, 0, 2).reshape(gathered.shape[1], -1)  # (n, H r_v)
        return self.norm.sigma(by_token)[None, :, None]


@dataclass(frozen=True, eq=False)
class EachHeadNorm:
    """A norm without parameters of each head's weighted sum."""

    eps: float

    def sizes(self, gathered: Gathered) -> np.ndarray:
        """Divisors of heads' weighted sums, (H, n, 1)."""
        return rms(gathered, self.eps)[..., None]


@dataclass(frozen=True, eq=False)
class DifferentialNorm:
    """Differential attention: heads h and h + H/2 share values and W_O, the latter's times -lambda.

    What the two gather, the second times -lambda, is divided by the size of its sum (Differential
    Transformer, eqs 1-4).
    """

    weight: float  # lambda
    eps: float

    def sizes(self, gathered: Gathered) -> np.ndarray:
        """Divisors of heads' weighted sums, (H, n, 1)."""
        first, second = np.split(gathered, 2)
        size = rms(first - self.weight * second, self.eps)[..., None]
        return np.concatenate((size, size))

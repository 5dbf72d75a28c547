"""LayerNorm and RMSNorm: the divisor of a token, and the rest folded into the map that follows."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weightscope.core.compute.device import namespace
from weightscope.core.compute.half import Half, Weights
from weightscope.core.results import ShowsShapes


def sigma(x: Any, eps: float) -> Any:
    """sqrt(Var(x) + eps) over the last axis: a LayerNorm's divisor (detokenization paper, eq. 3).

    x (..., d).
    """
    xp = namespace(x)
    return xp.sqrt(xp.var(x, axis=-1) + eps)


def rms(x: Any, eps: float) -> Any:
    """sqrt(mean of squares + eps) over the last axis: an RMSNorm's divisor.

    x (..., d).
    """
    xp = namespace(x)
    return xp.sqrt(xp.mean(x**2, axis=-1) + eps)


def fold_layer_norm(
    w: np.ndarray, b: np.ndarray, gamma: np.ndarray, beta: np.ndarray, out: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Absorb a LayerNorm into the affine map that follows it.

    w (..., d, r), b (..., r), gamma, beta (d,), out (..., d, r) -> (..., d, r), (..., r).

    LN(x) W + b = (x / sigma(x)) W' + b' with W' = (I - 11'/d) diag(gamma) W and b' = beta W + b
    (detokenization paper, eqs 9-11).
    """
    # broken weights are found and named where they are read
    with np.errstate(over="ignore", invalid="ignore"):
        shifted = beta @ w + b
    scaled = np.multiply(gamma[:, None], w, out=out)  # (..., d, r)
    return np.subtract(scaled, scaled.mean(axis=-2, keepdims=True), out=out), shifted


def fold_rms_norm(
    w: np.ndarray, b: np.ndarray, gamma: np.ndarray, out: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Absorb an RMSNorm into the affine map that follows it: W' = diag(gamma) W.

    w (..., d, r), b (..., r), gamma (d,), out (..., d, r) -> (..., d, r), (..., r).
    """
    return np.multiply(gamma[:, None], w, out=out), b


@dataclass(frozen=True, eq=False, repr=False)
class Norm(ShowsShapes):
    """A norm of the residual stream: all of it but sigma folds into the maps that follow."""

    centred: bool  # LayerNorm; otherwise RMSNorm
    eps: float
    # (d,) each; empty where only sigma is asked of the norm
    gamma: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32), repr=False)
    beta: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32), repr=False)

    def sigma(self, x: Any) -> Any:
        """The divisors (...) of x (..., d)."""
        return sigma(x, self.eps) if self.centred else rms(x, self.eps)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """The norm of x (..., d)."""
        centred = x - x.mean(axis=-1, keepdims=True) if self.centred else x
        return centred / self.sigma(x)[..., None] * self.gamma + self.beta

    def fold(self, stored: Weights, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The map w (..., d, r), b (..., r) on x / sigma(x), with the norm before it absorbed.

        Half-precision weights are widened here, and folded in place.
        """
        w = np.asarray(stored)
        out = w if isinstance(stored, Half) else None
        if self.centred:
            return fold_layer_norm(w, b, self.gamma, self.beta, out)
        return fold_rms_norm(w, b, self.gamma, out)

"""Affine maps, and norms absorbed into those that follow them: what is left per token is one scalar, 1/sigma(x)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from weightscope.checkpoint.dtypes import Narrow, Weights
from weightscope.device import Device, namespace


def sigma(x: Any, eps: float) -> Any:
    """sqrt(Var(x) + eps) over the last axis (detokenization paper, eq. 3).

    Parameters
    ----------
    x : array of shape (..., d)

    Returns
    -------
    array of shape (...)
    """
    xp = namespace(x)
    return xp.sqrt(xp.var(x, axis=-1) + eps)


def rms(x: Any, eps: float) -> Any:
    """sqrt(mean of squares + eps) over the last axis: what an RMSNorm divides by, as `sigma` is for a LayerNorm.

    Parameters
    ----------
    x : array of shape (..., d)

    Returns
    -------
    array of shape (...)
    """
    xp = namespace(x)
    return xp.sqrt(xp.mean(x**2, axis=-1) + eps)


def fold_layer_norm(
    w: np.ndarray, b: np.ndarray, gamma: np.ndarray, beta: np.ndarray, out: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Absorb a LayerNorm into the affine map that follows it.

    LN(x) W + b = (x / sigma(x)) W' + b' with W' = (I - 11'/d) diag(gamma) W and b' = beta W + b
    (detokenization paper, eqs 9-11).

    Parameters
    ----------
    w : array of shape (..., d, r)
    b : array of shape (..., r)
    gamma, beta : arrays of shape (d,)
    out : array of shape (..., d, r), optional
        Where W' is put; `w` itself where nobody else needs that.

    Returns
    -------
    array of shape (..., d, r), array of shape (..., r)
    """
    shifted = beta @ w + b
    scaled = np.multiply(gamma[:, None], w, out=out)  # (..., d, r)
    return np.subtract(scaled, scaled.mean(axis=-2, keepdims=True), out=out), shifted


def fold_rms_norm(
    w: np.ndarray, b: np.ndarray, gamma: np.ndarray, out: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Absorb an RMSNorm into the affine map that follows it: W' = diag(gamma) W, nothing to centre and no beta.

    Parameters
    ----------
    w : array of shape (..., d, r)
    b : array of shape (..., r)
    gamma : array of shape (d,)
    out : array of shape (..., d, r), optional
        As for `fold_layer_norm`.

    Returns
    -------
    array of shape (..., d, r), array of shape (..., r)
    """
    return np.multiply(gamma[:, None], w, out=out), b


@dataclass(frozen=True)
class FoldedNorm:
    """The norm before a map, to be folded into it: gamma, beta of shape (d,), and whether it centres."""

    gamma: np.ndarray
    beta: np.ndarray
    centred: bool

    def into(self, stored: Weights, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The map stored (..., d, r), b (..., r) with the norm absorbed; weights widened here are folded in place."""
        w = np.asarray(stored)
        out = w if isinstance(stored, Narrow) else None
        if self.centred:
            return fold_layer_norm(w, b, self.gamma, self.beta, out)
        return fold_rms_norm(w, b, self.gamma, out)


@dataclass(frozen=True)
class Affine:
    """One affine map a head: z -> z w + b.

    The weights stay as they are stored, with the norm before them beside them, until they are asked for: of one head by
    `of`, which costs one head's memory, or of all by `w` and `b`, which are then kept.

    Attributes
    ----------
    stored : (A, d, r) array or Narrow
        A heads; query heads, key-value heads, or one for all.
    bias : (A, r) array
    norm : FoldedNorm or None
    """

    stored: Weights
    bias: np.ndarray
    norm: FoldedNorm | None = None

    @cached_property
    def _folded(self) -> tuple[np.ndarray, np.ndarray]:
        return self._fold(self.stored, self.bias)

    def _fold(self, stored: Weights, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.norm is not None:
            return self.norm.into(stored, bias)
        return (np.asarray(stored) if isinstance(stored, Narrow) else stored), bias  # left where it lies

    @property
    def w(self) -> np.ndarray:
        """(A, d, r)."""
        return self._folded[0]

    @property
    def b(self) -> np.ndarray:
        """(A, r)."""
        return self._folded[1]

    def __call__(self, z: Any) -> Any:
        """(n, d) -> (A, n, r)."""
        return z @ self.w + self.b[:, None, :]

    def on(self, device: Device) -> "Affine":
        """The map of arrays on a device; what this machine holds of it stays as it is."""
        return Affine(device.put(self.w), device.put(self.b))

    @property
    def heads(self) -> int:
        """A."""
        return int(self.stored.shape[0])

    def of(self, head: int) -> tuple[np.ndarray, np.ndarray]:
        """One head's (d, r) matrix and (r,) bias."""
        if "_folded" in self.__dict__:  # all heads' are there already
            return self.w[head], self.b[head]
        return self._fold(self.stored[head], self.bias[head])

    def after_norm(self, gamma: np.ndarray, beta: np.ndarray, *, centred: bool) -> "Affine":
        """The map with the norm before it absorbed, so that it acts on x / sigma(x)."""
        plain = self if self.norm is None else Affine(self.w, self.b)
        return Affine(plain.stored, plain.bias, FoldedNorm(gamma, beta, centred))

    def after(self, w: np.ndarray, b: np.ndarray) -> "Affine":
        """The map preceded by z -> z w + b, with w of shape (e, d) and b of shape (d,)."""
        return Affine(w @ self.w, b @ self.w + self.b)

    def scaled(self, gain: np.ndarray, *, centred: bool) -> "Affine":
        """The map followed by a centring of its outputs, if asked for, and by gain, of shape (A or 1, r)."""
        w, b = self.w, self.b
        if centred:
            w, b = w - w.mean(axis=-1, keepdims=True), b - b.mean(axis=-1, keepdims=True)
        return Affine(w * gain[:, None], b * gain)


@dataclass(frozen=True)
class Latent:
    """One affine map a head through a latent that all heads share: z -> up(first(z)).

    Multiplied out for all heads it would be as large as H full projections; `of` does so for one.

    Attributes
    ----------
    first : Affine of (1, d, m)
    up : Affine of (H, m, r)
    """

    first: Affine
    up: Affine

    def __call__(self, z: Any) -> Any:
        """(n, d) -> (H, n, r)."""
        return self.up(self.first(z)[0, ...])

    def on(self, device: Device) -> "Latent":
        """The map of arrays on a device."""
        return Latent(self.first.on(device), self.up.on(device))

    @property
    def heads(self) -> int:
        """H."""
        return self.up.heads

    def of(self, head: int) -> tuple[np.ndarray, np.ndarray]:
        """One head's (d, r) matrix and (r,) bias, multiplied out."""
        up, bias = self.up.of(head)
        return self.first.w[0] @ up, self.first.b[0] @ up + bias  # the first map is every head's: folded once and kept

    def after_norm(self, gamma: np.ndarray, beta: np.ndarray, *, centred: bool) -> "Latent":
        """The map with the norm before it absorbed."""
        return Latent(self.first.after_norm(gamma, beta, centred=centred), self.up)

    def after(self, w: np.ndarray, b: np.ndarray) -> "Latent":
        """The map preceded by z -> z w + b."""
        return Latent(self.first.after(w, b), self.up)


@dataclass(frozen=True)
class InverseRms:
    """What an RMS norm inside attention divides by, which no matrix can hold: a number a token (and head).

    Attributes
    ----------
    source : Affine
        What the norm sees of z, centred already where the norm centres.
    eps : float
    dims : int or None
        The first `dims` dimensions are divided; None for all.
    """

    source: Affine
    eps: float
    dims: int | None = None

    def __call__(self, z: Any) -> Any:
        """1 / sqrt(mean of squares + eps), (n, d) -> (A or 1, n)."""
        return 1 / rms(self.source(z), self.eps)

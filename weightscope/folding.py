"""Affine maps, and norms absorbed into those that follow them: what is left per token is one scalar, 1/sigma(x)."""

from dataclasses import dataclass

import numpy as np


def fold_layer_norm(w: np.ndarray, b: np.ndarray, gamma: np.ndarray, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Absorb a LayerNorm into the affine map that follows it.

    LN(x) W + b = (x / sigma(x)) W' + b' with W' = (I - 11'/d) diag(gamma) W and b' = beta W + b
    (detokenization paper, eqs 9-11).

    Parameters
    ----------
    w : array of shape (..., d, r)
    b : array of shape (..., r)
    gamma, beta : arrays of shape (d,)

    Returns
    -------
    array of shape (..., d, r), array of shape (..., r)
    """
    scaled = gamma[:, None] * w  # (..., d, r)
    return scaled - scaled.mean(axis=-2, keepdims=True), beta @ w + b


def fold_rms_norm(w: np.ndarray, b: np.ndarray, gamma: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Absorb an RMSNorm into the affine map that follows it: W' = diag(gamma) W, nothing to centre and no beta.

    Parameters
    ----------
    w : array of shape (..., d, r)
    b : array of shape (..., r)
    gamma : array of shape (d,)

    Returns
    -------
    array of shape (..., d, r), array of shape (..., r)
    """
    return gamma[:, None] * w, b


@dataclass(frozen=True)
class Affine:
    """One affine map a head: z -> z w + b.

    Attributes
    ----------
    w : (A, d, r) array
        A heads; query heads, key-value heads, or one for all.
    b : (A, r) array
    """

    w: np.ndarray
    b: np.ndarray

    def __call__(self, z: np.ndarray) -> np.ndarray:
        """(n, d) -> (A, n, r)."""
        return z @ self.w + self.b[:, None]

    @property
    def heads(self) -> int:
        """A."""
        return len(self.w)

    def of(self, head: int) -> tuple[np.ndarray, np.ndarray]:
        """One head's (d, r) matrix and (r,) bias."""
        return self.w[head], self.b[head]

    def after_norm(self, gamma: np.ndarray, beta: np.ndarray, *, centred: bool) -> "Affine":
        """The map with the norm before it absorbed, so that it acts on x / sigma(x)."""
        if centred:
            return Affine(*fold_layer_norm(self.w, self.b, gamma, beta))
        return Affine(*fold_rms_norm(self.w, self.b, gamma))

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

    def __call__(self, z: np.ndarray) -> np.ndarray:
        """(n, d) -> (H, n, r)."""
        return self.up(self.first(z)[0])

    @property
    def heads(self) -> int:
        """H."""
        return self.up.heads

    def of(self, head: int) -> tuple[np.ndarray, np.ndarray]:
        """One head's (d, r) matrix and (r,) bias, multiplied out."""
        (first, shift), (up, bias) = self.first.of(0), self.up.of(head)
        return first @ up, shift @ up + bias

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

    def __call__(self, z: np.ndarray) -> np.ndarray:
        """1 / sqrt(mean of squares + eps), (n, d) -> (A or 1, n)."""
        return 1 / np.sqrt((self.source(z) ** 2).mean(axis=-1) + np.asarray(self.eps, z.dtype))

"""Maps to queries, keys and values of each head (affine, or through a latent), and norms."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from weightscope.core.compute.device import Device, namespace
from weightscope.core.compute.half import Half, Weights
from weightscope.core.results import ShowsShapes

# LayerNorm and RMSNorm: the divisor of a token, and the rest folded into the map that follows.


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


# Maps


@dataclass(frozen=True, eq=False, repr=False)
class Affine:
    """One affine map per head: z -> z w + b.

    Weights stay as stored until needed; the norm before them is folded then. `of` folds one head
    and keeps nothing; `w` and `b` fold all heads and keep the result.
    """

    stored: Weights  # (A, d, r): A maps, one for each query or key-value head, or one for all
    bias: np.ndarray  # (A, r)
    norm: Norm | None = None  # the norm before the map, not yet folded

    def __repr__(self) -> str:
        count, d, r = self.shape
        return f"Affine({count} of {d} x {r})"

    @property
    def shape(self) -> tuple[int, ...]:
        """(A, d, r)."""
        return self.stored.shape

    @cached_property
    def _folded(self) -> tuple[np.ndarray, np.ndarray]:
        return self._fold(self.stored, self.bias)

    def _fold(self, stored: Weights, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.norm is not None:
            return self.norm.fold(stored, bias)
        return (np.asarray(stored) if isinstance(stored, Half) else stored), bias

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
        if z.ndim != 2 or z.shape[1] != self.shape[1]:
            raise ValueError(
                f"an input of shape {tuple(z.shape)}; {self} needs (tokens, {self.shape[1]})"
            )
        return z @ self.w + self.b[:, None, :]

    def on(self, device: Device) -> "Affine":
        """A copy of the map on a device."""
        return Affine(device.put(self.w), device.put(self.b))

    def of(self, head: int) -> tuple[np.ndarray, np.ndarray]:
        """One head's (d, r) matrix and (r,) bias."""
        if "_folded" in self.__dict__:  # all heads are folded already
            return self.w[head], self.b[head]
        return self._fold(self.stored[head], self.bias[head])

    def after_norm(self, norm: Norm) -> "Affine":
        """The map with the norm before it absorbed, so that it acts on x / sigma(x)."""
        plain = self if self.norm is None else Affine(self.w, self.b)
        return replace(plain, norm=norm)

    def after(self, w: np.ndarray, b: np.ndarray) -> "Affine":
        """The map preceded by z -> z w + b, with w of shape (e, d) and b of shape (d,)."""
        return Affine(w @ self.w, b @ self.w + self.b)

    def scaled(self, gain: np.ndarray) -> "Affine":
        """The map followed by gain, of shape (A or 1, r)."""
        return Affine(self.w * gain[:, None], self.b * gain)

    def centred(self, *, jointly: bool) -> "Affine":
        """The map with centred outputs: of each map, or of all maps together."""
        maps = (0, 2) if jointly else 2
        w, b = self.w, self.b[:, None]
        return Affine(
            w - w.mean(axis=maps, keepdims=True), (b - b.mean(axis=maps, keepdims=True))[:, 0]
        )


@dataclass(frozen=True, eq=False)
class Latent:
    """One affine map per head through a latent that all heads share: z -> up(first(z)).

    Multiplied out it would be as large as H full projections; `of` multiplies it out for one head.
    """

    first: Affine  # (1, d, m)
    up: Affine  # (H, m, r)

    def __call__(self, z: Any) -> Any:
        """(n, d) -> (H, n, r)."""
        return self.up(self.first(z)[0, ...])

    def on(self, device: Device) -> "Latent":
        """The map of arrays on a device."""
        return Latent(self.first.on(device), self.up.on(device))

    @property
    def shape(self) -> tuple[int, ...]:
        """(H, d, r)."""
        return self.up.shape[0], self.first.shape[1], self.up.shape[2]

    def of(self, head: int) -> tuple[np.ndarray, np.ndarray]:
        """One head's (d, r) matrix and (r,) bias, multiplied out."""
        up, bias = self.up.of(head)
        # the first map is shared: folded once and kept
        return self.first.w[0] @ up, self.first.b[0] @ up + bias

    def after_norm(self, norm: Norm) -> "Latent":
        """The map with the norm before it absorbed."""
        return replace(self, first=self.first.after_norm(norm))

    def after(self, w: np.ndarray, b: np.ndarray) -> "Latent":
        """The map preceded by z -> z w + b."""
        return replace(self, first=self.first.after(w, b))


@dataclass(frozen=True, eq=False, repr=False)
class InnerNorm(ShowsShapes):
    """A norm of queries, keys or values: gamma is folded, one scalar per token remains."""

    # input of the norm (already centred if the norm centres), of each head or of all heads as one
    source: Affine
    eps: float
    dims: int | None = None  # number of leading dimensions divided; None for all
    # (heads, r) beta, added after the division
    shift: np.ndarray | None = field(default=None, repr=False)

    def scalars(self, z: Any) -> Any:
        """1 / sqrt(mean of squares + eps), (n, d) -> (A or 1, n)."""
        return 1 / rms(self.source(z), self.eps)

    def __call__(self, x: Any, z: Any) -> Any:
        """Queries, keys or values x (heads, n, r) of tokens z (n, d), normalised."""
        scalars = self.scalars(z)[..., None]
        if self.dims is None:
            x = x * scalars
        else:
            x = namespace(x).concat((x[..., : self.dims] * scalars, x[..., self.dims :]), axis=-1)
        return x if self.shift is None else x + self.shift[:, None, :]

    def of(self, head: int) -> "InnerNorm":
        """The norm of one head; a norm over all heads has the same scalar for each."""
        source, shift = self.source, self.shift
        if source.shape[0] > 1:
            w, b = source.of(head)
            source = Affine(w[None], b[None])
        if shift is not None and len(shift) > 1:
            shift = shift[head : head + 1]
        return replace(self, source=source, shift=shift)

    def on(self, device: Device) -> "InnerNorm":
        """The norm of arrays on a device."""
        shift = None if self.shift is None else device.put(self.shift)
        return replace(self, source=self.source.on(device), shift=shift)

    def after_norm(self, norm: Norm) -> "InnerNorm":
        """The norm on tokens that have not passed the norm before the layer."""
        return replace(self, source=self.source.after_norm(norm))

    def after(self, w: np.ndarray, b: np.ndarray) -> "InnerNorm":
        """The norm on tokens before z -> z w + b."""
        return replace(self, source=self.source.after(w, b))

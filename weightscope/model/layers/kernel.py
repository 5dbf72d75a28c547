"""Scores as a function of distance: mean and spread over tokens drawn as query and key.

With q and k before rotation, R(delta) of frequencies w_j, and query and key drawn independently of
each other,

    score(delta) = scale q R(delta) k' + bias(delta), q R(delta) k' = sum_j cos(w_j delta) (q_j1
    k_j1 + q_j2 k_j2) + sin(w_j delta) (q_j1 k_j2 - q_j2 k_j1)

so that mean and variance at every distance follow from means and covariances of q and k alone. A
dimension that does not turn is a pair of frequency 0 whose second half is 0: without rotation
(ALiBi, T5) the same formula holds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from weightscope.core.results import ShowsShapes
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.positions import WindowBias
from weightscope.model.layers.rotation import GridRotation, Rotation

NEAR = 128  # distances 0 .. 127 are all computed, and trends are fitted to them
FAST = 32  # tokens a turn; a pair as fast tells a token from its neighbours


class Moments(NamedTuple):
    """Mean (heads, r) and covariance (heads, r, r) of queries or keys over tokens, float64."""

    mean: np.ndarray
    covariance: np.ndarray


def token_moments(
    make: Callable[[np.ndarray], Any], x: np.ndarray, weights: np.ndarray, block: int = 1024
) -> Moments:
    """Moments over tokens x (n, d) of `make`, (n, d) -> (heads, n, r); weights (n,) sum to 1."""
    reference, mean, second = None, 0.0, 0.0
    for start in range(0, len(x), block):
        made = np.asarray(make(x[start : start + block]))  # (heads, b, r)
        w = weights[start : start + block]
        if reference is None:  # values are centred before they are summed: nothing cancels
            reference = np.average(made, axis=1, weights=w if w.any() else None)[:, None]
        apart = (made - reference).astype(np.float64)
        weighted = apart * w[:, None]
        mean = mean + weighted.sum(axis=1)  # (heads, r)
        second = second + weighted.transpose(0, 2, 1) @ apart  # (heads, r, r)
    assert reference is not None  # there are tokens
    shift = np.asarray(mean)
    return Moments(reference[:, 0] + shift, np.asarray(second) - shift[:, :, None] * shift[:, None])


@dataclass(frozen=True, eq=False, repr=False)
class Kernel(ShowsShapes):
    """Scores of a layer's heads by distance, as waves: mean and spread over tokens, `scale`
    included.
    """

    frequencies: np.ndarray  # (p,) radians a position of each pair; 0 where nothing turns
    wave_means: np.ndarray  # (H, 2p) mean factors of the cosines, then of the sines
    wave_covariances: np.ndarray  # (H, 2p, 2p)
    usage: np.ndarray  # (H, p) product of the root mean squares of a pair's queries and keys
    # (D,) distances -> (H, D), added whatever the tokens
    bias: Callable[[np.ndarray], np.ndarray]

    def mean(self, distances: np.ndarray) -> np.ndarray:
        """The mean score at distances i - j: (D,) -> (H, D)."""
        return np.asarray(self.wave_means @ self._waves(distances).T + self.bias(distances))

    def band(self, distances: np.ndarray) -> np.ndarray:
        """The standard deviation over pairs of tokens: (D,) -> (H, D)."""
        waves = self._waves(distances)
        variance = ((waves @ self.wave_covariances) * waves).sum(axis=-1)  # (H, D)
        return np.sqrt(np.maximum(variance, 0))

    def _waves(self, distances: np.ndarray) -> np.ndarray:
        angles = np.multiply.outer(distances, self.frequencies)
        return np.concatenate((np.cos(angles), np.sin(angles)), axis=-1)  # (D, 2p)

    @cached_property
    def by_position(self) -> np.ndarray:
        """Amplitude of each pair's wave in the mean score, (H, p): the same whatever the tokens."""
        return np.hypot(*np.split(self.wave_means, 2, axis=-1))

    @cached_property
    def by_content(self) -> np.ndarray:
        """Standard deviation over tokens of each pair's term, averaged over phases, (H, p)."""
        cosines, sines = np.split(np.diagonal(self.wave_covariances, axis1=1, axis2=2), 2, axis=-1)
        return np.sqrt(np.maximum(cosines + sines, 0) / np.where(self.frequencies == 0, 1, 2))


def why_no_kernel(layer: Layer) -> str:
    """The reason why scores are no function of two tokens and a distance; empty where they are."""
    if layer.cross:
        return "attends to a memory, whose tokens are at no distance"
    if layer.relative:
        return "adds terms of one token and a distance to its scores"
    if layer.additive_gate is not None:
        return "multiplies its bias by a factor of the query"
    if any(layer.added.taken(cross=False).values()):
        return "adds positions to what its queries and keys are made of"
    if layer.gain is not None:
        return "multiplies its queries by unequal gains behind the rotation"
    if isinstance(layer.rotation, GridRotation):
        return "rotates patches of an image by row and column"
    return ""


def biases(layer: Layer) -> Callable[[np.ndarray], np.ndarray]:
    """Biases added to scaled scores at distances, (D,) -> (H, D); in a window, along a row."""
    times = 1 if layer.additive is None else layer.additive.times
    return lambda distances: times * layer.position_bias(distances)


def window_of(layer: Layer) -> WindowBias | None:
    return layer.additive if isinstance(layer.additive, WindowBias) else None


def kernel(layer: Layer, queries: Moments, keys: Moments) -> Kernel:
    """Scores of independent queries and keys, by distance.

    Parameters
    ----------
    layer : Layer
        One that `why_no_kernel` finds no reason against.
    queries, keys : Moments
        (H, r) and (G, r), before rotation.
    """
    first, second, frequencies = pairs_of(layer.rotation, layer.head_dim)
    factor = np.full(len(first), layer.scale)  # (p,)
    if layer.rotation is not None:
        factor[: len(layer.rotation.frequencies)] *= layer.rotation.factor**2
    factors = np.tile(factor, 2)  # (2p,) cosines, then sines
    group = layer.n_heads // layer.n_kv_heads
    padded = [
        Moments(np.pad(mean, ((0, 0), (0, 1))), np.pad(covariance, ((0, 0), (0, 1), (0, 1))))
        for mean, covariance in (queries, keys)
    ]
    means, covariances, usage = [], [], []
    for head in range(layer.n_heads):
        q, k = (
            Moments(part.mean[i], part.covariance[i])
            for part, i in zip(padded, (head, head // group), strict=True)
        )
        (q1, q2), (k1, k2) = ((part.mean[first], part.mean[second]) for part in (q, k))
        means.append(factors * np.concatenate((q1 * k1 + q2 * k2, q1 * k2 - q2 * k1)))
        k_second = k.covariance + np.outer(k.mean, k.mean)
        spread = _products(q.covariance, k_second, first, second)
        spread += _products(np.outer(q.mean, q.mean), k.covariance, first, second)
        covariances.append(np.outer(factors, factors) * spread)
        squares = [part.mean**2 + np.diagonal(part.covariance) for part in (q, k)]
        usage.append(
            np.abs(factor)
            * np.sqrt(np.prod([square[first] + square[second] for square in squares], axis=0))
        )
    return Kernel(
        frequencies, np.stack(means), np.stack(covariances), np.stack(usage), biases(layer)
    )


def pairs_of(rotation: Rotation | None, head_dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First and second dimension of every pair, and its frequency; second is -1 for dimensions
    alone.
    """
    dims = np.arange(head_dim)
    first, second = (
        (dims[:0], dims[:0]) if rotation is None else (dims[part] for part in rotation.pairs)
    )
    still = np.setdiff1d(dims, (first, second))
    frequencies = np.zeros(0) if rotation is None else rotation.frequencies
    return (
        np.concatenate((first, still)),
        np.concatenate((second, np.full(len(still), -1))),
        np.concatenate((frequencies, np.zeros(len(still)))),
    )


def _products(a: np.ndarray, b: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Second moments (2p, 2p) of the waves' factors, from queries' (a) and keys' (b), (r + 1, r +
    1).
    """
    (a11, a12), (a21, a22) = (((m := a[rows])[:, first], m[:, second]) for rows in (first, second))
    (b11, b12), (b21, b22) = (((m := b[rows])[:, first], m[:, second]) for rows in (first, second))
    cosines = a11 * b11 + a12 * b12 + a21 * b21 + a22 * b22
    mixed = a11 * b12 - a12 * b11 + a21 * b22 - a22 * b21
    sines = a11 * b22 - a12 * b21 - a21 * b12 + a22 * b11
    return np.block([[cosines, mixed], [mixed.T, sines]])


def mean_scores(layer: Layer, x: np.ndarray, weights: np.ndarray) -> Kernel:
    """The kernel where query and key are drawn from the same tokens x (n, d) with weights (n,)."""
    return kernel(
        layer, token_moments(layer.queries, x, weights), token_moments(layer.keys, x, weights)
    )


def peak_and_fast_share(
    layer: Layer, x: np.ndarray, distances: int = NEAR
) -> tuple[np.ndarray, np.ndarray]:
    """Distance of the highest mean score, and the share of |q||k| in fast pairs: (H,) and (H,).

    Tokens x (n, d), distances below `distances`; a fast pair turns once within `FAST` tokens. NaN
    where scores are no function of a distance.
    """
    unknown = np.full(layer.n_heads, np.nan)
    if why_no_kernel(layer) or (layer.rotation is None and layer.additive is None):
        return unknown, unknown
    scores = mean_scores(layer, x, np.full(len(x), 1 / len(x)))
    peak = scores.mean(np.arange(distances)).argmax(axis=1).astype(float)
    if layer.rotation is None:
        return peak, unknown
    fast = scores.usage[:, scores.frequencies >= 2 * np.pi / FAST].sum(axis=1)
    with np.errstate(invalid="ignore"):
        return peak, fast / scores.usage.sum(axis=1)

"""Rotary position embeddings: which pairs of dimensions turn, how fast, and what a query at distance delta becomes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, floor, isqrt, log, pi
from typing import Any

import numpy as np

from weightscope.device import namespace
from weightscope.shapes import ShowsShapes

Delta = int | tuple[int, int]  # positions between query and key; rows and columns between patches


def inverse_powers(theta: float, width: int) -> np.ndarray:
    """theta^(-2j/width) for every pair j, shape (width / 2,): the usual angles a position (RoFormer, eq. 15)."""
    return theta ** (-np.arange(0, width, 2) / width)


def ntk_frequencies(theta: float, width: int, factor: float, length: int, trained: int) -> np.ndarray:
    """Dynamic NTK scaling: the base grows with the sequence once it is longer than `trained` positions."""
    growth = factor * max(length, trained) / trained - (factor - 1)
    return inverse_powers(theta * growth ** (width / (width - 2)), width)


def yarn_frequencies(
    theta: float, width: int, factor: float, trained: int, fast: float, slow: float, *, whole: bool
) -> np.ndarray:
    """YaRN: slow pairs are interpolated by `factor`, fast ones kept, with a ramp between (YaRN paper, eqs 17-21).

    Parameters
    ----------
    theta, width, factor
        Base, rotated dimensions, how much longer the context became.
    trained : int
        Positions the model was first trained on.
    fast, slow : float
        Turns over `trained` positions above which a pair is kept, below which it is interpolated.
    whole : bool
        The ramp's ends are rounded outwards to whole pairs.
    """

    def pair_that_turns(times: float) -> float:
        return width * log(trained / (times * 2 * pi)) / (2 * log(theta))

    low, high = pair_that_turns(fast), pair_that_turns(slow)
    if whole:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 * (low == high)
    interpolated = np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)
    plain = inverse_powers(theta, width)
    return plain / factor * interpolated + plain * (1 - interpolated)


def yarn_temperature(factor: float, weight: float = 1.0) -> float:
    """0.1 weight ln(factor) + 1, YaRN's recommended scale for cos and sin (YaRN paper, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * log(factor) + 1


def llama3_frequencies(
    theta: float, width: int, factor: float, trained: int, low: float, high: float
) -> np.ndarray:  # fmt: skip
    """Llama 3's scaling: wavelengths over trained/low are stretched by `factor`, under trained/high kept."""
    plain = inverse_powers(theta, width)
    turns = trained * plain / (2 * pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - smooth) * plain / factor + smooth * plain


@dataclass(frozen=True, eq=False, repr=False)
class Rotation(ShowsShapes):
    """Rotary embedding of one layer.

    Attributes
    ----------
    frequencies : (m,) array
        Radians a position of the m pairs.
    interleaved : bool
        Pair j is dimensions (2j, 2j + 1) of those that turn; otherwise (j, j + m).
    start : int
        First dimension that turns; 2m of them do, the rest do not depend on position.
    factor : float
        Multiplies cos and sin, so the rotary part of a score by its square.
    stretched : function of a length giving frequencies, or None
        Sequences longer than `longest` use these.
    longest : int
    """

    frequencies: np.ndarray = field(repr=False)
    interleaved: bool = False
    start: int = 0
    factor: float = 1.0
    stretched: Callable[[int], np.ndarray] | None = field(default=None, repr=False)
    longest: int = 0

    def angles(self, positions: np.ndarray) -> np.ndarray:
        """Angles of tokens at `positions` (n,), shape (n, m)."""
        length = int(positions.max(initial=-1)) + 1
        longer = self.stretched is not None and length > self.longest
        return positions[:, None] * (self.stretched(length) if longer and self.stretched else self.frequencies)

    def angles_at(self, delta: Delta) -> np.ndarray:
        """Angles between a query and a key `delta` positions before it, shape (m,).

        Raises
        ------
        ValueError
            Rows and columns were given where positions are on a line.
        """
        if isinstance(delta, tuple):
            raise ValueError(f"{delta} is rows and columns; here positions are on a line")
        return delta * self.frequencies

    def turn(self, x: Any, angles: np.ndarray, factor: float) -> Any:
        """x (..., r), on whatever device, with its pairs turned by `angles` (..., m) and multiplied by `factor`."""
        m, xp = angles.shape[-1], namespace(x)
        cos, sin = (factor * xp.asarray(f(angles), dtype=x.dtype) for f in (np.cos, np.sin))
        stop, half = self.start + 2 * m, self.start + m
        first = slice(self.start, stop, 2) if self.interleaved else slice(self.start, half)
        second = slice(self.start + 1, stop, 2) if self.interleaved else slice(half, stop)
        turned = xp.asarray(x, copy=True)
        turned[..., first] = x[..., first] * cos - x[..., second] * sin
        turned[..., second] = x[..., second] * cos + x[..., first] * sin
        return turned

    def rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Queries or keys x (..., n, r) of tokens at `positions` (n,)."""
        return self.turn(x, self.angles(positions), self.factor)

    def rotate_at(self, w: np.ndarray, delta: Delta) -> np.ndarray:
        """w R(delta), shape (..., r): times a key map it scores keys `delta` positions before the query."""
        if self.factor == 1 and not np.any(delta):
            return w
        return self.turn(w, self.angles_at(delta), self.factor**2)

    @property
    def turning(self) -> np.ndarray:
        """Indices of the dimensions that turn, shape (2m,)."""
        return np.arange(self.start, self.start + 2 * len(self.angles_at(0)))


@dataclass(frozen=True, eq=False)
class GridRotation(Rotation):
    """Rotary embedding of an image's patches by row and column (DINOv3).

    The first half of the pairs turns by a patch's row, the second by its column, both measured from -1 to 1 over the
    image, so that `frequencies` (m / 2,) are turns over half an image. Tokens before the patches do not turn.

    Attributes
    ----------
    grid : (int, int)
        Rows and columns of patches in the images the model was configured for.
    prefix : int
        Class and register tokens before the patches.
    """

    grid: tuple[int, int] = (1, 1)
    prefix: int = 0

    def angles(self, positions: np.ndarray) -> np.ndarray:
        """Angles of tokens in the order class, registers, patches row by row; shape (n, m).

        Raises
        ------
        ValueError
            The number of patches is neither the configured grid's nor a square.
        """
        patches = int(positions.max(initial=-1)) + 1 - self.prefix
        rows, columns = self.grid
        if patches > 0 and patches != rows * columns:
            rows = columns = isqrt(patches)
            if rows * columns != patches:
                raise ValueError(f"{patches} patches are neither the grid {self.grid} nor a square")
        patch = positions - self.prefix
        centres = np.stack(((patch // columns + 0.5) / rows, (patch % columns + 0.5) / columns), axis=-1)  # (n, 2)
        angles = 2 * pi * (2 * centres - 1)[..., None] * self.frequencies  # (n, 2, m / 2)
        return np.where(patch[:, None] >= 0, angles.reshape(len(patch), -1), 0.0)

    def angles_at(self, delta: Delta) -> np.ndarray:
        """Angles between patches `delta` columns, or (rows, columns), apart on the configured grid; shape (m,)."""
        step = np.asarray(delta if isinstance(delta, tuple) else (0.0, delta)) / self.grid  # share of the image
        return (4 * pi * step[:, None] * self.frequencies).ravel()

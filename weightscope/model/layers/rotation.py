"""Rotary position embeddings: the pairs of dimensions that turn, their angles and frequencies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, floor, isqrt, log, pi
from typing import Any

import numpy as np

from weightscope.core.compute.device import namespace
from weightscope.core.errors import CheckpointError
from weightscope.core.results import ShowsShapes

# number of positions between query and key, or of rows and columns, or on any axes
Delta = int | tuple[int, ...]


def inverse_powers(theta: float, width: int) -> np.ndarray:
    """theta^(-2j/width) of pairs j, (width / 2,): usual angles a position (RoFormer, eq. 15)."""
    return theta ** (-np.arange(0, width, 2) / width)


def ntk_frequencies(
    theta: float, width: int, factor: float, length: int, trained: int
) -> np.ndarray:
    """Dynamic NTK scaling: the base grows with the sequence beyond `trained` positions."""
    growth = factor * max(length, trained) / trained - (factor - 1)
    return inverse_powers(theta * growth ** (width / (width - 2)), width)


def yarn_frequencies(
    theta: float, width: int, factor: float, trained: int, fast: float, slow: float, *, whole: bool
) -> np.ndarray:
    """YaRN: slow pairs divided by `factor`, fast ones kept, a ramp between (paper, eqs 17-21)."""

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
) -> np.ndarray:
    """Llama 3's scaling: wavelengths over trained/low are stretched, under trained/high kept."""
    plain = inverse_powers(theta, width)
    turns = trained * plain / (2 * pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - smooth) * plain / factor + smooth * plain


@dataclass(frozen=True, eq=False, repr=False)
class Rotation(ShowsShapes):
    """Rotary embedding of one layer."""

    frequencies: np.ndarray = field(repr=False)  # (m,) radians a position of the m pairs
    # pair j: dimensions (2j, 2j + 1) of the turning ones; otherwise (j, j + m)
    interleaved: bool = False
    start: int = 0  # first of the 2m dimensions that turn
    factor: float = 1.0  # multiplies cos and sin, so the rotary part of a score by its square
    # length -> frequencies, for sequences longer than `longest`
    stretched: Callable[[int], np.ndarray] | None = field(default=None, repr=False)
    longest: int = 0
    # (m,) coordinate that turns each pair, where tokens have several (multimodal RoPE); counted
    # from the end where negative. A position that is one number is the same on every axis, as text
    axes: np.ndarray | None = field(default=None, repr=False)
    # number of blocks of equal width in the turning dimensions, each paired within itself
    blocks: int = 1

    def angles(self, positions: np.ndarray) -> np.ndarray:
        """Angles of tokens at `positions` (n,), or (n, axes); shape (n, m).

        Raises
        ------
        ValueError
            Coordinates were given where positions are on a line.
        """
        length, frequencies = int(positions.max(initial=-1)) + 1, self.frequencies
        if self.stretched is not None and length > self.longest:
            frequencies = self.stretched(length)
        return self._along(positions) * frequencies

    def angles_at(self, delta: Delta) -> np.ndarray:
        """Angles (m,) between a query and a key `delta` positions before it; errors as `angles`."""
        return self._along(np.array([delta]))[0] * self.frequencies

    def _along(self, positions: np.ndarray) -> np.ndarray:
        """The coordinate that turns each pair, (n, m) or (n, 1)."""
        if positions.ndim == 1:
            return positions[:, None]
        if self.axes is None:
            place = tuple(positions[0].tolist())
            raise ValueError(f"{place} is a place on several axes; here positions are on a line")
        return positions[:, self.axes]

    def turn(self, x: Any, angles: np.ndarray, factor: float) -> Any:
        """x (..., r), on any device, its pairs turned by `angles` (..., m) and times `factor`."""
        xp = namespace(x)
        cos, sin = (factor * xp.asarray(f(angles), dtype=x.dtype) for f in (np.cos, np.sin))
        first, second = self._pairs(angles.shape[-1])
        turned = xp.asarray(x, copy=True)
        turned[..., first] = x[..., first] * cos - x[..., second] * sin
        turned[..., second] = x[..., second] * cos + x[..., first] * sin
        return turned

    def _pairs(self, m: int) -> tuple[Any, Any]:
        """First and second dimension of every pair."""
        stop, half = self.start + 2 * m, self.start + m
        if self.blocks > 1:
            by_block = np.arange(self.start, stop).reshape(self.blocks, 2, -1)
            return by_block[:, 0].ravel(), by_block[:, 1].ravel()
        if self.interleaved:
            return slice(self.start, stop, 2), slice(self.start + 1, stop, 2)
        return slice(self.start, half), slice(half, stop)

    @property
    def pairs(self) -> tuple[Any, Any]:
        """First and second dimension of every pair, in the order of `frequencies`."""
        return self._pairs(len(self.frequencies))

    def rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Queries or keys x (..., n, r) of tokens at `positions` (n,) or (n, axes)."""
        return self.turn(x, self.angles(positions), self.factor)

    def rotate_at(self, w: np.ndarray, delta: Delta) -> np.ndarray:
        """w R(delta), (..., r): the query side for keys `delta` positions before the query."""
        if self.factor == 1 and not np.any(delta):
            return w
        return self.turn(w, self.angles_at(delta), self.factor**2)

    def over_pairs(self, x: np.ndarray) -> np.ndarray:
        """The mean of x (..., r) over each turning pair, at both dimensions; others unchanged."""
        first, second = self.pairs
        mean = x.copy()
        mean[..., first] = mean[..., second] = (x[..., first] + x[..., second]) / 2
        return mean

    @cached_property
    def turning(self) -> np.ndarray:
        """Indices of the dimensions that turn, shape (2m,) or less where some frequencies are 0."""
        turns = self.frequencies != 0
        both = np.repeat(turns, 2) if self.interleaved else np.tile(turns, 2)
        return self.start + np.flatnonzero(both)


FRAME, ROW, COLUMN = -3, -2, -1  # axes of an image's patches and of a film's


@dataclass(frozen=True, eq=False, repr=False)
class GridRotation(Rotation):
    """Rotary embedding of patches: an image's by row and column, a film's by frame too.

    `axes` holds FRAME, ROW or COLUMN for every pair. A position that is one number is a token's
    place in the sequence of one whole image or film; a distance that is one number counts columns.
    """

    # (frames,) rows and columns of patches in the config; empty where it takes any
    grid: tuple[int, ...] = ()
    prefix: int = 0  # number of tokens before the patches (class, registers), which do not turn
    suffix: int = 0  # likewise, after the patches
    # side of blocks that patches are ordered by, row by row within and between them (Qwen's merger)
    merge: int = 1
    # side, in blocks, of windows that blocks are ordered by; 0 where they are not
    window: int = 0
    origin: float = 0.0  # coordinate of the first row and column
    # coordinates of patches' centres, from -1 to 1 over the image (DINOv3)
    centred: bool = False

    def angles(self, positions: np.ndarray) -> np.ndarray:
        """Angles of tokens, shape (n, m): positions (n,)."""
        places = self.places(positions) if positions.ndim == 1 else positions
        places = np.pad(places, ((0, 0), (3 - places.shape[1], 0)))  # an image is the first frame
        centres = (2 * places + 1) / (places.max(axis=0, initial=0) + 1) - 1
        along = centres if self.centred else places + self.origin
        return np.where(places[:, COLUMN, None] >= 0, self._along(along) * self.frequencies, 0.0)

    def places(self, positions: np.ndarray) -> np.ndarray:
        """Frame, row and column (n, 3) of places (n,) in the sequence; -1 where no patch is."""
        patches = int(positions.max(initial=-1)) + 1 - self.prefix - self.suffix
        frames, rows, columns = self._shape(patches)
        place = np.moveaxis(np.indices((frames, rows, columns)), 0, -1)
        m = self.merge
        # (f, R, C, m, m, 3)
        blocks = place.reshape(frames, rows // m, m, columns // m, m, 3).swapaxes(2, 3)
        ordered = blocks.reshape(-1, m * m, 3)
        if self.window:
            of_block = ordered[:, 0] // (1, m * self.window, m * self.window)
            ordered = ordered[np.lexsort(of_block.T[::-1])]
        ordered = np.pad(
            ordered.reshape(-1, 3), ((self.prefix, self.suffix), (0, 0)), constant_values=-1
        )
        return ordered[positions] if len(positions) else np.empty((0, 3), int)

    def _shape(self, patches: int) -> tuple[int, int, int]:
        """Frames, rows and columns of so many patches: the configured ones, or a square image."""
        grid = (1, *self.grid)[-3:] if self.grid else (0, 0, 0)
        if patches <= 0 or patches == grid[0] * grid[1] * grid[2]:
            return (grid[0], grid[1], grid[2]) if patches > 0 else (0, 0, 0)
        side = isqrt(patches)
        if side * side != patches or side % self.merge:
            known = f"neither the grid {self.grid} nor a square" if self.grid else "no square image"
            raise CheckpointError(
                f"{patches} patches are {known}: give positions as rows and columns, (n, 2)"
            )
        return 1, side, side

    def angles_at(self, delta: Delta) -> np.ndarray:
        """Angles between patches `delta` columns or (rows, columns) apart; centred: in the grid."""
        step = np.zeros(3)
        step[COLUMN if isinstance(delta, int | np.integer) else slice(-len(delta), None)] = delta
        if self.centred:
            step[ROW:] *= 2 / np.array(self.grid)
        return self._along(step[None])[0] * self.frequencies


def forms_between(
    rotation: Rotation | None, head_dim: int, deltas: Sequence[int], window: int
) -> dict[str, np.ndarray]:
    """The matrices (r, r) between queries and keys in `Layer.qk_forms`."""
    identity, turns = np.eye(head_dim), np.zeros(head_dim, bool)
    rotation = None if rotation is None else replace(rotation, factor=1.0)
    if rotation is not None:
        turns[rotation.turning] = True

    def turned(delta: int) -> np.ndarray:
        return identity if rotation is None else rotation.rotate_at(identity, delta)

    forms = {f"delta{delta}": turned(delta) for delta in deltas if delta}
    total = np.zeros_like(identity)
    # summed as they come: a window may be long
    for delta in range(window if rotation is not None else 1):
        total += turned(delta)
    forms[f"mean{window}"] = total / (window if rotation is not None else 1)
    return forms | {"free": np.diag(1.0 - turns), "turning": np.diag(1.0 * turns)}

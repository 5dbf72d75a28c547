"""Codes and scales that ggml searches with an importance matrix, recomputed.

llama-quantize weighs the error of each value x by q sqrt(s^2 + x^2): s^2 is the mean square of the
row, q the importance of the input, the same for all rows. Of several scales it keeps the codes with
the least error, and then the scale d, and the minimum m, that fit these codes c best:

    sum of w (x - d c - m) c = 0, and sum of w (x - d c - m) = 0 where there is a minimum.

Each block gives an equation or two for the importance of its 32 inputs, so a matrix of many rows
shows it. A copy is proved where one importance, not negative, gives every scale up to float16's
rounding, and the codes are the nearest for one scale in each block.
"""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import numpy as np

from weightscope.checkpoint.blocks import Block
from weightscope.checkpoint.checkpoint import Tensor
from weightscope.pairs.deeds.pair import Pair, few_rows_each

GROUP = 32
WITH_IMPORTANCE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1")  # types whose plain codes are not searched
BY_IMPORTANCE = "one importance of the inputs gives every scale and code"
EQUATIONS = 2 * GROUP  # fewer do not show the importance of a block's inputs
HALF = 2.0**-10  # two roundings to float16: of the scale, and of those that showed the importance
SMALLEST_HALF = 2.0**-24
# codes by which the largest value's place differs from the last code, under each tried scale
OFFSETS = [0.1 * tenths for tenths in range(-9, 10)]
OFFSETS_WITH_MINIMUM = [-0.9 + 0.05 * step for step in range(37)]
# solutions of the equations, each divided by what the weights of the last make of it
ROUNDS = 6
TIE = 1e-5  # steps: float32's rounding of a value over its scale


class Blocks(NamedTuple):
    """Blocks of 32 neighbours in some rows, and what was stored for them: (n, groups, 32)."""

    matrix: int
    x: np.ndarray
    codes: np.ndarray
    scale: np.ndarray  # (n, groups, 1)
    minimum: np.ndarray
    weights: np.ndarray  # but for the importance
    least: int
    largest: int

    def equations(self, importance: np.ndarray) -> Iterator[np.ndarray]:
        """Coefficients of the inputs' importance in what scale and minimum are off, relative to
        these, (n, groups, 32).

        They are divided by sums of the weights so far.
        """
        left = self.weights * (self.x - self.scale * self.codes - self.minimum)
        w, has_minimum = self.weights * importance, self.minimum < 0
        sums = w.sum(axis=2, keepdims=True)
        mean = np.where(has_minimum, (w * self.codes).sum(axis=2, keepdims=True) / sums, 0.0)
        codes = self.codes - mean
        of_scale = left * codes / (w * codes**2).sum(axis=2, keepdims=True)
        yield _finite(of_scale / self.scale)
        if self.least == 0:
            yield _finite(
                np.where(has_minimum, (left / sums - mean * of_scale) / self.minimum, 0.0)
            )

    def are_fitted(self, importance: np.ndarray) -> bool:
        """True if scales and minima are the best for an importance, (groups, 32)."""
        w = self.weights * importance
        sums, of_x, of_codes, along, squares = (
            (w * each).sum(axis=2)
            for each in (1.0, self.x, self.codes, self.codes * self.x, self.codes**2)
        )
        scale, minimum = along / squares, np.zeros_like(sums)
        if self.least == 0:
            divisor = sums * squares - of_codes**2
            fitted = (squares * of_x - of_codes * along) / divisor
            scale = np.where(fitted < 0, (sums * along - of_x * of_codes) / divisor, scale)
            minimum = np.where(fitted < 0, fitted, 0.0)
        is_known = np.isfinite(scale) & self.codes.any(axis=2)
        stored_scale, stored_minimum = self.scale[..., 0], self.minimum[..., 0]
        room = HALF * np.abs(stored_scale) + SMALLEST_HALF
        of_minimum = HALF * (np.abs(stored_minimum) + self.largest * np.abs(stored_scale))
        is_near = np.abs(scale - stored_scale) <= room
        is_near &= np.abs(minimum - stored_minimum) <= of_minimum + SMALLEST_HALF
        return bool((is_near | ~is_known).all())

    def have_nearest_codes(self) -> bool:
        """True if all codes of each block are the nearest for one of the scales that are tried."""
        is_nearest = np.zeros(self.x.shape[:2], bool)
        for places in self._tried():
            off = np.abs(np.clip(places, self.least, self.largest) - self.codes)
            is_nearest |= (off <= 1 / 2 + TIE).all(axis=2)
        of_zeros = ~self.x.any(axis=2) & ~(self.codes * self.scale + self.minimum).any(axis=2)
        return bool((is_nearest | of_zeros).all())

    def _tried(self) -> Iterator[np.ndarray]:
        """Places of the values on the grid of each scale that is tried, (n, groups, 32)."""
        if self.least == 0:
            start = np.minimum(self.x.min(axis=2, keepdims=True), 0)
            reach = self.x.max(axis=2, keepdims=True) - start
            most, tried = self.largest, OFFSETS_WITH_MINIMUM
        else:
            farthest = np.abs(self.x).argmax(axis=2, keepdims=True)
            start, reach = 0.0, -np.take_along_axis(self.x, farthest, axis=2)
            most, tried = -self.least, OFFSETS
        shares = _finite((self.x - start) / reach)
        return ((most + offset) * shares for offset in tried)


def _finite(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), x, 0.0)


def is_searched(older: Tensor, newer: Tensor) -> bool:
    """True if one importance of the inputs gives every code and scale of each matrix."""
    if newer.dtype not in WITH_IMPORTANCE or newer.ends() is None:  # of a part of a fused tensor
        return False
    if newer.shape[-2] * (1 + newer.dtype.endswith("_1")) < EQUATIONS:
        return False
    importance = np.ones((prod(newer.shape[:-2]), newer.shape[-1] // GROUP, GROUP))
    with np.errstate(all="ignore"):
        if not all(each.have_nearest_codes() for each in _blocks(older, newer)):
            return False
        for _ in range(ROUNDS):
            products = np.zeros((*importance.shape, GROUP))
            for blocks in _blocks(older, newer):
                for each in blocks.equations(importance[blocks.matrix]):
                    products[blocks.matrix] += np.einsum("ngi,ngj->gij", each, each)
            if not np.isfinite(products).all():
                return False
            importance = np.array([[_least(group) for group in each] for each in products])
            if all(each.are_fitted(importance[each.matrix]) for each in _blocks(older, newer)):
                return True
    return False


def _least(products: np.ndarray) -> np.ndarray:
    """The weights, not negative, that leave the least of equations with these products."""
    from scipy.optimize import nnls  # SciPy takes a while to import

    values, vectors = np.linalg.eigh(products)
    root = np.sqrt(np.maximum(values, 0))[:, None] * vectors.T  # (32, 32), root' root = products
    size = float(np.abs(root).max()) or 1.0
    weights, _ = nnls(np.vstack([root / size, np.ones(GROUP)]), np.append(np.zeros(GROUP), 1.0))
    return np.asarray(weights)


def _blocks(older: Tensor, newer: Tensor) -> Iterator[Blocks]:
    """Both tensors in blocks, a few rows of one matrix at a time."""
    ends = newer.ends()
    assert ends is not None
    first, last, levels = ends
    assert isinstance(levels, int)
    least = 0 if newer.dtype.endswith("_1") else -levels // 2
    width, rows = newer.shape[-1], newer.shape[-2]
    for _, start, stop in Pair(older, newer).blocks():
        x, y = (Block(each, start, stop).values().reshape(-1, width) for each in (older, newer))
        low, high = (
            Block(end, start // GROUP, stop // GROUP).values().reshape(len(x), -1, 1)
            for end in (first, last)
        )
        row = start // width
        for few in few_rows_each(stop - start, width):
            part = slice(few.start // width, min(few.stop // width, len(x)))
            for here in _of_one_matrix(part, row, rows):
                p, q, a, b = (each[here].astype(np.float64) for each in (x, y, low, high))
                scale = (b - a) / (levels - 1)
                minimum = a - least * scale if least == 0 else np.zeros_like(a)
                p, q = p.reshape(len(p), -1, GROUP), q.reshape(len(q), -1, GROUP)
                codes = np.rint(_finite((q - minimum) / scale))
                weights = np.sqrt(np.mean(p**2, axis=(1, 2), keepdims=True) + p**2)
                matrix = (row + here.start) // rows
                yield Blocks(matrix, p, codes, scale, minimum, weights, least, least + levels - 1)


def _of_one_matrix(part: slice, row: int, rows: int) -> Iterator[slice]:
    """The rows of a part by the matrix of a stack that they belong to."""
    start = part.start
    while start < part.stop:
        stop = min(part.stop, start + rows - (row + start) % rows)
        yield slice(start, stop)
        start = stop

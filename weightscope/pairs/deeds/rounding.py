"""Detect values rounded to a float of fewer bits, or to the grid of a quantised format."""

from collections.abc import Callable, Collection
from math import lgamma, log
from typing import NamedTuple

import numpy as np

from weightscope.heads.tensors.measure import BITS
from weightscope.pairs.deeds.thresholds import UNLIKELY

FRACTION = {**BITS, "BF16, cut off": 7, "F8_E4M3": 3, "F8_E5M2": 2}  # bits
# exponent of the smallest normal number; -126 for other floats
SMALLEST = {"F16": -14, "F8_E4M3": -6, "F8_E5M2": -14}
CAST_SAMPLE = 4096  # values on which a cast is tried before it is tried on all
# neighbours in a row that share a grid, 0 for the whole row; parts of a grid lie on it too
GROUPS = (0, 128, 64, 32)
# values that a grid has at most, and no more than half as many as there are values in a group
LEVELS = 256
SYMMETRIC = (1, 3, 7, 8, 15, 16, 127, 128)  # steps from zero to the largest magnitude
ASYMMETRIC = (3, 7, 15, 31, 63, 255)  # steps from the least value to the most
ON_GRID = 0.05  # mean distance from a multiple of the step, in steps; chance gives 0.25
# share of values on a grid that are not its zero: a row with one large value is no grid
NOT_ZERO = 0.3
FEW_VALUES = 0.5  # values over a group's size: so few, which repeat, are a grid
LARGEST_HALF = 65504.0  # float16's largest value; what is larger may become infinite
LEAST_WIDTH = 16  # values of a group that is judged


# Floats of fewer bits


def _bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to the nearest bfloat16, ties to even."""
    bits = x.view("<u4")
    return ((bits + (0x7FFF + (bits >> 16 & 1))) & np.uint32(0xFFFF0000)).view("<f4")


def _bfloat16_cut(x: np.ndarray) -> np.ndarray:
    """Round to bfloat16, towards zero."""
    return (x.view("<u4") & np.uint32(0xFFFF0000)).view("<f4")


def _float16(x: np.ndarray) -> np.ndarray:
    """Round to the nearest float16, ties to even; NumPy's own cast takes values one by one."""
    size, bits = np.abs(x), x.view("<u4")
    if not size.max(initial=0.0) < LARGEST_HALF:  # or NaN
        return x.astype(np.float16).astype(np.float32)
    rounded = bits >> 13  # in place from here on, which takes a third of the time
    rounded &= 1
    rounded += 0xFFF
    rounded += bits
    rounded &= np.uint32(0xFFFFE000)
    # Below the normal numbers float16's step is 2^-24, which is float32's from 0.5 to 1.
    is_small = size < np.float32(2.0**-14)
    size += np.float32(0.5)
    size -= np.float32(0.5)
    return np.copysign(size, x, out=rounded.view("<f4"), where=is_small)


def _float8(exponents: int, fractions: int, largest: float) -> Callable[[np.ndarray], np.ndarray]:
    """Make a cast to a float of these bits, ties to even; it clips at `largest`."""
    smallest = 2 - 2 ** (exponents - 1)  # exponent of the smallest normal number

    def cast(x: np.ndarray) -> np.ndarray:
        exponent = np.maximum(np.frexp(x)[1] - 1, smallest)
        step = np.ldexp(np.float32(1), exponent - fractions)
        return np.clip(np.rint(x / step) * step, -largest, largest).astype(np.float32)

    return cast


def _by_float32(cast: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """Round float64 to float32 first, as PyTorch does."""
    return lambda x: cast(x.astype(np.float32, copy=False))


CASTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "BF16": _by_float32(_bfloat16),
    "F16": _by_float32(_float16),
    "BF16, cut off": _by_float32(_bfloat16_cut),
    "F8_E4M3": _by_float32(_float8(4, 3, 448.0)),
    "F8_E5M2": _by_float32(_float8(5, 2, 57344.0)),
    "F32": _by_float32(np.positive),
}


def casts_between(
    x: np.ndarray, y: np.ndarray, names: Collection[str] = tuple(CASTS)
) -> frozenset[str]:
    """The casts that make y of x.

    Examples
    --------
    >>> x = np.float32([1.2345, 0.1])
    >>> sorted(casts_between(x, x.astype(np.float16).astype(np.float32)))
    ['F16']
    """
    x, y = x.reshape(-1), y.reshape(-1)
    names = [name for name in names if name != "F32" or x.dtype == np.float64]
    with np.errstate(all="ignore"):
        likely = [name for name in names if _is_cast(name, x[:CAST_SAMPLE], y[:CAST_SAMPLE])]
        return frozenset(name for name in likely if len(x) <= CAST_SAMPLE or _is_cast(name, x, y))


def _is_cast(name: str, x: np.ndarray, y: np.ndarray) -> bool:
    """True if a cast makes y of x; NumPy rounds float64 to float16 at once."""
    if np.array_equal(CASTS[name](x), y):
        return True
    is_wide = name == "F16" and x.dtype == np.float64
    return is_wide and np.array_equal(x.astype(np.float16), y)


def shows_rounding(rounded: np.ndarray) -> bool:
    """True if rounded values differ enough among themselves to show what they were rounded from.

    The same values in another order must hardly ever be as right; there are n! / (n_1! n_2! ...)
    orders.

    Examples
    --------
    >>> shows_rounding(np.float32([1, 1, 1, 1])), shows_rounding(np.arange(16, dtype=np.float32))
    (False, True)
    """
    counts = np.unique(rounded, return_counts=True)[1]
    log_orders = lgamma(rounded.size + 1) - sum(lgamma(count + 1) for count in counts.tolist())
    return log_orders >= -log(UNLIKELY)


def precision(x: np.ndarray) -> str:
    """The coarsest float that holds these values exactly; "F32" where only that does."""
    with np.errstate(all="ignore"):
        held = [name for name, cast in CASTS.items() if np.array_equal(cast(x), x)]
    return min(held, key=FRACTION.__getitem__, default="F32")


# Grids


class Grid(NamedTuple):
    """A quantisation grid that values lie on."""

    words: str  # `15 values in a row`, or the format's name where that is how they are stored
    error: float  # |error| / |x| by rounding to it
    values: int = 0  # in each group that shares a grid
    stored: bool = False

    @property
    def named(self) -> str:
        """The grid as a kind of change names it."""
        return f"stored as {self.words}" if self.stored else self.words


def grid_of(x: np.ndarray) -> Grid | None:
    """The grid that rows of values lie on, if they do: x (n, width).

    Examples
    --------
    >>> x = np.random.default_rng(0).standard_normal((8, 128)).astype(np.float32)
    >>> step = np.abs(x).max(axis=1, keepdims=True) / 7
    >>> grid_of(x), grid_of(np.rint(x / step) * step).words
    (None, '15 values in a row')
    """
    size = float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))
    for look, groups in ((_even, GROUPS), (_of_few_values, GROUPS[::-1])):
        for group in groups:
            width = group or x.shape[1]
            if not size > 0 or x.shape[1] % width or width < LEAST_WIDTH:
                continue
            y = x.reshape(-1, width).astype(np.float64)
            y = y[np.ptp(y, axis=1) > 0]
            if len(y) and (grid := look(y)):
                values, step = grid
                where = "a row" if width == x.shape[1] else f"{width} neighbours"
                error = float(np.sqrt(np.mean(step**2) / 12)) / size
                return Grid(f"{values} values in {where}", error, values)
    return None


def _even(y: np.ndarray) -> tuple[int, np.ndarray] | None:
    """The number of values of an even grid, and the step in each group: y (n, width)."""
    zero, largest = np.zeros(len(y)), np.abs(y).max(axis=1)
    least, span = y.min(axis=1), np.ptp(y, axis=1)
    # grids of 8 and 128 lack one end
    grids = [(2 * steps + steps % 2, zero, largest / steps) for steps in SYMMETRIC]
    grids += [(steps + 1, least, span / steps) for steps in ASYMMETRIC]
    for values, start, step in grids:
        place = (y - start[:, None]) / step[:, None]
        nearest = np.rint(place)
        if float(np.abs(place - nearest).mean()) < ON_GRID and (nearest != 0).mean() > NOT_ZERO:
            return values, step
    return None


def _of_few_values(y: np.ndarray) -> tuple[int, np.ndarray] | None:
    """The most values in a group, and the mean step, where most values repeat."""
    held, zeros, width = values_in(y), (y == 0).sum(axis=1), y.shape[1]
    most = int(held.max())
    if most > min(LEVELS, FEW_VALUES * width):
        return None
    # pruned: only zero comes several times
    if (held - (zeros > 0)).sum() > FEW_VALUES * (width - zeros).sum():
        return None
    equally_often = held.min() == most and width % most == 0
    if equally_often and not np.ptp(np.sort(y, axis=1).reshape(len(y), most, -1), axis=2).any():
        return None  # copies, as of key-value heads
    return most, np.ptp(y, axis=1) / (held - 1)


def values_in(rows: np.ndarray) -> np.ndarray:
    """The number of values that each row holds, (n, width) -> (n,)."""
    return 1 + np.count_nonzero(np.diff(np.sort(rows, axis=1), axis=1), axis=1)

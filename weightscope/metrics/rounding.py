"""Whether one array is another after rounding: to a float of fewer bits, or to a few values in each group."""

from collections.abc import Callable, Collection

import numpy as np

SAMPLE = 4096  # values on which a cast is tried before it is tried on all
GROUPS = (0, 128, 64, 32)  # values that share a grid: a row, or so many of its neighbours
LEVELS = 256  # values that a grid has at most, and no more than half as many as there are values in a group
NEAREST = 0.99  # share of values that are rounded to the nearest of their grid, where all are but for ties


def _bfloat16(x: np.ndarray) -> np.ndarray:
    """To the nearest bfloat16, ties to even."""
    bits = x.view("<u4")
    return ((bits + (0x7FFF + (bits >> 16 & 1))) & np.uint32(0xFFFF0000)).view("<f4")


def _bfloat16_cut(x: np.ndarray) -> np.ndarray:
    """To bfloat16, towards zero."""
    return (x.view("<u4") & np.uint32(0xFFFF0000)).view("<f4")


def _float16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


def _float8(exponents: int, fractions: int, largest: float) -> Callable[[np.ndarray], np.ndarray]:
    """To the nearest float of so many bits of exponent and fraction, ties to even, past the largest to it."""
    smallest = 2 - 2 ** (exponents - 1)  # exponent of the smallest normal number

    def cast(x: np.ndarray) -> np.ndarray:
        exponent = np.maximum(np.frexp(x)[1] - 1, smallest)
        step = np.ldexp(np.float32(1), exponent - fractions)
        return np.clip(np.rint(x / step) * step, -largest, largest).astype(np.float32)

    return cast


CASTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "BF16": _bfloat16, "F16": _float16, "BF16, cut off": _bfloat16_cut,
    "F8_E4M3": _float8(4, 3, 448.0), "F8_E5M2": _float8(5, 2, 57344.0),
}  # fmt: skip


def casts_between(x: np.ndarray, y: np.ndarray, names: Collection[str] = tuple(CASTS)) -> frozenset[str]:
    """Which casts make y of x.

    Parameters
    ----------
    x, y : float32 arrays of one shape
    names : collection of str
        Of `CASTS`.

    Examples
    --------
    >>> x = np.float32([1.2345, 0.1])
    >>> sorted(casts_between(x, x.astype(np.float16).astype(np.float32)))
    ['F16']
    """
    x, y = x.reshape(-1), y.reshape(-1)
    with np.errstate(all="ignore"):
        likely = [name for name in names if np.array_equal(CASTS[name](x[:SAMPLE]), y[:SAMPLE])]
        return frozenset(name for name in likely if len(x) <= SAMPLE or np.array_equal(CASTS[name](x), y))


def grid_between(x: np.ndarray, y: np.ndarray) -> tuple[int, int, bool] | None:
    """Whether y holds few values in each group of a row, and x does not.

    Parameters
    ----------
    x, y : (n, d) arrays

    Returns
    -------
    (group, levels, nearest) or None
        Values in a group, the most different values in one, and whether x went to the nearest of them; of the largest
        groups for which that holds, else of those with the fewest values.
    """
    found = []
    for group in GROUPS:
        width = group or y.shape[1]
        if y.shape[1] < width or y.shape[1] % width:
            continue
        pairs = [(a, b, np.unique(b)) for a, b in zip(x.reshape(-1, width), y.reshape(-1, width), strict=True)]
        most = max(len(levels) for _, _, levels in pairs)
        if most <= min(LEVELS, width // 2) and 2 * most < max(len(np.unique(a)) for a, _, _ in pairs):
            found.append((width, most, bool(np.mean([_nearest(*pair) for pair in pairs]) >= NEAREST)))
    return min(found, key=lambda grid: (not grid[2], 0 if grid[2] else grid[1]), default=None)


def _nearest(x: np.ndarray, y: np.ndarray, levels: np.ndarray) -> float:
    """The share of values that were rounded to the nearest of these levels."""
    above = np.clip(np.searchsorted(levels, x), 1, max(1, len(levels) - 1))
    if len(levels) < 2:
        return 1.0
    low, high = levels[above - 1], levels[above]
    return float(np.mean(np.abs(y - x) <= np.minimum(np.abs(x - low), np.abs(high - x)) * (1 + 1e-6)))

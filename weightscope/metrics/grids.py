"""Which values a matrix holds: all that a float of some precision can, or those of a quantisation grid."""

import numpy as np

from weightscope.metrics.weight_changes import CASTS, LEVELS, values_in

BITS = {"F64": 52, "F32": 23, "F16": 10, "BF16": 7, "BF16, cut off": 7, "F8_E4M3": 3, "F8_E5M2": 2}  # of fraction
GROUPS = (0, 128, 64, 32)  # neighbours in a row that share a grid, 0 for the whole row; parts of a grid lie on it too
SYMMETRIC = (1, 3, 7, 8, 15, 16, 127, 128)  # steps from zero to the largest magnitude
ASYMMETRIC = (3, 7, 15, 31, 63, 255)  # steps from the least value to the most
ON_GRID = 0.05  # mean distance from a multiple of the step, in steps; chance gives 0.25
NOT_ZERO = 0.3  # share of values on a grid that are not its zero: a row with one large value is no grid
FEW_VALUES = 0.5  # of a group's size: with so few values, which repeat, it lies on a grid
LEAST_WIDTH = 16  # values of a group that is judged


def precision(x: np.ndarray) -> str:
    """The coarsest float that holds these values exactly; "F32" where only that does."""
    with np.errstate(all="ignore"):
        held = [name for name, cast in CASTS.items() if np.array_equal(cast(x), x)]
    return min(held, key=bits_of, default="F32")


def bits_of(name: str) -> int:
    """Bits of fraction of a float, by its name."""
    return BITS[name]


def own_grid(x: np.ndarray) -> tuple[str, float] | None:
    """The grid that rows of values lie on, in words, and the error that rounding to it makes, |error| / |x|.

    x (n, width).

    Examples
    --------
    >>> x = np.random.default_rng(0).standard_normal((8, 128)).astype(np.float32)
    >>> step = np.abs(x).max(axis=1, keepdims=True) / 7
    >>> own_grid(x), own_grid(np.rint(x / step) * step)[0]
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
                return f"{values} values in {where}", float(np.sqrt(np.mean(step**2) / 12)) / size
    return None


def _even(y: np.ndarray) -> tuple[int, np.ndarray] | None:
    """How many values an even grid has, and the step in each group: y (n, width)."""
    zero, largest = np.zeros(len(y)), np.abs(y).max(axis=1)
    least, span = y.min(axis=1), np.ptp(y, axis=1)
    grids = [(2 * steps + steps % 2, zero, largest / steps) for steps in SYMMETRIC]  # of 8 and 128 one end is missing
    grids += [(steps + 1, least, span / steps) for steps in ASYMMETRIC]
    for values, start, step in grids:
        place = (y - start[:, None]) / step[:, None]
        nearest = np.rint(place)
        if float(np.abs(place - nearest).mean()) < ON_GRID and (nearest != 0).mean() > NOT_ZERO:
            return values, step
    return None


def _of_few_values(y: np.ndarray) -> tuple[int, np.ndarray] | None:
    """How many values groups have at most, and the mean step between them, where most values come several times."""
    held, zeros, width = values_in(y), (y == 0).sum(axis=1), y.shape[1]
    most = int(held.max())
    if most > min(LEVELS, FEW_VALUES * width):
        return None
    if (held - (zeros > 0)).sum() > FEW_VALUES * (width - zeros).sum():  # pruned: only zero comes several times
        return None
    equally_often = held.min() == most and width % most == 0
    if equally_often and not np.ptp(np.sort(y, axis=1).reshape(len(y), most, -1), axis=2).any():
        return None  # copies, as of key-value heads
    return most, np.ptp(y, axis=1) / (held - 1)

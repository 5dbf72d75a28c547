"""How weights were changed: by a matrix of low rank, by a cast to fewer bits, or by rounding to a grid."""

from collections.abc import Callable, Collection, Iterable, Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np

MOST_RANK = 128  # a rank above this, or above half the smaller side, is not called low
SPARE = 16  # columns of a sketch past the largest rank it is to tell
CORNER = 256  # rows and columns of a part that is looked at first
MARGIN = 1.5  # times the noise's expected spectral norm and energy

Blocks = Callable[[], Iterable[np.ndarray]]


def low_rank(blocks: Blocks, shape: tuple[int, int], noise: float) -> int | None:
    """The rank of a matrix up to noise, or None where it is not low: blocks (rows, n), shape (m, n).

    A matrix of independent errors of standard deviation e has a spectral norm of about e (sqrt(m) + sqrt(n)): singular
    values above that, with a margin, are counted. What the counted ones leave has to have no more energy than the
    errors. The blocks are gone through three times at most: a part of the first, which rules most matrices out, a
    random sketch of the row space (Halko, Martinsson and Tropp 2011, algorithm 4.1), and the matrix within that space,
    whose singular values are exact.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> w = rng.standard_normal((300, 3)) @ rng.standard_normal((3, 200))
    >>> low_rank(lambda: [w[:100], w[100:]], w.shape, 1e-12)
    3
    """
    m, n = shape
    most = min(MOST_RANK, min(m, n) // 2)
    first = _first_rows(blocks(), CORNER)
    part = first[np.ix_(evenly_spread(len(first), CORNER), evenly_spread(n, CORNER))].T.astype(np.float64)
    if _counted(np.linalg.svd(part, compute_uv=False), part.shape, noise) > most:
        return None
    rng = np.random.default_rng(n)
    width = min(most + SPARE, m, n)
    sketch = np.zeros((width, n))
    for block in blocks():
        sketch += rng.standard_normal((len(block), width)).T @ block
    basis = np.linalg.qr(sketch.T)[0]  # (n, width)
    gram, left = np.zeros((basis.shape[1],) * 2), 0.0
    for block in blocks():
        inside = block @ basis
        gram += inside.T @ inside
        left += float(((block - inside @ basis.T) ** 2).sum())
    values = np.sqrt(np.maximum(np.linalg.eigvalsh(gram)[::-1], 0.0))
    rank = _counted(values, shape, noise)
    left += float((values[rank:] ** 2).sum())
    return rank if 0 < rank <= most and left <= MARGIN * m * n * noise**2 else None


def _counted(values: np.ndarray, shape: tuple[int, ...], noise: float) -> int:
    floor = max(MARGIN * noise * sum(map(sqrt, shape)), 1e-7 * float(values.max(initial=0.0)))
    return int((values > floor).sum())


def _first_rows(blocks: Iterable[np.ndarray], least: int) -> np.ndarray:
    """The first blocks that together have this many rows: fewer could not distinguish a high rank from a low one."""
    rows = []
    for block in blocks:
        rows.append(block)
        if sum(map(len, rows)) >= least:
            break
    return np.concatenate(rows)


def evenly_spread(count: int, most: int) -> np.ndarray:
    """At most this many of the indices below `count`, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(most, count)).astype(int))


# Whether several changes share one direction.

PASSES = 3  # over the blocks: a power iteration, which finds the direction of a matrix of rank one in the first
NEARLY_ALL = 0.9  # of a change's energy in its first direction: rounding to bfloat16 adds 1 % in the widest models
PARALLEL = 0.99  # cosine of two directions that are called one
REMOVED = 0.6  # of a matrix's size along a direction: at most this is left where it was removed, if only in part

Pairs = Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]]


class Along(NamedTuple):
    """The direction of one side of a change from A to B that is nearly of rank one."""

    direction: np.ndarray  # a unit vector
    left: float  # |B v| / |A v|: 0 where the direction was removed


def first_directions(pairs: Pairs) -> tuple[float, Along, Along]:
    """The share of a change's energy in its first singular direction, that of the columns and that of the rows.

    pairs: blocks of rows of A and of B, (rows, n) each -> share, (m,), (n,).
    """
    v = np.zeros(0)
    for _ in range(PASSES):
        total, inside, rows, squares = 0.0, [], np.zeros(len(v)), np.zeros(2)
        for x, y in pairs():
            d = y.astype(np.float64) - x
            if not v.any():
                v = _unit(d[np.vecdot(d, d).argmax()])
                rows = np.zeros(len(v))
            inside.append(d @ v)
            rows = rows + inside[-1] @ d
            total += float(np.vecdot(d, d).sum())
            squares += float(((x @ v) ** 2).sum()), float(((y @ v) ** 2).sum())
        u, share = np.concatenate(inside), float(sum(part @ part for part in inside)) / (total or 1.0)
        v, right = _unit(rows), Along(v, _ratio(*squares.tolist()))
    u = _unit(u)
    of_a, of_b, start = np.zeros(len(v)), np.zeros(len(v)), 0
    for x, y in pairs():
        part = u[start : start + len(x)]
        of_a, of_b, start = of_a + part @ x, of_b + part @ y, start + len(x)
    return share, Along(u, _ratio(float(of_a @ of_a), float(of_b @ of_b))), right


def _unit(vector: np.ndarray) -> np.ndarray:
    return vector / (float(np.linalg.norm(vector)) or 1.0)


def _ratio(before: float, after: float) -> float:
    """The ratio of two lengths, from their squares."""
    return sqrt(after / before) if before else 0.0


def one_direction(directions: Sequence[tuple[int, Along]]) -> tuple[dict[int, Along], float]:
    """The most changes, by number, that share a direction, each with its own, and their least cosine with the first."""
    best: dict[int, Along] = {}
    least = 0.0
    for _, seed in directions:
        near = {}
        for number, along in directions:
            if len(along.direction) == len(seed.direction):
                cosine = abs(float(seed.direction @ along.direction))
                if cosine >= PARALLEL:
                    near[number] = along, cosine
        if len(near) > len(best):
            best, least = {number: along for number, (along, _) in near.items()}, min(c for _, c in near.values())
    return (best, least) if len(best) > 1 else ({}, 0.0)


# Whether one array is another after rounding: to a float of fewer bits, or to a few values in each group.

SAMPLE = 4096  # values on which a cast is tried before it is tried on all
GROUPS = (0, 128, 64, 32)  # values that share a grid: a row, or this many neighbours in it
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
    """Round to floats with this many exponent and fraction bits, ties to even; larger values become `largest`."""
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
    """Whether y holds few values in each group of a row, and x does not: x, y (n, d) -> (group, levels, nearest)."""
    grids = []
    for group in GROUPS:
        width = group or y.shape[1]
        if y.shape[1] < width or y.shape[1] % width:
            continue
        before, after = x.reshape(-1, width), y.reshape(-1, width)
        most = int(values_in(after).max())
        if most <= min(LEVELS, width // 2) and 2 * most < values_in(before).max():
            near = [_nearest(a, b, np.unique(b)) for a, b in zip(before, after, strict=True)]
            grids.append((width, most, bool(np.mean(near) >= NEAREST)))
    return min(grids, key=lambda grid: (not grid[2], 0 if grid[2] else grid[1]), default=None)


def values_in(rows: np.ndarray) -> np.ndarray:
    """How many values each row holds, (n, width) -> (n,)."""
    return 1 + np.count_nonzero(np.diff(np.sort(rows, axis=1), axis=1), axis=1)


def _nearest(x: np.ndarray, y: np.ndarray, levels: np.ndarray) -> float:
    """The share of values that were rounded to the nearest of these levels."""
    above = np.clip(np.searchsorted(levels, x), 1, max(1, len(levels) - 1))
    if len(levels) < 2:
        return 1.0
    low, high = levels[above - 1], levels[above]
    return float(np.mean(np.abs(y - x) <= np.minimum(np.abs(x - low), np.abs(high - x)) * (1 + 1e-6)))

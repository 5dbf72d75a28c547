"""Spearman's rank correlation over more pairs than fit in memory, from exact counts in narrow bins.

Bins are the leading bits of a float32, whose order is the numbers' own: 32 a doubling for the first
quantity, 256 for the second. A pair gets the mean ranks of its bins, so all that is lost is the
order within a bin. The mean of a bin's ranks is the projection of the ranks onto functions of the
bin; seen as vectors, ranks and binned ranks are an angle theta apart with tan^2 theta = variance
within bins / variance between them, and the former is at most sum c (c^2 - 1) / 12 for bins of c
pairs. Hence, rho being the cosine of an angle too,

    | arccos rho - arccos rho_binned | <= theta_first + theta_second,

which is the bound reported. What moves ranks within a bin has little to do with the other quantity,
so errors are smaller as a rule, by two orders of magnitude for attention weights.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

FIRST_BITS, SECOND_BITS = 5, 8  # bits of the mantissa
FIRST_OCTAVES, SECOND_OCTAVES = (-40, 1), (-12, 12)  # numbers outside share a bin at the end
BIAS, MANTISSA = 127, 23  # float32's exponent bias and bits of its mantissa


@dataclass(frozen=True)
class Spearman:
    """A rank correlation and how well it is known."""

    pairs: int
    rho: float  # NaN where all pairs lie in one bin
    error: float  # largest distance of the exact rho


class PairsPart(NamedTuple):
    """All pairs, or a tenth of them by the first quantity, whatever their group."""

    start: float  # the first quantity's range
    end: float
    mean: float  # of the second quantity
    variation: float  # its standard deviation over its mean
    at_one: float  # the same at one value of the first, known to 1/32: mean over pairs
    ranks: Spearman
    by_group: float  # rho if the pairs of each group were shuffled


class RankCorrelation:
    """Spearman's rho of two quantities in several groups, pairs coming batch by batch.

    The table of counts takes up to 65 MB a group, less where numbers are of similar size.
    """

    def __init__(self, n_groups: int) -> None:
        self._columns = 1 + _bins(FIRST_OCTAVES, FIRST_BITS)  # one more for pairs that do not count
        self._rows = _bins(SECOND_OCTAVES, SECOND_BITS)
        self._counts = np.zeros(n_groups * self._rows * self._columns, np.int64)

    def add(self, first: np.ndarray, second: np.ndarray, groups: np.ndarray) -> None:
        """Take in pairs (first[..., i, j], second[..., j]) for all i and j.

        first (..., m, n), second (..., n), groups (..., n).
        """
        row = _bin(second, SECOND_OCTAVES, SECOND_BITS)  # (..., n)
        row = groups.astype(np.int64) * self._rows + row
        column = (1 + _bin(first, FIRST_OCTAVES, FIRST_BITS)) * (first > 0)  # (..., m, n)
        np.add.at(self._counts, (row * self._columns)[..., None, :] + column, 1)

    def results(self) -> list[Spearman]:
        """The correlation of every group."""
        tables = self._counts.reshape(-1, self._rows, self._columns)[:, :, 1:]
        return [_spearman(table) for table in tables]

    def parts(self) -> list[PairsPart]:
        """All groups together, then tenths by the first quantity, the smallest first."""
        tables = self._counts.reshape(-1, self._rows, self._columns)[:, :, 1:]
        counts = tables.sum(axis=(0, 1))  # of each bin of the first
        tenth = np.floor(10 * (counts.cumsum() - counts / 2) / max(counts.sum(), 1))
        bins = [np.flatnonzero((tenth == number) & (counts > 0)) for number in range(10)]
        return [_part(tables, some) for some in (np.flatnonzero(counts), *bins) if len(some)]


def _part(tables: np.ndarray, bins: np.ndarray) -> PairsPart:
    """The pairs in some bins of the first quantity: tables (n_groups, second, first)."""
    tables = tables[:, :, bins]
    table = tables.sum(axis=0)  # (second, first)
    n, at_bin = table.sum(), table.sum(axis=0)  # (first,)
    of_first = _edges(FIRST_OCTAVES, FIRST_BITS)
    start, end = float(of_first[bins[0]]), float(of_first[bins[-1] + 1])
    edges = _edges(SECOND_OCTAVES, SECOND_BITS)
    middle = (edges[1:] + edges[:-1]) / 2
    mean = middle @ table.sum(axis=1) / n
    variance = (middle - mean) ** 2 @ table.sum(axis=1) / n
    means = middle @ table / at_bin
    variances = np.maximum(middle**2 @ table / at_bin - means**2, 0)
    at_one = float(at_bin @ (np.sqrt(variances) / means) / n)
    first, first_variance, _ = _ranks(at_bin / n, n)
    second, second_variance, _ = _ranks(table.sum(axis=1) / n, n)
    of_groups = [
        (kind.sum(axis=0) @ first, kind.sum(axis=1) @ second, kind.sum()) for kind in tables
    ]
    together = sum(a * b / count for a, b, count in of_groups if count) / n
    spread = np.sqrt(first_variance * second_variance)
    by_group = float(together / spread) if spread else np.nan
    variation = float(np.sqrt(variance) / mean)
    return PairsPart(start, end, float(mean), variation, at_one, _spearman(table), by_group)


def _edges(octaves: tuple[int, int], bits: int) -> np.ndarray:
    """Edges of bins."""
    octave, place = np.divmod(np.arange(_bins(octaves, bits) + 1), 1 << bits)
    return 2.0 ** (octave + octaves[0]) * (1 + place / (1 << bits))


def _bins(octaves: tuple[int, int], bits: int) -> int:
    return (octaves[1] - octaves[0]) << bits


def _bin(values: np.ndarray, octaves: tuple[int, int], bits: int) -> np.ndarray:
    """Bins of non-negative float32 numbers: exponent and first `bits` of the mantissa."""
    leading = np.asarray(values, np.float32).view(np.int32) >> (MANTISSA - bits)
    leading -= (BIAS + octaves[0]) << bits
    return np.clip(leading, 0, _bins(octaves, bits) - 1, out=leading)


def _spearman(table: np.ndarray) -> Spearman:
    """The correlation of a (second, first) table of counts."""
    n = int(table.sum())
    if not n:
        return Spearman(n, np.nan, np.nan)
    first, first_variance, first_angle = _ranks(table.sum(axis=0) / n, n)
    second, second_variance, second_angle = _ranks(table.sum(axis=1) / n, n)
    if not first_variance * second_variance:
        return Spearman(n, np.nan, np.nan)
    rho = float(second @ (table @ first) / n / np.sqrt(first_variance * second_variance))
    angle, most = np.arccos(np.clip(rho, -1, 1)), first_angle + second_angle
    bounds = np.cos([max(angle - most, 0), min(angle + most, np.pi)])
    return Spearman(n, rho, float(np.abs(bounds - rho).max()))


def _ranks(share: np.ndarray, n: int) -> tuple[np.ndarray, float, float]:
    """Bins' mean ranks, centred, over n; their variance over pairs; the angle to ranks in bins."""
    ranks = share.cumsum() - share / 2 - 0.5
    between = float(share @ ranks**2)
    within = float(share @ (share**2 - 1 / n**2).clip(0)) / 12
    return ranks, between, float(np.arctan2(np.sqrt(within), np.sqrt(between)))

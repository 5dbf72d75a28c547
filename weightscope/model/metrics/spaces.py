"""The spaces that heads read and write: their likeness, and the tokens that lie along one."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.linalg import solve_triangular

from weightscope.core.compute.cores import in_threads, usable_cores
from weightscope.core.results import ShowsShapes
from weightscope.model.layers.factored import Factored, combined, signs_of
from weightscope.model.metrics.spectra import near_equal_blocks, null_tolerance

ROWS_AT_ONCE = 256  # heads compared with all others at a time
PROBES = 24  # sketches of 24 * 25 / 2 = 300 numbers: unrelated spaces correlate by about 0.06


@dataclass(frozen=True, eq=False, repr=False)
class SpaceProbes(ShowsShapes):
    """The fixed directions that every space of a width is sketched with."""

    omega: np.ndarray  # (m, d)
    gram: np.ndarray  # (m, m): Omega Omega'


def probes(d: int) -> SpaceProbes:
    """The fixed directions for spaces of width d."""
    omega = (np.random.default_rng(d).standard_normal((PROBES, d)) / np.sqrt(d)).astype(np.float32)
    return SpaceProbes(omega, omega @ omega.T)


def space_sketch(factor: np.ndarray, r: np.ndarray, against: SpaceProbes) -> np.ndarray:
    """Omega (P - (r/d) I) Omega' of the projection P onto the factor's columns, as a unit vector.

    factor (d, r), r (r, r).

    P = Q Q' with Q = factor R^-1, so P does not depend on how the columns are chosen within their
    space, and the inner product of two sketches estimates the correlation of the two projections.
    """
    d, width = factor.shape
    upper, lengths = _upper(len(against.omega))
    diagonal = np.abs(r.diagonal())
    if width > 0.9 * d or not diagonal.min() > 1e-6 * diagonal.max():
        return np.full(len(lengths), np.nan, np.float32)
    # The product is in the factor's own precision, which is enough here.
    projected = (factor.T @ against.omega.T).astype(np.float64)  # (r, m)
    inside = solve_triangular(r, projected, trans="T", check_finite=False)  # Q' Omega'
    centred = inside.T @ inside - width / d * against.gram  # (m, m)
    sketch = centred[upper] * lengths
    return (sketch / np.linalg.norm(sketch)).astype(np.float32)  # an audit keeps four per head


@lru_cache(maxsize=2)
def _upper(m: int) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Indices of a symmetric (m, m) matrix's upper half, and weights that keep inner products."""
    upper = np.triu_indices(m)
    return upper, np.where(upper[0] == upper[1], 1.0, np.sqrt(2.0))


def alike(
    first: np.ndarray, second: np.ndarray, least: float
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Later rows that correlate with a row by at least `least` in both of two sketches, for each
    row.

    first, second (n, s) -> (k,), (k,).
    """
    first, second = np.nan_to_num(first), np.nan_to_num(second)
    for start in range(0, len(first), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        lower = np.minimum(first[rows] @ first.T, second[rows] @ second.T)  # (rows, n)
        for i, row in enumerate(lower, start):
            later = np.flatnonzero(row[i + 1 :] >= least) + i + 1
            if len(later):
                yield i, later, row[later]


STRIP = 384  # columns of a product that a thread makes
WIDEST = 16  # directions in a block of near-equal singular values whose tokens are looked for


@dataclass(frozen=True, eq=False, repr=False)
class SpectrumBlock(ShowsShapes):
    """A singular value of a matrix, or a block of them that are nearly equal."""

    start: int  # its singular values are [start, stop)
    stop: int
    values: np.ndarray  # (stop - start,)

    @property
    def single(self) -> bool:
        return self.stop == self.start + 1

    @property
    def wide(self) -> bool:
        """True if it is too wide for tokens along it to be named."""
        return self.stop - self.start > WIDEST


@dataclass(frozen=True, eq=False, repr=False)
class Directions(ShowsShapes):
    """The singular directions of a block.

    Within one only the space means anything: any rotation of its vectors serves the matrix as well.
    """

    block: SpectrumBlock
    left: np.ndarray  # (d, block.stop - block.start), orthonormal; x @ left: x along them
    right: np.ndarray


def leading_directions(w: Factored, how_many: int) -> list[Directions]:
    """The first directions of a matrix, near-equal ones as one; none if it is not finite.

    Vectors are float32 arrays of their own, so that they keep nothing else of the matrix alive.
    """
    if not (np.isfinite(w.left).all() and np.isfinite(w.right).all()):
        return []

    def blocks(s: np.ndarray) -> list[SpectrumBlock]:
        return leading_blocks(s, w.shape[0], how_many)

    left, s, right = w.leading(lambda s: shown(blocks(s)))
    return _cut(blocks(s), left, right)


def directions_from(
    w: Factored, s: np.ndarray, left: np.ndarray, right: np.ndarray, how_many: int
) -> list[Directions]:
    """`leading_directions` from known singular values and combinations of the factors' columns.

    s (r,), left, right (r, k).
    """
    blocks = leading_blocks(s, w.shape[0], how_many)
    columns = slice(shown(blocks))
    known = np.concatenate([left[:, columns], right[:, columns]])
    if known.shape[1] < shown(blocks) or not np.isfinite(known).all() or not np.isfinite(s).all():
        return leading_directions(w, how_many)
    ours, theirs = combined(w.left, left[:, columns]), combined(w.right, right[:, columns])
    signs = signs_of(ours)
    return _cut(blocks, ours * signs, theirs * signs)


def leading_blocks(s: np.ndarray, d: int, how_many: int) -> list[SpectrumBlock]:
    """The first blocks of near-equal singular values of a matrix on d dimensions, non-null."""
    cuts = near_equal_blocks(s[s > null_tolerance(s, d)])[:how_many]
    return [SpectrumBlock(start, stop, s[start:stop].copy()) for start, stop in cuts]


def shown(blocks: Sequence[SpectrumBlock]) -> int:
    """The number of singular vectors that show all blocks that are not too wide."""
    return max((block.stop for block in blocks if not block.wide), default=0)


def _cut(blocks: Sequence[SpectrumBlock], left: np.ndarray, right: np.ndarray) -> list[Directions]:
    """The blocks with their columns of the singular vectors."""
    directions = []
    for block in blocks:
        stop = block.start if block.wide else block.stop
        ours = left[:, block.start : stop].astype(np.float32)
        theirs = right[:, block.start : stop].astype(np.float32)
        directions.append(Directions(block, ours, theirs))
    return directions


@dataclass(frozen=True, eq=False, repr=False)
class Nearest(ShowsShapes):
    """Rows of an embedding along one direction or in one space."""

    rows: np.ndarray  # (n,): the nearest first
    scores: np.ndarray  # (n,): cosines or products; a projection's length for a block


class Hits(NamedTuple):
    """Rows that may be among the highest of some lines."""

    lines: np.ndarray  # (hits,)
    rows: np.ndarray
    scores: np.ndarray

    @classmethod
    def joined(cls, *parts: "Hits") -> "Hits":
        """All parts as one."""
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    def highest(self, how_many: int) -> "Hits":
        """The highest of each line in order; ties go to the lower row."""
        order = np.lexsort((self.rows, -self.scores, self.lines))
        counts = np.bincount(self.lines)
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        places = np.arange(len(order)) - starts  # within each line
        order = order[places < how_many]
        return Hits(self.lines[order], self.rows[order], self.scores[order])


class _Strip:
    """Spaces side by side, and the rows that lie most along each, or against a single direction.

    A line is a space, then each that is single once more, the other way.
    """

    def __init__(self, spaces: Sequence[np.ndarray], how_many: int) -> None:
        widths = np.array([space.shape[1] for space in spaces])
        self.columns = np.concatenate(spaces, axis=1).astype(np.float32).T.copy()  # (sum of k, d)
        self.starts = np.cumsum(widths) - widths
        self.single = widths == 1
        self.how_many = how_many
        self.known = Hits(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))
        n_lines = len(spaces) + int(self.single.sum())
        self.low = np.full(n_lines, -np.inf, np.float32)  # a further row has to score more

    def hits(self, rows: np.ndarray, divisors: np.ndarray | None) -> Hits:
        """Rows (n, d) that may be among the highest; products are divided by `divisors` (n,)."""
        with np.errstate(invalid="ignore"):  # some kernels report an infinity in a row
            scores = self.columns @ rows.T  # (sum of k, n)
            if divisors is not None:
                scores /= divisors
            if not self.single.all():
                sizes = np.sqrt(np.add.reduceat(scores**2, self.starts))  # (spaces, n)
                scores = np.where(self.single[:, None], scores[self.starts], sizes)
            along = _above(scores, self.low[: len(scores)], self.how_many)
            against = _above(-scores[self.single], self.low[len(scores) :], self.how_many)
        return Hits.joined(along, against._replace(lines=against.lines + len(scores)))

    def add(self, first: int, hits: Hits) -> None:
        """Keep the highest of the known rows and of hits among rows numbered from `first`."""
        numbered = hits._replace(rows=hits.rows + first)
        self.known = Hits.joined(self.known, numbered).highest(self.how_many)
        counts = np.bincount(self.known.lines, minlength=len(self.low))
        full = counts == self.how_many
        self.low[full] = self.known.scores[np.cumsum(counts)[full] - 1]

    def nearest(self) -> Iterator[tuple[Nearest, Nearest]]:
        """The rows along each space, and against it if it is a single direction."""
        cuts = np.searchsorted(self.known.lines, np.arange(1, len(self.low)))
        rows_by_line = np.split(self.known.rows, cuts)
        by_line = [*zip(rows_by_line, np.split(self.known.scores, cuts), strict=True)]
        opposite = iter(by_line[len(self.single) :])
        for (rows, scores), single in zip(by_line, self.single, strict=False):
            against, lengths = next(opposite) if single else (rows[:0], scores[:0])
            yield Nearest(rows, scores), Nearest(against, -lengths)


def _above(scores: np.ndarray, low: np.ndarray, how_many: int) -> Hits:
    """Finite scores (m, n) above `low` (m,), or the highest of a line that has none yet."""
    new = np.flatnonzero(np.isneginf(low))
    if len(new):
        finite = np.where(np.isfinite(scores[new]), scores[new], -np.inf)
        kept = min(how_many, finite.shape[1])
        low = low.copy()
        low[new] = np.nextafter(np.partition(finite, -kept, axis=1)[:, -kept], np.float32(-np.inf))
    hits = np.flatnonzero((scores > low[:, None]) & (scores < np.inf))
    lines, rows = np.divmod(hits, scores.shape[1])
    return Hits(lines, rows, scores[lines, rows])


def nearest_rows(
    blocks: Iterable[tuple[int, np.ndarray]],
    spaces: Iterable[np.ndarray],
    how_many: int,
    centred: bool = False,
    by_cosine: bool = True,
) -> list[tuple[Nearest, Nearest]]:
    """For every space the rows of an embedding most along it, and most against a single direction.

    blocks (n, d), spaces (d, k) -> (Nearest, Nearest).

    The rows are streamed: memory is some blocks, and for each core the products of one with `STRIP`
    directions.
    """
    strips = [_Strip(part, how_many) for part in _strips(spaces)]

    def hits(numbered: tuple[int, np.ndarray]) -> tuple[int, list[Hits]]:
        first, block = numbered
        with np.errstate(invalid="ignore"):  # a row with an infinity has no direction
            rows = block - block.mean(axis=1, keepdims=True) if centred else block
        divisors = None
        if by_cosine:
            lengths = np.sqrt(np.einsum("nd,nd->n", rows, rows))
            divisors = np.where(np.isfinite(lengths), np.maximum(lengths, 1e-30), np.nan)
        return first, [strip.hits(rows, divisors) for strip in strips]

    for first, of_block in in_threads(hits, blocks, ahead=usable_cores()):
        for strip, of_strip in zip(strips, of_block, strict=True):
            strip.add(first, of_strip)
    return [pair for strip in strips for pair in strip.nearest()]


def _strips(spaces: Iterable[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Spaces (d, k) in lists of about `STRIP` columns, whatever the number of cores."""
    strip: list[np.ndarray] = []
    columns = 0
    for space in spaces:
        strip.append(space)
        columns += space.shape[1]
        if columns >= STRIP:
            yield strip
            strip, columns = [], 0
    if strip:
        yield strip

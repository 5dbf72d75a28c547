"""What a head's first singular directions mean: the tokens whose embeddings lie along them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from weightscope.attention.factored import Factored
from weightscope.metrics.spectra import near_equal_blocks, null_tolerance
from weightscope.parallel import in_threads
from weightscope.shapes import ShowsShapes

STRIP = 256  # columns of a product that a thread makes
WIDEST = 16  # directions: a longer block of near-equal singular values is named, its tokens are not looked for


@dataclass(frozen=True, eq=False, repr=False)
class Directions(ShowsShapes):
    """One singular direction of a matrix, or a block of them whose singular values are nearly equal.

    Within a block only the space means anything: any rotation of its vectors serves the matrix as well.

    Attributes
    ----------
    start, stop : int
        Which singular values, [start, stop).
    values : (stop - start,) array
    left, right : (d, stop - start) arrays, or (d, 0) where the block is wider than `WIDEST`
        Orthonormal columns; x @ left is how far x lies along them.
    """

    start: int
    stop: int
    values: np.ndarray
    left: np.ndarray
    right: np.ndarray

    @property
    def single(self) -> bool:
        return self.stop == self.start + 1


def leading_directions(w: Factored, how_many: int) -> list[Directions]:
    """The first `how_many` directions of a matrix, near-equal ones as one; none where it is not finite."""
    if not (np.isfinite(w.left).all() and np.isfinite(w.right).all()):
        return []
    left, s, right = w.leading(how_many * WIDEST)
    kept = s[s > null_tolerance(s, w.shape[0])]
    found = []
    for start, stop in near_equal_blocks(kept)[:how_many]:
        columns = slice(start, stop if stop - start <= WIDEST else start)
        found.append(Directions(start, stop, s[start:stop], left[:, columns], right[:, columns]))
    return found


@dataclass(frozen=True, eq=False, repr=False)
class Nearest(ShowsShapes):
    """Rows of an embedding along one direction or in one space.

    Attributes
    ----------
    rows : (n,) int array
        The nearest first.
    cosines : (n,) array
        Signed for a single direction; the length of the projection for a block.
    """

    rows: np.ndarray
    cosines: np.ndarray


def nearest_rows(
    blocks: Iterable[tuple[int, np.ndarray]], spaces: Sequence[np.ndarray], how_many: int, centred: bool
) -> list[tuple[Nearest, Nearest]]:
    """For every space, the rows of an embedding that lie most along it, and for single directions most against it.

    The rows are streamed: memory is one block and its products with all spaces.

    Parameters
    ----------
    blocks : iterable of (first row, (n, d) array)
    spaces : sequence of (d, k) arrays
        Orthonormal columns; k = 1 for a single direction.
    how_many : int
    centred : bool
        Take each row's mean off first, as a LayerNorm does.

    Returns
    -------
    list of (Nearest, Nearest)
        Along and against; for k > 1 the second is empty.
    """
    stacked = np.concatenate(spaces, axis=1).astype(np.float32)  # (d, sum of k)
    ends = np.cumsum([space.shape[1] for space in spaces])
    along = [_none() for _ in spaces]
    against = [_none() for _ in spaces]
    for first, block in blocks:
        rows = block - block.mean(axis=1, keepdims=True) if centred else block
        lengths = np.sqrt(np.einsum("nd,nd->n", rows, rows))
        cosines = _product(rows, stacked)  # (n, sum of k)
        cosines /= np.maximum(lengths, 1e-30)[:, None]
        for i, (space, end) in enumerate(zip(spaces, ends, strict=True)):
            own = cosines[:, end - space.shape[1] : end]
            if space.shape[1] == 1:
                along[i] = _merged(along[i], first, own[:, 0], how_many)
                against[i] = _merged(against[i], first, -own[:, 0], how_many)
            else:
                along[i] = _merged(along[i], first, np.sqrt((own**2).sum(axis=1)), how_many)
    return [(a, Nearest(b.rows, -b.cosines)) for a, b in zip(along, against, strict=True)]


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b in strips of fixed width, one BLAS thread each: all cores, and the same bits however many there are."""
    found = np.empty((len(a), b.shape[1]), np.float32)

    def strip(start: int) -> None:
        columns = slice(start, start + STRIP)
        np.matmul(a, b[:, columns], out=found[:, columns])

    list(in_threads(strip, range(0, b.shape[1], STRIP)))
    return found


def _none() -> Nearest:
    return Nearest(np.empty(0, np.int64), np.empty(0, np.float32))


def _merged(best: Nearest, first: int, scores: np.ndarray, how_many: int) -> Nearest:
    """The highest of what is known and a new block's scores; ties go to the lower row, NaN to nobody."""
    scores = np.where(np.isfinite(scores), scores, -np.inf)
    kept = min(how_many, len(scores))
    candidates = np.argpartition(-scores, kept - 1)[:kept]
    rows = np.concatenate([best.rows, candidates + first])
    values = np.concatenate([best.cosines, scores[candidates]])
    order = np.lexsort((rows, -values))[:how_many]
    return Nearest(rows[order], values[order])

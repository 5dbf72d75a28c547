"""For every head, the most similar head of another checkpoint, and of another family."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log, sqrt

import numpy as np

from weightscope.core.progress import bar
from weightscope.core.results import ShowsShapes
from weightscope.pairs.atlas.families import ROUNDING, places_by, width_of
from weightscope.pairs.atlas.prints import Outline, Print
from weightscope.pairs.lineage.sketches import SKETCH, as_bytes, unit_length

ROWS = 1 << 10  # heads whose neighbours are looked for at once
COLUMNS = 1 << 14  # heads that they are compared with at once
PLACES = 1e4  # steps of a likeness; it is rounded to 1 / this
LUCK = 1.3  # factor over the highest cosine expected by chance among so many strangers


@dataclass(frozen=True, eq=False, repr=False)
class Neighbours(ShowsShapes):
    """The most similar head of each of N heads."""

    place: np.ndarray  # (N,) among all heads, or -1 if none is more alike than by chance
    likeness: np.ndarray  # (N,) mean cosine of W_QK and of W_VO


def neighbours_of(
    outlines: Sequence[Outline], load: Callable[[int], Print], *apart: Sequence[int]
) -> list[Neighbours]:
    """For each list of numbers, the nearest heads of checkpoints with another number.

    Only checkpoints of one width are compared. The sketches of all heads of a width are in memory,
    256 bytes each.
    """
    sizes = [len(each.layer) for each in outlines]
    starts = np.cumsum([0, *sizes])
    n = starts[-1]
    neighbours = [Neighbours(np.full(n, -1), np.full(n, np.nan)) for _ in apart]
    for chosen in bar(places_by(outlines, width_of), "neighbours of heads", "width"):
        heads = np.concatenate([np.arange(starts[k], starts[k + 1]) for k in chosen])
        sketches = np.concatenate([as_bytes(load(k).sketches.direct) for k in chosen])  # (n, 2, K)
        # The mean of two cosines has a standard deviation of 1 / sqrt(2 K) among strangers.
        least = LUCK * sqrt(2 * log(max(2, len(sketches)))) / sqrt(2 * SKETCH)
        for numbers, near in zip(apart, neighbours, strict=True):
            groups = np.concatenate([np.full(sizes[k], numbers[k]) for k in chosen])
            best, score = _nearest(sketches, groups)
            known = score >= least
            near.place[heads[known]], near.likeness[heads[known]] = heads[best[known]], score[known]
    return neighbours


def _nearest(sketches: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each head's nearest head in another group and their mean cosine: (n,), (n,).

    Of equally alike heads, the first one counts.
    """
    n = len(sketches)
    best, score = np.zeros(n, np.int64), np.full(n, -np.inf)
    for j in range(0, n, COLUMNS):
        theirs, columns = slice(j, j + COLUMNS), _rows(sketches[j : j + COLUMNS])
        for i in range(0, n, ROWS):
            mine = slice(i, i + ROWS)
            products = _rows(sketches[mine]) @ columns.T
            products[groups[mine][:, None] == groups[theirs]] = -np.inf
            value = products.max(axis=1)
            column = (products >= value[:, None] - ROUNDING).argmax(axis=1)
            nearer = value > score[mine] + ROUNDING
            best[mine] = np.where(nearer, column + j, best[mine])
            score[mine] = np.where(nearer, value, score[mine])
    return best, np.rint(score * PLACES) / PLACES


def _rows(sketches: np.ndarray) -> np.ndarray:
    """Stored sketches (n, 2, K) as rows whose products are mean cosines (n, 2 K)."""
    return unit_length(sketches.astype(np.float32)).reshape(len(sketches), -1) / np.float32(sqrt(2))

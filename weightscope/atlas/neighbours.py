"""For every head the most similar head of another checkpoint, and of another family, by their sketches."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt

import numpy as np

from weightscope.atlas.prints import Print
from weightscope.lineage.sketches import SKETCH
from weightscope.progress import bar
from weightscope.results import ShowsShapes

ROWS, COLUMNS = 1 << 10, 1 << 14  # heads compared at once
PLACES = 1e4  # a likeness is rounded to 1 / this, so that equal ones are equal with any number of threads
LUCK = 1.3  # times the highest cosine that chance is expected to give among so many strangers


@dataclass(frozen=True, eq=False, repr=False)
class Neighbours(ShowsShapes):
    """The neighbour of each of N heads: its place among all heads, or -1 where none is more alike than by chance."""

    place: np.ndarray  # (N,)
    likeness: np.ndarray  # (N,) mean cosine of W_QK and of W_VO


def neighbours_of(prints: Sequence[Print], apart: Sequence[int]) -> Neighbours:
    """The nearest head of a checkpoint with another number in `apart`, of the same width."""
    sizes = [len(each.sketches.layer) for each in prints]
    starts = np.cumsum([0, *sizes])
    place, likeness = np.full(starts[-1], -1), np.full(starts[-1], np.nan)
    of_width: dict[int, list[int]] = defaultdict(list)
    for k, each in enumerate(prints):
        of_width[each.about["d_model"]].append(k)
    for chosen in bar(list(of_width.values()), "neighbours of heads", "width"):
        heads = np.concatenate([np.arange(starts[k], starts[k + 1]) for k in chosen])
        groups = np.concatenate([np.full(sizes[k], apart[k]) for k in chosen])
        rows = np.concatenate([prints[k].sketches.direct.reshape(sizes[k], -1) for k in chosen]) / sqrt(2)  # (n, 2 K)
        best, score = _nearest(rows, groups)
        # The mean of two cosines has a standard deviation of 1 / sqrt(2 K) among strangers.
        least = LUCK * sqrt(2 * log(max(2, len(rows)))) / sqrt(2 * SKETCH)
        known = score >= least
        place[heads[known]], likeness[heads[known]] = heads[best[known]], score[known]
    return Neighbours(place, likeness)


def _nearest(rows: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The row of another group with the largest product, the first of equal ones, and the product: (n,), (n,)."""
    best, score = np.zeros(len(rows), np.int64), np.full(len(rows), -np.inf)
    for i in range(0, len(rows), ROWS):
        mine = slice(i, i + ROWS)
        for j in range(0, len(rows), COLUMNS):
            theirs = slice(j, j + COLUMNS)
            products = np.rint(rows[mine] @ rows[theirs].T * PLACES) / PLACES
            products[groups[mine][:, None] == groups[theirs]] = -np.inf
            column = products.argmax(axis=1)
            value = products[np.arange(len(column)), column]
            nearer = value > score[mine]
            best[mine] = np.where(nearer, column + j, best[mine])
            score[mine] = np.where(nearer, value, score[mine])
    return best, score

"""Directions that several changed matrices share, and the overlap of several tunes."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from weightscope.core.results import ShowsShapes
from weightscope.pairs.learned.changed_matrices import Update

FROM = 1.5  # times the strength of random directions: a shared direction has more
MOST_SHARED = 8  # directions of each side
IN_SPACE = 0.5  # cosine with a matrix's leading directions, from which it has a shared direction


@dataclass(frozen=True, eq=False, repr=False)
class Shared(ShowsShapes):
    """A direction of the stream that the changes of several matrices have."""

    side: str  # reads or writes
    direction: np.ndarray  # (d,)
    strength: float  # mean squared cosine with each matrix's leading directions
    chance: float  # the largest that random directions reach
    matrices: tuple[str, ...]  # whose leading directions hold it
    layers: tuple[int, ...]


def shared_directions(updates: Sequence[Update]) -> list[Shared]:
    """Directions of the stream that changes in several layers read or write, strongest first."""
    return [shared for side in ("reads", "writes") for shared in _shared_of(updates, side)]


def _shared_of(updates: Sequence[Update], side: str) -> list[Shared]:
    having = [
        (update, rows)
        for update in updates
        if (rows := update.along_stream.get(side)) is not None and len(rows)
    ]
    if len(having) < 2 or len({rows.shape[1] for _, rows in having}) > 1:
        return []
    stacked = np.concatenate([rows for _, rows in having])  # (n, d)
    _, s, directions = np.linalg.svd(stacked, full_matrices=False)
    # The largest squared singular value of n random unit rows in d dimensions is near (1 + sqrt(n /
    # d))^2.
    chance = (1 + sqrt(len(stacked) / stacked.shape[1])) ** 2 / len(having)
    result = []
    for value, direction in zip(s[:MOST_SHARED], directions, strict=False):
        holding = [
            update for update, rows in having if np.linalg.norm(rows @ direction) >= IN_SPACE
        ]
        layers = {update.layer for update in holding if update.layer is not None}
        strength = float(value**2) / len(having)
        if strength >= FROM * chance and len(layers) > 1:
            names = tuple(update.label for update in holding)
            result.append(Shared(side, direction, strength, chance, names, tuple(sorted(layers))))
    return result


@dataclass(frozen=True)
class SpaceOverlap:
    """The overlap of the spaces that two tunes change in one matrix."""

    label: str
    reads: float  # mean squared cosine of the smaller space with the larger
    writes: float
    chance_reads: float  # the same for random spaces of as many dimensions
    chance_writes: float
    cosine: float  # between the two changes, within their leading directions


def overlap(a: Update, b: Update) -> SpaceOverlap:
    """The overlap of two tunes' changes of one matrix."""
    sides = []
    m, n = a.n_directions, b.n_directions
    for x, y in ((a.read[:m], b.read[:n]), (a.written[:m], b.written[:n])):
        inner = x @ y.T  # (m, n)
        most = max(m, n)
        sides.append(
            (inner, float((inner**2).sum()) / min(m, n) if m and n else 0.0, most / x.shape[1])
        )
    (read, reads, by_chance_r), (written, writes, by_chance_w) = sides
    sizes = float(np.linalg.norm(a.s[:m]) * np.linalg.norm(b.s[:n]))
    product = float((a.s[:m, None] * b.s[:n] * read * written).sum())
    return SpaceOverlap(
        a.label, reads, writes, by_chance_r, by_chance_w, product / sizes if sizes else 0.0
    )

"""Families of checkpoints by their fingerprints, and a tree of each.

Checkpoints of one shape are compared by the bits of a few blocks: two are relatives where fewer
than `NEAR` of 16 bits differ on average (strangers' weights differ in 5.5 or more). What bits do
not join is compared by sums of sketches over layers, and the pairs most alike by their heads, as
`weightscope lineage` does with fingerprints. What is left, whose stream or width may have changed,
by the order of value dimensions. Of each family the tree keeps the nearest pairs that join all (a
minimum spanning tree): bits first, then heads, then values. Pairs that are equally alike up to the
rounding of sums count as equal: pairs of one shape come first, then the likeness of heads in place
decides, then the order of the list. A processor's sums do not choose a tree.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from math import log, nan, sqrt
from typing import NamedTuple

import numpy as np

from weightscope.core.errors import CheckpointError
from weightscope.core.progress import bar
from weightscope.pairs.atlas.prints import Outline, Print
from weightscope.pairs.atlas.values import CHANCE, best_of_each, distinct, log_p_of
from weightscope.pairs.lineage.matching import matches
from weightscope.pairs.lineage.sketches import SKETCH, Sketches

NEAR = 4.0  # bits of 16; docs/atlas.md has what relatives and strangers differ in
DISTINCT = 16  # values that a block must hold: zeros and ones are equal without any origin
CANDIDATE = 0.2  # mean cosine of layers' sums for comparing heads; strangers' best reach 0.15
COMPARED = 8  # candidates of a checkpoint, the most alike
ROUNDING = sqrt(2 * SKETCH) * float(np.finfo(np.float32).eps)  # error of a sum of 2 K products


class TreeEdge(NamedTuple):
    """Two relatives, by their places in the list."""

    first: int
    second: int
    by: str  # evidence: "bits", "heads" or "values"
    bits: float = nan  # differing bits of 16 in the blocks
    # mean cosine of counterpart heads; by values, mean correlation of counterpart layers
    likeness: float = nan
    p: float = nan  # by values, the chance that any strangers in the list are this alike


class FamilyTree(NamedTuple):
    """Checkpoints with a common origin and the edges that join them."""

    members: list[int]
    edges: list[TreeEdge]


def families_of(outlines: Sequence[Outline], load: Callable[[int], Print]) -> list[FamilyTree]:
    """Find the families, the largest first; every checkpoint is in one, perhaps alone.

    `load` gives a whole fingerprint.
    """
    forest = _Forest(len(outlines))
    near = sorted(_near_in_bits(outlines), key=lambda pair: (pair.bits, pair.first, pair.second))
    for _, equal in groupby(near, key=lambda pair: pair.bits):
        left = [pair for pair in equal if forest.root(pair.first) != forest.root(pair.second)]
        forest.join_nearest(
            pair._replace(likeness=_in_place(load(pair.first), load(pair.second))) for pair in left
        )
    pairs = bar(_candidates(outlines, forest), "pairs by heads", "pair")
    by_heads = [TreeEdge(i, j, "heads", likeness=_by_heads(load(i), load(j))) for i, j in pairs]
    alike = [edge for edge in by_heads if edge.likeness]

    def nearest(edge: TreeEdge) -> float:
        same_shape = outlines[edge.first].shape == outlines[edge.second].shape
        return same_shape + float(np.nan_to_num(_in_place(load(edge.first), load(edge.second))))

    forest.join_nearest(alike, nearest)
    forest.join_nearest(_by_values(outlines, forest))
    return forest.families()


class _Forest:
    """Checkpoints joined by edges, the nearest first (Kruskal)."""

    def __init__(self, count: int) -> None:
        self._above = list(range(count))
        self._edges: list[TreeEdge] = []

    def root(self, place: int) -> int:
        """The representative of the family that a checkpoint is in so far."""
        while self._above[place] != place:
            self._above[place] = self._above[self._above[place]]
            place = self._above[place]
        return place

    def join(self, edge: TreeEdge) -> None:
        """Add an edge, unless both are in one family already."""
        roots = sorted((self.root(edge.first), self.root(edge.second)))
        if roots[0] != roots[1]:
            self._above[roots[1]] = roots[0]
            self._edges.append(edge)

    def join_nearest(
        self, edges: Iterable[TreeEdge], among_equals: Callable[[TreeEdge], float] | None = None
    ) -> None:
        """Add edges, the most alike first.

        Equally alike ones are ordered by `among_equals`, if given, then as listed.
        """
        listed = sorted(edges, key=lambda edge: (edge.first, edge.second))
        of_level: dict[int, list[TreeEdge]] = defaultdict(list)
        ranks = levels([edge.likeness for edge in listed]).tolist()
        for edge, level in zip(listed, ranks, strict=True):
            of_level[level].append(edge)
        for level in sorted(of_level):
            equal = of_level[level]
            if among_equals is not None and len(equal) > 1:
                places = levels([among_equals(edge) for edge in equal])
                equal = [equal[place] for place in np.argsort(places, kind="stable")]
            for edge in equal:
                self.join(edge)

    def families(self) -> list[FamilyTree]:
        """The joined checkpoints and their edges, the largest family first."""
        families: dict[int, FamilyTree] = defaultdict(lambda: FamilyTree([], []))
        for place in range(len(self._above)):
            families[self.root(place)].members.append(place)
        for edge in self._edges:
            families[self.root(edge.first)].edges.append(edge)
        return sorted(families.values(), key=lambda each: (-len(each.members), each.members[0]))


def places_by(outlines: Sequence[Outline], key: Callable[[Outline], Hashable]) -> list[list[int]]:
    """Places in the list that share a key."""
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, each in enumerate(outlines):
        places[key(each)].append(place)
    return list(places.values())


def width_of(outline: Outline) -> int:
    """The width of the stream."""
    return int(outline.about["d_model"])


def levels(likeness: Sequence[float] | np.ndarray) -> np.ndarray:
    """Rank likenesses (n,) -> (n,): 0 for the highest; equal up to rounding, equal in rank."""
    alike = np.nan_to_num(np.asarray(likeness, float), nan=-np.inf)
    order = np.argsort(-alike, kind="stable")
    ranks = np.zeros(len(alike), np.int64)
    with np.errstate(invalid="ignore"):  # two that have none
        ranks[order[1:]] = np.cumsum(-np.diff(alike[order]) > ROUNDING)
    return ranks


def _near_in_bits(outlines: Sequence[Outline]) -> Iterator[TreeEdge]:
    """Find pairs of one shape whose blocks differ in few bits."""
    grouped = places_by(outlines, lambda each: each.shape)
    shapes = [places for places in grouped if len(places) > 1]
    for places in bar(shapes, "pairs by bits", "shape"):
        blocks = np.stack([outlines[place].blocks for place in places])  # (n, B, V)
        counts = [[len(np.unique(block)) for block in of_one] for of_one in blocks]
        is_evidence = np.array(counts) >= DISTINCT  # (n, B)
        for i in range(len(places) - 1):
            # (n - i - 1, B)
            differ = np.bitwise_count(blocks[i + 1 :] ^ blocks[i]).sum(axis=2, dtype=np.int64)
            both = is_evidence[i + 1 :] & is_evidence[i]
            with np.errstate(invalid="ignore"):
                bits = (differ * both).sum(axis=1) / (both.sum(axis=1) * blocks.shape[2])
            for j in np.flatnonzero(bits < NEAR).tolist():
                yield TreeEdge(places[i], places[i + 1 + j], "bits", float(bits[j]))


def _in_place(a: Print, b: Print) -> float:
    """Mean cosine of the heads at the same places in both."""
    rows_of_a, rows_of_b = _row_of_each(a.sketches), _row_of_each(b.sketches)
    common = sorted(rows_of_a.keys() & rows_of_b.keys())
    if not common:
        return nan
    x = a.sketches.direct[[rows_of_a[place] for place in common]]
    y = b.sketches.direct[[rows_of_b[place] for place in common]]
    return float(np.vecdot(x, y).mean())


def _row_of_each(sketches: Sketches) -> dict[tuple[int, int], int]:
    """Rows of heads by layer and head."""
    places = zip(sketches.layer.tolist(), sketches.head.tolist(), strict=True)
    return {place: row for row, place in enumerate(places)}


def _candidates(outlines: Sequence[Outline], forest: _Forest) -> list[tuple[int, int]]:
    """Pairs of one width and two families with similar sums of layers: the best few of each."""
    pairs: set[tuple[int, int]] = set()
    for places in bar(places_by(outlines, width_of), "candidates by layers", "width"):
        roots = np.array([forest.root(place) for place in places])
        rows = [outlines[place].sums for place in places]
        starts = np.cumsum([0, *map(len, rows)])[:-1]
        stacked = np.concatenate(rows)  # (layers of all, 2 K)
        for i, mine in enumerate(rows):
            score = np.maximum.reduceat(stacked @ mine.T, starts, axis=0).mean(axis=1)  # (n,)
            score[roots == roots[i]] = -1
            for j in np.argsort(levels(score), kind="stable")[:COMPARED].tolist():
                if score[j] >= CANDIDATE:
                    first, second = sorted((places[i], places[j]))
                    pairs.add((first, second))
    return sorted(pairs)


def _by_heads(a: Print, b: Print) -> float:
    """Mean likeness of counterpart heads; 0 where strangers may be this alike."""
    try:
        match = matches(a.sketches, b.sketches).get("direct")
    except CheckpointError:  # too many heads to compare
        return 0.0
    return match.mean if match is not None and match.is_sure else 0.0


def _by_values(outlines: Sequence[Outline], forest: _Forest) -> list[TreeEdge]:
    """Join each checkpoint with the families whose value dimensions have the same order."""
    grouped = places_by(outlines, lambda each: each.values.shape[1])
    tests = sum(len(places) * (len(places) - 1) for places in grouped)
    edges = []
    widths = [places for places in grouped if len(places) > 1]
    for places in bar(widths, "pairs by values", "width"):
        roots = np.array([forest.root(place) for place in places])
        rows = [outlines[place].values for place in places]
        stacked = np.concatenate(rows)  # (layers of all, V)
        counts = np.array([len(each) for each in rows])
        for i, mine in enumerate(rows):
            best = best_of_each(distinct(mine), stacked, counts)  # (n, L)
            log_p = log_p_of(best, counts, stacked.shape[1]) + log(tests)
            log_p[roots == roots[i]] = 0
            alike = best.mean(axis=1)
            sure = np.flatnonzero(log_p < log(CHANCE))
            for root in np.unique(roots[sure]).tolist():
                theirs = sure[roots[sure] == root]
                j = int(theirs[levels(alike[theirs]).argmin()])
                first, second = sorted((places[i], places[j]))
                p, likeness = float(np.exp(log_p[j])), float(alike[j])
                edges.append(TreeEdge(first, second, "values", likeness=likeness, p=p))
    return edges

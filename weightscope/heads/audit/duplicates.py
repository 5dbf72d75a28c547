"""Heads that read and write, or score, in nearly the same spaces: one finding for each cluster.

A copy also has nearly the same map: of the same sign, and alike in its weakest direction too. Heads
with like spaces and another map are a note. Where two heads share keys or values, that factor
proves nothing: the other is judged.

Sketches of all heads are compared with each other; those that look alike are then compared exactly,
unless they are in one cluster already, so that equal heads cost one comparison each and not one per
pair. Two layers are in memory, and comparisons are ordered so that a layer that repeats another is
read once for all its heads. Layers that repeat each other head by head, as in a model that was made
deeper by copying layers, are one finding.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import groupby
from typing import NamedTuple

import numpy as np
from scipy.linalg import solve_triangular

from weightscope.core.compute import lapack
from weightscope.core.compute.cores import in_threads
from weightscope.core.errors import counted
from weightscope.core.results import ShowsShapes, holds_arrays
from weightscope.heads.audit.measure import MeasuredHeads
from weightscope.model.layers.factored import inner, triangle
from weightscope.model.layers.layer import Head, Layer
from weightscope.model.metrics.moves import principal_angles
from weightscope.model.metrics.spaces import alike
from weightscope.model.model import Model
from weightscope.report.findings import Finding, FindingKind, Member, finding, spans

# correlation of sketches above which the exact angles are computed; its own error is about 0.06
WORTH_A_LOOK = 0.7
# mean squared cosine of principal angles, minus chance, above which two spaces are called parallel
PARALLEL = 0.8
COPY = 0.9  # Frobenius cosine of a map and its copy, which differ by less than half a norm
FARTHEST = np.radians(60)  # largest angle of a copy: directions keep half of their length
PAIRS_AT_ONCE = 64  # that are compared before those within a cluster are dropped
UNLIKE_A_HEAD = 16  # exact comparisons of a head that find nothing; the most alike come first
LAYERS_NAMED = 8  # layers whose heads a text lists; findings.csv has all
SKETCHES = {"qk": ("q_sketch", "k_sketch"), "vo": ("v_sketch", "o_sketch")}

PAIRS = {"qk": ("W_Q", "W_K"), "vo": ("W_V", "W_O")}  # left and right factor

Place = tuple[int, int]  # layer and head


class SpaceLikeness(NamedTuple):
    """SpaceLikeness of the spaces of two heads' maps."""

    overlap: float  # mean squared cosine of the principal angles, of the side where it is lower
    angle: float  # the largest principal angle, radians
    cosine: float  # Frobenius cosine of the two maps; of the unshared factor if they share one
    unshared: str = ""  # the factor that the heads do not share, if they share one

    @property
    def is_copy(self) -> bool:
        """True if one head is the other, moved a little."""
        return self.cosine >= COPY and self.angle <= FARTHEST


Links = dict[tuple[int, int], SpaceLikeness]  # by the numbers of two heads
Numbered = tuple[list[int], SpaceLikeness]
Cluster = tuple[list[Place], SpaceLikeness]


duplicate_heads = finding(
    "duplicate_heads",
    "duplicate heads",
    severity="warning",
    rank=160,
    look_next="Compare the two heads' attention on text; copied layers and unbroken symmetry look "
    "like this.",
)
alike_heads = finding(
    "alike_heads",
    "heads with nearly the same spaces",
    rank=20,
    look_next="Compare the two heads' attention on text: alike in their spaces, they are not "
    "copies.",
)


def duplicates(model: Model, heads: MeasuredHeads) -> Iterator[Finding]:
    """One finding per cluster of heads in which each has the spaces of the next."""
    layers, n_heads = heads.layers.tolist(), heads.n_heads
    held: dict[int, Layer] = {}

    def heads_of(*numbers: int) -> list[Head]:
        indices = [layers[number // n_heads] for number in numbers]
        for index in {*held} - {*indices}:
            del held[index]  # before another is read
        for index in {*indices} - {*held}:
            held[index] = copy(model).layer(index)  # a copy, because a model caches its last layer
        pairs = zip(indices, numbers, strict=True)
        return [held[index].head(number % n_heads) for index, number in pairs]

    for name, sketches in SKETCHES.items():
        first, second = (heads.arrays[s].reshape(len(layers) * n_heads, -1) for s in sketches)
        similar: Links = {}

        def copies(
            a: int, b: int, name: str = name, similar: Links = similar
        ) -> SpaceLikeness | None:
            head_a, head_b = heads_of(a, b)
            likeness = likeness_of(head_a, head_b, name)
            if likeness is not None and not likeness.is_copy:
                similar[a, b] = likeness
                return None
            return likeness

        copied = list(clusters(first, second, copies, n_heads))
        cluster_of = {number: i for i, (numbers, _) in enumerate(copied) for number in numbers}
        apart = {
            (a, b): likeness
            for (a, b), likeness in similar.items()
            if cluster_of.get(a, -1) != cluster_of.get(b, -2)
        }
        for kind, groups in ((duplicate_heads, copied), (alike_heads, joined(apart))):
            by_layers: dict[tuple[int, ...], list[Cluster]] = {}
            for numbers, likeness in groups:
                places = [(layers[number // n_heads], number % n_heads) for number in numbers]
                repeated = tuple(layer for layer, _ in places)
                by_layers.setdefault(repeated, []).append((places, likeness))
            for repeated, places_alike in by_layers.items():
                # One head of each layer per cluster, for all heads: the layers repeat each other.
                if len(places_alike) == n_heads > 1 and len(set(repeated)) == len(repeated):
                    every = [place for places, _ in places_alike for place in places]
                    least = least_alike(likeness for _, likeness in places_alike)
                    text = (
                        f"{counted(len(repeated), 'layer')}, {spans(repeated)}, have the same "
                        f"spaces head by head, {counted(n_heads, 'head')} each; the least alike:"
                    )
                    yield _alike(kind, name, sorted(every), least, text)
                    continue
                for places, likeness in places_alike:
                    (_, head), (next_layer, next_head), *more = places
                    nearly = "" if kind is duplicate_heads else "nearly "
                    text = f"Its spaces are {nearly}those of layer {next_layer} head {next_head}:"
                    if more:
                        text = (
                            f"{counted(len(places), 'head')} have {nearly}the same spaces, "
                            f"{_by_layer(places)}; the least alike:"
                        )
                    yield _alike(kind, name, places, likeness, text, head)


def clusters(
    first: np.ndarray,
    second: np.ndarray,
    compare: Callable[[int, int], SpaceLikeness | None],
    n_heads: int = 1,
) -> Iterator[Numbered]:
    """Clusters of linked rows, each with its least alike link; first, second (n, s) are sketches.

    Each of a layer's `n_heads` rows is compared with the one most like it, in the order of their
    layers, then each with the next.
    """
    label = np.arange(len(first))
    links: dict[int, SpaceLikeness] = {}
    looked_up = alike(first, second, WORTH_A_LOOK)
    for _, layer_rows in groupby(looked_up, key=lambda candidates: candidates[0] // n_heads):
        unlike = np.zeros(len(first), int)
        for row, candidate in _in_turn(layer_rows, label, unlike, n_heads):
            likeness = compare(row, candidate)
            if likeness is None:
                unlike[row] += 1
                continue
            kept, merged = int(label[row]), int(label[candidate])
            known = [links[cluster] for cluster in (kept, merged) if cluster in links]
            links[kept] = least_alike([likeness, *known])
            links.pop(merged, None)
            label[label == merged] = kept
    for cluster, likeness in sorted(links.items()):
        yield np.flatnonzero(label == cluster).tolist(), likeness


def _in_turn(
    looked_up: Iterable[tuple[int, np.ndarray, np.ndarray]],
    label: np.ndarray,
    unlike: np.ndarray,
    n_heads: int,
) -> Iterator[tuple[int, int]]:
    """Each row with the one most like it, then with the next, while they are in two clusters."""
    parts = []
    for row, candidates, correlations in looked_up:
        most_alike = candidates[np.argsort(-correlations.round(2), kind="stable")]
        unlinked = most_alike[label[most_alike] != label[row]]
        places, rows = np.arange(len(unlinked)), np.full(len(unlinked), row)
        parts.append(np.stack([places, unlinked // n_heads, rows, unlinked]))
    pairs = np.concatenate(parts, axis=1)
    pairs = pairs[2:, np.lexsort(pairs[::-1])]
    while pairs.size:
        rows, others = pairs
        is_open = (label[rows] != label[others]) & (unlike[rows] < UNLIKE_A_HEAD)
        now, pairs = np.split(pairs[:, is_open], [PAIRS_AT_ONCE], axis=1)
        for row, other in now.T.tolist():
            if label[row] != label[other] and unlike[row] < UNLIKE_A_HEAD:
                yield row, other


def joined(links: Mapping[tuple[int, int], SpaceLikeness]) -> Iterator[Numbered]:
    """Clusters of rows that are linked, with the least likeness of a link."""
    groups: list[tuple[set[int], list[SpaceLikeness]]] = []
    for pair, likeness in links.items():
        touched = [group for group in groups if not group[0].isdisjoint(pair)]
        groups = [group for group in groups if group[0].isdisjoint(pair)]
        rows = set(pair).union(*(rows for rows, _ in touched))
        known = [link for _, links_of_group in touched for link in links_of_group]
        groups.append((rows, [likeness, *known]))
    for rows, likenesses in sorted(groups, key=lambda group: min(group[0])):
        yield sorted(rows), least_alike(likenesses)


def least_alike(likenesses: Iterable[SpaceLikeness]) -> SpaceLikeness:
    """The least overlap, the largest angle and the least cosine of several."""
    overlaps, angles, cosines, factors = zip(*likenesses, strict=True)
    unshared = factors[0] if len(set(factors)) == 1 else ""
    return SpaceLikeness(min(overlaps), max(angles), min(cosines), unshared)


def likeness_of(a: Head, b: Head, name: str) -> SpaceLikeness | None:
    """SpaceLikeness of the spaces of one map of two heads; None if they are not parallel."""
    map_a, map_b = (head.qk if name == "qk" else head.vo for head in (a, b))
    if np.array_equal(map_a.left, map_b.left) and np.array_equal(map_a.right, map_b.right):
        return SpaceLikeness(1.0, 0.0, 1.0)
    pairs = (map_a.left, map_b.left), (map_a.right, map_b.right)
    left, right = in_threads(lambda pair: FactorPair.of(*pair), pairs)
    cosines = [side.cosines() for side in (left, right)]
    overlaps = [float((values**2).mean()) for values in cosines]
    for overlap, width in zip(overlaps, map_a.shape, strict=True):
        chance = map_a.rank_bound / width
        if (overlap - chance) / (1 - chance) < PARALLEL:
            return None
    overlap, angle = min(overlaps), float(np.arccos(min(values.min() for values in cosines)))
    left_name, right_name = PAIRS[name]
    if np.array_equal(map_a.left, map_b.left):
        return SpaceLikeness(overlap, angle, right.cosine(), right_name)
    if np.array_equal(map_a.right, map_b.right):
        return SpaceLikeness(overlap, angle, left.cosine(), left_name)
    length = np.sqrt((left.gram_a * right.gram_a).sum() * (left.gram_b * right.gram_b).sum())
    return SpaceLikeness(overlap, angle, float((left.between * right.between).sum() / length))


@holds_arrays
class FactorPair(ShowsShapes):
    """One side of two heads' maps, with the inner products that give angles and norms."""

    a: np.ndarray  # (d, r)
    b: np.ndarray
    gram_a: np.ndarray  # (r, r) a' a
    gram_b: np.ndarray  # (r, r) b' b
    between: np.ndarray  # (r, r) a' b

    @classmethod
    def of(cls, a: np.ndarray, b: np.ndarray) -> "FactorPair":
        return cls(a, b, inner(a), inner(b), inner(a, b))

    def cosines(self) -> np.ndarray:
        """Cosines of the principal angles (r,), the largest angle first; no angle below 1e-8."""
        roots = triangle(self.a, self.gram_a), triangle(self.b, self.gram_b)
        if any(root.route != "gram" for root in roots):
            return np.cos(principal_angles(self.a, self.b))[::-1]
        inside = solve_triangular(roots[0].r, self.between, trans="T")  # Q_a' b
        inside = solve_triangular(roots[1].r, inside.T, trans="T")  # Q_b' Q_a
        return np.minimum(lapack.singular_values(inside)[::-1], 1.0)

    def cosine(self) -> float:
        """The Frobenius cosine of the two factors themselves."""
        return float(self.between.trace() / np.sqrt(self.gram_a.trace() * self.gram_b.trace()))


def _alike(
    kind: FindingKind,
    name: str,
    places: list[Place],
    likeness: SpaceLikeness,
    text: str,
    head: int | None = None,
) -> Finding:
    """A finding about heads; `text` is followed by how alike they are."""
    layer = places[0][0]
    members = [Member("head", h, None if index == layer else index) for index, h in places]
    return kind(
        layer=layer,
        head=head,
        map=name,
        measure="mean_cos2",
        number=likeness.overlap,
        text=f"{text} {_described(likeness)}.",
        members=tuple(members),
    )


def _described(likeness: SpaceLikeness) -> str:
    maps = "the two maps"
    for pair in PAIRS.values():
        if likeness.unshared in pair:
            (shared,) = {*pair} - {likeness.unshared}
            maps = f"{likeness.unshared} alone, as they share {shared}"
    angle = f"{np.degrees(likeness.angle):.1f}°"
    return (
        f"mean cos² of principal angles {likeness.overlap:.3f}, the largest angle {angle}, "
        f"Frobenius cosine {likeness.cosine:.3f} of {maps}"
    )


def _by_layer(places: Sequence[Place]) -> str:
    """Heads by layer: `layer 0 heads 0-3; layer 5 heads 2, 7`."""
    by_layer: dict[int, list[int]] = {}
    for layer, head in places:
        by_layer.setdefault(layer, []).append(head)
    named = list(by_layer.items())[:LAYERS_NAMED]
    parts = [f"layer {layer} heads {spans(heads)}" for layer, heads in named]
    if more := len(by_layer) - len(named):
        parts.append(f"and heads of {counted(more, 'layer')} more")
    return "; ".join(parts)

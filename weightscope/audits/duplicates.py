"""Heads that read and write, or score, in nearly the same spaces: one finding for each cluster of them.

Sketches of all heads are compared with each other; those that look alike are then compared exactly, unless they are in
one cluster already, so that equal heads cost one comparison each and not one per pair. Layers that repeat each other
head by head, as in a model that was made deeper by copying layers, are one finding.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.linalg import solve_triangular

from weightscope.attention.factored import inner, triangle
from weightscope.attention.layer import Head
from weightscope.audits.measures import MeasuredHeads
from weightscope.compute import lapack
from weightscope.compute.cores import in_threads
from weightscope.display import ShowsShapes
from weightscope.errors import counted
from weightscope.findings import Finding, Member, spans
from weightscope.metrics.spaces import alike, principal_angles
from weightscope.model import Model

WORTH_A_LOOK = 0.7  # correlation of sketches above which the exact angles are computed; its own error is about 0.06
PARALLEL = 0.8  # mean squared cosine of principal angles, minus chance, above which two spaces are called parallel
UNLIKE_A_HEAD = 16  # exact comparisons of a head that find nothing before it is given up; the most alike come first
LAYERS_NAMED = 8  # layers whose heads a text lists; findings.csv has all
SKETCHES = {"qk": ("q_sketch", "k_sketch"), "vo": ("v_sketch", "o_sketch")}

Place = tuple[int, int]  # layer and head
Likeness = tuple[float, float, float]  # mean squared cosine, largest angle, cosine of the maps
Cluster = tuple[list[Place], Likeness]


def duplicates(model: Model, heads: MeasuredHeads) -> Iterator[Finding]:
    """One finding per cluster of heads in which each has the spaces of the next."""
    layers, n_heads = heads.layers.tolist(), heads.n_heads
    layer_of = lru_cache(maxsize=2)(model.layer)

    def head(number: int) -> Head:
        return layer_of(layers[number // n_heads]).head(number % n_heads)

    for name, sketches in SKETCHES.items():
        first, second = (heads.arrays[sketch].reshape(len(layers) * n_heads, -1) for sketch in sketches)

        def compare(a: int, b: int, name: str = name) -> Likeness | None:
            return likeness_of(head(a), head(b), name)

        by_layers: dict[tuple[int, ...], list[Cluster]] = {}
        for numbers, likeness in clusters(first, second, compare):
            places = [(layers[number // n_heads], number % n_heads) for number in numbers]
            by_layers.setdefault(tuple(layer for layer, _ in places), []).append((places, likeness))
        for repeated, alike_heads in by_layers.items():
            # One head of each layer per cluster, for all heads: the layers repeat each other.
            if len(alike_heads) == n_heads > 1 and len(set(repeated)) == len(repeated):
                yield _repeated_layers(name, repeated, alike_heads)
            else:
                yield from (_duplicate_heads(name, *cluster) for cluster in alike_heads)


def clusters(
    first: np.ndarray, second: np.ndarray, compare: Callable[[int, int], Likeness | None]
) -> Iterator[tuple[list[int], Likeness]]:
    """Clusters of linked rows with the least likeness of a link: first, second (n, s) sketches of both sides."""
    label = np.arange(len(first))
    links: dict[int, Likeness] = {}
    for row, candidates, correlations in alike(first, second, WORTH_A_LOOK):
        unlike = 0
        for candidate in candidates[np.argsort(-correlations.round(2), kind="stable")].tolist():
            if label[row] == label[candidate]:
                continue
            likeness = compare(row, candidate)
            if likeness is not None:
                kept, merged = int(label[row]), int(label[candidate])
                links[kept] = least_alike(
                    [likeness, *(links[cluster] for cluster in (kept, merged) if cluster in links)]
                )
                links.pop(merged, None)
                label[label == merged] = kept
            elif (unlike := unlike + 1) == UNLIKE_A_HEAD:
                break
    for cluster, likeness in sorted(links.items()):
        yield np.flatnonzero(label == cluster).tolist(), likeness


def least_alike(likenesses: Iterable[Likeness]) -> Likeness:
    """The least overlap, the largest angle and the least cosine of several."""
    overlaps, angles, cosines = zip(*likenesses, strict=True)
    return min(overlaps), max(angles), min(cosines)


def likeness_of(a: Head, b: Head, name: str) -> Likeness | None:
    """How alike the spaces of one map of two heads are; None where they are not parallel."""
    map_a, map_b = (head.qk if name == "qk" else head.vo for head in (a, b))
    if np.array_equal(map_a.left, map_b.left) and np.array_equal(map_a.right, map_b.right):
        return 1.0, 0.0, 1.0
    pairs = (map_a.left, map_b.left), (map_a.right, map_b.right)
    left, right = in_threads(lambda pair: Side.of(*pair), pairs)
    cosines = [side.cosines() for side in (left, right)]
    overlaps = [float((values**2).mean()) for values in cosines]
    by_chance = map_a.rank_bound / map_a.shape[0], map_a.rank_bound / map_a.shape[1]
    for overlap, chance in zip(overlaps, by_chance, strict=True):
        if (overlap - chance) / (1 - chance) < PARALLEL:
            return None
    length = np.sqrt((left.gram_a * right.gram_a).sum() * (left.gram_b * right.gram_b).sum())
    cosine = float((left.between * right.between).sum() / length)
    return min(overlaps), float(np.arccos(min(values.min() for values in cosines))), cosine


@dataclass(frozen=True, eq=False, repr=False)
class Side(ShowsShapes):
    """The same side of two heads' maps and its inner products, from which angles and norms follow."""

    a: np.ndarray  # (d, r)
    b: np.ndarray
    gram_a: np.ndarray  # (r, r): a' a, b' b and a' b
    gram_b: np.ndarray
    between: np.ndarray

    @classmethod
    def of(cls, a: np.ndarray, b: np.ndarray) -> "Side":
        return cls(a, b, inner(a), inner(b), inner(a, b))

    def cosines(self) -> np.ndarray:
        """Cosines of the principal angles (r,), the largest angle first; angles below 1e-8 are lost in them."""
        roots = triangle(self.a, self.gram_a), triangle(self.b, self.gram_b)
        if any(root.route != "gram" for root in roots):
            return np.cos(principal_angles(self.a, self.b))[::-1]
        inside = solve_triangular(roots[0].r, self.between, trans="T")  # Q_a' b
        inside = solve_triangular(roots[1].r, inside.T, trans="T")  # Q_b' Q_a
        return np.minimum(lapack.singular_values(inside)[::-1], 1.0)


def _repeated_layers(name: str, layers: tuple[int, ...], alike_heads: list[Cluster]) -> Finding:
    """Layers all of whose heads have a counterpart in each of the others."""
    likeness = least_alike(likeness for _, likeness in alike_heads)
    text = (
        f"{counted(len(layers), 'layer')}, {spans(layers)}, have the same spaces head by head, "
        f"{counted(len(alike_heads), 'head')} each; the least alike: {_described(likeness)}."
    )
    return _finding(
        name, layers[0], None, sorted(place for places, _ in alike_heads for place in places), likeness, text
    )


def _duplicate_heads(name: str, places: list[Place], likeness: Likeness) -> Finding:
    (layer, head), (next_layer, next_head), *more = places
    if not more:
        text = f"Its spaces are those of layer {next_layer} head {next_head}: {_described(likeness)}."
    else:
        same = f"{counted(len(places), 'head')} have the same spaces, {_by_layer(places)}"
        text = f"{same}; the least alike: {_described(likeness)}."
    return _finding(name, layer, head, places, likeness, text)


def _finding(
    name: str, layer: int, head: int | None, places: Sequence[Place], likeness: Likeness, text: str
) -> Finding:
    members = tuple(Member("head", h, None if member_layer == layer else member_layer) for member_layer, h in places)
    return Finding(
        kind="duplicate_heads", layer=layer, head=head, map=name, measure="mean_cos2", number=likeness[0], text=text,
        members=members,
    )  # fmt: skip


def _described(likeness: Likeness) -> str:
    overlap, angle, cosine = likeness
    return (
        f"mean cos² of principal angles {overlap:.3f}, the largest angle {np.degrees(angle):.1f}°, "
        f"Frobenius cosine of the two maps {cosine:.3f}"
    )


def _by_layer(places: Sequence[Place]) -> str:
    """Heads by layer: `layer 0 heads 0-3; layer 5 heads 2, 7`."""
    by_layer: dict[int, list[int]] = {}
    for layer, head in places:
        by_layer.setdefault(layer, []).append(head)
    shown = [f"layer {layer} heads {spans(heads)}" for layer, heads in list(by_layer.items())[:LAYERS_NAMED]]
    more = len(by_layer) - len(shown)
    return "; ".join([*shown, *([f"and those of {counted(more, 'layer')} more"] if more else [])])

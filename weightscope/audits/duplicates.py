"""Heads that read and write, or ask and answer, in nearly the same spaces: a finding for each cluster of them.

Layers that repeat each other head by head, as those of a model do that was made deeper by copying, are one finding.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.linalg import solve_triangular

from weightscope import lapack
from weightscope.attention.factored import inner, triangle
from weightscope.attention.head import Head
from weightscope.audits.findings import Finding, Member, spans
from weightscope.audits.measures import MeasuredHeads
from weightscope.errors import counted
from weightscope.metrics.spaces import alike, principal_angles
from weightscope.model import Model
from weightscope.parallel import in_threads
from weightscope.shapes import ShowsShapes

WORTH_A_LOOK = 0.7  # correlation of sketches from which on the exact angles are computed; its own error is about 0.06
PARALLEL = 0.8  # mean squared cosine of principal angles, chance aside, from which on two spaces are called parallel
UNLIKE_A_HEAD = 16  # exact comparisons of a head that find nothing; the most alike come first
LAYERS_NAMED = 8  # layers of which a text names the heads; findings.csv has all
SKETCHES = {"qk": ("q_sketch", "k_sketch"), "vo": ("v_sketch", "o_sketch")}

Place = tuple[int, int]  # layer and head
Likeness = tuple[float, float, float]  # mean squared cosine, largest angle, cosine of the maps


def duplicates(model: Model, heads: MeasuredHeads) -> Iterator[Finding]:
    """A finding for each cluster of heads of which one has the spaces of the next.

    Sketches of all heads are compared with each other, and those that look alike are compared exactly, unless they are
    in one cluster already: so that equal heads cost one comparison each and not one for every pair.
    """
    layers, n_heads = heads.layers.tolist(), heads.n_heads
    layer_of = lru_cache(maxsize=2)(model.layer)

    def head(at: int) -> Head:
        return layer_of(layers[at // n_heads]).head(at % n_heads)

    for name, sketches in SKETCHES.items():
        first, second = (heads.arrays[sketch].reshape(len(layers) * n_heads, -1) for sketch in sketches)

        def compare(one: int, other: int, name: str = name) -> Likeness | None:
            return _compare(head(one), head(other), name)

        by_layers: dict[tuple[int, ...], list[tuple[list[Place], Likeness]]] = {}
        for cluster, likeness in clusters(first, second, compare):
            places = [(layers[at // n_heads], at % n_heads) for at in cluster]
            by_layers.setdefault(tuple(layer for layer, _ in places), []).append((places, likeness))
        for of, found in by_layers.items():
            if len(found) == n_heads > 1 and len(set(of)) == len(of):  # one head of each layer, and so for all heads
                yield _repeated(name, of, found)
            else:
                yield from (_finding(name, places, likeness) for places, likeness in found)


def clusters(
    first: np.ndarray, second: np.ndarray, compare: Callable[[int, int], Likeness | None]
) -> Iterator[tuple[list[int], Likeness]]:
    """Rows that are linked by likeness, and the least likeness of a link, one after another.

    Parameters
    ----------
    first, second : (n, s) arrays
        Sketches of the two spaces of each head.
    compare : function of two rows
        Their exact likeness; None where they are not alike.
    """
    label = np.arange(len(first))
    links: dict[int, Likeness] = {}
    for one, others, correlations in alike(first, second, WORTH_A_LOOK):
        unlike = 0
        for other in others[np.argsort(-correlations.round(2), kind="stable")].tolist():
            if label[one] == label[other]:
                continue
            found = compare(one, other)
            if found is not None:
                of, gone = int(label[one]), int(label[other])
                links[of] = least_alike([found, *(links[of] for of in (of, gone) if of in links)])
                links.pop(gone, None)
                label[label == gone] = of
            elif (unlike := unlike + 1) == UNLIKE_A_HEAD:
                break
    for of, likeness in sorted(links.items()):
        yield np.flatnonzero(label == of).tolist(), likeness


def least_alike(known: Iterable[Likeness]) -> Likeness:
    """The least overlap, the largest angle and the least cosine of several."""
    overlaps, angles, cosines = zip(*known, strict=True)
    return min(overlaps), max(angles), min(cosines)


def _repeated(name: str, layers: tuple[int, ...], found: list[tuple[list[Place], Likeness]]) -> Finding:
    """A finding of layers all of whose heads have a counterpart in each of the others."""
    likeness = least_alike(own for _, own in found)
    text = (
        f"{counted(len(layers), 'layer')}, {spans(list(layers))}, have the same spaces head by head, "
        f"{counted(len(found), 'head')} each; the least alike: {_measured(likeness)}."
    )
    places = sorted(place for own, _ in found for place in own)
    members = tuple(Member("head", head, None if of == layers[0] else of) for of, head in places)
    return Finding("duplicate_heads", layers[0], None, name, "mean_cos2", likeness[0], None, text, members)


def _measured(likeness: Likeness) -> str:
    overlap, angle, cosine = likeness
    return (
        f"mean cos² of principal angles {overlap:.3f}, the largest angle {np.degrees(angle):.1f}°, "
        f"Frobenius cosine of the two maps {cosine:.3f}"
    )


def _finding(name: str, places: list[Place], likeness: Likeness) -> Finding:
    (layer, head), *others = places
    measured = _measured(likeness)
    if len(others) == 1:
        text = f"Its spaces are those of layer {others[0][0]} head {others[0][1]}: {measured}."
    else:
        text = f"{counted(len(places), 'head')} have the same spaces, {_named(places)}; the least alike: {measured}."
    members = tuple(Member("head", h, None if of == layer else of) for of, h in places)
    return Finding("duplicate_heads", layer, head, name, "mean_cos2", likeness[0], None, text, members)


def _named(places: list[Place]) -> str:
    """Heads by layer: `layer 0 heads 0-3; layer 5 heads 2, 7`."""
    by_layer: dict[int, list[int]] = {}
    for layer, head in places:
        by_layer.setdefault(layer, []).append(head)
    shown = [f"layer {layer} heads {spans(heads)}" for layer, heads in list(by_layer.items())[:LAYERS_NAMED]]
    more = len(by_layer) - len(shown)
    return "; ".join([*shown, *([f"and those of {counted(more, 'layer')} more"] if more else [])])


def _compare(one: Head, other: Head, name: str) -> Likeness | None:
    """Mean squared cosine and largest of the principal angles, the maps' cosine; None where not parallel."""
    a, b = (head.qk if name == "qk" else head.vo for head in (one, other))
    if np.array_equal(a.left, b.left) and np.array_equal(a.right, b.right):
        return 1.0, 0.0, 1.0
    left, right = in_threads(lambda pair: Side.of(*pair), ((a.left, b.left), (a.right, b.right)))
    cosines = [side.cosines() for side in (left, right)]
    overlaps = [float((own**2).mean()) for own in cosines]
    by_chance = a.rank_bound / a.shape[0], a.rank_bound / a.shape[1]
    if any((own - chance) / (1 - chance) < PARALLEL for own, chance in zip(overlaps, by_chance, strict=True)):
        return None
    length = np.sqrt((left.own * right.own).sum() * (left.others * right.others).sum())
    cosine = float((left.between * right.between).sum() / length)
    return min(overlaps), float(np.arccos(min(own.min() for own in cosines))), cosine


@dataclass(frozen=True, eq=False, repr=False)
class Side(ShowsShapes):
    """The same side of two heads' maps by its inner products, from which angles and norms follow.

    Attributes
    ----------
    one, other : (d, r) arrays
    own, others, between : float64 (r, r) arrays
        one' one, other' other and one' other.
    """

    one: np.ndarray
    other: np.ndarray
    own: np.ndarray
    others: np.ndarray
    between: np.ndarray

    @classmethod
    def of(cls, one: np.ndarray, other: np.ndarray) -> "Side":
        return cls(one, other, inner(one), inner(other), inner(one, other))

    def cosines(self) -> np.ndarray:
        """Of the principal angles, (r,), the largest angle first; angles below 1e-8 are lost in their cosines."""
        roots = triangle(self.one, self.own), triangle(self.other, self.others)
        if any(root.route != "gram" for root in roots):
            return np.cos(principal_angles(self.one, self.other))[::-1]
        inside = solve_triangular(roots[0].r, self.between, trans="T")  # Q_one' other
        inside = solve_triangular(roots[1].r, inside.T, trans="T")  # Q_other' Q_one
        return np.minimum(lapack.singular_values(inside)[::-1], 1.0)

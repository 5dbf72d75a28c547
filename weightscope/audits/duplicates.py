"""Heads that read and write, or ask and answer, in nearly the same spaces: a finding for each cluster of them."""

from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np

from weightscope.attention.head import Head
from weightscope.audits.findings import Finding, Member, spans
from weightscope.audits.measures import MeasuredHeads
from weightscope.errors import counted
from weightscope.metrics.spaces import alike, frobenius_cosine, principal_angles
from weightscope.model import Model

WORTH_A_LOOK = 0.7  # correlation of sketches from which on the exact angles are computed; its own error is about 0.06
PARALLEL = 0.8  # mean squared cosine of principal angles, chance aside, from which on two spaces are called parallel
UNLIKE_A_HEAD = 16  # exact comparisons of a head that find nothing; the most alike come first
LAYERS_NAMED = 8  # layers of which a text names the heads; findings.csv has all
SKETCHES = {"qk": ("q_sketch", "k_sketch"), "vo": ("v_sketch", "o_sketch")}

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

        for cluster, likeness in clusters(first, second, compare):
            yield _finding(name, [(layers[at // n_heads], at % n_heads) for at in cluster], likeness)


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
                known = [found, *(links[of] for of in (of, gone) if of in links)]
                overlaps, angles, cosines = zip(*known, strict=True)
                links[of] = min(overlaps), max(angles), min(cosines)
                links.pop(gone, None)
                label[label == gone] = of
            elif (unlike := unlike + 1) == UNLIKE_A_HEAD:
                break
    for of, likeness in sorted(links.items()):
        yield np.flatnonzero(label == of).tolist(), likeness


def _finding(name: str, places: list[tuple[int, int]], likeness: Likeness) -> Finding:
    overlap, angle, cosine = likeness
    (layer, head), *others = places
    measured = (
        f"mean cos² of principal angles {overlap:.3f}, the largest angle {np.degrees(angle):.1f}°, "
        f"Frobenius cosine of the two maps {cosine:.3f}"
    )
    if len(others) == 1:
        text = f"Its spaces are those of layer {others[0][0]} head {others[0][1]}: {measured}."
    else:
        text = f"{counted(len(places), 'head')} have the same spaces, {_named(places)}; the least alike: {measured}."
    members = tuple(Member("head", h, None if of == layer else of) for of, h in places)
    return Finding("duplicate_heads", layer, head, name, "mean_cos2", overlap, None, text, members)


def _named(places: list[tuple[int, int]]) -> str:
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
    overlaps, largest = [], []
    for x, y in ((a.left, b.left), (a.right, b.right)):
        d, r = x.shape
        angles = principal_angles(x, y)
        by_chance = r / d
        squared = float((np.cos(angles) ** 2).mean())
        if (squared - by_chance) / (1 - by_chance) < PARALLEL:
            return None
        overlaps.append(squared)
        largest.append(float(angles[-1]))
    return min(overlaps), max(largest), frobenius_cosine(a.left, a.right, b.left, b.right)

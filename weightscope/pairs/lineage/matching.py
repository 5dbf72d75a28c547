"""Match a suspect's layers and heads with a base's, by three routes, with probabilities.

A comparison of sketches uses one half of their numbers to choose heads and layers, and the other
half to measure how alike the chosen ones are. For two checkpoints that share nothing, that likeness
has mean zero and a known standard deviation, whatever was chosen.

Where the weights of both are at hand, sketches only say which pairs to look at. How alike these are
is the cosine of their maps, <W, W'> = tr((A'A~)(B~'B)) for W = AB', which no draw of signs changes;
see `_examined`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log, sqrt
from typing import NamedTuple

import numpy as np

from weightscope.core.compute.cores import in_threads
from weightscope.core.errors import CheckpointError
from weightscope.core.results import ShowsShapes
from weightscope.model.layers.factored import Factored, inner_products
from weightscope.pairs.changes.token_order import TokenOrder
from weightscope.pairs.lineage.neurons import usable
from weightscope.pairs.lineage.sketches import (
    FINELY,
    SKETCH,
    Sketches,
    maps_of,
    token_basis,
    token_ids,
)

HALF = SKETCH // 2
ROUTES = {  # in words, strongest evidence first
    "direct": "heads in the stream's own basis",
    "tokens": "heads seen through the token embeddings",
    "spectra": "singular values of heads",
}
# How alike unrelated checkpoints are beyond chance, mean and standard deviation over strangers
# (docs/lineage.md).
BACKGROUND = {"direct": (0.0, 0.01), "tokens": (0.0, 0.01)}
SURE = 6.0  # z from which a likeness is higher than strangers reach
LEAST = 0.05  # likeness that two layers need to be called counterparts
# of the counterparts' likeness: where all other heads are alike too, they show nothing
SHARED = 0.2
CHI_SQUARED = 0.455  # median of a normal variable's square, over its mean
SHOWN = 2.0  # z of a layer within a run that needs no such likeness
# a route through fewer shows strangers' matrices alike, and the best of them as counterparts
DIMENSIONS = 12
JUMP = 0.05  # cost, in likeness, of any step but the one to the base's next layer
# Of spectra: mean distance of logarithms of singular values.
NEAR = 0.5  # a counterpart is nearer than the next layer by this factor
SURE_BY_SPECTRA = 1e-6  # probability below which singular values do not belong to strangers
BY_CHANCE = 0.05  # share of layers of strangers that are (docs/lineage.md); in most pairs none is
FEWEST = 4  # layers that spectra are judged by
SMALLEST = 3  # points of a spectrum that one dropped singular value may change
# Pairs of heads times the heads of a layer, which the assignments of a comparison take; of 405B
# with 405B, 3e10.
MOST_STEPS = 10**11
TINY = 1e-45  # a norm that is zero in float32, which sketches are kept in
# pairs of heads, evenly spread, that show how alike those are that are not counterparts
LOOKED_AT = 1 << 22
# so few pairs of heads that sketches do not tell that: then this many are examined by weights
FEW = 1 << 12
EXAMINED = 256

Ids = tuple[np.ndarray, np.ndarray]  # tokens of the suspect and their counterparts in the base


@dataclass(frozen=True, eq=False, repr=False)
class Match(ShowsShapes):
    """Counterparts of a suspect's layers in one base, by one route."""

    route: str  # a key of `ROUTES`
    # (L_s, L_b) mean cosine of matched heads; of spectra, 1 - distance / usual distance
    likeness: np.ndarray
    # for each layer of the suspect, the place of its counterpart in the base
    layers: list[int | None]
    heads: list[np.ndarray]  # (H,) each: the counterpart of each head, or -1
    z: np.ndarray  # (L_s,) standard deviations between a layer's likeness and a stranger's
    # natural logarithm of the probability that strangers are this alike, over all layers
    log_p: float
    elsewhere: float = 0.0  # median cosine of heads that are not counterparts
    # which tokens are counterparts, if they were found by their embeddings
    order: TokenOrder | None = None

    @property
    def is_sure(self) -> bool:
        """True if strangers would not be this alike."""
        likely = log(SURE_BY_SPECTRA) if self.route == "spectra" else log_tail(SURE)
        return self.log_p < likely and not self.is_everywhere

    @property
    def is_everywhere(self) -> bool:
        """True if other heads are alike too, so that likeness shows no common origin."""
        return self.elsewhere > SHARED * self.mean

    @property
    def unpaired(self) -> np.ndarray:
        """The likeness of all other pairs of layers, (L_s, L_b); NaN of counterparts."""
        # None is NaN
        counterparts = np.array(self.layers, float)[:, None] == np.arange(self.likeness.shape[1])
        return np.where(counterparts, np.nan, self.likeness)

    @property
    def mean(self) -> float:
        """Mean likeness of counterparts; 0 without any."""
        pairs = [self.likeness[i, j] for i, j in enumerate(self.layers) if j is not None]
        return float(np.mean(pairs)) if pairs else 0.0


def log_tail(z: float) -> float:
    """Natural logarithm of the probability that a standard normal variable exceeds z."""
    from scipy.special import log_ndtr

    return float(log_ndtr(-z))


def matches(suspect: Sketches, base: Sketches) -> dict[str, Match]:
    """A match by each route that the two checkpoints allow."""
    largest = max(int(np.unique(s.layer, return_counts=True)[1].max()) for s in (suspect, base))
    if (steps := len(suspect.layer) * len(base.layer) * largest) > MOST_STEPS:
        problem = f"comparing its {len(base.layer):,} heads, up to {largest:,} a layer, with the suspect's"
        raise CheckpointError(
            f"{problem} {len(suspect.layer):,} takes {steps:.1g} steps; at most {MOST_STEPS:.0e}",
            file=base.name,
        )
    by_route = {}
    for route in ("direct", "tokens"):
        x, y = getattr(suspect, route), getattr(base, route)
        same = route == "tokens" or suspect.about["d_model"] == base.about["d_model"]
        dimensions = min(_dimensions(route, sketches) for sketches in (suspect, base))
        if same and dimensions >= DIMENSIONS and x.shape[-1] and y.shape[-1]:
            by_route[route] = _by_sketches(route, suspect, base, x, y)
    by_route["spectra"] = _by_spectra(suspect, base)
    return by_route


def match_through(suspect: Sketches, base: Sketches, order: TokenOrder) -> Match:
    """A match through tokens that are counterparts, whatever their numbers."""
    x, y = (each.through(ids) for each, ids in ((suspect, order.suspect), (base, order.base)))
    return replace(
        _by_sketches("tokens", suspect, base, x, y, (order.suspect, order.base)), order=order
    )


def _dimensions(route: str, sketches: Sketches) -> int:
    """Dimensions of the stream that a route sees; centring embeddings costs one."""
    width, vocabulary = sketches.about["d_model"], sketches.about["vocabulary"]
    return min(width, vocabulary - 1) if route == "tokens" and vocabulary else width


def _by_sketches(
    route: str,
    suspect: Sketches,
    base: Sketches,
    x: np.ndarray,
    y: np.ndarray,
    ids: Ids | None = None,
) -> Match:
    """Match by cosines: one half of the sketches chooses, the other half or weights measure."""
    shape = len(suspect.layers), len(base.layers)
    first, second = np.zeros(shape), np.zeros(shape)
    orders: dict[tuple[int, int], np.ndarray] = {}
    of_suspect = [suspect.of_layer(layer) for layer in suspect.layers]
    of_base = [base.of_layer(layer) for layer in base.layers]
    # an odd step takes heads of every index
    seen = np.arange(0, len(y), len(x) * len(y) // LOOKED_AT | 1)
    sampled_cosines = np.empty((len(x), len(seen)), np.float32)
    for i, heads in enumerate(of_suspect):
        chosen, judged = (
            _cosines(x[heads][..., half], y[..., half]) for half in (slice(HALF), slice(HALF, None))
        )
        sampled_cosines[heads] = judged[:, seen]
        for j, candidates in enumerate(of_base):
            order = assign_heads(chosen[:, candidates])
            orders[i, j] = order
            kept = np.flatnonzero(order >= 0)
            first[i, j] = chosen[kept, candidates[order[kept]]].sum() / len(heads)
            second[i, j] = judged[kept, candidates[order[kept]]].sum() / len(heads)
    (mean, spread), least, shown = BACKGROUND[route], LEAST + _luck(base), SHOWN
    maps = _maps_of_both(route, suspect, base, ids)
    if maps is None:
        layers = align_layers(first, least)
    else:
        mean, shown = _luck_of_maps(maps), np.inf
        first, layers = _examined(maps, first, (least, LEAST + mean), orders, x, y)
        least = LEAST + mean
        second = np.where(np.isnan(first), second, first)
    counts = np.array([len(suspect.of_layer(layer)) for layer in suspect.layers])
    alike = np.array([second[i, j] if j is not None else 0.0 for i, j in enumerate(layers)])
    z = (alike - mean) / np.sqrt(1 / (2 * HALF * counts) + spread**2)
    paired = np.array([j is not None for j in layers])
    total = counts[paired].sum()
    mean_alike = (alike[paired] * counts[paired]).sum() / max(1, total)
    log_p = (
        log_tail((mean_alike - mean) / sqrt(1 / (2 * HALF * total) + spread**2)) if total else 0.0
    )
    # Skipping a layer within a run costs a path two jumps, so it may go through an unlike one.
    layers = [
        None if j is None or (first[i, j] < least and z[i] < shown) else j
        for i, j in enumerate(layers)
    ]
    paired = np.array([j is not None for j in layers])
    matched = [orders[i, j] if j is not None else np.empty(0, int) for i, j in enumerate(layers)]
    taken = np.full(len(x), -1)
    for heads, place, order in zip(of_suspect, layers, matched, strict=True):
        if place is not None:
            kept = np.flatnonzero(order >= 0)
            taken[heads[kept]] = of_base[place][order[kept]]
    rest, chance = sampled_cosines[taken[:, None] != seen], 1 / (2 * HALF)
    if maps is not None and paired.any() and len(x) * len(y) <= FEW:
        rest, chance = _rest_of_maps(maps, taken), 1 / (2 * _dimensions_of_maps(maps) ** 2)
    square = float(np.median(rest**2)) / CHI_SQUARED if len(rest) else 0.0
    elsewhere = sqrt(max(0.0, square - chance))
    return Match(
        route, second, layers, matched, np.where(paired, z, np.nan), min(0.0, log_p), elsewhere
    )


def _cosines(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Mean over both maps of the cosines of sketches: (N_s, 2, k), (N_b, 2, k) -> (N_s, N_b)."""
    x, y = (usable(side) for side in (x, y))
    x, y = (
        side / np.maximum(np.linalg.norm(side, axis=-1, keepdims=True), 1e-30) for side in (x, y)
    )
    return np.einsum("smk,bmk->sb", x, y, optimize=True) / 2


def _luck(base: Sketches) -> float:
    """Expected likeness of the best of strangers' heads, in the half that chooses them."""
    most = max(len(base.of_layer(layer)) for layer in base.layers)
    return sqrt(2 * log(max(2, most)) / (2 * HALF))


class Maps(NamedTuple):
    """Both checkpoints' weights, and the token bases (m, d) that maps are seen through."""

    suspect: Sketches
    base: Sketches
    through: tuple[np.ndarray | None, np.ndarray | None] = (None, None)

    def cosines(self, i: int, j: int, pairs: Sequence[tuple[int, int]]) -> list[float]:
        """Mean cosine of both maps of each pair of heads, by the places of their layers."""
        assert self.suspect.source is not None and self.base.source is not None
        a, b = (
            self.suspect.source.layer(self.suspect.layers[i]),
            self.base.source.layer(self.base.layers[j]),
        )

        def of_pair(pair: tuple[int, int]) -> float:
            both = zip(
                *(maps_of(*each) for each in zip((a, b), pair, self.through, strict=True)),
                strict=True,
            )
            return float(np.mean([_cosine(x, y) for x, y in both]))

        return list(in_threads(of_pair, pairs))


def _maps_of_both(route: str, suspect: Sketches, base: Sketches, ids: Ids | None) -> Maps | None:
    """The weights and bases for exact cosines; None if the weights of one are missing."""
    if suspect.source is None or base.source is None:
        return None
    if route == "direct":
        return Maps(suspect, base)
    ids = ids or (token_ids(min(suspect.about["vocabulary"], base.about["vocabulary"])),) * 2
    of_suspect = token_basis(suspect.source, ids[0], suspect.probes, FINELY)
    of_base = token_basis(base.source, ids[1], base.probes, FINELY)
    return (
        None
        if of_suspect is None or of_base is None
        else Maps(suspect, base, (of_suspect, of_base))
    )


def _luck_of_maps(maps: Maps) -> float:
    """Expected best cosine of strangers' heads; of d x d maps its deviation is 1 / d."""
    most = max(len(maps.base.of_layer(layer)) for layer in maps.base.layers)
    return sqrt(log(max(2, most))) / _dimensions_of_maps(maps)


def _dimensions_of_maps(maps: Maps) -> int:
    """The smallest width that maps are seen in."""
    widths = [each.about["d_model"] for each in (maps.suspect, maps.base)]
    return min([*widths, *(len(basis) for basis in maps.through if basis is not None)])


def _rest_of_maps(maps: Maps, taken: np.ndarray) -> np.ndarray:
    """Exact cosines of some pairs of heads that are not counterparts; taken (N_s,)."""
    a, b = np.nonzero(taken[:, None] != np.arange(len(maps.base.layer)))
    step = -(-len(a) // EXAMINED) | 1  # an odd step takes heads of every index
    by_layers: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for s, t in zip(a[::step].tolist(), b[::step].tolist(), strict=True):
        place = (
            maps.suspect.layers.index(maps.suspect.layer[s]),
            maps.base.layers.index(maps.base.layer[t]),
        )
        by_layers.setdefault(place, []).append((int(maps.suspect.head[s]), int(maps.base.head[t])))
    return np.array(
        [cosine for place, pairs in by_layers.items() for cosine in maps.cosines(*place, pairs)]
    )


def _cosine(w: Factored, other: Factored) -> float:
    """Cosine of two maps without their traces, which copying heads have from the start.

    0 if one is zero in float32.
    """
    # <W, W> = tr(L'L R'R), and likewise <W', W'> and <W, W'>
    sides = inner_products(w.left, other.left), inner_products(w.right, other.right)
    products = np.array(
        [(of_left * of_right).sum() for of_left, of_right in zip(*sides, strict=True)]
    )
    if w.shape[0] == w.shape[1]:
        x, y = (
            float(np.einsum("dr,dr->", each.left, each.right, dtype=np.float64))
            for each in (w, other)
        )
        products -= np.array([x * x, y * y, x * y]) / w.shape[0]
    if sqrt(max(0.0, products[:2].min())) < TINY:
        return 0.0
    return float(products[2] / sqrt(products[0] * products[1]))


def _examined(
    maps: Maps,
    first: np.ndarray,
    least: tuple[float, float],
    orders: dict[tuple[int, int], np.ndarray],
    x: np.ndarray,
    y: np.ndarray,
) -> tuple[np.ndarray, list[int | None]]:
    """Exact likeness of layers (L_s, L_b), NaN where sketches show too little, and the path.

    The nearest layer by sketches is looked at for each of the suspect's, and then whatever the best
    path leads through, until nothing on it rests on an estimate. `least` is what counterparts need:
    by sketches, and exactly. Two layers are in memory at a time.
    """
    exact = np.full(first.shape, np.nan)
    estimate = np.where(first < least[0], 0.0, first)
    layers: list[int | None] = [int(j) for j in first.argmax(axis=1)]
    while new := [(i, j) for i, j in enumerate(layers) if j is not None and np.isnan(exact[i, j])]:
        for i, j in new:
            exact[i, j], orders[i, j] = _exact_likeness(maps, i, j, x, y)
        layers = align_layers(np.where(np.isnan(exact), estimate, exact), least[1])
    return exact, layers


def _exact_likeness(
    maps: Maps, i: int, j: int, x: np.ndarray, y: np.ndarray
) -> tuple[float, np.ndarray]:
    """Mean cosine of two layers' heads and their assignment: by sketches, or in place."""
    rows, columns = (
        maps.suspect.of_layer(maps.suspect.layers[i]),
        maps.base.of_layer(maps.base.layers[j]),
    )
    tried = [assign_heads(_cosines(x[rows], y[columns]))]
    if len(rows) == len(columns):
        tried.append(np.arange(len(rows), dtype=np.int32))
    pairs = list(
        dict.fromkeys(
            (h, int(order[h])) for order in tried for h in range(len(rows)) if order[h] >= 0
        )
    )
    cosines = dict(zip(pairs, maps.cosines(i, j, pairs), strict=True))
    likeness = [
        sum(cosines.get((h, int(g)), 0.0) for h, g in enumerate(order)) / len(rows)
        for order in tried
    ]
    best = int(np.argmax(likeness))
    return likeness[best], tried[best]


def assign_heads(scores: np.ndarray) -> np.ndarray:
    """The column of each row that maximises the sum, none taken twice; -1 if none is left.

    scores (H_s, H_b) -> (H_s,). A score that is not finite, of weights that overflow, speaks for no
    pair.
    """
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(np.where(np.isfinite(scores), scores, 0.0), maximize=True)
    order = np.full(len(scores), -1, np.int32)
    order[rows] = columns
    return order


def align_layers(likeness: np.ndarray, least: float) -> list[int | None]:
    """The counterpart of each layer, or None: the most similar layers, preferably in runs.

    Dynamic programming (Viterbi) finds the best path: a step to the base's next layer is free, any
    other step costs JUMP, and a layer without a counterpart is worth `least`. likeness (L_s, L_b).
    """
    n, m = likeness.shape
    worth = np.concatenate([likeness, np.full((n, 1), least)], axis=1)  # the last column: none
    best, came = worth[0].copy(), np.zeros((n, m + 1), int)
    for i in range(1, n):
        jump = int(best.argmax())
        value = np.full(m + 1, best[jump] - JUMP)
        came[i] = jump
        on = best[: m - 1] > value[1:m]
        value[1:m] = np.where(on, best[: m - 1], value[1:m])
        came[i, 1:m] = np.where(on, np.arange(m - 1), came[i, 1:m])
        if best[m] > value[m]:
            value[m], came[i, m] = best[m], m
        best = value + worth[i]
    path = [int(best.argmax())]
    for i in range(n - 1, 0, -1):
        path.append(int(came[i, path[-1]]))
    return [j if j < m else None for j in reversed(path)]


def _by_spectra(suspect: Sketches, base: Sketches) -> Match:
    """Match by singular values: a counterpart is much nearer than the second nearest layer."""
    from scipy.spatial.distance import cdist

    of_base = [base.of_layer(layer) for layer in base.layers]
    shape = len(suspect.layers), len(base.layers)
    distance, orders = np.zeros(shape), {}
    for i, layer in enumerate(suspect.layers):
        x, y = (
            s.reshape(len(s), -1) for s in (suspect.spectra[suspect.of_layer(layer)], base.spectra)
        )
        apart = cdist(x, y, "cityblock") / x.shape[1]  # (H_s, N_b)
        for j, candidates in enumerate(of_base):
            inside = apart[:, candidates]
            orders[i, j] = order = assign_heads(-inside)
            kept = np.flatnonzero(order >= 0)
            distance[i, j] = inside[kept, order[kept]].mean()
    usual = np.median(distance)
    likeness = 1 - distance / (usual or 1.0)
    if shape[1] < 2 or shape[0] < FEWEST:
        return Match(
            "spectra",
            likeness,
            [None] * shape[0],
            [np.empty(0, int)] * shape[0],
            np.full(shape[0], np.nan),
            0.0,
        )
    best = distance.argmin(axis=1)
    nearest = distance[np.arange(len(best)), best]
    rest = distance.copy()
    rest[np.arange(len(best)), best] = np.inf
    ratio = nearest / np.maximum(rest.min(axis=1), 1e-12)
    near = ratio < NEAR
    layers = [int(j) if is_near else None for j, is_near in zip(best, near, strict=True)]
    heads = [orders[i, j] if j is not None else np.empty(0, int) for i, j in enumerate(layers)]
    # one layer of a base may be the nearest to all of a stranger's
    counterparts = len(set(best[near].tolist()))
    log_p = _log_binomial(counterparts, len(near), BY_CHANCE)
    z = np.where(near, -np.log(np.maximum(ratio, 1e-12)), np.nan)
    return Match("spectra", likeness, layers, heads, z, log_p)


def without_smallest(suspect: Sketches, base: Sketches) -> Match:
    """Match by all singular values but the smallest, which differ where even one was dropped."""
    return _by_spectra(
        *(replace(each, spectra=each.spectra[..., :-SMALLEST]) for each in (suspect, base))
    )


def _log_binomial(successes: int, trials: int, chance: float) -> float:
    """Logarithm of the probability of at least this many successes."""
    from scipy.special import betainc

    return (
        log(max(betainc(successes, trials - successes + 1, chance), 1e-300)) if successes else 0.0
    )

"""Match a suspect's layers and heads with a base's, by three routes, with probabilities.

A comparison of sketches uses one half of their numbers to choose heads and layers, and the other
half to measure how alike the chosen ones are. For two checkpoints that share nothing, that likeness
has mean zero and a known standard deviation, whatever was chosen.

Where the weights of both are at hand, sketches only say which pairs to look at. How alike these are
is the cosine of their maps, <W, W'> = tr((A'A~)(B~'B)) for W = AB', which no draw of signs changes;
see `_examined`.
"""

from collections import defaultdict
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
# Likeness of unrelated checkpoints beyond chance, mean and standard deviation (docs/lineage.md)
BACKGROUND = {"direct": (0.0, 0.01), "tokens": (0.0, 0.01)}
SURE = 6.0  # z from which a likeness is higher than strangers reach
LEAST = 0.05  # likeness that two layers need to be called counterparts
SHARED = 0.2  # share of the counterparts' likeness; other heads this alike make it no evidence
CHI_SQUARED = 0.455  # median of a normal variable's square, over its mean
SHOWN = 2.0  # z of a layer within a run that needs no such likeness
DIMENSIONS = 12  # fewest of a stream; in fewer, strangers' matrices look like counterparts
JUMP = 0.05  # cost, in likeness, of any step but the one to the base's next layer
# Spectra are compared by the mean distance of logarithms of singular values.
NEAR = 0.5  # a counterpart is nearer than the next layer by this factor
SURE_BY_SPECTRA = 1e-6  # probability below which singular values do not belong to strangers
BY_CHANCE = 0.05  # share of layers of strangers that are (docs/lineage.md); in most pairs none is
FEWEST = 4  # layers that spectra are judged by
SMALLEST = 3  # points of a spectrum that one dropped singular value may change
MOST_STEPS = 10**11  # pairs of heads times heads of a layer; 405B with 405B takes 3e10
TINY = 1e-45  # norm that is zero in float32, which sketches are kept in
LOOKED_AT = 1 << 22  # pairs of heads, evenly spread, that show the likeness of other heads
FEW = 1 << 12  # pairs of heads below which sketches do not show that, and weights are needed
EXAMINED = 256  # pairs that are examined by weights then

Ids = tuple[np.ndarray, np.ndarray]  # tokens of the suspect and their counterparts in the base


@dataclass(frozen=True, eq=False, repr=False)
class Match(ShowsShapes):
    """Counterparts of a suspect's layers in one base, by one route."""

    route: str  # a key of `ROUTES`
    # (L_s, L_b) mean cosine of matched heads; of spectra, 1 - distance / usual distance
    likeness: np.ndarray
    layers: list[int | None]  # place of each layer's counterpart in the base
    heads: list[np.ndarray]  # (H,) each: the counterpart of each head, or -1
    z: np.ndarray  # (L_s,) standard deviations between a layer's likeness and a stranger's
    log_p: float  # natural logarithm of strangers' chance to be this alike, over all layers
    elsewhere: float = 0.0  # median cosine of heads that are not counterparts
    order: TokenOrder | None = None  # tokens that are counterparts, if embeddings showed them

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
        places = np.array(self.layers, float)  # NaN for None
        counterparts = places[:, None] == np.arange(self.likeness.shape[1])
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
    heads, of_base = len(suspect.layer), len(base.layer)
    steps = heads * of_base * largest
    if steps > MOST_STEPS:
        compared = f"comparing its {of_base:,} heads, up to {largest:,} a layer"
        problem = f"{compared}, with the suspect's {heads:,} takes {steps:.1g} steps"
        raise CheckpointError(f"{problem}; at most {MOST_STEPS:.0e}", file=base.name)
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
    x, y = suspect.through(order.suspect), base.through(order.base)
    match = _by_sketches("tokens", suspect, base, x, y, (order.suspect, order.base))
    return replace(match, order=order)


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
    of_suspect = [suspect.of_layer(layer) for layer in suspect.layers]
    of_base = [base.of_layer(layer) for layer in base.layers]
    halves = _by_halves(x, y, of_suspect, of_base)
    likeness, estimate, orders = halves.measured, halves.chosen_by, halves.orders
    (mean, spread), least, shown = BACKGROUND[route], LEAST + _luck(base), SHOWN
    maps = _maps_of_both(route, suspect, base, ids)
    if maps is None:
        layers = align_layers(estimate, least)
    else:
        mean, shown = _luck_of_maps(maps), np.inf
        estimate, layers = _examined(maps, estimate, (least, LEAST + mean), orders, x, y)
        least = LEAST + mean
        likeness = np.where(np.isnan(estimate), likeness, estimate)
    counts = np.array([len(heads) for heads in of_suspect])
    alike = np.array([likeness[i, j] if j is not None else 0.0 for i, j in enumerate(layers)])
    z = (alike - mean) / np.sqrt(1 / (2 * HALF * counts) + spread**2)
    log_p = _log_p_of_layers(alike, counts, layers, mean, spread)
    # Skipping a layer within a run costs a path two jumps, so it may go through an unlike one.
    for i, place in enumerate(layers):
        if place is not None and estimate[i, place] < least and z[i] < shown:
            layers[i] = None
    heads = [orders[i, j] if j is not None else np.empty(0, int) for i, j in enumerate(layers)]
    taken = np.full(len(x), -1)  # (N_s,) each head's counterpart among all of the base's
    for rows, place, order in zip(of_suspect, layers, heads, strict=True):
        if place is not None:
            kept = np.flatnonzero(order >= 0)
            taken[rows[kept]] = of_base[place][order[kept]]
    paired = np.array([j is not None for j in layers])
    if maps is not None and paired.any() and len(x) * len(y) <= FEW:
        chance = 1 / (2 * _dimensions_of_maps(maps) ** 2)
        elsewhere = _beyond_chance(_rest_of_maps(maps, taken), chance)
    else:
        rest = halves.sampled_cosines[taken[:, None] != halves.sampled]
        elsewhere = _beyond_chance(rest, 1 / (2 * HALF))
    z = np.where(paired, z, np.nan)
    return Match(route, likeness, layers, heads, z, min(0.0, log_p), elsewhere)


class Halves(NamedTuple):
    """Cosines by both halves of the sketches, and the heads that the first half assigns."""

    chosen_by: np.ndarray  # (L_s, L_b) mean cosine by the half that chooses
    measured: np.ndarray  # (L_s, L_b) mean cosine by the other half
    orders: dict[tuple[int, int], np.ndarray]  # counterparts of heads by places of two layers
    sampled: np.ndarray  # (n,) some of the base's heads
    sampled_cosines: np.ndarray  # (N_s, n) cosines with them by the half that measures


def _by_halves(
    x: np.ndarray, y: np.ndarray, of_suspect: Sequence[np.ndarray], of_base: Sequence[np.ndarray]
) -> Halves:
    """Compare all pairs of layers, given by the positions of their heads."""
    shape = len(of_suspect), len(of_base)
    # an odd step takes heads of every index
    sampled = np.arange(0, len(y), len(x) * len(y) // LOOKED_AT | 1)
    sampled_cosines = np.empty((len(x), len(sampled)), np.float32)
    halves = Halves(np.zeros(shape), np.zeros(shape), {}, sampled, sampled_cosines)
    for i, heads in enumerate(of_suspect):
        choosing = _cosines(x[heads][..., :HALF], y[..., :HALF])
        measuring = _cosines(x[heads][..., HALF:], y[..., HALF:])
        sampled_cosines[heads] = measuring[:, sampled]
        for j, candidates in enumerate(of_base):
            order = assign_heads(choosing[:, candidates])
            kept = np.flatnonzero(order >= 0)
            assigned = candidates[order[kept]]
            halves.orders[i, j] = order
            halves.chosen_by[i, j] = choosing[kept, assigned].sum() / len(heads)
            halves.measured[i, j] = measuring[kept, assigned].sum() / len(heads)
    return halves


def _beyond_chance(cosines: np.ndarray, chance: float) -> float:
    """Median size of cosines beyond strangers' variance `chance`."""
    if not len(cosines):
        return 0.0
    square = float(np.median(cosines**2)) / CHI_SQUARED
    return sqrt(max(0.0, square - chance))


def _log_p_of_layers(
    alike: np.ndarray, counts: np.ndarray, layers: Sequence[int | None], mean: float, spread: float
) -> float:
    """Log p-value of the mean likeness of paired layers, each weighted by its heads; 0 if none."""
    paired = np.array([j is not None for j in layers])
    total = counts[paired].sum()
    if not total:
        return 0.0
    mean_alike = (alike[paired] * counts[paired]).sum() / total
    return log_tail((mean_alike - mean) / sqrt(1 / (2 * HALF * total) + spread**2))


def _cosines(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Mean over both maps of the cosines of sketches: (N_s, 2, k), (N_b, 2, k) -> (N_s, N_b)."""
    x, y = (usable(sketches) for sketches in (x, y))
    x, y = (
        sketches / np.maximum(np.linalg.norm(sketches, axis=-1, keepdims=True), 1e-30)
        for sketches in (x, y)
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
        ours = self.suspect.source.layer(self.suspect.layers[i])
        theirs = self.base.source.layer(self.base.layers[j])

        def of_pair(pair: tuple[int, int]) -> float:
            qk, vo = maps_of(ours, pair[0], self.through[0])
            base_qk, base_vo = maps_of(theirs, pair[1], self.through[1])
            return float(np.mean([_cosine(qk, base_qk), _cosine(vo, base_vo)]))

        return list(in_threads(of_pair, pairs))


def _maps_of_both(route: str, suspect: Sketches, base: Sketches, ids: Ids | None) -> Maps | None:
    """The weights and bases for exact cosines; None if the weights of one are missing."""
    if suspect.source is None or base.source is None:
        return None
    if route == "direct":
        return Maps(suspect, base)
    if ids is None:
        common = token_ids(min(suspect.about["vocabulary"], base.about["vocabulary"]))
        ids = common, common
    of_suspect = token_basis(suspect.source, ids[0], suspect.probes, FINELY)
    of_base = token_basis(base.source, ids[1], base.probes, FINELY)
    if of_suspect is None or of_base is None:
        return None
    return Maps(suspect, base, (of_suspect, of_base))


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
    ours, theirs = np.nonzero(taken[:, None] != np.arange(len(maps.base.layer)))
    step = -(-len(ours) // EXAMINED) | 1  # an odd step takes heads of every index
    by_layers: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for s, b in zip(ours[::step].tolist(), theirs[::step].tolist(), strict=True):
        i = maps.suspect.layers.index(maps.suspect.layer[s])
        j = maps.base.layers.index(maps.base.layer[b])
        by_layers[i, j].append((int(maps.suspect.head[s]), int(maps.base.head[b])))
    cosines: list[float] = []
    for (i, j), pairs in by_layers.items():
        cosines += maps.cosines(i, j, pairs)
    return np.array(cosines)


def _cosine(w: Factored, other: Factored) -> float:
    """Cosine of two maps without their traces, which copying heads have from the start.

    0 if one is zero in float32.
    """
    # <W, W> = tr(L'L R'R), and likewise <W', W'> and <W, W'>
    left, right = inner_products(w.left, other.left), inner_products(w.right, other.right)
    products = np.array([(x * y).sum() for x, y in zip(left, right, strict=True)])
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
    rows = maps.suspect.of_layer(maps.suspect.layers[i])
    columns = maps.base.of_layer(maps.base.layers[j])
    tried = [assign_heads(_cosines(x[rows], y[columns]))]
    if len(rows) == len(columns):
        tried.append(np.arange(len(rows), dtype=np.int32))
    assigned = [(h, g) for order in tried for h, g in enumerate(order.tolist()) if g >= 0]
    pairs = list(dict.fromkeys(assigned))
    cosines = dict(zip(pairs, maps.cosines(i, j, pairs), strict=True))
    likeness = [
        sum(cosines.get(pair, 0.0) for pair in enumerate(order.tolist())) / len(rows)
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
    theirs = base.spectra.reshape(len(base.spectra), -1)
    for i, layer in enumerate(suspect.layers):
        ours = suspect.spectra[suspect.of_layer(layer)]
        ours = ours.reshape(len(ours), -1)
        apart = cdist(ours, theirs, "cityblock") / ours.shape[1]  # (H_s, N_b)
        for j, candidates in enumerate(of_base):
            inside = apart[:, candidates]
            orders[i, j] = order = assign_heads(-inside)
            kept = np.flatnonzero(order >= 0)
            distance[i, j] = inside[kept, order[kept]].mean()
    usual = np.median(distance)
    likeness = 1 - distance / (usual or 1.0)
    if shape[1] < 2 or shape[0] < FEWEST:
        nothing, n = np.empty(0, int), shape[0]
        return Match("spectra", likeness, [None] * n, [nothing] * n, np.full(n, np.nan), 0.0)
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
    without = [replace(each, spectra=each.spectra[..., :-SMALLEST]) for each in (suspect, base)]
    return _by_spectra(*without)


def _log_binomial(successes: int, trials: int, chance: float) -> float:
    """Logarithm of the probability of at least this many successes."""
    from scipy.special import betainc

    if not successes:
        return 0.0
    return log(max(betainc(successes, trials - successes + 1, chance), 1e-300))

"""Which layer and head of a base each layer and head of a suspect is, by three routes, and how sure that is.

Where sketches are compared, one half of their numbers chooses heads and layers, and the other half says how alike the
chosen ones are: for two checkpoints that share nothing, that likeness has mean zero whatever was chosen, and a standard
deviation that is known.
"""

from dataclasses import dataclass
from math import log, sqrt

import numpy as np

from weightscope.ancestry.sketches import SKETCH, Sketches
from weightscope.display import ShowsShapes

HALF = SKETCH // 2
ROUTES = {  # in words, the strongest evidence first
    "direct": "heads as they stand in the stream",
    "tokens": "heads seen through the embeddings of tokens",
    "spectra": "singular values of heads",
}
# How alike unrelated checkpoints are beyond chance, mean and standard deviation over strangers (docs/lineage.md).
BACKGROUND = {"direct": (0.0, 0.01), "tokens": (0.0, 0.01)}
SURE = 6.0  # z from which a likeness is none of strangers'
LEAST = 0.05  # likeness that two layers have at least before they are called counterparts
JUMP = 0.05  # likeness that going on with the next layer of the base is worth
# Of spectra: mean distance of logarithms of singular values.
NEAR = 0.5  # a counterpart is nearer than the next layer by this factor
SURE_BY_SPECTRA = 1e-6  # probability under which singular values are none of strangers'
BY_CHANCE = 0.05  # share of layers of strangers that are (docs/lineage.md); in most pairs none is
FEWEST = 4  # layers that spectra are judged by


@dataclass(frozen=True, eq=False, repr=False)
class Match(ShowsShapes):
    """Counterparts of a suspect's layers in one base, by one route.

    Attributes
    ----------
    route : str
        A key of `ROUTES`.
    likeness : (L_s, L_b) array
        Of every pair of layers, heads matched: a mean cosine; for spectra 1 - distance over the usual distance.
    layers : list of int or None
        The counterpart's place in the base of each layer of the suspect.
    heads : list of (H,) int arrays
        The counterpart of each head, -1 where it has none.
    z : (L_s,) array
        How far each layer's likeness to its counterpart is from that of strangers, in standard deviations.
    log_p : float
        Natural logarithm of the probability that strangers are as alike, over all layers.
    """

    route: str
    likeness: np.ndarray
    layers: list[int | None]
    heads: list[np.ndarray]
    z: np.ndarray
    log_p: float

    @property
    def is_sure(self) -> bool:
        """Whether strangers are not as alike."""
        return self.log_p < (log(SURE_BY_SPECTRA) if self.route == "spectra" else log_tail(SURE))

    @property
    def mean(self) -> float:
        """Mean likeness of counterparts; 0 where there are none."""
        pairs = [self.likeness[i, j] for i, j in enumerate(self.layers) if j is not None]
        return float(np.mean(pairs)) if pairs else 0.0


def log_tail(z: float) -> float:
    """Natural logarithm of the probability that a standard normal variable exceeds z."""
    from scipy.special import log_ndtr

    return float(log_ndtr(-z))


def matches(suspect: Sketches, base: Sketches) -> dict[str, Match]:
    """A match by each route that the two checkpoints allow."""
    by_route = {}
    for route in ("direct", "tokens"):
        x, y = getattr(suspect, route), getattr(base, route)
        same = route == "tokens" or suspect.about["d_model"] == base.about["d_model"]
        if same and x.shape[-1] and y.shape[-1]:
            by_route[route] = _by_sketches(route, suspect, base, x, y)
    by_route["spectra"] = _by_spectra(suspect, base)
    return by_route


def _by_sketches(route: str, suspect: Sketches, base: Sketches, x: np.ndarray, y: np.ndarray) -> Match:
    """Match by cosines: heads and layers by one half of the sketches, likeness and z by the other."""
    chosen, judged = (_cosines(x[..., half], y[..., half]) for half in (slice(HALF), slice(HALF, None)))
    shape = len(suspect.layers), len(base.layers)
    first, second = np.zeros(shape), np.zeros(shape)
    orders: dict[tuple[int, int], np.ndarray] = {}
    of_base = [base.of_layer(layer) for layer in base.layers]
    for i, layer in enumerate(suspect.layers):
        heads = suspect.of_layer(layer)
        for j, candidates in enumerate(of_base):
            inside = np.ix_(heads, candidates)
            order = assigned(chosen[inside])
            orders[i, j] = order
            kept = np.flatnonzero(order >= 0)
            first[i, j] = chosen[inside][kept, order[kept]].sum() / len(heads)
            second[i, j] = judged[inside][kept, order[kept]].sum() / len(heads)
    layers = aligned(first, LEAST + _luck(suspect, base))
    mean, spread = BACKGROUND[route]
    counts = np.array([len(suspect.of_layer(layer)) for layer in suspect.layers])
    alike = np.array([second[i, j] if j is not None else 0.0 for i, j in enumerate(layers)])
    z = (alike - mean) / np.sqrt(1 / (2 * HALF * counts) + spread**2)
    paired = np.array([j is not None for j in layers])
    total = counts[paired].sum()
    mean_alike = (alike[paired] * counts[paired]).sum() / max(1, total)
    log_p = log_tail((mean_alike - mean) / sqrt(1 / (2 * HALF * total) + spread**2)) if total else 0.0
    matched = [orders[i, j] if j is not None else np.empty(0, int) for i, j in enumerate(layers)]
    return Match(route, second, layers, matched, np.where(paired, z, np.nan), min(0.0, log_p))


def _cosines(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Mean over both maps of the cosines of sketches: (N_s, 2, k), (N_b, 2, k) -> (N_s, N_b)."""
    x, y = (side / np.maximum(np.linalg.norm(side, axis=-1, keepdims=True), 1e-30) for side in (x, y))
    return np.einsum("smk,bmk->sb", x, y, optimize=True) / 2


def _luck(suspect: Sketches, base: Sketches) -> float:
    """How alike the best of strangers' heads are on average, by the half that chooses them."""
    most = max(len(base.of_layer(layer)) for layer in base.layers)
    return sqrt(2 * log(max(2, most)) / (2 * HALF))


def assigned(scores: np.ndarray) -> np.ndarray:
    """The column of each row so that the sum is largest and no column is taken twice, -1 where none is left.

    scores (H_s, H_b) -> (H_s,).
    """
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(scores, maximize=True)
    order = np.full(len(scores), -1)
    order[rows] = columns
    return order


def aligned(likeness: np.ndarray, least: float) -> list[int | None]:
    """The base's layer that each of the suspect's layers is, or None: the most alike, in runs where that costs little.

    The best path by dynamic programming (Viterbi): a step to the base's next layer costs nothing, any other JUMP, and a
    layer may have no counterpart, which is worth `least`. likeness (L_s, L_b).
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
    """Match by singular values: a counterpart is much nearer than the layer that is next to it in distance."""
    apart = np.abs(suspect.spectra[:, None] - base.spectra[None]).mean(axis=(2, 3))  # (N_s, N_b)
    shape = len(suspect.layers), len(base.layers)
    distance, orders = np.zeros(shape), {}
    for i, layer in enumerate(suspect.layers):
        for j, of_base in enumerate(base.layers):
            inside = apart[np.ix_(suspect.of_layer(layer), base.of_layer(of_base))]
            orders[i, j] = order = assigned(-inside)
            kept = np.flatnonzero(order >= 0)
            distance[i, j] = inside[kept, order[kept]].mean()
    usual = np.median(distance)
    likeness = 1 - distance / (usual or 1.0)
    if shape[1] < 2 or shape[0] < FEWEST:
        return Match(
            "spectra", likeness, [None] * shape[0], [np.empty(0, int)] * shape[0], np.full(shape[0], np.nan), 0.0
        )
    best = distance.argmin(axis=1)
    nearest = distance[np.arange(len(best)), best]
    rest = distance.copy()
    rest[np.arange(len(best)), best] = np.inf
    ratio = nearest / np.maximum(rest.min(axis=1), 1e-12)
    near = ratio < NEAR
    layers = [int(j) if is_near else None for j, is_near in zip(best, near, strict=True)]
    heads = [orders[i, j] if j is not None else np.empty(0, int) for i, j in enumerate(layers)]
    log_p = _log_binomial(int(near.sum()), len(near), BY_CHANCE)
    z = np.where(near, -np.log(np.maximum(ratio, 1e-12)), np.nan)
    return Match("spectra", likeness, layers, heads, z, log_p)


def _log_binomial(successes: int, trials: int, chance: float) -> float:
    """Logarithm of the probability of at least so many successes."""
    from scipy.special import betainc

    return log(max(betainc(successes, trials - successes + 1, chance), 1e-300)) if successes else 0.0

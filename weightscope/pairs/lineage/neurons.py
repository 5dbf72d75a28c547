"""Match feed-forward networks neuron by neuron: in any order, any layer, under any gains.

A neuron is assigned to one of the base's by its row of one matrix; its other weights, which agree
with nothing if the two are strangers, measure whether the assignment is right. Columns are
standardised over neurons first, so that a norm's gain that was moved into them changes nothing.

The permutation test of Zhu et al. (ICML 2025, arXiv 2502.12292) assigns the neurons of two networks
twice, by their gate and by their up projection. Of networks that were trained apart, the two
assignments are independent if gate and up of a neuron are, so Spearman's correlation between them
has a known distribution: its p-value is uniform. Of networks with neurons in common, in any order,
both are the same. If gate and up are alike, or networks of one basis share directions, strangers'
assignments are alike, too. Networks of other layers show how much, as they share all that but
neurons, and their likeness is taken off.
"""

from collections import defaultdict
from collections.abc import Sequence
from math import log, sqrt
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from weightscope.core.progress import bar
from weightscope.heads.tensors.measure import why_unread
from weightscope.model.embeddings import Embeddings
from weightscope.model.metrics.spectra import evenly_spread
from weightscope.model.model import Model
from weightscope.model.rows.names import NamedTensor
from weightscope.pairs.changes.head import Basis

SAMPLED = 128  # neurons of a network that are assigned
DIMENSIONS = 256  # sampled dimensions of the stream
MOST = 256  # networks of a checkpoint that are compared; a large mixture has more experts
SURE = 8.0  # standard deviations above neurons assigned at random
ALIKE = 0.2  # mean likeness of assigned neurons
MOST_ROWS = 4096  # rows by which columns of a table of embeddings are standardised
REDRAWN = 8  # assignments at random
LARGEST = 1e15  # weight; squares of a million such have a sum in float32
IN_PLACE = 0.9  # share of the sampled neurons that kept their place
MATRICES = ("gate", "up", "down")
NEURONS = 256  # neurons of a network, evenly spread, in the permutation test
LAYERS = 8  # tested layers, evenly spread
BEYOND_CHANCE = 1.0  # standard errors of the mean correlation of networks of other layers
NEARLY_ONE = 1 - 1e-12
LEAST = -700.0  # logarithm of the smallest probability; exp of less is 0 in float64
Orders = tuple[np.ndarray, np.ndarray]  # assignments of neurons by gate, and by up
Place = tuple[int, int | None]  # a layer, and an expert


class NetworkMatrices(NamedTuple):
    """A feed-forward network, or an expert of one, by its matrices."""

    place: Place
    matrices: dict[str, NamedTensor]  # gate if it has one, up, down
    gain: NamedTensor | None  # gain of the norm before it


class RowLikeness(NamedTuple):
    """Likeness of rows to their counterparts."""

    mean: float  # over rows; 1 for the same
    z: float  # standard deviations above rows held to others at random

    @property
    def is_sure(self) -> bool:
        """True if strangers' rows would not be this alike."""
        return self.z >= SURE and self.mean >= ALIKE

    @property
    def is_doubtful(self) -> bool:
        """True if rows are more alike than chance, but not enough."""
        return self.z >= SURE and self.mean < ALIKE


class Counterpart(NamedTuple):
    """The base's network that has a network's neurons."""

    place: Place  # in the base
    likeness: RowLikeness  # mean over neurons, and its certainty
    in_place: bool  # neurons kept their order


def networks_of(model: Model) -> list[NetworkMatrices]:
    """Every feed-forward network whose matrices have roles."""
    tensors = model.unchecked().tensors
    by_place: dict[Place, dict[str, NamedTensor]] = defaultdict(dict)
    for tensor in tensors:
        for expert in tensor.experts or (tensor,):
            for part in tensors.parts(expert) or (expert,):
                role = part.role.removeprefix("expert.")
                is_own = part.stack in (None, tensors.own)
                if role in MATRICES and part.layer is not None and is_own:
                    by_place[part.layer, part.expert].setdefault(role, part)
    in_stack = [tensor for tensor in tensors if tensor.stack in (None, tensors.own)]
    gains = {(tensor.layer, tensor.role): tensor for tensor in in_stack}
    networks = []
    for place, matrices in by_place.items():
        is_readable = not any(why_unread(each.tensor) for each in matrices.values())
        if {"up", "down"} <= set(matrices) and is_readable:
            networks.append(NetworkMatrices(place, matrices, gains.get((place[0], "norm.mlp"))))
    return networks


def counterparts_of(
    networks: Sequence[NetworkMatrices],
    of_base: Sequence[NetworkMatrices],
    basis: Basis | None = None,
) -> dict[Place, Counterpart]:
    """The most similar base network of each network, with the base's stream in `basis`."""
    sampled = {}
    for network in _some(networks):
        features = _features(network)
        chosen = evenly_spread(len(features[0]), SAMPLED)
        sampled[network.place] = chosen, len(features[0]), [each[chosen] for each in features]
    best: dict[Place, tuple[float, Counterpart]] = {}
    for network in bar(_some(of_base), "feed-forward networks", "network"):
        theirs = _features(network, basis)
        for place, (chosen, n_neurons, mine) in sampled.items():
            if len(theirs) != len(mine) or theirs[0].shape[1] != mine[0].shape[1]:
                continue
            cosines = mine[0] @ theirs[0].T
            nearest = cosines.argmax(axis=1)
            by_nearest = _cosines(mine, theirs, np.arange(len(nearest)), nearest)
            alike = float(_likeness(by_nearest).mean())
            if place in best and not alike > best[place][0]:
                continue
            rows, order = linear_sum_assignment(-cosines)
            in_place = len(theirs[0]) == n_neurons and _is_in_place(
                mine, theirs, rows, (chosen[rows], order)
            )
            measured = _measured(mine, theirs, rows, order)
            best[place] = alike, Counterpart(network.place, measured, in_place)
    return {place: counterpart for place, (_, counterpart) in best.items()}


def _is_in_place(
    mine: list[np.ndarray],
    theirs: list[np.ndarray],
    rows: np.ndarray,
    orders: tuple[np.ndarray, np.ndarray],
) -> bool:
    """True if neurons kept their places: most do, or they fit there better than elsewhere."""
    places, assigned = orders
    if float((assigned == places).mean()) >= IN_PLACE:
        return True
    there = _likeness(_cosines(mine, theirs, rows, places)).mean()
    elsewhere = _likeness(_cosines(mine, theirs, rows, assigned)).mean()
    return float(there) > float(elsewhere)


def _some(networks: Sequence[NetworkMatrices]) -> Sequence[NetworkMatrices]:
    return networks[:: -(-len(networks) // MOST) or 1]


def _features(network: NetworkMatrices, basis: Basis | None = None) -> list[np.ndarray]:
    """Weights of each neuron by matrix, (neurons, dimensions) each, of unit length."""
    features = []
    for name in MATRICES:
        if name not in network.matrices:
            continue
        w = network.matrices[name].array()  # (neurons, d), or (d, neurons) of what they write
        width = w.shape[0 if name == "down" else 1]
        if name == "down":
            w = w.T
        elif network.gain is not None and network.gain.shape == (width,):
            w = w * network.gain.array()
        dims = evenly_spread(width, DIMENSIONS)
        rotation = None if basis is None else basis.rotation
        w = w[:, dims] if rotation is None else w @ rotation[:, dims]
        features.append(unit_rows(w))
    return features


def unit_rows(w: np.ndarray) -> np.ndarray:
    """Rows of unit length, after every column was brought to mean zero and one size."""
    return _unit(_standardised(w))


def usable(w: np.ndarray) -> np.ndarray:
    """Replace weights that are NaN, infinite or too large to square by zeros."""
    return np.where(np.abs(w) < LARGEST, w, 0)


def _standardised(w: np.ndarray) -> np.ndarray:
    w = usable(w)
    w = w - w.mean(axis=0)
    return np.asarray(w / np.maximum(w.std(axis=0), 1e-30), np.float32)


def _unit(w: np.ndarray) -> np.ndarray:
    return np.asarray(w / np.maximum(np.linalg.norm(w, axis=1, keepdims=True), 1e-30), np.float32)


def _measured(
    mine: list[np.ndarray], theirs: list[np.ndarray], rows: np.ndarray, order: np.ndarray
) -> RowLikeness:
    """Likeness of neurons to those that they were assigned to."""
    rng = np.random.default_rng(0)
    at_random = [
        _likeness(_cosines(mine, theirs, rows, rng.permutation(order))) for _ in range(REDRAWN)
    ]
    cosines = _likeness(_cosines(mine, theirs, rows, order))
    return _against_chance(cosines, np.concatenate(at_random))


def _against_chance(cosines: np.ndarray, at_random: np.ndarray) -> RowLikeness:
    """The mean of some cosines, and its distance from random pairs' mean in standard errors."""
    mean, spread = float(cosines.mean()), max(float(at_random.std()), 1e-3) / np.sqrt(len(cosines))
    return RowLikeness(mean, float((mean - at_random.mean()) / spread))


def _cosines(
    mine: list[np.ndarray], theirs: list[np.ndarray], rows: np.ndarray, order: np.ndarray
) -> np.ndarray:
    """Cosines by each matrix but the one that assigned neurons: (matrices - 1, neurons)."""
    return np.stack(
        [np.vecdot(x[rows], y[order]) for x, y in zip(mine[1:], theirs[1:], strict=True)]
    )


def _likeness(cosines: np.ndarray) -> np.ndarray:
    """Mean over matrices, (matrices, neurons) -> (neurons,); of two, the signed geometric mean."""
    if len(cosines) == 1:
        return cosines[0]
    product = cosines.prod(axis=0)
    return np.sign(product) * np.sqrt(np.abs(product))


# Rows of embeddings


def alike_rows(x: np.ndarray, y: np.ndarray) -> RowLikeness:
    """Likeness of two tables row by row: (n, d) each."""
    return _row_by_row(unit_rows(x), unit_rows(y))


def _row_by_row(x: np.ndarray, y: np.ndarray) -> RowLikeness:
    """Likeness of two tables of unit-length rows."""
    rng = np.random.default_rng(0)
    at_random = [np.vecdot(x, y[rng.permutation(len(y))]) for _ in range(REDRAWN)]
    return _against_chance(np.vecdot(x, y), np.concatenate(at_random))


def order_of_rows(suspect: Embeddings, base: Embeddings, basis: Basis) -> RowLikeness:
    """Likeness of some tokens' rows to the nearest row of any token.

    One half of the dimensions finds that row, and the other half measures, so that the choice does
    not bias the likeness.
    """
    mine = suspect.rows(evenly_spread(suspect.n_tokens, MOST_ROWS))
    dims = evenly_spread(mine.shape[1], DIMENSIONS)
    turn = np.eye(mine.shape[1], dtype=np.float32) if basis.rotation is None else basis.rotation
    blocks = [(rows @ turn[:, dims]).astype(np.float16) for _, rows in base.blocks()]
    mine = _standardised(mine[:, dims])[evenly_spread(len(mine), SAMPLED)]
    theirs = _standardised(np.concatenate(blocks).astype(np.float32))
    finding, of_base = _unit(mine[:, ::2]), _unit(theirs[:, ::2])
    measured, measured_of_base = _unit(mine[:, 1::2]), _unit(theirs[:, 1::2])
    return _row_by_row(measured, measured_of_base[(finding @ of_base.T).argmax(axis=1)])


# The permutation test


def permutation_log_p(suspect: Model, base: Model) -> float | None:
    """Log p-value over layers of one index, by Fisher's method; None if shapes differ."""
    if suspect.config.n_layers != base.config.n_layers:
        return None
    networks = zip(_dense(suspect), _dense(base), strict=False)
    pairs = [(a, b) for a, b in networks if _can_be_tested(a, b)]
    tested = [pairs[k] for k in evenly_spread(len(pairs), LAYERS)]
    if not tested:
        return None
    orders = [_orders(a, b) for a, b in tested]
    of_next = [b for _, b in (*tested[1:], tested[0])]
    of_other_layers = [
        _orders(a, b)
        for (a, _), b in zip(tested, of_next, strict=True)
        if a.place != b.place and _can_be_tested(a, b._replace(place=a.place))
    ]
    if of_other_layers:
        usual = np.mean([spearman(*each) for each in of_other_layers])
        n = len(orders[0][0])
        if usual * sqrt(n * len(of_other_layers)) > BEYOND_CHANCE:
            return log_p_beyond(orders, of_other_layers)
    return fisher([spearman_log_p(*each) for each in orders])


def log_p_beyond(tested: Sequence[Orders], usual: Sequence[Orders]) -> float:
    """One-sided log p-value that correlations are no higher than usual, by Fisher's z.

    Variance by Fieller, Hartley and Pearson (1957).
    """
    from scipy.special import log_ndtr

    means = []
    for side in (tested, usual):
        correlations = np.minimum([spearman(*orders) for orders in side], NEARLY_ONE)
        means.append(np.mean(np.arctanh(correlations)))
    n = len(tested[0][0])
    variance = 1.06 / max(n - 3, 1) * (1 / len(tested) + 1 / len(usual))
    return max(float(log_ndtr(-(means[0] - means[1]) / sqrt(variance))), LEAST)


def _dense(model: Model) -> list[NetworkMatrices]:
    """One network for each layer that is not a mixture, in order."""
    dense = [network for network in networks_of(model) if network.place[1] is None]
    return sorted(dense, key=lambda network: network.place[0])


def _sides(network: NetworkMatrices) -> list[str]:
    """The matrices that neurons are assigned by."""
    return ["gate", "up"] if "gate" in network.matrices else ["up", "down"]


def _can_be_tested(a: NetworkMatrices, b: NetworkMatrices) -> bool:
    if a.place != b.place or _sides(a) != _sides(b):
        return False
    return all(a.matrices[side].shape == b.matrices[side].shape for side in _sides(a))


def _orders(a: NetworkMatrices, b: NetworkMatrices) -> Orders:
    """The assignments by both sides of a network."""
    first, second = (assigned(_rows(a, side), _rows(b, side)) for side in _sides(a))
    return first, second


def _rows(network: NetworkMatrices, side: str) -> np.ndarray:
    w = network.matrices[side].array()
    rows = w.T if side == "down" else w
    return np.asarray(usable(rows), np.float32)  # (neurons, d)


def assigned(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Rows of y (m, d) assigned to some rows of x (n, d), with the largest sum of cosines."""
    chosen = x[evenly_spread(len(x), NEURONS)]
    a, b = (
        rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
        for rows in (chosen, y)
    )
    return np.asarray(linear_sum_assignment(a @ b.T, maximize=True)[1])


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's correlation."""
    from scipy.stats import rankdata

    return float(np.corrcoef(rankdata(x), rankdata(y))[0, 1])


def spearman_log_p(x: np.ndarray, y: np.ndarray) -> float:
    """One-sided log p-value of Spearman's correlation, by Student's t."""
    from scipy.special import stdtr

    r, n = spearman(x, y), len(x)
    if n < 4 or not np.isfinite(r):
        return 0.0
    t = r * np.sqrt((n - 2) / max(1 - r * r, 1e-300))
    return log(max(float(stdtr(n - 2, -t)), np.exp(LEAST)))


def fisher(log_p: list[float]) -> float:
    """Fisher's combination of independent p-values, given and returned as logarithms."""
    from scipy.special import gammaincc

    return log(max(float(gammaincc(len(log_p), -sum(log_p))), np.exp(LEAST)))

"""Match feed-forward networks neuron by neuron: in any order, any layer, under any gains.

A neuron is assigned to one of the base's by its row of one matrix; whether the assignment is right
is measured by its other weights, which agree with nothing where the two are strangers. Columns are
standardised over neurons first, so that a norm's gain that was moved into them changes nothing. The
test of Zhu et al. (arXiv 2502.12292) for networks in any order assigns by two matrices apart, and
compares both assignments.
"""

from collections import defaultdict
from collections.abc import Sequence
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
DIMENSIONS = 256  # of the stream by which they are compared
# networks of a checkpoint that are compared: of a large mixture, only some of its experts
MOST = 256
SURE = 8.0  # standard deviations above neurons assigned at random
ALIKE = 0.2  # mean likeness of assigned neurons
MOST_ROWS = 4096  # of a table of embeddings, by which its columns are standardised
REDRAWN = 8  # assignments at random
LARGEST = 1e15  # weight: squares of a million such have a sum in float32
IN_PLACE = 0.9  # share of the sampled neurons that kept their place
MATRICES = ("gate", "up", "down")
Place = tuple[int, int | None]  # a layer, and an expert


class Network(NamedTuple):
    """A feed-forward network, or an expert of one, by its matrices."""

    place: Place
    matrices: dict[str, NamedTensor]  # gate if it has one, up, down
    gain: NamedTensor | None  # of the norm that the network reads through


class Likeness(NamedTuple):
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
    likeness: Likeness  # of neurons
    in_place: bool  # neurons kept their order


def networks_of(model: Model) -> list[Network]:
    """Every feed-forward network whose matrices have roles."""
    tensors = model.unchecked().tensors
    by_place: dict[Place, dict[str, NamedTensor]] = defaultdict(dict)
    for tensor in tensors:
        for expert in tensor.experts or (tensor,):
            for part in tensors.parts(expert) or (expert,):
                role = part.role.removeprefix("expert.")
                if (
                    role in MATRICES
                    and part.layer is not None
                    and part.stack in (None, tensors.own)
                ):
                    by_place[part.layer, part.expert].setdefault(role, part)
    gains = {
        (tensor.layer, tensor.role): tensor
        for tensor in tensors
        if tensor.stack in (None, tensors.own)
    }
    networks = [
        Network(place, matrices, gains.get((place[0], "norm.mlp")))
        for place, matrices in by_place.items()
        if {"up", "down"} <= set(matrices)
    ]
    return [
        each
        for each in networks
        if not any(why_unread(tensor.tensor) for tensor in each.matrices.values())
    ]


def counterparts_of(
    networks: Sequence[Network], of_base: Sequence[Network], basis: Basis | None = None
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
            alike = float(
                _likeness(_cosines(mine, theirs, np.arange(len(nearest)), nearest)).mean()
            )
            if place not in best or alike > best[place][0]:
                rows, order = linear_sum_assignment(-cosines)
                kept = len(theirs[0]) == n_neurons and _is_in_place(
                    mine, theirs, rows, (chosen[rows], order)
                )
                best[place] = (
                    alike,
                    Counterpart(network.place, _measured(mine, theirs, rows, order), kept),
                )
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
    there, elsewhere = (
        float(_likeness(_cosines(mine, theirs, rows, order)).mean()) for order in (places, assigned)
    )
    return there > elsewhere


def _some(networks: Sequence[Network]) -> Sequence[Network]:
    return networks[:: -(-len(networks) // MOST) or 1]


def _features(network: Network, basis: Basis | None = None) -> list[np.ndarray]:
    """Weights of each neuron by matrix, (neurons, dimensions) each, of unit length."""
    features = []
    for name in (name for name in MATRICES if name in network.matrices):
        w = network.matrices[name].array()  # (neurons, d), or (d, neurons) of what they write
        width = w.shape[0 if name == "down" else 1]
        if name == "down":
            w = w.T
        elif network.gain is not None and network.gain.shape == (width,):
            w = w * network.gain.array()
        rotated = basis is not None and basis.rotation is not None
        dims = evenly_spread(width, DIMENSIONS)
        w = w @ basis.rotation[:, dims] if rotated else w[:, dims]  # type: ignore[union-attr, index]
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
) -> Likeness:
    """Likeness of neurons to those that they were assigned to."""
    rng = np.random.default_rng(0)
    at_random = [
        _likeness(_cosines(mine, theirs, rows, rng.permutation(order))) for _ in range(REDRAWN)
    ]
    return _against_chance(
        _likeness(_cosines(mine, theirs, rows, order)), np.concatenate(at_random)
    )


def _against_chance(cosines: np.ndarray, at_random: np.ndarray) -> Likeness:
    """The mean of some cosines, and its distance from random pairs' mean in standard errors."""
    mean, spread = float(cosines.mean()), max(float(at_random.std()), 1e-3) / np.sqrt(len(cosines))
    return Likeness(mean, float((mean - at_random.mean()) / spread))


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


def alike_rows(x: np.ndarray, y: np.ndarray) -> Likeness:
    """Likeness of two tables row by row: (n, d) each."""
    return _row_by_row(unit_rows(x), unit_rows(y))


def _row_by_row(x: np.ndarray, y: np.ndarray) -> Likeness:
    """Likeness of two tables of unit-length rows."""
    rng = np.random.default_rng(0)
    at_random = [np.vecdot(x, y[rng.permutation(len(y))]) for _ in range(REDRAWN)]
    return _against_chance(np.vecdot(x, y), np.concatenate(at_random))


def order_of_rows(suspect: Embeddings, base: Embeddings, basis: Basis) -> Likeness:
    """Likeness of some tokens' rows to the nearest row of any token.

    One half of the dimensions finds that row, and the other half measures, so that the choice does
    not bias the likeness.
    """
    mine = suspect.rows(evenly_spread(suspect.n_tokens, MOST_ROWS))
    dims = evenly_spread(mine.shape[1], DIMENSIONS)
    turn = np.eye(mine.shape[1], dtype=np.float32) if basis.rotation is None else basis.rotation
    theirs = np.concatenate(
        [(rows @ turn[:, dims]).astype(np.float16) for _, rows in base.blocks()]
    )
    mine, theirs = (
        _standardised(mine[:, dims])[evenly_spread(len(mine), SAMPLED)],
        _standardised(theirs.astype(np.float32)),
    )
    (found_by, measured), (of_base, measured_of_base) = (
        (_unit(rows[:, ::2]), _unit(rows[:, 1::2])) for rows in (mine, theirs)
    )
    return _row_by_row(measured, measured_of_base[(found_by @ of_base.T).argmax(axis=1)])

"""Collect sums over feed-forward networks and experts while their matrices are read.

A neuron is a row of gate and up, and a column of down. Copies are found by random projections of
the three, in which strangers are never this near: for width d the projections of two unit vectors
at random differ by sqrt(2) in each of 16 places.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import sqrt
from typing import NamedTuple

import numpy as np

from weightscope.checkpoint.blocks import row_width
from weightscope.core.errors import CheckpointError
from weightscope.model.metrics.copies import copies_within
from weightscope.model.rows.names import TRANSPOSED, NamedTensor, Tensors

PARTS = ("gate", "up", "down")
DEAD = 1e-4  # times the median product of a neuron's input norm and output norm
PROJECTIONS = 16
COPY = 0.05  # distance of unit vectors: a cosine of 0.999
# roles of the norm before a network, the likeliest first
NORMS = ("norm.mlp", "norm.after_attention", "norm.before")
Place = tuple[int, int]  # a layer, and an expert; -1 for the network of a layer


class Opening(NamedTuple):
    """Input of a gate or up: gain x + shift with |x| at most sqrt(d), and a bias."""

    gain: np.ndarray  # (d,)
    shift: np.ndarray  # (d,)
    bias: np.ndarray  # (n,)

    def fits(self, n: int, d: int) -> bool:
        """True if it is of n neurons and d channels."""
        return self.gain.shape == self.shift.shape == (d,) and self.bias.shape == (n,)


class Neurons:
    """Sums over one matrix of a network, for its n neurons and the stream's d channels."""

    def __init__(
        self,
        place: Place,
        part: str,
        shape: tuple[int, int],
        axis: int,
        opening: Opening | None = None,
    ) -> None:
        self.place, self.part, self.shape = place, part, shape
        self.axis = axis  # axis of the neurons, as stored
        n, d = shape[axis], shape[1 - axis]
        self.squares, self.sketch = np.zeros(n), np.zeros((n, PROJECTIONS), np.float32)
        self.channels = np.zeros(d if part == "down" else 0)  # squares too
        self.opening = opening if opening is not None and opening.fits(n, d) else None
        self.reach = np.zeros(n if self.opening else 0)
        self.shifted = np.zeros_like(self.reach)
        self.basis = np.random.default_rng(d).standard_normal((d, PROJECTIONS)).astype(np.float32)

    def add(self, values: np.ndarray, start: int) -> None:
        """Whole rows of the matrix as stored, from value `start` on: values (any,)."""
        rows = values.reshape(-1, self.shape[1])
        block = slice(start // self.shape[1], start // self.shape[1] + len(rows))
        w = rows.T if self.axis else rows  # (neurons, channels)
        neurons, channels = (slice(None), block) if self.axis else (block, slice(None))
        with np.errstate(all="ignore"):  # broken weights are findings
            self.squares[neurons] += np.einsum("ij,ij->i", w, w, dtype=np.float64)
            self.sketch[neurons] += w @ self.basis[channels]
            if len(self.channels):
                self.channels[channels] += np.einsum("ij,ij->j", w, w, dtype=np.float64)
            if self.opening is not None:
                scaled = w * self.opening.gain[channels]
                self.reach[neurons] += np.einsum("ij,ij->i", scaled, scaled, dtype=np.float64)
                self.shifted[neurons] += w @ self.opening.shift[channels]

    @property
    def unit_sketch(self) -> np.ndarray:
        """(n, 16) projections of the neurons' unit vectors."""
        return self.sketch / np.maximum(np.sqrt(self.squares), 1e-30)[:, None]

    @property
    def most(self) -> np.ndarray | None:
        """Largest input (n,) of each neuron; None if it has no bias or no norm is known."""
        if self.opening is None:
            return None
        d = self.shape[1 - self.axis]
        return sqrt(d) * np.sqrt(self.reach) + self.shifted + self.opening.bias


class JudgedNetwork(NamedTuple):
    """Neurons that stand out in a network or an expert."""

    place: Place
    size: int  # neurons
    dead: list[int]
    copies: list[int]  # each of an earlier one
    closed: list[int]  # neurons that can never open
    written: np.ndarray  # (d,) norms of the rows of down

    @classmethod
    def of(cls, matrices: Sequence[Neurons]) -> "JudgedNetwork":
        """Judge one network by all its matrices."""
        by_part = {matrix.part: matrix for matrix in matrices}
        size = np.prod(np.sqrt([matrix.squares for matrix in matrices]), axis=0)  # (n,)
        n, dead = len(size), np.empty(0, int)
        if n and (usual := np.median(size)) > 0:
            dead = np.flatnonzero(size <= DEAD * usual)
        alive = np.setdiff1d(np.arange(n), dead)
        sketches = np.concatenate([matrix.unit_sketch for matrix in matrices], axis=1)
        copies = _copies(sketches[alive], alive)
        most = by_part.get("gate", by_part["up"]).most
        closed = [] if most is None else np.flatnonzero(most <= 0).tolist()
        written = np.sqrt(by_part["down"].channels)
        return cls(matrices[0].place, n, dead.tolist(), copies, closed, written)


def _copies(sketch: np.ndarray, alive: np.ndarray) -> list[int]:
    """Copies among neurons, by the directions they read and write: sketch (a, p) of alive (a,)."""
    if len(alive) < 2 or not np.isfinite(sketch).all():
        return []
    return [int(i) for i in alive[copies_within(sketch, COPY * sqrt(sketch.shape[1]))]]


class Networks:
    """Networks of the stack that is read, each judged after the last of its matrices."""

    def __init__(self, tensors: Tensors, named: Iterable[NamedTensor]) -> None:
        self.stack = tensors.own
        in_stack = (tensor for tensor in named if tensor.stack in (None, self.stack))
        self.named = {(tensor.layer, tensor.role): tensor for tensor in in_stack}
        self.judged: list[JudgedNetwork] = []
        self._expected: dict[Place, set[str]] = defaultdict(set)  # parts that a network has
        self._read: dict[Place, dict[str, Neurons]] = defaultdict(dict)

    def expect(self, matrix: NamedTensor) -> None:
        """A matrix, or a part of one, that will be read."""
        if place := self._place_of(matrix):
            self._expected[place].add(_part_of(matrix))

    def neurons_of(self, matrix: NamedTensor, is_part: bool) -> Neurons | None:
        """Sums for the values of a matrix; None if it belongs to no network."""
        place, part = self._place_of(matrix), _part_of(matrix)
        shape = matrix.shape if is_part else matrix.tensor.shape
        if place is None:
            return None
        if not is_part and not (row_width(shape) and matrix.undone in ((), (TRANSPOSED,))):
            return None
        axis = (part == "down") ^ (not is_part and matrix.undone == (TRANSPOSED,))
        opener = "gate" if "gate" in self._expected[place] else "up"
        opens = matrix.expert is None and part == opener
        opening = self._opening(matrix) if opens else None
        return Neurons(place, part, (shape[0], shape[1]), int(axis), opening)

    def add(self, neurons: Neurons) -> None:
        """A matrix all of whose values have been added."""
        place = neurons.place
        self._read[place][neurons.part] = neurons
        if self._read[place].keys() == self._expected[place]:
            self._judge(place)

    def finished(self) -> list[JudgedNetwork]:
        """All networks by place, those with a matrix that could not be read included."""
        for place in [*self._read]:
            self._judge(place)
        return sorted(self.judged, key=lambda network: network.place)

    def _judge(self, place: Place) -> None:
        matrices = [*self._read.pop(place).values()]
        sizes = {(len(matrix.squares), len(matrix.basis)) for matrix in matrices}
        if {"up", "down"} <= {matrix.part for matrix in matrices} and len(sizes) == 1:
            self.judged.append(JudgedNetwork.of(matrices))

    def _place_of(self, matrix: NamedTensor) -> Place | None:
        if matrix.layer is None or matrix.stack not in (None, self.stack):
            return None
        if _part_of(matrix) not in PARTS or len(matrix.shape) != 2:
            return None
        return matrix.layer, -1 if matrix.expert is None else matrix.expert

    def _opening(self, matrix: NamedTensor) -> Opening | None:
        """The bias of a gate or up, and the norm before it; None where one is missing or broken."""
        bias = self.named.get((matrix.layer, f"{matrix.role}.bias"))
        role = next((role for role in NORMS if (matrix.layer, role) in self.named), "")
        if bias is None or not role:
            return None
        shift = self.named.get((matrix.layer, f"{role}.bias"))
        with suppress(CheckpointError):
            gain = self.named[matrix.layer, role].array()
            shifts = np.zeros_like(gain) if shift is None else shift.array()
            return Opening(gain, shifts, bias.array())
        return None


def _part_of(matrix: NamedTensor) -> str:
    return matrix.role.removeprefix("expert.")

"""Neurons and experts: which are dead, copies of others or can never open, and channels that networks write most to.

A neuron is a row of gate and up, and a column of down. Copies are found by random projections of the three, in which
strangers are never this near: for width d the projections of two unit vectors at random differ by sqrt(2) in each of
16 places.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple

import numpy as np
from scipy.spatial import cKDTree

from weightscope.architectures.names import NamedTensor
from weightscope.errors import CheckpointError, counted
from weightscope.findings import Finding, Member, finding, listed
from weightscope.metrics.outliers import log_measure, robust_z
from weightscope.model import Model
from weightscope.progress import bar
from weightscope.tensors.matrices import Matrices, Row, is_matrix, pieces_of
from weightscope.tensors.measure import unreadable

PARTS = ("gate", "up", "down")
DEAD = 1e-4  # of the median: a neuron's input norm times its output norm
DEAD_EXPERT = 1e-3  # of the median: an expert's Frobenius norm, or a router's row
PROJECTIONS = 16
COPY = 0.05  # distance of unit vectors: a cosine of 0.999
SAME_SPECTRUM = 1e-6  # relative: experts with such spectra in each of their matrices are copies
CHANNEL_Z, CHANNEL_FACTOR = 12.0, 4.0  # a channel's share of what networks write is above both in most layers
NAMED = 8
Place = tuple[int, int | None]  # a layer, and an expert


@dataclass(eq=False, repr=False)
class Network:
    """What is kept of a feed-forward network or an expert: for each of its n neurons, and each channel it writes to."""

    place: Place
    norms: dict[str, np.ndarray] = field(default_factory=dict)  # (n,) of the rows of gate and up, the columns of down
    sketches: dict[str, np.ndarray] = field(default_factory=dict)  # (n, 16) of the same as unit vectors
    written: np.ndarray | None = None  # (d,) norms of the rows of down
    most: np.ndarray | None = None  # (n,) the most that what opens a neuron can be; None where that has no bias

    def __repr__(self) -> str:
        return f"Network({self.place}, {', '.join(self.norms)})"

    def add(self, part: str, w: np.ndarray) -> None:
        """A matrix: gate or up (n, d), down (d, n)."""
        if part == "down":
            self.written = np.sqrt(np.einsum("ij,ij->i", w, w, dtype=np.float64))
            w = w.T
        norms = np.sqrt(np.einsum("ij,ij->i", w, w, dtype=np.float64))
        basis = np.random.default_rng(w.shape[1]).standard_normal((w.shape[1], PROJECTIONS)).astype(np.float32)
        self.norms[part] = norms
        self.sketches[part] = (w @ basis) / np.maximum(norms, 1e-30)[:, None]

    @property
    def is_consistent(self) -> bool:
        """Whether its matrices have the same neurons."""
        return len({len(norms) for norms in self.norms.values()}) == 1

    @property
    def dead(self) -> np.ndarray:
        """Neurons whose input or output is nothing next to the others'."""
        size = np.prod([*self.norms.values()], axis=0) if self.norms else np.empty(0)  # (n,)
        return np.flatnonzero(size <= DEAD * np.median(size)) if len(size) and np.median(size) > 0 else np.empty(0, int)

    @property
    def copies(self) -> list[int]:
        """Neurons that read and write the same directions as an earlier one."""
        alive = np.setdiff1d(np.arange(len(self.norms["up"])), self.dead)
        sketch = np.concatenate([*self.sketches.values()], axis=1)[alive]
        if len(alive) < 2 or not np.isfinite(sketch).all():
            return []
        limit = COPY * sqrt(sketch.shape[1])
        distances, nearest = cKDTree(sketch).query(sketch, k=2, distance_upper_bound=limit)  # itself, and another
        near = np.flatnonzero(distances[:, 1] < limit)
        return sorted({int(alive[max(i, *nearest[i])]) for i in near})


class Networks(NamedTuple):
    """The feed-forward networks of a model and what stands before them."""

    networks: list[Network]
    routers: dict[int, np.ndarray]  # (experts, d) by layer


def read_networks(model: Model) -> Networks:
    """Every feed-forward network whose matrices have roles, one matrix in memory at a time."""
    unchecked = model.unchecked()
    tensors, unread = unchecked.tensors, unreadable(unchecked.checkpoint)
    named = [t for t in tensors if t.layer is not None and t.stack in (None, tensors.own) and t.name not in unread]
    others = {(tensor.layer, tensor.role): tensor for tensor in named}
    kept: dict[Place, Network] = {}
    for tensor in bar(named, "networks", "tensor"):
        if not {*tensor.role.removeprefix("expert.").split("+")} <= {*PARTS} or not is_matrix(tensor):
            continue
        for piece in pieces_of(tensors, tensor) or [tensor]:
            part, place = piece.role.removeprefix("expert."), (tensor.layer or 0, piece.expert)
            with suppress(CheckpointError):  # shapes that the role cannot have
                kept.setdefault(place, Network(place)).add(part, w := piece.array())
                if piece.expert is None and part == ("gate" if (tensor.layer, "gate") in others else "up"):
                    kept[place].most = _most(w, others, tensor.layer, part)
    routers = {
        layer: tensor.array() for (layer, role), tensor in others.items() if role == "router" and layer is not None
    }
    complete = [network for network in kept.values() if {"up", "down"} <= network.norms.keys()]
    return Networks([network for network in complete if network.is_consistent], routers)


def _most(
    w: np.ndarray, others: Mapping[tuple[int | None, str], NamedTensor], layer: int | None, part: str
) -> np.ndarray | None:
    """The most that a neuron's input can be: w (n, d) -> (n,); None where it has no bias, or where no norm is known.

    What a norm hands over is gamma x + beta with |x| at most sqrt(d).
    """
    bias = others.get((layer, f"{part}.bias"))
    roles = ("norm.mlp", "norm.after_attention", "norm.before")
    role = next((role for role in roles if (layer, role) in others), "")
    if bias is None or not role:
        return None
    gain, shift = others[layer, role].array(), others.get((layer, f"{role}.bias"))
    shifted = w @ shift.array() if shift is not None else 0.0
    return sqrt(w.shape[1]) * np.linalg.norm(w * gain, axis=1) + shifted + bias.array()


def network_findings(model: Model, measured: Matrices) -> Iterator[Finding]:
    """Everything about neurons, channels and experts that a person should look at."""
    networks, routers = read_networks(model)
    for network in networks:
        yield from _neurons(network)
    yield from _channels(networks)
    yield from _experts(measured.rows)
    yield from _routers(routers)


@finding("dead_neurons", "dead neurons", rank=75,
         look_next="They can be removed without a change. Many in one layer suggest pruning, or a part that was not "
                   "saved.")  # fmt: skip
@finding(
    "copied_neurons",
    "neurons that are copies",
    rank=76,
    look_next="Two equal neurons are one of twice the output: usual after a network was widened by copying.",
)
@finding("closed_gates", "neurons that can never open", rank=77,
         look_next="Whatever the input, what their activation takes is negative: they pass nothing, or nearly nothing, "
                   "and get no gradient from a ReLU.")  # fmt: skip
def _neurons(network: Network) -> Iterator[Finding]:
    layer, expert = network.place
    where = f"Layer {layer}" if expert is None else f"Expert {expert} of layer {layer}"
    total = len(network.norms["up"])
    closed = np.empty(0, int) if network.most is None else np.flatnonzero(network.most <= 0)
    for kind, neurons, words in (
        ("dead_neurons", network.dead.tolist(), "neither read nor write anything to speak of"),
        ("copied_neurons", network.copies, "read and write the same directions as another"),
        ("closed_gates", closed.tolist(), "cannot get a positive input"),
    ):
        if neurons:
            first = ", ".join(map(str, neurons[:NAMED]))
            text = f"{where}: {len(neurons):,} of {total:,} neurons {words}, the first {first}."
            members = tuple(Member("neuron", neuron) for neuron in neurons[:NAMED])
            yield Finding(
                kind=kind, layer=layer, measure="neurons", number=float(len(neurons)), usual=0.0, text=text,
                members=members,
            )  # fmt: skip


@finding("outlying_channels", "channels that networks write most to", rank=30,
         look_next="Massive activations and outlier dimensions are often these; see `weightscope outliers`. Quantise "
                   "them with care.")  # fmt: skip
def _channels(networks: Sequence[Network]) -> Iterator[Finding]:
    """Channels of the stream whose rows of down are far above the others' in most layers."""
    written = [each.written for each in networks if each.written is not None and each.written.any()]
    widths = {len(each) for each in written}
    if len(widths) != 1 or len(written) < 2:
        return
    logs = np.array([log_measure(each) for each in written])  # (networks, d)
    differences = logs - np.nanmedian(logs, axis=1, keepdims=True)
    far = np.array([robust_z(row) >= CHANNEL_Z for row in logs]) & (differences >= np.log(CHANNEL_FACTOR))
    if len(channels := np.flatnonzero(far.mean(axis=0) > 0.5)):
        times = np.exp(np.median(differences[:, channels], axis=0))  # (c,)
        order = np.argsort(-times)
        named = ", ".join(f"{channels[i]} ({times[i]:.1f} times the median)" for i in order[:NAMED])
        text = f"{counted(len(channels), 'channel')} of {len(logs[0]):,}: networks write most to {named}."
        members = tuple(Member("dimension", int(channels[i]), number=float(times[i])) for i in order)
        yield Finding(kind="outlying_channels", measure="times_median", number=float(times.max()), usual=1.0, text=text,
                      members=members)  # fmt: skip


@finding("copied_experts", "experts that are copies", rank=78,
         look_next="Usual right after a dense model was made a mixture; in a trained mixture two copies do the work of "
                   "one.")  # fmt: skip
@finding(
    "dead_experts",
    "dead experts",
    severity="warning",
    rank=145,
    look_next="Check how the experts were saved: one that is zero makes its tokens pass nothing.",
)
def _experts(rows: Sequence[Row]) -> Iterator[Finding]:
    """Experts of one layer with the same spectra throughout, and those whose matrices are nothing next to others'."""
    by_layer: dict[int, dict[int, dict[str, tuple[float, ...]]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row.expert is not None and row.layer is not None and row.spectrum:
            by_layer[row.layer][row.expert][row.facts.role] = (*row.numbers[:4], row.facts.rms)
    for layer, experts in by_layer.items():
        roles = sorted({role for spectra in experts.values() for role in spectra})
        whole = {expert: np.array([spectra[role] for role in roles]) for expert, spectra in experts.items()
                 if len(spectra) == len(roles)}  # fmt: skip
        rms = {expert: numbers[:, -1] for expert, numbers in whole.items()}
        usual = np.median([*rms.values()], axis=0) if rms else np.empty(0)
        dead = [expert for expert, norms in rms.items() if (norms <= DEAD_EXPERT * usual).any() and (usual > 0).all()]
        groups: dict[int, list[int]] = defaultdict(list)
        for expert, numbers in whole.items():
            if expert not in dead and np.isfinite(numbers).all():
                same = next((e for e in groups if np.allclose(whole[e], numbers, rtol=SAME_SPECTRUM, atol=0)), expert)
                groups[same].append(expert)
        for kind, sets, words in (
            ("dead_experts", [dead] if dead else [], "have a matrix that is nothing next to the others'"),
            (
                "copied_experts",
                [group for group in groups.values() if len(group) > 1],
                "have the same spectra throughout",
            ),
        ):
            for group in sets:
                text = f"Layer {layer}: experts {listed([*map(str, group)], NAMED)} of {len(experts)} {words}."
                members = tuple(Member("expert", expert) for expert in group)
                yield Finding(kind=kind, layer=layer, measure="experts", number=float(len(group)), usual=0.0, text=text,
                              members=members)  # fmt: skip


@finding("router_rows", "experts that a router cannot tell apart", rank=79,
         look_next="Equal rows give two experts the same weight for every token; a row of zeros gives a weight that no "
                   "token changes.")  # fmt: skip
def _routers(routers: Mapping[int, np.ndarray]) -> Iterator[Finding]:
    """Rows of a router that are zero, or parallel to an earlier one and as long."""
    for layer, router in routers.items():
        w = router.astype(np.float64)
        norms = np.linalg.norm(w, axis=1)  # (experts,)
        if w.ndim != 2 or not np.isfinite(norms).all() or not np.median(norms) > 0:
            continue
        dead = np.flatnonzero(norms <= DEAD_EXPERT * np.median(norms))
        squares = norms[:, None] ** 2 + norms**2 - 2 * (w @ w.T)  # (experts, experts) of their distances
        near = np.triu(squares <= (COPY * norms[:, None]) ** 2, 1).any(axis=0)
        copies = np.setdiff1d(np.flatnonzero(near), dead)
        for rows, words in ((dead, "are zero next to the others"), (copies, "equal an earlier one")):
            if len(rows):
                text = f"Layer {layer}: rows {listed([*map(str, rows)], NAMED)} of its router's {len(w)} {words}."
                members = tuple(Member("expert", int(row)) for row in rows)
                yield Finding(kind="router_rows", layer=layer, measure="experts", number=float(len(rows)), usual=0.0,
                              text=text, members=members)  # fmt: skip

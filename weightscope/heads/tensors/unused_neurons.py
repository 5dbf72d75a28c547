"""Find dead, copied and closed neurons and experts, and channels that networks write most to."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from weightscope.core.errors import counted
from weightscope.heads.tensors.matrices import Matrices, Row
from weightscope.heads.tensors.measure import unreadable
from weightscope.heads.tensors.networks import COPY, Network
from weightscope.model.metrics.neighbours import copies_within
from weightscope.model.metrics.outliers import log_measure, robust_z
from weightscope.model.model import Model
from weightscope.report.findings import Finding, Member, finding, listed

DEAD_EXPERT = 1e-3  # of the median: an expert's Frobenius norm, or a router's row
SAME_SPECTRUM = 1e-6  # relative: experts with such spectra in each of their matrices are copies
# a channel's share of what networks write is above both in most layers
CHANNEL_Z, CHANNEL_FACTOR = 12.0, 4.0
NAMED = 8


def network_findings(model: Model, measured: Matrices) -> Iterator[Finding]:
    """Everything about neurons, channels and experts that a person should look at."""
    for network in measured.networks:
        yield from _neurons(network)
    yield from _channels(measured.networks)
    yield from _experts(measured.rows)
    tensors, unread = model.tensors, unreadable(model.checkpoint)
    routers = [
        t
        for t in tensors
        if t.role == "router" and t.stack in (None, tensors.own) and t.name not in unread
    ]
    yield from _routers(
        {router.layer: router.array() for router in routers if router.layer is not None}
    )


@finding(
    "dead_neurons",
    "dead neurons",
    rank=75,
    look_next="They can be removed without a change. Many in one layer suggest pruning, or a part that was not "
    "saved.",
)
@finding(
    "copied_neurons",
    "neurons that are copies",
    rank=76,
    look_next="Two equal neurons are one of twice the output: usual after a network was widened by copying.",
)
@finding(
    "closed_gates",
    "neurons that can never open",
    rank=77,
    look_next="Whatever the input, what their activation takes is negative: they pass nothing, or nearly nothing, "
    "and get no gradient from a ReLU.",
)
def _neurons(network: Network) -> Iterator[Finding]:
    layer, expert = network.place
    where = f"Layer {layer}" if expert < 0 else f"Expert {expert} of layer {layer}"
    total = network.size
    for kind, neurons, words in (
        ("dead_neurons", network.dead, "neither read nor write anything to speak of"),
        ("copied_neurons", network.copies, "read and write the same directions as another"),
        ("closed_gates", network.closed, "cannot get a positive input"),
    ):
        if neurons:
            first = ", ".join(map(str, neurons[:NAMED]))
            text = f"{where}: {len(neurons):,} of {total:,} neurons {words}, the first {first}."
            members = tuple(Member("neuron", neuron) for neuron in neurons[:NAMED])
            yield Finding(
                kind=kind,
                layer=layer,
                measure="neurons",
                number=float(len(neurons)),
                usual=0.0,
                text=text,
                members=members,
            )


@finding(
    "outlying_channels",
    "channels that networks write most to",
    rank=30,
    look_next="Massive activations and outlier dimensions are often these; see `weightscope outliers`. Quantise "
    "them with care.",
)
def _channels(networks: Sequence[Network]) -> Iterator[Finding]:
    """Channels of the stream whose rows of down are far above the others' in most layers."""
    written = [each.written for each in networks if each.written.any()]
    widths = {len(each) for each in written}
    if len(widths) != 1 or len(written) < 2:
        return
    logs = np.array([log_measure(each) for each in written])  # (networks, d)
    differences = logs - np.nanmedian(logs, axis=1, keepdims=True)
    far = np.array([robust_z(row) >= CHANNEL_Z for row in logs]) & (
        differences >= np.log(CHANNEL_FACTOR)
    )
    if len(channels := np.flatnonzero(far.mean(axis=0) > 0.5)):
        times = np.exp(np.median(differences[:, channels], axis=0))  # (c,)
        order = np.argsort(-times)
        named = ", ".join(f"{channels[i]} ({times[i]:.1f} times the median)" for i in order[:NAMED])
        text = f"{counted(len(channels), 'channel')} of {len(logs[0]):,}: networks write most to {named}."
        members = tuple(
            Member("dimension", int(channels[i]), number=float(times[i])) for i in order
        )
        yield Finding(
            kind="outlying_channels",
            measure="times_median",
            number=float(times.max()),
            usual=1.0,
            text=text,
            members=members,
        )


@finding(
    "copied_experts",
    "experts that are copies",
    rank=78,
    look_next="Usual right after a dense model was made a mixture; in a trained mixture two copies do the work of "
    "one.",
)
@finding(
    "dead_experts",
    "dead experts",
    severity="warning",
    rank=145,
    look_next="Check how the experts were saved: one that is zero makes its tokens pass nothing.",
)
def _experts(rows: Sequence[Row]) -> Iterator[Finding]:
    """Experts of a layer with equal spectra throughout, or with a matrix of next to nothing."""
    by_layer: dict[int, dict[int, dict[str, tuple[float, ...]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for row in rows:
        if row.expert is not None and row.layer is not None and row.spectrum:
            by_layer[row.layer][row.expert][row.facts.role] = (*row.numbers[:4], row.facts.rms)
    for layer, experts in by_layer.items():
        roles = sorted({role for spectra in experts.values() for role in spectra})
        whole = {
            expert: np.array([spectra[role] for role in roles])
            for expert, spectra in experts.items()
            if len(spectra) == len(roles)
        }
        rms = {expert: numbers[:, -1] for expert, numbers in whole.items()}
        usual = np.median([*rms.values()], axis=0) if rms else np.empty(0)
        dead = [
            expert
            for expert, norms in rms.items()
            if (norms <= DEAD_EXPERT * usual).any() and (usual > 0).all()
        ]
        finite = {
            expert: numbers for expert, numbers in whole.items() if np.isfinite(numbers).all()
        }
        alive = [expert for expert in finite if expert not in {*dead}]
        stacked = np.array([finite[expert] for expert in alive])  # (alive, roles, numbers)
        groups: dict[int, list[int]] = {}
        for i, expert in enumerate(alive):
            near = np.isclose(stacked[: i + 1], stacked[i], rtol=SAME_SPECTRUM, atol=0).all(
                axis=(1, 2)
            )
            first = next((alive[j] for j in np.flatnonzero(near) if alive[j] in groups), expert)
            groups.setdefault(first, []).append(expert)
        for kind, sets, words in (
            (
                "dead_experts",
                [dead] if dead else [],
                "have a matrix that is nothing next to the others'",
            ),
            (
                "copied_experts",
                [group for group in groups.values() if len(group) > 1],
                "have the same spectra throughout",
            ),
        ):
            for group in sets:
                text = f"Layer {layer}: experts {listed([*map(str, group)], NAMED)} of {len(experts)} {words}."
                members = tuple(Member("expert", expert) for expert in group)
                yield Finding(
                    kind=kind,
                    layer=layer,
                    measure="experts",
                    number=float(len(group)),
                    usual=0.0,
                    text=text,
                    members=members,
                )


@finding(
    "router_rows",
    "experts that a router cannot tell apart",
    rank=79,
    look_next="Equal rows give two experts the same weight for every token; a row of zeros gives a weight that no "
    "token changes.",
)
def _routers(routers: Mapping[int, np.ndarray]) -> Iterator[Finding]:
    """Rows of a router that are zero, or parallel to an earlier one and as long."""
    for layer, router in routers.items():
        w = router.astype(np.float64)
        norms = np.linalg.norm(w, axis=1)  # (experts,)
        if w.ndim != 2 or not np.isfinite(norms).all() or not np.median(norms) > 0:
            continue
        dead = np.flatnonzero(norms <= DEAD_EXPERT * np.median(norms))
        alive = np.setdiff1d(np.arange(len(w)), dead)
        directions = w[alive] / norms[alive, None]
        copies = alive[copies_within(np.column_stack([directions, np.log(norms[alive])]), COPY)]
        for rows, words in (
            (dead, "are zero next to the others"),
            (copies, "equal an earlier one"),
        ):
            if len(rows):
                text = f"Layer {layer}: rows {listed([*map(str, rows)], NAMED)} of its router's {len(w)} {words}."
                members = tuple(Member("expert", int(row)) for row in rows)
                yield Finding(
                    kind="router_rows",
                    layer=layer,
                    measure="experts",
                    number=float(len(rows)),
                    usual=0.0,
                    text=text,
                    members=members,
                )

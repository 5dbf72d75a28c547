"""Find dead, copied and closed neurons and experts, and channels that networks write most to."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Sized

import numpy as np

from weightscope.core.errors import counted
from weightscope.heads.tensors.matrices import Matrices, Row
from weightscope.heads.tensors.measure import unreadable
from weightscope.heads.tensors.networks import COPY, JudgedNetwork
from weightscope.model.metrics.copies import copies_within
from weightscope.model.metrics.outliers import log_measure, robust_z
from weightscope.model.model import Model
from weightscope.report.findings import Finding, FindingKind, Member, finding, listed

DEAD_EXPERT = 1e-3  # times the median Frobenius norm of experts, or norm of a router's rows
SAME_SPECTRUM = 1e-6  # relative difference of spectra; experts with less in every matrix are copies
CHANNEL_Z = 12.0  # robust z of an outlying channel in most layers; CHANNEL_FACTOR is exceeded too
CHANNEL_FACTOR = 4.0  # times the median channel
NAMED = 8  # neurons, channels or experts in a sentence


def network_findings(model: Model, measured: Matrices) -> Iterator[Finding]:
    """Everything about neurons, channels and experts that a person should look at."""
    for network in measured.networks:
        yield from _neurons(network)
    yield from _channels(measured.networks)
    yield from _experts(measured.rows)
    tensors, unread = model.tensors, unreadable(model.checkpoint)
    routers: dict[int, np.ndarray] = {}
    for tensor in tensors:
        if tensor.role != "router" or tensor.layer is None or tensor.name in unread:
            continue
        if tensor.stack in (None, tensors.own):
            routers[tensor.layer] = tensor.array()
    yield from _routers(routers)


def _count_finding(
    kind: FindingKind, layer: int, what: str, members: Sequence[int], count: int, text: str
) -> Finding:
    """A finding whose number is how many neurons or experts of a layer it is about."""
    return kind(
        layer=layer,
        measure=f"{what}s",
        number=float(count),
        usual=0.0,
        text=text,
        members=tuple(Member(what, index) for index in members),
    )


dead_neurons = finding(
    "dead_neurons",
    "dead neurons",
    rank=75,
    look_next="They can be removed without a change. Many in one layer suggest pruning, or a part "
    "that was not saved.",
)
copied_neurons = finding(
    "copied_neurons",
    "neurons that are copies",
    rank=76,
    look_next="Two equal neurons are one of twice the output: usual after a network was widened "
    "by copying.",
)
closed_gates = finding(
    "closed_gates",
    "neurons that can never open",
    rank=77,
    look_next="Whatever the input, what their activation takes is negative: they pass nothing, or "
    "nearly nothing, and get no gradient from a ReLU.",
)


def _neurons(network: JudgedNetwork) -> Iterator[Finding]:
    layer, expert = network.place
    where = f"Layer {layer}" if expert < 0 else f"Expert {expert} of layer {layer}"
    for kind, neurons, words in (
        (dead_neurons, network.dead, "neither read nor write anything to speak of"),
        (copied_neurons, network.copies, "read and write the same directions as another"),
        (closed_gates, network.closed, "cannot get a positive input"),
    ):
        if neurons:
            count, shown = len(neurons), neurons[:NAMED]
            first = ", ".join(map(str, shown))
            text = f"{where}: {count:,} of {network.size:,} neurons {words}, the first {first}."
            yield _count_finding(kind, layer, "neuron", shown, count, text)


outlying_channels = finding(
    "outlying_channels",
    "channels that networks write most to",
    rank=30,
    look_next="Massive activations and outlier dimensions are often these; see `weightscope "
    "outliers`. Quantise them with care.",
)


def _channels(networks: Sequence[JudgedNetwork]) -> Iterator[Finding]:
    """Channels of the stream whose rows of down are far above the others' in most layers."""
    written = [each.written for each in networks if each.written.any()]
    widths = {len(each) for each in written}
    if len(widths) != 1 or len(written) < 2:
        return
    logs = np.array([log_measure(each) for each in written])  # (networks, d)
    differences = logs - np.nanmedian(logs, axis=1, keepdims=True)
    far = np.array([robust_z(row) >= CHANNEL_Z for row in logs])
    far &= differences >= np.log(CHANNEL_FACTOR)
    channels = np.flatnonzero(far.mean(axis=0) > 0.5)
    if len(channels):
        times = np.exp(np.median(differences[:, channels], axis=0))  # (c,)
        farthest = [(int(channels[i]), float(times[i])) for i in np.argsort(-times)]
        named = ", ".join(f"{j} ({factor:.1f} times the median)" for j, factor in farthest[:NAMED])
        count = f"{counted(len(channels), 'channel')} of {len(logs[0]):,}"
        yield outlying_channels(
            measure="times_median",
            number=float(times.max()),
            usual=1.0,
            text=f"{count}: networks write most to {named}.",
            members=tuple(Member("dimension", j, number=factor) for j, factor in farthest),
        )


copied_experts = finding(
    "copied_experts",
    "experts that are copies",
    rank=78,
    look_next="Usual right after a dense model was made a mixture; in a trained mixture two "
    "copies do the work of one.",
)
dead_experts = finding(
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
        complete = {
            expert: np.array([spectra[role] for role in roles])
            for expert, spectra in experts.items()
            if len(spectra) == len(roles)
        }
        rms = {expert: numbers[:, -1] for expert, numbers in complete.items()}
        usual = np.median([*rms.values()], axis=0) if rms else np.empty(0)
        tiny = [expert for expert, norms in rms.items() if (norms <= DEAD_EXPERT * usual).any()]
        dead = tiny if (usual > 0).all() else []
        alive = {
            expert: numbers
            for expert, numbers in complete.items()
            if np.isfinite(numbers).all() and expert not in dead
        }
        if dead:
            text = (
                f"{_named(layer, dead, experts)} have a matrix that is nothing next to the others'."
            )
            yield _count_finding(dead_experts, layer, "expert", dead, len(dead), text)
        for group in _same_spectra(alive):
            text = f"{_named(layer, group, experts)} have the same spectra throughout."
            yield _count_finding(copied_experts, layer, "expert", group, len(group), text)


def _named(layer: int, group: Sequence[int], experts: Sized) -> str:
    return f"Layer {layer}: experts {listed([*map(str, group)], NAMED)} of {len(experts)}"


def _same_spectra(spectra: Mapping[int, np.ndarray]) -> list[list[int]]:
    """Groups of experts with equal numbers, by expert: (roles, numbers)."""
    experts, stacked = [*spectra], np.array([*spectra.values()])  # (experts, roles, numbers)
    groups: dict[int, list[int]] = {}
    for i, expert in enumerate(experts):
        close = np.isclose(stacked[: i + 1], stacked[i], rtol=SAME_SPECTRUM, atol=0)
        near = np.flatnonzero(close.all(axis=(1, 2)))
        first = next((experts[j] for j in near if experts[j] in groups), expert)
        groups.setdefault(first, []).append(expert)
    return [group for group in groups.values() if len(group) > 1]


router_rows = finding(
    "router_rows",
    "experts that a router cannot tell apart",
    rank=79,
    look_next="Equal rows give two experts the same weight for every token; a row of zeros gives "
    "a weight that no token changes.",
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
                shown = listed([*map(str, rows)], NAMED)
                text = f"Layer {layer}: rows {shown} of its router's {len(w)} {words}."
                yield _count_finding(router_rows, layer, "expert", rows.tolist(), len(rows), text)

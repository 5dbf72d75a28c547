"""The sinks of a model as tables: a row an input and head, a row a head, a row a layer."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weightscope.folder import write_csv, write_npz
from weightscope.metrics.spectra import spectral_gap, stable_rank
from weightscope.sinks.mechanisms import MECHANISMS, SinkMechanisms
from weightscope.text.kinds import Tokens

EVENT_COLUMNS = (
    "input", "layer", "head", "position", "token", "kind", "strength", "epsilon", "event_share", "ratio_out",
    "stable_rank", "norm_ratio", "mechanism",
)  # fmt: skip


class HeadRow(NamedTuple):
    """One head over all inputs.

    Attributes
    ----------
    layer, head : int
    strength : float
        Mean of alpha_s.
    epsilon : float
        Median of the smallest epsilon.
    event_share : float
        Mean share of the queries that give the sink half of their attention or more.
    events : float
        Share of the inputs with a sink event.
    kind : str
        Which kind of token is its sink most often, ...
    kind_share : float
        ... and on what share of the inputs.
    ratio_out, stable_rank, norm_ratio : float
        Medians over the inputs with an event; over all where there is none.
    nop, broadcast, neither : float
        Shares of the inputs with an event of that mechanism; they add up to `events`.
    mechanism : str
        The most frequent one of a sink head (a head with an event on half of the inputs); empty for other heads.
    qk_gap, qk_stable_rank : float
        sigma_1 / sigma_2 and stable rank of W_QK.
    """

    layer: int
    head: int
    strength: float
    epsilon: float
    event_share: float
    events: float
    kind: str
    kind_share: float
    ratio_out: float
    stable_rank: float
    norm_ratio: float
    nop: float
    broadcast: float
    neither: float
    mechanism: str
    qk_gap: float
    qk_stable_rank: float


def head_rows(found: SinkMechanisms) -> list[HeadRow]:
    """All heads, layer by layer."""
    event, mechanism, sink_heads = found.event, found.mechanism, found.sink_heads
    gap, qk_rank = spectral_gap(found.qk_singular_values), stable_rank(found.qk_singular_values)
    rows = []
    for at, head in np.ndindex(*sink_heads.shape):
        one = (slice(None), at, head)
        counts = np.bincount(found.kind[one], minlength=len(found.kinds)) / len(found.kind)
        shares = [float((mechanism[one] == name).mean()) for name in MECHANISMS]
        chosen = event[one] if event[one].any() else np.ones(len(event), bool)
        rows.append(
            HeadRow(
                layer=int(found.layers[at]),
                head=head,
                strength=float(found.strength[one].mean()),
                epsilon=float(np.median(found.epsilon[one])),
                event_share=float(found.share[one].mean()),
                events=float(event[one].mean()),
                kind=found.kinds[counts.argmax()],
                kind_share=float(counts.max()),
                ratio_out=float(np.median(found.ratio[one][chosen])),
                stable_rank=float(np.median(found.rank[one][chosen])),
                norm_ratio=float(np.median(found.norm_ratio[one][chosen])),
                **dict(zip(MECHANISMS, shares, strict=True)),
                mechanism=MECHANISMS[int(np.argmax(shares))] if sink_heads[at, head] else "",
                qk_gap=float(gap[at, head]),
                qk_stable_rank=float(qk_rank[at, head]),
            )
        )
    return rows


class LayerRow(NamedTuple):
    """One layer over all inputs and heads.

    Attributes
    ----------
    layer : int
    kind : str
        Which kind of token is the strongest sink most often, ...
    kind_share : float
        ... and in what share of the inputs and heads.
    token : str
        Which token it is most often, ...
    token_share : float
        ... and in what share.
    events : float
        Share of inputs and heads with a sink event.
    between_before, between_after, through : float
        Medians over inputs; see `SinkMechanisms`.
    """

    layer: int
    kind: str
    kind_share: float
    token: str
    token_share: float
    events: float
    between_before: float
    between_after: float
    through: float


def layer_rows(found: SinkMechanisms, inputs: Mapping[str, np.ndarray], tokens: Tokens) -> list[LayerRow]:
    """All layers in order."""
    rows = []
    for at, layer in enumerate(found.layers):
        kinds = np.bincount(found.kind[:, at].ravel(), minlength=len(found.kinds))
        places = zip(inputs.values(), found.position[:, at], strict=True)
        labels = Counter(tokens.label(sequence, int(p)) for sequence, positions in places for p in positions)
        ((token, count),) = labels.most_common(1)
        rows.append(
            LayerRow(
                layer=int(layer),
                kind=found.kinds[kinds.argmax()],
                kind_share=float(kinds.max() / kinds.sum()),
                token=token,
                token_share=count / kinds.sum(),
                events=float(found.event[:, at].mean()),
                between_before=float(np.median(found.between_before[:, at])),
                between_after=float(np.median(found.between_after[:, at])),
                through=float(np.median(found.through[:, at])),
            )
        )
    return rows


def event_rows(found: SinkMechanisms, inputs: Mapping[str, np.ndarray], tokens: Tokens) -> Iterator[tuple[object, ...]]:
    """A row an input, layer and head, whether its sink makes an event or not; see `EVENT_COLUMNS`."""
    mechanism = found.mechanism
    for index, (name, sequence) in enumerate(inputs.items()):
        for at, head in np.ndindex(*mechanism.shape[1:]):
            one = (index, at, head)
            position = int(found.position[one])
            yield (
                name, int(found.layers[at]), head, position, tokens.label(sequence, position),
                found.kinds[found.kind[one]], float(found.strength[one]), float(found.epsilon[one]),
                float(found.share[one]), float(found.ratio[one]), float(found.rank[one]), float(found.norm_ratio[one]),
                str(mechanism[one]),
            )  # fmt: skip


def write_sinks(found: SinkMechanisms, inputs: Mapping[str, np.ndarray], tokens: Tokens, out: Path) -> None:
    """Write events.csv, heads.csv, layers.csv and sinks.npz, whose arrays are those of `SinkMechanisms`.

    Raises
    ------
    CheckpointError
        A file cannot be written.
    """
    write_csv(out / "events.csv", EVENT_COLUMNS, event_rows(found, inputs, tokens))
    write_csv(out / "heads.csv", HeadRow._fields, head_rows(found))
    write_csv(out / "layers.csv", LayerRow._fields, layer_rows(found, inputs, tokens))
    write_npz(out / "sinks.npz", **{name: np.asarray(values) for name, values in vars(found).items()})

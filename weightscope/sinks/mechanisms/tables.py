"""Tables of what sinks do: a row an event, a head, a layer."""

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from weightscope.mathml import plain
from weightscope.metrics.spectra import spectral_gap, stable_rank
from weightscope.sinks.mechanisms.measures import EPSILONS, MEASURES
from weightscope.sinks.strength import MECHANISMS
from weightscope.tables import Column, Table

if TYPE_CHECKING:
    from weightscope.sinks.mechanisms.measured import SinkMechanisms


def of_events(sinks: "SinkMechanisms") -> Table:
    """A row an input, layer and head, whether its sink makes an event or not."""
    one, at, head = (index.ravel() for index in np.indices(sinks.position.shape))
    return Table([
        Column("input", np.array(list(sinks.inputs.sequences))[one]),
        Column("layer", sinks.layer_indices[at]),
        Column("head", head),
        Column("position", sinks.position.ravel()),
        Column("token", sinks.labels.ravel()),
        Column("kind", np.array(sinks.kinds)[sinks.kind.ravel()]),
        Column("strength", sinks.strength.ravel()),
        Column("epsilon", sinks.epsilon.ravel()),
        Column("event_share", sinks.share.ravel()),
        Column("ratio_out", sinks.ratio.ravel()),
        Column("stable_rank", sinks.rank.ravel()),
        Column("norm_ratio", sinks.norm_ratio.ravel()),
        Column("mechanism", sinks.mechanism.ravel()),
        *(Column(name, sinks.measures[name].ravel(), symbol, meaning=meaning) for name, symbol, meaning in MEASURES),
    ])  # fmt: skip


def of_heads(sinks: "SinkMechanisms") -> Table:
    """A row a head over all inputs. Medians are over the inputs with an event, or over all where there is none."""
    at, head = (index.ravel() for index in np.indices(sinks.sink_heads.shape))
    of_kind = np.stack([sinks.kind == kind for kind in range(len(sinks.kinds))]).mean(axis=1)  # (K, L, H)
    does = np.stack([sinks.mechanism == name for name in MECHANISMS]).mean(axis=1)  # (3, L, H)
    mostly = np.where(sinks.sink_heads, np.array(MECHANISMS)[does.argmax(axis=0)], "")
    chosen = sinks.event | ~sinks.event.any(axis=0)  # (I, L, H)

    def median(values: np.ndarray) -> list[float]:
        return [float(np.median(values[:, i, h][chosen[:, i, h]])) for i, h in zip(at, head, strict=True)]

    return Table([
        Column("layer", sinks.layer_indices[at]),
        Column("head", head),
        Column("strength", sinks.strength.mean(axis=0).ravel(), meaning="mean of $alpha_s$ (eq. 2)"),
        Column("epsilon", np.median(sinks.epsilon, axis=0).ravel(), meaning="median of the smallest epsilon"),
        Column("event_share", sinks.share.mean(axis=0).ravel(),
               meaning="mean share of the queries that give the sink half of their attention or more"),
        Column("events", sinks.event.mean(axis=0).ravel(), meaning="share of the inputs with a sink event"),
        Column("kind", np.array(sinks.kinds)[of_kind.argmax(axis=0).ravel()], "sink",
               meaning="the kind of token that is its sink most often"),
        Column("kind_share", of_kind.max(axis=0).ravel(), meaning="and on what share of the inputs"),
        Column("ratio_out", median(sinks.ratio), "ratio", meaning="$|u_s|$ / mean $|u_j|$"),
        Column("stable_rank", median(sinks.rank), "stable rank", meaning="of $A u$"),
        Column("norm_ratio", median(sinks.norm_ratio), meaning="$|x_s|$ / mean $|x_j|$"),
        *(Column(name, values.ravel(), meaning="share of the inputs with an event of this mechanism")
          for name, values in zip(MECHANISMS, does, strict=True)),
        Column("mechanism", mostly.ravel(), meaning="the most frequent one of a sink head; empty for other heads"),
        Column("qk_gap", spectral_gap(sinks.qk_singular_values).ravel(), "$σ₁/σ₂$ of $W_QK$"),
        Column("qk_stable_rank", stable_rank(sinks.qk_singular_values).ravel(), "stable rank of $W_QK$"),
        *epsilon_sinks(sinks, inputs=0),
        *(Column(name, median(sinks.measures[name]), symbol, meaning=meaning) for name, symbol, meaning in MEASURES),
    ])  # fmt: skip


def of_layers(sinks: "SinkMechanisms") -> Table:
    """A row a layer over all inputs and heads; similarities, variances and norms are medians over inputs."""
    n_layers = len(sinks.layer_indices)
    kinds = [Counter(sinks.kind[:, at].ravel().tolist()) for at in range(n_layers)]
    tokens = [Counter(sinks.labels[:, at].ravel().tolist()).most_common(1)[0] for at in range(n_layers)]
    kind = [max(range(len(sinks.kinds)), key=counts.__getitem__) for counts in kinds]
    total = sinks.kind[:, 0].size
    return Table([
        Column("layer", sinks.layer_indices),
        Column("kind", [sinks.kinds[k] for k in kind], "sink"),
        Column("kind_share", [counts[k] / total for counts, k in zip(kinds, kind, strict=True)], "its share"),
        Column("token", [token for token, _ in tokens]),
        Column("token_share", [count / total for _, count in tokens], "the token's share"),
        Column("events", sinks.event.mean(axis=(0, 2)), meaning="share of inputs and heads with a sink event"),
        *(Column(name, np.median(getattr(sinks, name), axis=0))
          for name in ("between_before", "between_after", "through", "variance_before", "variance_after")),
        *epsilon_sinks(sinks, inputs=(0, 2)),
        *norms_of_kinds(sinks),
    ])  # fmt: skip


def epsilon_sinks(sinks: "SinkMechanisms", inputs: int | tuple[int, ...]) -> list[Column]:
    """Share of these axes, of inputs or of inputs and heads, whose strongest key is an epsilon-sink (Definition 1)."""
    meaning = "share in which every query gives the strongest key 1 - {:g} of its attention or more (Definition 1)"
    return [
        Column(f"sink_at_{e:g}", (sinks.epsilon <= e).mean(axis=inputs).ravel(), f"{e:g}-sinks",
               meaning=meaning.format(e))
        for e in EPSILONS
    ]  # fmt: skip


def norms_of_kinds(sinks: "SinkMechanisms") -> list[Column]:
    """Norms of every kind of token as they enter the layers, medians over inputs (Fig. 14); NaN where none are."""
    columns = []
    for kind, name in enumerate(sinks.kinds):
        some = ~np.isnan(sinks.norm_mean[:, 0, kind])
        for of in ("mean", "largest"):
            norms = getattr(sinks, f"norm_{of}")[some][..., kind]  # (inputs that have any, L)
            values = np.median(norms, axis=0) if some.any() else np.full(len(sinks.layer_indices), np.nan)
            symbol = f"{of} $|x|$, {plain(name)}"
            columns.append(Column(f"norm_{of}_{name}", values, symbol, meaning="of an input's tokens"))
    return columns

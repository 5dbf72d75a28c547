"""What a model's attention sinks do, head by head and input by input (two-sink-mechanisms paper, section 4)."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from weightscope.files import Files
from weightscope.formulas import plain
from weightscope.metrics.spectra import spectral_gap, stable_rank
from weightscope.provenance import Provenance
from weightscope.sinks.inputs import Inputs
from weightscope.sinks.strength import EVENT_SHARE, MECHANISMS, mechanism
from weightscope.tables import Column, Table

EPSILONS = (0.01, 0.1, 0.5)  # thresholds at which epsilon-sinks are counted (Definition 1)


class Measure(NamedTuple):
    """A number for a head and an input.

    Y = A u is what the head writes, |Y| its Frobenius norm, m the number of queries, s the sink, a_s its column of A;
    V is the variance of the tokens (eq. 17), V' that after this head alone has written to them.
    """

    name: str
    symbol: str
    meaning: str


MEASURES = (
    Measure("written", "$|Y|$", "what the head writes, in units of the residual stream"),
    Measure("distance", "$|Y - 1 u_s^⊤|/|Y|$", "distance from the sink's update written everywhere (Lemma 3)"),
    Measure("bound", "$√(m) ε max_j |u_j - u_s|/|Y|$", "Lemma 3's bound on the distance"),
    Measure("residual", "$|Y - a_s u_s^⊤|/|Y|$", "the part that does not come from the sink (eqs 8, 9)"),
    Measure("residual_bound", "$√(m) ε max_j |u_j|/|Y|$", "the bound on that part (eqs 10, 11)"),
    Measure("leading", "$|a_s||u_s|/σ₁(Y)$", "singular value of the sink's part over the largest of Y (eq. 12)"),
    Measure("leading_bound", "$(1 - ε)√(m) |u_s|/σ₁(Y)$", "its lower bound (eq. 12)"),
    Measure("along", "$|cos(v₁(Y), u_s)|$", "between Y's first right singular vector and the sink's update (eq. 12)"),
    Measure(
        "cancelled",
        "$-2⟨S, R⟩/(|S|^2 + |R|^2)$",
        "of the sink's part $S = a_s u_s^⊤$ and the rest $R = Y - S$: 1 where they cancel (Lemma 1)",
    ),
    Measure("against_stream", "$-cos(x_i, u_s)$", "mean over queries: 1 where the sink's update removes the stream"),
    Measure("variance_change", "$V'/V - 1$", "how the head's update changes the tokens' variance (Lemma 4)"),
    Measure("variance_sink", "$Var(a_s)|u_s|²/V$", "what uneven attention to the sink adds to it (eq. 18)"),
    Measure("variance_bound", "bound of $|V'/V - 1|$", "by Lemma 4 (eq. 20)"),
    Measure("key_ratio", "$|k_s|$ / mean $|k_j|$", "the sink's key norm over the others' mean (A.2)"),
    Measure("query_similarity", "cosine of queries", "mean over pairs of different queries, before rotation (A.2)"),
    Measure("update_spread", "sd $|o_i|$ / mean $|o_i|$", "of what positions gather, $o = A v$, before $W_O$ (A.2)"),
    Measure("alignment", "$|cos(x_s, v₁(W_QK))|$", "the sink token along the first key direction of $W_QK$ (Lemma 2)"),
    Measure("alignment_others", "$|cos(x_j, v₁(W_QK))|$", "the same for the other tokens, on average"),
)


# Tables: one row per event, head or layer


def of_events(sinks: "SinkMechanisms") -> Table:
    """One row per input, layer and head, with or without a sink event."""
    sequence, layer, head = (index.ravel() for index in np.indices(sinks.position.shape))
    return Table([
        Column("input", np.array(list(sinks.inputs.sequences))[sequence]),
        Column("layer", sinks.layer_indices[layer]),
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
    """One row per head over all inputs. Medians are over the inputs with an event, or over all if there is none."""
    layer, head = (index.ravel() for index in np.indices(sinks.sink_heads.shape))
    of_kind = np.stack([sinks.kind == kind for kind in range(len(sinks.kinds))]).mean(axis=1)  # (K, L, H)
    does = np.stack([sinks.mechanism == name for name in MECHANISMS]).mean(axis=1)  # (3, L, H)
    mostly = np.where(sinks.sink_heads, np.array(MECHANISMS)[does.argmax(axis=0)], "")
    chosen = sinks.event | ~sinks.event.any(axis=0)  # (I, L, H)

    def median(values: np.ndarray) -> list[float]:
        return [float(np.median(values[:, i, h][chosen[:, i, h]])) for i, h in zip(layer, head, strict=True)]

    return Table([
        Column("layer", sinks.layer_indices[layer]),
        Column("head", head),
        Column("strength", sinks.strength.mean(axis=0).ravel(), meaning="mean of $alpha_s$ (eq. 2)"),
        Column("epsilon", np.median(sinks.epsilon, axis=0).ravel(), meaning="median of the smallest epsilon"),
        Column("event_share", sinks.share.mean(axis=0).ravel(),
               meaning="mean share of the queries that give the sink half of their attention or more"),
        Column("events", sinks.event.mean(axis=0).ravel(), meaning="share of the inputs with a sink event"),
        Column("kind", np.array(sinks.kinds)[of_kind.argmax(axis=0).ravel()], "sink",
               meaning="the kind of token that is most often its sink"),
        Column("kind_share", of_kind.max(axis=0).ravel(), meaning="share of the inputs with a sink of that kind"),
        Column("ratio_out", median(sinks.ratio), "ratio", meaning="$|u_s|$ / mean $|u_j|$"),
        Column("stable_rank", median(sinks.rank), "stable rank", meaning="of $A u$"),
        Column("norm_ratio", median(sinks.norm_ratio), meaning="$|x_s|$ / mean $|x_j|$"),
        *(Column(name, values.ravel(), meaning="share of the inputs with an event of this mechanism")
          for name, values in zip(MECHANISMS, does, strict=True)),
        Column("mechanism", mostly.ravel(), meaning="the sink head's most frequent mechanism; empty for other heads"),
        Column("qk_gap", spectral_gap(sinks.qk_singular_values).ravel(), "$σ₁/σ₂$ of $W_QK$"),
        Column("qk_stable_rank", stable_rank(sinks.qk_singular_values).ravel(), "stable rank of $W_QK$"),
        *epsilon_sinks(sinks, inputs=0),
        *(Column(name, median(sinks.measures[name]), symbol, meaning=meaning) for name, symbol, meaning in MEASURES),
    ])  # fmt: skip


def of_layers(sinks: "SinkMechanisms") -> Table:
    """One row per layer over all inputs and heads; similarities, variances and norms are medians over inputs."""
    n_layers = len(sinks.layer_indices)
    kinds = [Counter(sinks.kind[:, layer].ravel().tolist()) for layer in range(n_layers)]
    tokens = [Counter(sinks.labels[:, layer].ravel().tolist()).most_common(1)[0] for layer in range(n_layers)]
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
    """Norms of every kind of token entering the layers, medians over inputs (Fig. 14); NaN where there are none."""
    columns = []
    for kind, name in enumerate(sinks.kinds):
        some = ~np.isnan(sinks.norm_mean[:, 0, kind])
        for statistic in ("mean", "largest"):
            norms = getattr(sinks, f"norm_{statistic}")[some][..., kind]  # (inputs that have any, L)
            values = np.median(norms, axis=0) if some.any() else np.full(len(sinks.layer_indices), np.nan)
            symbol = f"{statistic} $|x|$, {plain(name)}"
            columns.append(Column(f"norm_{statistic}_{name}", values, symbol, meaning="of an input's tokens"))
    return columns


# The result: a few dozen numbers per head and input; attention and values are not kept.

SINK_HEAD = 0.5  # a sink head has a sink event on at least this share of the inputs


@dataclass(frozen=True, eq=False, repr=False)
class SinkMechanisms:
    """The strongest sink of every head on every input: I inputs, L attention layers of H heads, K kinds of token."""

    model: str  # Its name
    inputs: Inputs
    layer_indices: np.ndarray  # (L,)
    position: np.ndarray  # (I, L, H): The sink's place among the tokens
    kind: np.ndarray  # (I, L, H): Its kind, an index into `kinds`
    strength: np.ndarray  # (I, L, H): alpha_s, its share of the attention of the average query (eq. 2)
    epsilon: np.ndarray  # (I, L, H): The smallest epsilon for which it is an epsilon-sink (Definition 1)
    share: np.ndarray  # (I, L, H): Share of the queries that give it half of their attention or more
    ratio: np.ndarray  # (I, L, H): Its value norm over the mean of the others'
    rank: np.ndarray  # (I, L, H): Stable rank of the head's update A u
    # (I, L, H): The sink's norm in the residual stream that enters the layer over the mean of the others': a massive
    # activation where it is large. A norm before W_QK keeps it from the scores.
    norm_ratio: np.ndarray
    inflow: np.ndarray  # (I, L, H, K): Share of the attention that each kind of token gets
    # between_before, between_after: (I, L): Mean cosine of two tokens as they enter the layer, and with the layer's
    # attention output added.
    between_before: np.ndarray
    between_after: np.ndarray
    through: np.ndarray  # (I, L): Mean cosine of a token with itself across that addition
    # variance_before, variance_after: (I, L): Mean squared distance of the tokens from their mean, before and after it
    # (Lemma 4, eq. 17).
    variance_before: np.ndarray
    variance_after: np.ndarray
    # norm_mean, norm_largest: (I, L, K): Of the norms that tokens of each kind have as they enter the layer; NaN where
    # there are none.
    norm_mean: np.ndarray
    norm_largest: np.ndarray
    # (L, H, r): Of W_QK, at distance 0 under rotation; r is the largest rank, shorter spectra are padded with zeros.
    qk_singular_values: np.ndarray
    measures: Mapping[str, np.ndarray]  # (I, L, H): What `weightscope.sinks.mechanisms` lists
    provenance: Provenance = field(default_factory=Provenance, repr=False)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds of token."""
        return self.inputs.tokens.names

    @cached_property
    def event(self) -> np.ndarray:
        """Whether there is a sink event, (I, L, H) bool: 90 % of the queries give the sink half of their attention."""
        return self.share >= EVENT_SHARE

    @cached_property
    def mechanism(self) -> np.ndarray:
        """What the sink of each event does, (I, L, H) str; empty where there is no event."""
        return np.where(self.event, mechanism(self.ratio, self.rank), "")

    @cached_property
    def sink_heads(self) -> np.ndarray:
        """Heads with a sink event on half of the inputs or more, (L, H) bool."""
        return self.event.mean(axis=0) >= SINK_HEAD

    @cached_property
    def labels(self) -> np.ndarray:
        """The sink's token in words, (I, L, H) str objects."""
        labels = np.empty(self.position.shape, object)
        for index, sequence in enumerate(self.inputs.sequences.values()):
            for place in np.ndindex(labels.shape[1:]):
                labels[index, *place] = self.inputs.tokens.label(sequence, int(self.position[index, *place]))
        return labels

    @cached_property
    def events(self) -> Table:
        """One row per input, layer and head, with or without a sink event."""
        return of_events(self)

    @cached_property
    def heads(self) -> Table:
        """One row per head over all inputs. Medians are over the inputs with an event, or over all if there is none."""
        return of_heads(self)

    @cached_property
    def layers(self) -> Table:
        """One row per layer over all inputs and heads; similarities, variances and norms are medians over inputs."""
        return of_layers(self)

    def write(self, files: Files) -> None:
        """Write events.csv, heads.csv, layers.csv and sinks.npz, which holds the arrays."""
        for name in ("events", "heads", "layers"):
            files.table(f"{name}.csv", getattr(self, name))
        arrays = {name: getattr(self, name) for name in self.__dataclass_fields__}
        named = ("model", "inputs", "layer_indices", "measures", "provenance")
        kept = {name: array for name, array in arrays.items() if name not in named} | dict(self.measures)
        files.npz("sinks.npz", layers=self.layer_indices, kinds=np.array(self.kinds), **kept)

    def __repr__(self) -> str:
        inputs, layers, heads = self.event.shape
        return f"SinkMechanisms({self.model}: {layers} layers of {heads} heads, {inputs} inputs)"

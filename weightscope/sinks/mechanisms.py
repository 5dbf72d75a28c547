"""What a model's attention sinks do, head by head and input by input (two-sink-mechanisms paper, section 4).

Of every head and input a dozen numbers are kept; attention and values are gone with the batch. A head's updates u_j
are looked at in the r coordinates of the space that its W_O spans, where norms and ranks are those in the d of the
residual stream. LayerScale is part of W_O; in a layer with a gate the updates are those before the gate.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from weightscope.attention.layer import Layer
from weightscope.audits.measure import measure_layer
from weightscope.errors import CheckpointError
from weightscope.folder import Files
from weightscope.metrics.norms import output_triangles
from weightscope.metrics.spectra import spectral_gap, stable_rank
from weightscope.progress import bar
from weightscope.runner.runner import Activations, Runner
from weightscope.sinks.inputs import Inputs
from weightscope.sinks.strength import (
    BROADCAST,
    EVENT_SHARE,
    NEITHER,
    NOP,
    event_share,
    least_epsilon,
    mechanism,
    similarity_between_tokens,
    similarity_through,
    sink_strength,
    update_stable_rank,
    value_norm_ratio,
)
from weightscope.tables import Column, Table

MECHANISMS = (NOP, BROADCAST, NEITHER)
SINK_HEAD = 0.5  # share of the inputs on which a head must have a sink event to be called a sink head


@dataclass(frozen=True, eq=False, repr=False)
class SinkMechanisms:
    """The strongest sink of every head on every input: I inputs, L attention layers of H heads, K kinds of token.

    Attributes
    ----------
    model : str
        Its name.
    inputs : Inputs
    layer_indices : (L,) int array
    position : (I, L, H) int array
        The sink's place among the tokens.
    kind : (I, L, H) int array
        Its kind, an index into `kinds`.
    strength : (I, L, H) array
        alpha_s, its share of the attention of the average query (eq. 2).
    epsilon : (I, L, H) array
        The smallest epsilon for which it is an epsilon-sink (Definition 1).
    share : (I, L, H) array
        Share of the queries that give it half of their attention or more.
    ratio : (I, L, H) array
        Its value norm over the mean of the others'.
    rank : (I, L, H) array
        Stable rank of the head's update A u.
    norm_ratio : (I, L, H) array
        The sink's norm in the residual stream that enters the layer over the mean of the others': a massive activation
        where it is large (Lemma 2).
    inflow : (I, L, H, K) array
        Share of the attention that each kind of token gets.
    between_before, between_after : (I, L) arrays
        Mean cosine of two tokens as they enter the layer, and with the layer's attention output added.
    through : (I, L) array
        Mean cosine of a token with itself across that addition.
    qk_singular_values : (L, H, r) array
        Of W_QK, at distance 0 where there is a rotation; r is the largest, the others are filled up with zeros.
    """

    model: str
    inputs: Inputs
    layer_indices: np.ndarray
    position: np.ndarray
    kind: np.ndarray
    strength: np.ndarray
    epsilon: np.ndarray
    share: np.ndarray
    ratio: np.ndarray
    rank: np.ndarray
    norm_ratio: np.ndarray
    inflow: np.ndarray
    between_before: np.ndarray
    between_after: np.ndarray
    through: np.ndarray
    qk_singular_values: np.ndarray

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds of token."""
        return self.inputs.tokens.names

    @cached_property
    def event(self) -> np.ndarray:
        """Where there is a sink event, (I, L, H) bool: 90 % of the queries give the sink half of their attention."""
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
        for one, sequence in enumerate(self.inputs.sequences.values()):
            for at in np.ndindex(labels.shape[1:]):
                labels[one, *at] = self.inputs.tokens.label(sequence, int(self.position[one, *at]))
        return labels

    @cached_property
    def events(self) -> Table:
        """A row an input, layer and head, whether its sink makes an event or not."""
        one, at, head = (index.ravel() for index in np.indices(self.position.shape))
        return Table([
            Column("input", np.array(list(self.inputs.sequences))[one]),
            Column("layer", self.layer_indices[at]),
            Column("head", head),
            Column("position", self.position.ravel()),
            Column("token", self.labels.ravel()),
            Column("kind", np.array(self.kinds)[self.kind.ravel()]),
            Column("strength", self.strength.ravel()),
            Column("epsilon", self.epsilon.ravel()),
            Column("event_share", self.share.ravel()),
            Column("ratio_out", self.ratio.ravel()),
            Column("stable_rank", self.rank.ravel()),
            Column("norm_ratio", self.norm_ratio.ravel()),
            Column("mechanism", self.mechanism.ravel()),
        ])  # fmt: skip

    @cached_property
    def heads(self) -> Table:
        """A row a head over all inputs. Medians are over the inputs with an event, or over all where there is none."""
        at, head = (index.ravel() for index in np.indices(self.sink_heads.shape))
        of_kind = np.stack([self.kind == kind for kind in range(len(self.kinds))]).mean(axis=1)  # (K, L, H)
        does = np.stack([self.mechanism == name for name in MECHANISMS]).mean(axis=1)  # (3, L, H)
        mostly = np.where(self.sink_heads, np.array(MECHANISMS)[does.argmax(axis=0)], "")
        chosen = self.event | ~self.event.any(axis=0)  # (I, L, H)

        def median(values: np.ndarray) -> list[float]:
            return [float(np.median(values[:, i, h][chosen[:, i, h]])) for i, h in zip(at, head, strict=True)]

        return Table([
            Column("layer", self.layer_indices[at]),
            Column("head", head),
            Column("strength", self.strength.mean(axis=0).ravel(), meaning="mean of alpha_s (eq. 2)"),
            Column("epsilon", np.median(self.epsilon, axis=0).ravel(), meaning="median of the smallest epsilon"),
            Column("event_share", self.share.mean(axis=0).ravel(),
                   meaning="mean share of the queries that give the sink half of their attention or more"),
            Column("events", self.event.mean(axis=0).ravel(), meaning="share of the inputs with a sink event"),
            Column("kind", np.array(self.kinds)[of_kind.argmax(axis=0).ravel()], "sink",
                   meaning="the kind of token that is its sink most often"),
            Column("kind_share", of_kind.max(axis=0).ravel(), meaning="and on what share of the inputs"),
            Column("ratio_out", median(self.ratio), "ratio", meaning="|u_s| / mean |u_j|"),
            Column("stable_rank", median(self.rank), "stable rank", meaning="of A u"),
            Column("norm_ratio", median(self.norm_ratio), meaning="|x_s| / mean |x_j|"),
            *(Column(name, values.ravel(), meaning="share of the inputs with an event of this mechanism")
              for name, values in zip(MECHANISMS, does, strict=True)),
            Column("mechanism", mostly.ravel(), meaning="the most frequent one of a sink head; empty for other heads"),
            Column("qk_gap", spectral_gap(self.qk_singular_values).ravel(), "σ1/σ2 of W_QK"),
            Column("qk_stable_rank", stable_rank(self.qk_singular_values).ravel(), "stable rank of W_QK"),
        ])  # fmt: skip

    @cached_property
    def layers(self) -> Table:
        """A row a layer over all inputs and heads; similarities are medians over inputs."""
        n_layers = len(self.layer_indices)
        kinds = [Counter(self.kind[:, at].ravel().tolist()) for at in range(n_layers)]
        tokens = [Counter(self.labels[:, at].ravel().tolist()).most_common(1)[0] for at in range(n_layers)]
        kind = [max(range(len(self.kinds)), key=counts.__getitem__) for counts in kinds]
        total = self.kind[:, 0].size
        return Table([
            Column("layer", self.layer_indices),
            Column("kind", [self.kinds[k] for k in kind], "sink"),
            Column("kind_share", [counts[k] / total for counts, k in zip(kinds, kind, strict=True)], "its share"),
            Column("token", [token for token, _ in tokens]),
            Column("token_share", [count / total for _, count in tokens], "the token's share"),
            Column("events", self.event.mean(axis=(0, 2)), meaning="share of inputs and heads with a sink event"),
            *(Column(name, np.median(getattr(self, name), axis=0))
              for name in ("between_before", "between_after", "through")),
        ])  # fmt: skip

    def write(self, files: Files) -> None:
        """Write events.csv, heads.csv, layers.csv and sinks.npz, which holds the arrays."""
        for name in ("events", "heads", "layers"):
            files.table(f"{name}.csv", getattr(self, name))
        arrays = {name: getattr(self, name) for name in self.__dataclass_fields__}
        kept = {name: array for name, array in arrays.items() if name not in ("model", "inputs", "layer_indices")}
        files.npz("sinks.npz", layers=self.layer_indices, kinds=np.array(self.kinds), **kept)

    def __repr__(self) -> str:
        inputs, layers, heads = self.event.shape
        return f"SinkMechanisms({self.model}: {layers} layers of {heads} heads, {inputs} inputs)"


def own_coordinates(layer: Layer) -> Layer:
    """A layer whose values are u_j in the coordinates of an orthonormal basis of each head's output space.

    W_O' = Q R, so u = v W_O = v R' Q', and v R' has the lengths and angles of u: r numbers in place of d.
    """
    w_o = np.asarray(layer.w_o)  # (H, r, d)
    return replace(layer, w_o=output_triangles(w_o).astype(w_o.dtype))  # (H, r, r)


def sink_mechanisms(runner: Runner, inputs: Inputs) -> SinkMechanisms:
    """Run a model and see what the strongest sink of each of its heads does on each input.

    Parameters
    ----------
    runner : Runner
    inputs : Inputs

    Raises
    ------
    CheckpointError
        A layer's output is not what its weights give; or a text is of one token, beside which there is no other.
    """
    for name, sequence in inputs.sequences.items():
        if sequence.ndim == 1 and len(sequence) < 2:
            raise CheckpointError(f"{name} has one token; a sink is one among several", file=runner.model.name)
    layers = list(runner.layers.values())
    observer = SinkObserver(layers, inputs)
    runner.observe(list(inputs.sequences.values()), observer)
    r = max(layer.q.of(0)[0].shape[-1] for layer in layers)
    spectra = np.zeros((len(layers), layers[0].n_heads, r))
    for at, layer in enumerate(bar(layers, "spectra", "layer")):
        values = measure_layer(layer, {})["qk_singular_values"]
        spectra[at, :, : values.shape[-1]] = values
    return observer.result(runner.model.title, spectra)


class SinkObserver:
    """An observer that keeps a few numbers a head and input.

    Parameters
    ----------
    layers : sequence of Layer
        Those it will be shown.
    inputs : Inputs
    """

    def __init__(self, layers: Sequence[Layer], inputs: Inputs) -> None:
        self.inputs, self.sequences = inputs, list(inputs.sequences.values())
        self.at = {layer.index: at for at, layer in enumerate(layers)}
        self.reduced = {layer.index: own_coordinates(layer) for layer in bar(layers, "lengths after W_O", "layer")}
        self.arrays: dict[str, np.ndarray] = {}  # by the names of `SinkMechanisms`

    def __call__(self, seen: Activations) -> None:
        where = (seen.inputs, self.at[seen.layer.index])
        b, n, d = seen.x.shape
        updates = self.reduced[seen.layer.index].values(seen.x.reshape(b * n, d))  # (H, b n, r)
        updates = updates.reshape(len(updates), b, n, -1).swapaxes(0, 1)  # (b, H, n, r)
        attention = seen.attention  # (b, H, n, n)
        strength = sink_strength(attention)  # (b, H, n)
        position = strength.argmax(axis=-1)  # (b, H)
        kinds = np.stack([self.inputs.tokens.kinds(self.sequences[index], n) for index in seen.inputs])  # (b, n)
        after = seen.x + seen.output
        for name, values in {
            "position": position,
            "kind": np.take_along_axis(kinds, position, axis=-1),
            "strength": strength.max(axis=-1),
            "epsilon": least_epsilon(attention, position),
            "share": event_share(attention, position),
            "ratio": value_norm_ratio(updates, position),
            "rank": update_stable_rank(attention, updates),
            "norm_ratio": value_norm_ratio(seen.x[:, None], position),  # the norms of (b, 1, n, d)
            "inflow": strength @ np.eye(len(self.inputs.tokens.names))[kinds],  # (b, H, n) @ (b, n, K)
            "between_before": similarity_between_tokens(seen.x),
            "between_after": similarity_between_tokens(after),
            "through": similarity_through(seen.x, after),
        }.items():
            kind = np.int32 if values.dtype.kind == "i" else np.float64
            shape = (len(self.sequences), len(self.at), *values.shape[1:])
            self.arrays.setdefault(name, np.zeros(shape, kind))[where] = values

    def result(self, model: str, qk_singular_values: np.ndarray) -> SinkMechanisms:
        """All that was seen of a model of this name."""
        layers = np.array(list(self.at))
        return SinkMechanisms(model, self.inputs, layers, **self.arrays, qk_singular_values=qk_singular_values)

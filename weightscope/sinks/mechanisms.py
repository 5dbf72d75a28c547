"""What a model's attention sinks do, head by head and input by input (two-sink-mechanisms paper, section 4).

Of every head and input a dozen numbers are kept; attention and values are gone with the batch. A head's updates u_j
are looked at in the r coordinates of the space that its W_O spans, where norms and ranks are those in the d of the
residual stream. LayerScale is part of W_O; in a layer with a gate the updates are those before the gate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from weightscope.attention.layer import Layer
from weightscope.audits.measure import measure_layer
from weightscope.errors import CheckpointError
from weightscope.metrics.norms import output_triangles
from weightscope.progress import bar
from weightscope.runner.runner import Activations, Runner
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
from weightscope.text.kinds import Tokens

MECHANISMS = (NOP, BROADCAST, NEITHER)
SINK_HEAD = 0.5  # share of the inputs on which a head must have a sink event to be called a sink head


@dataclass(frozen=True)
class SinkMechanisms:
    """The strongest sink of every head on every input: I inputs, L attention layers of H heads, K kinds of token.

    Attributes
    ----------
    layers : (L,) int array
    kinds : tuple of K str
    position : (I, L, H) int array
        The sink's place among the tokens.
    kind : (I, L, H) int array
        Its kind.
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

    layers: np.ndarray
    kinds: tuple[str, ...]
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
    def event(self) -> np.ndarray:
        """Where there is a sink event, (I, L, H) bool: 90 % of the queries give the sink half of their attention."""
        return self.share >= EVENT_SHARE

    @property
    def mechanism(self) -> np.ndarray:
        """What the sink of each event does, (I, L, H) str; empty where there is no event."""
        return np.where(self.event, mechanism(self.ratio, self.rank), "")

    @property
    def sink_heads(self) -> np.ndarray:
        """Heads with a sink event on half of the inputs or more, (L, H) bool."""
        return self.event.mean(axis=0) >= SINK_HEAD


def own_coordinates(layer: Layer) -> Layer:
    """A layer whose values are u_j in the coordinates of an orthonormal basis of each head's output space.

    W_O' = Q R, so u = v W_O = v R' Q', and v R' has the lengths and angles of u: r numbers in place of d.
    """
    w_o = np.asarray(layer.w_o)  # (H, r, d)
    return replace(layer, w_o=output_triangles(w_o).astype(w_o.dtype))  # (H, r, r)


def sink_mechanisms(runner: Runner, sequences: Sequence[np.ndarray], tokens: Tokens) -> SinkMechanisms:
    """Run a model and see what the strongest sink of each of its heads does on each input.

    Parameters
    ----------
    runner : Runner
    sequences : sequence of (n,) int arrays or of (channels, height, width) float arrays
    tokens : Tokens
        What the tokens made of them are.

    Raises
    ------
    CheckpointError
        A layer's output is not what its weights give; or a text is of one token, beside which there is no other.
    """
    for index, each in enumerate(sequences):
        if each.ndim == 1 and len(each) < 2:
            raise CheckpointError(f"text {index} has one token; a sink is one among several", file=runner.model.name)
    layers = list(runner.layers.values())
    seen_by = Sinks(layers, sequences, tokens)
    runner.observe(sequences, seen_by)
    r = max(layer.q.of(0)[0].shape[-1] for layer in layers)
    spectra = np.zeros((len(layers), layers[0].n_heads, r))
    for at, layer in enumerate(bar(layers, "spectra", "layer")):
        found = measure_layer(layer, {})["qk_singular_values"]
        spectra[at, :, : found.shape[-1]] = found
    return seen_by.found(spectra)


class Sinks:
    """An observer that keeps a few numbers a head and input.

    Parameters
    ----------
    layers : sequence of Layer
        Those it will be shown.
    sequences : sequence of arrays
    tokens : Tokens
    """

    def __init__(self, layers: Sequence[Layer], sequences: Sequence[np.ndarray], tokens: Tokens) -> None:
        self.sequences, self.tokens = sequences, tokens
        self.at = {layer.index: at for at, layer in enumerate(layers)}
        self.reduced = {layer.index: own_coordinates(layer) for layer in layers}
        shape = (len(sequences), len(layers), layers[0].n_heads)
        names = ("strength", "epsilon", "share", "ratio", "rank", "norm_ratio")
        self.heads = {name: np.full(shape, np.nan) for name in names}
        self.places = {name: np.zeros(shape, np.int32) for name in ("position", "kind")}
        self.inflow = np.zeros((*shape, len(tokens.names)))
        self.layers = {name: np.full(shape[:2], np.nan) for name in ("between_before", "between_after", "through")}

    def __call__(self, seen: Activations) -> None:
        where = (seen.inputs, self.at[seen.layer.index])
        b, n, d = seen.x.shape
        updates = self.reduced[seen.layer.index].values(seen.x.reshape(b * n, d))  # (H, b n, r)
        updates = updates.reshape(len(updates), b, n, -1).swapaxes(0, 1)  # (b, H, n, r)
        attention = seen.attention  # (b, H, n, n)
        strength = sink_strength(attention)  # (b, H, n)
        position = strength.argmax(axis=-1)  # (b, H)
        kinds = np.stack([self.tokens.kinds(self.sequences[index], n) for index in seen.inputs])  # (b, n)

        self.places["position"][where] = position
        self.places["kind"][where] = np.take_along_axis(kinds, position, axis=-1)
        self.heads["strength"][where] = strength.max(axis=-1)
        self.heads["epsilon"][where] = least_epsilon(attention, position)
        self.heads["share"][where] = event_share(attention, position)
        self.heads["ratio"][where] = value_norm_ratio(updates, position)
        self.heads["rank"][where] = update_stable_rank(attention, updates)
        self.heads["norm_ratio"][where] = value_norm_ratio(seen.x[:, None], position)  # the norms of (b, 1, n, d)
        of_kind = np.eye(len(self.tokens.names))[kinds]  # (b, n, K)
        self.inflow[where] = strength @ of_kind
        after = seen.x + seen.output
        self.layers["between_before"][where] = similarity_between_tokens(seen.x)
        self.layers["between_after"][where] = similarity_between_tokens(after)
        self.layers["through"][where] = similarity_through(seen.x, after)

    def found(self, qk_singular_values: np.ndarray) -> SinkMechanisms:
        """All that was seen."""
        return SinkMechanisms(
            np.array(list(self.at)), self.tokens.names, **self.places, **self.heads, inflow=self.inflow, **self.layers,
            qk_singular_values=qk_singular_values,
        )  # fmt: skip

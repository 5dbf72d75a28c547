"""What a model's attention sinks do, head by head and input by input (two-sink-mechanisms paper, section 4).

Of every head and input a few dozen numbers are kept; attention and values are gone with the batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weightscope.folder import Files
from weightscope.sinks.inputs import Inputs
from weightscope.sinks.mechanisms import tables
from weightscope.sinks.strength import EVENT_SHARE, mechanism
from weightscope.tables import Table

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
    variance_before, variance_after : (I, L) arrays
        Mean squared distance of the tokens from their mean, before and after it (Lemma 4, eq. 17).
    norm_mean, norm_largest : (I, L, K) arrays
        Of the norms that tokens of each kind have as they enter the layer; NaN where there are none.
    qk_singular_values : (L, H, r) array
        Of W_QK, at distance 0 where there is a rotation; r is the largest, the others are filled up with zeros.
    measures : mapping of str to (I, L, H) arrays
        What `weightscope.sinks.mechanisms.measures` lists.
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
    variance_before: np.ndarray
    variance_after: np.ndarray
    norm_mean: np.ndarray
    norm_largest: np.ndarray
    qk_singular_values: np.ndarray
    measures: Mapping[str, np.ndarray]

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
        return tables.of_events(self)

    @cached_property
    def heads(self) -> Table:
        """A row a head over all inputs. Medians are over the inputs with an event, or over all where there is none."""
        return tables.of_heads(self)

    @cached_property
    def layers(self) -> Table:
        """A row a layer over all inputs and heads; similarities, variances and norms are medians over inputs."""
        return tables.of_layers(self)

    def write(self, files: Files) -> None:
        """Write events.csv, heads.csv, layers.csv and sinks.npz, which holds the arrays."""
        for name in ("events", "heads", "layers"):
            files.table(f"{name}.csv", getattr(self, name))
        arrays = {name: getattr(self, name) for name in self.__dataclass_fields__}
        named = ("model", "inputs", "layer_indices", "measures")
        kept = {name: array for name, array in arrays.items() if name not in named} | dict(self.measures)
        files.npz("sinks.npz", layers=self.layer_indices, kinds=np.array(self.kinds), **kept)

    def __repr__(self) -> str:
        inputs, layers, heads = self.event.shape
        return f"SinkMechanisms({self.model}: {layers} layers of {heads} heads, {inputs} inputs)"

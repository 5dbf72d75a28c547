"""Attention sinks: their strength, and what a head does with them (two-sink-mechanisms paper).

attention is (..., m, n): A_ij is what query i gives to key j, leading axes are images, layers or heads. A set of
queries is the rows that are handed in. updates is (..., n, d): u_j, what key j would write into the residual stream if
it got all of the attention, W_O v_j times LayerScale. Norms, ranks and cosines stay the same in any orthonormal
coordinates of the space the u_j lie in, so a head's r coordinates there can replace the d of the residual stream.

Two algorithms look alike in attention: a sink of negligible value is an adaptive no-op (hypothesis 1), and a sink
whose value is written everywhere is a broadcast (hypothesis 2).
"""

from typing import NamedTuple

import numpy as np

from weightscope.metrics.spectra import stable_rank

# A sink event: at least this share of queries gives the strongest sink at least this much attention.
EVENT_SHARE = 0.9
EVENT_WEIGHT = 0.5
# The rule of the paper's code for the sink of such an event.
NOP_RATIO = 0.2  # at most: the sink writes a fifth of what another token does on average
BROADCAST_RATIO = 0.5  # at least ...
BROADCAST_RANK = 1.5  # ... and at most: the update is one vector for all

NOP, BROADCAST, NEITHER = "nop", "broadcast", "neither"
MECHANISMS = (NOP, BROADCAST, NEITHER)


class Sink(NamedTuple):
    """The strongest sink of each head."""

    position: np.ndarray
    """Its index s among the keys, shape (...)."""
    strength: np.ndarray
    """alpha_s, its share of the average query's attention, shape (...)."""


def sink_strength(attention: np.ndarray) -> np.ndarray:
    """alpha_j = mean_i A_ij (eq. 2), for every key: (..., m, n) -> (..., n). Attention spread evenly gives 1/n."""
    return attention.mean(axis=-2, dtype=np.float64)


def strongest_sink(attention: np.ndarray) -> Sink:
    """s = argmax_j alpha_j and alpha_s (eq. 2); the first of equals."""
    strength = sink_strength(attention)
    position = strength.argmax(axis=-1)
    return Sink(position, at_sink(strength, position))


def epsilon_sinks(attention: np.ndarray, epsilon: float) -> np.ndarray:
    """Which keys get A_ij >= 1 - epsilon of every query (Definition 1): (..., m, n) -> bool (..., n)."""
    return attention.min(axis=-2) >= 1 - epsilon


def least_epsilon(attention: np.ndarray, sink: np.ndarray) -> np.ndarray:
    """1 - min_i A_is, the smallest epsilon for which a key is an epsilon-sink (Definition 1): attention (..., m, n) ->
    (...)."""
    return 1 - sink_column(attention, sink).min(axis=-1)


def event_share(attention: np.ndarray, sink: np.ndarray) -> np.ndarray:
    """Share of the queries that give the sink half of their attention or more: attention (..., m, n) -> (...)."""
    return (sink_column(attention, sink) >= EVENT_WEIGHT).mean(axis=-1)


def sink_event(attention: np.ndarray, sink: np.ndarray) -> np.ndarray:
    """Whether at least 90 % of the queries give the sink half of their attention or more: attention (..., m, n) -> bool
    (...)."""
    return event_share(attention, sink) >= EVENT_SHARE


def attention_shares(attention: np.ndarray) -> np.ndarray:
    """|A_ij| / sum_j |A_ij|: attention without a softmax, on the softmax's scale; a row of zeros stays zero."""
    magnitude = np.abs(attention)
    total = magnitude.sum(axis=-1, keepdims=True)  # (..., m, 1)
    return np.divide(magnitude, total, out=np.zeros_like(magnitude), where=total > 0)


def value_norm_ratio(updates: np.ndarray, sink: np.ndarray) -> np.ndarray:
    """ratio_out = |u_s| / mean |u_j|, the mean over all keys j but s, as in the paper's code: updates (..., n,
    d)."""
    length = norms(updates)  # (..., n)
    sink_length = at_sink(length, sink)
    mean_rest = (length.sum(axis=-1) - sink_length) / (length.shape[-1] - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(mean_rest > 0, sink_length / mean_rest, np.nan))


def update_stable_rank(attention: np.ndarray, updates: np.ndarray) -> np.ndarray:
    """Stable rank |A u|_F^2 / sigma_1(A u)^2 of what a head writes: near 1 where it writes one vector everywhere;
    attention (..., m, n), updates (..., n, d)."""
    written = (attention @ updates).astype(np.float64)  # (..., m, d)
    if written.shape[-1] > written.shape[-2]:
        written = np.swapaxes(written, -1, -2)
    largest = np.abs(written).max(axis=(-2, -1), keepdims=True)
    written = written / np.where(largest > 0, largest, 1.0)  # no square over- or underflows
    gram = np.swapaxes(written, -1, -2) @ written  # the smaller of (..., d, d) and (..., m, m)
    squares = np.linalg.eigvalsh(gram)[..., ::-1]
    return stable_rank(np.sqrt(np.maximum(squares, 0.0)))


def mechanism(ratio: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """What a sink does, by the rule of the paper's code; it applies only to a `sink_event`.

    `NOP` at a value-norm ratio of at most 0.2; `BROADCAST` at one of at least 0.5 if the update's stable rank is at
    most 1.5; otherwise `NEITHER`.
    """
    broadcast = (ratio >= BROADCAST_RATIO) & (rank <= BROADCAST_RANK)
    return np.select([ratio <= NOP_RATIO, broadcast], [NOP, BROADCAST], NEITHER)


def similarity_between_tokens(x: np.ndarray) -> np.ndarray:
    """Mean cosine over all pairs of different tokens, (..., n, d) -> (...): a broadcast raises it (Lemma 4).

    A zero vector counts as orthogonal to all.
    """
    unit = _unit(x)  # (..., n, d)
    n = x.shape[-2]
    total = np.square(unit.sum(axis=-2)).sum(axis=-1) - np.square(unit).sum(axis=(-2, -1))
    return total / (n * (n - 1))


def similarity_through(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Mean cosine between each token and itself after a block, (..., n, d) twice -> (...): a no-op leaves it at 1."""
    return (_unit(before) * _unit(after)).sum(axis=-1).mean(axis=-1)


def norms(x: np.ndarray) -> np.ndarray:
    """Lengths in float64, (..., d) -> (...)."""
    return np.sqrt(np.square(x, dtype=np.float64).sum(axis=-1))


def _unit(x: np.ndarray) -> np.ndarray:
    length = norms(x)[..., None]
    return x / np.where(length > 0, length, 1.0)


def at_sink(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """values[..., index], one number per key taken at the sink: (..., n) and (...) -> (...)."""
    return np.take_along_axis(values, np.asarray(index)[..., None], axis=-1)[..., 0]


def sink_column(attention: np.ndarray, sink: np.ndarray) -> np.ndarray:
    """Attention each query gives the sink: (..., m, n) -> (..., m)."""
    return np.take_along_axis(attention, np.asarray(sink)[..., None, None], axis=-1)[..., 0]


def sink_row(updates: np.ndarray, sink: np.ndarray) -> np.ndarray:
    """The sink's update: (..., n, d) -> (..., d)."""
    return np.take_along_axis(updates, np.asarray(sink)[..., None, None], axis=-2)[..., 0, :]

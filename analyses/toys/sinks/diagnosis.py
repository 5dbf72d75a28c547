"""What the attention of one layer does with its strongest sink, for each sequence and head."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from weightscope.heads.sinks import strength as sinks
from weightscope.model.metrics.sinks import EVENT_SHARE, mechanism
from weightscope.model.metrics.spectra import stable_rank

if TYPE_CHECKING:
    from analyses.toys.sinks.attention import Trace  # needs PyTorch


class Diagnosis(NamedTuple):
    """Arrays of shape (b, h): sequences, heads."""

    sink: np.ndarray
    strength: np.ndarray
    event: np.ndarray
    ratio: np.ndarray
    rank: np.ndarray
    mechanism: np.ndarray  # Of `weightscope.model.metrics.sinks`, or "" where there is no sink event


def diagnose(trace: Trace) -> Diagnosis:
    """Attention without a softmax is judged by its shares, |A_ij| / sum_j |A_ij|; the update uses A unchanged."""
    shares = attention_shares(trace.attention)
    sink, strength = strongest_sink(shares)
    event = sink_event(shares, sink)
    ratio = sinks.value_norm_ratio(trace.updates, sink)
    rank = update_stable_rank(trace.attention, trace.updates)
    return Diagnosis(sink, strength, event, ratio, rank, np.where(event, mechanism(ratio, rank), ""))


class Sink(NamedTuple):
    """The strongest sink of each head."""

    position: np.ndarray  # (...): its index s among the keys
    strength: np.ndarray  # (...): alpha_s, its share of the average query's attention


def strongest_sink(attention: np.ndarray) -> Sink:
    """s = argmax_j alpha_j and alpha_s (eq. 2); the first of equals."""
    strength = sinks.sink_strength(attention)
    position = strength.argmax(axis=-1)
    return Sink(position, sinks.at_sink(strength, position))


def sink_event(attention: np.ndarray, sink: np.ndarray) -> np.ndarray:
    """Whether at least 90 % of the queries give the sink half of their attention or more: attention (..., m, n) -> bool
    (...)."""
    return sinks.event_share(attention, sink) >= EVENT_SHARE


def attention_shares(attention: np.ndarray) -> np.ndarray:
    """|A_ij| / sum_j |A_ij|: attention without a softmax, on the softmax's scale; a row of zeros stays zero."""
    magnitude = np.abs(attention)
    total = magnitude.sum(axis=-1, keepdims=True)  # (..., m, 1)
    return np.divide(magnitude, total, out=np.zeros_like(magnitude), where=total > 0)


def update_stable_rank(attention: np.ndarray, updates: np.ndarray) -> np.ndarray:
    """Stable rank |A u|_F^2 / sigma_1(A u)^2 of what a head writes: near 1 where it writes one vector everywhere;
    attention (..., m, n), updates (..., n, d)."""
    return stable_rank(sinks.first_direction((attention @ updates).astype(np.float64))[0])

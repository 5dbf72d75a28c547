"""What the attention of one layer does with its strongest sink, for each sequence and head."""

from typing import NamedTuple

import numpy as np

from analyses.toys.sinks.attention import Trace
from weightscope.sinks import strength as sinks


class Diagnosis(NamedTuple):
    """Arrays of shape (b, h): sequences, heads."""

    sink: np.ndarray
    strength: np.ndarray
    event: np.ndarray
    ratio: np.ndarray
    rank: np.ndarray
    mechanism: np.ndarray  # Of `weightscope.sinks.strength`, or "" where there is no sink event


def diagnose(trace: Trace) -> Diagnosis:
    """Attention without a softmax is judged by its shares, |A_ij| / sum_j |A_ij|; the update uses A unchanged."""
    shares = sinks.attention_shares(trace.attention)
    sink, strength = sinks.strongest_sink(shares)
    event = sinks.sink_event(shares, sink)
    ratio = sinks.value_norm_ratio(trace.updates, sink)
    rank = sinks.update_stable_rank(trace.attention, trace.updates)
    return Diagnosis(sink, strength, event, ratio, rank, np.where(event, sinks.mechanism(ratio, rank), ""))

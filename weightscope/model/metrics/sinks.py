"""A head's use of a sink, the token with most of its attention: nothing, or one update for all."""

from typing import NamedTuple

import numpy as np

from weightscope.model.metrics.spectra import stable_rank

# A sink event, and the rule of the paper's code for its sink.
EVENT_SHARE = 0.9  # least share of queries that give the strongest sink `EVENT_WEIGHT`
EVENT_WEIGHT = 0.5  # least attention that they give it
NOP_RATIO = 0.2  # at most: the sink writes a fifth of another token's average
BROADCAST_RATIO = 0.5  # at least ...
BROADCAST_RANK = 1.5  # ... and at most: the update is one vector for all

NOP, BROADCAST, NEITHER = "nop", "broadcast", "neither"
MECHANISMS = (NOP, BROADCAST, NEITHER)
NO_SINK = "none"  # the first token gets less than `EVENT_WEIGHT`


def mechanism(ratio: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """A sink's mechanism by the rule of the paper's code; it applies only to a sink event.

    `NOP` at a value-norm ratio of at most 0.2; `BROADCAST` at one of at least 0.5 if the update's
    stable rank is at most 1.5; otherwise `NEITHER`.
    """
    broadcast = (ratio >= BROADCAST_RATIO) & (rank <= BROADCAST_RANK)
    return np.select([ratio <= NOP_RATIO, broadcast], [NOP, BROADCAST], NEITHER)


def first_token_share(attention: np.ndarray) -> np.ndarray:
    """Mean attention from a sequence's last token to its first: (D, H, n, n) -> (H,)."""
    return np.asarray(attention[:, :, -1, 0].mean(axis=0, dtype=np.float64))


def first_token_kind(share: float, attention: np.ndarray, updates: np.ndarray) -> str:
    """A head's use of the first of n tokens, by D sequences: attention (D, n, n), updates (D, n,
    d).

    Its value-norm ratio is the paper's, averaged over the sequences; the stable rank is taken over
    the updates of the last tokens, (D, d).
    """
    if not share >= EVENT_WEIGHT:
        return NO_SINK
    lengths = np.sqrt(np.square(updates, dtype=np.float64).sum(axis=-1))  # (D, n)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = (lengths[:, 0] / lengths[:, 1:].mean(axis=1)).mean()
    received = (attention[:, -1:] @ updates)[:, 0].astype(np.float64)  # (D, d)
    squares = np.maximum(np.linalg.eigvalsh(received @ received.T)[::-1], 0)  # (D,)
    return str(mechanism(ratio, stable_rank(np.sqrt(squares))))


# Massive activations (Sun et al. 2024) exceed both.
MASSIVE = 100
TIMES_MEDIAN = 1000  # times the stream's median magnitude


class Massive(NamedTuple):
    """The largest coordinate of a stream's first token."""

    dimension: int
    layer: int  # the first that it enters with half of its largest value
    value: float  # the largest
    times_median: float


def massive_activation(first: np.ndarray, medians: np.ndarray) -> Massive | None:
    """The massive activation of the first token, or None without one."""
    largest = np.abs(first).max(axis=1)  # (L,)
    with np.errstate(divide="ignore", invalid="ignore"):
        times = np.where(largest > MASSIVE, largest / medians, 0)
    layer = int(times.argmax())
    if not times[layer] > TIMES_MEDIAN:
        return None
    dimension = int(np.abs(first[layer]).argmax())
    value = first[:, dimension]
    peak = int(np.abs(value).argmax())
    appears = int(np.flatnonzero(np.abs(value) >= np.abs(value[peak]) / 2)[0])
    return Massive(dimension, appears, float(value[peak]), float(times[layer]))

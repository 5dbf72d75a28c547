"""Attention sinks: their strength, their effect, and Lemmas 2-4 (two-sink-mechanisms paper).

attention is (..., m, n): A_ij is what query i gives to key j, leading axes are images, layers or
heads. A set of queries is the rows that are handed in. updates is (..., n, d): u_j, what key j
would write into the residual stream if it got all of the attention, W_O v_j times LayerScale.
Norms, ranks and cosines stay the same in any orthonormal coordinates of the space the u_j lie in,
so a head's r coordinates there can replace the d of the residual stream.

Two algorithms look alike in attention: a sink of negligible value is an adaptive no-op (hypothesis
1), and a sink whose value is written everywhere is a broadcast (hypothesis 2).

In the lemmas Y = A u is what a head writes, and A_ij need not be a softmax's. With rows that sum to
one and no negative weight, epsilon = max_i sum_{j != s} |A_ij| is Definition 1's 1 - min_i A_is.
"""

from typing import NamedTuple

import numpy as np

from weightscope.model.metrics.sinks import EVENT_WEIGHT


def sink_strength(attention: np.ndarray) -> np.ndarray:
    """alpha_j = mean_i A_ij (eq. 2), for every key: (..., m, n) -> (..., n); 1/n if even."""
    return attention.mean(axis=-2, dtype=np.float64)


def least_epsilon(attention: np.ndarray, sink: np.ndarray) -> np.ndarray:
    """1 - min_i A_is, the least epsilon of an epsilon-sink (Definition 1): (..., m, n) -> (...)."""
    return 1 - sink_column(attention, sink).min(axis=-1)


def event_share(attention: np.ndarray, sink: np.ndarray) -> np.ndarray:
    """Share of queries that give the sink half of their attention or more: (..., m, n) -> (...)."""
    return (sink_column(attention, sink) >= EVENT_WEIGHT).mean(axis=-1)


def value_norm_ratio(updates: np.ndarray, sink: np.ndarray) -> np.ndarray:
    """ratio_out = |u_s| / mean |u_j| over all other keys, as in the paper's code: (..., n, d)."""
    length = norms(updates)  # (..., n)
    sink_length = at_sink(length, sink)
    mean_rest = (length.sum(axis=-1) - sink_length) / (length.shape[-1] - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(mean_rest > 0, sink_length / mean_rest, np.nan))


def similarity_between_tokens(x: np.ndarray) -> np.ndarray:
    """Mean cosine over all pairs of different tokens, (..., n, d) -> (...).

    A broadcast raises it (Lemma 4). A zero vector counts as orthogonal to all.
    """
    unit = unit_vectors(x)  # (..., n, d)
    n = x.shape[-2]
    total = np.square(unit.sum(axis=-2)).sum(axis=-1) - np.square(unit).sum(axis=(-2, -1))
    return total / (n * (n - 1))


def similarity_through(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Mean cosine of tokens with themselves after a block, (..., n, d) -> (...); 1 for a no-op."""
    return (unit_vectors(before) * unit_vectors(after)).sum(axis=-1).mean(axis=-1)


def norms(x: np.ndarray) -> np.ndarray:
    """Lengths in float64, (..., d) -> (...)."""
    return np.sqrt(np.square(x, dtype=np.float64).sum(axis=-1))


def unit_vectors(x: np.ndarray) -> np.ndarray:
    """Vectors of length one along x (..., d); zero where x is."""
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


# Lemmas 2 to 4


class RankOne(NamedTuple):
    """Distance of Y from its sink's update written everywhere; arrays of shape (...).

    a_s is the sink's column of A. `cancelled` is -2 <S, R> / (|S|^2 + |R|^2) of the sink's part
    S = a_s u_s' and the rest R = Y - S, in [-1, 1]: 1 where the sink cancels what the other keys
    write, the second way to do nothing (Lemma 1, proof of Lemma 5); 0 where S or R is zero or the
    two are orthogonal; NaN where both are zero.
    """

    distance: np.ndarray  # |Y - 1 u_s'|_F: Lemma 3 as it is stated
    bound: np.ndarray  # sqrt(m) epsilon max_j |u_j - u_s|, never less than `distance`
    residual: np.ndarray  # |Y - a_s u_s'|_F (eqs 8 and 9)
    residual_bound: np.ndarray  # sqrt(m) epsilon max_{j != s} |u_j|, at least `residual` (10, 11)
    leading: np.ndarray  # |a_s| |u_s|, within `residual` of sigma_1(Y) (eq. 12)
    leading_bound: np.ndarray  # (1 - epsilon) sqrt(m) |u_s|, at most `leading` (eq. 12)
    cancelled: np.ndarray


def rank_one(attention: np.ndarray, updates: np.ndarray, sink: np.ndarray) -> RankOne:
    """Lemma 3 and its proof (eqs 8-12): attention (..., m, n), updates (..., n, d).

    Row i of Y - 1 u_s' is sum_{j != s} A_ij (u_j - u_s) where the row sums to one. A row whose sum
    differs from one adds that difference times u_s; learned sinks and attention without a softmax
    have such rows.
    """
    written = (attention @ updates).astype(np.float64)  # (..., m, d)
    column = sink_column(attention, sink).astype(np.float64)  # (..., m)
    row = sink_row(updates, sink).astype(np.float64)  # (..., d)
    root, epsilon = np.sqrt(attention.shape[-2]), spill(attention, sink)
    unheld = np.abs(1 - attention.sum(axis=-1, dtype=np.float64)).max(axis=-1)  # (...)
    length = norms(row)
    part = column[..., None] * row[..., None, :]  # (..., m, d)
    rest = written - part
    residual, leading = _frobenius(rest), norms(column) * length
    with np.errstate(divide="ignore", invalid="ignore"):
        cancelled = -2 * (part * rest).sum(axis=(-2, -1)) / (leading**2 + residual**2)
    return RankOne(
        distance=_frobenius(written - row[..., None, :]),
        bound=root * (epsilon * norms(updates - row[..., None, :]).max(axis=-1) + unheld * length),
        residual=residual,
        residual_bound=root * epsilon * largest_other(updates, sink),
        leading=leading,
        leading_bound=np.abs(column).min(axis=-1) * root * length,
        cancelled=cancelled,
    )


def against_stream(x: np.ndarray, row: np.ndarray) -> np.ndarray:
    """-cos(x_i, u_s), mean over queries: x (..., m, d), row u_s (..., d) -> (...).

    1 where the sink's update removes what the tokens hold; NaN where u_s or a token is zero.
    """
    x, row = x.astype(np.float64), row.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        cosines = (x @ row[..., None])[..., 0] / (norms(x) * norms(row)[..., None])
    return -cosines.mean(axis=-1)


def spill(attention: np.ndarray, sink: np.ndarray) -> np.ndarray:
    """epsilon = max_i sum_{j != s} |A_ij|, the most that any query gives other keys: (...)."""
    magnitude = np.abs(attention)
    rest = magnitude.sum(axis=-1, dtype=np.float64) - sink_column(magnitude, sink)  # (..., m)
    return np.maximum(rest, 0).max(axis=-1)


def largest_other(updates: np.ndarray, sink: np.ndarray) -> np.ndarray:
    """max_{j != s} |u_j|: (..., n, d) -> (...)."""
    length = norms(updates)  # (..., n)
    is_sink = np.arange(length.shape[-1]) == np.asarray(sink)[..., None]
    return np.where(is_sink, 0.0, length).max(axis=-1)


def first_direction(written: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Singular values of Y (..., m, d), descending, and its first right singular vector.

    (..., k) and (..., d). Eq. 12 expects u_s along that vector.
    """
    largest = np.abs(written).max(axis=(-2, -1), keepdims=True).astype(np.float64)
    unit = written / np.where(largest > 0, largest, 1.0)  # no square over- or underflows
    transposed = np.swapaxes(unit, -1, -2)
    wide = unit.shape[-1] > unit.shape[-2]
    squares, vectors = np.linalg.eigh(unit @ transposed if wide else transposed @ unit)
    first = vectors[..., -1]  # left singular vectors where it is wide
    if wide:
        first = (transposed @ first[..., None])[..., 0]
    length = norms(first)[..., None]
    first = np.where(largest[..., 0] > 0, first, 0.0) / np.where(length > 0, length, 1.0)
    return np.sqrt(np.maximum(squares[..., ::-1], 0)) * largest[..., 0], first


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|<a, b>| / (|a| |b|), (..., d) twice -> (...); NaN where one of them is zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.abs((a * b).sum(axis=-1, dtype=np.float64)) / (norms(a) * norms(b))


def token_variance(x: np.ndarray) -> np.ndarray:
    """V = mean_i |x_i - mean_k x_k|^2 (eq. 17), (..., n, d) -> (...)."""
    return np.square(centred(x)).sum(axis=-1).mean(axis=-1)


def centred(x: np.ndarray) -> np.ndarray:
    """x_i - mean_k x_k (eq. 16), in float64."""
    return x - x.mean(axis=-2, keepdims=True, dtype=np.float64)


def variance_of_weights(attention: np.ndarray, updates: np.ndarray, sink: np.ndarray) -> np.ndarray:
    """Var_i(A_is) |u_s|^2, (...), the spread from uneven attention to the sink (eq. 18, term 2)."""
    weights = sink_column(attention, sink).astype(np.float64)  # (..., m)
    return weights.var(axis=-1) * np.square(norms(sink_row(updates, sink)))


def variance_bound(
    before: np.ndarray, attention: np.ndarray, updates: np.ndarray, sink: np.ndarray
) -> np.ndarray:
    """Bound of |V' - V|: (2 sqrt(V) + c) c, c = sd_i(A_is) |u_s| + epsilon max_{j != s} |u_j|.

    Lemma 4, for attention (..., n, n), updates (..., n, d).

    V' is the variance of x_i + Y_i. This is eq. 20 with O(epsilon) written out: centred, Y_i is
    A_is u_s minus its mean, plus a rest of length at most epsilon max |u_j| (eqs 13-16), so
    sqrt(V') differs from sqrt(V) by at most c. Where all queries attend to the sink alike and
    epsilon is zero, c is zero, and V' = V (eq. 21).
    """
    spread = np.sqrt(variance_of_weights(attention, updates, sink))
    most = spread + spill(attention, sink) * largest_other(updates, sink)
    return (2 * np.sqrt(before) + most) * most


def relative_spread(x: np.ndarray) -> np.ndarray:
    """Standard deviation over mean of the lengths |x_i| (appendix A.2), (..., n, d) -> (...)."""
    length = norms(x)
    with np.errstate(divide="ignore", invalid="ignore"):
        return length.std(axis=-1) / length.mean(axis=-1)


def of_sink_and_others(
    pairs: np.ndarray, visible: np.ndarray, sink: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The sink's number and the other keys' mean, (...) each, over queries that see both.

    pairs (..., m, n): a number for every query and key; visible (..., m, n): whether the query may
    attend to the key. NaN where no query sees the sink and another key.
    """
    other_keys = visible & (np.arange(pairs.shape[-1]) != np.asarray(sink)[..., None])[..., None, :]
    count = other_keys.sum(axis=-1)  # (..., m)
    asked = sink_column(visible, sink) & (count > 0)
    rest = np.where(other_keys, pairs, 0.0).sum(axis=-1, dtype=np.float64) / np.maximum(count, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        queries = np.where(asked.any(axis=-1), asked.sum(axis=-1), np.nan)
        to_sink = np.where(asked, sink_column(pairs, sink), 0.0).sum(axis=-1) / queries
        return to_sink, np.where(asked, rest, 0.0).sum(axis=-1) / queries


def alignment(
    tokens: np.ndarray, direction: np.ndarray, sink: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """|cos| of the sink token, and of the others, with a direction of keys (Lemma 2, eqs 4, 5).

    tokens (..., n, d), direction (H, d), sink (..., H) -> (..., H), (..., H).

    A gate of one singular direction has x_s along v_1 of W_QK = sum_k sigma_k u_k v_k', the key's
    side.
    """
    length = norms(tokens)[..., None]  # (..., n, 1)
    cosines = np.abs(tokens @ direction.T) / np.where(length > 0, length, 1.0)  # (..., n, H)
    sink_cosine = at_sink(np.swapaxes(cosines, -1, -2), sink)  # (..., H)
    return sink_cosine, (cosines.sum(axis=-2) - sink_cosine) / (tokens.shape[-2] - 1)


def _frobenius(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.square(x).sum(axis=(-2, -1)))

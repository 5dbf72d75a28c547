"""What a head does, as far as its weights tell: one function a role, on what enters its layer.

The functions take the stream of single tokens (`stream`). Deep heads also read what earlier heads moved, so roles that
rest on it are carried forward: what previous-token heads are found to write, induction heads are asked to read.
"""

import numpy as np
from scipy.special import softmax

from weightscope.attention.head import Head
from weightscope.attention.layer import Layer
from weightscope.circuitry.stream import N_POSITIONS, Stream
from weightscope.parallel import in_threads

RESAMPLES = 400


def attention_by_position(stream: Stream, *, causal: bool) -> np.ndarray:
    """Attention of the mean query to the mean key, whatever the tokens: (H, P, P), queries along the second axis.

    With learned positions the means are those of the tokens at each position; under rotation one mean is turned to
    every position, which is the kernel k(i - j) of RoPE; additive terms by distance are included.
    """
    layer = stream.layer
    q, k = (_per_position(of(stream.flat), stream) for of in (layer.queries, layer.keys))  # (H, P, r), (G, P, r)
    positions = np.arange(q.shape[1] if q.shape[1] > 1 else N_POSITIONS)
    q, k = (np.broadcast_to(each, (len(each), len(positions), each.shape[2])) for each in (q, k))
    q, k = layer.placed(q, k, positions)
    delta = positions[:, None] - positions
    scores = layer.scale * _of_groups(q, k)
    if layer.additive is not None:
        scores = scores + layer.additive.times * layer.position_bias(delta)
    if layer.softcap is not None:
        scores = layer.softcap * np.tanh(scores / layer.softcap)
    if causal:
        scores = np.where(delta >= 0, scores, -np.inf)
    return softmax(scores, axis=-1)


def shares_by_distance(attention: np.ndarray, *, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Mean attention to the key at each distance i - j, over queries that have keys at all of them.

    Parameters
    ----------
    attention : (H, P, P) array

    Returns
    -------
    distances : (D,) int array
        From 0 in a causal model, and from as far after a token as before it in others.
    shares : (H, D) array
    """
    n = attention.shape[-1]
    queries = np.arange(2 * n // 3, n) if causal else np.arange(n // 3, 2 * n // 3)
    distances = np.arange(0, 2 * n // 3) if causal else np.arange(-(n // 3), n // 3)
    keys = queries[:, None] - distances  # (queries, D)
    return distances, attention[:, queries[:, None], keys].mean(axis=1)


def interval(of_tokens: np.ndarray, n_tokens: int) -> np.ndarray:
    """A 95 % interval for the mean over all tokens of which some were drawn, by resampling those.

    Parameters
    ----------
    of_tokens : (H, T) array
    n_tokens : int
        How many there are. Where all were drawn the interval is the mean itself.

    Returns
    -------
    (2, H) array
        Its ends.
    """
    n = of_tokens.shape[1]
    if n >= n_tokens:
        return np.repeat(of_tokens.mean(axis=1)[None], 2, axis=0)
    drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), RESAMPLES) / n  # how often each is drawn
    return np.quantile(of_tokens @ drawn.T, (0.025, 0.975), axis=1)


def own_match(scores: np.ndarray) -> np.ndarray:
    """How far a token's score with itself stands out among its scores with all tokens, in standard deviations.

    Parameters
    ----------
    scores : (H, T, T) array

    Returns
    -------
    (H, T) array
        0 for a head that does not look at what a token is, NaN where a score is not finite.
    """
    own = np.diagonal(scores, axis1=-2, axis2=-1)  # (H, T)
    spread = scores.std(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(spread == 0, 0.0, (own - scores.mean(axis=-1)) / spread)


def content_scores(stream: Stream, keys: np.ndarray | None = None) -> np.ndarray:
    """Scores of tokens with tokens, (H, T, T), averaged over positions and, under rotation, over distances.

    Parameters
    ----------
    stream : Stream
    keys : (G, T, r) array, optional
        Other keys than the tokens' own.
    """
    layer = stream.layer
    q = _per_token(layer.queries(stream.flat), stream)
    k = _per_token(layer.keys(stream.flat), stream) if keys is None else keys
    return layer.scale * _of_groups(_turned(layer, q), k)


def carried_keys(stream: Stream, carried: np.ndarray) -> np.ndarray:
    """Keys of what earlier heads have brought from other tokens, (T, d) -> (G, T, r), at the stream's usual size."""
    layer, x = stream.layer, stream.x.mean(axis=1)
    sigma = 1.0 if layer.norm is None else layer.norm.sigma(x + carried).mean()
    return layer.k(carried / sigma)


def written(stream: Stream) -> np.ndarray:
    """What each head writes of each token, (H, T, d)."""
    return _per_token(stream.layer.values(stream.flat), stream)


def first_excess(stream: Stream) -> np.ndarray:
    """How much higher the mean query scores the first token than others, in logits: (H,)."""
    layer = stream.layer
    q = _turned(layer, _per_token(layer.queries(stream.flat), stream).mean(axis=1, keepdims=True))  # (H, 1, r)
    k = np.concatenate([layer.keys(stream.first), layer.keys(stream.flat).mean(axis=1, keepdims=True)], axis=1)
    scores = layer.scale * _of_groups(q, k)[:, 0]  # (H, 2)
    return scores[:, 0] - scores[:, 1]


def identity(layer: Layer) -> np.ndarray:
    """Cosine of W_VO with the identity on r dimensions, tr(W_VO) / (sqrt(r) |W_VO|_F), from -1 to 1: (H,)."""

    def of_head(head: Head) -> float:
        w = head.vo
        size = w.frobenius() * np.sqrt(w.rank_bound)
        return float(np.einsum("dr,dr->", w.left, w.right, dtype=np.float64)) / size if size else 0.0

    return np.array(list(in_threads(of_head, layer.heads)))


def _per_position(of_all: np.ndarray, stream: Stream) -> np.ndarray:
    """(heads, T P, r) -> (heads, P, r)."""
    return of_all.reshape(len(of_all), *stream.x.shape[:2], -1).mean(axis=1)


def _per_token(of_all: np.ndarray, stream: Stream) -> np.ndarray:
    """(heads, T P, r) -> (heads, T, r)."""
    return of_all.reshape(len(of_all), *stream.x.shape[:2], -1).mean(axis=2)


def _turned(layer: Layer, q: np.ndarray) -> np.ndarray:
    """Queries averaged over the distances at which they may meet a key."""
    if layer.rotation is None:
        return q
    return np.mean([layer.rotation.rotate_at(q, delta) for delta in range(1, N_POSITIONS)], axis=0)


def _of_groups(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """(H, m, r) queries on the (G, n, r) keys of their groups: (H, m, n)."""
    return q @ np.repeat(k, len(q) // len(k), axis=0).swapaxes(1, 2)

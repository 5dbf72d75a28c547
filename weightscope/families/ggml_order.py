"""What converting to ggml's format does to matrices, undone: functions of an array and of head counts."""

from collections.abc import Callable

import numpy as np

Undo = Callable[[np.ndarray, int, int], np.ndarray]  # of stored values, query heads, key-value heads


def queries_in_halves(rows: np.ndarray, n_heads: int, n_kv_heads: int) -> np.ndarray:
    """Queries whose rows ggml has 0, r/2, 1, r/2 + 1 ... within a head, since it rotates neighbours."""
    pairs = rows.reshape(n_heads, len(rows) // (2 * n_heads), 2, *rows.shape[1:])  # (H, r/2, 2, in)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def keys_in_halves(rows: np.ndarray, n_heads: int, n_kv_heads: int) -> np.ndarray:
    """Keys likewise."""
    return queries_in_halves(rows, n_kv_heads, n_kv_heads)


def turned(w: np.ndarray, n_heads: int, n_kv_heads: int) -> np.ndarray:
    """GPT-2's weights are (in, out), ggml's (out, in)."""
    return w.T


def in_groups(rows: np.ndarray, n_heads: int, n_kv_heads: int) -> np.ndarray:
    """All queries, all keys, all values: back to groups of queries with the key and value that they share."""
    r = len(rows) // (n_heads + 2 * n_kv_heads)
    q, k, v = np.split(rows, [n_heads * r, (n_heads + n_kv_heads) * r])
    groups = [part.reshape(n_kv_heads, -1, *rows.shape[1:]) for part in (q, k, v)]  # (G, heads r, in)
    return np.concatenate(groups, axis=1).reshape(rows.shape)


def less_one(gamma: np.ndarray, n_heads: int, n_kv_heads: int) -> np.ndarray:
    """Norms of gain 1 + w are stored as 1 + w."""
    return gamma - np.float32(1)


HALVES: dict[str, Undo] = {"self_attn.q_proj": queries_in_halves, "self_attn.k_proj": keys_in_halves}

"""What each dimension of a key adds to attention scores (outlier-dimensions paper, section 4.1).

A score is S = q_m k_n' = (q_m W_K') x_n' + terms of the keys' bias, a sum over the dimensions j of x_n:
C = (q_m W_K') * x_n with q_m = x_m W_Q + b_Q (eq. 7). Means of C over queries and keys come from d x r products; no
array of all queries, keys and dimensions is made. What is averaged over tokens runs where its arrays lie, by the array
API standard.
"""

from typing import Any

import numpy as np

from weightscope.attention.rotation import Rotation
from weightscope.device import namespace, vecdot


def asked_of_keys(queries: Any, sees: np.ndarray, rotation: Rotation | None = None) -> Any:
    """The mean query that each key meets: mean over m of q_m R(m - n), over the queries m that see key n.

    Parameters
    ----------
    queries : (..., n, r) array
        q_m before rotation.
    sees : (n, n) bool array, on this machine
        Whether query m may attend to key n. A key that no query sees gets zeros.
    rotation : Rotation, optional
        R(m - n) = R(m) R(n)', so queries are turned forth by their own places, and their mean back by the key's.

    Returns
    -------
    (..., n, r) array
        Its product with a key x_n W_K is the mean of that key's scores.
    """
    shares = sees / np.maximum(sees.sum(axis=0), 1)  # (n, n), columns sum to 1
    weights = namespace(queries).asarray(shares, dtype=queries.dtype)
    if rotation is None:
        return weights.T @ queries
    angles = rotation.angles(np.arange(len(sees)))
    forth = rotation.turn(queries, angles, rotation.factor)
    return rotation.turn(weights.T @ forth, -angles, rotation.factor)


def summed_contributions(keys: Any, asked: Any, w_k: Any) -> Any:
    """C of eq. 7 summed over keys, each meeting its own query: sum over n of (q_n W_K')_j x_nj = (W_K * (X' Q))_j 1.

    Parameters
    ----------
    keys : (n, d) array
        What W_K acts on: x, or x / sigma where a norm was folded into it.
    asked : (H, n, r) array
        One query a key and head, as `asked_of_keys` gives them.
    w_k : (G, d, r) array
        Key-value heads, each shared by H / G heads in turn.

    Returns
    -------
    (H, d) array
    """
    (h, n, r), g, xp = asked.shape, w_k.shape[0], namespace(asked)
    together = keys.T @ xp.reshape(xp.permute_dims(asked, (1, 0, 2)), (n, h * r))  # (d, H r), one large product
    of_heads = xp.reshape(together, (-1, g, h // g, r))  # (d, G, H/G, r)
    summed = vecdot(of_heads, xp.permute_dims(w_k, (1, 0, 2))[:, :, None, :])  # (d, G, H/G)
    return xp.reshape(summed, (-1, h)).T


def contributions_by_kind(keys: Any, asked: Any, w_k: Any, kinds: np.ndarray, n_kinds: int) -> Any:
    """`summed_contributions` of the keys of each kind: (n_kinds, H, d).

    Parameters
    ----------
    keys, asked, w_k
        As there.
    kinds : (n,) int array, on this machine
        Each key's kind, from 0 to n_kinds - 1.
    n_kinds : int
    """
    xp = namespace(keys)
    members = [xp.asarray(np.flatnonzero(kinds == kind)) for kind in range(n_kinds)]
    of_kinds = ((xp.take(keys, those, axis=0), xp.take(asked, those, axis=1)) for those in members)
    return xp.stack([summed_contributions(*those, w_k) for those in of_kinds])


def column_norms(w_q: np.ndarray, w_k: np.ndarray) -> np.ndarray:
    """Norms of the columns of every head's W_QK: how loudly dimension j of a key speaks, whatever the query.

    Parameters
    ----------
    w_q : (H, d, r) array
    w_k : (G, d, r) array

    Returns
    -------
    (H, d) float64 array
    """
    grams = np.einsum("hdr,hds->hrs", w_q, w_q, dtype=np.float64, optimize=True)  # (H, r, r)
    of_head = np.repeat(w_k, len(w_q) // len(w_k), axis=0).astype(np.float64)  # (H, d, r)
    return np.sqrt(np.maximum(((of_head @ grams) * of_head).sum(axis=-1), 0))

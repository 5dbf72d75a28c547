"""How long the vectors are that attention adds up: |f(x)| and |alpha f(x)| (norm-based-attention, sections 4 and 5).

Nothing here forms the vectors f(x) = v(x) W_O of a head, d numbers a token: their lengths come from r-dimensional ones.
"""

from typing import Any

import numpy as np

from weightscope.device import namespace, vecdot
from weightscope.metrics.by_kind import sums_by_kind


def output_triangles(w_o: np.ndarray) -> np.ndarray:
    """The (r, r) triangles that give lengths after W_O: with W_O' = Q R, |v W_O| = |v R'|.

    From a QR: a root of the Gram matrix W_O W_O' = R'R would lose lengths below 1e-8 of the longest.

    Parameters
    ----------
    w_o : (H, r, d) array

    Returns
    -------
    (H, r, min(r, d)) float64 array
        R'.
    """
    return np.asarray(np.linalg.qr(w_o.astype(np.float64).transpose(0, 2, 1), mode="r")).transpose(0, 2, 1)


def value_norms(v: Any, triangles: Any) -> Any:
    """|f(x)| = |v(x) W_O| of every token and head (eq. 8), where these arrays lie.

    Parameters
    ----------
    v : (G, n, r) array
        v(x) of the key-value heads.
    triangles : (H, r, r) array
        `output_triangles` of W_O, in float32 or float64; H is a multiple of G, and heads that share a key-value head
        follow each other.

    Returns
    -------
    (H, n) array of v's dtype
    """
    xp, (g, n, _), (h, *square) = namespace(v), v.shape, triangles.shape
    of_group = xp.reshape(xp.asarray(triangles, dtype=v.dtype), (g, h // g, *square))
    turned = v[:, None, :, :] @ of_group  # (G, H/G, n, r)
    return xp.reshape(xp.sqrt(vecdot(turned, turned)), (h, n))


def given_to_kinds(
    attention: np.ndarray, norms: np.ndarray, kinds: np.ndarray, n_kinds: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sums of alpha, and of |alpha f(x)|, over the tokens of each kind, in the mean over queries (section 5.4).

    Parameters
    ----------
    attention : (b, H, n, n) array
        alpha, keys along the last axis.
    norms : (b, H, n) array
        |f(x)|.
    kinds : (b, n) int array
        Each token's kind, from 0 to n_kinds - 1.
    n_kinds : int

    Returns
    -------
    (b, H, n_kinds) array, (b, H, n_kinds) array
    """
    received = attention.mean(axis=-2)  # (b, H, n): |alpha f| = alpha |f|, and |f| is the same for all queries
    return sums_by_kind(received, kinds, n_kinds), sums_by_kind(received * norms, kinds, n_kinds)

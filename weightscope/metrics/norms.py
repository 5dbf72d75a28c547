"""How long the vectors f(x) = v(x) W_O are that a head adds up (norm-based-attention, section 4).

The vectors, d numbers a token, are never formed: their lengths come from r-dimensional ones.
"""

from typing import Any

import numpy as np

from weightscope.device import namespace, vecdot
from weightscope.parallel import one_blas_thread


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
    with one_blas_thread():  # several would wait for each other longer than they work on matrices as small
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

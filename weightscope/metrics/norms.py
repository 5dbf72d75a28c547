"""How long the vectors f(x) = v(x) W_O are that a head adds up (norm-based-attention, section 4).

The vectors, d numbers a token, are never formed: their lengths come from r-dimensional ones.
"""

from typing import Any

import numpy as np

from weightscope.compute.cores import one_blas_thread
from weightscope.compute.device import namespace, vecdot


def output_triangles(w_o: np.ndarray) -> np.ndarray:
    """The (r, r) triangles that give lengths after W_O: with W_O' = Q R, |v W_O| = |v R'|.

    w_o (H, r, d) -> (r, d).

    From a QR: a root of the Gram matrix W_O W_O' = R'R would lose lengths below 1e-8 of the longest.
    """
    with one_blas_thread():  # several would wait for each other longer than they work on matrices as small
        return np.asarray(np.linalg.qr(w_o.astype(np.float64).transpose(0, 2, 1), mode="r")).transpose(0, 2, 1)


def value_norms(v: Any, triangles: Any) -> Any:
    """|f(x)| = |v(x) W_O| of every token and head (eq. 8), where these arrays lie.

    v (G, n, r), triangles (H, r, r) -> (H, n).
    """
    xp, (g, n, _), (h, *square) = namespace(v), v.shape, triangles.shape
    of_group = xp.reshape(xp.asarray(triangles, dtype=v.dtype), (g, h // g, *square))
    turned = v[:, None, :, :] @ of_group  # (G, H/G, n, r)
    return xp.reshape(xp.sqrt(vecdot(turned, turned)), (h, n))

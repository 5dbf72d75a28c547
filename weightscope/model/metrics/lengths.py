"""Lengths of the vectors f(x) = v(x) W_O that a head adds up (norm-based-attention, section 4).

The vectors, d numbers a token, are never formed: their lengths come from r-dimensional ones. Sums
and means over tokens are of one kind: special ones, punctuation, any other (section 5).
"""

from typing import Any

import numpy as np

from weightscope.core.compute.cores import one_blas_thread
from weightscope.core.compute.device import namespace, vecdot


def output_triangles(w_o: np.ndarray) -> np.ndarray:
    """The (r, r) triangles that give lengths after W_O: with W_O' = Q R, |v W_O| = |v R'|.

    w_o (H, r, d) -> (r, d).

    From a QR: a root of the Gram matrix W_O W_O' = R'R would lose lengths below 1e-8 of the
    longest.
    """
    with one_blas_thread():  # on such small matrices several would mostly wait for each other
        r = np.linalg.qr(w_o.astype(np.float64).transpose(0, 2, 1), mode="r")
        return np.asarray(r).transpose(0, 2, 1)


def value_norms(v: Any, triangles: Any) -> Any:
    """|f(x)| = |v(x) W_O| of every token and head (eq. 8), where these arrays lie.

    v (G, n, r), triangles (H, r, r) -> (H, n).
    """
    xp, (g, n, _), (h, *square) = namespace(v), v.shape, triangles.shape
    of_group = xp.reshape(xp.asarray(triangles, dtype=v.dtype), (g, h // g, *square))
    turned = v[:, None, :, :] @ of_group  # (G, H/G, n, r)
    return xp.reshape(xp.sqrt(vecdot(turned, turned)), (h, n))


def counts_by_kind(kinds: np.ndarray, n_kinds: int) -> np.ndarray:
    """The number of tokens of each kind in a sequence: kinds (..., n) -> (..., n_kinds)."""
    return (kinds[..., None] == np.arange(n_kinds)).sum(axis=-2)


def sums_by_kind(values: np.ndarray, kinds: np.ndarray, n_kinds: int) -> np.ndarray:
    """Sums over the tokens of each kind, the tokens along the last axis.

    values (b, ..., n), kinds (b, n) -> (b, ..., n_kinds).
    """
    members = (kinds[..., None] == np.arange(n_kinds)).astype(values.dtype)  # (b, n, n_kinds)
    flat = values.reshape(len(values), -1, values.shape[-1])  # (b, m, n)
    return (flat @ members).reshape(*values.shape[:-1], n_kinds)


class MeanByKind:
    """A running mean over the tokens of each kind, for any number of batches."""

    def __init__(self, shape: tuple[int, ...], n_kinds: int) -> None:
        self.totals = np.zeros((*shape, n_kinds))
        self.counts = np.zeros(n_kinds, np.int64)  # tokens seen

    def add(self, values: np.ndarray, kinds: np.ndarray) -> None:
        """Take in b sequences: values (b, ..., n), middle axes as in `shape`, and kinds (b, n)."""
        n_kinds = len(self.counts)
        self.totals += sums_by_kind(values, kinds, n_kinds).sum(axis=0, dtype=np.float64)
        self.counts += counts_by_kind(kinds, n_kinds).sum(axis=0)

    @property
    def mean(self) -> np.ndarray:
        """(..., n_kinds) float64 array; NaN for kinds that never occurred."""
        with np.errstate(invalid="ignore"):
            return self.totals / self.counts

"""Sums and means over tokens of one kind: special ones, punctuation, any other (norm-based-attention, section 5)."""

import numpy as np


def counts_by_kind(kinds: np.ndarray, n_kinds: int) -> np.ndarray:
    """How many tokens of each kind a sequence has: kinds (..., n) -> (..., n_kinds)."""
    return (kinds[..., None] == np.arange(n_kinds)).sum(axis=-2)


def sums_by_kind(values: np.ndarray, kinds: np.ndarray, n_kinds: int) -> np.ndarray:
    """Sums over the tokens of each kind, the tokens along the last axis.

    values (b, ..., n), kinds (b, n) -> (b, ..., n_kinds).
    """
    members = (kinds[..., None] == np.arange(n_kinds)).astype(values.dtype)  # (b, n, n_kinds)
    flat = values.reshape(len(values), -1, values.shape[-1])  # (b, m, n)
    return (flat @ members).reshape(*values.shape[:-1], n_kinds)


class MeanByKind:
    """A running mean of something that every token has, by its kind, over any number of batches.
    totals: (..., n_kinds)
    counts: (n_kinds,): Tokens seen.
    """

    def __init__(self, shape: tuple[int, ...], n_kinds: int) -> None:
        self.totals = np.zeros((*shape, n_kinds))
        self.counts = np.zeros(n_kinds, np.int64)

    def add(self, values: np.ndarray, kinds: np.ndarray) -> None:
        """Take in b sequences: values (b, ..., n) and kinds (b, n), the middle axes as given to the constructor."""
        n_kinds = len(self.counts)
        self.totals += sums_by_kind(values, kinds, n_kinds).sum(axis=0, dtype=np.float64)
        self.counts += counts_by_kind(kinds, n_kinds).sum(axis=0)

    @property
    def mean(self) -> np.ndarray:
        """(..., n_kinds) float64 array; NaN for kinds that never occurred."""
        with np.errstate(invalid="ignore"):
            return self.totals / self.counts

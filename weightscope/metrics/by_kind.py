"""Sums and means over tokens of one kind: special ones, punctuation, any other (norm-based-attention, section 5)."""

import numpy as np


def counts_by_kind(kinds: np.ndarray, n_kinds: int) -> np.ndarray:
    """How many tokens of each kind a sequence has.

    Parameters
    ----------
    kinds : (..., n) int array
        Each token's kind, from 0 to n_kinds - 1.
    n_kinds : int

    Returns
    -------
    (..., n_kinds) int array
    """
    return (kinds[..., None] == np.arange(n_kinds)).sum(axis=-2)


def sums_by_kind(values: np.ndarray, kinds: np.ndarray, n_kinds: int) -> np.ndarray:
    """Sums over the tokens of each kind, the tokens along the last axis.

    Parameters
    ----------
    values : (b, ..., n) array
        b sequences of n tokens, with any axes between the two: (b, n_heads, n), (b, n_heads, n queries, n keys).
    kinds : (b, n) int array
        Each token's kind, from 0 to n_kinds - 1.
    n_kinds : int

    Returns
    -------
    (b, ..., n_kinds) array of the values' dtype
        0 for kinds that a sequence does not have.
    """
    members = (kinds[..., None] == np.arange(n_kinds)).astype(values.dtype)  # (b, n, n_kinds)
    flat = values.reshape(len(values), -1, values.shape[-1])  # (b, m, n)
    return (flat @ members).reshape(*values.shape[:-1], n_kinds)


class MeanByKind:
    """A running mean of something that every token has, by its kind, over any number of batches.

    Attributes
    ----------
    totals : (..., n_kinds) float64 array
    counts : (n_kinds,) int64 array
        Tokens seen.
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

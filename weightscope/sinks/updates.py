"""The sink's update as a bias (sink-as-bias paper, eqs 1-6), from sums over positions that are streamed.

Attention writes y_i = u_sink,i + u_others,i + b (eq. 1) at position i: what token 0 sends there, what tokens 1..i send
together, and the output bias. Were the sink a bias, u_sink,i would be the same vector whatever i and the text.

u_sink,i = sum_h alpha_i0h f_h(x_0) has H coefficients, the attention that each head gives token 0, on H directions. In
a causal model x_0 depends on token 0 alone, so that texts which begin with the same token share the directions: every
sum over positions is kept in H coordinates, and no d x d matrix of u_sink is ever formed.

u_ctx,i is the mean over the context tokens, u_others,i / i, as the caption of the paper's Fig. 3 has it. Where i runs
over positions in eqs 3-6 it starts at 1, as in eq. 4: position 0 has no context. mu_sink alone includes it, as eq. 2
says.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np


def mean_of_context(others: np.ndarray) -> np.ndarray:
    """u_ctx,i = u_others,i / i for i = 1 ..., (n, d) -> (n - 1, d): the mean over tokens 1..i of what each sends to i.

    Parameters
    ----------
    others : (n, d) array
        u_others of positions 0 .. n - 1.
    """
    return others[1:] / np.arange(1, len(others), dtype=others.dtype)[:, None]


@dataclass
class _Part:
    """Sums over rows of coefficients on the same directions: float64 sums of blocks in the rows' own precision."""

    directions: np.ndarray | None  # (m, d); None where coefficients are the vectors themselves
    total: np.ndarray  # (m,)
    second: np.ndarray  # (m, m), sum of c c'

    def on_directions(self, coefficients: np.ndarray) -> np.ndarray:
        return coefficients if self.directions is None else coefficients @ self.directions

    def factor(self) -> np.ndarray:
        """(k, d) matrix W with W'W the sum of u u'."""
        squares, vectors = np.linalg.eigh(self.second)
        return self.on_directions(np.sqrt(np.maximum(squares, 0))[:, None] * vectors.T)

    def sum_of_squares(self) -> float:
        if self.directions is None:
            return float(self.second.trace())
        return float((self.second * (self.directions @ self.directions.T)).sum())


@dataclass
class Stack:
    """The matrix C of eq. 4, update vectors of positions and texts as its rows, kept as sums that any number adds to.

    Attributes
    ----------
    count : int
        Rows.
    """

    count: int = 0
    _norms: float = 0.0
    _parts: dict[Hashable, _Part] = field(default_factory=dict)

    def add(self, coefficients: np.ndarray, directions: np.ndarray | None = None, of: Hashable = None) -> None:
        """Add the rows u = coefficients @ directions.

        Parameters
        ----------
        coefficients : (n, m) array
        directions : (m, d) array, optional
            Without them the coefficients are the vectors, m = d.
        of : hashable
            Rows of the same `of` have the same directions, which are read once.
        """
        of = None if directions is None else of  # vectors themselves all go together
        if of not in self._parts:
            m = coefficients.shape[1]
            wide = None if directions is None else directions.astype(np.float64)
            self._parts[of] = _Part(wide, np.zeros(m), np.zeros((m, m)))
        part = self._parts[of]
        part.total += coefficients.sum(axis=0, dtype=np.float64)
        part.second += coefficients.T @ coefficients
        self.count += len(coefficients)
        self._norms += float(np.linalg.norm(part.on_directions(coefficients), axis=1).sum(dtype=np.float64))

    @property
    def mean(self) -> np.ndarray:
        """E[u], (d,)."""
        return np.sum([part.on_directions(part.total) for part in self._parts.values()], axis=0) / self.count

    @property
    def mean_norm(self) -> float:
        """E[|u|]."""
        return self._norms / self.count

    @property
    def mean_square(self) -> float:
        """E[|u|^2]."""
        return sum(part.sum_of_squares() for part in self._parts.values()) / self.count

    def squared_singular_values(self) -> np.ndarray:
        """sigma_k^2 of C, descending; as many as can be non-zero."""
        parts = list(self._parts.values())
        if len(parts) == 1 and parts[0].directions is None:
            return np.maximum(np.linalg.eigvalsh(parts[0].second)[::-1], 0)
        factor = np.concatenate([part.factor() for part in parts])  # (k, d)
        gram = factor @ factor.T if len(factor) < factor.shape[1] else factor.T @ factor
        return np.maximum(np.linalg.eigvalsh(gram)[::-1], 0)


def influence(sink: Stack, others: Stack) -> float:
    """Ratio = E|u_sink| / E|u_others| (eq. 3): 1 where one token writes as much as all others together."""
    return sink.mean_norm / others.mean_norm


def spectral_ratio(updates: Stack) -> float:
    """SpectralRatio = sigma_1^2 / sum_k sigma_k^2 (eq. 5): 1 where all updates are multiples of one vector."""
    squares = updates.squared_singular_values()
    return float(squares[0] / squares.sum())


def normalised_variance(updates: Stack) -> float:
    """R = E|u - mu|^2 / E|u|^2 with mu the mean of these updates (eq. 6): 0 where all are mu, 1 where mu is 0."""
    return float(1 - updates.mean @ updates.mean / updates.mean_square)

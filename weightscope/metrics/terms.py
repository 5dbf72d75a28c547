"""The six terms that the first layer's attention scores are made of (detokenization paper, eq. 14)."""

from dataclasses import dataclass

import numpy as np

from weightscope.factored import Factored


@dataclass(frozen=True)
class SixTerms:
    """Eq. 14 for one head and one sequence; without 1/sqrt(d') and without what is constant in j.

    Attributes
    ----------
    ee, pp, pe, ep : (n, n) arrays
        Comparison terms, rows i (current), columns j (previous): token-token, position-position,
        position i with token j, token i with position j.
    e, p : (n,) arrays
        Self-assertion terms of token j and of position j.
    """

    ee: np.ndarray
    pp: np.ndarray
    pe: np.ndarray
    ep: np.ndarray
    e: np.ndarray
    p: np.ndarray

    def total(self) -> np.ndarray:
        """s_ij, the sum of all six, (n, n)."""
        return self.ee + self.pp + self.pe + self.ep + self.e + self.p


def six_terms(
    qk: Factored, qk_bias: np.ndarray, tokens: np.ndarray, positions: np.ndarray, sigma: np.ndarray
) -> SixTerms:
    """Split s_ij = x_i W_QK x_j' / (sigma_i sigma_j) + b_QK x_j' / sigma_j with x = e + p (eq. 14).

    Parameters
    ----------
    qk : Factored of shape (d, d)
        W_QK of one head, norm folded in.
    qk_bias : (d,) array
        b_QK.
    tokens : (n, d) array
        e of each token of the sequence.
    positions : (n, d) array
        p of each position.
    sigma : (n,) array
        sigma(e + p).
    """
    e, p = tokens / sigma[:, None], positions / sigma[:, None]  # (n, d)
    e_left, p_left = e @ qk.left, p @ qk.left  # (n, r)
    e_right, p_right = e @ qk.right, p @ qk.right  # (n, r)
    return SixTerms(
        ee=e_left @ e_right.T,
        pp=p_left @ p_right.T,
        pe=p_left @ e_right.T,
        ep=e_left @ p_right.T,
        e=e @ qk_bias,
        p=p @ qk_bias,
    )

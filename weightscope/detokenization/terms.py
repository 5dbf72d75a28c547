"""The six terms that the first layer's attention scores are made of, and what each decides (detokenization paper)."""

from dataclasses import dataclass

import numpy as np
from scipy.special import log_softmax

from weightscope.shapes import ShowsShapes

TERMS = ("ee", "pp", "pe", "ep", "e", "p")


@dataclass(frozen=True, eq=False, repr=False)
class Parts(ShowsShapes):
    """What queries or keys are the sum of: a token's part, its position's part, and the bias.

    Attributes
    ----------
    e, p, b : (n, r) arrays
        e W / sigma, p W / sigma and b for each place of a sequence, turned by its rotation where there is one.
    """

    e: np.ndarray
    p: np.ndarray
    b: np.ndarray


@dataclass(frozen=True, eq=False, repr=False)
class SixTerms(ShowsShapes):
    """Eq. 14 for one head and one sequence, without 1/sqrt(d').

    Rows are the current token i, columns the previous token j.

    Attributes
    ----------
    ee, pp, pe, ep : (n, n) arrays
        Comparison terms: token-token, position-position, position i with token j, token i with position j.
    e, p : (n, n) arrays
        Self-assertion terms of token j and of position j: the same in every row unless rotation turns the bias.
    rest : (n, n) array
        What eq. 14 has no term for: all that comes of the keys' bias, constant in j without rotation, and terms by
        distance such as ALiBi's.
    """

    ee: np.ndarray
    pp: np.ndarray
    pe: np.ndarray
    ep: np.ndarray
    e: np.ndarray
    p: np.ndarray
    rest: np.ndarray

    def total(self) -> np.ndarray:
        """s_ij, all of them together, (n, n)."""
        return self.ee + self.pp + self.pe + self.ep + self.e + self.p + self.rest


def six_terms(query: Parts, key: Parts) -> SixTerms:
    """Multiply out s_ij = (q_e + q_p + q_b)_i (k_e + k_p + k_b)_j' (eqs 6-8 and 14).

    Parameters
    ----------
    query, key : Parts
        Of one head, the norm folded in and sigma divided out.
    """
    return SixTerms(
        ee=query.e @ key.e.T,
        pp=query.p @ key.p.T,
        pe=query.p @ key.e.T,
        ep=query.e @ key.p.T,
        e=query.b @ key.e.T,
        p=query.b @ key.p.T,
        rest=(query.e + query.p + query.b) @ key.b.T,
    )


def log_attention(scores: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Logarithm of the softmax over the last axis, minus infinity where a key is not visible; float64.

    Parameters
    ----------
    scores : (..., n) array
    visible : bool array that broadcasts with it
        Every row has a visible key.
    """
    return log_softmax(np.where(visible, scores.astype(np.float64), -np.inf), axis=-1)


def divergence(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """D_KL(P || Q) over the last axis, in nats, of distributions with the same support (eq. 18)."""
    with np.errstate(invalid="ignore"):  # infinity less infinity, where neither looks
        difference = np.where(np.isneginf(log_p), 0.0, log_p - log_q)
    return (np.exp(log_p) * difference).sum(axis=-1)


def term_contributions(terms: SixTerms, scale: float, visible: np.ndarray) -> dict[str, np.ndarray]:
    """c_i of every term: how far attention from position i moves when the term is left out (eqs 15-18).

    Parameters
    ----------
    terms : SixTerms
        Of one head and one sequence.
    scale : float
        What multiplies a score before the softmax, 1/sqrt(d').
    visible : (n, n) bool array
        Which keys each query may attend to.

    Returns
    -------
    dict of str to (n,) float64 array
        By the terms' names, D_KL(P_i || Q_i) in nats, with P lacking the term.
    """
    with_all, without = _with_and_without(terms, scale, visible)
    return {name: divergence(log_p, with_all) for name, log_p in without.items()}


def drawn_contributions(terms: SixTerms, visible: np.ndarray) -> dict[str, np.ndarray]:
    """What the paper's Fig. 4 shows, by its authors' script: D_KL(Q_i || P_i) / (i + 1) of scores as they are.

    They are not divided by sqrt(d'). Eq. 18 has the divergence the other way round, and no quotient. Parameters and
    result as of `term_contributions`.
    """
    with_all, without = _with_and_without(terms, 1.0, visible)
    keys = np.arange(1, len(visible) + 1)
    return {name: divergence(with_all, log_p) / keys for name, log_p in without.items()}


def _with_and_without(terms: SixTerms, scale: float, visible: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logarithms of attention, (n, n), by all terms and without each."""
    total = terms.total()
    return log_attention(scale * total, visible), {
        name: log_attention(scale * (total - getattr(terms, name)), visible) for name in TERMS
    }

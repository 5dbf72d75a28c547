"""How much each of the six terms decides attention (detokenization paper, eqs 15-18)."""

from dataclasses import fields

import numpy as np

from weightscope.detokenization.terms import SixTerms

TERMS = tuple(field.name for field in fields(SixTerms) if field.name != "rest")


def log_softmax(scores: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Logarithm of the softmax over the last axis, minus infinity where a key is not visible; float64.

    Parameters
    ----------
    scores : (..., n) array
    visible : bool array that broadcasts with it
        Every row has a visible key.
    """
    masked = np.where(visible, scores.astype(np.float64), -np.inf)
    masked -= masked.max(axis=-1, keepdims=True)
    return masked - np.log(np.exp(masked).sum(axis=-1, keepdims=True))


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
    total = terms.total()
    with_all = log_softmax(scale * total, visible)  # (n, n)
    return {name: divergence(log_softmax(scale * (total - getattr(terms, name)), visible), with_all) for name in TERMS}

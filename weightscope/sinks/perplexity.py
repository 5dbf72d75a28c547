"""Perplexity of a set of texts, and how sure its change is."""

import numpy as np

RESAMPLES = 1000
INTERVAL = (2.5, 97.5)  # percentiles


def perplexity(losses: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """exp of the mean negative log-likelihood a token, all texts together.

    Parameters
    ----------
    losses : (..., n) array
        Of each text the sum over its predicted tokens, in nats.
    tokens : (..., n) int array
        How many were predicted.
    """
    return np.exp(losses.sum(axis=-1) / tokens.sum(axis=-1))


def change_interval(losses: np.ndarray, baseline: np.ndarray, tokens: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of a change in perplexity: the texts drawn anew with replacement 1,000 times.

    Parameters
    ----------
    losses, baseline : (n,) arrays
        Of the same texts, with and without a change to the model.
    tokens : (n,) int array
    seed : int
    """
    drawn = np.random.default_rng(seed).integers(len(tokens), size=(RESAMPLES, len(tokens)))
    changes = perplexity(losses[drawn], tokens[drawn]) - perplexity(baseline[drawn], tokens[drawn])
    low, high = np.percentile(changes, INTERVAL)
    return float(low), float(high)

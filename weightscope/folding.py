"""Norms absorbed into the projections that follow them: what is left per token is one scalar, 1/sigma(x)."""

import numpy as np


def fold_layer_norm(w: np.ndarray, b: np.ndarray, gamma: np.ndarray, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Absorb a LayerNorm into the affine map that follows it.

    LN(x) W + b = (x / sigma(x)) W' + b' with W' = (I - 11'/d) diag(gamma) W and b' = beta W + b
    (detokenization paper, eqs 9-11).

    Parameters
    ----------
    w : array of shape (..., d, r)
    b : array of shape (..., r)
    gamma, beta : arrays of shape (d,)

    Returns
    -------
    array of shape (..., d, r), array of shape (..., r)
    """
    scaled = gamma[:, None] * w  # (..., d, r)
    return scaled - scaled.mean(axis=-2, keepdims=True), beta @ w + b

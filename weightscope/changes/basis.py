"""What changes the numbers and not the function: a norm's gain in the next matrix, a stream in another basis."""

import numpy as np

from weightscope.attention.factored import Factored
from weightscope.attention.layer import Layer
from weightscope.attention.maps import Affine
from weightscope.model import Model

FLAT = 0.25  # spread of a folded gain, relative to that of the base's gain
PERMUTED = 0.9  # largest weight in each row of a rotation that is a permutation


def is_folded(a: Layer, b: Layer) -> bool:
    """Whether the norm before attention has lost its gain in b while that of a still has one."""
    gains = [q.norm.gamma if isinstance(q, Affine) and q.norm is not None else np.empty(0) for q in (a.q, b.q)]
    if not all(map(len, gains)):
        return False
    spread = [float(gain.std()) / max(float(np.abs(gain.mean())), 1e-30) for gain in gains]
    return spread[1] < FLAT * min(1.0, spread[0])


def rotation_between(a: Model, b: Model) -> np.ndarray:
    """R of x_b = x_a R by orthogonal Procrustes over the tokens that both have (Schoenemann 1966), (d, d)."""
    x, y = a.embeddings, b.embeddings
    n = min(x.n_tokens, y.n_tokens)
    cross = np.zeros((a.config.d_model,) * 2)
    for (_, of_a), (_, of_b) in zip(x.blocks(0, n), y.blocks(0, n), strict=True):
        cross += a.into_stream(of_a).astype(np.float64).T @ b.into_stream(of_b)
    u, _, vt = np.linalg.svd(cross)
    rotation: np.ndarray = u @ vt
    return rotation.astype(np.float32)


def is_permutation(rotation: np.ndarray) -> bool:
    """Whether a rotation only puts dimensions into another order, and changes signs."""
    return bool((np.abs(rotation).max(axis=1) > PERMUTED).all())


def turned(w: Factored, rotation: np.ndarray) -> Factored:
    """R' W R: a map of the first model's stream as it acts on the other's."""
    return Factored(rotation.T @ w.left, rotation.T @ w.right)

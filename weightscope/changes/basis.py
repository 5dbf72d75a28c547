"""What changes the numbers and not the function: a norm's gain in the next matrix, a stream in another basis."""

from dataclasses import dataclass

import numpy as np

from weightscope.attention.factored import Factored
from weightscope.attention.layer import Layer
from weightscope.attention.maps import Affine
from weightscope.changes.thresholds import FLAT, PERMUTED
from weightscope.model import Model
from weightscope.results import ShowsShapes


def is_folded(a: Layer, b: Layer) -> bool:
    """Whether the norm before attention has lost its gain in b while that of a still has one."""
    gains = [q.norm.gamma if isinstance(q, Affine) and q.norm is not None else np.empty(0) for q in (a.q, b.q)]
    if not all(map(len, gains)):
        return False
    spread = [float(gain.std()) / max(float(np.abs(gain.mean())), 1e-30) for gain in gains]
    return spread[1] < FLAT * min(1.0, spread[0])


@dataclass(frozen=True, eq=False, repr=False)
class Basis(ShowsShapes):
    """How the stream of B follows from that of A: x_b = x_a R."""

    rotation: np.ndarray | None = None  # (d, d); None if it is the identity, or unknown
    known: bool = True

    @property
    def same(self) -> bool:
        """Whether tensors of both can be compared directly."""
        return self.rotation is None and self.known

    @property
    def permuted(self) -> bool:
        """Whether dimensions are only in another order, and change signs."""
        return self.rotation is not None and bool((np.abs(self.rotation).max(axis=1) > PERMUTED).all())

    def turned(self, factor: np.ndarray) -> np.ndarray:
        """A factor (d, r) of A in B's basis."""
        return factor if self.rotation is None else self.rotation.T @ factor

    def turned_map(self, w: Factored) -> Factored:
        """R' W R: a map of A's stream as it acts on B's."""
        return w if self.rotation is None else Factored(self.turned(w.left), self.turned(w.right))


def basis_by_tokens(a: Model, b: Model) -> Basis:
    """The rotation by orthogonal Procrustes over the tokens that both have (Schoenemann 1966)."""
    x, y = a.embeddings, b.embeddings
    n = min(x.n_tokens, y.n_tokens)
    cross = np.zeros((a.config.d_model,) * 2)
    for (_, of_a), (_, of_b) in zip(x.blocks(0, n), y.blocks(0, n), strict=True):
        cross += a.into_stream(of_a).astype(np.float64).T @ b.into_stream(of_b)
    u, _, vt = np.linalg.svd(cross)
    return Basis((u @ vt).astype(np.float32))

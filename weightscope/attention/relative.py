"""Keys of distances: what a query meets beside a token's key, a term that knows of the key how far back it is only."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from weightscope.shapes import ShowsShapes


@dataclass(frozen=True, eq=False, repr=False)
class RelativeKeys(ShowsShapes):
    """Keys of distances (Shaw et al. 2018; Transformer-XL, section 3.3), or queries of them (DeBERTa).

    Attributes
    ----------
    at : function of (D,) distances i - j giving (H or 1, D, r)
        Before the layer's scale.
    bias : (H, r) array or None
        Added to what meets them, before it does.
    of_keys : bool
        A token's key meets them rather than its query: they are the distance's queries (position to content).
    coordinate : function of positions giving (n,), or None
        What distances are counted on, a token's row in an image for instance; None for its position.
    """

    at: Callable[[np.ndarray], np.ndarray] = field(repr=False)
    bias: np.ndarray | None = field(default=None, repr=False)
    of_keys: bool = False
    coordinate: Callable[[np.ndarray], np.ndarray] | None = field(default=None, repr=False)

    def apart(self, positions: np.ndarray) -> np.ndarray:
        """Distances i - j between tokens at positions (n,), or (n, axes); shape (n, n)."""
        at = positions if self.coordinate is None else self.coordinate(positions)
        return at[:, None] - at

    def __call__(self, tokens: np.ndarray, apart: np.ndarray) -> np.ndarray:
        """The term of every pair: queries (or keys) (H, n, r) and distances i - j (n, n) -> (H, n, n), unscaled."""
        if self.bias is not None:
            tokens = tokens + self.bias[:, None]
        nearest = int(apart.min(initial=0))
        distances = np.arange(nearest, int(apart.max(initial=0)) + 1)
        met = tokens @ self.at(distances).transpose(0, 2, 1).astype(tokens.dtype)  # (H, n, D)
        which = (apart.T if self.of_keys else apart) - nearest
        term = np.take_along_axis(met, which[None], axis=-1)
        return term.transpose(0, 2, 1) if self.of_keys else term

"""Keys and values of distances: what a query meets and gathers beside a token's, and knows how far back it is only."""

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

    def between(self, q: np.ndarray, k: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """The term of every pair, unscaled: queries (H, n, r), keys (G, n, r) and positions -> (H, n, n)."""
        tokens = np.repeat(k, len(q) // len(k), axis=0) if self.of_keys else q
        return self(tokens, self.apart(positions))

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


@dataclass(frozen=True, eq=False, repr=False)
class RelativeValues(ShowsShapes):
    """Values of distances (Shaw et al. 2018, eq. 3): a head gathers them beside those of tokens, by the same attention.

    Attributes
    ----------
    at : function of (D,) distances i - j giving (H or 1, D, r_v)
    """

    at: Callable[[np.ndarray], np.ndarray] = field(repr=False)

    def __call__(self, attention: np.ndarray) -> np.ndarray:
        """What attention (H, n, n) gathers of them, (H, n, r_v)."""
        n = attention.shape[-1]
        distances = np.arange(1 - n, n)
        by_distance = np.zeros((*attention.shape[:2], len(distances)), attention.dtype)  # (H, n, D)
        which = np.arange(n)[:, None] - np.arange(n) + n - 1
        np.put_along_axis(by_distance, np.broadcast_to(which, attention.shape), attention, axis=-1)
        return np.asarray(by_distance @ self.at(distances).astype(attention.dtype))

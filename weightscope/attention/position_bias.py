"""Terms by where two tokens are, added to scores after scaling: ALiBi slopes, buckets of distances, windows."""

from dataclasses import dataclass, field, replace
from math import log

import numpy as np

from weightscope.attention.gathered import sigmoid
from weightscope.attention.maps import Affine
from weightscope.attention.norms import Norm
from weightscope.errors import CheckpointError
from weightscope.shapes import ShowsShapes


class ByDistance(ShowsShapes):
    """What depends on the distance alone."""

    def between(self, of_queries: np.ndarray, of_keys: np.ndarray) -> np.ndarray:
        """(n,) and (m,) positions -> (n_heads, n, m)."""
        return np.asarray(self(of_queries[:, None] - of_keys))  # type: ignore[operator]


@dataclass(frozen=True, eq=False, repr=False)
class Slopes(ByDistance):
    """ALiBi: -slope times how far back the key is, up to a term constant in the key.

    Attributes
    ----------
    slopes : (n_heads,) array
    times : int
        How often transformers' eager attention adds it; see `families.rows.gpt.alibi_falcon`.
    """

    slopes: np.ndarray = field(repr=False)
    times: int = 1

    def __call__(self, delta: np.ndarray) -> np.ndarray:
        """(...) distances i - j -> (n_heads, ...)."""
        return -np.multiply.outer(self.slopes, delta)


@dataclass(frozen=True, eq=False, repr=False)
class Buckets(ByDistance):
    """T5's relative bias: small distances have a bucket each, larger ones share, logarithmically.

    Attributes
    ----------
    table : (n_buckets, n_heads) array
    furthest : int
        From this distance on everything is in the last bucket.
    times : int
        How often it is added.
    causal : bool
        All buckets are for keys before the query, those after it are in the bucket of distance 0; otherwise each
        direction has half of them.
    """

    table: np.ndarray = field(repr=False)
    furthest: int = 128
    times: int = 1
    causal: bool = False

    def __call__(self, delta: np.ndarray) -> np.ndarray:
        """(...) distances i - j -> (n_heads, ...)."""
        a_side = len(self.table) // (1 if self.causal else 2)
        exact = a_side // 2
        away = np.maximum(delta, 0) if self.causal else np.abs(delta)
        far = np.maximum(away, 1).astype(np.float32)
        shared = exact + (np.log(far / exact) / log(self.furthest / exact) * (a_side - exact)).astype(int)
        bucket = np.where(away < exact, away, np.minimum(shared, a_side - 1))
        return np.moveaxis(self.table[bucket if self.causal else bucket + a_side * (delta < 0)], -1, 0)


@dataclass(frozen=True, eq=False, repr=False)
class BiasGate(ShowsShapes):
    """What a query multiplies a bias by distance by: sigmoid(a) (factor sigmoid(b) - 1) + 2 (WavLM, section III.B).

    Attributes
    ----------
    of : Affine of (n_heads, d, 2)
        a and b of a token.
    factor : (n_heads,) array
    """

    of: Affine
    factor: np.ndarray = field(repr=False)

    def __call__(self, z: np.ndarray) -> np.ndarray:
        """Tokens z = x / sigma(x), (n, d) -> (n_heads, n)."""
        a, b = np.moveaxis(sigmoid(self.of(z)), -1, 0)
        return np.asarray(a * (self.factor[:, None] * b - 1) + 2)

    def after_norm(self, norm: Norm) -> "BiasGate":
        """The gate with the norm before it absorbed."""
        return replace(self, of=self.of.after_norm(norm))

    def after(self, w: np.ndarray, b: np.ndarray) -> "BiasGate":
        """The gate preceded by z -> z w + b."""
        return replace(self, of=self.of.after(w, b))


@dataclass(frozen=True, eq=False, repr=False)
class WindowBias(ShowsShapes):
    """A learned bias for every offset, in rows and columns, of two patches of a window (Swin, eq. 4).

    Attributes
    ----------
    table : (2 height - 1, 2 width - 1, n_heads) array
        By rows and by columns from key to query.
    of_class : (3, n_heads) array or None
        Where a class token stands before the patches (BEiT): what is added where it is the query, the key, and both.
    times : int
    """

    table: np.ndarray = field(repr=False)
    of_class: np.ndarray | None = field(default=None, repr=False)
    times: int = 1

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns of the window."""
        return (self.table.shape[0] + 1) // 2, (self.table.shape[1] + 1) // 2

    def __call__(self, delta: np.ndarray) -> np.ndarray:
        """Of patches in one row, (...) columns apart -> (n_heads, ...)."""
        height, width = self.sides
        if np.abs(delta).max(initial=0) >= width:
            raise self._too_far()
        return np.moveaxis(self.table[height - 1, delta + width - 1], -1, 0)

    def between(self, of_queries: np.ndarray, of_keys: np.ndarray) -> np.ndarray:
        """(n,) and (m,) places in the window, row by row and behind the class token -> (n_heads, n, m)."""
        height, width = self.sides
        first = 0 if self.of_class is None else 1
        if max(of_queries.max(initial=0), of_keys.max(initial=0)) >= first + height * width:
            raise self._too_far()
        (row, column), (key_row, key_column) = (
            np.divmod(np.maximum(of - first, 0), width) for of in (of_queries, of_keys)
        )
        bias = self.table[row[:, None] - key_row + height - 1, column[:, None] - key_column + width - 1]
        if self.of_class is not None:
            query, key = (of_queries == 0)[:, None, None], (of_keys == 0)[:, None]
            from_class, to_class, both = self.of_class
            bias = np.where(query & key, both, np.where(query, from_class, np.where(key, to_class, bias)))
        return np.moveaxis(bias, -1, 0)

    def _too_far(self) -> CheckpointError:
        height, width = self.sides
        return CheckpointError(f"tokens are more than this layer's window of {height} x {width}")

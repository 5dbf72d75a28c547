"""Terms that depend on distance alone, added to scores after scaling: ALiBi slopes and relative-position buckets."""

from dataclasses import dataclass, field
from math import log

import numpy as np

from weightscope.shapes import ShowsShapes


@dataclass(frozen=True, eq=False, repr=False)
class Slopes(ShowsShapes):
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
class Buckets(ShowsShapes):
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

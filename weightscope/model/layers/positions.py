"""Terms by where two tokens are, added to scores after scaling: ALiBi slopes, buckets of distances,
windows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import log
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from weightscope.core.errors import CheckpointError
from weightscope.core.results import ShowsShapes
from weightscope.model.layers.gathered import sigmoid
from weightscope.model.layers.maps import Affine
from weightscope.model.layers.norms import Norm


class ByDistance(ShowsShapes):
    """What depends on the distance alone."""

    def between(self, of_queries: np.ndarray, of_keys: np.ndarray) -> np.ndarray:
        """(n,) and (m,) positions -> (n_heads, n, m)."""
        return np.asarray(self(of_queries[:, None] - of_keys))  # type: ignore[operator]


@dataclass(frozen=True, eq=False, repr=False)
class Slopes(ByDistance):
    """ALiBi: -slope times how far back the key is, up to a term constant in the key."""

    slopes: np.ndarray = field(repr=False)  # (n_heads,)
    # How often transformers' eager attention adds it; see `architectures.distances.alibi_falcon`
    times: int = 1

    def __call__(self, delta: np.ndarray) -> np.ndarray:
        """(...) distances i - j -> (n_heads, ...)."""
        return -np.multiply.outer(self.slopes, delta)


@dataclass(frozen=True, eq=False, repr=False)
class Buckets(ByDistance):
    """T5's relative bias: small distances have a bucket each, larger ones share,
    logarithmically.
    """

    table: np.ndarray = field(repr=False)  # (n_buckets, n_heads)
    furthest: int = 128  # From this distance on everything is in the last bucket
    times: int = 1  # How often it is added
    # All buckets are for keys before the query, those after it are in the bucket of distance 0;
    # otherwise each direction has half the buckets.
    causal: bool = False

    def __call__(self, delta: np.ndarray) -> np.ndarray:
        """(...) distances i - j -> (n_heads, ...)."""
        a_side = len(self.table) // (1 if self.causal else 2)
        exact = a_side // 2
        away = np.maximum(delta, 0) if self.causal else np.abs(delta)
        far = np.maximum(away, 1).astype(np.float32)
        shared = exact + (
            np.log(far / exact) / log(self.furthest / exact) * (a_side - exact)
        ).astype(int)
        bucket = np.where(away < exact, away, np.minimum(shared, a_side - 1))
        return np.moveaxis(
            self.table[bucket if self.causal else bucket + a_side * (delta < 0)], -1, 0
        )


@dataclass(frozen=True, eq=False, repr=False)
class BiasGate(ShowsShapes):
    """What a query multiplies a bias by distance by: sigmoid(a) (factor sigmoid(b) - 1) + 2 (WavLM,
    section III.B).
    """

    map: Affine  # (n_heads, d, 2): a and b of a token
    factor: np.ndarray = field(repr=False)  # (n_heads,)

    def __call__(self, z: np.ndarray) -> np.ndarray:
        """Tokens z = x / sigma(x), (n, d) -> (n_heads, n)."""
        a, b = np.moveaxis(sigmoid(self.map(z)), -1, 0)
        return np.asarray(a * (self.factor[:, None] * b - 1) + 2)

    def after_norm(self, norm: Norm) -> "BiasGate":
        """The gate with the norm before it absorbed."""
        return replace(self, map=self.map.after_norm(norm))

    def after(self, w: np.ndarray, b: np.ndarray) -> "BiasGate":
        """The gate preceded by z -> z w + b."""
        return replace(self, map=self.map.after(w, b))


@dataclass(frozen=True, eq=False, repr=False)
class WindowBias(ShowsShapes):
    """A learned bias for every offset, in rows and columns, of two patches of a window (Swin, eq.
    4).
    """

    # (2 height - 1, 2 width - 1, n_heads): By rows and by columns from key to query.
    table: np.ndarray = field(repr=False)
    # (3, n_heads): Where a class token stands before the patches (BEiT): what is added where it is
    # the query, the key, and both.
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
        """(n,) and (m,) places in the window, row by row and behind the class token -> (n_heads, n,
        m).
        """
        height, width = self.sides
        first = 0 if self.of_class is None else 1
        if max(of_queries.max(initial=0), of_keys.max(initial=0)) >= first + height * width:
            raise self._too_far()
        (row, column), (key_row, key_column) = (
            np.divmod(np.maximum(places - first, 0), width) for places in (of_queries, of_keys)
        )
        bias = self.table[
            row[:, None] - key_row + height - 1, column[:, None] - key_column + width - 1
        ]
        if self.of_class is not None:
            query, key = (of_queries == 0)[:, None, None], (of_keys == 0)[:, None]
            from_class, to_class, both = self.of_class
            bias = np.where(
                query & key, both, np.where(query, from_class, np.where(key, to_class, bias))
            )
        return np.moveaxis(bias, -1, 0)

    def _too_far(self) -> CheckpointError:
        height, width = self.sides
        return CheckpointError(f"tokens are more than this layer's window of {height} x {width}")


# Keys and values of distances, added to the tokens'.


@dataclass(frozen=True, eq=False, repr=False)
class RelativeKeys(ShowsShapes):
    """Keys of distances (Shaw et al. 2018; Transformer-XL, section 3.3), or queries of them
    (DeBERTa).
    """

    # (D,): Before the layer's scale
    vectors: Callable[[np.ndarray], np.ndarray] = field(repr=False)
    # (H, r): Added to what meets them, before it does
    bias: np.ndarray | None = field(default=None, repr=False)
    # A token's key meets them rather than its query: they are the distance's queries (position to
    # content).
    of_keys: bool = False
    # (n,): What distances are counted on, a token's row in an image for instance; None for its
    # position.
    coordinate: Callable[[np.ndarray], np.ndarray] | None = field(default=None, repr=False)
    # (1 or H, D, r): All vectors that there are; None where every distance has its own.
    every: np.ndarray | None = field(default=None, repr=False)

    @classmethod
    def of_table(
        cls, table: np.ndarray, row: Callable[[np.ndarray], np.ndarray], *, of_keys: bool = False
    ) -> Self:
        """Keys in a table (1 or H, D, r), each distance's in the `row` of it."""
        return cls(lambda distances: table[:, row(distances)], of_keys=of_keys, every=table)

    def apart(self, positions: np.ndarray) -> np.ndarray:
        """Distances i - j between tokens at positions (n,), or (n, axes); shape (n, n)."""
        along = positions if self.coordinate is None else self.coordinate(positions)
        return along[:, None] - along

    def between(self, q: np.ndarray, k: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """The term of every pair, unscaled: queries (H, n, r), keys (G, n, r) and positions -> (H,
        n, n).
        """
        tokens = np.repeat(k, len(q) // len(k), axis=0) if self.of_keys else q
        return self(tokens, self.apart(positions))

    def __call__(self, tokens: np.ndarray, apart: np.ndarray) -> np.ndarray:
        """The term of every pair: queries (or keys) (H, n, r) and distances i - j (n, n) -> (H, n,
        n), unscaled.
        """
        if self.bias is not None:
            tokens = tokens + self.bias[:, None]
        nearest = int(apart.min(initial=0))
        distances = np.arange(nearest, int(apart.max(initial=0)) + 1)
        met = tokens @ self.vectors(distances).transpose(0, 2, 1).astype(tokens.dtype)  # (H, n, D)
        which = (apart.T if self.of_keys else apart) - nearest
        term = np.take_along_axis(met, which[None], axis=-1)
        return term.transpose(0, 2, 1) if self.of_keys else term


@dataclass(frozen=True, eq=False, repr=False)
class RelativeValues(ShowsShapes):
    """Values of distances (Shaw et al. 2018, eq. 3), weighted by the same attention as the
    tokens'.
    """

    vectors: Callable[[np.ndarray], np.ndarray] = field(repr=False)  # (D,)

    def __call__(self, attention: np.ndarray) -> np.ndarray:
        """What attention (H, n, n) gathers of them, (H, n, r_v)."""
        n = attention.shape[-1]
        distances = np.arange(1 - n, n)
        by_distance = np.zeros((*attention.shape[:2], len(distances)), attention.dtype)  # (H, n, D)
        which = np.arange(n)[:, None] - np.arange(n) + n - 1
        np.put_along_axis(by_distance, np.broadcast_to(which, attention.shape), attention, axis=-1)
        return np.asarray(by_distance @ self.vectors(distances).astype(attention.dtype))


# Positions added to the input of queries and keys but not of values: DETR and its descendants.
#
# Other models add positions once, to what enters the first layer. DETR hands them to every layer of
# attention (Carion et al. 2020, "End-to-End Object Detection with Transformers", section A.3 and
# figure 10): queries and keys are made of z + p, values of z alone. z is the stream, behind the
# layer's norm where it has one. A score is then
#
#     (z_i + p_i) W_QK (z_j + p_j)' + b_QK (z_j + p_j)'
#
# so that one W_QK meets content and positions alike.


@dataclass(frozen=True, eq=False, repr=False)
class Added:
    """What positions add to queries and keys: maps are linear, so that p has a part of each to
    itself.
    """

    # of_queries, of_keys: (H, e, s) and (G, e, s) maps of positions of width e; None where nothing
    # is added. Where s is more than a head's width r, the further dimensions hold what meets
    # positions alone: Conditional DETR (Meng et al. 2021, section 3.3) appends positions to queries
    # and keys instead of adding them.
    of_queries: Affine | None = None
    of_keys: Affine | None = None

    def taken(self, *, cross: bool) -> dict[str, bool]:
        """Which arguments of `Layer.scores` hand positions to the layer."""
        queries, keys = self.of_queries is not None, self.of_keys is not None
        return {"added": queries or (keys and not cross), "added_to_memory": keys and cross}

    def to(
        self,
        q: np.ndarray,
        k: np.ndarray,
        added: ArrayLike | None,
        to_memory: ArrayLike | None,
        *,
        cross: bool,
        index: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Queries (H, n, r) and keys (G, m, r) with what positions add to them, (H, n, s) and (G,
        m, s).
        """
        for (name, takes), given in zip(
            self.taken(cross=cross).items(), (added, to_memory), strict=True
        ):
            if takes and given is None:
                what = "adds positions to what its queries and keys are made of"
                raise CheckpointError(f"layer {index} {what}: say which, `{name}=`, or 0 for none")
            if given is not None and not takes:
                raise CheckpointError(f"layer {index} adds no such positions: leave `{name}` out")
        keys = to_memory if cross else added
        return _plus(q, self.of_queries, added, index), _plus(k, self.of_keys, keys, index)


def _plus(
    made: np.ndarray, projection: Affine | None, given: ArrayLike | None, index: int
) -> np.ndarray:
    """Queries or keys (heads, n, r) plus the projected positions, (heads, n, s)."""
    if projection is None or given is None:
        return made
    positions, wanted = np.asarray(given, dtype=made.dtype), (made.shape[1], projection.shape[1])
    if positions.ndim and positions.shape != wanted:
        raise CheckpointError(
            f"layer {index} adds positions of shape {wanted}, and was given {positions.shape}"
        )
    more = np.array(projection(np.broadcast_to(positions, wanted)))
    more[..., : made.shape[2]] += made
    return more


NOTHING_ADDED = Added()


# Temperatures of attention by position: what multiplies the queries at a position.


@dataclass(frozen=True)
class Logarithm:
    """1 + weight log(1 + floor((position + first) / period)): 1 over a period, then growing (Llama
    4, Ministral 3).
    """

    weight: float
    period: float
    first: int = 0  # What position 0 counts as
    # Tokens are counted from the first one there is, whatever their positions (Llama 4's code
    # does).
    counted: bool = False

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Of tokens at positions (n,), (n,)."""
        positions = np.arange(len(positions)) if self.counted else positions
        return 1 + self.weight * np.log1p(np.floor((positions + self.first) / self.period))

    def __str__(self) -> str:
        start = f"p + {self.first}" if self.first else "p"
        return f"1 + {self.weight:g} log(1 + floor(({start}) / {self.period:g}))"


@dataclass(frozen=True)
class Power:
    """(1 + (position + 1) / period)^exponent."""

    exponent: float
    period: float

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Of tokens at positions (n,), (n,)."""
        return (1 + (positions + 1) / self.period) ** self.exponent

    def __str__(self) -> str:
        return f"(1 + (p + 1) / {self.period:g})^{self.exponent:g}"


Temperature = Logarithm | Power

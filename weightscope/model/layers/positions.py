"""Terms of scores by the places of two tokens: ALiBi slopes, buckets of distances, windows."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import log
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from weightscope.core.errors import CheckpointError
from weightscope.core.results import ShowsShapes
from weightscope.model.layers.gathered import sigmoid
from weightscope.model.layers.maps import Affine, Norm


class ByDistance(ShowsShapes):
    """A term that depends on the distance alone."""

    def between(self, of_queries: np.ndarray, of_keys: np.ndarray) -> np.ndarray:
        """(n,) and (m,) positions -> (n_heads, n, m)."""
        return np.asarray(self(of_queries[:, None] - of_keys))  # type: ignore[operator]


@dataclass(frozen=True, eq=False, repr=False)
class Slopes(ByDistance):
    """ALiBi: -slope times how far back the key is, up to a term constant in the key."""

    slopes: np.ndarray = field(repr=False)  # (n_heads,)
    # times that transformers' eager attention adds it; see `distances.alibi_falcon`
    times: int = 1

    def __call__(self, delta: np.ndarray) -> np.ndarray:
        """(...) distances i - j -> (n_heads, ...)."""
        return -np.multiply.outer(self.slopes, delta)


@dataclass(frozen=True, eq=False, repr=False)
class Buckets(ByDistance):
    """T5's relative bias: a bucket for each small distance, larger ones share by logarithm."""

    table: np.ndarray = field(repr=False)  # (n_buckets, n_heads)
    furthest: int = 128  # distances from this on are in the last bucket
    times: int = 1  # number of times it is added
    # True: all buckets are for keys before the query, and keys after it count as distance 0.
    # False: each direction has half the buckets.
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
class BiasFactor(ShowsShapes):
    """Factor of a query's bias: sigmoid(a) (factor sigmoid(b) - 1) + 2 (WavLM, section III.B)."""

    map: Affine  # (n_heads, d, 2): a and b of a token
    factor: np.ndarray = field(repr=False)  # (n_heads,)

    def __call__(self, z: np.ndarray) -> np.ndarray:
        """Tokens z = x / sigma(x), (n, d) -> (n_heads, n)."""
        a, b = np.moveaxis(sigmoid(self.map(z)), -1, 0)
        return np.asarray(a * (self.factor[:, None] * b - 1) + 2)

    def after_norm(self, norm: Norm) -> "BiasFactor":
        """The gate with the norm before it absorbed."""
        return replace(self, map=self.map.after_norm(norm))

    def after(self, w: np.ndarray, b: np.ndarray) -> "BiasFactor":
        """The gate preceded by z -> z w + b."""
        return replace(self, map=self.map.after(w, b))


@dataclass(frozen=True, eq=False, repr=False)
class WindowBias(ShowsShapes):
    """A learned bias for each offset in rows and columns of two patches (Swin, eq. 4)."""

    # (2 height - 1, 2 width - 1, n_heads) by rows and by columns from key to query
    table: np.ndarray = field(repr=False)
    # (3, n_heads) biases where a class token before the patches (BEiT) is query, key, or both
    of_class: np.ndarray | None = field(default=None, repr=False)
    times: int = 1

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns of the window."""
        return (self.table.shape[0] + 1) // 2, (self.table.shape[1] + 1) // 2

    def __call__(self, delta: np.ndarray) -> np.ndarray:
        """The bias of patches in one row, (...) columns apart -> (n_heads, ...)."""
        height, width = self.sides
        if np.abs(delta).max(initial=0) >= width:
            raise self._too_far()
        return np.moveaxis(self.table[height - 1, delta + width - 1], -1, 0)

    def between(self, of_queries: np.ndarray, of_keys: np.ndarray) -> np.ndarray:
        """Places (n,) and (m,) in the window, row by row, class token first -> (H, n, m)."""
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
    """Keys (Shaw et al. 2018; Transformer-XL, section 3.3) or queries (DeBERTa) of distances."""

    # (D,) distances -> (1 or H, D, r), before the layer's scale
    vectors: Callable[[np.ndarray], np.ndarray] = field(repr=False)
    # (H, r) bias of the queries that meet them
    bias: np.ndarray | None = field(default=None, repr=False)
    # True: they are queries of distances, which a token's key meets (position to content)
    of_keys: bool = False
    # positions -> (n,) coordinate that distances are counted on, like a patch's row; None: position
    coordinate: Callable[[np.ndarray], np.ndarray] | None = field(default=None, repr=False)
    # (1 or H, D, r) all vectors; None where every distance has its own
    every: np.ndarray | None = field(default=None, repr=False)

    @classmethod
    def of_table(
        cls, table: np.ndarray, row: Callable[[np.ndarray], np.ndarray], *, of_keys: bool = False
    ) -> Self:
        """Keys in a table (1 or H, D, r); `row` maps distances to its rows."""
        return cls(lambda distances: table[:, row(distances)], of_keys=of_keys, every=table)

    def apart(self, positions: np.ndarray) -> np.ndarray:
        """Distances i - j between tokens at positions (n,), or (n, axes); shape (n, n)."""
        along = positions if self.coordinate is None else self.coordinate(positions)
        return along[:, None] - along

    def between(self, q: np.ndarray, k: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """The unscaled term of every pair: q (H, n, r), k (G, n, r), positions -> (H, n, n)."""
        tokens = np.repeat(k, len(q) // len(k), axis=0) if self.of_keys else q
        return self(tokens, self.apart(positions))

    def __call__(self, tokens: np.ndarray, apart: np.ndarray) -> np.ndarray:
        """The unscaled term of every pair: q or k (H, n, r), distances (n, n) -> (H, n, n)."""
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
    """Values of distances (Shaw et al. 2018, eq. 3), weighted by tokens' attention."""

    vectors: Callable[[np.ndarray], np.ndarray] = field(repr=False)  # (D,) -> (1 or H, D, r_v)

    def __call__(self, attention: np.ndarray) -> np.ndarray:
        """The weighted sum of values of distances: attention (H, n, n) -> (H, n, r_v)."""
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
    """Maps of positions added to queries and keys, apart from the maps of content."""

    # (H, e, s) and (G, e, s) maps of positions of width e; None where nothing is added. Where s
    # exceeds a head's width r, the further dimensions meet positions alone: Conditional DETR (Meng
    # et al. 2021, section 3.3) appends positions to queries and keys instead of adding them.
    of_queries: Affine | None = None
    of_keys: Affine | None = None

    def taken(self, *, cross: bool) -> dict[str, bool]:
        """Arguments of `Layer.scores` -> True if positions must be given by it."""
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
        """Queries (H, n, r) and keys (G, m, r) with their positions, (H, n, s) and (G, m, s)."""
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


# Temperatures of attention: factors of queries by position.


@dataclass(frozen=True)
class Logarithm:
    """1 + weight log(1 + floor((position + first) / period)) (Llama 4, Ministral 3)."""

    weight: float
    period: float
    first: int = 0  # count of position 0
    # True: tokens are counted from the first given one, whatever their positions (Llama 4's code)
    counted: bool = False

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Factors (n,) at positions (n,)."""
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
        """Factors (n,) at positions (n,)."""
        return (1 + (positions + 1) / self.period) ** self.exponent

    def __str__(self) -> str:
        return f"(1 + (p + 1) / {self.period:g})^{self.exponent:g}"


Temperature = Logarithm | Power

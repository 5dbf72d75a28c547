"""The space a head writes into the residual stream, and the spaces its queries, keys and values read.

A space is kept as an orthonormal basis, together with how strongly each of its directions is used. Both measures of how
two heads fit (`wiring`) are then sums over the squared entries of one small product of two bases.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weightscope.attention.factored import triangle
from weightscope.attention.layer import Layer
from weightscope.parallel import in_threads
from weightscope.shapes import ShowsShapes

# A direction counts if it is used this much of the strongest, times sqrt(d). Rounding a factor of low rank to float32
# leaves singular values of about a thirtieth of that.
LEAST_USED = float(np.finfo(np.float32).eps)


@dataclass(frozen=True, eq=False, repr=False)
class Spaces(ShowsShapes):
    """Spaces of A heads, or of A key-value heads that S query heads share, in a stream of width d.

    Attributes
    ----------
    basis : (A, d, r) float32 array
        B, with B B' the projection onto the space: orthonormal columns, or as many zero or dependent ones as the space
        has fewer than r dimensions.
    rank : (A,) int array
    use : (A, S, r) array
        Share of each direction in |W|_F^2 of the matrix that the space belongs to; the shares add up to 1.
    turn : (A, S, r, r) float32 array, or None
        The directions that `use` speaks of, as combinations of the basis. None where they are the basis itself, which
        it can be when no two heads share a space.
    """

    basis: np.ndarray
    rank: np.ndarray
    use: np.ndarray
    turn: np.ndarray | None = None

    @property
    def n_heads(self) -> int:
        """Query heads."""
        return self.use.shape[0] * self.use.shape[1]

    def of_heads(self, of_spaces: np.ndarray) -> np.ndarray:
        """What holds of a space, (A, ...), for each query head, (A S, ...)."""
        return np.repeat(of_spaces, self.use.shape[1], axis=0)


@dataclass(frozen=True)
class LayerSpaces:
    """What the heads of one layer write, and what they read by queries, keys and values."""

    written: Spaces
    queries: Spaces
    keys: Spaces
    values: Spaces

    @property
    def read(self) -> dict[str, Spaces]:
        """By the letter of the projection."""
        return {"q": self.queries, "k": self.keys, "v": self.values}


def layer_spaces(layer: Layer, *, centred: bool) -> LayerSpaces:
    """Bases of everything that the heads of a layer write and read.

    The norm before the layer is in its maps. In post-norm models, where none stands there, the spaces are those of the
    layer's input as it comes; what the norms in between do to what is written is left out. A rotation acts on the r
    dimensions of queries and keys and not on the stream: W_Q R has the columns of W_Q, recombined, so the space that a
    head reads is the same at every position. How strongly its directions are used is not; here it is that of distance
    0.

    Parameters
    ----------
    layer : Layer
    centred : bool
        Layers read through a LayerNorm: the mean of what is written is lost to them, so that W_O is taken without it.
    """
    shared = layer.n_heads // layer.n_kv_heads

    def of_group(kv: int) -> list[_HeadSpaces]:
        key, value = _factor(layer.k.of(kv)[0]), _factor(layer.v.of(kv)[0])
        return [_head_spaces(layer, head, key, value, centred) for head in range(kv * shared, (kv + 1) * shared)]

    groups = list(in_threads(of_group, range(layer.n_kv_heads)))
    heads = [head for group in groups for head in group]
    return LayerSpaces(
        _own([head.written for head in heads]),
        _own([head.queries for head in heads]),
        _shared([[head.keys for head in group] for group in groups]),
        _shared([[head.values for head in group] for group in groups]),
    )


@dataclass(frozen=True, eq=False, repr=False)
class _Factor(ShowsShapes):
    """A (d, r) matrix as Q R: Q = columns @ inverse has orthonormal columns, or zeros beyond the rank."""

    columns: np.ndarray
    inverse: np.ndarray
    r: np.ndarray
    rank: int

    def basis(self, turn: np.ndarray | None = None) -> np.ndarray:
        """Q, or Q @ turn, (d, r) float32."""
        return (self.columns @ (self.inverse if turn is None else self.inverse @ turn)).astype(np.float32)


@dataclass(frozen=True, eq=False, repr=False)
class _Used(ShowsShapes):
    """A factor's space, the directions in it that a matrix uses, and the share of each."""

    factor: _Factor
    turn: np.ndarray
    share: np.ndarray


@dataclass(frozen=True)
class _HeadSpaces:
    written: _Used
    queries: _Used
    keys: _Used
    values: _Used


def _factor(w: np.ndarray) -> _Factor:
    """The columns of w, (d, r), made orthonormal."""
    wide = w.astype(np.float64)
    d, width = wide.shape
    found = triangle(wide, wide.T @ wide)
    if found.route == "gram":
        from scipy.linalg.lapack import dtrtri

        return _Factor(wide, dtrtri(found.r)[0], found.r, width)
    u, s, vt = np.linalg.svd(wide, full_matrices=False)  # the columns are dependent: as many directions as there are
    rank = int(np.count_nonzero(s > LEAST_USED * np.sqrt(d) * s[:1]))
    columns, r = np.zeros((d, width)), np.zeros((width, width))
    columns[:, :rank], r[:rank] = u[:, :rank], s[:rank, None] * vt[:rank]
    return _Factor(columns, np.eye(width), r, rank)


def _head_spaces(layer: Layer, head: int, key: _Factor, value: _Factor, centred: bool) -> _HeadSpaces:
    w_o = np.asarray(layer.w_o[head]).T  # (d, r_v)
    query, output = _factor(layer.q.of(head)[0]), _factor(w_o - w_o.mean(axis=0) if centred else w_o)
    turned = query.r if layer.rotation is None else layer.rotation.rotate_at(query.r, 0)
    # W_QK = Q_q (turned key.r') Q_k' and W_VO = Q_v (value.r output.r') Q_o'
    q, qk, k = np.linalg.svd(turned @ key.r.T)
    v, vo, o = np.linalg.svd(value.r @ output.r.T)
    return _HeadSpaces(_used(output, o.T, vo), _used(query, q, qk), _used(key, k.T, qk), _used(value, v, vo))


def _used(factor: _Factor, turn: np.ndarray, singular_values: np.ndarray) -> _Used:
    squares = singular_values**2
    total = squares.sum()
    return _Used(factor, turn, squares / total if total > 0 else squares)


def _own(heads: Sequence[_Used]) -> Spaces:
    """Spaces that no two heads share, in the directions in which they are used."""
    return Spaces(
        np.stack([head.factor.basis(head.turn) for head in heads]),
        np.array([head.factor.rank for head in heads]),
        np.stack([head.share for head in heads])[:, None],
    )


def _shared(groups: Sequence[Sequence[_Used]]) -> Spaces:
    """Spaces of key-value heads, each of which every query head of a group uses in its own way."""
    if len(groups[0]) == 1:
        return _own([head for group in groups for head in group])
    return Spaces(
        np.stack([group[0].factor.basis() for group in groups]),
        np.array([group[0].factor.rank for group in groups]),
        np.stack([[head.share for head in group] for group in groups]),
        np.stack([[head.turn for head in group] for group in groups]).astype(np.float32),
    )

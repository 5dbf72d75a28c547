"""The space a head writes into the stream, and the spaces its queries, keys and values read.

A space is kept as orthonormal directions, together with how strongly each of them is used. Both
measures of how two heads fit (`products`) are then sums over the squared entries of one small
product.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weightscope.core.compute import lapack
from weightscope.core.compute.cores import in_threads
from weightscope.core.errors import TooLargeError
from weightscope.core.results import ShowsShapes
from weightscope.model.layers.factored import triangle
from weightscope.model.layers.layer import Layer

# Least use of a direction that counts, times sqrt(d), as a share of the strongest's. Rounding a
# factor of low rank to float32 leaves singular values of about a thirtieth of that.
LEAST_USED = float(np.finfo(np.float32).eps)
# |R| |R^-1|, at least r, above which a factor is made orthonormal in float64; below, rounding is a
# few millionths.
WELL_CONDITIONED = 1e3


@dataclass(frozen=True, eq=False, repr=False)
class Spaces(ShowsShapes):
    """Spaces of A heads, or of A key-value heads that S query heads share, in a stream of d."""

    # (A, r, d): B', with B B' the projection onto the space: orthonormal rows, then zero ones if
    # the space has fewer than r dimensions.
    directions: np.ndarray
    rank: np.ndarray  # (A,)
    # (A, S, r): share of each direction in |W|_F^2 of the space's matrix, falling, 1 in all
    use: np.ndarray
    # (A, S, r, r): `use` as a quadratic form on the space's directions, where query heads share the
    # space and each has directions of its own in it; None where the space is one head's.
    form: np.ndarray | None = None

    @classmethod
    def empty(cls, n_spaces: int, shared_by: int, r: int, d: int) -> "Spaces":
        """Empty arrays for spaces to be computed."""
        return cls(
            np.zeros((n_spaces, r, d), np.float32),
            np.zeros(n_spaces, int),
            np.zeros((n_spaces, shared_by, r)),
            np.zeros((n_spaces, shared_by, r, r), np.float32) if shared_by > 1 else None,
        )

    @property
    def n_heads(self) -> int:
        """Query heads."""
        return self.use.shape[0] * self.use.shape[1]

    def of_heads(self, of_spaces: np.ndarray) -> np.ndarray:
        """Repeat values of the spaces, (A, ...), for each query head, (A S, ...)."""
        return np.repeat(of_spaces, self.use.shape[1], axis=0)

    def only(self, spaces: Sequence[int]) -> "Spaces":
        """Some of the spaces."""
        indices = list(spaces)
        form = None if self.form is None else self.form[indices]
        return Spaces(self.directions[indices], self.rank[indices], self.use[indices], form)


@dataclass(frozen=True)
class LayerSpaces:
    """Spaces that the heads of one layer write, and read by queries, keys and values."""

    written: Spaces
    queries: Spaces
    keys: Spaces
    values: Spaces

    @property
    def read(self) -> dict[str, Spaces]:
        """The spaces read, by the letter of the projection."""
        return {"q": self.queries, "k": self.keys, "v": self.values}


def layer_spaces(
    layer: Layer,
    *,
    centred: bool,
    gain: np.ndarray | None = None,
    groups: Sequence[int] | None = None,
) -> LayerSpaces:
    """All spaces that the heads of a layer write and read.

    The norm before the layer is in its maps, and `gain`, (d,), belongs to a norm which attention's
    output passes. In post-norm models, which have none there, the spaces belong to the layer's
    input itself; the effect of the norms in between is left out. A rotation acts on the r
    dimensions of queries and keys and not on the stream: W_Q R has the columns of W_Q, recombined,
    so the space that a head reads is the same at every position. How strongly its directions are
    used is not; here it is taken at distance 0.
    """
    h, g, d = layer.n_heads, layer.n_kv_heads, layer.d_model
    shared = h // g
    spaces = LayerSpaces(
        Spaces.empty(h, 1, layer.w_o.shape[1], d),
        Spaces.empty(h, 1, layer.head_dim, d),
        Spaces.empty(g, shared, layer.head_dim, d),
        Spaces.empty(g, shared, layer.v.shape[2], d),
    )

    def find(kv: int) -> None:
        key, value = _factor(layer.k.of(kv)[0]), _factor(layer.v.of(kv)[0])
        for s in range(shared):
            head = kv * shared + s
            w_o = layer.w_o[head] if gain is None else layer.w_o[head] * gain
            w_o = np.asarray(w_o).T  # (d, r_v)
            output = _factor(w_o - w_o.mean(axis=0) if centred else w_o)
            query = _factor(layer.q.of(head)[0])
            turned = query.r if layer.rotation is None else layer.rotation.rotate_at(query.r, 0)
            # W_QK = Q_q (turned key.r') Q_k' and W_VO = Q_v (value.r output.r') Q_o'
            q, qk, k = lapack.svd(turned @ key.r.T)
            v, vo, o = lapack.svd(value.r @ output.r.T)
            _put(spaces.written, head, 0, output, o.T, vo)
            _put(spaces.queries, head, 0, query, q, qk)
            _put(spaces.keys, kv, s, key, k.T, qk)
            _put(spaces.values, kv, s, value, v, vo)

    list(in_threads(find, range(g) if groups is None else groups))
    return spaces


@dataclass(frozen=True, eq=False, repr=False)
class _Factor(ShowsShapes):
    """A (d, r) matrix as Q R: Q = columns @ inverse has orthonormal columns up to the rank."""

    columns: np.ndarray
    inverse: np.ndarray
    r: np.ndarray
    rank: int


def _factor(w: np.ndarray) -> _Factor:
    """The columns of w, (d, r), made orthonormal."""
    wide = w.astype(np.float64)
    if not np.isfinite(wide).all():
        raise TooLargeError("a projection")
    d, width = wide.shape
    root = triangle(wide, wide.T @ wide)
    if root.route == "gram":
        from scipy.linalg.lapack import dtrtri

        inverse = dtrtri(root.r)[0]
        well = np.linalg.norm(root.r) * np.linalg.norm(inverse) < WELL_CONDITIONED
        return _Factor(w if well else wide, inverse, root.r, width)
    # the columns are dependent: as many directions as there are
    u, s, vt = np.linalg.svd(wide, full_matrices=False)
    rank = int(np.count_nonzero(s > LEAST_USED * np.sqrt(d) * s[:1]))
    columns, r = np.zeros((d, width)), np.zeros((width, width))
    columns[:, :rank], r[:rank] = u[:, :rank], s[:rank, None] * vt[:rank]
    return _Factor(columns, np.eye(width), r, rank)


def _put(
    spaces: Spaces, a: int, s: int, factor: _Factor, turn: np.ndarray, singular_values: np.ndarray
) -> None:
    """Write one head's space into its place: the directions along `turn`, and the share of each."""
    squares = singular_values**2
    share = squares / squares.sum() if squares.any() else squares
    spaces.rank[a], spaces.use[a, s] = factor.rank, share
    if spaces.form is not None:
        spaces.form[a, s] = (turn * share) @ turn.T
    if s == 0:
        inside = factor.inverse if spaces.form is not None else factor.inverse @ turn
        spaces.directions[a] = inside.T.astype(factor.columns.dtype) @ factor.columns.T

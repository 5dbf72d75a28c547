"""Bounds on a head's logits: |score| for every input, at every distance, from weights alone.

A norm bounds its output: |x / rms(x)| < sqrt(d), and likewise for a LayerNorm, whose output is
centred. Queries and keys are therefore q = u A + a and k = v B + b with |u|, |v| <= 1 (`Reach`),
and without rotation

    |q k'| <= sigma_1(A B') + |a B'| + |A b'| + |a b'|.

A rotation turns pairs p of dimensions by any angle, so that what counts is sum_p |q_p| |k_p|. For
all t_p > 0 that is at most |q T| |k T^-1|, T = diag(t), with a t that evens out the sizes of a
query's and a key's pairs. Dimensions that do not turn may be bounded apart. Where queries and keys
have norms of their own, A and B are diagonal, and these bounds are the largest score there can be.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from weightscope.core.compute import lapack
from weightscope.core.compute.cores import in_threads
from weightscope.core.results import ShowsShapes
from weightscope.model.layers.factored import inner
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.maps import Affine, InnerNorm, Latent
from weightscope.model.layers.positions import NOTHING_ADDED, RelativeKeys, Slopes, WindowBias

DISTANCES_AT_ONCE = 1024  # vectors of distances multiplied at a time
SCORE_BYTES = 4 << 20  # float64 scores computed at a time, so that they stay in a cache
LENGTHLESS = "and the config does not say how long sequences are"


@dataclass(frozen=True, eq=False, repr=False)
class Reach(ShowsShapes):
    """The set of possible queries or keys: u A + b with |u| <= 1."""

    gram: np.ndarray  # (r, r) A'A
    bias: np.ndarray  # (r,) b

    def times(self, factors: np.ndarray) -> "Reach":
        """The reach with every dimension multiplied: factors (r,)."""
        return Reach(factors[:, None] * self.gram * factors, self.bias * factors)

    def within(self, dims: np.ndarray) -> "Reach":
        """The reach in some of the dimensions: dims (s,) indices."""
        return Reach(self.gram[np.ix_(dims, dims)], self.bias[dims])

    def along(self, vectors: np.ndarray) -> np.ndarray:
        """The largest |q v'| for each of vectors (..., r), (...)."""
        squares = np.einsum("...i,ij,...j->...", vectors, self.gram, vectors)
        return np.asarray(np.sqrt(np.maximum(squares, 0.0)) + np.abs(vectors @ self.bias))

    @property
    def length(self) -> float:
        """An upper bound of |q|."""
        return _root(self.gram) + float(np.linalg.norm(self.bias))


def _root(gram: np.ndarray) -> float:
    """sigma_1 of the factor of a Gram matrix."""
    return float(np.sqrt(max(0.0, lapack.symmetric_eigenvalues(gram)[-1])))


def fixed_bound(q: Reach, k: Reach, sigma1: float | None = None) -> float:
    """A bound on |q k'|; sigma1 of A B' where it is known."""
    if sigma1 is None:
        values, vectors = lapack.eigh(q.gram)
        factor = vectors * np.sqrt(np.maximum(values, 0.0))  # q's Gram matrix is factor factor'
        sigma1 = _root(factor.T @ k.gram @ factor)
    # `along` has |a b'| in both, once is enough
    return sigma1 + float(k.along(q.bias) + q.along(k.bias) - abs(q.bias @ k.bias))


def turned_bound(q: Reach, k: Reach, partner: np.ndarray) -> float:
    """A bound on |q R k'| for any angles of R: dimension i turns with partner[i], partner (r,).

    A dimension that is its own partner does not turn; if none does, this bounds sum_i |q_i| |k_i|.
    """
    sizes = [_pair_sizes(side, partner) for side in (q, k)]
    live = np.flatnonzero((sizes[0] > 0) & (sizes[1] > 0))  # the rest adds nothing
    if not len(live):
        return 0.0
    evening = (sizes[1][live] / sizes[0][live]) ** 0.25
    return q.within(live).times(evening).length * k.within(live).times(1 / evening).length


def _pair_sizes(side: Reach, partner: np.ndarray) -> np.ndarray:
    """Squares of about the largest |q_p| of each dimension's pair, (r,)."""
    square = side.gram + np.outer(side.bias, side.bias)
    dims = np.arange(len(partner))
    a, c, b = square[dims, dims], square[partner, partner], square[dims, partner]
    return np.where(partner == dims, a, (a + c) / 2 + np.hypot((a - c) / 2, b))


class LogitBounds:
    """Bounds on a layer's logits: `Layer.scores`, before the softmax and without the mask.

    layer: One on normalised inputs (`Model.normed_layer`); others are bounded where queries and
    keys have norms. length: The longest sequence, for terms that grow with position or distance;
    None where it is not known.
    """

    def __init__(self, layer: Layer, length: int | None = None) -> None:
        self.layer, self.length, r = layer, length, layer.head_dim
        self.reason = next(_unbounded(layer, length), "")  # why nothing bounds them, or empty
        self.partner, self.turns = np.arange(r), np.zeros(r, bool)
        self.factors = np.ones(r)  # the rotation's, of queries with a norm
        if layer.rotation is not None:
            first, second = (self.partner[np.arange(r)[dims]] for dims in layer.rotation.pairs)
            self.partner[first], self.partner[second] = second, first
            self.factors[first] = self.factors[second] = layer.rotation.factor**2
            self.turns[layer.rotation.turning] = True

    def of(
        self,
        index: int,
        grams: tuple[np.ndarray, np.ndarray] | None = None,
        sigma1: float | None = None,
    ) -> float:
        """The bound of one head; grams (r, r) of W_Q R(0) and W_K, sigma_1 of their product.

        The latter where they are known. NaN where nothing bounds it or a weight is not finite.
        """
        layer = self.layer
        if self.reason:
            return float("nan")
        q, k = self._queries(index, grams and grams[0]), self._keys(index, grams and grams[1])
        if not all(np.isfinite(part).all() for side in (q, k) for part in (side.gram, side.bias)):
            return float("nan")
        if layer.q_norm is not None or layer.k_norm is not None:
            sigma1 = None
        elif sigma1 is not None:
            sigma1 *= layer.q.shape[1]
        product = self._product(q, k, index, sigma1)
        return self._logit(product, self._relative(q, k, index), index)

    def of_tokens(self, x: np.ndarray) -> np.ndarray:
        """The largest |score| of each head (H,) among pairs of tokens x (n, d), at any positions.

        NaN where positions do more than turn queries and keys and add a bias. Exact, except that a
        rotation may turn every pair of dimensions by any angle. Takes n^2 r time a head, in blocks.
        """
        layer = self.layer
        grows = isinstance(layer.additive, Slopes) or layer.temperature is not None
        added = layer.relative or layer.added != NOTHING_ADDED
        if (grows and self.length is None) or added or layer.gain is not None or layer.cross:
            return np.full(layer.n_heads, np.nan)
        first, second = np.empty(0, int), np.empty(0, int)
        if layer.rotation is not None:
            first, second = (np.arange(layer.head_dim)[dims] for dims in layer.rotation.pairs)
        free = np.setdiff1d(np.arange(layer.head_dim), (*first, *second))
        factor = 1.0 if layer.rotation is None else layer.rotation.factor**2

        def parts(made: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """Lengths of turning pairs, (heads, n, m), and the other dimensions, (heads, n, f)."""
            return np.hypot(made[..., first], made[..., second]), made[..., free]

        (q_turning, q_free), (k_turning, k_free) = parts(layer.queries(x)), parts(layer.keys(x))

        def largest(head: int) -> float:
            kv, product = head * layer.n_kv_heads // layer.n_heads, 0.0
            step = max(1, SCORE_BYTES // (8 * len(x)))
            for start in range(0, len(x), step):
                rows = slice(start, start + step)
                scores = np.abs(q_free[head, rows] @ k_free[kv].T)  # (rows, n)
                scores += factor * (q_turning[head, rows] @ k_turning[kv].T)
                product = max(product, float(scores.max()))
            return self._logit(product, 0.0, head)

        return np.array(list(in_threads(largest, range(layer.n_heads))))

    def _logit(self, product: float, relative: float, index: int) -> float:
        """The largest |score| for the largest products of q and k and terms by distance."""
        layer = self.layer
        if layer.temperature is not None:  # it grows or falls with position
            product *= float(np.abs(layer.temperature(np.array([0, self.length or 1]))).max())
        bound = abs(layer.scale) * (product + relative) + self._additive(index)
        if layer.softcap is None:
            return bound
        return float(layer.softcap * np.tanh(bound / layer.softcap))

    def _queries(self, index: int, gram: np.ndarray | None) -> Reach:
        layer = self.layer
        if layer.q_norm is None:
            return _affine(*layer.head(index).query_at(0), gram)
        return _normed(layer.q, layer.q_norm, index).times(self.factors)

    def _keys(self, index: int, gram: np.ndarray | None) -> Reach:
        layer, kv = self.layer, index * self.layer.n_kv_heads // self.layer.n_heads
        if layer.k_norm is None:
            return _affine(*layer.k.of(kv), gram)
        if layer.k_norm.dims is None:
            return _normed(layer.k, layer.k_norm, kv)
        free, stream = _normed(layer.k, layer.k_norm, kv), _affine(*layer.k.of(kv), gram)
        joint, n = np.zeros_like(stream.gram), layer.k_norm.dims
        joint[:n, :n], joint[n:, n:] = free.gram, stream.gram[n:, n:]
        return Reach(joint, np.concatenate((free.bias, stream.bias[n:])))

    def _product(self, q: Reach, k: Reach, index: int, sigma1: float | None) -> float:
        """A bound on |q R k'| at any distance, for all dimensions at once or in two parts."""
        layer, turns, dims = self.layer, self.turns, np.arange(len(self.partner))
        if layer.gain is not None:  # the larger of a pair's, so that it commutes with the rotation
            gain = layer.gain[index if len(layer.gain) > 1 else 0]
            q = q.times(np.maximum(np.abs(gain), np.abs(gain[self.partner])))

        def bound(part: np.ndarray) -> float:
            inside, place = np.zeros(len(dims), int), dims[part]
            inside[place] = np.arange(len(place))
            if turns[part].any() or layer.clip is not None or layer.gain is not None:
                return turned_bound(q.within(place), k.within(place), inside[self.partner[place]])
            return fixed_bound(q.within(place), k.within(place), sigma1 if part.all() else None)

        latent = layer.k_norm is not None and layer.k_norm.dims is not None
        apart = dims < (layer.k_norm.dims or 0) if latent and layer.k_norm else ~turns
        parts = [part for part in (apart, ~apart) if part.any()]
        bounds = [sum(map(bound, parts))]
        if not latent and len(parts) > 1:
            bounds.append(bound(np.ones(len(dims), bool)))
        if layer.clip is not None:
            bounds.append(layer.clip**2 * float(self.factors.sum()))
        return float(min(bounds))

    def _relative(self, q: Reach, k: Reach, index: int) -> float:
        """A bound on terms of one token and the distance to the other, before the scale."""
        total = 0.0
        for term in self.layer.relative:
            tokens = k if term.of_keys else q
            if term.bias is not None:
                tokens = replace(tokens, bias=tokens.bias + term.bias[index])
            # (D, r) each
            of_head = (vectors[index if len(vectors) > 1 else 0] for vectors in self._vectors(term))
            lengths = (tokens.along(vectors.astype(np.float64)).max() for vectors in of_head)
            total += float(max(lengths))
        return total

    def _vectors(self, term: RelativeKeys) -> Iterator[np.ndarray]:
        """Vectors of all distances in blocks, (1 or H, D, r) each."""
        if term.every is not None:
            yield term.every
            return
        stop = self.length or 1
        for start in range(1 - stop, stop, DISTANCES_AT_ONCE):
            yield term.vectors(np.arange(start, min(start + DISTANCES_AT_ONCE, stop)))

    def _additive(self, index: int) -> float:
        """The largest size of the bias added to scaled scores by position."""
        bias, gate = self.layer.additive, self.layer.additive_gate
        if bias is None:
            return 0.0
        if isinstance(bias, Slopes):
            largest = abs(float(bias.slopes[index])) * ((self.length or 1) - 1)
        else:
            largest = float(np.abs(bias.table[..., index]).max())
        if isinstance(bias, WindowBias) and bias.of_class is not None:
            largest = max(largest, float(np.abs(bias.of_class[:, index]).max()))
        # sigmoid(a) (factor sigmoid(b) - 1) + 2 is between the values at both ends of each sigmoid
        times = 1.0 if gate is None else max(2.0, abs(1 + float(gate.factor[index])))
        return times * bias.times * largest


def _unbounded(layer: Layer, length: int | None) -> Iterator[str]:
    """Reasons why nothing bounds a layer's logits."""
    if layer.added.of_queries is not None or layer.added.of_keys is not None:
        yield "positions that are handed to the layer are added to its queries and keys"
    if layer.norm is None and layer.q_norm is None:
        yield "queries are made of a residual stream that has passed no norm"
    norm, of_keys = layer.norm, "a residual stream"
    if layer.cross:
        norm, of_keys = layer.memory_norm, "a memory"
    if norm is None and (layer.k_norm is None or layer.k_norm.dims is not None):
        yield f"keys are made of {of_keys} that has passed no norm"
    if length is None:
        if isinstance(layer.additive, Slopes) or any(term.every is None for term in layer.relative):
            yield f"what positions add grows with distance, {LENGTHLESS}"
        if layer.temperature is not None:
            yield f"the temperature grows with position, {LENGTHLESS}"


def _affine(w: np.ndarray, b: np.ndarray, gram: np.ndarray | None) -> Reach:
    """The reach of z w + b with |z| <= sqrt(d): w (d, r), b (r,), gram w'w."""
    return Reach(len(w) * (inner(w) if gram is None else gram), b.astype(np.float64))


def _normed(made: Affine | Latent, norm: InnerNorm, index: int) -> Reach:
    """The reach of queries or keys behind a norm of their own, or of their latent."""
    n = norm.source.shape[2]
    if isinstance(made, Latent):
        up, b = made.up.of(index)
        up, b = up[:n, : norm.dims], b[: norm.dims]
        return Reach(n * inner(up), b.astype(np.float64) / np.sqrt(norm.eps))
    w, b = (part.astype(np.float64) for part in made.of(index))
    r, source = len(b), norm.of(index).source
    # this head's columns of a norm over all heads
    columns = slice(None) if n == r else slice(index * r, (index + 1) * r)
    plain = source.w[0][:, columns].astype(np.float64)
    plain_b = source.b[0][columns].astype(np.float64)
    squares = (plain**2).sum(axis=0) + plain_b**2
    products = (w * plain).sum(axis=0) + b * plain_b
    gains = np.divide(products, squares, out=np.zeros(r), where=squares != 0)
    shift = np.zeros(r) if norm.shift is None else norm.shift[index if len(norm.shift) > 1 else 0]
    return Reach(np.diag(n * gains**2), shift.astype(np.float64))

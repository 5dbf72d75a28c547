"""Everything an audit computes of one layer, head by head, from r x r products.

Each projection is read once, for its Gram matrix, its triangle and its sketch. Every spectrum of a head, rotated or
not, is then that of a small core. Heads are spread over threads with one BLAS thread each: on such small matrices that
is faster than one head on all cores, and gives the same bits on any number of cores.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightscope.attention.factored import (
    Triangle,
    coordinates,
    core_singular_values,
    inner,
    inner_products,
    route_of,
    triangle,
)
from weightscope.attention.layer import Layer
from weightscope.compute import lapack
from weightscope.compute.cores import in_threads
from weightscope.compute.device import CPU, Device
from weightscope.metrics.head_factors import column_energies, factor_arrays, row_arrays
from weightscope.metrics.spaces import Probes, leading_blocks, probes, shown, space_sketch
from weightscope.metrics.spectra import affine_singular_values, eigenvalues, symmetric_eigenvalues, symmetric_share
from weightscope.results import ShowsShapes

FORM = "qk_singular_values_"  # prefix of the spectra of other forms of W_QK: delta1, mean64, free, turning
LEADING = 8  # eigenvalues of the symmetric part that are kept
TASKS = 8  # a layer's heads are handed out in at least about this many pieces


def measure_layer(
    layer: Layer, forms: Mapping[str, np.ndarray], device: Device = CPU, directions: int = 0
) -> dict[str, np.ndarray]:
    """Spectra, sketches and related arrays (H, ...) of every head of a layer; forms (r, r) go between W_Q and W_K'.

    What belongs to a key-value head is computed once for the query heads that share it. In addition to the layer as it
    is stored, a thread holds four (d, r) factors in float32 and blocks of them in float64; nothing of size (d, H r).
    """
    n_heads, n_kv = layer.n_heads, layer.n_kv_heads
    shared_by = n_heads // n_kv
    per_task = min(shared_by, max(1, n_heads // TASKS))
    tasks = [
        (kv, range(first, min(first + per_task, (kv + 1) * shared_by)))
        for kv in range(n_kv)
        for first in range(kv * shared_by, (kv + 1) * shared_by, per_task)
    ]
    against = probes(layer.d_model), probes(layer.k.shape[1])
    with np.errstate(invalid="ignore", over="ignore"):  # NaN weights make NaN measures, which are a finding
        parts = list(in_threads(lambda task: _measure_heads(layer, *task, forms, against, device, directions), tasks))
    heads = [head for part, _, _ in parts for head in part]
    columns = np.sum([column for _, column, _ in parts], axis=0)  # (d,)
    squares = [np.sum(rows, axis=0) for rows in zip(*(rows for _, _, rows in parts), strict=True)]  # four of (d,)
    if columns.sum() == 0 and any(head["qk_route"] == "none" for head in heads):
        columns = np.full_like(columns, np.nan)  # no head is finite, so the shares are unknown
    return {name: stacked([head[name] for head in heads]) for name in heads[0]} | {
        "qk_column_share": columns / columns.sum() if columns.sum() > 0 else columns,
        "kv_head": np.repeat(np.arange(n_kv), shared_by),
        "caveats": np.array(layer.caveats, dtype=str),
        **row_arrays(squares, _gains(layer), layer.output_bias),
    }


def _gains(layer: Layer) -> list[np.ndarray]:
    """The gain (d,) that is folded into each of W_Q, W_K, W_V and W_O; ones where none is."""
    norms = layer.norm, *(layer.memory_norm if layer.cross else layer.norm for _ in range(2)), None
    widths = layer.d_model, layer.k.shape[1], layer.v.shape[1], layer.d_model
    return [
        np.ones(width) if norm is None or not len(norm.gamma) else norm.gamma.astype(np.float64)
        for norm, width in zip(norms, widths, strict=True)
    ]


@dataclass(frozen=True, eq=False, repr=False)
class Projection(ShowsShapes):
    """What is computed once of one head's (d, r) factor."""

    gram: np.ndarray
    triangle: Triangle
    sketch: np.ndarray

    @classmethod
    def of(cls, factor: np.ndarray, gram: np.ndarray, against: Probes) -> "Projection":
        """The triangle and sketch of a factor, from its Gram matrix."""
        root = triangle(factor, gram)
        return cls(gram, root, space_sketch(factor, root.r, against))


def _measure_heads(
    layer: Layer,
    kv: int,
    heads: Sequence[int],
    forms: Mapping[str, np.ndarray],
    against: tuple[Probes, Probes],
    device: Device,
    directions: int,
) -> tuple[list[dict[str, np.ndarray]], np.ndarray, list[np.ndarray]]:
    """Heads that share a key-value head, the sum over them of |column of W_QK|^2 / |W_QK|_F^2, (d,), and the sums of
    squares of each dimension of W_Q, W_K, W_V and W_O, four of (d,).
    """
    (w_k, b_k), (w_v, b_v) = layer.k.of(kv), layer.v.of(kv)
    on_device = device.put(w_k), device.put(w_v)
    products = _two_spaces if layer.cross else inner_products  # memory may have another width
    key = value = None
    measured, queries = [], np.zeros((layer.head_dim, layer.head_dim))
    of_keys, of_values = _row_squares(w_k), _row_squares(w_v)
    if heads[0] % (layer.n_heads // layer.n_kv_heads):  # counted with the first heads of the group
        of_keys, of_values = np.zeros_like(of_keys), np.zeros_like(of_values)
    of_queries, of_outputs = np.zeros(layer.d_model), np.zeros(layer.d_model)
    for head in heads:
        w_q, b_q = layer.head(head).query_at(0)
        w_o = np.asarray(layer.w_o[head]).T
        key_gram, query_gram, qk = products(on_device[0], device.put(w_q), device)
        output_gram, value_gram, vo = products(device.put(w_o), on_device[1], device)
        key = key or Projection.of(w_k, key_gram, against[1])
        value = value or Projection.of(w_v, value_gram, against[1])
        query, output = Projection.of(w_q, query_gram, against[0]), Projection.of(w_o, output_gram, against[0])
        spectra = _spectrum("qk", query, key, layer.d_model, directions)
        spectra |= _spectrum("vo", value, output, layer.d_model, directions)
        linear = spectra["vo_singular_values"]
        measured.append(_qk(query, key, b_q, forms) | spectra | _vo(value, output, b_v, linear))
        measured[-1] |= _one_space(query, key, qk, vo)
        grams = query.gram, key.gram, value.gram, output.gram
        measured[-1] |= factor_arrays(grams, (b_q, b_k, b_v)) | column_energies(grams)
        of_queries, of_outputs = of_queries + _row_squares(w_q), of_outputs + _row_squares(w_o)
        squared = (query.gram * key.gram).sum()
        if np.isfinite(squared) and squared > 0:
            queries += query.gram / squared
    keys = w_k.T if np.isfinite(key_gram).all() else np.nan_to_num(w_k.T)  # (r, d)
    weighted = queries.astype(np.float32) @ keys  # (r, d), sum over heads of A / |W_QK|_F^2
    squares = np.einsum("rd,rd->d", weighted, keys, dtype=np.float64)  # k_j A k_j' of every residual dimension j
    return measured, squares, [of_queries, of_keys, of_values, of_outputs]


def _row_squares(factor: np.ndarray) -> np.ndarray:
    """Sums of squares of the rows of a factor, (d, r) -> (d,)."""
    return np.einsum("dr,dr->d", factor, factor, dtype=np.float64)


def _two_spaces(a: Any, b: Any, device: Device) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gram matrices of factors that act on two spaces, and NaN for their product, which needs a common space."""
    return inner(a, device=device), inner(b, device=device), np.full((a.shape[1], b.shape[1]), np.nan)


def _qk(query: Projection, key: Projection, b_q: np.ndarray, forms: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    spectra: dict[str, np.ndarray] = {
        FORM + name: core_singular_values(query.triangle, key.triangle, between) for name, between in forms.items()
    }
    return spectra | {
        "qk_bias_norm": np.array(np.linalg.norm(key.triangle.r @ b_q.astype(np.float64))),  # |b_Q W_K'| = |R_K b_Q'|
        "qk_route": np.array(route_of(query.triangle, key.triangle)),
        "q_sketch": query.sketch,
        "k_sketch": key.sketch,
    }


def _vo(value: Projection, output: Projection, b_v: np.ndarray, linear: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "vo_affine_singular_values": affine_singular_values(value.triangle, b_v, output.triangle, linear),
        "vo_bias_norm": np.array(np.linalg.norm(output.triangle.r @ b_v.astype(np.float64))),
        "vo_route": np.array(route_of(value.triangle, output.triangle)),
        "v_sketch": value.sketch,
        "o_sketch": output.sketch,
    }


def _one_space(query: Projection, key: Projection, qk: np.ndarray, vo: np.ndarray) -> dict[str, np.ndarray]:
    """What only maps from a space into itself have: qk = W_K' W_Q and vo = W_O W_V (r, r); NaN where those are."""
    return {
        "qk_symmetric_share": np.array(symmetric_share(query.gram, key.gram, qk)),
        "qk_symmetric_eigenvalues": symmetric_eigenvalues(query.gram, key.gram, qk)[:LEADING],
        "vo_eigenvalues": eigenvalues(vo),
    }


def _spectrum(name: str, left: Projection, right: Projection, d: int, directions: int) -> dict[str, np.ndarray]:
    """A map's singular values and, if asked for, coordinates of its leading singular vectors in its factors' columns.

    The coordinates are (r, k); (r, 0) where R is not enough.
    """
    if not directions:
        return {f"{name}_singular_values": core_singular_values(left.triangle, right.triangle)}
    of_left, of_right = np.empty((len(left.gram), 0)), np.empty((len(right.gram), 0))
    if route_of(left.triangle, right.triangle) == "gram":
        u, s, vt = lapack.svd(left.triangle.r @ right.triangle.r.T)
        columns = slice(shown(leading_blocks(s, d, directions)))
        of_left, of_right = coordinates(left.triangle, u[:, columns]), coordinates(right.triangle, vt[columns].T)
    else:
        s = core_singular_values(left.triangle, right.triangle)
    return {f"{name}_singular_values": s, f"{name}_left": of_left, f"{name}_right": of_right}


def stacked(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays of one rank as one, shorter ones filled with NaN at their ends: L of (H, r) -> (L, H, r)."""
    shape = np.max([array.shape for array in arrays], axis=0)
    if all(array.shape == tuple(shape) for array in arrays):
        return np.stack(arrays)
    filled = np.full((len(arrays), *shape), np.nan, arrays[0].dtype)
    for row, array in zip(filled, arrays, strict=True):
        row[tuple(slice(n) for n in array.shape)] = array
    return filled

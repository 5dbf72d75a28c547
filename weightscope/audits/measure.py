"""Everything an audit computes of one layer, head by head, from r x r products.

A projection is gone through once for its Gram matrix, its triangle and its sketch. Every spectrum of the head, rotated
or not, is then that of a small core. Heads are spread over threads with one BLAS thread each: on such small matrices
that is faster than one head on all cores, and it gives the same bits however many cores there are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightscope import lapack
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
from weightscope.device import CPU, Device
from weightscope.metrics.spaces import Probes, leading_blocks, probes, shown, space_sketch
from weightscope.metrics.spectra import affine_singular_values, eigenvalues, symmetric_eigenvalues, symmetric_share
from weightscope.parallel import in_threads
from weightscope.shapes import ShowsShapes

Arrays = Mapping[str, np.ndarray]  # what was measured of a layer (H, ...) or of all (L, H, ...), by name
FORM = "qk_singular_values_"  # stands before the name of another form of W_QK: delta1, mean64, free, turning
LEADING = 8  # eigenvalues of the symmetric part that are kept
TASKS = 8  # a layer's heads are handed out in at least about this many pieces


@dataclass(frozen=True, eq=False, repr=False)
class Projection(ShowsShapes):
    """What is worked out of one head's (d, r) factor once."""

    gram: np.ndarray
    triangle: Triangle
    sketch: np.ndarray

    @classmethod
    def of(cls, factor: np.ndarray, gram: np.ndarray, against: Probes) -> "Projection":
        """A factor's triangle and sketch, beside its Gram matrix."""
        root = triangle(factor, gram)
        return cls(gram, root, space_sketch(factor, root.r, against))


def measure_layer(
    layer: Layer, forms: Mapping[str, np.ndarray], device: Device = CPU, directions: int = 0
) -> dict[str, np.ndarray]:
    """Spectra and what belongs to them for every head of a layer.

    What belongs to a key-value head is worked out once for the query heads that share it. Beside the layer as it is
    stored, a thread holds four (d, r) factors in float32 and blocks of them in float64; nothing of size (d, H r).

    Parameters
    ----------
    layer : Layer
    forms : mapping of str to (r, r) arrays
        What else to put between W_Q R(0) and W_K', from `Layer.qk_forms`.
    device : Device, optional
        Where everything that grows with d is multiplied; the r x r cores stay with this machine's cores, many of which
        a card takes one after another.
    directions : int, optional
        How many of the leading directions of W_QK and of W_VO will be asked for.

    Returns
    -------
    dict of arrays
        With the heads first: qk_singular_values (H, r), qk_singular_values_NAME for every form, vo_singular_values
        (H, r_v), vo_affine_singular_values (H, r_v + 1), vo_eigenvalues (H, r_v) complex, qk_symmetric_eigenvalues
        (H, 8), qk_symmetric_share, qk_bias_norm, vo_bias_norm (H,), qk_route, vo_route (H,) str, q_sketch, k_sketch,
        v_sketch, o_sketch (H, s), kv_head (H,); and for the layer qk_column_share (d,) and caveats, text. What needs
        one space, eigenvalues and the symmetric part, is NaN in cross-attention. Where directions will be asked for,
        what combines the factors' columns to singular vectors too: qk_left, qk_right, vo_left, vo_right (H, r, k),
        filled with NaN.
    """
    n_heads, n_kv = layer.n_heads, layer.n_kv_heads
    shared_by = n_heads // n_kv
    a_task = min(shared_by, max(1, n_heads // TASKS))
    tasks = [
        (kv, range(first, min(first + a_task, (kv + 1) * shared_by)))
        for kv in range(n_kv)
        for first in range(kv * shared_by, (kv + 1) * shared_by, a_task)
    ]
    against = probes(layer.d_model), probes(layer.k.shape[1])
    with np.errstate(invalid="ignore", over="ignore"):  # NaN weights make NaN measures, and a finding of their own
        parts = list(in_threads(lambda task: _measure_heads(layer, *task, forms, against, device, directions), tasks))
    heads = [head for of_task, _ in parts for head in of_task]
    columns = np.sum([column for _, column in parts], axis=0)  # (d,)
    if columns.sum() == 0 and any(head["qk_route"] == "none" for head in heads):
        columns = np.full_like(columns, np.nan)  # no head is finite: nothing is known of the shares
    return {name: stacked([head[name] for head in heads]) for name in heads[0]} | {
        "qk_column_share": columns / columns.sum() if columns.sum() > 0 else columns,
        "kv_head": np.repeat(np.arange(n_kv), shared_by),
        "caveats": np.array(layer.caveats, dtype=str),
    }


def _measure_heads(
    layer: Layer,
    kv: int,
    heads: Sequence[int],
    forms: Mapping[str, np.ndarray],
    against: tuple[Probes, Probes],
    device: Device,
    directions: int,
) -> tuple[list[dict[str, np.ndarray]], np.ndarray]:
    """Heads that share a key-value head, and the sum over them of |column of W_QK|^2 / |W_QK|_F^2, (d,)."""
    (w_k, _), (w_v, b_v) = layer.k.of(kv), layer.v.of(kv)
    on_device = device.put(w_k), device.put(w_v)
    products = _apart if layer.cross else inner_products  # memory may have another width
    key = value = None
    measured, queries = [], np.zeros((layer.head_dim, layer.head_dim))
    for head in heads:
        w_q, b_q = layer.head(head).query_at(0)
        w_o = np.asarray(layer.w_o[head]).T
        key_gram, query_gram, qk = products(on_device[0], device.put(w_q), device)
        output_gram, value_gram, vo = products(device.put(w_o), on_device[1], device)
        key = key or Projection.of(w_k, key_gram, against[1])
        value = value or Projection.of(w_v, value_gram, against[1])
        query, output = Projection.of(w_q, query_gram, against[0]), Projection.of(w_o, output_gram, against[0])
        one_space = _one_space(query, key, qk, vo)
        measured.append(_qk(query, key, b_q, forms) | _vo(value, output, b_v) | one_space)
        if directions:
            measured[-1] |= _vectors("qk", query, key, layer.d_model, directions)
            measured[-1] |= _vectors("vo", value, output, layer.d_model, directions)
        squared = (query.gram * key.gram).sum()
        if np.isfinite(squared) and squared > 0:
            queries += query.gram / squared
    keys = w_k.T if np.isfinite(key_gram).all() else np.nan_to_num(w_k.T)  # (r, d)
    weighted = queries.astype(np.float32) @ keys  # (r, d), sum over heads of A / |W_QK|_F^2
    squares = np.einsum("rd,rd->d", weighted, keys, dtype=np.float64)  # k_j A k_j' of every residual dimension j
    return measured, squares


def _apart(a: Any, b: Any, device: Device) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gram matrices of factors that act on two spaces, and NaN for the product of both, which is of one space."""
    return inner(a, device=device), inner(b, device=device), np.full((a.shape[1], b.shape[1]), np.nan)


def _qk(query: Projection, key: Projection, b_q: np.ndarray, forms: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    spectra: dict[str, np.ndarray] = {
        FORM + name: core_singular_values(query.triangle, key.triangle, between) for name, between in forms.items()
    }
    return spectra | {
        "qk_singular_values": core_singular_values(query.triangle, key.triangle),
        "qk_bias_norm": np.array(np.linalg.norm(key.triangle.r @ b_q.astype(np.float64))),  # |b_Q W_K'| = |R_K b_Q'|
        "qk_route": np.array(route_of(query.triangle, key.triangle)),
        "q_sketch": query.sketch,
        "k_sketch": key.sketch,
    }


def _vo(value: Projection, output: Projection, b_v: np.ndarray) -> dict[str, np.ndarray]:
    linear = core_singular_values(value.triangle, output.triangle)
    return {
        "vo_singular_values": linear,
        "vo_affine_singular_values": affine_singular_values(value.triangle, b_v, output.triangle, linear),
        "vo_bias_norm": np.array(np.linalg.norm(output.triangle.r @ b_v.astype(np.float64))),
        "vo_route": np.array(route_of(value.triangle, output.triangle)),
        "v_sketch": value.sketch,
        "o_sketch": output.sketch,
    }


def _vectors(name: str, left: Projection, right: Projection, d: int, directions: int) -> dict[str, np.ndarray]:
    """What makes the leading singular vectors of a map of its factors' columns; nothing where R alone does not tell."""
    own, other = (np.empty((len(one.gram), 0)) for one in (left, right))
    if route_of(left.triangle, right.triangle) == "gram":
        u, s, vt = lapack.svd(left.triangle.r @ right.triangle.r.T)
        columns = slice(shown(leading_blocks(s, d, directions)))
        own, other = coordinates(left.triangle, u[:, columns]), coordinates(right.triangle, vt[columns].T)
    return {f"{name}_left": own, f"{name}_right": other}


def stacked(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays of one rank as one, the smaller filled with NaN at their ends: L of (H, r) -> (L, H, r)."""
    shape = np.max([array.shape for array in arrays], axis=0)
    if all(array.shape == tuple(shape) for array in arrays):
        return np.stack(arrays)
    whole = np.full((len(arrays), *shape), np.nan, arrays[0].dtype)
    for row, array in zip(whole, arrays, strict=True):
        row[tuple(slice(n) for n in array.shape)] = array
    return whole


def _one_space(query: Projection, key: Projection, qk: np.ndarray, vo: np.ndarray) -> dict[str, np.ndarray]:
    """What a map has that leads from a space into the same, from W_K'W_Q and W_O W_V; NaN where those are."""
    return {
        "qk_symmetric_share": np.array(symmetric_share(query.gram, key.gram, qk)),
        "qk_symmetric_eigenvalues": symmetric_eigenvalues(query.gram, key.gram, qk)[:LEADING],
        "vo_eigenvalues": eigenvalues(vo),
    }

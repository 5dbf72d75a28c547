"""Layers made of given matrices, and both measures of how two heads fit computed with matrices of d x d."""

import numpy as np

from weightscope.model.layers.layer import Head, Layer
from weightscope.model.layers.maps import Affine, Norm


def layer_of(
    w_q: np.ndarray, w_k: np.ndarray, w_v: np.ndarray, w_o: np.ndarray, *, centred: bool = False, index: int = 0
) -> Layer:
    """A layer of heads (H or G, d, r) and w_o (H, r, d), without biases."""

    def affine(w: np.ndarray) -> Affine:
        return Affine(w, np.zeros((len(w), w.shape[2])))

    bias = np.zeros(w_o.shape[2])
    return Layer(affine(w_q), affine(w_k), affine(w_v), w_o, bias, index, norm=Norm(centred, 1e-5))


def random_layer(rng: np.random.Generator, d: int, r: int, n_heads: int = 2, n_kv: int = 2) -> Layer:
    """A layer of independent Gaussian heads."""
    w_q, w_k, w_v, w_o = (
        rng.standard_normal(shape) for shape in ((n_heads, d, r), (n_kv, d, r), (n_kv, d, r), (n_heads, r, d))
    )
    return layer_of(w_q, w_k, w_v, w_o)


def dense_scores(a: Head, b: Head) -> dict[str, tuple[float, float]]:
    """PK and CS of what a writes with what b reads by Q, K and V, from matrices of d x d in float64."""
    centred = b.layer.norm is not None and b.layer.norm.centred
    d = b.qk.shape[0]
    centring = np.eye(d) - centred / d
    written, vo, reader_vo = (x.astype(np.float64) @ centring for x in (a.vo.right.T, a.vo.dense(), b.vo.dense()))
    qk = b.qk.dense().astype(np.float64)
    space = projection(written.T)
    factors = {"q": (b.qk.left, qk), "k": (b.qk.right, qk.T), "v": (b.vo.left, reader_vo)}
    return {
        kind: (
            float(np.trace(space @ projection(factor))),
            float(np.linalg.norm(vo @ matrix) / (np.linalg.norm(vo) * np.linalg.norm(matrix))),
        )
        for kind, (factor, matrix) in factors.items()
    }


def projection(columns: np.ndarray) -> np.ndarray:
    """The (d, d) projection onto the span of columns, (d, r)."""
    wide = columns.astype(np.float64)
    return wide @ np.linalg.pinv(wide, rcond=1e-6)

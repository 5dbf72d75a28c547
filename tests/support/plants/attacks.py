"""Framing a stranger, hiding a descendant, and forging prints, as somebody would who knows how lineage works."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.plants.derivations import drifted, rotated, stream_permuted
from tests.support.plants.named_parts import Part, Weights
from weightscope.core.progress import bar
from weightscope.pairs.lineage.probes import signs
from weightscope.pairs.lineage.sketches import SKETCH, Sketches

# Framing


def framed(stranger: Weights, base: Sketches, cosine: float) -> Weights:
    """A stranger whose public sketches have this cosine with a base's: the smallest change of W_Q and W_O that does it.

    A sketch y_k = u_k' W v_k is linear in W_Q and in W_O: 128 equations for d r unknowns of each head.
    """
    d, r = stranger.size("width"), stranger.size("head_dim")
    n_heads, shared = stranger.size("heads"), stranger.size("heads") // stranger.size("kv_heads")
    u, v = (signs(SKETCH, d, side).astype(np.float64) for side in ("left", "right"))  # (K, d)
    traces = np.vecdot(u, v)[:, None, None] / d
    changed: dict[Part, np.ndarray] = {}
    for i in bar(stranger.layers(), "heads framed", "layer"):
        targets = base.of_layer(base.layers[i % len(base.layers)])
        gain = _gain(stranger, i)
        w = {name: stranger.parts[i, f"{name}.w"].astype(np.float64) for name in "qkvo"}
        for h in range(n_heads):
            own, group = slice(h * r, (h + 1) * r), slice(h // shared * r, (h // shared + 1) * r)
            aim = base.direct[targets[h % len(targets)]].astype(np.float64)  # (2, K)
            k, values = (_read(stranger, i, w[name][:, group]) for name in "kv")
            # <u v' - (u'v / d) 1, W> for W = Q K', by Q; and for W = V O, by O'
            by_q = u[:, :, None] * (v @ k)[:, None] - traces * k  # (K, d, r)
            by_o = v[:, :, None] * (u @ values)[:, None] - traces * values
            q = w["q"][:, own]
            w["q"][:, own] = q + _least(_written(stranger, i, by_q), q, aim[0], cosine, gain)
            w["o"][own] += _least(by_o, w["o"][own].T, aim[1], cosine).T
        changed |= {(i, "q.w"): w["q"], (i, "o.w"): w["o"]}
    return stranger.but(changed)


def _gain(weights: Weights, layer: int) -> np.ndarray:
    return weights.parts[layer, "norm_1.w"].astype(np.float64)[:, None] + weights.dialect.offset


def _read(weights: Weights, layer: int, w: np.ndarray) -> np.ndarray:
    """A matrix (d, r) that reads the stream, with the norm before it folded in."""
    w = _gain(weights, layer) * w
    return w if weights.dialect.rms else w - w.mean(axis=0)


def _written(weights: Weights, layer: int, by_read: np.ndarray) -> np.ndarray:
    """A derivative (K, d, r) by a folded matrix, as one by the matrix itself."""
    centred = by_read if weights.dialect.rms else by_read - by_read.mean(axis=1, keepdims=True)
    return _gain(weights, layer) * centred


def _least(by_w: np.ndarray, w: np.ndarray, aim: np.ndarray, cosine: float, *_: Any) -> np.ndarray:
    """The smallest change of w (d, r) that gives its sketch, by_w w, this cosine with `aim` and leaves its norm."""
    flat = by_w.reshape(SKETCH, -1)
    sketch = flat @ w.ravel()
    across = sketch - (sketch @ aim) * aim
    across *= np.sqrt(1 - cosine**2) / np.linalg.norm(across)
    wanted = np.linalg.norm(sketch) * (across + cosine * aim)
    inner = flat @ flat.T
    solved = np.linalg.lstsq(inner, wanted - sketch, rcond=1e-10)[0]
    return (flat.T @ solved).reshape(w.shape)


def random_base(weights: Weights) -> Weights:
    """A model of the same shape that shares nothing: normal numbers of the same mean and spread."""
    rng = np.random.default_rng(6)
    return weights.but({
        part: w.mean() + (w.std() + 0.1 * (w.ndim == 1)) * rng.standard_normal(w.shape, np.float32)
        for part, w in weights.parts.items()
    })  # fmt: skip


def mixed(stranger: Weights, base: Weights, share: float) -> Weights:
    """A stranger with this share of a base's attention matrices added, in the units of its own: no trick at all."""
    changed = {}
    for part in [part for part in stranger.parts if part[1] in ("q.w", "k.w", "v.w", "o.w")]:
        w, theirs = stranger.parts[part], base.parts.get(part)
        if theirs is not None and theirs.shape == w.shape:
            changed[part] = w + share * np.linalg.norm(w) / np.linalg.norm(theirs) * theirs
    return stranger.but(changed)


# Hiding


def hidden(weights: Weights, cut: int = 0, noise: float = 0.0, blur: float = 0.0) -> tuple[Weights, np.ndarray]:
    """A model in another basis with its tokens renumbered, which keeps its function, and the new ids of its tokens.

    Then the `cut` smallest singular values of each W_VO are dropped, and `noise`, a share of each matrix, is added; to
    token embeddings also `blur`.
    """
    made = rotated(weights) if weights.dialect.rms and not weights.dialect.offset else stream_permuted(weights)
    order = np.random.default_rng(5).permutation(weights.size("vocabulary"))
    tables = {part: made.parts[part][order] for part in ((None, "tokens"), (None, "unembedding")) if part in made.parts}
    rng = np.random.default_rng(7)
    tables |= {part: w + blur * w.std() * rng.standard_normal(w.shape) for part, w in tables.items() if blur}
    made = _cut(made.but(tables), cut) if cut else made.but(tables)
    return (drifted(made, noise) if noise else made), np.argsort(order)


def _cut(weights: Weights, cut: int) -> Weights:
    """Every W_VO without its smallest singular values: W_O projected, so that shared values stay as they are."""
    r, shared = weights.size("head_dim"), weights.size("heads") // weights.size("kv_heads")
    changed = {}
    for i in weights.layers():
        w_v, w_o = (weights.parts[i, name].astype(np.float64) for name in ("v.w", "o.w"))
        w_o = w_o.copy()
        for h in range(weights.size("heads")):
            own, group = slice(h * r, (h + 1) * r), slice(h // shared * r, (h // shared + 1) * r)
            values = _read(weights, i, w_v[:, group])
            triangle = np.linalg.qr(values, mode="r")
            left, _, _ = np.linalg.svd(triangle @ w_o[own])
            kept = np.linalg.solve(triangle, left[:, : r - cut])
            w_o[own] = kept @ (left[:, : r - cut].T @ triangle @ w_o[own])
        changed[i, "o.w"] = w_o
    return weights.but(changed)


# Prints


def forged(path: Path, name: str, heads: Sketches, layers: Sketches | None = None) -> None:
    """A fingerprint file of one checkpoint's heads, under any name, with another's rows for layers."""
    from safetensors.numpy import load_file, save_file

    heads.called(name).save(path)
    if layers is None:
        return
    layers.save(path.with_suffix(".true"))
    arrays, true = load_file(path), load_file(path.with_suffix(".true"))
    arrays |= {key: array for key, array in true.items() if key.startswith("layers_")}
    about = json.dumps({"version": 1, **heads.called(name).about})
    save_file(arrays, path, {"weightscope": about})
    path.with_suffix(".true").unlink()

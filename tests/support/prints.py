"""Fingerprints made of arrays, without a checkpoint."""

import numpy as np

from weightscope.pairs.lineage.sketches import POINTS, Sketches


def sketches_of(values, *, d_model=64, name="a", tokens=None, spectra=None):
    """A fingerprint of (L, H, 2, K) sketches."""
    layers, heads = values.shape[:2]
    layer, head = (index.ravel() for index in np.indices((layers, heads)))

    def flat(x):
        x = x.reshape(layers * heads, 2, -1)
        return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-30)

    about = {"name": name, "d_model": d_model, "vocabulary": None, "heads": heads, "kv_heads": heads}
    tokens = np.zeros((layers * heads, 2, 0)) if tokens is None else flat(tokens)
    spectra = np.zeros((layers * heads, 2, POINTS)) if spectra is None else spectra.reshape(-1, 2, POINTS)
    return Sketches(about, layer, head, head, flat(values), tokens, spectra, np.ones((layers * heads, 2)))

"""A Llama of random weights, small enough to be derived from and compared in a test."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.synthetic import Sizes, write
from tests.support.plants.derivations import redrawn
from tests.support.plants.named_parts import read_weights, write_weights


def write_small_llama(folder: Path, layers: int) -> Path:
    """Write one in float32 to a new folder."""
    sizes = Sizes(layers=layers, width=64, heads=4, head_dim=16, kv_heads=4, vocabulary=400, inner=96)
    drawn = write(folder.parent / "drawn", sizes)
    write_weights(replace(redrawn(read_weights(drawn)), dtype="float32"), folder)
    return folder


def written(weights, folder):
    """The folder that these weights are written to."""
    write_weights(weights, folder)
    return folder


def noisy(weights, seed, share):
    """With noise of this share of the size of each matrix."""
    rng = np.random.default_rng(seed)
    matrices = sorted(((part, w) for part, w in weights.parts.items() if w.ndim == 2), key=str)
    return weights.but({part: w + share * w.std() * rng.standard_normal(w.shape) for part, w in matrices})


def drawn(weights, seed):
    """With matrices drawn anew."""
    return noisy(weights.but({part: 1e-6 * w for part, w in weights.parts.items() if w.ndim == 2}), seed, 1e6)

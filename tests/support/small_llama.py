"""A Llama of random weights, small enough to be derived from and compared in a test."""

from dataclasses import replace
from pathlib import Path

from analyses.experiments.derivations import redrawn
from analyses.experiments.named_parts import read_weights, write_weights
from benchmarks.synthetic import Sizes, write


def write_small_llama(folder: Path, layers: int) -> Path:
    """Write one in float32 to a new folder."""
    sizes = Sizes(layers=layers, width=64, heads=4, head_dim=16, kv_heads=4, vocabulary=400, inner=96)
    drawn = write(folder.parent / "drawn", sizes)
    write_weights(replace(redrawn(read_weights(drawn)), dtype="float32"), folder)
    return folder

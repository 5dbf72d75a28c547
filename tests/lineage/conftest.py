"""A small model with rotary positions, tokens and feed-forward networks, and what is made of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from analyses.experiments.derivations import DERIVATIONS, redrawn
from analyses.experiments.named_parts import read_weights, write_weights
from benchmarks.synthetic import Sizes, write

SIZES = Sizes(layers=5, width=64, heads=4, head_dim=16, kv_heads=4, vocabulary=400, inner=96)


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """The folder of a Llama of random weights, in float32."""
    folder = tmp_path_factory.mktemp("lineage") / "base"
    drawn = write(folder.parent / "drawn", SIZES)
    write_weights(replace(redrawn(read_weights(drawn)), dtype="float32"), folder)
    return folder


@pytest.fixture
def made(base, tmp_path):
    """A function that makes derivations of it, one after the other, and returns the folder and the base's layers."""

    def make(*names: str) -> tuple[Path, list[int]]:
        weights = read_weights(base)
        for name in names:
            weights = DERIVATIONS[name].change(weights)
        folder = tmp_path / "-".join(names).replace(" ", "_").replace("%", "")[:60]
        write_weights(weights, folder)
        return folder, list(weights.came_from)

    return make

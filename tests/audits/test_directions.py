"""Memory of reading directions: what is shown of them is kept, and vectors only until the rows were gone through."""

import tracemalloc
from pathlib import Path

import pytest

import weightscope as ws
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.audits import directions


def peak(folder: Path, n_layers: int) -> int:
    """Bytes that reading two directions of each of eight heads a layer holds at most."""
    weights = gpt2_weights(n_layers=n_layers, d=512, vocab=64)
    model = ws.open_model(write_checkpoint(folder, weights, n_head=8))
    directions.directions_of(model, [0], 2)  # what is imported and cached on the way is not its memory
    tracemalloc.start()
    found, _ = directions.directions_of(model, list(range(n_layers)), 2)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found) == 8 * n_layers
    return most


def test_memory_does_not_grow_with_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directions, "VECTOR_BYTES", 1 << 20)
    few, many = peak(tmp_path / "few", 3), peak(tmp_path / "many", 12)
    assert many < 1.5 * few, (few, many)

"""Directions: vectors are kept only until tokens are found, and none is computed twice."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.heads.audit import directions
from weightscope.heads.audit.measure import Projection, _spectrum
from weightscope.model.layers.factored import Factored
from weightscope.model.metrics import spaces


def peak(folder: Path, n_layers: int) -> int:
    """Bytes that reading two directions of each of eight heads a layer holds at most."""
    weights = gpt2_weights(n_layers=n_layers, d=512, vocab=64)
    model = ws.open_model(write_checkpoint(folder, weights, n_head=8))
    heads = ws.audit(model, directions=2).measured  # what is imported and cached on the way is not its memory
    tracemalloc.start()
    heads_read, _ = directions.directions_of(model, heads, 2)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(heads_read) == 8 * n_layers
    return most


@pytest.mark.check
def test_memory_does_not_grow_with_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directions, "VECTOR_BYTES", 1 << 20)
    few, many = peak(tmp_path / "few", 3), peak(tmp_path / "many", 12)
    assert many < 1.5 * few, (few, many)


def kept_of(w: Factored, how_many: int) -> tuple[np.ndarray, np.ndarray]:
    """What measuring keeps of a matrix's singular vectors."""
    factors = [factor.astype(float) for factor in (w.left, w.right)]
    left, right = (Projection.of(factor, factor.T @ factor, spaces.probes(len(factor))) for factor in factors)
    kept = _spectrum("w", left, right, len(w.left), how_many)
    return kept["w_left"], kept["w_right"]


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6])
def test_directions_from_what_was_kept_are_those_of_the_whole_matrix(condition: float) -> None:
    rng = np.random.default_rng(3)
    mixed = np.diag(np.geomspace(1, 1 / condition, 8)) @ np.linalg.qr(rng.standard_normal((8, 8)))[0]
    w = Factored(rng.standard_normal((96, 8)) @ mixed, rng.standard_normal((80, 8)))
    u, s, vt = np.linalg.svd(w.dense())
    kept = [np.pad(vectors, ((0, 0), (0, 2)), constant_values=np.nan) for vectors in kept_of(w, 3)]
    directions_found = spaces.directions_from(w, s[:8], *kept, 3)
    assert len(directions_found) == 3
    for direction in directions_found:
        columns = slice(direction.block.start, direction.block.stop)
        for side, witness in ((direction.left, u[:, columns]), (direction.right, vt[columns].T)):
            np.testing.assert_allclose(side @ side.T, witness @ witness.T, atol=1e-5)
    largest = np.abs(directions_found[0].left[:, 0]).argmax()
    assert directions_found[0].left[largest, 0] > 0


def test_directions_that_measuring_kept_are_not_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ws.open_model(write_checkpoint(tmp_path, gpt2_weights()))
    asked_first = ws.audit(model, directions=2)
    without = ws.audit(model, directions=0).measured
    asked_later, _ = directions.directions_of(model, without, 2)
    lines = [[line.as_json() for line in head.lines] for head in asked_first.directions]
    assert lines == [[line.as_json() for line in head.lines] for head in asked_later]

    monkeypatch.setattr(spaces, "leading_directions", None)  # not called
    again, _ = directions.directions_of(model, asked_first.measured, 2)
    assert lines == [[line.as_json() for line in head.lines] for head in again]
    with pytest.raises(TypeError):
        directions.directions_of(model, without, 2)


def test_dependent_columns_are_looked_for_in_the_whole_matrix() -> None:
    factor = np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32)
    factor[:, 3] = factor[:, 2]
    w = Factored(factor, np.eye(32, 4, dtype=np.float32))
    left, right = kept_of(w, 2)
    assert left.shape == right.shape == (4, 0)
    directions_found = spaces.directions_from(w, w.svdvals(), left, right, 2)
    for direction, expected in zip(directions_found, spaces.leading_directions(w, 2), strict=True):
        np.testing.assert_array_equal(direction.left, expected.left)

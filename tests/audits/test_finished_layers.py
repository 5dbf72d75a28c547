"""Layers that an audit has finished are its own, whoever else writes into the folder."""

from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.audits.audit import AuditOptions, LayersToMeasure, measure_one


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[ws.Model]:
    """Two checkpoints of one shape."""
    folder = tmp_path_factory.mktemp("models")
    weights = [gpt2_weights(n_layers=3, d=48, vocab=60, seed=seed) for seed in (1, 2)]
    return [ws.open_model(write_checkpoint(folder / str(i), each)) for i, each in enumerate(weights)]


def test_without_locks_one_audit_ends_in_a_line_and_the_other_has_its_own_layers(
    models: list[ws.Model], tmp_path: Path
) -> None:
    """The second begins when the first has measured two of three layers, and puts two of its own before it."""
    options = AuditOptions()

    def go_on(work: LayersToMeasure, model: ws.Model, layers: int) -> None:
        for index in work.left[:layers]:
            work.put(index, measure_one(lambda: model, index, options))

    one = LayersToMeasure(models[0], tmp_path, options, resume=False)
    go_on(one, models[0], 2)
    other = LayersToMeasure(models[1], tmp_path, options, resume=False)
    go_on(other, models[1], 2)
    go_on(one, models[0], 1)
    with pytest.raises(ws.CheckpointError, match=r"layer 0 was finished, and another audit of this folder"):
        one.heads()
    go_on(other, models[1], 1)
    alone_there = LayersToMeasure(models[1], tmp_path / "alone", options, resume=False)
    go_on(alone_there, models[1], 3)
    for name, values in alone_there.heads().measured.items():
        np.testing.assert_array_equal(other.heads().measured[name], values)

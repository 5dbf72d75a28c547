"""A small checkpoint, and its audit on disk."""

from pathlib import Path

import pytest

from tests.support.commands import run
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory) -> Path:
    """Twelve small layers, so that a run can be stopped between them."""
    weights = gpt2_weights(n_layers=12, d=48, vocab=60)
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "twelve layers", weights)


@pytest.fixture(scope="package")
def out(checkpoint: Path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    result = run("audit", checkpoint, "--out", folder)
    assert result.exit_code == 0, result.output
    assert str(folder / "report.html") in result.output
    return folder

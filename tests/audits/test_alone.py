"""One audit at a time in a folder; where it cannot be locked, no audit takes another's layers for its own."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.audits import alone
from weightscope.audits.alone import alone_in
from weightscope.audits.audit import AuditOptions, LayersToMeasure, measure_one

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(ws.__file__).parents[1])}
HOLD = """
import sys
from pathlib import Path
from weightscope.audits.alone import alone_in
with alone_in(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that is at work in `out`."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "out")]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_folder_is_held_until_its_process_ends_however_it_ends(holder: subprocess.Popen, tmp_path: Path) -> None:
    with (
        pytest.raises(ws.CheckpointError, match=r"^out: another audit is writing into this folder"),
        alone_in(tmp_path / "out"),
    ):
        pass
    holder.kill()
    holder.wait()
    with alone_in(tmp_path / "out"):
        assert not list((tmp_path / "out").iterdir())


def test_a_folder_is_let_go_when_the_block_ends(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), alone_in(tmp_path):
            raise ZeroDivisionError


def test_an_error_of_the_block_is_its_own(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), alone_in(tmp_path):
        (tmp_path / "none").read_text()


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ws.CheckpointError, match=r"^out: cannot be written"), alone_in(tmp_path / "file" / "out"):
        pass


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks."""
    if alone.fcntl is None:
        return

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(alone.fcntl, "flock", refuse)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[ws.Model]:
    """Two checkpoints of one shape."""
    folder = tmp_path_factory.mktemp("models")
    weights = [gpt2_weights(n_layers=3, d=48, vocab=60, seed=seed) for seed in (1, 2)]
    return [ws.open_model(write_checkpoint(folder / str(i), each)) for i, each in enumerate(weights)]


@pytest.mark.usefixtures("no_locks")
def test_without_locks_one_audit_ends_in_a_line_and_the_other_has_its_own_layers(
    models: list[ws.Model], tmp_path: Path
) -> None:
    """The second begins when the first has measured two of three layers, and puts two of its own before it."""
    options = AuditOptions()
    with alone_in(tmp_path), alone_in(tmp_path):
        pass

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

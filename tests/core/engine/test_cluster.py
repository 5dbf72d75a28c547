"""A real scheduler and real workers on the loopback: the same bytes as a local run, whatever is killed."""

import csv
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tests.support import tasks
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.cli import main
from weightscope.core.engine import open_engine
from weightscope.core.errors import CheckpointError
from weightscope.heads.audit import batch
from weightscope.heads.audit.audit import AuditOptions
from weightscope.heads.audit.batch import FinishedLayers, Job, layers_identity
from weightscope.heads.detok import heads as detok
from weightscope.heads.detok.first_layer import FirstLayer
from weightscope.heads.detok.heads import ScorerOnWorker, measure_heads
from weightscope.model.model import open_model
from weightscope.model.run_identity import RunIdentity
from weightscope.model.sources import Source
from weightscope.model.text.counts import Counts, load_counts

pytest.importorskip("distributed", reason="Dask comes with the extra `cluster`")
from tests.support.dask_processes import ENVIRONMENT, PATIENCE, DaskProcesses
from tests.support.provenance import ends_with, without_footer

pytestmark = pytest.mark.check

VOCAB = 300


@pytest.fixture(scope="module")
def dask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskProcesses]:
    processes = DaskProcesses(tmp_path_factory.mktemp("dask"))
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty small layers, so that somebody can be killed between them."""
    weights = gpt2_weights(n_layers=40, d=64, vocab=VOCAB)
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "forty", weights, vocab_size=VOCAB)


def run(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def local(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An audit by this process alone."""
    out = tmp_path_factory.mktemp("local")
    run("audit", checkpoint, "--out", out)
    return out


def assert_same_bytes(one: Path, other: Path) -> None:
    """But for the command and the time at the end of a page."""
    files = sorted(path.name for path in one.iterdir() if path.is_file())
    assert sorted(path.name for path in other.iterdir() if path.is_file()) == files
    for name in files:
        assert without_footer(one / name) == without_footer(other / name), name


def assert_same_tables(one: Path, other: Path) -> None:
    for name in ("heads.csv", "spectra.npz", "findings.json", "directions.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def start(*arguments: object) -> subprocess.Popen:
    """A command in a process of its own."""
    return start_python("from weightscope.cli import main; main()", *map(str, arguments))


def start_python(code: str, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(name: str, folder: Path, client: subprocess.Popen) -> None:
    """Until a folder has a file of this name somewhere."""
    deadline = time.monotonic() + PATIENCE
    while not any(folder.rglob(name)):
        assert client.poll() is None, client.communicate()
        assert time.monotonic() < deadline, f"{name} never came"
        time.sleep(0.001)


def test_heads_measured_in_two_processes_are_the_same_byte_for_byte(
    checkpoint: Path, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine("local", jobs=2) as engine:
        monkeypatch.setattr(batch, "report_task", tasks.tables_alone)
        (outcome,) = batch.audit_all([Job(Source.named(str(checkpoint)), tmp_path)], AuditOptions(), engine)
    assert outcome.error is None
    assert_same_tables(local, tmp_path)


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up bigrams: every token but the last ten follows some others."""
    rng = np.random.default_rng(0)
    indptr = np.append(np.arange(0, 3 * (VOCAB - 10) + 1, 3), [3 * (VOCAB - 10)] * 10)
    indices = np.concatenate([np.sort(rng.choice(VOCAB, 3, replace=False)) for _ in range(VOCAB - 10)])
    made = Counts(indptr, indices, rng.integers(9, 20, len(indices)), "none", ("made up",), 1, 10**6)
    path = tmp_path_factory.mktemp("counts") / "counts.npz"
    made.save(path)
    return path


def test_auroc_in_blocks_of_rows_is_the_same_byte_for_byte_wherever(
    dask: DaskProcesses, checkpoint: Path, counts: Path, tmp_path: Path, monkeypatch
) -> None:
    expected = measure_heads(FirstLayer(open_model(checkpoint)), load_counts(counts)).auroc
    assert np.isfinite(expected).sum() == 4 * (VOCAB - 10)
    monkeypatch.setattr(detok, "PRODUCTS_A_TASK", 0)
    monkeypatch.setattr(detok, "FEWEST_ROWS", 128)
    source = Source.named(str(checkpoint))
    first, read = FirstLayer(source.open()), load_counts(counts)
    blocks = measure_heads(first, read).auroc
    np.testing.assert_allclose(blocks, expected, atol=1e-6)
    with open_engine("local", jobs=2) as engine:
        sent = ScorerOnWorker.of(source, first, counts)
        assert measure_heads(first, read, engine, sent).auroc.tobytes() == blocks.tobytes()
    run("detok", checkpoint, "--counts", counts, "--out", tmp_path, *dask.options)
    with np.load(tmp_path / "tokens.npz") as elsewhere:
        assert elsewhere["auroc"].tobytes() == blocks.tobytes()


def test_counts_that_a_worker_does_not_see_are_an_error(
    dask: DaskProcesses, checkpoint: Path, counts: Path, tmp_path: Path
) -> None:
    source = Source.named(str(checkpoint))
    first = FirstLayer(source.open())
    sent = ScorerOnWorker(source.as_seen(first.model), 0, 1, tmp_path / "none.npz", RunIdentity.of(counts={"size": 9}))
    message = (
        r"none.npz: is not the same on a worker \(not there\) as on the machine .* workers read a shared file system"
    )
    with open_engine("dask", dask.address) as engine, pytest.raises(CheckpointError, match=message):
        measure_heads(first, load_counts(counts), engine, sent)


def test_task_of_a_killed_worker_is_done_by_another(dask: DaskProcesses, tmp_path: Path) -> None:
    alive = len(dask.workers)
    with open_engine("dask", dask.address) as engine:
        for number in range(8):
            engine.submit(number, tasks.killed_once, tmp_path / "marker", number)
        outcomes = [engine.next() for _ in range(8)]
    assert sorted((key, value, error) for key, value, error in outcomes) == [(n, 2 * n, None) for n in range(8)]
    assert len(dask.workers) == alive - 1
    dask.add_worker()


def test_a_list_survives_its_workers_and_its_failures(
    dask: DaskProcesses, checkpoint: Path, local: Path, tmp_path: Path
) -> None:
    """All workers are killed in the middle, another one is added and ends the work; one source is broken."""
    broken = write_checkpoint(tmp_path / "broken", gpt2_weights(n_layers=3, d=64))
    weights = gpt2_weights(n_layers=3, d=64)
    del weights["h.2.attn.c_attn.weight"]
    write_checkpoint(broken, weights)
    (tmp_path / "list.txt").write_text(f"{checkpoint}\n{tmp_path}/missing\n{broken}\n")
    out = tmp_path / "out"
    client = start("audit", tmp_path / "list.txt", "--out", out, *dask.options)
    wait_for("layer-0003.npz", out / "forty", client)
    dask.kill(*dask.workers)
    assert not (out / "forty" / "report.html").exists()
    dask.add_worker()
    _, stderr = client.communicate(timeout=PATIENCE)
    assert client.returncode == 2
    lines = sorted(re.findall(r"weightscope: .*", stderr))
    assert len(lines) == 2 and "Traceback" not in stderr
    assert lines[0].startswith("weightscope: broken: model.safetensors: ") and "h.2.attn.c_attn.weight" in lines[0]
    assert lines[1].startswith("weightscope: missing: no such file or folder")
    assert_same_bytes(local, out / "forty")
    command = ["audit", tmp_path / "list.txt", "--out", out, *dask.options]
    ends_with(out / "forty" / "report.html", command, checkpoint)  # a worker made it
    with (out / "summary.csv").open(newline="") as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["failed", "failed", "ok"]  # the gravest first


def test_a_run_whose_client_was_killed_goes_on(
    dask: DaskProcesses, checkpoint: Path, local: Path, tmp_path: Path
) -> None:
    arguments = f"{dask.address!r}, {str(checkpoint)!r}, {str(tmp_path)!r}"
    code = f"from tests.support.tasks import audit_undrawn; audit_undrawn({arguments})"
    client = start_python(code)
    wait_for("layer-0003.npz", tmp_path, client)
    client.send_signal(signal.SIGKILL)
    client.communicate()
    finished = len(list(tmp_path.rglob("layer-*.npz")))
    layers = layers_identity(open_model(checkpoint), AuditOptions())
    left = FinishedLayers(tmp_path, layers, range(40), resume=True).left
    assert 0 < len(left) == 40 - finished < 40
    again = start_python(code)
    _, stderr = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0, stderr
    assert_same_tables(local, tmp_path)


def test_a_scheduler_that_goes_away_ends_the_run_with_a_line(
    dask: DaskProcesses, checkpoint: Path, tmp_path: Path
) -> None:
    client = start("audit", checkpoint, "--out", tmp_path, *dask.options)
    wait_for("layer-0000.npz", tmp_path, client)
    os.kill(dask.scheduler.pid, signal.SIGKILL)
    _, stderr = client.communicate(timeout=PATIENCE)
    assert client.returncode == 2
    line = f"weightscope: the Dask scheduler at {dask.address} has gone away (--resume continues an audit)"
    assert re.findall(r"weightscope: .*", stderr) == [line] and "Traceback" not in stderr

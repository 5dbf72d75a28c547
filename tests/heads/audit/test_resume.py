"""Audits that are killed, interrupted, resumed, or started twice in one folder."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

import weightscope as ws
from tests.support.audit import audit_of, names_in
from tests.support.provenance import without_footer
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.core.files import HIDDEN
from weightscope.heads.audit import batch
from weightscope.heads.audit.audit import AuditOptions, measure_task
from weightscope.heads.audit.batch import FinishedLayers, layers_identity
from weightscope.model.run_identity import RunIdentity

LAYERS = (0, 5, 7)


def run_until(command: list[str], there: tuple[Path, str], environment: dict[str, str]) -> bool:
    """Start a command and kill it with signal 9 as soon as a folder has a file of a name; False if it ended first."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        if any(there[0].rglob(there[1])):
            process.send_signal(signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.001)
    return False


@pytest.mark.check
def test_a_run_killed_twice_ends_with_the_same_bytes(checkpoint: Path, out: Path, tmp_path) -> None:
    """Once between layers, once while results are written; then resumed to the end."""
    code = "from weightscope.cli import main; main()"
    command = [sys.executable, "-c", code, "audit", str(checkpoint), "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(Path(ws.__file__).parents[1])}
    assert run_until(command, (tmp_path, "layer-0003.npz"), environment)
    assert not (tmp_path / "heads.csv").exists()
    assert run_until([*command, "--resume"], (tmp_path, "heads.csv"), environment)
    subprocess.run([*command, "--resume"], env=environment, check=True, capture_output=True)
    names = names_in(out)
    assert names_in(tmp_path) == names
    for name in names:
        assert without_footer(tmp_path / name) == without_footer(out / name), name


def interrupted(checkpoint: Path, out: Path, *options: str) -> Result:
    """An audit in which somebody presses Ctrl-C at layer 2."""
    measure_task = batch.measure_task

    def until(get_model, index, options, *ahead):
        if index == 2:
            raise KeyboardInterrupt
        return measure_task(get_model, index, options, *ahead)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "measure_task", until)
        return audit_of(checkpoint, out, *options)


def test_an_interrupted_audit_says_how_to_go_on_and_what_is_lost_otherwise(checkpoint: Path, tmp_path: Path) -> None:
    stopped = interrupted(checkpoint, tmp_path)
    assert stopped.exit_code == 130
    assert stopped.stderr.startswith("weightscope: interrupted; run the same command with --resume to continue\n")
    went_on = interrupted(checkpoint, tmp_path, "--resume")
    assert went_on.stderr == stopped.stderr
    changed = interrupted(checkpoint, tmp_path, "--resume", "--window", "8")
    afresh = "weightscope: starts afresh: discards 2 finished layers of other options or weights"
    assert changed.stderr.splitlines()[0] == afresh
    again = audit_of(checkpoint, tmp_path, "--window", "8")
    assert again.exit_code == 0
    lost = "weightscope: discards 2 finished layers of an interrupted audit; --resume would have kept them\n"
    assert again.stderr == lost


@pytest.mark.check
def test_a_finished_audit_is_kept_until_something_has_changed(checkpoint: Path, tmp_path: Path) -> None:
    def is_kept(*options: str) -> bool:
        result = audit_of(checkpoint, tmp_path, "--resume", *options)
        assert result.exit_code == 0 and not result.stderr
        return "report.html is up to date: an earlier run wrote it with the same weights and options" in result.stdout

    assert not is_kept()
    assert is_kept()
    assert not is_kept("--window", "8")
    assert not is_kept()
    (tmp_path / "report.html").unlink()
    assert not is_kept()
    (tmp_path / "heads.csv").write_text("head,auroc\n")  # as `detok` writes it
    assert not is_kept(), "another command has written there since"
    assert is_kept()
    assert interrupted(checkpoint, tmp_path).exit_code == 130
    assert not is_kept(), "what lies there may be of two audits"
    assert "is up to date" not in audit_of(checkpoint, tmp_path).stdout


def test_directions_of_another_audit_do_not_stay(checkpoint: Path, tmp_path: Path) -> None:
    assert audit_of(checkpoint, tmp_path).exit_code == 0
    names = names_in(tmp_path)
    assert audit_of(checkpoint, tmp_path, "--directions", "0").exit_code == 0
    assert set(names) - set(names_in(tmp_path)) == {"directions.json"}


@pytest.mark.check
def test_of_two_audits_at_once_one_ends_in_a_line_and_the_other_has_a_folder_of_its_own(
    checkpoint: Path, out: Path, tmp_path: Path
) -> None:
    second_model = write_checkpoint(tmp_path / "other", gpt2_weights(n_layers=12, d=48, vocab=60, seed=1))
    code, shared_out = "from weightscope.cli import main; main()", tmp_path / "out"
    environment = os.environ | {"PYTHONPATH": str(Path(ws.__file__).parents[1])}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, "audit", str(source), "--out", str(shared_out)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for source in (checkpoint, second_model)
    ]  # fmt: skip
    messages = [process.communicate()[1] for process in running]
    codes = [process.returncode for process in running]
    assert sorted(codes) == [0, 2], messages
    refused = messages[codes.index(2)]
    assert refused.startswith("weightscope: out: another run is writing into this folder") and refused.count("\n") == 1
    alone = out
    if codes[1] == 0:
        alone = tmp_path / "alone"
        assert audit_of(second_model, alone).exit_code == 0
    for name in ("heads.csv", "spectra.npz", "findings.json", "directions.json"):
        assert (shared_out / name).read_bytes() == (alone / name).read_bytes(), name


def test_finished_layers_are_not_measured_again_unless_something_has_changed(checkpoint, tmp_path, monkeypatch) -> None:
    measured: list[int] = []
    measure_task = batch.measure_task

    def counted(get_model, index, options, *ahead):
        measured.append(index)
        return measure_task(get_model, index, options, *ahead)

    assert interrupted(checkpoint, tmp_path).exit_code == 130
    monkeypatch.setattr(batch, "measure_task", counted)
    assert audit_of(checkpoint, tmp_path, "--resume").exit_code == 0
    assert measured == list(range(2, 12))
    measured.clear()
    assert interrupted(checkpoint, tmp_path).exit_code == 130
    measured.clear()
    assert audit_of(checkpoint, tmp_path, "--resume", "--window", "8").exit_code == 0
    assert measured == list(range(12))


def test_a_layer_is_taken_for_that_of_its_own_fingerprint_alone(tmp_path: Path) -> None:
    finished = FinishedLayers(tmp_path, RunIdentity.of(a=1), LAYERS, resume=False)
    finished.put(0, {"x": np.ones(2)})
    assert FinishedLayers(tmp_path, RunIdentity.of(a=1), LAYERS, resume=True).get(0) is not None
    assert FinishedLayers(tmp_path, RunIdentity.of(a=2), LAYERS, resume=True).get(0) is None
    assert finished.get(0) is None
    assert not list((tmp_path / HIDDEN).iterdir())


@pytest.mark.parametrize(
    ("window", "resume", "notice"),
    [
        (1, True, None),
        (1, False, "discards 2 finished layers of an interrupted audit; `resume` would have kept them"),
        (2, True, "starts afresh: discards 2 finished layers of other options or weights"),
        (2, False, "discards 2 finished layers of an interrupted audit with other options or weights"),
    ],
)
def test_layers_that_are_thrown_away_are_spoken_of(
    window: int, resume: bool, notice: str | None, tmp_path: Path
) -> None:
    first = FinishedLayers(tmp_path, RunIdentity.of(a=1), LAYERS, resume=False)
    assert first.notice is None
    for layer in (0, 5, 7):
        first.put(layer, {"x": np.ones(2)})
    (first.folder / "layer-0007.npz").write_bytes(b"cut")  # was never finished, so nothing is lost with it
    assert FinishedLayers(tmp_path, RunIdentity.of(a=window), LAYERS, resume).notice == notice


@pytest.mark.parametrize("kept", [0, 60, 200])
def test_a_finished_layer_cut_short_is_not_finished(tmp_path: Path, kept: int) -> None:
    finished = FinishedLayers(tmp_path, RunIdentity.of(), LAYERS, resume=False)
    finished.put(0, {"x": np.arange(1000.0)})
    assert finished.get(0) is not None
    (file,) = finished.folder.glob("layer-*.npz")
    file.write_bytes(file.read_bytes()[:kept])
    assert 0 in FinishedLayers(tmp_path, RunIdentity.of(), LAYERS, resume=True).left
    assert finished.get(0) is None


def test_a_finished_layer_with_a_flipped_bit_is_measured_again(tmp_path: Path) -> None:
    """Any bit: of the numbers, of their names, of what holds them together."""
    finished = FinishedLayers(tmp_path, RunIdentity.of(), LAYERS, resume=False)
    finished.put(0, {"x": np.arange(8.0), "caveats": np.array([], dtype=str)})
    (file,) = finished.folder.glob("layer-*.npz")
    content = file.read_bytes()
    for bit in range(0, 8 * len(content), 13):
        broken = bytearray(content)
        broken[bit // 8] ^= 1 << bit % 8
        file.write_bytes(broken)
        assert finished.get(0) is None, bit
    assert 0 in FinishedLayers(tmp_path, RunIdentity.of(), LAYERS, resume=True).left
    file.write_bytes(content)
    np.testing.assert_array_equal(finished.get(0)["x"], np.arange(8.0))


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

    def begun(model: ws.Model, out: Path) -> FinishedLayers:
        return FinishedLayers(out, layers_identity(model, options), range(3), resume=False)

    def go_on(finished: FinishedLayers, model: ws.Model, layers: int) -> None:
        for index in finished.left[:layers]:
            finished.put(index, measure_task(lambda: model, index, options))

    first = begun(models[0], tmp_path)
    go_on(first, models[0], 2)
    second = begun(models[1], tmp_path)
    go_on(second, models[1], 2)
    go_on(first, models[0], 1)
    with pytest.raises(ws.CheckpointError, match=r"layer 0 was finished, and another audit of this folder"):
        first.all()
    go_on(second, models[1], 1)
    undisturbed = begun(models[1], tmp_path / "undisturbed")
    go_on(undisturbed, models[1], 3)
    for index, measured in undisturbed.all().items():
        for name, values in measured.items():
            np.testing.assert_array_equal(second.all()[index][name], values)

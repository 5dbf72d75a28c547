"""Folders of results that somebody else has made: what they say is not believed, and they end no run in a traceback."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

from tests.support import tasks
from tests.support.commands import run
from tests.support.provenance import without_command
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.core.errors import CheckpointError
from weightscope.core.files import HIDDEN, OutputFolder
from weightscope.heads.audit import batch
from weightscope.heads.audit.batch import KEPT, RESULT, FinishedLayers
from weightscope.model.run_identity import RunIdentity

MANIFEST = f"{HIDDEN}/manifest.json"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """One layer with a head that is not finite, which a gate fails."""
    weights = gpt2_weights(n_layers=1)
    weights["h.0.attn.c_attn.weight"][0, 0] = np.nan
    return write_checkpoint(tmp_path / "model", weights)


def audit(checkpoint: Path, out: Path, *options: str) -> Result:
    """`weightscope audit` without figures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "report_task", tasks.tables_alone)
        return run("audit", checkpoint, "--out", out, *options)


def planted(out: Path, name: str, content: bytes) -> None:
    """Replace a result, and its digest in the manifest, as somebody would who wants it believed."""
    (out / name).write_bytes(content)
    manifest = json.loads((out / MANIFEST).read_bytes())
    manifest["files"][name] = hashlib.sha256(content).hexdigest()
    (out / MANIFEST).write_text(json.dumps(manifest))


def changed(record: bytes, **changes: object) -> bytes:
    return json.dumps(json.loads(record) | changes).encode()


def without_files(out: Path) -> None:
    """A manifest that says of no file that it is finished, and a result without findings."""
    (out / MANIFEST).write_bytes(changed((out / MANIFEST).read_bytes(), files={}))
    (out / RESULT).write_bytes(changed((out / RESULT).read_bytes(), findings=[]))
    hidden_alone(out)


def brackets(out: Path) -> None:
    (out / MANIFEST).write_text("[" * 100_000)
    hidden_alone(out)


def hidden_alone(out: Path) -> None:
    """Remove what no manifest lists, which no run would write over."""
    for path in out.iterdir():
        if path.is_file():
            path.unlink()


def unlisted_result(out: Path) -> None:
    """The manifest lists all files but the result that is printed."""
    manifest = json.loads((out / MANIFEST).read_bytes())
    del manifest["files"][RESULT]
    (out / MANIFEST).write_text(json.dumps(manifest))
    (out / RESULT).write_bytes(changed((out / RESULT).read_bytes(), findings=[]))


def pipe(name: str) -> Callable[[Path], None]:
    def replace(out: Path) -> None:
        (out / name).unlink()
        os.mkfifo(out / name)

    return replace


PLANTED: dict[str, Callable[[Path], object]] = {
    "a manifest without files": without_files,
    "a result that is not listed": unlisted_result,
    "another result": lambda out: (out / RESULT).write_text('{"findings": []}'),
    "a list for a result": lambda out: planted(out, RESULT, b"[]"),
    "a list for a summary": lambda out: planted(out, KEPT, b"[]"),
    "a result of brackets": lambda out: planted(out, RESULT, b"[" * 100_000),
    "a result that is not JSON": lambda out: planted(out, RESULT, b"\xff"),
    "a result with infinity": lambda out: planted(out, RESULT, b'{"findings": [], "heads": [Infinity]}'),
    "a result without findings": lambda out: planted(out, RESULT, changed((out / RESULT).read_bytes(), findings=[])),
    "findings of no kind": lambda out: planted(out, RESULT, b'{"findings": [{"kind": "x", "title": "", "text": ""}]}'),
    "an empty summary": lambda out: planted(out, KEPT, b"{}"),
    "a summary with an escape": lambda out: planted(
        out, KEPT, changed((out / KEPT).read_bytes(), family="\x1b[2J")),
    "a manifest of brackets": brackets,
    "a pipe for a result": pipe(RESULT),
    "a pipe for a summary": pipe(KEPT),
}  # fmt: skip


@pytest.mark.parametrize("attack", PLANTED)
def test_planted_results_are_neither_printed_nor_gated(attack: str, checkpoint: Path, tmp_path: Path) -> None:
    options, out = ("--json", "--fail-on", "error"), tmp_path / "out"
    honest = audit(checkpoint, out, *options)
    assert (honest.exit_code, json.loads(honest.stdout)["findings"] != []) == (3, True), honest.output
    again = audit(checkpoint, out, *options, "--resume")
    assert (again.exit_code, without_command(again.stdout)) == (3, without_command(honest.stdout))
    PLANTED[attack](out)
    after = audit(checkpoint, out, *options, "--resume")
    if attack.startswith("a pipe"):
        assert (after.exit_code, after.stdout) == (2, "") and after.stderr.endswith(".json: is not a regular file\n")
    else:
        assert (after.exit_code, without_command(after.stdout)) == (3, without_command(honest.stdout))


@pytest.mark.parametrize("layer", ["copied", "no arrays"])
def test_a_layer_of_another_fingerprint_is_measured_again(layer: str, tmp_path: Path) -> None:
    """Though it lies in the folder of this one."""
    differing = FinishedLayers(tmp_path / "other", RunIdentity.of(a=1), [0], resume=False)
    differing.put(0, {"x": np.ones(2)} if layer == "copied" else {"not a name": np.ones(2)})
    fingerprint = RunIdentity.of(a=2 if layer == "copied" else 1)
    folder = FinishedLayers(tmp_path / "out", fingerprint, [0], resume=True).folder
    shutil.copytree(differing.folder, folder)
    assert FinishedLayers(tmp_path / "out", fingerprint, [0], resume=True).left == [0]


def test_a_pipe_among_the_layers_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / HIDDEN / "layers-0").mkdir(parents=True)
    os.mkfifo(tmp_path / HIDDEN / "layers-0" / "layer-0000.npz")
    assert FinishedLayers(tmp_path, RunIdentity.of(), [0], resume=False).notice is None


@pytest.mark.parametrize("name", ["", "/lock", "/manifest.json", "/unfinished", "/layers-0123456789abcdef"])
@pytest.mark.parametrize("leads", ["to a folder", "to a file", "nowhere"])
def test_a_link_in_the_hidden_folder_is_refused(name: str, leads: str, tmp_path: Path) -> None:
    """Nothing is written, read or emptied where it points, with --resume and without."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "lock").write_text("mine")
    link = tmp_path / "out" / (HIDDEN + name)
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "victim" / {"to a folder": "", "to a file": "lock", "nowhere": "none"}[leads])
    folder = OutputFolder(tmp_path / "out")
    for begin in (folder.begin, folder.refuse_foreign, folder.is_finished):
        with pytest.raises(CheckpointError, match=rf"^{link.name}: is a symbolic link, which no run has made"):
            begin()
    assert [path.name for path in (tmp_path / "victim").iterdir()] == ["lock"]
    assert (tmp_path / "victim" / "lock").read_text() == "mine"


def test_an_audit_into_a_linked_hidden_folder_ends_in_a_line(checkpoint: Path, tmp_path: Path) -> None:
    for folder in ("out", "victim"):
        (tmp_path / folder).mkdir()
    (tmp_path / "out" / HIDDEN).symlink_to(tmp_path / "victim")
    for options in ((), ("--resume",)):
        result = audit(checkpoint, tmp_path / "out", *options)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert "is a symbolic link" in result.stderr
    assert not any((tmp_path / "victim").iterdir())


def test_a_linked_subfolder_is_not_written_into(tmp_path: Path) -> None:
    for folder in ("out", "victim"):
        (tmp_path / folder).mkdir()
    (tmp_path / "out" / "figures").symlink_to(tmp_path / "victim")
    with OutputFolder(tmp_path / "out") as out, pytest.raises(CheckpointError, match=r"^heads\.png: leads out of"):
        out.text("figures/heads.png", "")
    assert not any((tmp_path / "victim").iterdir())

"""Results appear whole or not at all, one run at a time, and nothing stays that a run before it left."""

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from weightscope.checkpoint.hub import BlockCache
from weightscope.core.errors import CheckpointError
from weightscope.core.files import HIDDEN, Files, Folder, OutputFolder, check_writable, new_file
from weightscope.core.tables import Column, Table
from weightscope.heads.audit.batch import FinishedLayers
from weightscope.model.run_identity import RunIdentity

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(ws.__file__).parents[1])}
TABLE = Table([Column("head", [0, 1]), Column("auroc", [0.5, float("nan")])])


def names_in(folder: Path) -> list[str]:
    """What a person sees of a folder of results."""
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in files if not name.startswith(HIDDEN))


def run(folder: Path, *names: str, fingerprint: dict[str, str] | None = None) -> None:
    """A run that ends well and writes these files, each with its name for content."""
    with OutputFolder(folder, fingerprint) as out:
        for name in names:
            out.text(name, name)


def write_one_of_each(files: Files) -> None:
    files.table("heads.csv", TABLE)
    files.npz("tokens.npz", auroc=np.arange(3))
    files.json("findings.json", [{"head": 1}])
    files.text("notes.txt", "é")
    files.bytes("figure.png", b"\x89PNG")
    files.within("text").within("layer").text("a.txt", "deep")
    with files.open("long.bin") as file:
        file.write(b"1")
        file.write(b"2")


def test_a_folder_holds_the_bytes_that_are_written_in_memory(tmp_path: Path) -> None:
    memory = Files()
    write_one_of_each(memory)
    with OutputFolder(tmp_path / "a") as written:
        write_one_of_each(written)
    with OutputFolder(tmp_path / "b") as sent:
        sent.add(memory.contents)
    write_one_of_each(Folder(tmp_path / "c"))
    assert memory.contents["heads.csv"] == b"head,auroc\n0,0.5\n1,\n"
    assert memory.contents["text/layer/a.txt"] == b"deep"
    assert memory.contents["long.bin"] == b"12"
    for out in ("a", "b", "c"):
        assert names_in(tmp_path / out) == sorted(memory.contents)
        for name, content in memory.contents.items():
            assert (tmp_path / out / name).read_bytes() == content


def test_an_npz_is_read_without_pickle_and_has_the_same_bytes_each_time() -> None:
    first, again = Files(), Files()
    for files in (first, again):
        files.npz("a.npz", x=np.arange(3))
    assert first.contents == again.contents
    with np.load(io.BytesIO(first.contents["a.npz"]), allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["x"], [0, 1, 2])
    with pytest.raises(ValueError, match="arrays of objects"):
        first.npz("b.npz", x=np.array([{}]))
    assert "b.npz" not in first.contents


def test_failed_write_leaves_the_old_file_only(tmp_path: Path) -> None:
    run(tmp_path, "table.csv")
    with pytest.raises(ZeroDivisionError), OutputFolder(tmp_path) as out, out.open("table.csv") as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert (tmp_path / "table.csv").read_text() == "table.csv"
    assert names_in(tmp_path) == ["table.csv"]
    assert not list(tmp_path.rglob(".*.partial"))


def test_new_file_has_the_usual_permissions(tmp_path: Path) -> None:
    """Less private than a temporary file: users who may read the folder may read the results."""
    run(tmp_path, "a.txt")
    (tmp_path / "plain").touch()
    assert (tmp_path / "a.txt").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_link_at_the_partial_files_name_is_not_followed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("os.urandom", bytes)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / f".{'00' * 8}.partial").symlink_to(victim)
    with pytest.raises(CheckpointError, match=r"^a\.csv: cannot be written"), new_file(tmp_path / "out" / "a.csv"):
        pass
    assert victim.read_text() == "mine"


def test_partial_files_of_other_processes_are_kept(tmp_path: Path) -> None:
    """A download of somebody else's that is under way, wherever it is put; only what a killed run of ours left goes."""
    run(tmp_path, "a.txt")
    theirs = [tmp_path / "model.download.partial", tmp_path / HIDDEN / ".x.download.partial"]
    for path in theirs:
        path.touch()
    killed = tmp_path / HIDDEN / "unfinished" / ".0123456789abcdef.partial"
    killed.parent.mkdir()
    killed.touch()
    run(tmp_path, "a.txt")
    assert all(path.exists() for path in theirs) and not killed.exists()


def test_file_is_synced_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and the manifest; a finished layer or a fetched block, whose digests are checked, need not be."""
    done: list[str] = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append("on the disk") or sync(descriptor))
    monkeypatch.setattr(Path, "replace", lambda path, to: done.append("named") or replace(path, to))
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    run(tmp_path / "out", "a.txt")
    assert done == ["on the disk", "named"] * (len(done) // 2) and len(done) > 4
    done.clear()
    finished, blocks = FinishedLayers(tmp_path / "out", RunIdentity.of(), [0], resume=False), BlockCache("server")
    finished.put(0, {"x": np.ones(2)})
    blocks.put("0-3", b"abc")
    assert done == ["named"] * 2
    for torn in (finished._file(0), blocks._folder / "0-3"):  # by a power failure
        torn.write_bytes(bytes(torn.stat().st_size))
    assert finished.get(0) is None and blocks.get("0-3") is None


def test_leftovers_are_removed_after_the_next_run_succeeds(tmp_path: Path) -> None:
    run(tmp_path, "heads.csv", "head-3.png", "sub/head-3.svg")
    with OutputFolder(tmp_path) as out:
        out.text("heads.csv", "new")
        assert "head-3.png" in names_in(tmp_path), "until the new results stand"
    assert names_in(tmp_path) == ["heads.csv"]
    assert not (tmp_path / "sub").exists()


def test_files_of_other_programs_are_never_removed(tmp_path: Path) -> None:
    """Neither one that was there before, nor one of ours that a person has edited since."""
    tmp_path.joinpath("sub").mkdir()
    for name in ("mine.txt", "sub/mine.txt"):
        (tmp_path / name).write_text("mine")
    run(tmp_path, "notes.txt", "sub/old.txt")
    (tmp_path / "notes.txt").write_text("edited")
    run(tmp_path, "heads.csv")
    assert names_in(tmp_path) == ["heads.csv", "mine.txt", "notes.txt", "sub/mine.txt"]
    run(tmp_path)
    assert names_in(tmp_path) == ["mine.txt", "notes.txt", "sub/mine.txt"]


def test_failed_run_removes_nothing_and_the_next_removes_leftovers(tmp_path: Path) -> None:
    run(tmp_path, "one.txt")
    with pytest.raises(ZeroDivisionError), OutputFolder(tmp_path) as out:
        out.text("two.txt", "two")
        raise ZeroDivisionError
    assert names_in(tmp_path) == ["one.txt", "two.txt"]
    run(tmp_path, "three.txt")
    assert names_in(tmp_path) == ["three.txt"]


KILLED = """
import os, signal, sys
from pathlib import Path
from weightscope.core.files import OutputFolder
with OutputFolder(Path(sys.argv[1])) as out:
    out.text("one.txt", sys.argv[2])
    out.text("two.txt", "two")
    with out.open("three.txt") as file:
        file.write(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_runs_that_were_killed_leave_nothing_once_one_has_ended_well(tmp_path: Path) -> None:
    """The second is killed after it has written over a file of the first."""
    for content in ("1", "2"):
        killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), content], env=ENVIRONMENT)
        assert killed.returncode == -signal.SIGKILL
        assert names_in(tmp_path) == ["one.txt", "two.txt"]
    run(tmp_path, "heads.csv")
    assert names_in(tmp_path) == ["heads.csv"]
    assert sorted(path.name for path in (tmp_path / HIDDEN).iterdir()) == ["lock", "manifest.json"]


@pytest.mark.parametrize("name", ["../victim", "{absolute}", "link/victim", "a\0b"])
def test_no_manifest_reaches_out_of_its_folder(name: str, tmp_path: Path) -> None:
    """A folder of results may come from somebody else."""
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.write_text("sub/x")
    run(out, "sub/x")
    (out / "link").symlink_to(tmp_path)
    manifest = out / HIDDEN / "manifest.json"
    manifest.write_text(manifest.read_text().replace("sub/x", json.dumps(name.format(absolute=victim))[1:-1]))
    run(out, "heads.csv")
    assert victim.exists()


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"files": 1}', "[" * 10**5, '{"finished": true, "files": {}}'])
def test_broken_manifest_is_ignored(manifest: str, tmp_path: Path) -> None:
    run(tmp_path, "old.txt")
    (tmp_path / HIDDEN / "manifest.json").write_text(manifest)
    assert not OutputFolder(tmp_path).is_finished()
    run(tmp_path, "new.txt")
    assert names_in(tmp_path) == ["new.txt", "old.txt"]
    assert OutputFolder(tmp_path).is_finished()


def test_run_counts_as_finished_until_something_changes(tmp_path: Path) -> None:
    fingerprint = {"weights": "a", "layers": (0, 1)}
    out = OutputFolder(tmp_path / "out", fingerprint)
    assert not out.is_finished()
    with out:
        out.text("heads.csv", "1")
        out.text("report.html", "2")
        assert not out.is_finished()
    assert out.is_finished()
    assert not OutputFolder(tmp_path / "out", {**fingerprint, "weights": "b"}).is_finished()
    (out.path / "report.html").unlink()
    assert not out.is_finished()
    (out.path / "report.html").write_text("2")
    assert out.is_finished()
    (out.path / "heads.csv").write_text("2")
    assert not out.is_finished()


def test_interrupted_run_does_not_count_as_finished(tmp_path: Path) -> None:
    """Though it has written nothing: what lies there may be of two runs."""
    run(tmp_path, "heads.csv", fingerprint={"a": "1"})
    with pytest.raises(KeyboardInterrupt), OutputFolder(tmp_path, {"a": "1"}):
        raise KeyboardInterrupt
    assert not OutputFolder(tmp_path, {"a": "1"}).is_finished()


HOLD = """
import sys
from pathlib import Path
from weightscope.core.files import OutputFolder
with OutputFolder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """Another process that is at work in `out`."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "out")]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_folder_lock_is_released_however_its_process_ends(holder: subprocess.Popen, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^out: another run is writing into this folder; wait"):
        run(tmp_path / "out")
    holder.kill()
    holder.wait()
    run(tmp_path / "out")
    assert names_in(tmp_path / "out") == []


def test_process_cannot_lock_a_folder_twice(tmp_path: Path) -> None:
    with OutputFolder(tmp_path), pytest.raises(CheckpointError, match="another run is writing"):
        run(tmp_path)
    run(tmp_path)


def test_error_inside_the_block_is_raised_unchanged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), OutputFolder(tmp_path):
        (tmp_path / "none").read_text()


def test_folder_on_a_file_system_without_locks_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network file systems."""
    fcntl = pytest.importorskip("fcntl")

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with OutputFolder(tmp_path):
        run(tmp_path, "heads.csv")
    assert names_in(tmp_path) == ["heads.csv"]


def test_other_lock_errors_are_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / HIDDEN / "lock").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"cannot be locked \("):
        run(tmp_path)


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"^out: cannot be written \(Not a directory\)"):
        run(tmp_path / "file" / "out")
    with pytest.raises(CheckpointError, match=r"report\.html: cannot be written"):
        Folder(tmp_path / "file").text("report.html", "")


def test_writability_is_checked_without_making_the_folder(tmp_path: Path) -> None:
    for folder in (tmp_path / "a" / "b", tmp_path):
        check_writable(folder)
        assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"nothing can be written to .*out \(Not a directory\)"):
        check_writable(tmp_path / "file" / "out")
    with pytest.raises(CheckpointError, match=r"nothing can be written to .*aaa \(File name too long\)"):
        check_writable(tmp_path / ("a" * 300))
    monkeypatch.setattr("os.access", lambda path, mode: False)  # tests may run as root, to whom all is open
    with pytest.raises(CheckpointError, match=r"nothing can be written to .*out \(Permission denied\)"):
        check_writable(tmp_path / "none" / "out")


def test_plain_folder_keeps_its_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    Folder(tmp_path).text("heads.csv", "first")
    Folder(tmp_path).text("other.csv", "second")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heads.csv", "notes.txt", "other.csv"]


def test_leftover_that_cannot_be_removed_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "out", "old.txt")

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        with pytest.raises(CheckpointError, match=r"^old\.txt: cannot be removed \(Permission denied\)"):
            run(tmp_path / "out")


def test_foreign_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "heads.csv").write_text("mine")
    for names in ((), ("heads.csv",)):
        with (
            pytest.raises(CheckpointError, match=r"^heads\.csv: is there already, and no run of weightscope wrote it"),
            OutputFolder(tmp_path, names=names) as folder,
        ):
            folder.text("heads.csv", "ours")
        assert (tmp_path / "heads.csv").read_text() == "mine"
        assert (tmp_path / HIDDEN).exists() == (names == ())  # what is known beforehand is looked for beforehand
        shutil.rmtree(tmp_path / HIDDEN, ignore_errors=True)
    (tmp_path / "heads.csv").unlink()
    for text in ("ours", "ours again"):
        with OutputFolder(tmp_path, names=("heads.csv",)) as folder:
            folder.text("heads.csv", text)
            folder.text("heads.csv", text)
    (tmp_path / "heads.csv").write_text("ours, with a note")  # its name stays ours
    with OutputFolder(tmp_path) as folder:
        folder.text("heads.csv", "ours")
    assert (tmp_path / "heads.csv").read_text() == "ours"


def test_dangling_link_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "report.html").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no run of weightscope wrote it"):
        OutputFolder(tmp_path).begin()

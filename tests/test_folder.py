"""Results appear whole or not at all."""

from pathlib import Path

import numpy as np
import pytest

from weightscope.errors import CheckpointError
from weightscope.folder import check_writable, remove_earlier, replacing, write_csv, write_npz, write_text


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "table.csv"
    write_text(target, "old")
    with pytest.raises(ZeroDivisionError), replacing(target) as partial:
        partial.write_text("half")
        raise ZeroDivisionError
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"report\.html: cannot be written"):
        write_text(tmp_path / "file" / "report.html", "")


def test_whether_a_folder_can_be_written_is_found_out_without_making_it(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
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


def test_no_cell_is_a_formula_or_an_escape_sequence(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", ("a", "b"), [("=cmd()", float("nan")), ("\x1b[31m", 1 / 3)])
    assert (tmp_path / "t.csv").read_text() == "a,b\n'=cmd(),\n\\x1b[31m,0.333333\n"


def test_npz_reads_back_without_pickle(tmp_path: Path) -> None:
    write_npz(tmp_path / "a.npz", x=np.arange(3))
    with np.load(tmp_path / "a.npz", allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["x"], [0, 1, 2])


def test_of_an_earlier_run_those_files_alone_are_removed_that_have_the_name(tmp_path: Path) -> None:
    kept = ["head-.png", "head-1.png.txt", "my-head-1.png", "head-one.png", "heads.csv"]
    for name in [*kept, "head-1.png", "head-23.svg"]:
        (tmp_path / name).write_text("")
    remove_earlier(tmp_path, r"head-\d+\.(png|svg)")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
    remove_earlier(tmp_path / "none", ".*")


def test_what_cannot_be_removed_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "roc.png").mkdir()
    with pytest.raises(CheckpointError, match=r"^roc\.png: cannot be removed"):
        remove_earlier(tmp_path, r"roc\.png")

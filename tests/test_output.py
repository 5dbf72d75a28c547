"""Results appear whole or not at all."""

from pathlib import Path

import numpy as np
import pytest

from weightscope.errors import CheckpointError
from weightscope.output import replacing, write_csv, write_npz, write_text


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


def test_no_cell_is_a_formula_or_an_escape_sequence(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", ("a", "b"), [("=cmd()", float("nan")), ("\x1b[31m", 1 / 3)])
    assert (tmp_path / "t.csv").read_text() == "a,b\n'=cmd(),\n\\x1b[31m,0.333333\n"


def test_npz_reads_back_without_pickle(tmp_path: Path) -> None:
    write_npz(tmp_path / "a.npz", x=np.arange(3))
    with np.load(tmp_path / "a.npz", allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["x"], [0, 1, 2])

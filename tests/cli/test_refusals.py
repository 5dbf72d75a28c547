"""What the system refuses ends in one line too: a full disk behind the output, no folder for what is temporary."""

import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.commands import is_one_line, run
from weightscope.cli import main

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [["inspect", "embedded"], ["--help"], ["--version"]], ids=lambda own: own[0])
def test_full_disk_behind_stdout_is_one_line(arguments: list[str], monkeypatch, capfd) -> None:
    with FULL.open("w") as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as ended:
            main(arguments, prog_name="weightscope")
    # Closing the file has written nothing again: Python does so at the end of a process, and would complain.
    assert ended.value.code == 2
    assert capfd.readouterr().err == "weightscope: cannot write to standard output (No space left on device)\n"


def test_without_a_temporary_folder_one_line_says_what_to_do(tmp_path: Path, monkeypatch) -> None:
    """Matplotlib needs one if it has no other; its message names the variable to set."""
    from weightscope.heads.audit import page

    def no_folder(*things: object) -> None:
        tempfile.mkdtemp(prefix="matplotlib-")

    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/none"])
    assert run("inspect", "embedded").exit_code == 0  # needs none
    monkeypatch.setattr(page.figures, "head_maps", no_folder)
    result = run("audit", "embedded", "--out", tmp_path, "--directions", "0", "--layers", "0")
    assert is_one_line(result), result.output
    assert "No usable temporary directory found in ['/proc/none']" in result.stderr
    assert not (tmp_path / "report.html").exists()

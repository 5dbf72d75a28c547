"""Kept tables name the code that made them, and a change of it is seen; long runs go on where they were."""

import subprocess
import sys
from pathlib import Path

import pytest

from analyses import figures, long, made
from weightscope.core.tables import Table

pytestmark = pytest.mark.check


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module and rows next to it."""
    monkeypatch.setattr(made, "ROOT", tmp_path)
    made.digest_of.cache_clear()
    (tmp_path / "weightscope").mkdir()
    (tmp_path / "weightscope" / "sums.py").write_text(
        '"""Sums."""\n\n\ndef one():\n    """One."""\n    return 1  # one\n'
    )
    (tmp_path / "weightscope" / "rows.toml").write_text("a = 1\n")
    return tmp_path / "weightscope" / "sums.py"


@pytest.mark.parametrize(
    ("text", "is_stale"),
    [
        ('"""Other sums."""\ndef one():\n    "The number."\n    return (1)\n', False),
        ("def one():\n    return 2\n", True),
        (None, True),
    ],
    ids=["other words", "other code", "gone"],
)
def test_a_change_of_code_is_seen(text: str | None, is_stale: bool, house: Path) -> None:
    record = made.Made.now("folder", [house])
    assert not record.is_stale
    made.digest_of.cache_clear(), made.said_by.cache_clear()
    house.unlink() if text is None else house.write_text(text)
    assert record.is_stale is is_stale


@pytest.mark.parametrize("facts", ["rows.toml", "defaults.json"])
def test_a_change_of_rows_is_seen(facts: str, house: Path) -> None:
    record = made.Made.now("folder", [house])
    made.digest_of.cache_clear(), made.said_by.cache_clear()
    (house.parent / facts).write_text("a = 2\n")
    assert record.is_stale


def test_tables_of_unknown_code_are_stale() -> None:
    assert made.Made("folder", "2026-01-01", "0123abcd", "", "").is_stale


def test_a_run_records_the_modules_that_it_imported(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "analyses.made", tmp_path, "weightscope", "inspect", "embedded"]
    subprocess.run(command, cwd=made.ROOT, check=True, capture_output=True)
    record = made.record_in(tmp_path)
    assert "weightscope/cli:" in record.modules and "weightscope/pairs/lineage" not in record.modules
    assert not record.is_stale


def test_a_run_that_fails_records_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "analyses.made", tmp_path, "weightscope", "inspect", tmp_path / "none"]
    assert subprocess.run(command, cwd=made.ROOT, capture_output=True).returncode
    assert not (tmp_path / made.RECORD).exists()


def test_every_folder_of_tables_has_its_record() -> None:
    assert [*made.read_made()] == sorted(drawing.folder for drawing in figures.DRAWINGS)


def test_a_release_has_no_table_of_other_code() -> None:
    stale = [folder for folder, record in made.read_made().items() if record.is_stale]
    tags = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=made.ROOT, capture_output=True, text=True).stdout
    if not tags.strip():
        pytest.skip(f"no release: the code of {len(stale)} of {len(figures.DRAWINGS)} folders has changed since")
    assert stale == []


def test_a_long_run_leaves_out_what_passed(tmp_path: Path) -> None:
    tests = tmp_path / "test_two.py"
    tests.write_text("def test_a(): pass\ndef test_b(): assert False\n")
    passed = tmp_path / "passed.txt"
    settings = {"RESUMED": str(passed), "PYTHONPATH": str(made.ROOT)}
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.resumed", "-c", tmp_path / "none.ini", tests]
    (tmp_path / "none.ini").write_text("[pytest]\n")
    runs = [subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True) for _ in range(2)]
    assert passed.read_text() == "test_two.py::test_a\n"
    assert ["1 failed, 1 passed" in runs[0].stdout, "1 failed, 1 deselected" in runs[1].stdout] == [True, True]


def test_pieces_that_ended_well_are_not_run_again(tmp_path: Path) -> None:
    done = {"a": long.Done("a", "0123", "2026-01-01", "5", "0"), "b": long.Done("b", "0123", "2026-01-01", "5", "1")}
    Table.of(long.Done, done.values()).to_csv(tmp_path / "pieces.csv")
    assert made.read_rows(long.Done, tmp_path / "pieces.csv") == done

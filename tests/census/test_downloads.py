"""Shares of downloads equal the committed table's, and the page shows them."""

import csv
from pathlib import Path

import pytest

from tests.census import downloads
from weightscope.model.rows.table import RECORD, lines

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"


def test_the_page_has_what_the_script_prints() -> None:
    assert downloads.section([*lines(RECORD)]) in PAGE.read_text(encoding="utf-8")


def test_shares_are_of_the_whole_table() -> None:
    with downloads.SHARES.open(encoding="utf-8") as file:
        shares = [*csv.DictReader(file)]
    assert len(shares) == 120 and abs(sum(float(line["percent"]) for line in shares) - 100) < 0.1
    assert sum(float(line["percent"]) for line in shares[: downloads.MOST_DOWNLOADED]) > 85


@pytest.mark.check
def test_architectures_are_joined_by_class_or_by_their_repositories(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="architectures are joined by transformers' classes, not installed")
    table = tmp_path / "downloads.csv"
    table.write_text("architecture,downloads\nNobodys,1\nMarianMTModel,2\nHfMoondream,1\n", encoding="utf-8")
    assert downloads.count(table) == [
        ("MarianMTModel", 50, "marian"),
        ("Nobodys", 25, ""),
        ("HfMoondream", 25, "moondream1"),
    ]

"""Cells of the tables under figures/, which README and docs/ quote."""

import csv
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "figures"


def words(path: Path) -> str:
    """A page in one line, without what its blocks print, which tests/docs/test_text.py checks."""
    return " ".join(re.sub(r"^```(?:text|console)\n.*?^```$", "", path.read_text(), flags=re.S | re.M).split())


@cache
def rows(name: str) -> tuple[dict[str, str], ...]:
    with (FIGURES / name).open() as file:
        return tuple(csv.DictReader(file))


def column(name: str, column: str, **where: Any) -> np.ndarray:
    """A column of a CSV, of the rows that hold these values."""
    cells = [row[column] for row in rows(name) if all(row[key] == str(value) for key, value in where.items())]
    assert cells, f"{name} has no row with {where}"
    return np.array([float(cell or "nan") for cell in cells])


def cell(name: str, *args: Any, **where: Any) -> float:
    """The one cell there is."""
    (value,) = column(name, *args, **where)
    return float(value)


def said(template: str, numbers: list[float]) -> str:
    """The sentence with these numbers, as the pages write them."""
    return re.sub(r"(\d)%", r"\1 %", template.format(*numbers)).replace("-0.00", "0.00")

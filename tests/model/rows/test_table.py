"""The page's table has a line for every row that has tiny models here, and says what the fixtures say."""

from inspect import isfunction

import pytest

from tests.census.record import read
from tests.model.rows.table import HEADER, MARKED, PAGE, table
from tests.support.tiny_models import NAMES, fixture
from weightscope.model.rows.family import Family
from weightscope.model.rows.table import FAMILIES

ERRORS = (HEADER.index("scores"), HEADER.index("values"))  # bounds on them may change with the machine


def lines(text: str) -> dict[str, list[str]]:
    """Lines of a Markdown table by their first cell, header and rule apart."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    return {line[0]: line for line in cells}


@pytest.fixture(scope="module")
def written() -> dict[str, list[str]]:
    marked = MARKED.search(PAGE.read_text()) if PAGE.exists() else None
    assert marked, f"{PAGE} has no table of families between its markers"
    return lines(marked[2])


@pytest.fixture(scope="module")
def made() -> dict[str, list[str]]:
    return lines(table())


def mechanisms(row: Family) -> set[tuple[str, object]]:
    """What of a row is code of its own, not data."""
    scope = row.scores.qk_norm.scope if row.scores.qk_norm else ""
    additive = row.positions.bias if isfunction(row.positions.bias) else type(row.positions.bias)
    return {("layout", row.heads.layout), ("additive", additive), ("q/k-norm", scope)}


def test_every_mechanism_has_a_tiny_model_in_a_test_or_in_the_census() -> None:
    shown = set().union(*(mechanisms(fixture(name).model.family) for name in NAMES))
    exact = {line.type for line in read() if line.verdict == "exact"} - {line.type for line in read() if line.reason}
    shown |= set().union(*(mechanisms(row) for row in FAMILIES if exact & {*row.types}))
    for row in FAMILIES:
        assert mechanisms(row) <= shown, row.name


def test_the_table_has_every_row_that_has_a_tiny_model(
    written: dict[str, list[str]], made: dict[str, list[str]]
) -> None:
    assert sorted(written) == sorted(made)


def test_the_table_says_what_the_fixtures_say(written: dict[str, list[str]], made: dict[str, list[str]]) -> None:
    for name, line in made.items():
        for column, cell in enumerate(line):
            if column not in ERRORS:
                assert written[name][column] == cell, f"{name}: run python -m tests.model.rows.table"


def test_every_family_is_right_to_1e_5(made: dict[str, list[str]]) -> None:
    for line in made.values():
        for column in ERRORS:
            bound = line[column].split(",")[0].removeprefix("< ")
            assert float(bound) <= 1e-5, line

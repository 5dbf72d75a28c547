"""docs/papers.md: every numbered artefact of the papers has a row, every command in it exists, and every file."""

import re
from pathlib import Path

import pytest

from weightscope.cli import main

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "papers.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
ROWS = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in PAGE.splitlines() if "| " in line]
ROWS = [row for row in ROWS if not row[0].startswith(("artefact", "target", "`make", "---"))]
RECIPES = set(re.findall(r"^\| `(make [a-z0-9-]+)` \|", PAGE, re.M))
COMMANDS = sorted({command for row in ROWS for command in re.findall(r"`([^`]+)`", row[2])} | RECIPES)
LAST = {  # of each paper's figures, tables, equations, lemmas and definitions, in the order of the page
    "Detokenization": {"Fig": 4, "Table": 3, "Eq": 30},
    "Norm-based analysis": {"Fig": 5, "Table": 3, "Eq": 11},
    "Outlier dimensions": {"Fig": 5, "Table": 1, "Eq": 7},
    "Sink as a bias": {"Fig": 5, "Table": 1, "Eq": 7},
    "Two mechanisms": {"Fig": 14, "Table": 8, "Eq": 42, "Lemma": 5, "Definition": 2},
}


@pytest.mark.parametrize("paper", LAST)
def test_every_number_of_a_paper_has_its_row(paper: str) -> None:
    section = PAGE.split(f"\n## {paper}")[1].split("\n## ")[0]
    for kind, last in LAST[paper].items():
        named = re.findall(rf"^\| {kind}s?\.? (\d+)(?:-(\d+))? ", section, re.M)
        numbers = [number for first, end in named for number in range(int(first), int(end or first) + 1)]
        assert list(dict.fromkeys(numbers)) == list(range(1, last + 1)), kind  # panels may have rows of their own


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_exists(command: str) -> None:
    program, name, *options = command.split()
    if program == "make":
        assert re.search(rf"^{name}:", MAKEFILE, re.M) and not options
        return
    known = {option for each in main.commands[name].params for option in each.opts}
    assert program == "weightscope" and {option for option in options if option.startswith("--")} <= known


def test_every_file_is_there() -> None:
    linked = re.findall(r"\]\(([^)]+)\)", PAGE)
    assert linked and all((ROOT / "docs" / path.partition("#")[0]).exists() for path in linked)


def figures_shown() -> dict[str, set[int]]:
    """Of each paper, the numbered figures that a picture in the repository shows."""
    shown = {}
    for paper in LAST:
        section = PAGE.split(f"\n## {paper}")[1].split("\n## ")[0]
        named = re.findall(r"^\| Figs?\.? (\d+)(?:-(\d+))? .*\.png\)", section, re.M)
        shown[paper] = {number for first, end in named for number in range(int(first), int(end or first) + 1)}
    return shown


def test_figures_can_be_seen_in_the_repository() -> None:
    """Of 24 that are no diagram and in the text that is followed."""
    assert sum(map(len, figures_shown().values())) >= 24


def test_a_row_is_drawn_somewhere_or_says_why_not() -> None:
    for artefact, _, command, state, drawn, file in ROWS:
        assert state in {"drawn", "small", "stand-in", "computed", "not reproduced", "not here"} and file, artefact
        assert bool(drawn) == (state not in {"computed", "not here"}), artefact
        assert command or state in {"computed", "not here"}, artefact

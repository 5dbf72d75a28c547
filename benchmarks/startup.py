"""The cost of starting a command, and the time between a report's numbers and its first figure."""

import statistics
import tempfile
from pathlib import Path

from benchmarks.commands import command_cost, python_cost
from benchmarks.results import Measured

ROUNDS = 7
# The command, the file of its numbers, and its first figure.
REPORTS = (
    ("audit embedded", "heads.csv", "heads.png"),
    ("compare embedded embedded", "heads.csv", "changes.png"),
    ("circuits embedded", "roles.csv", "circuits.png"),
    ("detok embedded", "heads.csv", "auroc.png"),
    ("sinks embedded --question kind --inputs 4 --length 32", "heads.csv", "sink-tokens.png"),
)


def measure() -> list[Measured]:
    """Importing, `--help`, and the reports."""
    bare = [python_cost("-c", "pass").wall for _ in range(ROUNDS)]
    rows = []
    for name, arguments in (
        ("import weightscope", ("-c", "import weightscope")),
        ("weightscope --help", ("-m", "weightscope", "--help")),
    ):
        walls = [python_cost(*arguments).wall for _ in range(ROUNDS)]
        ratios = tuple(wall / least for wall, least in zip(walls, bare, strict=True))
        rows.append(Measured(name, statistics.median(walls), ratios, "starting Python"))
    return rows + [figure_behind_numbers(*report) for report in REPORTS]


def figure_behind_numbers(command: str, numbers: str, figure: str) -> Measured:
    """Seconds between the files of a report's numbers and of its first figure; 0 if the figure was first."""
    with tempfile.TemporaryDirectory() as out:
        command_cost(*command.split(), "--out", out)
        appeared = [(Path(out) / name).stat().st_mtime for name in (numbers, figure)]
    return Measured(f"{command}: from {numbers} to {figure}", max(0.0, appeared[1] - appeared[0]))

"""The cost of starting a command."""

import statistics

from benchmarks.commands import python_cost
from benchmarks.results import Measured

ROUNDS = 7


def measure() -> list[Measured]:
    """Importing and `--help`."""
    bare = [python_cost("-c", "pass").wall for _ in range(ROUNDS)]
    rows = []
    for name, arguments in (
        ("import weightscope", ("-c", "import weightscope")),
        ("weightscope --help", ("-m", "weightscope", "--help")),
    ):
        walls = [python_cost(*arguments).wall for _ in range(ROUNDS)]
        ratios = tuple(wall / least for wall, least in zip(walls, bare, strict=True))
        rows.append(Measured(name, statistics.median(walls), ratios, "starting Python"))
    return rows

"""A list of checkpoints by every engine on one machine, and what more and larger ones would take."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import NamedTuple

from benchmarks.commands import Cost
from benchmarks.results import Bench
from benchmarks.synthetic import LARGEST, SEVEN, SEVENTY, Sizes
from tests.support.dask_processes import DaskProcesses

HEADER = "| plan | read | by two cores here | from |"
JOIN = 3.0  # seconds for a worker to join its scheduler


def by_dask(workers: int, run: Callable[[str], Cost]) -> Cost:
    """The cost of a command on so many local workers of one thread; their CPU time is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = DaskProcesses(Path(folder))
        try:
            time.sleep(JOIN)
            cluster.kill(*cluster.workers[workers:])
            return run(f"audit --engine dask --scheduler {cluster.address}")
        finally:
            cluster.close()


def gigabytes(sizes: Sizes, part: str = "") -> float:
    """Size in BF16 of the tensors whose names contain `part`."""
    return sum(prod(shape) for name, shape in sizes.shapes if part in name) * 2e-9


class Planned(NamedTuple):
    """A large task, as a multiple of a row."""

    name: str
    reads: float  # GB
    row: str
    times: float
    words: str


ATTENTION, TWO = "self_attn", replace(SEVEN, layers=2)
PLAN = (
    Planned("`audit` of a 70B, 80 layers", gigabytes(SEVENTY, ATTENTION),
            "`audit` of 8 layers of a 70B, streamed from a local server", 10, "8 layers from a local server"),
    Planned("`audit` of a 405B, 126 layers", gigabytes(LARGEST, ATTENTION), "`audit` of 2 layers of a 405B's attention",
            63, "2 layers"),
    Planned("`audit` of 1,000 checkpoints of 7B", 1000 * gigabytes(SEVEN, ATTENTION),
            "`audit` of a 7B's attention, 32,000 tokens", 1000, "one"),
    Planned("`same` of two copies of a 405B in BF16", 2 * gigabytes(LARGEST), "a copy in BF16",
            gigabytes(LARGEST) / gigabytes(TWO), "2 layers of a 7B in memory"),
)  # fmt: skip


def plan(bench: Bench) -> str:
    """The table of docs/scale.md, from rows that may show seconds."""
    rows, lines = {each.name: each for each in bench.measured if each.idle}, [HEADER, "| --- " * 4 + "|"]
    for each in PLAN:
        if each.row in rows:
            row = rows[each.row]
            seconds = each.times * row.seconds
            spent = f"{seconds / 3600:.2g} h" if seconds > 3600 else f"{seconds / 60:.2g} min"
            spent += f", {row.peak_mb or 0:,.0f} MB"
            lines.append(f"| {each.name} | {each.reads:,.0f} GB | {spent} | {each.words}, times {each.times:,.0f} |")
    return "\n".join(lines) + "\n"

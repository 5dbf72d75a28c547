"""What a benchmark found: ratios to the least a work could cost, kept in bench.json and told as a table."""

import json
import os
import platform
import statistics
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from weightscope.errors import CheckpointError
from weightscope.folder import Folder

LEAST_CHANGE = 0.05  # of a ratio; less is told apart on no shared machine
OF_ONE_ROUND = 0.25  # of a ratio that one round alone gave, whose noise is not known
HEADER = "| work | time | beside the least | peak memory |"
SPREADS = 3.0  # robust standard deviations, of both runs together, that a change has to pass


@dataclass(frozen=True)
class Measured:
    """One work beside its floor.

    Attributes
    ----------
    name : str
        The same from run to run.
    seconds : float
        Of the work, the median over rounds; scaled up where `note` says so.
    ratios : tuple of float
        To the floor in the same round, so that whatever else the machine does meets both alike; empty without a floor.
    floor : str
        What the ratio is to.
    peak_mb : float or None
    note : str
    cpu : float or None
        Seconds of all cores together.
    reads, flops32, flops64 : float
        Bytes that it cannot do without reading, and operations of its products in either precision; 0 where not known.
    exponent, memory_exponent : float or None
        Of a series: the power of what grows that time and memory go with, fitted over its sizes.
    """

    name: str
    seconds: float
    ratios: tuple[float, ...] = ()
    floor: str = ""
    peak_mb: float | None = None
    note: str = ""
    cpu: float | None = None
    reads: float = 0.0
    flops32: float = 0.0
    flops64: float = 0.0
    exponent: float | None = None
    memory_exponent: float | None = None

    @property
    def ratio(self) -> float | None:
        """The median over rounds."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def spread(self) -> float:
        """A robust standard deviation of the ratio from round to round; 0 of a single round."""
        middle = self.ratio or 0.0
        return 1.4826 * statistics.median(abs(ratio - middle) for ratio in self.ratios) if self.ratios else 0.0

    @property
    def told(self) -> str:
        """Its name with the note, and how it grows."""
        powers = [(self.exponent, "time"), (self.memory_exponent, "memory")]
        grows = [f"{what} grows as its power {power:.2f}" for power, what in powers if power is not None]
        more = "; ".join(filter(None, (self.note, *grows)))
        return f"{self.name} ({more})" if more else self.name


@dataclass(frozen=True)
class Bench:
    """All that one run of the benchmarks found.

    Attributes
    ----------
    machine : dict
        Cores, processor and versions.
    measured : list of Measured
    limits : dict of float
        What the machine reached in this run: see `benchmarks.limits`.
    """

    machine: dict[str, Any]
    measured: list[Measured] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        measured = [asdict(each) for each in self.measured]
        Folder(path.parent).json(path.name, {"machine": self.machine, "limits": self.limits, "measured": measured})

    def table(self, names: Collection[str] | None = None) -> str:
        """Markdown, as the pages have it; of all works, or of some."""
        lines = [HEADER, "| --- | --- | --- | --- |"]
        for each in self.measured:
            if names is None or each.name in names:
                beside = "" if each.ratio is None else f"{each.ratio:.2f} x {each.floor}"
                peak = "" if each.peak_mb is None else f"{each.peak_mb:.0f} MB"
                lines.append(f"| {each.told} | {duration(each.seconds)} | {beside} | {peak} |")
        return "\n".join(lines) + "\n"


def load(path: Path) -> Bench:
    """Read what `Bench.save` wrote.

    Raises
    ------
    CheckpointError
        It is not that.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        measured = [Measured(**{**each, "ratios": tuple(each["ratios"])}) for each in found["measured"]]
        return Bench(found["machine"], measured, found["limits"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"not the result of a benchmark ({error})", file=path) from None


def this_machine() -> dict[str, Any]:
    """What ratios may still depend on."""
    import numpy as np
    import scipy

    cpuinfo = Path("/proc/cpuinfo")
    models = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "processor": models[0].partition(":")[2].strip() if models else platform.processor(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
    }


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds >= 600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def comparison(old: Bench, new: Bench) -> list[str]:
    """A line for every work that both runs measured: what changed beyond noise, and what did not."""
    before = {each.name: each for each in old.measured}
    lines = []
    for each in new.measured:
        if each.name not in before:
            lines.append(f"new        {each.name}")
            continue
        was = before.pop(each.name)
        if was.ratio is None or each.ratio is None:
            continue
        change = each.ratio / was.ratio - 1
        least = LEAST_CHANGE if min(len(was.ratios), len(each.ratios)) > 1 else OF_ONE_ROUND
        noise = max(least, SPREADS * (was.spread**2 + each.spread**2) ** 0.5 / was.ratio)
        verdict = "unchanged" if abs(change) <= noise else "faster" if change < 0 else "SLOWER"
        lines.append(
            f"{verdict:10} {each.name}: {was.ratio:.2f} -> {each.ratio:.2f} ({change:+.0%}, noise {noise:.0%})"
        )
    return lines + [f"gone       {name}" for name in before]


def slower(lines: Sequence[str]) -> bool:
    return any(line.startswith("SLOWER") for line in lines)

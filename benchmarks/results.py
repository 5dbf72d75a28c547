"""Results of benchmarks: ratios to a lower bound, kept in bench.json and printed as a table."""

import json
import os
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from weightscope.core.errors import CheckpointError
from weightscope.core.files import Folder

LEAST_CHANGE = 0.05  # of a ratio; on a shared machine, less cannot be distinguished from noise
OF_ONE_ROUND = 0.25  # of a ratio from a single round, whose noise is not known
HEADER = "| task | ratio to |"  # then a column for each run, and the peak memory of the last
SPREADS = 3.0  # robust standard deviations of both runs together; a smaller change is noise


@dataclass(frozen=True)
class Measured:
    """One task, and its ratio to a lower bound."""

    name: str  # the same in every run
    seconds: float  # median over rounds; scaled up if `note` says so
    ratios: tuple[float, ...] = ()  # to the lower bound in the same round, so that other load affects both alike
    floor: str = ""  # the lower bound, in words
    peak_mb: float | None = None
    note: str = ""
    cpu: float | None = None  # seconds of all cores together
    reads: float = 0.0  # bytes that the task has to read; 0 if not known, as the next two
    flops32: float = 0.0  # operations of its float32 products
    flops64: float = 0.0
    exponent: float | None = None  # of a series: time grows as the size to this power
    memory_exponent: float | None = None
    load: float | None = None  # of the machine when it began

    @property
    def ratio(self) -> float | None:
        """The median over rounds."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def spread(self) -> float:
        """A robust standard deviation of the ratio over rounds; 0 for a single round."""
        middle = self.ratio or 0.0
        return 1.4826 * statistics.median(abs(ratio - middle) for ratio in self.ratios) if self.ratios else 0.0

    @property
    def label(self) -> str:
        """The name with the note, and how it grows."""
        powers = [(self.exponent, "time"), (self.memory_exponent, "memory")]
        grows = [f"{what} grows as n^{power:.2f}" for power, what in powers if power is not None]
        more = "; ".join(filter(None, (self.note, *grows)))
        return f"{self.name} ({more})" if more else self.name


@dataclass(frozen=True)
class Bench:
    """The results of one run of the benchmarks."""

    machine: dict[str, Any]  # cores, processor and versions
    measured: list[Measured] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)  # of the machine in this run: see `benchmarks.limits`

    def save(self, path: Path) -> None:
        measured = [asdict(each) for each in self.measured]
        Folder(path.parent).json(path.name, {"machine": self.machine, "limits": self.limits, "measured": measured})

    @property
    def processor(self) -> str:
        """The processor's name without marks and words that say nothing: "Intel Xeon"."""
        named = str(self.machine.get("processor", "time"))
        return " ".join(re.sub(r"\(\w+\)|\bProcessor\b|\bCPU\b.*", " ", named).split())

    @property
    def file(self) -> str:
        """What to keep the run as: one run for each processor."""
        return f"bench-{re.sub('[^a-z0-9]+', '-', self.processor.lower()).strip('-')}.json"

    def table(self) -> str:
        """The table of this run alone."""
        return table([self])


def table(benches: Sequence[Bench], labels: Mapping[str, str] | None = None) -> str:
    """Time and ratio of all tasks, or of those with a label, in Markdown: a column for each run."""
    lines = [f"{HEADER} {' | '.join(bench.processor for bench in benches)} | peak memory |"]
    lines.append("| --- " * (3 + len(benches)) + "|")
    runs = [{each.name: each for each in bench.measured} for bench in benches]
    for each in benches[-1].measured:
        label = each.label if labels is None else labels.get(each.name)
        if label is not None:
            times = [_time(run[each.name]) if each.name in run else "" for run in runs]
            lines.append(f"| {label} | {each.floor} | {' | '.join(times)} | {peak_of(each)} |")
    return "\n".join(lines) + "\n"


def _time(measured: Measured) -> str:
    """A time with its ratio."""
    ratio = "" if measured.ratio is None else f" ({measured.ratio:.2f} x)"
    return f"{duration(measured.seconds)}{ratio}"


def load(path: Path) -> Bench:
    """Read what `Bench.save` wrote."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        measured = [Measured(**{**each, "ratios": tuple(each["ratios"])}) for each in content["measured"]]
        return Bench(content["machine"], measured, content["limits"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"not the result of a benchmark ({error})", file=path) from None


def this_machine() -> dict[str, Any]:
    """The facts about this machine that ratios can depend on."""
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
        "simd": np.show_config(mode="dicts")["SIMD Extensions"]["found"],  # decides how fast NumPy sorts
    }


def duration(seconds: float) -> str:
    """Seconds in a readable unit."""
    if seconds >= 600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def peak_of(measured: Measured) -> str:
    return "" if measured.peak_mb is None else f"{measured.peak_mb:.0f} MB"


def comparison(old: Bench, new: Bench) -> list[str]:
    """One line per task: whether it changed by more than noise between the runs."""
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

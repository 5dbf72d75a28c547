"""Results of benchmarks: ratios to a lower bound in the same run, kept as JSON and printed as tables.

A row may show seconds if other processes kept less than half a core busy just before it; else it shows its ratio of
CPU seconds alone. The average load is kept too, but the benchmarks themselves raise it.
"""

import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import scipy

from benchmarks.commands import Cost
from weightscope.core.compute.cores import usable_cores
from weightscope.core.errors import CheckpointError
from weightscope.core.files import Folder

LEAST_CHANGE = 0.05  # of a ratio; on a shared machine, less cannot be distinguished from noise
OF_ONE_ROUND = 0.25  # of a ratio from a single round, whose noise is not known
COLUMNS = "| ratio | to | time | CPU time | peak memory | other work (load) |"  # after the title of a table
IDLE = 0.5  # cores; a row shows seconds if other processes kept fewer busy
PROC_STAT = Path("/proc/stat")
NAP, NAPS = 0.5, 4  # seconds in which other work is read; further ones if there is some
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
    exponent: float | None = None  # of a series: CPU time grows as the size to this power
    memory_exponent: float | None = None
    load: float | None = None  # average load of a minute when it began
    other: float | None = None  # cores that other processes kept busy just before
    cpu_ratios: tuple[float, ...] = ()  # as `ratios`, of CPU seconds
    group: str = ""  # the table that shows it
    rates: str = ""  # bytes read per second; shown only with seconds

    @classmethod
    def of(
        cls,
        name: str,
        costs: Sequence[Cost],
        floors: Sequence[Cost] = (),
        floor: str = "",
        note: str = "",
        **more: Any,
    ) -> "Measured":
        """Rounds of a task, each next to its floor."""
        pairs = [*zip(costs, floors, strict=False)]
        return cls(
            name,
            statistics.median(cost.wall for cost in costs),
            tuple(cost.wall / least.wall for cost, least in pairs),
            floor,
            max(cost.peak for cost in costs) or None,
            note,
            statistics.median(cost.cpu for cost in costs),
            cpu_ratios=tuple(cost.cpu / least.cpu for cost, least in pairs if least.cpu),
            **more,
        )  # fmt: skip

    @property
    def idle(self) -> bool:
        """The machine had nothing else to do, as far as the row says."""
        busy = self.load if self.other is None else self.other
        return busy is None or busy < IDLE

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
        powers = [(self.exponent, "CPU time"), (self.memory_exponent, "memory")]
        grows = [f"{what} grows as n^{power:.2f}" for power, what in powers if power is not None]
        more = "; ".join(filter(None, (self.note, self.rates * self.idle, *grows)))
        return f"{self.name} ({more})" if more else self.name


@dataclass(frozen=True)
class Bench:
    """The results of one run of the benchmarks."""

    machine: dict[str, Any]  # cores, processor and versions
    measured: list[Measured] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)  # of the machine in this run: see `benchmarks.limits`; load

    def save(self, path: Path) -> None:
        measured = [asdict(each) for each in self.measured]
        Folder(path.parent).json(path.name, {"machine": self.machine, "limits": self.limits, "measured": measured})

    def with_rows(self, rows: Sequence[Measured]) -> "Bench":
        """A copy with these rows; they replace rows of the same name."""
        new = {(each.group, each.name) for each in rows}
        return replace(self, measured=[*(r for r in self.measured if (r.group, r.name) not in new), *rows])

    @property
    def processor(self) -> str:
        """The processor's name without marks and words that say nothing: "Intel Xeon"."""
        named = str(self.machine.get("processor", "time"))
        return " ".join(re.sub(r"\(\w+\)|\bProcessor\b|\bCPU\b.*", " ", named).split())

    @property
    def file(self) -> str:
        """What to keep the run as: one run for each processor."""
        return f"bench-{re.sub('[^a-z0-9]+', '-', self.processor.lower()).strip('-')}.json"

    def table(self, title: str = "task") -> str:
        """All rows."""
        return table(title, self.measured)


def table(title: str, rows: Sequence[Measured], labels: Mapping[str, str] | None = None) -> str:
    """Rows, or those with a label, in Markdown: ratio, time, CPU time, memory and load."""
    lines = [f"| {title} {COLUMNS}", "| --- " * 7 + "|"]
    for each in rows:
        label = each.label if labels is None else labels.get(each.name)
        if label is not None:
            lines.append(f"| {label} | {' | '.join(_cells(each))} |")
    return "\n".join(lines) + "\n"


def _cells(each: Measured) -> list[str]:
    """The cells of a row; on a busy machine no seconds, and the ratio is of CPU seconds."""
    ratio = each.ratio if each.idle else statistics.median(each.cpu_ratios) if each.cpu_ratios else None
    shown = "busy" if each.floor else "no floor"
    if ratio is not None:
        shown = f"{ratio:,.0f} x" if ratio >= 100 else f"{ratio:.3g} x"
        shown += "" if each.idle else ", CPU"
    times = [duration(each.seconds), duration(each.cpu) if each.cpu is not None else ""] if each.idle else ["", ""]
    other = "" if each.other is None else f"{each.other:.1f}"
    load = "" if each.load is None else f"({each.load:.1f})"
    peak = "" if each.peak_mb is None else f"{each.peak_mb:.0f} MB"
    return [shown, each.floor, *times, peak, f"{other} {load}".strip()]


def taken(bench: Bench) -> str:
    """When, on what and from which commit the rows were taken, as a sentence."""
    names = ("date", "commit", "cores", "processor", "blas", "python")
    facts = {name: bench.machine.get(name, "unknown") for name in names}
    versions = ", ".join(f"{name} {bench.machine.get(name.lower(), 'unknown')}" for name in ("NumPy", "SciPy"))
    return (
        f"Taken on {facts['date']} at commit {facts['commit']} on {facts['cores']} cores of {facts['processor']}: "
        f"{facts['blas']}, {versions}, Python {facts['python']}; load {bench.limits.get('load', 0):.1f} at the start."
    )


def in_cores(stat: Callable[[], str], sleep: Callable[[float], None]) -> float:
    """Cores busy while this process sleeps, from two readings of /proc/stat."""
    counts = []
    for nap in (NAP, 0):
        lines = stat().splitlines()
        counts.append(np.array(lines[0].split()[1:9], float))  # guests are counted in the first two
        sleep(nap)
    spent = counts[1] - counts[0]
    cores = sum(line.startswith("cpu") for line in lines) - 1
    return float(cores * (1 - spent[3:5].sum() / max(spent.sum(), 1)))  # idle, and waiting for a disk


def before_row(
    stat: Callable[[], str] = PROC_STAT.read_text, sleep: Callable[[float], None] = time.sleep
) -> dict[str, float]:
    """`load` and `other` of a row that begins now: what is written first goes to the disk, and a burst is let pass."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    os.sync()
    other = load
    for _ in range(NAPS if PROC_STAT.exists() else 0):
        other = in_cores(stat, sleep)
        if other < IDLE:
            break
    return {"load": load, "other": other}


def load(path: Path) -> Bench:
    """Read what `Bench.save` wrote."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        tuples = ("ratios", "cpu_ratios")
        measured = [
            Measured(**{**each, **{name: tuple(each.get(name, ())) for name in tuples}}) for each in content["measured"]
        ]
        return Bench(content["machine"], measured, content["limits"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"not the result of a benchmark ({error})", file=path) from None


def this_machine() -> dict[str, Any]:
    """The facts about this machine, the packages and the code that results can depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    models = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    return {
        "cores": usable_cores(),
        "processor": models[0].partition(":")[2].strip() if models else platform.processor(),
        "blas": blas(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "simd": np.show_config(mode="dicts")["SIMD Extensions"]["found"],  # decides how fast NumPy sorts
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": commit(),
    }


def blas() -> str:
    """NumPy's BLAS: name, version, and the processor whose kernels it runs."""
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        built = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        return f"{built['name']} {built['version']}"
    loaded = [each for each in threadpool_info() if each["user_api"] == "blas"]  # SciPy may have one of its own
    info = max(loaded, key=lambda each: "numpy" in each["filepath"], default={})
    kernel = f" with {info['architecture']} kernels" if info.get("architecture") else ""
    return f"{info.get('internal_api', 'BLAS')} {info.get('version')}{kernel}"


def commit() -> str:
    """The commit of the code, with a word if files were changed since."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True)
        return done.stdout.strip()

    changes = " with changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return (git("rev-parse", "--short", "HEAD") or "unknown") + changes


def duration(seconds: float) -> str:
    """Seconds in a readable unit."""
    if seconds >= 600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


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

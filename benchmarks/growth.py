"""How time and memory of AUROC, an audit and the wiring grow with layers, heads, width, vocabulary and cores.

Every size runs in a separate process, after a tiny size that compiles and imports what both need. A row is a series:
its cost at the largest size, and the exponents with which CPU time and memory grow, by least squares of logarithms. The
CPU time of the tiny size is a constant that every size pays, so it is subtracted before the fit.
"""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

import weightscope as ws
from benchmarks.audit import anonymous_peak
from benchmarks.auroc import zipf_counts
from benchmarks.commands import Cost, alone, anonymous_megabytes, timed
from benchmarks.results import Measured, before_row
from benchmarks.synthetic import Sizes, write
from weightscope.core.compute.cores import hand_back, usable_cores
from weightscope.model.metrics.auroc import auroc_by_token

ENOUGH = 1.0  # seconds; no second round after this
BASE = Sizes(layers=2, width=1024, heads=8, head_dim=64, kv_heads=8, vocabulary=4096)
DEEPER = replace(BASE, layers=4)  # later layers read earlier ones
TINY = Sizes(vocabulary=1024)


@dataclass(frozen=True)
class Series:
    """A task, and the size that grows."""

    work: str  # one of `WORKS`
    against: str  # a field of `Sizes`, or "cores"
    values: tuple[int, ...]
    base: Sizes = BASE  # the other sizes

    @property
    def name(self) -> str:
        """The name of the row."""
        sizes = ", ".join(f"{value:,}" for value in self.values)
        return f"{self.work} against {self.against.replace('_', ' ')}, {sizes}"

    def sizes(self, value: int) -> Sizes:
        """All sizes at one of the values."""
        if self.against == "cores":
            return self.base
        more = {"kv_heads": value} if self.against == "heads" else {}
        return replace(self.base, **{self.against: value}, **more)


FIRST_LAYER = Sizes(heads=1, head_dim=64, vocabulary=25_128)
DOUBLINGS = tuple(2**k for k in range(usable_cores().bit_length()) if 2**k <= usable_cores())
SERIES = (
    Series("AUROC", "vocabulary", (12_564, 25_128, 50_256), FIRST_LAYER),
    Series("AUROC", "heads", (1, 2, 4), replace(FIRST_LAYER, vocabulary=12_564)),
    Series("AUROC", "head_dim", (32, 64, 128), FIRST_LAYER),
    Series("AUROC", "cores", DOUBLINGS, FIRST_LAYER),
    Series("audit", "layers", (2, 4, 8)),
    Series("audit", "heads", (8, 16, 32)),
    Series("audit", "width", (512, 1024, 2048)),
    Series("audit", "vocabulary", (8192, 16_384, 32_768)),
    Series("audit", "cores", DOUBLINGS),
    Series("circuits", "layers", (4, 8, 16), DEEPER),
    Series("circuits", "heads", (8, 16, 32), DEEPER),
    Series("circuits", "width", (512, 1024, 2048), DEEPER),
)


def auroc_work(folder: Path, sizes: Sizes) -> Callable[[], object]:
    """AUROC of `sizes.heads` heads over `sizes.vocabulary` tokens."""
    rng = np.random.default_rng(1)
    shape = (sizes.heads, 2, sizes.vocabulary, sizes.head_dim)
    factors, counts = rng.standard_normal(shape, np.float32), zipf_counts(sizes.vocabulary)
    return lambda: [auroc_by_token(left, right, counts) for left, right in factors]


def audit_work(folder: Path, sizes: Sizes) -> Callable[[], object]:
    """A whole audit without writing files; tokens along directions of all heads included."""
    write(folder, sizes)
    return lambda: ws.audit(ws.open_model(folder), directions=2)


def circuits_work(folder: Path, sizes: Sizes) -> Callable[[], object]:
    """Wiring, names and edges."""
    write(folder, sizes)
    return lambda: ws.circuits(ws.open_model(folder))


WORKS: dict[str, Callable[[Path, Sizes], Callable[[], object]]] = {
    "AUROC": auroc_work,
    "audit": audit_work,
    "circuits": circuits_work,
}


class Taken(NamedTuple):
    """Seconds and CPU seconds of each round, CPU seconds of the tiny size, and the additional memory in MB."""

    rounds: list[tuple[float, float]]
    tiny: float
    peak: float  # inputs included


def in_this_process(work: str, sizes: Sizes) -> Taken:
    """Measure one size, twice if it is fast."""
    with tempfile.TemporaryDirectory() as top:
        tiny = WORKS[work](Path(top) / "tiny", TINY)
        tiny()  # compiles and imports
        least = min(timed(tiny).cpu for _ in range(2))
        hand_back()  # what is freed would count as memory of the next task
        before = anonymous_megabytes()
        run = WORKS[work](Path(top) / "model", sizes)
        hand_back()
        with anonymous_peak() as peak:
            taken = [timed(run)]
            taken += [timed(run)] if taken[0].wall < ENOUGH else []
    return Taken([(cost.wall, cost.cpu) for cost in taken], least, peak[0] - before)


@cache
def in_own_process(work: str, sizes: Sizes, cores: int) -> Taken:
    """The same in a separate process that may use `cores` cores. Cached, since series share sizes."""
    return alone(in_this_process, work, sizes, cores=cores)


def power(sizes: tuple[int, ...], values: list[float]) -> float | None:
    """b of values = a sizes^b; None for a single size, or if a value is not positive."""
    if len(sizes) < 2 or min(values) <= 0:
        return None
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def row(series: Series) -> Measured:
    """One series: costs of the largest size against the smallest, and powers of CPU seconds and memory."""
    by_cores, began = series.against == "cores", before_row()
    results = [in_own_process(series.work, series.sizes(n), n if by_cores else usable_cores()) for n in series.values]
    cpu, peaks = [min(cpu for _, cpu in taken.rounds) for taken in results], [taken.peak for taken in results]
    first, last = ([Cost(*spent, taken.peak) for spent in taken.rounds] for taken in (results[0], results[-1]))
    return Measured.of(
        series.name, last, first, f"the same at {series.values[0]:,}",
        exponent=None if by_cores else power(series.values, [t - r.tiny for t, r in zip(cpu, results, strict=True)]),
        memory_exponent=None if by_cores else power(series.values, peaks), **began,
    )  # fmt: skip


def measure() -> list[Measured]:
    """All series; series of cores only if the system can restrict a process to some cores."""
    return [row(series) for series in SERIES if series.against != "cores" or hasattr(os, "sched_setaffinity")]

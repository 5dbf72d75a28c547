"""The cost of a command as a user runs it, or of a function: seconds, CPU seconds, and peak anonymous memory."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

EVERY = 0.005  # seconds between two samples of the memory
READ = 1 << 20  # bytes at a time of a plain read


@dataclass(frozen=True)
class Cost:
    """The cost of one run: wall-clock seconds, CPU seconds of all cores, and peak anonymous MB."""

    wall: float
    cpu: float
    peak: float = 0.0

    def times(self, number: float) -> "Cost":
        """The cost of so many times the work, in the same memory."""
        return Cost(number * self.wall, number * self.cpu, self.peak)


def timed(work: Callable[[], object]) -> Cost:
    """The cost of a function on all threads of this process; its memory is not measured."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def anonymous_megabytes(process: int | str = "self") -> float:
    """A process's memory now that is not backed by a file; 0 if the system does not report it or it has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1000 for line in status.splitlines() if line.startswith("RssAnon")), 0.0)


def python_cost(*arguments: str | Path, python: str | Path = sys.executable, **variables: str) -> Cost:
    """The cost of `python ARGUMENTS` in a separate process. Raises RuntimeError if the process fails."""
    environment = os.environ | variables
    with tempfile.TemporaryFile() as output:
        began, peak, ended = time.perf_counter(), 0.0, 0
        process = subprocess.Popen([str(python), *map(str, arguments)], stdout=output, stderr=output, env=environment)
        while not ended:
            time.sleep(EVERY)
            peak = max(peak, anonymous_megabytes(process.pid))
            ended, status, used = os.wait4(process.pid, os.WNOHANG)
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise RuntimeError(f"{' '.join(map(str, arguments))}: {output.read().decode(errors='replace')[-500:]}")
    return Cost(wall, used.ru_utime + used.ru_stime, peak)


def inner_cost(
    *arguments: str | Path, python: str | Path = sys.executable, **variables: str
) -> tuple[Cost, dict[str, Any]]:
    """The cost that a process measures itself, with its peak, and all that it writes to its last argument."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        peak = python_cost(*arguments, report, python=python, **variables).peak
        told = json.loads(report.read_text())
    return Cost(told["wall"], told["cpu"], peak), told


def alone(work: Callable[..., Any], *arguments: object, cores: int | None = None) -> Any:
    """The result of a function in a process of its own, on so many cores if the system can restrict it to some."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    try:
        if allowed:
            os.sched_setaffinity(0, sorted(allowed)[:cores])  # before its imports, which start threads
        with get_context("spawn").Pool(1) as pool:
            return pool.apply(work, arguments)
    finally:
        if allowed:
            os.sched_setaffinity(0, allowed)


def plain_read(*files: Path) -> Cost:
    """The cost of reading files once, on one core of this process."""
    buffer = bytearray(READ)

    def read() -> None:
        for path in files:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    return timed(read)


def forget(*files: Path) -> None:
    """Drop files from the page cache, so that they are read from the disk; only what was written can be dropped."""
    for path in files:
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def command_cost(*arguments: str | Path) -> Cost:
    """The cost of `weightscope ARGUMENTS`."""
    return python_cost("-m", "weightscope", *arguments)

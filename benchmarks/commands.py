"""What a command costs as a user runs it: seconds, processor seconds, and the most anonymous memory it held."""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

EVERY = 0.005  # seconds between two looks at the memory


@dataclass(frozen=True)
class Cost:
    """What one run took: seconds on the clock, seconds of all cores together, and peak anonymous MB."""

    wall: float
    cpu: float
    peak: float


def anonymous_megabytes(process: int | str = "self") -> float:
    """Memory of a process now that no file stands behind; 0 where the system does not say, or it has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1000 for line in status.splitlines() if line.startswith("RssAnon")), 0.0)


def python_cost(*arguments: str | Path) -> Cost:
    """The cost of `python ARGUMENTS` in a process of its own.

    Raises
    ------
    RuntimeError
        It failed.
    """
    with tempfile.TemporaryFile() as said:
        began, peak, ended = time.perf_counter(), 0.0, 0
        process = subprocess.Popen([sys.executable, *map(str, arguments)], stdout=said, stderr=said)
        while not ended:
            time.sleep(EVERY)
            peak = max(peak, anonymous_megabytes(process.pid))
            ended, status, used = os.wait4(process.pid, os.WNOHANG)
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise RuntimeError(f"{' '.join(map(str, arguments))}: {said.read().decode(errors='replace')[-500:]}")
    return Cost(wall, used.ru_utime + used.ru_stime, peak)


def command_cost(*arguments: str | Path) -> Cost:
    """The same of `weightscope ARGUMENTS`."""
    return python_cost("-m", "weightscope", *arguments)

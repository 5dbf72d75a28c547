"""The cost of a command as a user runs it: seconds, CPU seconds, and peak anonymous memory."""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

EVERY = 0.005  # seconds between two samples of the memory
READ = 1 << 20  # bytes at a time of a plain read


@dataclass(frozen=True)
class Cost:
    """The cost of one run: wall-clock seconds, CPU seconds of all cores, and peak anonymous MB."""

    wall: float
    cpu: float
    peak: float


def anonymous_megabytes(process: int | str = "self") -> float:
    """A process's memory now that is not backed by a file; 0 if the system does not report it or it has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1000 for line in status.splitlines() if line.startswith("RssAnon")), 0.0)


def python_cost(*arguments: str | Path, python: str | Path = sys.executable) -> Cost:
    """The cost of `python ARGUMENTS` in a separate process. Raises RuntimeError if the process fails."""
    with tempfile.TemporaryFile() as output:
        began, peak, ended = time.perf_counter(), 0.0, 0
        process = subprocess.Popen([str(python), *map(str, arguments)], stdout=output, stderr=output)
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


def plain_read(*files: Path) -> Cost:
    """The cost of reading files once, on one core of this process."""
    buffer, began, used = bytearray(READ), time.perf_counter(), time.process_time()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return Cost(time.perf_counter() - began, time.process_time() - used, anonymous_megabytes())


def command_cost(*arguments: str | Path) -> Cost:
    """The cost of `weightscope ARGUMENTS`."""
    return python_cost("-m", "weightscope", *arguments)

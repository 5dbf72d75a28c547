"""Measure what this machine can do at most: bytes read per second, and operations per second with its BLAS.

A task that reads so many bytes and multiplies so many numbers takes at least the longer of the two times. The second
table of benchmarks/README.md compares every task with that bound.
"""

import os
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.commands import forget, plain_read, timed
from benchmarks.results import Bench, Measured, duration

FILE_BYTES = 512 << 20
PIECE = 8 << 20
N = 2048  # size of the square products, at which BLAS is fastest
ROUNDS = 3
HEADER = "| task | ratio | lower bound | bytes | operations, float32 | float64 |"


def machine_limits() -> dict[str, float]:
    """Bytes per second from the disk and from the page cache, and operations per second in both precisions.

    `disk` is 0 if the system has no way to drop a file from the page cache.
    """
    rates = {"cached": 0.0, "disk": 0.0}
    with tempfile.NamedTemporaryFile() as file:
        block = np.random.default_rng(0).bytes(PIECE)
        for _ in range(FILE_BYTES // PIECE):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        path = Path(file.name)
        rates["cached"] = max(FILE_BYTES / plain_read(path).wall for _ in range(ROUNDS))
        if hasattr(os, "posix_fadvise"):
            forget(path)
            rates["disk"] = FILE_BYTES / plain_read(path).wall
    return rates | {f"flops{8 * dtype().nbytes}": _operations_a_second(dtype) for dtype in (np.float32, np.float64)}


def _operations_a_second(dtype: type) -> float:
    """Operations per second of a product on all cores, the best of several."""
    a, b = np.random.default_rng(0).standard_normal((2, N, N)).astype(dtype)
    out, rounds = np.empty_like(a), range(ROUNDS + 1)  # the first starts the threads
    return 2 * N**3 / min(timed(lambda: np.matmul(a, b, out=out)).wall for _ in rounds)


def limit(each: Measured, limits: dict[str, float]) -> float:
    """Lower bound in seconds for any program that does this task on that machine, with its file in memory."""
    products = each.flops32 / limits["flops32"] + each.flops64 / limits["flops64"]
    return max(each.reads / limits["cached"], products)


def floors(bench: Bench) -> str:
    """The table of benchmarks/README.md: every task whose bytes or operations are known, and the ratio of seconds."""
    lines = [HEADER, "| --- " * 6 + "|"]
    for each in bench.measured:
        if each.reads or each.flops32 or each.flops64:
            least = limit(each, bench.limits)
            ratio = f"{each.seconds / least:.1f} x" if each.idle else "busy"
            cells = (ratio, duration(least), _amount(each.reads, "B"), _amount(each.flops32), _amount(each.flops64))
            lines.append(f"| {each.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _amount(number: float, unit: str = "") -> str:
    """For example 1.2 G or 340 M; empty for 0."""
    for power, letter in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.3g} {letter}{unit}"
    return f"{number:.3g} {unit}".strip() if number else ""


def reached(bench: Bench) -> str:
    """The limits of the machine, as a sentence."""
    limits = bench.limits
    disk = f"{limits['disk'] / 1e9:.2f} GB/s from the disk, " if limits["disk"] else ""
    read, single, double = (limits[name] / 1e9 for name in ("cached", "flops32", "flops64"))
    return (
        f"{bench.machine['cores']} cores: {disk}{read:.1f} GB/s from a file in memory, {single:.0f} billion float32 "
        f"and {double:.0f} billion float64 operations per second with this BLAS."
    )

"""What this machine can do at most: bytes it reads a second, and operations of its BLAS, in the same run as the works.

A work that has to read so many bytes and multiply so many numbers cannot end before the slower of the two has, were the
other free beside it. How far each is from that is docs/floors.md's table.
"""

import os
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.results import Bench, Measured, duration

FILE_BYTES = 512 << 20
PIECE = 8 << 20
N = 2048  # of square products, which BLAS is fastest with
ROUNDS = 3
HEADER = "| work | bytes | operations, float32 | float64 | limit | time | times the limit |"


def machine_limits() -> dict[str, float]:
    """Bytes a second from the disk and from memory that holds the file, and operations a second in either precision.

    Disk is 0 where the system offers no way to forget what it holds of a file.
    """
    found = {"cached": 0.0, "disk": 0.0}
    with tempfile.NamedTemporaryFile() as file:
        block = np.random.default_rng(0).bytes(PIECE)
        for _ in range(FILE_BYTES // PIECE):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        found["cached"] = max(_bytes_a_second(file.name) for _ in range(ROUNDS))
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            found["disk"] = _bytes_a_second(file.name)
    return found | {f"flops{8 * dtype().nbytes}": _operations_a_second(dtype) for dtype in (np.float32, np.float64)}


def _bytes_a_second(name: str) -> float:
    buffer = bytearray(PIECE)
    with Path(name).open("rb", buffering=0) as file:
        began, total = time.perf_counter(), 0
        while n := file.readinto(buffer):
            total += n
    return total / (time.perf_counter() - began)


def _operations_a_second(dtype: type) -> float:
    """Of a product with all cores, the best of some."""
    a, b = np.random.default_rng(0).standard_normal((2, N, N)).astype(dtype)
    out, best = np.empty_like(a), 0.0
    for _ in range(ROUNDS + 1):  # the first wakes the threads
        began = time.perf_counter()
        np.matmul(a, b, out=out)
        best = max(best, 2 * N**3 / (time.perf_counter() - began))
    return best


def limit(each: Measured, limits: dict[str, float]) -> float:
    """Seconds below which no program can do the work on that machine, its file in memory."""
    products = each.flops32 / limits["flops32"] + each.flops64 / limits["flops64"]
    return max(each.reads / limits["cached"], products)


def floors(bench: Bench) -> str:
    """The table of docs/floors.md: every work whose bytes and operations are known."""
    lines = [HEADER, "| --- | --- | --- | --- | --- | --- | --- |"]
    for each in bench.measured:
        if not (each.reads or each.flops32 or each.flops64):
            continue
        least = limit(each, bench.limits)
        amounts = (_amount(each.reads, "B"), _amount(each.flops32), _amount(each.flops64))
        times = f"{each.seconds / least:.1f}"
        lines.append(
            f"| {each.name} | {' | '.join(amounts)} | {duration(least)} | {duration(each.seconds)} | {times} |"
        )
    return "\n".join(lines) + "\n"


def _amount(number: float, unit: str = "") -> str:
    """1.2 G, 340 M; nothing for 0."""
    for power, letter in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.3g} {letter}{unit}"
    return f"{number:.3g} {unit}".strip() if number else ""


def reached(bench: Bench) -> str:
    """The machine's limits as a sentence."""
    of = bench.limits
    disk = f"{of['disk'] / 1e9:.2f} GB/s from the disk, " if of["disk"] else ""
    read, single, double = (of[name] / 1e9 for name in ("cached", "flops32", "flops64"))
    return (
        f"{bench.machine['cores']} cores of {bench.machine['processor']}: {disk}{read:.1f} GB/s of a file in memory, "
        f"{single:.0f} billion float32 and {double:.0f} billion float64 operations a second by this BLAS; load "
        f"{of['load']:.1f} when the run began."
    )

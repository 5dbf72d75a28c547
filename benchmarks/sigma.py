"""sigma statistics over GPT-2's vocabulary and positions, against the one matrix product they need."""

import resource
import statistics
import time

import numpy as np

from benchmarks.results import Measured
from weightscope.heads.detok.sigma import sigma_statistics

VOCAB, POSITIONS, WIDTH, BLOCK = 50_257, 1_024, 768, 5_461


def run() -> dict[str, float]:
    """Seconds for the statistics and for the bare product, their ratio, and peak resident memory in MB."""
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((VOCAB, WIDTH), np.float32)
    positions = rng.standard_normal((POSITIONS, WIDTH), np.float32)

    def blocks():
        for start in range(0, VOCAB, BLOCK):
            yield start, tokens[start : start + BLOCK]

    out = np.empty((POSITIONS, BLOCK), np.float32)
    started = time.perf_counter()
    for _, block in blocks():
        np.matmul(positions, block.T, out=out[:, : len(block)])
    floor = time.perf_counter() - started
    started = time.perf_counter()
    sigma_statistics(blocks, VOCAB, positions, 1e-5)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "floor_seconds": floor, "ratio": seconds / floor, "peak_mb": peak}


def measure(rounds: int = 3) -> list[Measured]:
    """Several runs as a row of a table."""
    runs = [run() for _ in range(rounds)]
    seconds = statistics.median(each["seconds"] for each in runs)
    ratios = tuple(each["ratio"] for each in runs)
    title = f"sigma, {VOCAB:,} tokens x {POSITIONS:,} positions"
    peak, note = runs[-1]["peak_mb"], "memory with the inputs"
    flops = 2.0 * VOCAB * POSITIONS * WIDTH
    return [Measured(title, seconds, ratios, "its one product", peak, note, flops32=flops)]


if __name__ == "__main__":
    result = run()
    print(
        f"sigma statistics, {VOCAB:,} tokens x {POSITIONS:,} positions x {WIDTH}: {result['seconds']:.2f} s, "
        f"{result['ratio']:.1f} x the matrix product ({result['floor_seconds']:.2f} s); "
        f"peak memory {result['peak_mb']:.0f} MB, 154 MB of it the embedding"
    )

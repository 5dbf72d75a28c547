"""Bigram AUROC over a full vocabulary, against the bare float32 products of its scores.

python -m benchmarks.auroc [--heads N] [--numpy-heads N]
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np
import scipy.sparse

from benchmarks.results import Measured
from weightscope.core.compute.cores import in_threads, usable_cores
from weightscope.core.errors import counted
from weightscope.model.metrics.auroc import (
    COUNTED_ROWS,
    STRIP,
    aligned,
    auroc_by_token,
    cut_into_panels,
    empty_tile,
    fill_tile,
    tile_rows,
)

VOCAB, HEADS, HEAD_DIM = 50_257, 12, 64
BIGRAMS_A_TOKEN = 120  # drawn; about 60 of them are distinct
ROWS_A_PRODUCT = (128, 256, 512, 1024)  # the floor is the fastest of these
SAMPLED_ROWS = 20


def zipf_counts(vocab: int = VOCAB, seed: int = 0, bigrams_a_token: int = BIGRAMS_A_TOKEN) -> scipy.sparse.csr_matrix:
    """Bigram counts, (vocab, vocab) int64: both tokens drawn by Zipf's law, each in its own order of ranks."""
    rng = np.random.default_rng(seed)
    share = np.cumsum(1 / np.arange(1, vocab + 1))
    draws = bigrams_a_token * vocab
    current, previous = (
        rng.permutation(vocab)[np.searchsorted(share, rng.uniform(0, share[-1], draws))] for _ in range(2)
    )
    return scipy.sparse.csr_matrix((np.ones(draws, np.int64), (current, previous)), shape=(vocab, vocab))


def factors(head: int) -> tuple[np.ndarray, np.ndarray]:
    """Gaussian left and right factors of a head's scores, (vocab, head_dim) float32 each."""
    rng = np.random.default_rng([1, head])
    left, right = rng.standard_normal((2, VOCAB, HEAD_DIM), np.float32)
    return left, right


def run(heads: int = HEADS, numpy_heads: int = 2) -> dict[str, Any]:
    """Time products and compiled AUROC alternately, head by head, so that other load affects both alike.

    `seconds` are for 12 heads, from the median head: `floor` (products of `floor_rows` rows into one buffer, with the
    threads of BLAS), `tiled_floor` (products in the tiles and threads of `auroc_by_token`), `numba` and `numpy` (on the
    first `numpy_heads`). `ratio` and `ratio_to_tiled` are medians over the heads. `peak_mb` is the resident memory of a
    fresh process. `sklearn_seconds` is scaled up from a sample of rows.
    """
    counts = zipf_counts()
    peak = {path: peak_megabytes(counts, path) for path in paths()}
    floor_rows = min(ROWS_A_PRODUCT, key=lambda rows: min(seconds(lambda: products(*factors(0), rows, 4096), 3)))
    for path in paths():  # compiles, and starts the threads
        auroc_by_token(*(factor[:512] for factor in factors(0)), counts[:512, :512], compiled=path == "numba")

    times: dict[str, list[float]] = {"floor": [], "tiled_floor": [], **{path: [] for path in paths()}}
    for head in range(heads):
        left, right = factors(head)
        times["floor"] += seconds(lambda: products(left, right, floor_rows, VOCAB))  # noqa: B023
        times["tiled_floor"] += seconds(lambda: tiled_products(left, right))  # noqa: B023
        for path in paths() if head < numpy_heads else paths()[:1]:
            times[path] += seconds(lambda: auroc_by_token(left, right, counts, compiled=path == "numba"))  # noqa: B023
    positives = np.diff(counts.indptr)
    return {
        "cores": usable_cores(),
        "heads": heads,
        "positives_mean": float(positives.mean()),
        "positives_median": float(np.median(positives)),
        "floor_rows": floor_rows,
        "seconds": {name: HEADS * statistics.median(per_head) for name, per_head in times.items()},
        "ratio": {path: ratio(times[path], times["floor"]) for path in paths()},
        "ratios": {path: ratios(times[path], times["floor"]) for path in paths()},
        "ratio_to_tiled": {path: ratio(times[path], times["tiled_floor"]) for path in paths()},
        "peak_mb": peak,
        "sklearn_seconds": sklearn_seconds(counts),
    }


def measure(heads: int = HEADS, numpy_heads: int = 2) -> list[Measured]:
    """`run` as rows of a table."""
    result, title = run(heads, numpy_heads), f"AUROC, {HEADS} heads x {VOCAB:,} x {VOCAB:,}"
    floor = "the bare float32 products"
    heads_of = dict.fromkeys(paths(), numpy_heads) | {paths()[0]: heads}
    notes = {path: "" if n >= HEADS else f"from {counted(n, 'head')}" for path, n in heads_of.items()}
    rows = [
        Measured(
            f"{title}, {path}", result["seconds"][path], result["ratios"][path], floor, result["peak_mb"][path],
            notes[path], flops32=2.0 * HEADS * VOCAB**2 * HEAD_DIM,
        )
        for path in paths()
    ]  # fmt: skip
    sklearn, products = result["sklearn_seconds"], result["seconds"]["floor"]
    way = f"the paper's way: scikit-learn, a row at a time, {HEADS} heads"
    return [*rows, Measured(way, sklearn, (sklearn / products,), floor, None, f"from {SAMPLED_ROWS} rows")]


def paths() -> list[str]:
    return ["numba", "numpy"] if find_spec("numba") else ["numpy"]


def ratio(times: list[float], floor: list[float]) -> float:
    return statistics.median(ratios(times, floor))


def ratios(times: list[float], floor: list[float]) -> tuple[float, ...]:
    return tuple(took / bare for took, bare in zip(times, floor, strict=False))


def seconds(work: Callable[[], object], repeats: int = 1) -> list[float]:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return times


def products(left: np.ndarray, right: np.ndarray, rows: int, until: int) -> None:
    """The scores of the first `until` tokens, `rows` at a time into one buffer, all rows of both on cache lines."""
    width = len(right)
    columns = aligned(HEAD_DIM, -(-width // 16) * 16)[:, :width]  # (r, V)
    columns[:] = right.T
    scores = aligned(rows, -(-width // 16) * 16)[:, :width]
    for start in range(0, until, rows):
        block = left[start : min(start + rows, until)]
        np.matmul(block, columns, out=scores[: len(block)])


def tiled_products(left: np.ndarray, right: np.ndarray) -> None:
    """All scores in the tiles, panels and threads of `auroc_by_token`, without counting."""
    rows = tile_rows(len(right), usable_cores(), COUNTED_ROWS)
    panels = cut_into_panels(right, rows, STRIP)

    def work(first: int) -> None:
        tile = empty_tile(panels, rows)
        for start in range(first, len(left), rows * usable_cores()):
            fill_tile(tile, left[start : start + rows], panels)

    list(in_threads(work, range(0, rows * usable_cores(), rows)))


def sklearn_seconds(counts: scipy.sparse.csr_matrix) -> float:
    """Seconds of a `roc_auc_score` for every token of every head, from a sample of rows."""
    from sklearn.metrics import (
        roc_auc_score,
    )  # a slow import

    left, right = factors(0)
    sample = np.random.default_rng(2).choice(VOCAB, SAMPLED_ROWS, replace=False)
    scores = left[sample] @ right.T  # (sample, V)
    weights = [counts[token].toarray()[0] for token in sample]

    def work() -> None:
        for row, weight in zip(scores, weights, strict=True):
            roc_auc_score(weight > 0, row, sample_weight=np.maximum(weight, 1))

    return seconds(work)[0] / SAMPLED_ROWS * VOCAB * HEADS


PEAK = """
import sys
from pathlib import Path
import scipy.sparse
from benchmarks.auroc import factors
from benchmarks.results import Measured
from weightscope.model.metrics.auroc import auroc_by_token

counts = scipy.sparse.load_npz(sys.argv[1])
auroc_by_token(*factors(0), counts, compiled=sys.argv[2] == "numba")
print(next(line.split()[1] for line in Path("/proc/self/status").open() if line.startswith("VmHWM")))
"""


def peak_megabytes(counts: scipy.sparse.csr_matrix, path: str) -> float:
    """Peak resident memory in MB of a fresh process that reads the counts and computes one head."""
    if not Path("/proc/self/status").exists():
        return float("nan")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "counts.npz"
        scipy.sparse.save_npz(file, counts, compressed=False)
        done = subprocess.run([sys.executable, "-c", PEAK, str(file), path], check=True, capture_output=True, text=True)
    return int(done.stdout) * 1024 / 1e6


@click.command()
@click.option("--heads", default=HEADS, show_default=True)
@click.option("--numpy-heads", default=2, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def main(heads: int, numpy_heads: int, as_json: bool) -> None:
    timing = run(heads, numpy_heads)
    if as_json:
        print(json.dumps(timing))
        return
    print(
        f"{HEADS} heads, vocabulary {VOCAB:,}, head dim {HEAD_DIM}, {timing['cores']} cores; "
        f"{timing['positives_mean']:.0f} positives a row (median {timing['positives_median']:.0f}); "
        f"median of {timing['heads']} heads, scaled up"
    )
    print(f"{'products alone, ' + str(timing['floor_rows']) + ' rows each':40} {timing['seconds']['floor']:8.1f} s")
    print(f"{'products alone, tiled as here':40} {timing['seconds']['tiled_floor']:8.1f} s")
    for path in paths():
        print(
            f"{'AUROC, ' + path:40} {timing['seconds'][path]:8.1f} s  {timing['ratio'][path]:.2f} x the products, "
            f"{timing['ratio_to_tiled'][path]:.2f} x the tiled ones; peak {timing['peak_mb'][path]:.0f} MB"
        )
    print(f"{'scikit-learn, without the products':40} {timing['sklearn_seconds']:8.0f} s  from {SAMPLED_ROWS} rows")


if __name__ == "__main__":
    main()

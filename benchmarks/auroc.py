"""Bigram AUROC over a full vocabulary, against the bare float32 products of its scores."""

import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import scipy.sparse

from benchmarks.commands import Cost, timed
from benchmarks.results import Measured, before_row
from weightscope.core.errors import counted
from weightscope.model.metrics.auroc import aligned, auroc_by_token

VOCAB, HEADS, HEAD_DIM = 50_257, 12, 64
BIGRAMS_A_TOKEN = 120  # drawn; about 60 of them are distinct
ROWS_A_PRODUCT = (128, 256, 512, 1024)  # the floor is the fastest of these
SAMPLED_ROWS = 20
FLOOR = "the bare float32 products"


def zipf_counts(vocab: int = VOCAB, seed: int = 0, bigrams_a_token: int = BIGRAMS_A_TOKEN) -> scipy.sparse.csr_matrix:
    """Bigram counts, (vocab, vocab) int64: both tokens drawn by Zipf's law, each in its own order of ranks."""
    rng = np.random.default_rng(seed)
    share = np.cumsum(1 / np.arange(1, vocab + 1))
    draws = bigrams_a_token * vocab
    current, previous = (
        rng.permutation(vocab)[np.searchsorted(share, rng.uniform(0, share[-1], draws))] for _ in range(2)
    )
    return scipy.sparse.csr_matrix((np.ones(draws, np.int64), (current, previous)), shape=(vocab, vocab))


def factors(head: int, vocabulary: int = VOCAB) -> tuple[np.ndarray, np.ndarray]:
    """Gaussian left and right factors of a head's scores, (vocab, head_dim) float32 each."""
    rng = np.random.default_rng([1, head])
    left, right = rng.standard_normal((2, vocabulary, HEAD_DIM), np.float32)
    return left, right


def measure(heads: int, numpy_heads: int, vocabulary: int = VOCAB) -> list[Measured]:
    """Time products and AUROC alternately, head by head, so that other load affects both alike.

    Times are for 12 heads, from the median head; the floor is products of rows into one buffer with the threads of
    BLAS. scikit-learn's are scaled up from a sample of rows.
    """
    counts, began = zipf_counts(vocabulary), before_row()
    peak = {path: peak_megabytes(counts, path) for path in paths()}
    first = factors(0, vocabulary)
    rows = min(ROWS_A_PRODUCT, key=lambda n: min(timed(lambda: products(*first, n, 4096)).wall for _ in range(3)))
    for path in paths():  # compiles, and starts the threads
        auroc_by_token(*(factor[:512] for factor in first), counts[:512, :512], compiled=path == "numba")

    floors: list[Cost] = []
    costs: dict[str, list[Cost]] = {path: [] for path in paths()}
    for head in range(heads):
        left, right = factors(head, vocabulary)
        floors.append(timed(lambda: products(left, right, rows, vocabulary)).times(HEADS))  # noqa: B023
        for path in paths() if head < numpy_heads else paths()[:1]:
            work = timed(lambda: auroc_by_token(left, right, counts, compiled=path == "numba"))  # noqa: B023
            costs[path].append(replace(work.times(HEADS), peak=peak[path]))
    title, flops = f"AUROC, {HEADS} heads x {vocabulary:,} x {vocabulary:,}", 2.0 * HEADS * vocabulary**2 * HEAD_DIM
    measured = [
        Measured.of(
            f"{title}, {path}", costs[path], floors, FLOOR, f"from {counted(len(costs[path]), 'head')}",
            flops32=flops, **began,
        )
        for path in paths()
    ]  # fmt: skip
    way = f"the paper's way: scikit-learn, a row at a time, {HEADS} heads"
    theirs = sklearn_cost(counts).times(HEADS * vocabulary / SAMPLED_ROWS)
    return [*measured, Measured.of(way, [theirs], floors, FLOOR, f"from {SAMPLED_ROWS} rows", **began)]


def paths() -> list[str]:
    return ["numba", "numpy"] if find_spec("numba") else ["numpy"]


def products(left: np.ndarray, right: np.ndarray, rows: int, until: int) -> None:
    """The scores of the first `until` tokens, `rows` at a time into one buffer, all rows of both on cache lines."""
    width = len(right)
    columns = aligned(HEAD_DIM, -(-width // 16) * 16)[:, :width]  # (r, V)
    columns[:] = right.T
    scores = aligned(rows, -(-width // 16) * 16)[:, :width]
    for start in range(0, until, rows):
        block = left[start : min(start + rows, until)]
        np.matmul(block, columns, out=scores[: len(block)])


def sklearn_cost(counts: scipy.sparse.csr_matrix) -> Cost:
    """The cost of a `roc_auc_score` for every token of a sample of rows, without the products."""
    from sklearn.metrics import roc_auc_score  # a slow import

    left, right = factors(0, counts.shape[0])
    sample = np.random.default_rng(2).choice(len(left), SAMPLED_ROWS, replace=False)
    scores = left[sample] @ right.T  # (sample, V)
    weights = [counts[token].toarray()[0] for token in sample]

    def work() -> None:
        for row, weight in zip(scores, weights, strict=True):
            roc_auc_score(weight > 0, row, sample_weight=np.maximum(weight, 1))

    return timed(work)


PEAK = """
import sys
from pathlib import Path
import scipy.sparse
from benchmarks.auroc import factors
from weightscope.model.metrics.auroc import auroc_by_token

counts = scipy.sparse.load_npz(sys.argv[1])
auroc_by_token(*factors(0, counts.shape[0]), counts, compiled=sys.argv[2] == "numba")
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

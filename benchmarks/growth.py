"""How AUROC and an audit grow: with the vocabulary, with heads, with layers, with cores.

Each row's ratio is to the row before it in its series, where the work is half as large or the cores half as many.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import scipy.sparse

from benchmarks.audit import cost, write_synthetic
from benchmarks.auroc import factors, zipf_counts
from benchmarks.results import Measured
from weightscope.metrics.auroc import auroc_by_token
from weightscope.parallel import usable_cores

VOCABULARIES = (12_564, 25_128, 50_256)
HEADS = (1, 2, 4)
LAYERS = (1, 2, 4)
ROUNDS = 3


def auroc_seconds(counts: scipy.sparse.csr_matrix, heads: int = 1) -> float:
    """Seconds of so many heads over the vocabulary that counts are of."""
    vocab = counts.shape[0]
    pairs = [[factor[:vocab] for factor in factors(head)] for head in range(heads)]
    started = time.perf_counter()
    for left, right in pairs:
        auroc_by_token(left, right, counts)
    return time.perf_counter() - started


def audit_seconds(folder: Path) -> float:
    return cost("singular values", folder).wall


ON_CORES = """
import os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:int(sys.argv[1])])
from benchmarks.auroc import zipf_counts
from benchmarks.growth import auroc_seconds
auroc_seconds(zipf_counts(2048))
print(auroc_seconds(zipf_counts(25_128)))
"""


def seconds_on(cores: int) -> float:
    """The same AUROC in a process of its own that may use so many cores."""
    done = subprocess.run([sys.executable, "-c", ON_CORES, str(cores)], check=True, capture_output=True, text=True)
    return float(done.stdout)


def series(title: str, sizes: list[int], rounds: list[list[float]]) -> list[Measured]:
    """Rows of one series: seconds by size, each round's ratio to the size before."""
    found = []
    for k, size in enumerate(sizes):
        ratios = tuple(each[k] / each[k - 1] for each in rounds) if k else ()
        before = f"{sizes[k - 1]:,}" if k else ""
        seconds = sorted(each[k] for each in rounds)[len(rounds) // 2]
        found.append(Measured(title.format(f"{size:,}"), seconds, ratios, before))
    return found


def measure() -> list[Measured]:
    """All series; cores where the operating system lets a process be kept to some."""
    counts = {vocab: zipf_counts(vocab) for vocab in VOCABULARIES}
    auroc_seconds(zipf_counts(2048))  # compiles
    by_vocabulary = [[auroc_seconds(counts[vocab]) for vocab in VOCABULARIES] for _ in range(ROUNDS)]
    by_heads = [[auroc_seconds(counts[VOCABULARIES[1]], heads) for heads in HEADS] for _ in range(ROUNDS)]
    with tempfile.TemporaryDirectory() as top:
        folders = [write_synthetic(Path(top) / str(layers), "llama-2-7b", layers) for layers in LAYERS]
        audit_seconds(folders[0])
        by_layers = [[audit_seconds(folder) for folder in folders] for _ in range(ROUNDS)]
    found = [
        *series("AUROC, one head, vocabulary {}", list(VOCABULARIES), by_vocabulary),
        *series("AUROC, vocabulary 25,128, heads {}", list(HEADS), by_heads),
        *series("singular values, Llama-2-7B's shape, layers {}", list(LAYERS), by_layers),
    ]
    if hasattr(os, "sched_setaffinity"):
        doublings = [2**k for k in range(usable_cores().bit_length()) if 2**k <= usable_cores()]
        by_cores = [[seconds_on(cores) for cores in doublings] for _ in range(ROUNDS)]
        found += series("AUROC, vocabulary 25,128, cores {}", doublings, by_cores)
    return found

"""Whole models: a streamed one is what its headers say, and random."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import whole
from benchmarks.results import Bench, Measured
from benchmarks.synthetic import Sizes, write

SIZES = Sizes(layers=2, width=512, heads=4, head_dim=128, kv_heads=1, vocabulary=300)


def test_a_made_up_file_has_the_header_of_its_sparse_one_and_the_same_bytes_however_it_is_cut(tmp_path: Path) -> None:
    path = write(tmp_path, SIZES, holes=True) / "model.safetensors"
    made, header = whole.MadeUp(path, 1), len(whole.MadeUp(path, 1).start)
    content = made[: path.stat().st_size]
    assert len(content) == path.stat().st_size and content[:header] == path.read_bytes()[:header]
    for start, stop in ((0, 9), (header - 5, header + 7), (header + 2**21 - 3, header + 2**21 + 90_001)):
        assert made[start:stop] == content[start:stop]
    rows = np.frombuffer(content[header:], "<u2")[: 256 * 512].reshape(256, 512)
    assert len(np.unique(rows, axis=0)) == 256


@pytest.mark.check
def test_a_streamed_model_is_audited() -> None:
    streamed = whole.Whole("two layers", SIZES, "audit", served=True)
    row = whole.measure(streamed)
    assert row.name == "two layers: audit" and row.peak_mb and row.cpu and row.load is not None


def test_the_table_names_the_command_and_says_what_memory_is_compared_with() -> None:
    bench = Bench({}, [Measured("32 layers: audit", 61.0, peak_mb=304.2, note="1.13 x", cpu=99.5, load=7.96)])
    assert whole.table(bench).splitlines()[-1] == "| 32 layers | `audit` | 61.0 s | 99.5 s | 304 MB (1.13 x) | 8.0 |"

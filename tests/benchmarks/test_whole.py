"""Whole models: a streamed one is what its headers say, and random; a failing row stops no other."""

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import streamed, whole
from benchmarks.commands import Cost
from benchmarks.results import load
from benchmarks.synthetic import Sizes, write

SIZES = Sizes(layers=2, width=512, heads=4, head_dim=128, kv_heads=1, vocabulary=300)


def test_a_made_up_file_has_the_header_of_its_sparse_one_and_the_same_bytes_however_it_is_cut(tmp_path: Path) -> None:
    path = write(tmp_path, SIZES, holes=True) / "model.safetensors"
    made, header = streamed.MadeUp(path, 1), len(streamed.MadeUp(path, 1).start)
    content = made[: path.stat().st_size]
    assert len(content) == path.stat().st_size and content[:header] == path.read_bytes()[:header]
    for start, stop in ((0, 9), (header - 5, header + 7), (header + 2**21 - 3, header + 2**21 + 90_001)):
        assert made[start:stop] == content[start:stop]
    rows = np.frombuffer(content[header:], "<u2")[: 256 * 512].reshape(256, 512)
    assert len(np.unique(rows, axis=0)) == 256


@pytest.mark.check
def test_a_streamed_model_is_audited(tmp_path: Path) -> None:
    with streamed.served(SIZES, tmp_path) as name:
        assert whole.Given(tmp_path, top=tmp_path).run("audit", lambda: name)().peak


def test_rows_are_kept_by_their_names_and_a_failing_one_is_named_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Cost:
        raise RuntimeError("no such tool")

    def rows(given: whole.Given):
        yield whole.Task("task", "first", lambda: Cost(4, 2, 5), lambda: Cost(1, 1), "least")
        yield whole.Task("task", "broken", broken)
        yield whole.Task("task", "last", lambda: Cost(3, 2))

    monkeypatch.setattr(whole, "SETS", (rows,))
    done = CliRunner().invoke(whole.main, ["--out", str(tmp_path)])
    assert done.exit_code == 1 and "Error: broken: no such tool" in done.output
    first, last = load(tmp_path / "whole.json").measured
    assert (first.ratio, first.cpu_ratios, first.peak_mb, last.ratio) == (4, (2,), 5, None)
    CliRunner().invoke(whole.main, ["--out", str(tmp_path), "--only", "task: last"])
    assert [each.name for each in load(tmp_path / "whole.json").measured] == ["first", "last"]

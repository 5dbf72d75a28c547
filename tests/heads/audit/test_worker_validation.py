"""What a worker sends back is checked before any of it is written."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.core.engine import open_engine
from weightscope.core.errors import CheckpointError
from weightscope.heads.audit import batch
from weightscope.heads.audit.audit import AuditOptions
from weightscope.heads.audit.batch import Job, Report, arrays_of, audit_all, report_of
from weightscope.model.sources import Source

FINDING = {"kind": "zero_head", "title": "zero head", "text": "W_QK is exactly zero.", "members": [{"index": 1}]}
SUMMARY = {"family": "gpt2", "layers": 2, "qk_sigma1": float("nan")}


@pytest.mark.parametrize(
    "answer",
    [None, [], {}, {"a": 1.0}, {"a": np.array([None])}, {"../a": np.zeros(2)}, {1: np.zeros(2)}, np.zeros(3)],
    ids=repr,
)
def test_a_layer_is_arrays_by_name(answer: object) -> None:
    with pytest.raises(CheckpointError, match=r"a worker answers for layer 3 with .*; arrays by name were expected"):
        arrays_of(answer, "layer 3")


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/../x", "", "a//b", ".weightscope/lock", "a/.b", "a\\..\\b", "a\0", 3]
)
def test_no_file_lies_outside_the_results(name: object) -> None:
    with pytest.raises(CheckpointError, match="which is not a result's name"):
        report_of(Report({"heads.csv": b"", name: b""}, "", SUMMARY))


@pytest.mark.parametrize(
    "report",
    [None, Report([], "", SUMMARY), Report({"a": "text"}, "", SUMMARY), Report({}, "\x1b[2J", SUMMARY),
     Report({}, "", []), Report({}, "", {"a": []}), Report({}, "", SUMMARY, {"heads": [float("nan")]}),
     Report({}, "", SUMMARY, {"findings": [{"kind": "none"}]}), Report({}, "", SUMMARY, {1: 2}),
     Report({}, "", SUMMARY, {"findings": 5}), Report({}, "", SUMMARY, {"findings": [{"kind": []}]})],
    ids=repr,
)  # fmt: skip
def test_a_report_is_what_it_says(report: object) -> None:
    with pytest.raises(CheckpointError, match="a worker answers for its report with"):
        report_of(report)


def test_an_honest_report_is_taken_as_it_is() -> None:
    report = Report({"heads.csv": b"1", "figures/a.png": b"2"}, "two lines,\nσ₁ too", SUMMARY, {"findings": [FINDING]})
    assert report_of(report) is report


def test_an_audit_writes_nothing_of_a_report_that_names_files_elsewhere(tmp_path: Path, monkeypatch) -> None:
    def hostile(get_model, layers, options, provenance, has_page):
        return Report({"../stolen": b"x"}, "", SUMMARY)

    monkeypatch.setattr(batch, "report_task", hostile)
    checkpoint = write_checkpoint(tmp_path / "model", gpt2_weights(n_layers=1))
    with open_engine("local") as engine:
        job = Job(Source.named(str(checkpoint)), tmp_path / "results" / "model")
        (outcome,) = audit_all([job], AuditOptions(directions=0), engine)
    assert "a worker names a file '../stolen'" in outcome.problem
    assert not list(tmp_path.rglob("stolen"))

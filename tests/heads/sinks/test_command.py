"""`weightscope sinks`, and the pages that it writes."""

import csv
import html
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

from tests.support.cases import Case, case_of
from tests.support.commands import run
from tests.support.provenance import ends_with, header_of
from tests.support.two_layers import FOLDER, TWO_LAYERS
from weightscope.core.files import REPORT

PARAGRAPH = "A single man in possession of a good fortune must be in want of a {0} wife, or of a dog. " * 3
pytestmark = pytest.mark.check
BIAS = (TWO_LAYERS, "--question", "bias", "--inputs", 3, "--length", 32, "--evaluated", 2)
KIND_FILES = {"events.csv", "heads.csv", "layers.csv", "sinks.npz", *REPORT} | {
    f"{name}.{suffix}"
    for name in ("sink-tokens", "head-map", "norms", "plane", "lemmas", "similarity", "spectra", "angles", "routing")
    for suffix in ("png", "svg", "figure.csv")
}  # fmt: skip


def sinks(*arguments: object) -> Result:
    return run("sinks", *arguments, catch_exceptions=False)


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for name in ("one", "two", "three", "four"):
        (folder / f"{name}.txt").write_text("\n\n".join(PARAGRAPH.format(f"{name} {n}") for n in range(12)))
    return folder


@pytest.fixture(scope="module")
def dino(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny vision transformer."""
    return saved("dinov2_with_registers", tmp_path_factory.mktemp("dino"))


def saved(name: str, folder: Path) -> Path:
    pytest.importorskip("transformers", reason="the runner needs the extra `runner`")
    from tests.support.random_models import random_model

    case: Case = case_of(name)
    random_model(case).save_pretrained(folder)
    return folder


def test_bias_writes_tables_figures_and_a_page(texts: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the runner needs the extra `runner`")
    done = sinks(*BIAS, "--text", texts, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    figures = {
        f"{stem}-two-layers.{end}"
        for stem in ("updates", "picture", "patching", "heads")
        for end in ("png", "svg", "figure.csv")
    }
    tables = {f"{name}.csv" for name in ("layers", "heads", "patching", "losses")}
    assert visible(tmp_path) == tables | {"mu_sink.npz", *REPORT} | figures
    assert all((tmp_path / name).stat().st_size > 5000 for name in figures if not name.endswith(".csv"))
    with (tmp_path / "patching.csv").open() as file:
        rows = list(csv.DictReader(file))
    base = float(rows[0]["perplexity"])
    assert {(row["layers"], row["first_position"]) for row in rows[1:]} == {
        (layers, start) for layers in ("early", "late", "all") for start in "01"
    }
    for row in rows[1:]:
        assert float(row["change"]) == pytest.approx(float(row["perplexity"]) - base, abs=1e-3)
    with np.load(tmp_path / "mu_sink.npz") as file:
        assert file["mu_sink"].shape == (2, 256)
    page = (tmp_path / "report.html").read_text()
    assert "Mistral-7B-v0.1" in page and "3 texts of 32 tokens, 2 evaluated: in the median" in page
    assert "Attention's matrices are stored as F16" in html.unescape(page)
    assert f"Texts: 4 documents of {texts.name}." in page
    footer = ends_with(tmp_path / "report.html", ["sinks", *BIAS, "--text", texts, "--out", tmp_path])
    assert header_of(FOLDER / "model.safetensors")[1] in footer


def test_one_document_is_too_few_for_bias(texts: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the runner needs the extra `runner`")
    done = sinks(*BIAS, "--text", texts / "one.txt", "--out", tmp_path)
    assert done.exit_code == 2
    assert done.output.splitlines()[-1].startswith("weightscope: too little text")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("given", [True, False], ids=["given", "packaged"])
@pytest.mark.parametrize("sees", [True, False], ids=["images", "texts"])
def test_kind_reads_images_or_texts_as_the_model_does(
    sees: bool, given: bool, texts: Path, dino: Path, tmp_path: Path
) -> None:
    """Images or texts of the user's; else scikit-learn's photographs, or works that come along: the page says which."""
    if given and sees:
        from PIL import Image

        for name in "abc":
            Image.new("RGB", (20, 16), (10, 200, 90)).save(tmp_path / f"{name}.png")
    options = ["--images", tmp_path] if sees else ["--text", texts]
    out = tmp_path / "out"
    source = dino if sees else TWO_LAYERS
    arguments = [source, "--question", "kind", *(options if given else []), "--inputs", 3, "--length", 16, "--out", out]
    done = sinks(*arguments)
    assert done.exit_code == 0, done.output
    assert visible(out) == KIND_FILES | ({"registers.png", "registers.svg", "registers.figure.csv"} if sees else set())
    assert "3 inputs, 2 layers of" in done.output
    source_line = {
        (True, True): f"Run on 3 images: images from {tmp_path}; BitImageProcessorPil with size 12",
        (True, False): "Run on 3 images: scikit-learn's two photographs and crops of them; BitImageProcessorPil",
        (False, True): f"from 4 documents of {texts.name}.",
        (False, False): "from 8 works in the public domain that come with weightscope.",
    }[sees, given]
    footer = ends_with(out / "report.html", ["sinks", *arguments], *([dino] if sees else []))
    assert f"{source}: model.safetensors" in footer
    assert source_line in done.output and source_line in html.unescape((out / "report.html").read_text())


def test_inputs_of_the_wrong_kind_are_refused(texts: Path, dino: Path, tmp_path: Path) -> None:
    kind = ("--question", "kind", "--out", tmp_path / "none")
    for arguments, problem in (
        ((dino, *kind, "--images", tmp_path / "none"), "no such file or folder"),
        ((dino, *kind, "--text", texts), f"{dino.name} sees images, not texts"),
        ((TWO_LAYERS, *kind, "--images", texts), "two-layers reads texts, not images"),
    ):
        refused = sinks(*arguments)
        assert refused.exit_code == 2
        assert refused.output.startswith(f"weightscope: {problem}") and refused.output.count("\n") == 1
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("name", "options"), [("vit", ()), ("siglip_vision", ("--tower", "vision"))])
def test_images_of_the_wrong_size_are_refused(name: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """Before the model is loaded; and not in transformers' words, which to SigLIP are of tensors a and b."""
    settings = {"size": 16, "image_mean": [0.5], "image_std": [1], "do_convert_rgb": False}
    (saved(name, tmp_path) / "preprocessor_config.json").write_text(json.dumps(settings))
    done = sinks(tmp_path, *options, "--question", "kind", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert done.output == (
        "weightscope: preprocessor_config.json: makes images of 1 x 16 x 16 numbers; the model takes 1 x 12 x 12 "
        "(channels, height, width)\n"
    )


@pytest.mark.parametrize(
    ("question", "option"),
    [("bias", ("--images", ".")), ("bias", ("--seed", 1)), ("kind", ("--paper",)), ("kind", ("--evaluated", 3))],
)
def test_an_option_of_the_other_question_is_refused(question: str, option: tuple[object, ...], tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the runner needs the extra `runner`")
    done = sinks(TWO_LAYERS, "--question", question, *option, "--out", tmp_path)
    assert done.exit_code == 2
    assert f"{option[0]} cannot be used with --question {question}" in done.output


def test_without_pytorch_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before anything is read: the source need not be there."""
    monkeypatch.setitem(sys.modules, "torch", None)
    done = sinks("nowhere", "--question", "kind", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert done.output == (
        "weightscope: running a model needs PyTorch and transformers: pip install torch transformers\n"
    )
    assert not (tmp_path / "out").exists()

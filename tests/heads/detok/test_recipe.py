"""The recipe of `make gpt2-detok`: from a Hub, from a folder, and without any Hub at all."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from analyses.recipes.gpt2_detok import main
from tests.support.hub_server import Hub, without_hub
from tests.support.parquet import shard
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.two_layers import TWO_LAYERS
from weightscope.core.files import REPORT, OutputFolder
from weightscope.heads.detok import page as detok_page
from weightscope.model.text.bigrams import count_bigrams
from weightscope.model.text.counts import load_counts
from weightscope.model.text.sequences import OPENWEBTEXT
from weightscope.model.text.tokenizer import Tokenizer

pytestmark = pytest.mark.check

SENTENCEPIECE = Path(__file__).parents[2] / "model" / "text" / "sentencepiece_tokens.json"
TEXT = ["the cat sat on the mat. the dog sat on the cat.", "a hat on a cat is that, and the mat was flat."]
WRITTEN = {"heads.csv", "tokens.npz", "neighbours.csv", "positions.npz", "trends.csv", *REPORT, "auroc.png"}


@pytest.fixture
def repository(tmp_path: Path) -> dict[str, bytes]:
    """The files of a random GPT-2 with a tokenizer of its own, as they lie on the Hub."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers come with the extra `bigrams`")
    folder = write_checkpoint(tmp_path / "model", gpt2_weights(vocab=300), vocab_size=300)
    tokenizer = tokenizers.ByteLevelBPETokenizer(add_prefix_space=False)
    tokenizer.train_from_iterator(TEXT, vocab_size=300, min_frequency=1, show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_gpt2_and_openwebtext_come_from_the_hub(
    hub: Hub, repository: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    hub.repositories["gpt2"] = repository
    shards = {f"plain_text/train-{i:05d}-of-00080.parquet": shard([*TEXT, f"cat {i}"]) for i in range(3)}
    hub.repositories[f"datasets/{OPENWEBTEXT}"] = {"README.md": b"", **shards}
    result = CliRunner().invoke(main, ["--out", "out"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert {path.name for path in Path("out").iterdir()} >= WRITTEN
    (counts,) = Path("counts").iterdir()
    assert load_counts(counts).documents == 2 * (len(TEXT) + 1)
    page = Path("out/report.html").read_text()
    assert "of train-00000-of-00080.parquet, train-00001-of-00080.parquet;" in page
    served = hub.sent
    assert CliRunner().invoke(main, ["--out", "again"], catch_exceptions=False).exit_code == 0
    assert hub.sent - served < len(repository["model.safetensors"])  # counted and fetched once
    assert Path("again/heads.csv").read_bytes() == Path("out/heads.csv").read_bytes()


def test_without_the_hub_the_model_of_two_layers_is_used_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_hub(monkeypatch, tmp_path)
    result = CliRunner().invoke(main, ["--out", str(tmp_path / "out")], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[0].endswith("tests/fixtures/two-layers")
    assert "a GPT-2 of two layers" in (tmp_path / "out" / "report.html").read_text()
    assert {path.name for path in (tmp_path / "out").iterdir()} >= WRITTEN
    with np.load(tmp_path / "out" / "tokens.npz") as arrays:
        assert arrays["auroc"].shape == (8, 8000)


def test_what_happens_on_text_is_part_of_it_where_the_model_can_be_run(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="section 5 needs the extra `runner`")
    text = tmp_path / "text.md"
    text.write_text(
        "\n\n".join(f"On day {n} the ship's crew saw land, and rowed to it in small boats." for n in range(300))
    )
    arguments = ["--model", TWO_LAYERS, "--text", str(text), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert {"contributions.csv", "contributions.npz", "contributions.png"} <= {
        p.name for p in (tmp_path / "out").iterdir()
    }
    assert "What happens on text" in (tmp_path / "out" / "report.html").read_text()


def test_a_checkpoint_that_cannot_be_run_keeps_all_the_rest(repository: dict[str, bytes], tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="section 5 needs the extra `runner`")
    arguments = [
        "--model",
        str(tmp_path / "model"),
        "--counts",
        str(tmp_path / "counts.npz"),
        "--out",
        str(tmp_path / "out"),
    ]
    (tmp_path / "text.txt").write_text(" ".join(TEXT * 20))
    count_bigrams([tmp_path / "text.txt"], Tokenizer.load(tmp_path / "model")).save(tmp_path / "counts.npz")
    with OutputFolder(tmp_path / "out") as of_a_run_before:
        for name in ("contributions.csv", "contributions.npz", "empirical-head-3.png"):
            of_a_run_before.text(name, "of a model that can be run")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    result = CliRunner().invoke(main, [*arguments, "--text", str(tmp_path / "text.txt")], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "skipped the run on text: model: lacks" in result.output
    assert "Fig. 4 (section 5) was not drawn: model: lacks" in (tmp_path / "out" / "report.html").read_text()
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written >= WRITTEN | {"notes.txt"}
    assert not any(name.startswith(("contributions", "empirical")) for name in written)


def test_a_checkpoint_without_tokens_says_just_that(tmp_path: Path) -> None:
    weights = gpt2_weights()
    del weights["wte.weight"]
    folder = write_checkpoint(tmp_path / "model", weights)
    result = CliRunner().invoke(main, ["--model", str(folder), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "no token embedding in this checkpoint" in result.stderr and not (tmp_path / "out").exists()


def test_another_model_is_never_replaced(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--model", str(tmp_path / "none"), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "no such file or folder" in result.stderr and not (tmp_path / "out").exists()


def test_the_authors_japanese_model_comes_from_the_hub_with_its_numbers(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in of its architecture, 16 heads, with a tokenizer of its kind; bigrams are of TEXT, or of Wikipedia."""
    pytest.importorskip("tokenizers", reason="tokenizers come with the extra `bigrams`")
    monkeypatch.chdir(tmp_path)
    model = base64.b64decode(json.loads(SENTENCEPIECE.read_text())["unigram"]["model"])
    folder = write_checkpoint(tmp_path / "model", gpt2_weights(d=64, vocab=144), vocab_size=144, n_head=16)
    config = {"tokenizer_class": "T5Tokenizer", "do_lower_case": False, "extra_ids": 0}
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files |= {"spiece.model": model, "tokenizer_config.json": json.dumps(config).encode()}
    hub.repositories["rinna/japanese-gpt-1b"] = files
    japanese = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。人間というものを見た。" * 3
    hub.repositories["datasets/wikimedia/wikipedia"] = {
        "20231101.ja/train-00000-of-00015.parquet": shard([japanese, japanese[20:]]),
        "20231101.aa/train-00000-of-00001.parquet": shard(["no Japanese"]),
    }
    (tmp_path / "text.txt").write_text(japanese, encoding="utf-8")
    for options in ([], ["--text", "text.txt"]):
        arguments = ["--model", "rinna/japanese-gpt-1b", "--out", "out", *options]
        result = CliRunner().invoke(main, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        assert {path.name for path in Path("out").iterdir()} >= WRITTEN - {"tokens.npz"}
        page = Path("out/report.html").read_text()
        assert all(f"{value:.3f}" in page for value in detok_page.RINNA.auroc.values())
        assert all(f"{value:.3f}" in page for value in detok_page.RINNA.by_frequency.values())
        assert "The authors count Japanese Wikipedia" in page
        assert ("text.txt" in page) == bool(options)
    (counts,) = Path("counts").iterdir()
    assert counts.name.startswith("wikimedia-wikipedia-20231101.ja") and load_counts(counts).documents == 2

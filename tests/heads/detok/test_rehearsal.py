"""`make gpt2-detok MODEL=gpt2` as it will run with a network.

A server has GPT-2's real attention, LayerNorms, positions and tokenizer. The token embeddings and the MLPs are made up,
so numbers that read tokens mean nothing here.
"""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save

from analyses.recipes import detok_tables
from analyses.recipes.gpt2_detok import main
from tests.support.hub_server import Hub
from tests.support.parquet import shard
from weightscope.heads.detok import page as detok_page
from weightscope.model.text.sequences import OPENWEBTEXT

pytestmark = pytest.mark.check

SHARED = Path(__file__).parents[4] / "shared" / "data"
REAL, TOKENIZER, BOOKS = SHARED / "gpt2-attention", SHARED / "gpt2-tokenizer", SHARED / "text" / "books"
LAYERS, WIDTH, VOCABULARY, POSITIONS = 12, 768, 50257, 1024


@pytest.fixture(scope="module")
def gpt2() -> dict[str, bytes]:
    """The files of the Hub's gpt2, with all tensors of its names and shapes."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers come with the extra `bigrams`")
    if not (REAL / "model.safetensors").exists():
        pytest.skip(f"needs OpenAI's GPT-2, in {REAL}")
    rng = np.random.default_rng(0)
    tensors = load_file(REAL / "model.safetensors")
    tensors["wte.weight"] = rng.normal(0, 0.14, (VOCABULARY, WIDTH)).astype(np.float32)
    mask = np.tri(POSITIONS, dtype=np.float32)[None, None]
    for layer in range(LAYERS):
        tensors[f"h.{layer}.attn.bias"] = mask  # a buffer of the published file, no weight
        for name, shape in (("c_fc", (WIDTH, 4 * WIDTH)), ("c_proj", (4 * WIDTH, WIDTH))):
            tensors[f"h.{layer}.mlp.{name}.weight"] = rng.normal(0, 0.02, shape).astype(np.float32)
    tokenizer = tokenizers.ByteLevelBPETokenizer(str(TOKENIZER / "vocab.json"), str(TOKENIZER / "merges.txt"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return {
        "config.json": (REAL / "config.json").read_bytes(),
        "model.safetensors": save(tensors, metadata={"format": "pt"}),
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"model_max_length": POSITIONS}).encode(),
        **{name: (TOKENIZER / name).read_bytes() for name in ("vocab.json", "merges.txt")},
    }


def test_the_first_run_with_a_network_ends_with_the_papers_tables_in_one_page(
    hub: Hub, gpt2: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hub.repositories["gpt2"] = gpt2
    books = [path.read_text(encoding="utf-8") for path in sorted(BOOKS.iterdir())[:4] if path.is_file()]
    hub.repositories[f"datasets/{OPENWEBTEXT}"] = {
        "README.md": b"",
        **{f"plain_text/train-{i:05d}-of-00080.parquet": shard(books[2 * i : 2 * i + 2]) for i in range(2)},
    }
    result = CliRunner().invoke(main, ["--model", "gpt2", "--out", "out"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "skipped" not in result.output and "trying" not in result.output

    with Path("out/heads.csv").open() as file:
        heads = list(csv.DictReader(file))
    assert len(heads) == 12 and all(0 < float(row["auroc_paper"]) < 1 for row in heads)
    with Path("out/printed.csv").open() as file:
        printed = list(csv.DictReader(file))
    assert {row["token"] for row in printed} == set(detok_tables.TOKENS)
    page = Path("out/report.html").read_text()
    assert all(f"{value:.3f}" in page for value in detok_page.AUROC.values())  # Table 2 next to ours
    assert all(f"{value:.3f}" in page for value in detok_page.AUROC_BY_FREQUENCY.values())
    drawn = {path.stem for path in Path("out").glob("*.png")}
    assert drawn >= {
        "auroc",
        "roc",
        f"positions-head-{detok_tables.HEAD_OF_FIG_3}",
        f"empirical-head-{detok_tables.HEAD_OF_FIG_3}",
    }
    for name in drawn:
        assert f"{name}.svg" in {path.name for path in Path("out").glob("*.svg")}
    words = re.sub(r"<(svg|script|style).*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL)
    assert not re.findall(r".*\bnan\b.*", words)
    assert "passages of 2 documents of train-00000-of-00080.parquet" in words  # the text is of what was counted

"""Files that llama.cpp's own converter writes are the models that they were made from."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import weightscope as ws
from tests.support.converter import VERSION, unpacked

ROOT = Path(__file__).parents[3]
# Types whose GGUF names or keys no row knew, and what the float32 file is.
SAME = (
    "afmoe", "apertus", "bamba", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_bigcode", "gpt_oss", "jamba", "lfm2",
    "llama4_text", "olmo3",
)  # fmt: skip

# Types whose converter leaves out heads, or takes a number for granted: with that number they are the same.
WITH_ITS_NUMBERS = ("distilbert", "ernie4_5_moe", "falcon", "mt5")


@pytest.mark.check
def test_converted_models_are_the_same(tmp_path: Path) -> None:
    """Each with four types of numbers: the same values, rounded two ways, and quantised where rows are whole blocks."""
    pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
    pytest.importorskip("transformers", reason="tiny models are made by transformers, which is not installed")
    command = [sys.executable, "-m", "analyses.experiments.faithful_conversions", "--out", str(tmp_path / "out")]
    named = [word for kind in SAME for word in ("--source", kind)]
    about = {"LLAMA_CPP": str(unpacked(tmp_path)), "LLAMA_CPP_VERSION": VERSION, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--writer", "gguf", *named], check=True, cwd=ROOT, env={**os.environ, **about})
    rows = list(csv.DictReader((tmp_path / "out" / "faithful.csv").open()))
    assert [row for row in rows if row["as_expected"] != row["conversions"]] == []
    assert {row["source"] for row in rows} == {*SAME} and sum(int(row["conversions"]) for row in rows) == 4 * len(SAME)


@pytest.mark.check
def test_models_with_the_numbers_that_the_converter_takes_are_the_same(tmp_path: Path) -> None:
    """Other numbers than a file's own are a difference, as the farthest distance that T5 has a bias for."""
    pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
    pytest.importorskip("transformers", reason="tiny models are made by transformers, which is not installed")
    converter, made = unpacked(tmp_path), tmp_path / "made"
    command = [sys.executable, "-m", "tests.model.rows.llama_cpp", str(converter), str(made), *WITH_ITS_NUMBERS]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    verdicts = {kind: ws.same(made / kind, made / kind / "model.gguf").verdict for kind in WITH_ITS_NUMBERS}
    assert verdicts == dict.fromkeys(WITH_ITS_NUMBERS, "same values")
    config = json.loads((made / "mt5" / "config.json").read_text()) | {"relative_attention_max_distance": 64}
    (made / "mt5" / "config.json").write_text(json.dumps(config))
    changed = ws.same(made / "mt5", made / "mt5" / "model.gguf")
    assert changed.verdict == "different" and [key.config for key in changed.config] == [
        "relative_attention_max_distance"
    ]

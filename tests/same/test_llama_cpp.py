"""Files that llama.cpp's own converter writes are the models that they were made from."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.converter import VERSION, unpacked

ROOT = Path(__file__).parents[2]
# Types whose GGUF names or keys no row knew, and what the float32 file is.
SAME = (
    "afmoe", "bamba", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_bigcode", "gpt_oss", "jamba", "lfm2",
    "llama4_text", "olmo3",
)  # fmt: skip


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

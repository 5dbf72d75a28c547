"""GGUF files that llama.cpp's own converter writes are read as the checkpoints that they were made from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
pytest.importorskip("transformers", reason="tiny models are made by transformers, which is not installed")

from tests.model.rows.converted import compared, read_rows
from tests.support.converter import unpacked

pytestmark = pytest.mark.census
ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "gguf.md"
FEWEST = 60  # types that are equal


def test_converted_models_are_read_as_their_originals(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every type has the verdict of docs/gguf.md: equal, refused or not converted, and none is wrong."""
    converter = unpacked(tmp_path_factory.mktemp("converter"))
    command = [sys.executable, "-m", "tests.model.rows.llama_cpp", str(converter), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    rows = [compared(folder) for folder in sorted(tmp_path.iterdir())]
    assert [row for row in rows if row.verdict == "WRONG"] == []
    assert sum(row.verdict == "equal" for row in rows) >= FEWEST
    assert {row.type: row.verdict for row in rows} == read_rows(PAGE)

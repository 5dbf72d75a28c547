"""GGUF files that llama.cpp's own converter writes are read as the checkpoints that they were made from."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
pytest.importorskip("transformers", reason="tiny models are made by transformers, which is not installed")

from tests.architectures.converted import CONVERTER, compared, read_rows

pytestmark = pytest.mark.census
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gguf.md"
NEEDED = ("convert_hf_to_gguf.py", "conversion/", "gguf-py/")
FEWEST = 60  # types that are equal


@pytest.fixture(scope="module")
def converter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converter's folder, from a source distribution; nothing else of it is built or run."""
    folder = tmp_path_factory.mktemp("converter")
    archive = os.environ.get("LLAMA_CPP_PYTHON_SDIST", "")
    if not archive:
        command = [sys.executable, "-m", "pip", "download", "--no-binary", ":all:", "--no-deps", "--dest", str(folder)]
        try:
            subprocess.run([*command, f"llama-cpp-python=={CONVERTER}"], check=True, capture_output=True, timeout=900)
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"llama-cpp-python's source distribution, which has the converter, cannot be had: {error}")
        archive = str(next(folder.glob("*.tar.gz")))
    inside = f"llama_cpp_python-{CONVERTER}/vendor/llama.cpp/"
    with tarfile.open(archive) as sources:
        wanted = [file for file in sources if file.name.removeprefix(inside).startswith(NEEDED)]
        sources.extractall(folder, wanted, filter="data")
    return folder / inside


def test_converted_models_are_read_as_their_originals(converter: Path, tmp_path: Path) -> None:
    """Every type has the verdict of docs/gguf.md: equal, refused or not converted, and none is wrong."""
    command = [sys.executable, "-m", "tests.architectures.llama_cpp", str(converter), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    rows = [compared(folder) for folder in sorted(tmp_path.iterdir())]
    assert [row for row in rows if row.verdict == "WRONG"] == []
    assert sum(row.verdict == "equal" for row in rows) >= FEWEST
    assert {row.type: row.verdict for row in rows} == read_rows(PAGE)

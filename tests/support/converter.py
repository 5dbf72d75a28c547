"""llama.cpp's own converter, from a source distribution; nothing of it is built or run."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

VERSION = "0.3.36"  # of llama-cpp-python, whose source distribution has the converter
NEEDED = ("convert_hf_to_gguf.py", "conversion/", "gguf-py/")


def unpacked(folder: Path) -> Path:
    """The converter's folder, in `folder`; skips the test where the distribution cannot be had.

    The environment variable LLAMA_CPP_PYTHON_SDIST may name a downloaded one.
    """
    archive = os.environ.get("LLAMA_CPP_PYTHON_SDIST", "")
    if not archive:
        command = [sys.executable, "-m", "pip", "download", "--no-binary", ":all:", "--no-deps", "--dest", str(folder)]
        try:
            subprocess.run([*command, f"llama-cpp-python=={VERSION}"], check=True, capture_output=True, timeout=900)
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"llama-cpp-python's source distribution, which has the converter, cannot be had: {error}")
        archive = str(next(folder.glob("*.tar.gz")))
    inside = f"llama_cpp_python-{VERSION}/vendor/llama.cpp/"
    with tarfile.open(archive) as sources:
        wanted = [file for file in sources if file.name.removeprefix(inside).startswith(NEEDED)]
        sources.extractall(folder, wanted, filter="data")
    return folder / inside

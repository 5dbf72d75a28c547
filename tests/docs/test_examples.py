"""The examples in docstrings are run and print what they say."""

import doctest
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import weightscope

ROOT = Path(weightscope.__file__).parent
WITH_EXAMPLES = [
    pytest.param(
        path, id=path.relative_to(ROOT).as_posix(), marks=[pytest.mark.check] if path.parent.name == "runner" else []
    )
    for path in sorted(ROOT.rglob("*.py"))
    if ">>>" in path.read_text()
]


@pytest.fixture
def numpy_prints_as_it_does() -> Iterator[None]:
    with np.printoptions(precision=8, threshold=1000, edgeitems=3, linewidth=75, suppress=False):
        yield


@pytest.mark.usefixtures("numpy_prints_as_it_does")
@pytest.mark.parametrize("path", WITH_EXAMPLES)
def test_examples(path: Path) -> None:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    if "runner" in parts:
        pytest.importorskip("torch")
    if "atlas" in parts:
        pytest.importorskip("pyarrow", reason="pyarrow comes with the extra `atlas`")
    module = import_module(".".join(parts).removesuffix(".__init__"))
    result = doctest.testmod(module)  # what differs is printed, and pytest shows it
    assert result.attempted and not result.failed

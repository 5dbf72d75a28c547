"""Every result has a sentence, a notebook's view and a figure, and writes the files that it names."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import weightscope
import weightscope as ws
from weightscope.display import function_at
from weightscope.embedded import FOLDER
from weightscope.files import Files
from weightscope.results import Result
from weightscope.text.counts import load_counts

RESULTS: dict[str, Callable[[], Result]] = {
    "Audit": lambda: ws.audit("embedded", layers=[0], directions=0),
    "Comparison": lambda: ws.compare("embedded", "embedded"),
    "Lineage": lambda: ws.lineage("embedded", "embedded"),
    "Circuits": lambda: ws.circuits("embedded"),
    "BigramAuroc": lambda: ws.bigram_auroc("embedded", load_counts(FOLDER / "counts.npz"), sample=100),
    "PositionTerms": lambda: ws.first_layer("embedded").positions(),
}


def test_every_result_is_tried_here() -> None:
    sources = (path.read_text() for path in Path(weightscope.__file__).parent.rglob("*.py"))
    assert {name for text in sources for name in re.findall(r"^class (\w+)\(.*\bResult\):", text, re.M)} == {*RESULTS}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_says_shows_draws_and_writes_itself(name: str) -> None:
    result = RESULTS[name]()
    assert type(result).__name__ == name and repr(result).startswith(f"{name}(")
    assert result.lead.endswith(".") and "nan" not in result.lead.split()
    html = result._repr_html_()
    assert "<table" in html and result.lead.split()[0] in html
    assert isinstance(result.plot(), Figure)
    assert result.provenance.envelope(result.lead)["sources"][0]["name"] == "embedded"
    if not result.PAGE:
        return
    assert callable(function_at(result.PAGE))
    files = Files()
    result.write_files(files)
    written = set(files.contents)
    assert {*result.TABLES} - {"directions.json"} <= written and "report.html" in written

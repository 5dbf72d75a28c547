"""Every result has a sentence, a notebook's view and a figure, and writes the files that it names."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from markupsafe import escape
from matplotlib.figure import Figure

import weightscope
import weightscope as ws
from tests.support.bigram_counts import embedded_counts
from tests.support.tiny_models import fixture
from tests.support.two_layers import TWO_LAYERS
from weightscope.checkpoint.provenance import Provenance
from weightscope.core.files import Files
from weightscope.core.results import Result
from weightscope.core.tables import Column, Table
from weightscope.heads.detok.kernels import position_kernels
from weightscope.heads.norms.measure import study_norms
from weightscope.heads.outliers.measure import study_outliers
from weightscope.heads.sinks.bias import TextSizes, sink_bias
from weightscope.heads.sinks.mechanisms import read_inputs, sink_mechanisms
from weightscope.model.text.sequences import read_sentences, read_texts
from weightscope.runner.runner import Study

MODEL = ws.open_model(TWO_LAYERS)
RESULTS: dict[str, Callable[[], Result]] = {
    "Audit": lambda: ws.audit(TWO_LAYERS, layers=[0], directions=0),
    "Comparison": lambda: ws.compare(TWO_LAYERS, TWO_LAYERS),
    "Lineage": lambda: ws.lineage(TWO_LAYERS, TWO_LAYERS),
    "Same": lambda: ws.same(TWO_LAYERS, TWO_LAYERS),
    "Learned": lambda: ws.learned(TWO_LAYERS, TWO_LAYERS),
    "Circuits": lambda: ws.circuits(TWO_LAYERS),
    "BigramAuroc": lambda: ws.bigram_auroc(TWO_LAYERS, embedded_counts(), sample=100),
    "PositionTerms": lambda: ws.first_layer(TWO_LAYERS).positions(),
    "PositionKernels": lambda: position_kernels(fixture("llama").model),
}
STUDIES: dict[str, Callable[[], Study]] = {  # they run the model
    "NormAnalysis": lambda: study_norms(MODEL, read_texts(), 2, 16),
    "OutlierAnalysis": lambda: study_outliers(MODEL, read_sentences(), 3, 2, 16),
    "SinkBias": lambda: sink_bias(MODEL, read_texts(), TextSizes(2, 16, 1)),
    "SinkMechanisms": lambda: sink_mechanisms(ws.open_runner(MODEL), read_inputs(MODEL, n=2, length=16)),
}


def test_every_result_is_tried_here() -> None:
    sources = "\n".join(path.read_text() for path in Path(weightscope.__file__).parent.rglob("*.py"))
    # Those of `without` have no figure and no page, or a site of their own: tests/pairs has theirs.
    without = {"Study", "Verification", "Atlas", "Card", "Identity"}
    for base, tried in {"Result": {*RESULTS, *without}, "Study": {*STUDIES}}.items():
        assert {*re.findall(rf"^class (\w+)\(.*\b{base}\):", sources, re.M)} == tried


@pytest.mark.parametrize("name", [*RESULTS, *(pytest.param(name, marks=pytest.mark.check) for name in STUDIES)])
def test_a_result_says_shows_draws_and_writes_itself(name: str) -> None:
    if name in STUDIES:
        pytest.importorskip("transformers", reason="the runner needs the extra `runner`")
    result = (RESULTS | STUDIES)[name]()
    assert type(result).__name__ == name and repr(result).startswith(f"{name}(")
    assert result.lead.endswith(".") and "nan" not in result.lead.split()
    html = result._repr_html_()
    assert "<table" in html and html.startswith(f"<p>{escape(result.lead)}")
    assert isinstance(result.plot(), Figure)
    source = "llama" if name == "PositionKernels" else TWO_LAYERS  # which has position embeddings
    assert result.provenance.envelope(result.lead)["sources"][0]["name"].endswith(source)
    if not result.PAGE:
        return
    assert callable(result.function_at(result.PAGE))
    files = Files()
    result.write_files(files)
    written = set(files.contents)
    if isinstance(result, Study):
        assert result.source in result.lead and all(line in result.lead for line in result.printed()[:1])
    where_shown = {f"directions.{kind}" for kind in ("json", "csv", "npz")}
    where_shown |= {name for name, content_of in result.TABLES.items() if content_of(result) is None}
    assert {*result.TABLES} - where_shown <= written and "report.html" in written


@dataclass(frozen=True, eq=False, repr=False)
class Counted(Result):
    """A result that says nothing about its JSON."""

    TABLES: ClassVar = {
        "heads.csv": lambda counted: Table([Column("head", [0, 1]), Column("size", [0.5, np.nan])]),
        "sizes.npz": lambda counted: {"size": np.ones(2)},
        "kinds.json": lambda counted: {"copying": np.int64(1), "largest": np.inf},
        "absent.csv": lambda counted: None,
    }
    lead = "Two heads were counted."
    provenance: Provenance = field(default_factory=Provenance)


def test_a_new_result_has_a_json_by_default() -> None:
    result = Counted()
    envelope = result.provenance.envelope("Two heads were counted.")
    assert result.as_json() == envelope | {
        "heads": [{"head": 0, "size": 0.5}, {"head": 1, "size": None}],
        "kinds": {"copying": 1, "largest": "inf"},
    }


def test_a_figure_of_one_panel_goes_into_the_callers_axes() -> None:
    """Beside another plot of the caller's, whose style and whose other axes stay as they were."""
    figure = Figure(figsize=(8, 4))
    left, right = figure.subplots(1, 2)
    right.plot([0, 1])
    assert ws.same(MODEL, MODEL).plot(ax=left) is figure
    assert left.collections and left.get_legend() and not figure.legends and len(right.lines) == 1
    auroc = ws.bigram_auroc(MODEL, embedded_counts(), sample=100)
    auroc.plot(ax=right)
    assert right.get_legend() and len(figure.axes) == 2
    figure.savefig(io.BytesIO())
    learned = ws.learned(MODEL, MODEL)
    assert learned.plot(ax=figure.add_subplot(3, 1, 3)) is figure
    assert len(ws.audit(MODEL, directions=0).plot().axes) == 12  # nothing is left for the next


def test_a_figure_of_several_panels_refuses_one_axes() -> None:
    axis = Figure().subplots()
    with pytest.raises(ValueError, match=r"has 6 panels and does not fit into one Axes; leave out `ax`"):
        ws.audit(MODEL, directions=0).plot(ax=axis)
    with pytest.raises(TypeError, match="ax is 3, of type int; expected a matplotlib Axes"):
        ws.same(MODEL, MODEL).plot(ax=3)
    assert not axis.has_data()


@pytest.mark.check
def test_a_figure_of_one_panel_leaves_the_callers_notes_alone() -> None:
    pytest.importorskip("transformers", reason="the runner needs the extra `runner`")
    outer = Figure(figsize=(8, 4), layout="constrained")
    left, right = (part.subplots() for part in outer.subfigures(1, 2))
    note = left.annotate("mine", (0.5, 0.5), (3, 4), textcoords="offset points")
    STUDIES["OutlierAnalysis"]().plot(ax=right)
    assert right.lines and note.get_visible() and note.xyann == (3, 4)

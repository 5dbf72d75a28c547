"""How results show themselves: arrays by their shapes, a notebook's HTML, and which function draws or writes which."""

from base64 import b64encode
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from reprlib import Repr
from typing import Any

from markupsafe import Markup

from weightscope.tables import templates

# Results are data and import no figure and no page. These are imported when a result is drawn or written.
DRAWN_BY = {
    "spectra": "attention.figures:spectrum_figure",
    "Audit": "audits.figures:head_maps",
    "Comparison": "comparisons.figures:changes",
    "Circuits": "circuitry.figures:diagram",
    "Lineage": "ancestry.figures:lineage_figure",
    "BigramAuroc": "detokenization.figures:auroc_figure",
    "PositionTerms": "detokenization.figures:position_figure",
}
WRITTEN_BY = {
    "Audit": "audits.page:write_audit_page",
    "Comparison": "comparisons.page:write_comparison_page",
    "Circuits": "circuitry.page:write_report",
    "Lineage": "ancestry.page:write_lineage_page",
    "BigramAuroc": "detokenization.page:write_auroc_page",
}


def drawing(result: str) -> Callable[..., Any]:
    """The function that draws a kind of result."""
    return _function(DRAWN_BY[result])


def report(result: str) -> Callable[..., Any]:
    """The function that writes the page of a kind of result."""
    return _function(WRITTEN_BY[result])


def _function(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    function: Callable[..., Any] = getattr(import_module(f"weightscope.{module}"), name)
    return function


def notebook(lead: str, *tables: Any, picture: bytes = b"") -> str:
    """A result as a notebook's HTML: a sentence, a picture where there is one, and tables."""
    html = [Markup(table._repr_html_()) for table in tables]
    template = templates().get_template("notebook.html")
    return template.render(lead=lead, tables=html, picture=b64encode(picture).decode())


class ShowsShapes:
    """Base of dataclasses that hold arrays: their repr shows the shapes of the arrays.

    Arrays cannot be compared to one truth value, so these classes are declared with `@dataclass(eq=False, repr=False)`:
    an object equals only itself, and can be a key.
    """

    def __repr__(self: Any) -> str:
        values = (f"{field.name}={SHAPES.repr(getattr(self, field.name))}" for field in fields(self) if field.repr)
        return f"{type(self).__name__}({', '.join(values)})"


class _Shapes(Repr):
    """Short reprs; the shape of whatever has one."""

    def repr1(self, x: Any, level: int) -> str:
        shape = getattr(x, "shape", ())
        return str(tuple(shape)) if shape else super().repr1(x, level)


SHAPES = _Shapes()

"""How objects show themselves: arrays by their shapes, and a notebook's HTML."""

from base64 import b64encode
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from reprlib import Repr
from typing import Any

from markupsafe import Markup

from weightscope.tables import templates

SPECTRA = "attention.figures:spectrum_figure"  # draws singular values of maps by name


def function_at(place: str) -> Callable[..., Any]:
    """The function at "module:function" of weightscope: figures and pages are imported when they are needed."""
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

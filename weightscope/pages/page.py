"""One self-contained HTML page: text, figures and tables, no network, light and dark, wide and narrow."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from markupsafe import Markup

from weightscope.folder import Files
from weightscope.pages.style import Drawing
from weightscope.tables import Table, templates


@dataclass(frozen=True)
class Figure:
    """A drawing and what it says, formulas between dollar signs; `of` is the model that its numbers are of."""

    drawing: Drawing
    caption: str
    of: str = ""

    def html(self) -> str:
        """The drawing as it is, since it was made here, and the caption as prose."""
        svg = Markup(self.drawing.svg[self.drawing.svg.index("<svg") :])  # HTML does not take the XML prologue
        return templates().get_template("figure.html").render(svg=svg, drawing=self.drawing, figure=self)


@dataclass(frozen=True)
class Filed:
    """A table, and the CSV beside the page that has its rows too, maybe among others and with more columns."""

    table: Table
    file: str

    def html(self) -> str:
        """The table, with a link to the file."""
        return self.table.html(file=self.file)


class Part(Protocol):
    """What a section shows: a table, a figure, a list of findings."""

    def html(self) -> str:
        """Its markup, all that came out of a file escaped."""


@dataclass(frozen=True)
class Section:
    """A heading, a paragraph or none, and figures, tables and findings in order.

    Formulas stand between dollar signs in the paragraph, and in captions (`weightscope.mathml`).
    """

    title: str
    text: str = ""
    parts: Sequence[Part] = ()


def write_page(
    files: Files,
    name: str,
    title: str,
    lead: str,
    sections: Sequence[Section] = (),
    caveats: Sequence[str] = (),
    of: str = "",
) -> None:
    """Write a page; every name and token in it is shown as text.

    Parameters
    ----------
    files : Files
    name : str
        Of the file.
    title, lead : str
        What it is, and what it says in a sentence or two.
    sections : sequence of Section
    caveats : sequence of str
        What the numbers leave out.
    of : str
        The model, which every figure's caption names: a figure is read without its page too.

    Raises
    ------
    CheckpointError
        The file cannot be written.
    """
    whole = [replace(section, parts=[_of(part, of) for part in section.parts]) for section in sections]
    write_template(files, name, "page.html", title=title, lead=lead, sections=whole, caveats=caveats)


def _of(part: Part, model: str) -> Part:
    return replace(part, of=part.of or model) if isinstance(part, Figure) else part


def write_template(files: Files, name: str, template: str, **values: Any) -> None:
    """Write what a template of this folder makes of values."""
    files.text(name, templates().get_template(template).render(values))

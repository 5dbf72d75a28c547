"""One self-contained HTML page: text, figures and tables, no network, light and dark, wide and narrow."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from markupsafe import Markup

from weightscope.folder import Files
from weightscope.tables import Table, templates


@dataclass(frozen=True)
class Figure:
    """A drawing and what it says, formulas between dollar signs."""

    svg: str
    caption: str

    def html(self) -> str:
        """The drawing as it is, since it was made here, and the caption as prose."""
        drawing = Markup(self.svg[self.svg.index("<svg") :])  # HTML does not take the XML prologue
        return templates().get_template("figure.html").render(drawing=drawing, caption=self.caption)


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

    Raises
    ------
    CheckpointError
        The file cannot be written.
    """
    write_template(files, name, "page.html", title=title, lead=lead, sections=sections, caveats=caveats)


def write_template(files: Files, name: str, template: str, **values: Any) -> None:
    """Write what a template of this folder makes of values."""
    files.text(name, templates().get_template(template).render(values))

"""One self-contained HTML page: text, figures and tables, no network, light and dark.

Next to each page lies its JSON, with every number that the page shows: report.json of report.html.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Protocol

from markupsafe import Markup

from weightscope.checkpoint.provenance import Provenance
from weightscope.core.files import Files
from weightscope.core.progress import phase
from weightscope.core.tables import Table, templates
from weightscope.report.pages.style import Drawing


@dataclass(frozen=True)
class Figure:
    """A drawing with its caption (formulas between dollar signs) and the model it shows."""

    drawing: Drawing
    caption: str
    model: str = ""

    def html(self) -> str:
        """The SVG unescaped, since it was made here, and the caption."""
        source = self.drawing.svg
        svg = Markup(source[source.index("<svg") :])  # HTML does not allow the XML prologue
        template = templates().get_template("figure.html")
        return template.render(svg=svg, drawing=self.drawing, figure=self)

    def as_json(self) -> dict[str, Any]:
        """Its entry in the page's JSON; the files have the numbers that are drawn."""
        drawing = {"description": self.drawing.description, "files": list(self.drawing.files)}
        return {"caption": self.caption, "model": self.model, **drawing}


@dataclass(frozen=True)
class Filed:
    """A table, and the CSV file next to the page that contains its rows, if one does."""

    table: Table
    file: str
    changed: int | None = None  # rows that changed, which come first; a switch shows the others

    def html(self) -> str:
        """The table, with a link to the file."""
        return self.table.html(file=self.file, changed=self.changed)

    def as_json(self) -> dict[str, Any]:
        """Its entry in the page's JSON."""
        changed = {} if self.changed is None else {"changed": self.changed}
        return {**self.table.as_json(), "file": self.file, **changed}


@dataclass(frozen=True)
class Terms:
    """A list of terms and what they mean; large, the numbers below a page's heading."""

    rows: Sequence[tuple[object, str]]
    large: bool = False

    @classmethod
    def of_columns(cls, table: Table) -> "Terms":
        """The columns of a table that have a meaning."""
        explained = [column for column in table.columns if column.meaning]
        return cls([(column.symbol or column.name, column.meaning) for column in explained])

    def html(self) -> str:
        """A description list, formulas as in `core.formulas`."""
        html: str = templates().get_template("terms.html").render(terms=self)
        return html

    def as_json(self) -> dict[str, Any]:
        """Its entry in the page's JSON: a table."""
        return Table.of_rows(("term", "meaning"), self.rows).as_json()


class Shown(Protocol):
    """A part of a section: a table, a figure, a list of findings."""

    def html(self) -> str:
        """Its markup; text from a checkpoint is escaped."""

    def as_json(self) -> Any:
        """Its entry in the page's JSON."""


@dataclass(frozen=True)
class Section:
    """A heading, an optional paragraph (formulas as in `core.formulas`), then its parts."""

    title: str
    text: str = ""
    parts: Sequence[Shown] = ()

    def as_json(self) -> dict[str, Any]:
        """Its entry in the page's JSON."""
        parts = [part.as_json() for part in self.parts]
        return {"title": self.title, "text": self.text, "parts": parts}


Draw = Callable[[Files, Any], Iterable[Section]]  # draws a result's figures, yields its sections


def report(title: str) -> Callable[[Draw], Callable[[Files, Any], None]]:
    """Make a function that draws a result write its report.html; `title` is a format."""

    def decorate(sections_of: Draw) -> Callable[[Files, Any], None]:
        @wraps(sections_of)
        @phase("drawing figures")
        def write(files: Files, result: Any) -> None:
            sections = sections_of(files, result)
            about = {"model": result.model, "provenance": result.provenance}
            write_page(files, "report.html", title.format(result), result.lead, sections, **about)

        return write

    return decorate


def write_page(
    files: Files,
    name: str,
    title: str,
    lead: str,
    sections: Iterable[Section] = (),
    caveats: Sequence[str] = (),
    model: str = "",
    provenance: Provenance | None = None,
    numbers: Mapping[str, float] | None = None,
) -> None:
    """Write a page about a model, named in each figure's caption; its JSON has `numbers` too."""

    def captioned(part: Shown) -> Shown:
        return replace(part, model=part.model or model) if isinstance(part, Figure) else part

    sections = [replace(each, parts=[*map(captioned, each.parts)]) for each in sections]
    in_json = {"sections": [section.as_json() for section in sections], **(numbers or {})}
    write_template(
        files,
        name,
        "page.html",
        title=title,
        lead=lead,
        provenance=provenance,
        caveats=caveats,
        sections=sections,
        numbers=in_json,
    )


def write_template(
    files: Files,
    name: str,
    template: str,
    *,
    title: str,
    lead: str,
    provenance: Provenance | None,
    caveats: Sequence[str] = (),
    sections: Sequence[Section] = (),
    numbers: Mapping[str, Any] | None = None,
    **values: Any,
) -> None:
    """Render a template of this folder; write it with its JSON (sections, or `numbers`).

    The end of the page shows the result's origin. A lead that begins with the title goes on after
    it.
    """
    if numbers is None:
        numbers = {"sections": [section.as_json() for section in sections]}
    made = (provenance or Provenance()).envelope(lead)
    about = {"title": title, "caveats": list(caveats)}
    files.json(name.replace(".html", ".json"), {**made, **about, **numbers}, indent=None)
    page = templates().get_template(template)
    rest = lead.removeprefix(title)
    lead = rest.lstrip(".: ") if rest.startswith((". ", ": ")) else lead
    files.text(name, page.render(values, **about, lead=lead, made=made, sections=sections))

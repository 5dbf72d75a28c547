"""One self-contained HTML page: text, figures and tables, no network, light and dark, wide and
narrow.

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
        # HTML does not allow the XML prologue
        svg = Markup(self.drawing.svg[self.drawing.svg.index("<svg") :])
        return (
            templates()
            .get_template("figure.html")
            .render(svg=svg, drawing=self.drawing, figure=self)
        )

    def as_json(self) -> dict[str, Any]:
        """Its entry in the page's JSON; the files have the numbers that are drawn."""
        drawing = {"description": self.drawing.description, "files": list(self.drawing.files)}
        return {"caption": self.caption, "model": self.model, **drawing}


@dataclass(frozen=True)
class Filed:
    """A table, and the CSV file next to the page that contains its rows, if one does."""

    table: Table
    file: str
    changed: int | None = None  # rows of what changed, which come first; a switch shows the others

    def html(self) -> str:
        """The table, with a link to the file."""
        return self.table.html(file=self.file, changed=self.changed)

    def as_json(self) -> dict[str, Any]:
        """Its entry in the page's JSON."""
        changed = {} if self.changed is None else {"changed": self.changed}
        return {**self.table.as_json(), "file": self.file, **changed}


class Part(Protocol):
    """What a section can show: a table, a figure, a list of findings."""

    def html(self) -> str:
        """Its markup; text from a checkpoint is escaped."""

    def as_json(self) -> Any:
        """Its entry in the page's JSON."""


@dataclass(frozen=True)
class Section:
    """A heading, an optional paragraph, then figures, tables and findings;
    `weightscope.core.formulas` has formulas.
    """

    title: str
    text: str = ""
    parts: Sequence[Part] = ()

    def as_json(self) -> dict[str, Any]:
        """Its entry in the page's JSON."""
        return {
            "title": self.title,
            "text": self.text,
            "parts": [part.as_json() for part in self.parts],
        }


def report(
    title: str,
) -> Callable[[Callable[[Files, Any], Iterable[Section]]], Callable[[Files, Any], None]]:
    """Make a function that draws a result's figures and gives its sections write report.html;
    `title` is a format.
    """

    def decorate(
        sections_of: Callable[[Files, Any], Iterable[Section]],
    ) -> Callable[[Files, Any], None]:
        @wraps(sections_of)
        @phase("drawing figures")
        def write(files: Files, result: Any) -> None:
            sections, about = (
                sections_of(files, result),
                {"model": result.model, "provenance": result.provenance},
            )
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
    """Write a page about a model, whose name every figure's caption has; its JSON has `numbers`
    beside the sections.
    """
    sections = [
        replace(section, parts=[_captioned(part, model) for part in section.parts])
        for section in sections
    ]
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


def _captioned(part: Part, model: str) -> Part:
    return replace(part, model=part.model or model) if isinstance(part, Figure) else part


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
    """Render a template of this folder and write it with its JSON, which has the sections, or
    `numbers` instead.

    The end of the page shows where the result comes from.
    """
    if numbers is None:
        numbers = {"sections": [section.as_json() for section in sections]}
    made, about = (
        (provenance or Provenance()).envelope(lead),
        {"title": title, "caveats": list(caveats)},
    )
    files.json(name.replace(".html", ".json"), {**made, **about, **numbers}, indent=None)
    files.text(
        name,
        templates()
        .get_template(template)
        .render(values, **about, lead=lead, made=made, sections=sections),
    )

"""One self-contained HTML page: text, figures and tables, no network, light and dark, wide and narrow."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from weightscope.escape import printable
from weightscope.folder import Files, write_text
from weightscope.tables import Table


@dataclass(frozen=True)
class Figure:
    """A drawing and what it says."""

    svg: str
    caption: str

    @property
    def drawing(self) -> Markup:
        """The SVG without its XML prologue, which HTML does not take. It was drawn here, so it is not escaped."""
        return Markup(self.svg[self.svg.index("<svg") :])


@dataclass(frozen=True)
class Section:
    """A heading, a paragraph or none, and figures and tables in order."""

    title: str
    text: str = ""
    parts: Sequence[Table | Figure] = ()


def _shown(value: Any) -> Any:
    """What stands in for a value in a template: names and tokens with nothing in them that is obeyed."""
    return value if isinstance(value, Markup) else printable(value)


TEMPLATES = Environment(
    loader=PackageLoader("weightscope", "pages"), autoescape=True, finalize=_shown, trim_blocks=True, lstrip_blocks=True
)
TEMPLATES.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}  # of the filter `tojson`
TEMPLATES.tests["figure"] = lambda part: isinstance(part, Figure)


def write_page(files: Files | Path, name: str, title: str, lead: str, sections: Sequence[Section] = ()) -> None:
    """Write a page; every name and token in it is shown as text.

    Parameters
    ----------
    files : Files
    name : str
        Of the file.
    title, lead : str
        What it is, and what it says in a sentence or two.
    sections : sequence of Section

    Raises
    ------
    CheckpointError
        The file cannot be written.
    """
    write_template(files, name, "page.html", title=title, lead=lead, sections=sections)


def write_template(files: Files | Path, name: str, template: str, **values: Any) -> None:
    """Write what a template of this folder makes of values."""
    text = TEMPLATES.get_template(template).render(values)
    if isinstance(files, Files):
        files.text(name, text)
    else:
        write_text(files / name, text)

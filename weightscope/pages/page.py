"""One self-contained HTML page: text, figures and tables, no network, light and dark, wide and narrow."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from weightscope.escape import printable
from weightscope.folder import write_text
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
TEMPLATES.tests["figure"] = lambda part: isinstance(part, Figure)


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The page as HTML; every name and token in it is shown as text.

    Parameters
    ----------
    title, lead : str
        What it is, and what it says in a sentence or two.
    sections : sequence of Section
    """
    return TEMPLATES.get_template("page.html").render(title=title, lead=lead, sections=sections)


def write_page(path: Path, title: str, lead: str, sections: Sequence[Section]) -> None:
    """Write the page; see `page`.

    Raises
    ------
    CheckpointError
        The file cannot be written.
    """
    write_text(path, page(title, lead, sections))

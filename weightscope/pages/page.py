"""One self-contained HTML page: text, figures and tables, no network, light and dark, wide and narrow."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from weightscope.errors import printable
from weightscope.folder import write_text

# Nothing is ever fetched, whatever a name in a checkpoint tries.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def _shown(text: object) -> str:
    """Text as HTML that shows it and obeys nothing in it."""
    return escape(printable(text))


@dataclass(frozen=True)
class Table:
    """A table; its columns sort on a click. Cells are escaped here, whatever is in them."""

    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""

    def html(self) -> str:
        head = "".join(f'<th scope="col"><button>{_shown(name)}</button></th>' for name in self.header)
        body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in self.rows)
        caption = f"<caption>{_shown(self.caption)}</caption>" if self.caption else ""
        return f'<div class="wide"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


@dataclass(frozen=True)
class Link:
    """A cell that leads to another page, by its path from this one."""

    path: str
    text: str


def _cell(value: Any) -> str:
    if isinstance(value, Link):
        return f'<td><a href="{escape(quote(value.path))}">{_shown(value.text)}</a></td>'
    if isinstance(value, (int, np.integer)):
        return f'<td class="number" data-value="{value}">{value}</td>'
    if isinstance(value, (float, np.floating)):
        shown = "" if np.isnan(value) else f"{value:.4g}"
        return f'<td class="number" data-value="{float(value):.17g}">{shown}</td>'
    return f"<td>{_shown(value)}</td>"


@dataclass(frozen=True)
class Figure:
    """A drawing and what it says."""

    svg: str
    caption: str

    def html(self) -> str:
        drawing = self.svg[self.svg.index("<svg") :]  # without the XML prologue, which HTML does not take
        return f'<figure><div class="wide">{drawing}</div><figcaption>{_shown(self.caption)}</figcaption></figure>'


@dataclass(frozen=True)
class Section:
    """A heading, a paragraph or none, and figures and tables in order."""

    title: str
    text: str = ""
    parts: Sequence[Table | Figure] = field(default_factory=tuple)

    def html(self) -> str:
        text = f"<p>{_shown(self.text)}</p>" if self.text else ""
        return f"<section><h2>{_shown(self.title)}</h2>{text}{''.join(part.html() for part in self.parts)}</section>"


def write_page(path: Path, title: str, lead: str, sections: Sequence[Section]) -> None:
    """Write the page.

    Parameters
    ----------
    path : Path
    title, lead : str
        What it is, and what it says in a sentence or two.
    sections : sequence of Section

    Raises
    ------
    CheckpointError
        The file cannot be written.
    """
    here = files("weightscope.pages")
    style, script = ((here / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    title, lead = _shown(title), _shown(lead)
    body = "\n".join(section.html() for section in sections)
    write_text(
        path,
        f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{title}</title><style>{style}</style></head>
<body><header><h1>{title}</h1><p class="lead">{lead}</p></header>
<main>
{body}
</main>
<footer>made by weightscope</footer>
<script>{script}</script></body></html>
""",
    )

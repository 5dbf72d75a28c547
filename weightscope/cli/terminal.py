"""Output of commands: results, headlines that --quiet hides, tables fitted to the terminal."""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from weightscope.core.progress import progress_hidden

if TYPE_CHECKING:
    from weightscope.checkpoint.checkpoint import Checkpoint
    from weightscope.core.files import OutputFolder
    from weightscope.core.tables import Table

QUIET = "weightscope.quiet"  # in click's context
UNBROKEN: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}  # names and paths
FAILED, UNDECIDED = 3, 4  # exit statuses: a gate or claim failed; nothing decides it


def _hush(context: click.Context, parameter: click.Parameter, quiet: bool) -> None:
    context.meta[QUIET] = quiet
    if quiet:
        context.with_resource(progress_hidden())


quiet_option: Callable[[Any], Any] = click.option(
    "--quiet",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_hush,
    help="Print only the result, or where it was written: no progress, no headlines.",
)


def is_quiet() -> bool:
    """True if the running command was given --quiet."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(QUIET))


def headline(sentence: object) -> None:
    """Print a sentence about the result, unless --quiet is given."""
    if not is_quiet():
        click.echo(fitted(str(sentence)))


def fitted(text: str) -> str:
    """Text for stdout; on a terminal, lines that are too wide break between words."""
    if not sys.stdout.isatty():
        return text
    width, lines = get_terminal_size().columns, []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines.append(fill(line, width, subsequent_indent=indent, **UNBROKEN))
    return "\n".join(lines)


def write_text(text: str, file: Path) -> None:
    """Write a file, completely or not at all."""
    from weightscope.core.files import new_file

    with new_file(file) as written:
        written.write(text.encode())


def print_json(value: Any) -> None:
    """Print a result as JSON."""
    click.echo(json.dumps(value, allow_nan=False))


def print_tables(lead: str, checkpoints: Sequence["Checkpoint"], **tables: "Table | Any") -> None:
    """Print a sentence, what was read and tables by name as one JSON object."""
    from weightscope.checkpoint.provenance import Provenance
    from weightscope.core.tables import Table, as_json

    records = {
        name: table.records() if isinstance(table, Table) else table
        for name, table in tables.items()
    }
    print_json(as_json(Provenance.of(*checkpoints).envelope(lead) | records))


def write_sarif(file: Path, *results: Any) -> None:
    """Write the findings of results, as --json prints them."""
    from weightscope.report.pages.sarif import sarif_log

    write_text(json.dumps(sarif_log(results), indent=1) + "\n", file)


def end_with(
    result: Any, out: Path | None, as_json: bool = False, page: str = "report.html"
) -> None:
    """Print a result as JSON, or its lines and tables and where its page is."""
    if as_json:
        print_json(result.as_json())
        return
    if out is None or not is_quiet():
        show(*result.printed())
    say_page(out, page)


def say_page(out: Path | None, page: str = "report.html") -> None:
    """Print where the page is, or which option writes one."""
    if out is None:
        headline("--out DIR writes the page, its figures and the tables.")
    else:
        click.echo(out / page)


def folder_for(
    kind: Any, out: Path | None, *more: str
) -> AbstractContextManager["OutputFolder | None"]:
    """The folder for a kind of result, to enter, or None; another's is refused before any work."""
    from weightscope.core.files import OutputFolder

    if out is None:
        return nullcontext()
    folder = OutputFolder(out, names=(*kind.FILES, *more))
    folder.refuse_foreign()
    return folder


def hand_over(
    result: Any, into: AbstractContextManager["OutputFolder | None"], as_json: bool
) -> None:
    """Write a result into its folder, if any, and print all of it, even with --quiet."""
    with into as folder:
        if folder is not None:
            result.write_files(folder)
    if as_json:
        print_json(result.as_json())
        return
    show(*result.printed())
    if folder is not None:
        click.echo(folder.path / "report.html")


class Listed(NamedTuple):
    """A table on a terminal, plain lines in a pipe or file."""

    table: "Table"
    lines: str

    def text(self) -> str:
        """The lines."""
        return self.lines


def show(*parts: "str | Table | Listed") -> None:
    """Print lines and tables: ruled and fitted on a terminal, plain columns in a pipe or file."""
    if not sys.stdout.isatty():
        click.echo("\n".join(part if isinstance(part, str) else part.text() for part in parts))
        return
    from rich.console import Console

    console = Console()
    for part in parts:
        if isinstance(part, str):
            click.echo(fitted(part))
        else:
            ruled = _ruled(part.table if isinstance(part, Listed) else part, console.width)
            click.echo(part.text()) if ruled is None else console.print(ruled)


TEXT = 16  # least width of a text column on a narrow terminal


def _ruled(table: "Table", width: int) -> Any:
    """The table with text folded to fit; None if the terminal is too narrow for its numbers."""
    from rich import box
    from rich.table import Table as Ruled
    from rich.text import Text

    gap = (0, 1, 0, 0)  # the box adds another space
    ruled, needed = Ruled(box=box.SIMPLE_HEAD, pad_edge=False, padding=gap), 0
    for column in table.columns:
        heading = column.heading.replace(" ", "\n") if column.is_numeric else column.heading
        cells = (*heading.split("\n"), *map(column.shown, column.values))
        longest = max(map(len, cells))
        needed += 2 + (longest if column.is_numeric else min(longest, TEXT))
        side: Any = "right" if column.is_numeric else "left"
        ruled.add_column(Text(heading), justify=side, overflow="fold", no_wrap=column.is_numeric)
    for row in table.rows():
        pairs = zip(table.columns, row, strict=True)
        ruled.add_row(*(Text(column.shown(cell)) for column, cell in pairs))
    has_numbers = any(column.is_numeric for column in table.columns)
    return None if has_numbers and needed > width else ruled

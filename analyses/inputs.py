"""What recipes share: the option --out, and the first available of several checkpoints."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

import weightscope as ws
from weightscope.cli.options import writable


def out_option(folder: str) -> Callable[..., Any]:
    """The option --out with a default folder."""
    return click.option(
        "--out", type=click.Path(file_okay=False, path_type=Path), default=folder, show_default=True, callback=writable,
        help="Folder for results.",
    )  # fmt: skip


def first_available(sources: Sequence[str], **options: str | None) -> ws.Model:
    """Open the first checkpoint that opens, and print why those before it do not. Raises the last one's error."""
    for source in sources[:-1]:
        try:
            return ws.open_model(source, **options)
        except ws.CheckpointError as error:
            click.echo(f"{error}; trying {sources[sources.index(source) + 1]}")
    return ws.open_model(sources[-1], **options)

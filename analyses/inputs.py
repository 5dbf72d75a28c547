"""What recipes share: where results go, and which of several checkpoints can be had."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

import weightscope as ws
from weightscope.cli.options import writable


def out_option(folder: str) -> Callable[..., Any]:
    """--out, with its default."""
    return click.option(
        "--out", type=click.Path(file_okay=False, path_type=Path), default=folder, show_default=True, callback=writable,
        help="Folder for results.",
    )  # fmt: skip


def first_available(sources: Sequence[str], **options: str | None) -> ws.Model:
    """The first of several checkpoints that opens; what keeps the others from it is said in a line each.

    Raises
    ------
    CheckpointError
        None opens: the last one's error.
    """
    for source in sources[:-1]:
        try:
            return ws.open_model(source, **options)
        except ws.CheckpointError as error:
            click.echo(f"{error}; trying {sources[sources.index(source) + 1]}")
    return ws.open_model(sources[-1], **options)

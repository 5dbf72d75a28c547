"""What the analyses run on when nothing else is asked for: a checkpoint and texts that can be had here."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

import weightscope as ws
from weightscope.cli.options import writable
from weightscope.text.inputs import read_texts


def out_option(folder: str) -> Callable[..., Any]:
    """--out, with its default."""
    return click.option(
        "--out", type=click.Path(file_okay=False, path_type=Path), default=folder, show_default=True, callback=writable,
        help="Folder for results.",
    )  # fmt: skip


device_option = click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
    help="Where the model runs and the heavy products are computed.",
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


def documents(paths: Sequence[str | Path]) -> list[str]:
    """The documents of `paths`, or what `read_texts` takes without any."""
    return read_texts(paths).texts

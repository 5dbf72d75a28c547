"""Which architectures are read, and how one that is not known yet is adopted."""

from pathlib import Path
from typing import Any

import click

from weightscope.cli.options import csv_option, families_option, with_source
from weightscope.cli.terminal import headline, show, write_csv
from weightscope.errors import CheckpointError, printable


@click.command("families")
@csv_option
@click.option("--new", is_flag=True, help="What the installed transformers has that the census has not (PyTorch).")
@families_option
def families_command(csv_file: Path | None, new: bool, families: str | None) -> None:
    """Every architecture that is read: its row, the model_types that it lists, the stack, and what is special.

    The last line says how many attention stacks of all that transformers builds are read exactly. With --new the
    architectures of the installed transformers that were not counted are tried, each on tiny random models.
    """
    from weightscope.adoption.record import standing
    from weightscope.families.listing import families_table

    if new:
        _newer()
        return
    table = families_table(families)
    if csv_file is not None:
        write_csv(table, csv_file)
    show(table)
    headline(standing())


def _newer() -> None:
    """A line for every attention stack of every type that the census has not."""
    from weightscope.runner.loading import import_torch

    import_torch()
    from weightscope.adoption.adopting import PROOF
    from weightscope.adoption.census import newcomers, run

    kinds = newcomers()
    if not kinds:
        click.echo(f"{PROOF} has no model_type that the census has not")
    for row in run(kinds):
        click.echo(" ".join(filter(None, (f"{row.type}:", row.verdict, row.kind, row.stack, row.reason))))


@click.command("adopt")
@with_source
@click.option("--save", is_flag=True, help="Keep the rows where every command finds them.")
def adopt_command(named: Any, source: str, save: bool) -> None:
    """Find rows for an architecture that is not known, and prove them (PyTorch).

    Tiny random models are built from the checkpoint's own config by transformers' class; a row is kept if its attention
    and its outputs are the eager model's to 1e-5 at two sizes, near and far, and if it fits the checkpoint's own
    tensors. Code that comes with a checkpoint is never run.
    """
    from weightscope.runner.loading import import_torch

    import_torch()
    from weightscope.adoption.adopting import PROOF, adopt
    from weightscope.adoption.printed import as_python
    from weightscope.families.own_rows import own_folder
    from weightscope.families.stored import file_of
    from weightscope.writing import new_file

    checkpoint = named(source).checkpoint()
    adopted = adopt(checkpoint)
    several = f"these {len(adopted.rows)} rows" if len(adopted.rows) > 1 else "this row"
    click.echo(f"{printable(checkpoint.name)} is read by {several}, proved against {PROOF}:")
    for row in adopted.rows:
        click.echo(printable_lines(as_python(row)))
    for stack, why in adopted.refused.items():
        click.echo(printable(f"not read: {stack}: {why}"))
    if save:
        name = str(checkpoint.config.get("model_type"))
        if not name.replace("-", "_").replace(".", "_").isidentifier():
            raise CheckpointError(f"'{name}' cannot be the name of a file")
        file = own_folder() / f"{name}.json"
        with new_file(file) as written:
            written.write(file_of(adopted.rows, PROOF))
        click.echo(file)


def printable_lines(text: str) -> str:
    """Lines, each without what a terminal would act on."""
    return "\n".join(map(printable, text.splitlines()))

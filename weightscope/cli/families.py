"""Which architectures are read, and how one that is not known yet is adopted."""

from typing import Any

import click

from weightscope.cli.options import families_option, with_source
from weightscope.errors import CheckpointError, printable


@click.command("families")
@click.option("--csv", "as_csv", is_flag=True, help="Comma-separated values.")
@families_option
def families_command(as_csv: bool, families: str | None) -> None:
    """Every architecture that is read: its row, the model_types that it lists, the stack, and what is special."""
    from weightscope.families.listing import families_table

    table = families_table(families)
    click.echo(table.csv() if as_csv else table.text(), nl=not as_csv)


@click.command("adopt")
@with_source
@click.option("--save", is_flag=True, help="Keep the row where every command finds it.")
def adopt_command(named: Any, source: str, save: bool) -> None:
    """Find a row for an architecture that is not known, and prove it (PyTorch).

    A tiny random model is built from the checkpoint's config by transformers' own class; a row is kept if its attention
    and its outputs are the eager model's at two sizes, near and far. Code that comes with a checkpoint is never run.
    """
    from weightscope.runner.loading import import_torch

    import_torch()
    from weightscope.adoption.adopting import PROOF, adopt, as_python
    from weightscope.families.own_rows import own_folder
    from weightscope.families.stored import file_of
    from weightscope.writing import new_file

    checkpoint = named(source).checkpoint()
    row = adopt(checkpoint)
    click.echo(f"{printable(checkpoint.name)} is read by this row, proved against {PROOF}:")
    click.echo(as_python(row))
    if save:
        if not row.name.replace("-", "_").replace(".", "_").isidentifier():
            raise CheckpointError(f"'{row.name}' cannot be the name of a file")
        file = own_folder() / f"{row.name}.json"
        with new_file(file) as written:
            written.write(file_of([row], PROOF))
        click.echo(file)

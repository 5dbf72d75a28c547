"""How a command ends when it cannot do what it was asked: one line on stderr, status 2."""

import sys
from typing import Any

import click

from weightscope.errors import CheckpointError
from weightscope.progress import progress_shown


class EndsInOneLine(click.Command):
    """A command that says in one line what is wrong with its input, or that memory ran out."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with progress_shown():
                return super().main(*args, **kwargs)
        except CheckpointError as error:
            problem = str(error)
        except MemoryError as error:  # NumPy's and CuPy's say how much was asked for
            problem = f"not enough memory: {(str(error).strip() or 'the system gave no more').splitlines()[0]}"
        click.echo(f"{self.name}: {problem}", err=True)
        sys.exit(2)


class Commands(EndsInOneLine, click.Group):
    """Several of them."""

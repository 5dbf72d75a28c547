"""The command line: parses, calls, reports. Everything heavy is imported by the command that needs it."""

import sys
from typing import Any

import click

from weightscope.cli.audits import audit_command, compare_command, inspect
from weightscope.cli.first_layer import bigrams, detok, neighbours, positions
from weightscope.errors import CheckpointError


class Commands(click.Group):
    """A group whose commands end a bad input with one line on stderr and status 2."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except CheckpointError as error:
            click.echo(f"weightscope: {error}", err=True)
            sys.exit(2)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="weightscope")
def main() -> None:
    """What a transformer checkpoint's attention heads are, from the weights alone.

    SOURCE is a folder, a .safetensors file, or a Hub id with optional @revision; `embedded` is the small GPT-2 that
    comes with weightscope.
    """


for command in (inspect, detok, audit_command, compare_command, neighbours, positions, bigrams):
    main.add_command(command)

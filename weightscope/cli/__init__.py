"""The command line: parses, calls, reports. Everything heavy is imported by the command that needs it."""

import click

import weightscope
from weightscope.cli.audits import audit_command, compare_command, reference_command
from weightscope.cli.circuits import circuits_command
from weightscope.cli.command import Commands
from weightscope.cli.completing import completion_command
from weightscope.cli.families import adopt_command, families_command
from weightscope.cli.first_layer import bigrams, detok, neighbours, positions
from weightscope.cli.inspection import inspect
from weightscope.cli.studies import norms, outliers, sinks


@click.group("weightscope", cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(weightscope.__version__, prog_name="weightscope")
def main() -> None:
    """What a transformer checkpoint's attention heads are, from the weights alone.

    SOURCE is a folder, a .safetensors or .gguf file, or a Hub id with optional @revision; `embedded` is the small GPT-2
    that comes with weightscope.
    """


for command in (
    inspect, audit_command, compare_command, reference_command, circuits_command, detok, neighbours, positions, bigrams,
    norms, outliers, sinks, families_command, adopt_command, completion_command,
):  # fmt: skip
    main.add_command(command)

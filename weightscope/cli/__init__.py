"""The command line. Each command imports what is heavy when it runs, so that --help stays fast."""

import click

import weightscope
from weightscope.cli.audit import audit_command, compare_command, reference_command
from weightscope.cli.command import FIRST, Commands, epilog_of
from weightscope.cli.first_layer import bigrams, detok, neighbours, positions
from weightscope.cli.inspection import adopt_command, draft_command, families_command, inspect
from weightscope.cli.lineage import fingerprint_command, lineage_command
from weightscope.cli.options import completion_command
from weightscope.cli.studies import circuits_command, norms, outliers, sinks


@click.group(
    "weightscope", cls=Commands, epilog=epilog_of(FIRST), context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(weightscope.__version__, prog_name="weightscope")
def main() -> None:
    """Analyse the attention heads of a transformer checkpoint from its weights alone.

    SOURCE is a folder, a .safetensors or .gguf file, or a Hub id with optional @revision; `embedded` is a small GPT-2
    that ships with weightscope.
    """


for command in (
    inspect, audit_command, compare_command, lineage_command, fingerprint_command, reference_command,
    circuits_command, detok, neighbours, positions, bigrams, norms, outliers, sinks, families_command, adopt_command,
    draft_command, completion_command,
):  # fmt: skip
    main.add_command(command)

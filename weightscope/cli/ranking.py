"""The command rank."""

from pathlib import Path
from typing import Any

import click

from weightscope.cli import options
from weightscope.cli.command import command
from weightscope.cli.terminal import headline, print_tables, show, write_text
from weightscope.pairs.rank import BY, TOOLS


@command(
    "Which matrices to train or merge, as a file for other tools.",
    [
        "weightscope rank embedded",
        "weightscope rank embedded --for peft --out adapter_config.json",
        "weightscope rank model/ --by snr --top 0.5 --for axolotl >> config.yaml",
        "weightscope rank tuned/ --by change --base model/ --for mergekit --out merge.yaml",
    ],
)
@click.argument("source", shell_complete=options.complete_source)
@click.option(
    "--by",
    type=click.Choice([*BY]),
    default="snr",
    show_default=True,
    help="The highest come first.",
)
@click.option(
    "--base",
    metavar="BASE",
    shell_complete=options.complete_source,
    help="Model that SOURCE was tuned from: for --by change, and for mergekit.",
)
@click.option(
    "--top",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.25,
    show_default=True,
    help="Share of the matrices of each role to choose.",
)
@click.option(
    "--for",
    "tool",
    type=click.Choice(TOOLS),
    help="Tool that reads the file; default: print the table.",
)
@options.file_to_write("--out", "-o", help="File to write; default: standard output.")
@options.file_to_write(
    "--csv", "csv_file", help="Also write every matrix with its score to this file."
)
@options.flag("--exact", "All singular values of matrices whose smaller side is above 2048 too.")
@options.tower
@options.families
@options.digest
@options.json
def rank_command(
    source: str,
    by: str,
    base: str | None,
    top: float,
    tool: str | None,
    out: Path | None,
    csv_file: Path | None,
    exact: bool,
    as_json: bool,
    **how: Any,
) -> None:
    """Rank the matrices of every layer within their role and choose the highest, from the weights
    alone.

    axolotl gets `unfrozen_parameters`, PEFT an adapter_config.json whose target_modules are the
    chosen ones, mergekit a merge that takes the chosen ones from SOURCE and everything else from
    BASE. One comment says what the choice rests on. Whether it trains better than random layers is
    another question; see the documentation.
    """
    from weightscope.checkpoint.provenance import source_of
    from weightscope.model.sources import Source
    from weightscope.pairs.rank.rank import rank

    if tool == "mergekit" and base is None:
        why = "everything that is not chosen is taken from it"
        raise click.UsageError(f"--for mergekit needs --base: {why}")
    if by == "change" and base is None:
        raise click.UsageError("--by change needs --base, the model that SOURCE was tuned from")
    if out is not None and tool is None:
        raise click.UsageError("--out needs --for, the tool that reads the file")
    if as_json and tool is not None:
        raise click.UsageError("--json prints the table, and --for a tool's file; ask for one")
    names = (source, base) if base is not None else (source,)
    opened = {name: options.opened_among(Source.named(name, **how)) for name in names}
    for model in opened.values():
        options.say_digests(source_of(model.checkpoint))
    ranking = rank(opened[source], by, top, opened[base] if base is not None else None, exact)
    if csv_file is not None:
        write_text(ranking.table.csv(), csv_file)
    if as_json:
        checkpoints = [model.checkpoint for model in opened.values()]
        print_tables(ranking.lead, checkpoints, matrices=ranking.table)
        return
    if tool is None:
        headline(ranking.lead)
        show(ranking.table)
        return
    text = ranking.written_for(tool)
    if out is None:
        click.echo(text, nl=False)
        return
    write_text(text, out)
    headline(ranking.lead)
    click.echo(out)

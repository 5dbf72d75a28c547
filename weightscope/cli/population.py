"""The command atlas."""

from pathlib import Path
from typing import Any

import click

from weightscope.cli import options
from weightscope.cli.command import command
from weightscope.cli.terminal import end_with


@command(
    "Map many checkpoints: families, trees, all heads.",
    [
        "weightscope atlas LIST.txt --out atlas/",
        "weightscope atlas LIST.txt --out atlas/ --resume --jobs 2",
        "weightscope atlas --out atlas/ --withdraw owner/name",
    ],
)
@click.argument(
    "listing",
    required=False,
    type=options.FILE,
    metavar="[LIST]",
)
@options.out
@options.flag("--resume", "Keep what an earlier run has finished; fetch only what has changed.")
@click.option(
    "--withdraw",
    multiple=True,
    metavar="NAME",
    help="Remove a checkpoint for good; may be repeated.",
)
@options.number(
    "--megabytes", "Attention weights to read of a checkpoint, in MB at 16 bits each.", 150
)
@options.number(
    "--prove", "Read relatives of up to so many MB whole, to prove which came first.", 100, least=0
)
@options.families
@options.json
@options.with_engine
def atlas_command(
    listing: Path | None,
    out: Path,
    resume: bool,
    withdraw: tuple[str, ...],
    megabytes: int,
    prove: int,
    families: str | None,
    as_json: bool,
    engine: Any,
) -> None:
    """Make an atlas of the checkpoints in LIST: a text file with one SOURCE per line.

    Of a large checkpoint some heads are read. Whatever cannot be read is a row of errors.csv. All
    heads are in heads.parquet (needs the extra atlas); index.html opens from the disk. Without
    LIST, an atlas is written again from its kept results, without withdrawn checkpoints.
    """
    from weightscope.pairs.atlas.atlas import AtlasOptions, make_atlas

    if listing is None and not withdraw:
        raise click.UsageError("LIST is missing; only --withdraw works without it")
    chosen = AtlasOptions(megabytes * 500_000, prove * 1_000_000, families, resume, withdraw)
    atlas = make_atlas(listing, out, engine, chosen)
    end_with(atlas, out, as_json, "index.html")

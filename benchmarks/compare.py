"""What changed between two runs of the benchmarks: `make bench-compare OLD=a.json NEW=b.json`.

Without OLD the new run is compared with the one that is kept of its processor.

It compares ratios, not seconds. A change counts if it exceeds three robust standard deviations between rounds, and 5 %
(25 % if a run had a single round). The exit status is 1 if a task became slower.
"""

import sys
from pathlib import Path

import click

from benchmarks.publish import KEPT
from benchmarks.results import comparison, load
from weightscope.core.errors import CheckpointError


@click.command()
@click.argument("old")
@click.argument("new", type=click.Path(path_type=Path))
def main(old: str, new: Path) -> None:
    try:
        after = load(new)
        before = load(Path(old) if old else KEPT / after.file)
    except CheckpointError as error:
        click.echo(f"bench-compare: {error}", err=True)
        sys.exit(2)
    for key in sorted(before.machine.keys() | after.machine.keys()):
        if before.machine.get(key) != after.machine.get(key):
            click.echo(f"note: {key} differs: {before.machine.get(key)} -> {after.machine.get(key)}")
    lines = comparison(before, after)
    click.echo("\n".join(lines))
    sys.exit(any(line.startswith("SLOWER") for line in lines))


if __name__ == "__main__":
    main()

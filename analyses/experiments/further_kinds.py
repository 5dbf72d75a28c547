"""Kinds of change that the planted lineages lack: what `ws.lineage` says of each, there and back.

    python -m analyses.experiments.further_kinds BASE STRANGER --out out/further-kinds

BASE and STRANGER are checkpoints of one config, of another seed each. kinds.csv has a row for every case: what was
named, what had to be, and which came first.
"""

import click

from analyses.study import judge_each, study, write
from tests.support.plants.kinds import COLUMNS, judged, plants_of
from tests.support.plants.named_parts import read_weights
from weightscope.core.files import Folder


@study("further-kinds")
@click.argument("base")
@click.argument("stranger")
@click.option("--only", default="", help="Cases whose name this regular expression matches.")
def main(files: Folder, base: str, stranger: str, only: str) -> None:
    """Judge every case made of BASE and STRANGER."""
    plants = plants_of(read_weights(base), read_weights(stranger))
    write(files, "kinds", COLUMNS, judge_each(plants.values(), judged, "cases", only), echo=True)


if __name__ == "__main__":
    main()

"""Damage tensors of layers without a softmax in tiny models of every type, and count what `same` says of each.

    python -m analyses.experiments.planted_mixers [--types qwen3_next,mamba2] [--out out/planted-mixers]

Prints the cases that are not right, and the counts; mixers.csv has one row per type, tensor and damage.
"""

import click

from analyses.study import judge_each, study, write
from tests.model.rows.mixers_models import KINDS
from tests.support.plants.deeds import NOT_SAME, ROUNDING
from tests.support.plants.mixers import COLUMNS, counted, judged, plants_of
from weightscope.core.files import Folder, scratch_folder


@study("planted-mixers")
@click.option("--types", default=",".join(KINDS), show_default=True)
def main(files: Folder, types: str) -> None:
    """Do every damage to every tensor of every type."""
    rows = []
    for kind in types.split(","):
        with scratch_folder() as folder:
            rows += judge_each(plants_of(kind, folder), judged, kind)
    write(files, "mixers", COLUMNS, rows)
    for row in rows:
        if not row["found"] or (row["verdict"] in NOT_SAME) != (row["logits"] > ROUNDING):
            click.echo(" | ".join(str(row[column]) for column in COLUMNS))
    for counts in counted(rows):
        click.echo(", ".join(map(str, counts)))


if __name__ == "__main__":
    main()

"""Damage tiny checkpoints in every way that conversions are known to, and count what `same` says of each.

    python -m analyses.experiments.planted_deeds [--families llama,gpt2] [--containers F32] [--out out/planted-deeds]

Prints the cases that are not right, and the counts; deeds.csv has one row per deed, family and container.
"""

import click

from analyses.study import study, write
from tests.support.plants.deeds import ALL_CONTAINERS, COLUMNS, is_right, rows_of, summary
from tests.support.plants.families import FAMILIES
from weightscope.core.files import Folder


@study("planted-deeds")
@click.option("--families", default=",".join(FAMILIES), show_default=True)
@click.option("--containers", default="|".join(ALL_CONTAINERS), show_default=True, help="Separated by |.")
@click.option("--deeds", default="", help="Only these, separated by ;.")
def main(files: Folder, families: str, containers: str, deeds: str) -> None:
    """Do every deed in every family and container."""
    rows = []
    for row in rows_of(families.split(","), containers.split("|"), [*filter(None, deeds.split(";"))]):
        rows.append(row | {name: float(f"{row[name]:.3g}") for name in ("logits", "rounding")})  # as the table has it
        if not (is_right(row) and row["tensors_right"] and row["named"]) or row["verdict"] == "refused":
            click.echo(" | ".join(str(row[column]) for column in COLUMNS))
    write(files, "deeds", COLUMNS, rows)
    for what, count in summary(rows).items():
        click.echo(f"{what}: {count}")


if __name__ == "__main__":
    main()

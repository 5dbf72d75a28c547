"""Plant one part of a checkpoint in another one, and see what `ws.lineage` says of each part.

    python -m analyses.experiments.planted_thefts embedded MODEL ... --out out/planted-thefts

Of every base the attention, the feed-forward networks or the embeddings are put into a checkpoint of its sizes whose
other matrices were drawn anew, and whose other vectors are in another order. thefts.csv has the verdict of each part;
only the part that was taken may be related.
"""

from pathlib import Path

import click

import weightscope as ws
from analyses.inputs import out_option
from tests.support.plants.derivations import random_for, redrawn
from tests.support.plants.named_parts import Weights, read_weights, write_weights
from weightscope.cli.command import EndsInOneLine
from weightscope.core.files import Folder, scratch_folder
from weightscope.core.tables import Table
from weightscope.model.sources import folder_names

TAKEN = {
    "attention": ("q", "k", "v", "o"), "feed_forward": ("gate", "up", "down"), "tokens": ("tokens",),
}  # fmt: skip  # with their biases
COLUMNS = ("base", "taken", "verdict", *(f"of_{part}" for part in TAKEN), "right", "lead")


def stranger_of(weights: Weights) -> Weights:
    """Matrices of the same sizes drawn anew, and gains and biases in another order."""
    rng = random_for(weights, 48)
    vectors = {p: rng.permuted(w) for p, w in sorted(weights.parts.items(), key=str) if w.ndim == 1}
    return redrawn(weights).but(vectors)


@click.command("planted-thefts", cls=EndsInOneLine)
@click.argument("bases", nargs=-1, required=True)
@out_option("out/planted-thefts")
def main(bases: tuple[str, ...], out: Path) -> None:
    """Take each part of each base."""
    rows: list[list[object]] = []
    for base, title in zip(bases, folder_names(list(bases)), strict=True):
        weights = read_weights(base)
        donor = stranger_of(weights)
        for taken, names in TAKEN.items():
            parts = {part: w for part, w in weights.parts.items() if part[1].partition(".")[0] in names}
            with scratch_folder() as scratch:
                write_weights(donor.but(parts), Path(scratch) / "suspect")
                lineage = ws.lineage(Path(scratch) / "suspect", base)
            verdicts = [lineage.parts[part].verdict for part in TAKEN]
            right = all(
                (verdict == "related") == (part == taken) for part, verdict in zip(TAKEN, verdicts, strict=True)
            )
            rows.append([title, taken, lineage.verdict, *verdicts, int(right), lineage.lead])
            click.echo(" | ".join(map(str, rows[-1])))
    Folder(out).text("thefts.csv", Table.of_rows(COLUMNS, rows).csv())


if __name__ == "__main__":
    main()

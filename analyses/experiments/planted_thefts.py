"""Plant one part of a checkpoint in another one, and see what `ws.lineage` says of each part.

    python -m analyses.experiments.planted_thefts tests/fixtures/two-layers MODEL ... --out out/planted-thefts

Of every base the attention, the feed-forward networks or the embeddings are put into a checkpoint of its sizes whose
other matrices were drawn anew, and whose other vectors are in another order. thefts.csv has the verdict of each part;
only the part that was taken may be related.
"""

from collections.abc import Iterator
from functools import partial

import weightscope as ws
from analyses.study import Row, judge_each, sources_argument, study, titled, write
from tests.support.plants.derivations import random_for, redrawn
from tests.support.plants.named_parts import Weights, read_weights
from tests.support.plants.plant import Made, Plant, written
from weightscope.core.files import Folder

TAKEN = {
    "attention": ("q", "k", "v", "o"), "feed_forward": ("gate", "up", "down"), "tokens": ("tokens",),
}  # fmt: skip  # with their biases
COLUMNS = ("base", "taken", "verdict", *(f"of_{part}" for part in TAKEN), "right", "lead")


def stranger_of(weights: Weights) -> Weights:
    """Matrices of the same sizes drawn anew, and gains and biases in another order."""
    rng = random_for(weights, 48)
    vectors = {p: rng.permuted(w) for p, w in sorted(weights.parts.items(), key=str) if w.ndim == 1}
    return redrawn(weights).but(vectors)


def plants_of(base: str, title: str) -> Iterator[Plant]:
    """Each part of a base in a checkpoint drawn anew."""
    weights = read_weights(base)
    donor = stranger_of(weights)
    for taken, names in TAKEN.items():
        parts = {part: w for part, w in weights.parts.items() if part[1].partition(".")[0] in names}
        cells = {"base": title, "taken": taken}
        yield Plant(f"{title}: {taken}", written(partial(donor.but, parts), base), {"lineage": taken}, cells)


def judged(plant: Plant, made: Made) -> Row:
    """Cells of COLUMNS: only the part that was taken may be related."""
    lineage = ws.lineage(made.suspect, made.bases[0])
    verdicts = {part: lineage.parts[part].verdict for part in TAKEN}
    right = all((verdict == "related") == (part == plant.expects["lineage"]) for part, verdict in verdicts.items())
    of_part = {f"of_{part}": verdict for part, verdict in verdicts.items()}
    return {"verdict": lineage.verdict, **of_part, "right": int(right), "lead": lineage.lead}


@study("planted-thefts")
@sources_argument
def main(files: Folder, sources: tuple[str, ...]) -> None:
    """Take each part of each base."""
    plants = [plant for source, title in titled(sources) for plant in plants_of(source, title)]
    write(files, "thefts", COLUMNS, judge_each(plants, judged, "thefts"), echo=True)


if __name__ == "__main__":
    main()

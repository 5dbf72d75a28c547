"""What `ws.lineage` says of pairs whose first line is easily wrong: common seeds, common bases, and one part in common.

    python -m analyses.experiments.lineage_sentences TRAINED/ --out out/lineage-sentences

TRAINED holds checkpoints of toys/train_lineage.py: llama-0 and llama-1; llama-0-init, with which llama-0 began;
llama-0-otherdata, of the same seed, trained on another text; and llama-0-tuned-a and llama-0-tuned-b, two tunes of
llama-0. sentences.csv has the verdict on each pair and its first line; learnt.csv the verdict with llama-0-init given
as one more base, and the cosine of what both learnt.
"""

from collections.abc import Iterator
from pathlib import Path

import click

import weightscope as ws
from analyses.study import Row, judge_each, study, write
from tests.support.plants.kinds import HEADS, with_part
from tests.support.plants.named_parts import Weights, read_weights
from tests.support.plants.plant import Made, Plant, written
from weightscope.core.files import Folder

MIXED = "other-attention"  # llama-0 with the attention of llama-1
PAIRS = {
    "one seed, other data": ("llama-0-otherdata", "llama-0"),
    "a model and its initialisation": ("llama-0", "llama-0-init"),
    "two tunes of one base": ("llama-0-tuned-a", "llama-0-tuned-b"),
    "a tune and its base": ("llama-0-tuned-a", "llama-0"),
    "a base and its tune": ("llama-0", "llama-0-tuned-a"),
    "all but attention is the base's": (MIXED, "llama-0"),
    "two seeds": ("llama-1", "llama-0"),
}

BEGUN = {  # judged with llama-0-init, too
    "trained apart from one seed": ("llama-0-otherdata", "llama-0"),
    "trained further": ("llama-0-tuned-a", "llama-0"),
}


def judged(plant: Plant, made: Made) -> Row:
    """Cells of a row of sentences.csv."""
    lineage = ws.lineage(made.suspect, made.bases[0])
    kinds = "; ".join(kind.kind for kind in lineage.kinds)
    return {"verdict": lineage.verdict, "kinds": kinds, "lead": lineage.lead}


def learnt(plant: Plant, made: Made) -> Row:
    """Cells of a row of learnt.csv: the base, then what both began with."""
    lineage = ws.lineage(made.suspect, made.bases)
    return {"cosine": lineage.learnt[Path(made.bases[0]).name], "lead": lineage.lead}


def plants_of(trained: Path, pairs: dict[str, tuple[str, str]], *more: str) -> Iterator[Plant]:
    """Pairs of checkpoints that are there, or made of them, with further bases."""

    def other_attention() -> Weights:
        return with_part(*(read_weights(str(trained / name)) for name in ("llama-0", "llama-1")), *HEADS)

    for name, (suspect, *bases) in pairs.items():
        places = [trained / base for base in (*bases, *more)]
        is_there = Made(trained / suspect, places)
        make = written(other_attention, *places, name=MIXED) if suspect == MIXED else lambda _, made=is_there: made
        yield Plant(name, make, cells={"pair": name})


@study("lineage-sentences")
@click.argument("trained", type=click.Path(exists=True, path_type=Path))
def main(files: Folder, trained: Path) -> None:
    """Judge the pairs, and write sentences.csv and learnt.csv."""
    sentences = judge_each(plants_of(trained, PAIRS), judged, "pairs")
    write(files, "sentences", ("pair", "verdict", "kinds", "lead"), sentences, echo=True)
    begun = judge_each(plants_of(trained, BEGUN, "llama-0-init"), learnt, "pairs")
    write(files, "learnt", ("pair", "cosine", "lead"), begun)


if __name__ == "__main__":
    main()

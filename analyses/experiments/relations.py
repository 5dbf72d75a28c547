"""Which heads map one word to another, for ten relations: `figures/relations`.

    python -m analyses.experiments.relations SMOLLM2.gguf --out out/figures/relations

The pairs are in `analyses/relations`: words that are one token each in most vocabularies. relations.csv has a row
for each head whose MAPS score is beyond chance in the whole model (`weightscope circuits --pairs`), or the best head of
a relation that has none, which maps or suppresses the pairs; `alone` is the score of the embeddings without a head.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import weightscope as ws
from analyses.study import study, write
from weightscope.core.files import Folder
from weightscope.heads.circuits.relations import LEVEL, relation

RELATIONS = Path(__file__).parents[1] / "relations"
WAYS = {"maps": "", "suppresses": "_suppressed"}
HEADER = ("model", "relation", "given", "pairs", "way", "layer", "head", "score", "random", "p_model", "alone")


def rows_of(model: ws.Model, file: Path) -> Iterator[tuple[Any, ...]]:
    """The heads beyond chance for one relation, or its best; the highest score first."""
    found = relation(model, file)
    for way, ending in WAYS.items():
        table = found.table.sort(f"score{ending}", descending=True)
        beyond = table.where(table[f"p_model{ending}"] <= LEVEL)
        kept = beyond if len(beyond) else table.take([0])
        cells = (kept[name] for name in ("layer", "head", *(f"{name}{ending}" for name in HEADER[-4:-1])))
        for each in zip(*cells, strict=True):
            yield (model.title, file.stem, found.pairs.given, len(found.pairs.sources), way, *each, found.alone)


@study("relations")
@click.argument("source")
def main(files: Folder, source: str) -> None:
    """Write relations.csv into OUT, of the heads of SOURCE."""
    model = ws.open_model(source)
    rows = [row for file in sorted(RELATIONS.glob("*.csv")) for row in rows_of(model, file)]
    write(files, "relations", HEADER, rows)


if __name__ == "__main__":
    main()

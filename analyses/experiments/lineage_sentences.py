"""What `ws.lineage` says of pairs whose first line is easily wrong: common seeds, common bases, and one part in common.

    python -m analyses.experiments.lineage_sentences TRAINED/ --out out/lineage-sentences

TRAINED holds checkpoints of toys/train_lineage.py: llama-0 and llama-1; llama-0-init, with which llama-0 began;
llama-0-otherdata, of the same seed, trained on another text; and llama-0-tuned-a and llama-0-tuned-b, two tunes of
llama-0. sentences.csv has the verdict on each pair and its first line; learnt.csv the verdict with llama-0-init given
as one more base, and the cosine of what both learnt.
"""

from pathlib import Path

import click

import weightscope as ws
from analyses.inputs import out_option
from tests.support.plants.kinds import HEADS, with_part
from tests.support.plants.named_parts import read_weights, write_weights
from weightscope.cli.command import EndsInOneLine
from weightscope.core.files import Folder, scratch_folder
from weightscope.core.tables import Table

PAIRS = {
    "one seed, other data": ("llama-0-otherdata", "llama-0"),
    "a model and its initialisation": ("llama-0", "llama-0-init"),
    "two tunes of one base": ("llama-0-tuned-a", "llama-0-tuned-b"),
    "a tune and its base": ("llama-0-tuned-a", "llama-0"),
    "a base and its tune": ("llama-0", "llama-0-tuned-a"),
    "all but attention is the base's": ("other-attention", "llama-0"),
    "two seeds": ("llama-1", "llama-0"),
}

BEGUN = {  # judged with llama-0-init, too
    "trained apart from one seed": ("llama-0-otherdata", "llama-0"),
    "trained further": ("llama-0-tuned-a", "llama-0"),
}


@click.command("lineage-sentences", cls=EndsInOneLine)
@click.argument("trained", type=click.Path(exists=True, path_type=Path))
@out_option("out/lineage-sentences")
def main(trained: Path, out: Path) -> None:
    """Judge the pairs, and write sentences.csv."""
    rows: list[list[object]] = []
    with scratch_folder() as scratch:
        mixed = with_part(*(read_weights(str(trained / name)) for name in ("llama-0", "llama-1")), *HEADS)
        write_weights(mixed, Path(scratch) / "other-attention")
        for pair, names in PAIRS.items():
            suspect, base = ((Path(scratch) if name == "other-attention" else trained) / name for name in names)
            lineage = ws.lineage(suspect, base)
            rows.append([pair, lineage.verdict, "; ".join(kind.kind for kind in lineage.kinds), lineage.lead])
            click.echo(" | ".join(map(str, rows[-1])))
    learnt: list[list[object]] = []
    for pair, (name, base_name) in BEGUN.items():
        lineage = ws.lineage(trained / name, [trained / base_name, trained / "llama-0-init"])
        learnt.append([pair, lineage.learnt[base_name], lineage.lead])
    Folder(out).text("learnt.csv", Table.of_rows(("pair", "cosine", "lead"), learnt).csv())
    Folder(out).text("sentences.csv", Table.of_rows(("pair", "verdict", "kinds", "lead"), rows).csv())


if __name__ == "__main__":
    main()

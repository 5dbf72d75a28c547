"""Convert checkpoints with the writers that people use, faithfully, and count what `ws.same` says of the copies.

    python -m analyses.experiments.faithful_conversions --out out/faithful [--writer transformers] [--source llama ...]

A row is one conversion of one model with one set of options. The witness is the model's output, computed by
transformers: of the copy on disk, and of the original with weights that the writer's own routines rounded or quantised
in memory, without the copy. MLX's copies run in mlx-lm, GGUF files in transformers where its loader knows the type;
other packings rest on their writers alone. A verdict weaker than the expected one is printed: it is a false alarm,
unless the copy lost something. `by_identity` is the verdict where of the original only the identity is known; here
"different" is the false alarm. The table has the numbers of conversions. Writers are optional: those that are not
installed are left out.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

import weightscope as ws
from analyses.experiments.faithful_sources import Made, Source, outputs, sources
from analyses.experiments.faithful_writers import WRITERS
from analyses.study import study
from weightscope.core.errors import CheckpointError
from weightscope.core.files import Folder, scratch_folder
from weightscope.core.tables import Table
from weightscope.pairs.same import DIFFERENT, VERDICTS
from weightscope.pairs.same.same import Same

HEADER = (
    *("source", "writer", "version", "container", "expected", "verdict", "by_identity", "witness", "conversions"),
    "as_expected",
)
REFUSED = "refused"
APART = 2e-5  # |difference of outputs| / |outputs| that the order of float32 sums makes


@dataclass(frozen=True)
class Conversion:
    """One conversion, and what was said of it."""

    source: str
    made: Made
    verdict: str
    lead: str
    by_identity: str  # the verdict without the original's weights
    apart: float  # of the outputs; NaN where nothing runs the copy
    witness: str

    @property
    def is_faithful(self) -> bool:
        """Whether the verdict is at least as strong as expected."""
        return self.verdict in VERDICTS and VERDICTS.index(self.verdict) <= VERDICTS.index(self.made.expected)

    @property
    def is_told(self) -> bool:
        """Whether it needs a line on the terminal."""
        alarm = self.by_identity == DIFFERENT and self.verdict not in (DIFFERENT, REFUSED)
        return alarm or not self.is_faithful or self.witness == "outputs differ"

    @property
    def in_words(self) -> str:
        """What was expected and found, for the terminal."""
        made = self.made
        return (
            f"{self.source}, {made.writer}, {made.container}, {made.options}: {self.verdict}, not {made.expected}; "
            f"by identity {self.by_identity}; {self.witness} ({self.apart:.2g}). {self.lead}"
        )

    @property
    def kind(self) -> tuple[object, ...]:
        """What a row of the table counts."""
        made = self.made
        return (
            self.source,
            made.writer,
            made.version,
            made.container,
            made.expected,
            self.verdict,
            self.by_identity,
            self.witness,
        )


def table(rows: Sequence[Conversion]) -> Table:
    """Numbers of conversions."""
    faithful = Counter(row.kind for row in rows if row.is_faithful)
    counts = Counter(row.kind for row in rows)
    return Table.of_rows(HEADER, [(*kind, count, faithful[kind]) for kind, count in counts.items()])


def convert(source: Source, writers: Sequence[str], work: Path) -> Iterator[Conversion]:
    """Every conversion of a source by these writers, judged and then deleted."""
    for writer in writers:
        folder = work / writer
        for made in WRITERS[writer](source, folder):
            yield judged(source, made)
            shutil.rmtree(folder, ignore_errors=True)


def same_by_identity(original: Any, copy: Path) -> Same:
    """What `same` says of a copy where of the original only the identity is known."""
    with scratch_folder() as folder:
        Folder(folder).json("original.id.json", ws.identity(original).as_json())
        return ws.same(folder / "original.id.json", copy)


def verdict_of(judge: Callable[[Any, Path], Same], original: Any, copy: Path) -> tuple[str, str]:
    """The verdict and the sentence on top; `REFUSED` and why where a file cannot be read."""
    try:
        same = judge(original() if callable(original) else original, copy)
    except CheckpointError as error:
        return REFUSED, str(error)
    return same.verdict, same.lead


def judged(source: Source, made: Made) -> Conversion:
    """What `same` says of a copy, and how far its outputs are from the original's, rounded by the writer."""
    original = made.original or source.folder
    verdict, lead = verdict_of(ws.same, original, made.copy)
    by_identity, _ = verdict_of(same_by_identity, original, made.copy)
    apart, witness = float("nan"), made.no_witness
    if made.runs is not None:
        expected, found = (outputs(model, source.inputs) for model in made.runs())
        apart, witness = float((expected - found).norm() / expected.norm()), "outputs"
        if not apart <= APART:
            witness = "outputs differ"
    made = made._replace(runs=None, original=None)  # they hold models
    return Conversion(source.name, made, verdict, lead, by_identity, apart, witness)


def summary(rows: Sequence[Conversion]) -> str:
    """How many conversions of each writer there are, and which were alarms."""
    lines = [
        f"{len(rows)} conversions, {sum(row.is_faithful for row in rows)} with the expected verdict or a stronger one"
    ]
    for writer, count in Counter(row.made.writer for row in rows).items():
        alarms = sum(not row.is_faithful for row in rows if row.made.writer == writer)
        seen = sum(row.witness == "outputs" for row in rows if row.made.writer == writer)
        lines.append(f"  {writer}: {count}, {alarms} false alarms; outputs agree in {seen}")
    return "\n".join(lines)


@study("faithful")
@click.option("--writer", "writers", multiple=True, type=click.Choice(sorted(WRITERS)), help="Only these.")
@click.option("--source", "names", multiple=True, help="Only these: model types, folders, or GGUF files.")
def main(files: Folder, writers: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Convert, judge, and write faithful.csv."""
    rows: list[Conversion] = []
    with scratch_folder() as work:
        for source in sources(names, work / "sources"):
            for row in convert(source, writers or tuple(WRITERS), work / "made"):
                rows.append(row)
                if row.is_told:
                    click.echo(row.in_words)
            files.table("faithful.csv", table(rows))
    click.echo(summary(rows))


if __name__ == "__main__":
    main()

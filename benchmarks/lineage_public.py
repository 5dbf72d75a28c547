"""Judge public lists of models and what they were made from: `python -m benchmarks.lineage_public --list zhu`.

Each list is a file of lineage_lists/: a model's id on the Hub and the model that it is said to come from, if any. Two
models of one tree are relatives, two of different trees strangers. With --list zhu every pair is judged, as in Zhu et
al. (arXiv 2502.12292); with --list leafbench (LeaFBench's models, without its prompts and samplers, which change no
weights) every model is held to the root of every tree. A fingerprint of each model is kept in --out, so that an
interrupted run goes on; with --weights the weights of both are compared instead, which downloads them.
"""

import csv
import time
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import click

import weightscope as ws
from weightscope.cli.command import EndsInOneLine
from weightscope.core.files import Folder
from weightscope.core.tables import Table
from weightscope.model.sources import folder_names
from weightscope.pairs.lineage.sketches import SUFFIX, fingerprint

LISTS = Path(__file__).parent / "lineage_lists"
MISSING = {"awm": "the model pairs of AWM (60 relatives, 90 strangers) are in no public file that could be read here"}
HEADER = ("suspect", "base", "truth", "verdict", "p_bound", "likeness", "seconds", "problem")


class Pair(NamedTuple):
    """Two models, and whether they are of one tree."""

    suspect: str
    base: str
    related: bool


def pairs_of(path: Path, every: bool) -> Iterator[Pair]:
    """Every pair of a list, or every model with the root of every tree."""
    with path.open(newline="") as file:
        parents = {row["model"]: row["parent"] for row in csv.DictReader(file)}

    def root(model: str) -> str:
        while parents[model]:
            model = parents[model]
        return model

    if every:
        yield from (Pair(b, a, root(a) == root(b)) for a, b in combinations(parents, 2))
        return
    roots = [model for model, parent in parents.items() if not parent]
    yield from (Pair(model, base, root(model) == base) for model in parents for base in roots if model != base)


def judged(pair: Pair, sources: dict[str, Any]) -> dict[str, Any]:
    """One row of HEADER."""
    began, truth = time.perf_counter(), "related" if pair.related else "unrelated"
    row: dict[str, Any] = {"suspect": pair.suspect, "base": pair.base, "truth": truth}
    try:
        found = ws.lineage(sources[pair.suspect], sources[pair.base])
    except ws.CheckpointError as error:
        return row | {"verdict": "", "p_bound": "", "likeness": "", "seconds": "", "problem": str(error)}
    likeness = found.origin.match.mean if found.origin else ""
    seconds = round(time.perf_counter() - began, 2)
    return row | {"verdict": found.verdict, "p_bound": found.p_value, "likeness": likeness, "seconds": seconds,
                  "problem": ""}  # fmt: skip


def kept_print(model: str, name: str, out: Path) -> Path | str:
    """The file of a model's fingerprint, made once; its id where none can be made, so that judging says why."""
    path = out / f"{name}{SUFFIX}"
    if not path.exists():
        try:
            fingerprint(model).save(path)
        except ws.CheckpointError as error:
            click.echo(f"{model}: {error}", err=True)
            return model
    return path


def summary(rows: list[dict[str, Any]]) -> str:
    """The table of docs/lineage.md: what was said of relatives and of strangers."""
    lines = ["| truth | pairs | related or derived | unrelated | undecided | could not be read |",
             "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for truth in ("related", "unrelated"):
        said = Counter(row["verdict"] for row in rows if row["truth"] == truth)
        counts = (sum(said.values()), said["related"] + said["derived"], said["unrelated"], said["undecided"], said[""])
        lines.append(f"| {truth} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


@click.command(cls=EndsInOneLine)
@click.option("--list", "name", type=click.Choice(["awm", "zhu", "leafbench"]), required=True, help="Which list.")
@click.option("--file", type=click.Path(exists=True, path_type=Path), help="A list of one's own in its place.")
@click.option("--weights", is_flag=True, help="Compare the weights of both, not fingerprints.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default="out/lineage-public", help="Results.")
def main(name: str, file: Path | None, weights: bool, out: Path) -> None:
    """Judge a public list, print the summary, and write pairs.csv."""
    path = file or LISTS / f"{name}.csv"
    if not path.exists():
        raise ws.CheckpointError(f"{MISSING[name]}; give them with --file, columns model and parent")
    pairs = list(pairs_of(path, every=name != "leafbench"))
    models = list(dict.fromkeys(model for pair in pairs for model in pair[:2]))
    files = Folder(out)
    files.path.mkdir(parents=True, exist_ok=True)
    names = dict(zip(models, folder_names(models), strict=True))
    sources = {model: model if weights else kept_print(model, names[model], out) for model in models}
    rows = [judged(pair, sources) for pair in pairs]
    files.text("pairs.csv", Table.of_rows(HEADER, [[row[key] for key in HEADER] for row in rows]).csv())
    click.echo(summary(rows))


if __name__ == "__main__":
    main()

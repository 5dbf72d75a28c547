"""An atlas of a synthetic Hub: a local server with repositories of tiny random weights, and workers that are killed.

    python -m benchmarks.atlas --repositories 1000 --out out/atlas-hub

Twenty families, each a tree of derivations of a random Llama; of every fifty repositories two are broken or refused,
three answer slowly, and some transfers fail once. Three runs: on two Dask workers, both killed on the way and replaced;
the same continued after the revisions of every fiftieth repository have changed; and anew, in one process, of what the
Hub has then, whose tables have to equal the second's. None of these repositories exists anywhere else.
"""

import csv
import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from analyses.inputs import out_option
from benchmarks.synthetic import Sizes, write
from tests.support import dask_processes
from tests.support.dask_processes import DaskProcesses
from tests.support.hub_server import Hole, Hub, serve
from tests.support.plants.derivations import DERIVATIONS, drifted
from tests.support.plants.named_parts import Weights, read_weights, write_weights
from weightscope.core.errors import CheckpointError
from weightscope.core.files import Folder, scratch_folder
from weightscope.core.tables import Table

FAMILIES = 20
OFTEN = ("bfloat16", "drift 1 %", "drift 3 %", "rank 4, all", "8 bits, rows", "4 bits, groups of 32", "heads permuted",
         "neurons permuted", "norms folded", "vocabulary cut", "last layers removed", "stream rotated",
         "stream permuted")  # fmt: skip
SLOW = 0.2  # seconds before each answer of a slow repository
FAULTS = ("503", "breaks off", "other range", "shorter")


@dataclass
class Population:
    """What the Hub has, and the truth about it."""

    files: dict[str, dict[str, bytes | Hole]] = field(default_factory=dict)
    family: dict[str, int] = field(default_factory=dict)
    parent: dict[str, str] = field(default_factory=dict)
    weights: dict[str, Weights] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    listed: list[str] = field(default_factory=list)

    def ancestors(self, name: str) -> Iterator[str]:
        """The repositories that one comes from."""
        while name in self.parent:
            name = self.parent[name]
            yield name


def contents(weights: Weights, folder: Path) -> dict[str, bytes | Hole]:
    """The files that a repository with these weights has."""
    write_weights(weights, folder)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def populate(count: int, work: Path, seed: int = 0) -> Population:
    """A Hub of so many repositories."""
    rng, hub = np.random.default_rng(seed), Population()
    shapes = [Sizes(layers, width, 4, 32, 2, 96, 48) for layers, width in ((4, 32), (5, 32), (4, 48), (5, 48))]
    members = defaultdict[int, list[str]](list)
    for number in range(count):
        family, name = number % FAMILIES, f"org-{number % 37}/model-{number:04d}"
        hub.listed.append(name)
        if not members[family]:
            base = read_weights(str(write(work / f"base-{family}", shapes[family % len(shapes)])))
            made = base.but({part: w.std() * rng.standard_normal(w.shape).astype(np.float32)
                             for part, w in sorted(base.parts.items(), key=str) if w.ndim == 2})  # fmt: skip
            hub.weights[name] = Weights(made.config, made.parts, "float32", made.came_from)
        else:
            parent = members[family][int(rng.integers(len(members[family])))]
            change = OFTEN[int(rng.integers(len(OFTEN)))]
            if change == "last layers removed" and parent in hub.parent:
                change = "drift 3 %"  # one cut a branch, so that layers are left
            hub.weights[name] = derived(hub.weights[parent], change, number)
            hub.parent[name] = parent
        hub.files[name] = contents(hub.weights[name], work / f"{number}")
        hub.family[name] = family
        members[family].append(name)
        if number % 25 == 24:
            spoil(hub, name, number // 25)
            members[family].remove(name)
    return hub


def derived(weights: Weights, change: str, number: int) -> Weights:
    """A derivation, drawn anew each time: no two repositories permute or turn their weights alike."""
    if change.startswith("drift"):
        share = float(change.split()[1]) / 100
        rng = np.random.default_rng([7, number])
        moved = {part: (w + share * w.std() * rng.standard_normal(w.shape)).astype(np.float32)
                 for part, w in sorted(weights.parts.items(), key=str) if w.ndim == 2}  # fmt: skip
        return weights.but(moved)
    return DERIVATIONS[change].change(replace(weights, seed=(number,)))


def spoil(hub: Population, name: str, kind: int) -> None:
    """Break a repository in one of eight ways."""
    files = dict(hub.files[name])
    weights = files["model.safetensors"]
    assert isinstance(weights, bytes)
    spoilt: list[Callable[[], dict[str, bytes | Hole]]] = [
        lambda: files | {"model.safetensors": weights[: len(weights) // 2]},
        lambda: files | {"model.safetensors": b"<html>please log in</html>"},
        lambda: files | {"model.safetensors": Hole((1 << 40).to_bytes(8, "little"), 1 << 41)},
        lambda: files | {"config.json": b'{"model_type": "<script>alert(1)</script>"}'},
        lambda: {"config.json": files["config.json"], "../../model.safetensors": weights},
        lambda: files | {"config.json": bytes(files["config.json"]).replace(b'"hidden_size": ', b'"hidden_size": 1')},
        dict,
        lambda: files | {"model.safetensors": weights[:-400] + np.full(100, np.nan, np.float32).tobytes()},
    ]  # fmt: skip
    hub.files[name] = spoilt[kind % len(spoilt)]()
    hub.broken.add(name)
    del hub.family[name]


def put_online(population: Population, server: Hub) -> None:
    """Serve a population: some repositories are slow or refused, some transfers fail once."""
    server.repositories |= population.files
    names = population.listed
    server.slow = dict.fromkeys(names[7::17], SLOW)
    server.gated, server.private = set(names[30::100]), set(names[60::100])
    for name in server.gated | server.private:
        population.broken.add(name)
        population.family.pop(name, None)
    server.faults = [fault for fault in FAULTS * max(1, len(names) // 50) for fault in (*[None] * 12, fault)]  # type: ignore[list-item]


def push_some(population: Population, server: Hub, work: Path) -> list[str]:
    """New revisions of every fiftieth repository: trained further."""
    changed = [name for name in population.listed[3::50] if name in population.family]
    for number, name in enumerate(changed):
        server.push(name, contents(drifted(population.weights[name], 0.02), work / f"pushed-{number}"))
    return changed


# Runs


def command(listing: Path, out: Path, *more: str) -> list[str]:
    """The command line of a run."""
    return [sys.executable, "-m", "weightscope", "atlas", str(listing), "--out", str(out), "--json", *more]


def environment(server: Hub, home: Path) -> dict[str, str]:
    """What a run sees: this Hub alone, and a cache of its own."""
    return os.environ | {"HF_ENDPOINT": server.hub, "HF_HOME": str(home), "HF_TOKEN": "", "HF_HUB_OFFLINE": "0"}


def run(arguments: list[str], seen: dict[str, str], watch: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """The JSON that a command prints; `watch` is called while it runs."""
    with subprocess.Popen(arguments, env=seen, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        with_output: list[str] = []
        while process.poll() is None:
            watch()
            try:
                with_output[:] = process.communicate(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
        out, errors = with_output
        if process.returncode:
            raise CheckpointError(f"the run ended with {process.returncode}: {errors[-500:]}")
    return dict(json.loads(out))


def kill_two(dask: DaskProcesses, out: Path, left: list[int]) -> Callable[[], None]:
    """Kill a worker whenever so many fingerprints are there as `left` says next, and replace it."""

    def watch() -> None:
        if left and sum(1 for _ in (out / ".weightscope" / "atlas").glob("print-*")) >= left[0]:
            left.pop(0)
            dask.kill(dask.workers[0])
            dask.add_worker()

    return watch


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def judged(out: Path, population: Population) -> dict[str, Any]:
    """How many families and orders are right."""
    found = {row["name"]: row["family"] for row in rows_of(out / "checkpoints.csv")}
    truth, named = defaultdict[int, set[str]](set), defaultdict[str, set[str]](set)
    for name, family in population.family.items():
        truth[family].add(name)
    for name, number in found.items():
        named[number].add(name)
    edges = rows_of(out / "tree.csv")
    ordered = [row for row in edges if row["first"]]

    def is_right(row: dict[str, str]) -> bool:
        later = row["a"] if row["first"] == row["b"] else row["b"]
        return row["first"] in population.ancestors(later)

    return {
        "families": sum(len(each) > 1 for each in named.values()),
        "families_right": sum(each in truth.values() for each in named.values() if len(each) > 1),
        "pairs": len(edges),
        "pairs_within_families": sum(population.family[row["a"]] == population.family[row["b"]] for row in edges),
        "ordered": len(ordered), "ordered_right": sum(map(is_right, ordered)),
    }  # fmt: skip


def tables(out: Path) -> dict[str, Any]:
    """What two runs have to agree in; of the Parquet file its columns, since its metadata name the command."""
    import pyarrow.parquet as pq

    heads = pq.read_table(out / "heads.parquet").replace_schema_metadata(None)
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.csv"))} | {"heads.parquet": heads}


@click.command()
@click.option("--repositories", default=100, show_default=True, help="How many the Hub has.")
@click.option("--prove", default=100, show_default=True, help="MB up to which relatives are read whole; 0 for none.")
@out_option("out/atlas-hub")
def main(repositories: int, prove: int, out: Path) -> None:
    """Serve a synthetic Hub, map it three times, and write hub.csv and errors.csv."""
    with scratch_folder() as work, serve() as server:
        began = time.perf_counter()
        population = populate(repositories, work)
        put_online(population, server)
        listing = work / "list.txt"
        hostile = ["<script>alert(1)</script>", "../../etc/passwd", population.listed[0]]
        Folder(work).text(listing.name, "".join(f"{name}\n" for name in [*population.listed, *hostile]))
        click.echo(f"{repositories} repositories made in {time.perf_counter() - began:.0f} s")
        rows: list[dict[str, Any]] = []

        def measured(title: str, folder: Path, *more: str, watch: Callable[[], None] = lambda: None) -> None:
            before, sent, begun = len(server.requests), server.sent, time.perf_counter()
            result = run(command(listing, folder, "--prove", str(prove), *more), environment(server, folder / "home"),
                         watch)  # fmt: skip
            seconds = time.perf_counter() - begun
            row = {
                "run": title, "repositories": repositories, "made": result["made"],
                "kept": result["checkpoints"] - result["made"], "errors": len(result["errors"]),
                "requests": len(server.requests) - before, "megabytes": round((server.sent - sent) / 1e6, 1),
                **judged(folder, population), "same_tables": "", "seconds": round(seconds),
            }  # fmt: skip
            rows.append(row)
            click.echo(", ".join(f"{name} {value}" for name, value in row.items()))

        first, fresh = work / "first", work / "fresh"
        (work / "dask").mkdir()
        dask_processes.ENVIRONMENT |= environment(server, work / "of-workers")
        dask = DaskProcesses(work / "dask")
        try:
            kills = [repositories // 3, 2 * repositories // 3]
            watch = kill_two(dask, first, kills)
            measured("two workers, both killed and replaced", first, *dask.options, watch=watch)
            assert not kills, "the run ended before both workers were killed"
            pushed = push_some(population, server, work)
            click.echo(f"{len(pushed)} repositories have a new revision")
            measured("continued, new revisions", first, "--resume", *dask.options)
        finally:
            dask.close()
        measured("anew, one process, nothing killed", fresh)
        rows[-1]["same_tables"] = rows[-2]["same_tables"] = same = tables(first) == tables(fresh)
        folder = Folder(out)
        folder.table("hub.csv", Table.of_rows(list(rows[0]), [list(row.values()) for row in rows]))
        kinds = Counter(row["error"][:60] for row in rows_of(fresh / "errors.csv"))
        click.echo("\n".join(f"{count} x {kind}" for kind, count in kinds.most_common()))
        if not same:
            differ = [name for name, content in tables(first).items() if content != tables(fresh)[name]]
            raise SystemExit(f"these tables differ: {', '.join(differ)}")


if __name__ == "__main__":
    main()

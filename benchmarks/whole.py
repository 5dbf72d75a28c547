"""Whole models, which take minutes: `make bench-whole`.

A 7B shape's 32 layers, 32,000 tokens and their directions, and its first four; the roles of its heads; the 80 layers
of a 70B shape from a server that makes them up when they are asked for; a thousand layers; every tensor of a file.
Writes whole.json and whole.md; `python -m benchmarks.publish whole.json` keeps them.
"""

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np

from benchmarks.commands import command_cost
from benchmarks.results import Bench, Measured, duration, peak_of, this_machine
from benchmarks.synthetic import BLOCK, SEVEN, Sizes, write
from tests.support.hub_server import Hole, serve
from weightscope.core.files import Folder

HEADER = "| whole model | command | time | CPU time | peak anonymous memory | load |"
CACHED_BYTES = 10**9  # of a streamed model; older blocks of its cache are deleted
ATTENTION = replace(SEVEN, inner=0)  # and the embeddings
SEVENTY = Sizes(layers=80, width=8192, heads=64, head_dim=128, kv_heads=8, vocabulary=32_000)
MOVED = 0.1  # of the norm of the weights: what a model was trained further by
FEW = "4 layers of a 7B, 32,000 tokens"


@dataclass(frozen=True)
class Whole:
    """A model and a command that is run on it."""

    name: str
    sizes: Sizes
    command: str
    served: bool = False  # by a server, not from the disk
    long: bool = False  # more than two minutes; not run with --quick
    moved: bool = False  # the command also takes the base that this model was moved from


WHOLE = (
    Whole(FEW, replace(ATTENTION, layers=4), "audit --directions 2"),
    Whole("32 layers of a 7B, 32,000 tokens", ATTENTION, "audit --directions 2"),
    Whole("4 layers of a 7B against another's", replace(ATTENTION, layers=4), "compare", moved=True),
    Whole("a 7B with its MLPs, 13 GB in a file", SEVEN, "audit --all"),
    Whole("1,000 layers of 4 heads", Sizes(layers=1000, inner=64), "audit"),
    Whole("80 layers of a 70B, streamed from a server", SEVENTY, "audit", served=True, long=True),
    Whole("32 layers of a 7B, 32,000 tokens", ATTENTION, "circuits", long=True),
    Whole("a 7B with its MLPs against another, 27 GB", SEVEN, "lineage", moved=True, long=True),
    Whole("32 layers of a 7B, 32,000 tokens", ATTENTION, "fingerprint"),
)


class MadeUp(Hole):
    """A file with the header of a sparse one and the same random values again and again, at an odd period.

    Each file starts elsewhere in them: layers at the same place in two files would be equal.
    """

    def __init__(self, path: Path, number: int) -> None:
        with path.open("rb") as file:
            length = file.read(8)
            super().__init__(length + file.read(int.from_bytes(length, "little")), path.stat().st_size)
        values = np.random.default_rng(0).standard_normal(BLOCK + 1, np.float32) * np.float32(0.02)
        self.values = np.roll((values.view(np.uint32) >> 16).astype("<u2"), -7919 * number).tobytes()

    def __getitem__(self, span: slice) -> bytes:
        begin, end, _ = span.indices(self.size)
        content = [self.start[begin:end]]
        position = max(begin, len(self.start))
        while position < end:
            first = (position - len(self.start)) % len(self.values)
            content.append(self.values[first : first + end - position])
            position += len(content[-1])
        return b"".join(content)


@contextmanager
def served(sizes: Sizes, top: Path) -> Iterator[str]:
    """The name of a model that a server streams; of its weights nothing is stored but the last `CACHED_BYTES` read."""
    folder, home, done = write(top / "headers", sizes, shards=16, holes=True), top / "home", threading.Event()

    def forget() -> None:
        while not done.wait(0.2):
            blocks, kept = home.glob("assets/weightscope/blocks/*/[0-9]*"), 0
            for path in sorted(blocks, key=lambda path: path.stat().st_mtime, reverse=True):
                kept += path.stat().st_size
                if kept > CACHED_BYTES:
                    path.unlink(missing_ok=True)

    with serve() as hub, mock.patch.dict(os.environ, HF_ENDPOINT=hub.hub, HF_TOKEN="", HF_HOME=str(home)):
        hub.repositories["owner/model"] = {
            path.name: MadeUp(path, number) if path.suffix == ".safetensors" else path.read_bytes()
            for number, path in enumerate(sorted(folder.iterdir()))
        }
        forgetting = threading.Thread(target=forget)
        forgetting.start()
        try:
            yield "owner/model"
        finally:
            done.set()
            forgetting.join()


@contextmanager
def stored(sizes: Sizes, top: Path) -> Iterator[str]:
    """The folder of a model on disk."""
    yield str(write(top / "model", sizes))


def measure(case: Whole, few: Measured | None = None) -> Measured:
    """The cost of a model; the note compares its memory with `few`, its first layers."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        with (served if case.served else stored)(case.sizes, top) as model:
            base = [str(write(top / "base", case.sizes, moved=MOVED))] if case.moved else []
            out = top / ("out.wsf" if case.command == "fingerprint" else "out")
            cost = command_cost(*case.command.split(), model, *base, "--out", out)
    note = f"{cost.peak / few.peak_mb:.2f} x the memory of 4 layers" if few is not None and few.peak_mb else ""
    return Measured(f"{case.name}: {case.command}", cost.wall, (), "", cost.peak, note, cost.cpu, load=load)


def table(bench: Bench) -> str:
    """The rows of whole models."""
    lines = [HEADER, "| --- | --- | --- | --- | --- | --- |"]
    for each in bench.measured:
        name, _, command = each.name.rpartition(": ")
        note = f" ({each.note})" if each.note else ""
        cells = (
            f"`{command}`",
            duration(each.seconds),
            duration(each.cpu or 0),
            peak_of(each) + note,
            f"{each.load:.1f}",
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def taken(bench: Bench, what: str = "Whole models") -> str:
    """When and on what the rows were taken, as a sentence."""
    machine = bench.machine
    vectors = "with" if any(name == "X86_V4" or name.startswith("AVX512") for name in machine["simd"]) else "without"
    on = f"{machine['cores']} cores of {machine['processor']}, NumPy {machine['numpy']} {vectors} AVX-512"
    loads = [each.load for each in bench.measured if each.load is not None]
    other_load = f"{min(loads):.0f} to {max(loads):.0f}"
    return f"{what}: taken on {machine['date']} on {on}; other work kept the load at {other_load}."


def this_machine_now() -> dict[str, Any]:
    """The facts about this machine, and the date."""
    return this_machine() | {"date": f"{datetime.now(UTC):%Y-%m-%d}"}


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default="out/bench", help="Results.")
@click.option("--only", default="", help="Only models and commands that contain this.")
@click.option("--quick", is_flag=True, help="Leave out those that take more than two minutes.")
def main(out: Path, only: str, quick: bool) -> None:
    """Run commands on whole models, print what each costs, and write whole.json and whole.md."""
    bench, began = Bench(this_machine_now()), time.perf_counter()
    for model in WHOLE:
        if only not in f"{model.name}: {model.command}" or (quick and model.long):
            continue
        few = next((each for each in bench.measured if each.name == f"{FEW}: {model.command}"), None)
        bench.measured.append(measure(model, few if model.sizes == ATTENTION else None))
        click.echo(table(replace(bench, measured=bench.measured[-1:])).splitlines()[-1])
        bench.save(out / "whole.json")  # after each, so that an interrupted run keeps its results
    Folder(out).text("whole.md", f"{taken(bench)}\n\n{table(bench)}")
    click.echo(f"{out / 'whole.json'}, {out / 'whole.md'}, in {duration(time.perf_counter() - began)}")


if __name__ == "__main__":
    main()

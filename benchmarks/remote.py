"""An audit of a checkpoint on a server with a limited rate and some latency, against the larger of two lower bounds:
the transfer of its bytes over one connection, and the same audit from disk.

    python -m benchmarks.remote
"""

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import click
import numpy as np

import weightscope as ws
from benchmarks.commands import Cost, command_cost
from benchmarks.results import Bench, Measured
from benchmarks.synthetic import BLOCK, SEVEN, Sizes, write
from tests.support.hub_server import Hole, Hub, serve
from weightscope.heads.audit.audit import tensors_of_heads
from weightscope.heads.audit.directions import how_many_read

RATE, LATENCY = 100e6, 0.05  # bytes a second of a connection, and seconds before each answer
LAYERS = 4
FLOOR = "the larger of the transfer over one connection and the audit from disk"


class Stored(Hole):
    """A file on disk that a server sends piece by piece."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        length = 8 + int.from_bytes(self.content[:8], "little")
        super().__init__(bytes(self.content[:length]), len(self.content))

    def __getitem__(self, span: slice) -> memoryview:  # type: ignore[override]
        return self.content[span]


def write_what_is_read(folder: Path, sizes: Sizes) -> int:
    """Write a checkpoint in two sparse files with random values in the tensors that an audit reads; their bytes."""
    model = ws.open_model(write(folder, sizes, shards=2, holes=True))
    layers = model.attention_layers
    names = tensors_of_heads(model, layers, tokens_read=bool(how_many_read(model, layers, None)))
    for number, name in enumerate(names):
        part, values = model.checkpoint[name].parts[0], np.random.default_rng(number).standard_normal(BLOCK + 1)
        drawn = (np.float32(0.02 * values).view(np.uint32) >> 16).astype("<u2")
        with Path(folder / part.file.path).open("r+b") as file:
            file.seek(part.entry.start)
            np.resize(drawn, part.nbytes // 2).tofile(file)
    return model.checkpoint.bytes_to_read(names)


@contextmanager
def served(folder: Path, rate: float = RATE, latency: float = LATENCY) -> Iterator[Hub]:
    """A Hub that serves a folder as `owner/model` to the commands that are run meanwhile."""
    with serve() as hub:
        hub.repositories["owner/model"] = {
            path.name: Stored(path) if path.suffix == ".safetensors" else path.read_bytes() for path in folder.iterdir()
        }
        hub.rate, hub.latency = rate, latency
        with mock.patch.dict(os.environ, HF_ENDPOINT=hub.hub, HF_TOKEN=""):
            yield hub


def of_server(hub: Hub, top: Path) -> Cost:
    """The cost of an audit with an empty cache, its requests counted."""
    hub.requests.clear()
    hub.sent = 0
    with tempfile.TemporaryDirectory(dir=top) as home, mock.patch.dict(os.environ, HF_HOME=home):
        return command_cost("audit", "owner/model", "--out", f"{home}/out")


def measure(rounds: int = 2) -> list[Measured]:
    """One row: the audit from a server."""
    walls, ratios, costs = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        n_bytes = write_what_is_read(top / "model", replace(SEVEN, layers=LAYERS))
        with served(top / "model") as hub:
            for _ in range(rounds):
                disk = command_cost("audit", str(top / "model"), "--out", str(top / "out"))
                costs.append(of_server(hub, top))
                walls.append(costs[-1].wall)
                ratios.append(walls[-1] / max(disk.wall, n_bytes / RATE))
                note = f"{len(hub.requests)} requests, {hub.sent / 1e6:.0f} MB; from disk {disk.wall:.1f} s"
                click.echo(f"{walls[-1]:.1f} s, {note}, load {os.getloadavg()[0]:.1f}")
    name = f"{LAYERS} layers of a 7B from a server, {RATE / 1e6:.0f} MB/s a connection and {1000 * LATENCY:.0f} ms"
    peak, cpu = max(cost.peak for cost in costs), float(np.median([cost.cpu for cost in costs]))
    return [Measured(name, float(np.median(walls)), tuple(ratios), FLOOR, peak, note, cpu)]


@click.command()
@click.option("--rounds", default=2, show_default=True)
def main(rounds: int) -> None:
    """Print the time of an audit from a server and its lower bound."""
    click.echo(Bench({}, measure(rounds)).table())


if __name__ == "__main__":
    main()

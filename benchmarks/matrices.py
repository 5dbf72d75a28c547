"""Spectra of every matrix at the width of a 7B: `python -m benchmarks.matrices`.

Next to reading, Gram products and eigenvalues; one matrix of each shape is counted as often as four layers have it.
`--sketch LAYERS` measures so many layers and 32,000 tokens by sketches, and the peak of memory, next to reading the
file: 32 layers are a whole 7B, 13.5 GB of bfloat16. `--peer-python` names an interpreter with
weightwatcher 0.7.7 and PyTorch, which gets the same matrices of `--source`. CPU seconds of all cores: other load does
not move them much.
"""

import json
import os
import resource
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

import weightscope as ws
from benchmarks.synthetic import SEVEN, write
from weightscope.checkpoint.blocks import streamed
from weightscope.core.compute import lapack
from weightscope.core.compute.cores import in_threads
from weightscope.heads.tensors.matrices import MEASURES, Matrices, measured_rows, read_matrices

LAYERS = 4
SHAPES = {"q": 4, "up": 2, "down": 1}  # a matrix of each shape, and how many a layer has
PEER = """
import json, logging, sys, time
import numpy as np, torch, weightwatcher
logging.disable(logging.CRITICAL)
arrays = np.load(sys.argv[1])
model = torch.nn.Sequential(*[torch.nn.Linear(*arrays[name].shape[::-1], bias=False) for name in arrays])
for layer, name in zip(model, arrays):
    layer.weight.data = torch.from_numpy(arrays[name])
began, wall = time.process_time(), time.perf_counter()
details = weightwatcher.WeightWatcher(model=model).analyze()
costs = time.process_time() - began, time.perf_counter() - wall
print(json.dumps([*costs, {row["longname"]: row["alpha"] for row in details.to_dict("records")}]))
"""
SAME_ALPHA = 1e-3


def cpu(work: Callable[[], object]) -> float:
    """CPU seconds of all threads."""
    began = time.process_time()
    work()
    return time.process_time() - began


def floor(model: ws.Model, names: list[str]) -> float:
    """CPU seconds for reading matrices, their smaller Gram matrices in float64, and the eigenvalues of these."""

    def work(name: str) -> None:
        w = model.checkpoint[name].read()  # (m, n)
        wide = w.astype(np.float64)
        lapack.symmetric_eigenvalues(wide.T @ wide if w.shape[0] > w.shape[1] else wide @ wide.T)

    return cpu(lambda: [*in_threads(work, names)])


def exact(folder: Path) -> None:
    """Four layers, from one matrix of each shape."""
    model = ws.open_model(write(folder, replace(SEVEN, layers=1, vocabulary=8)))
    tensors = model.tensors
    ours, least = 0.0, 0.0
    for role, count in SHAPES.items():
        named = [tensors[f"layer 0 {role}"]]
        ours += LAYERS * count * cpu(lambda named=named: measured_rows(model.checkpoint, tensors, named, exact=True))
        least += LAYERS * count * floor(model, [named[0].name])
        click.echo(f"  {role}: {ours:.1f} s and {least:.1f} s so far")
    click.echo(f"{LAYERS} layers of a 7B, exact: {ours:.0f} s, {ours / least:.2f} x bytes, Gram products, eigenvalues")


def sketch(folder: Path, layers: int) -> None:
    """So many layers by sketches, and 32,000 tokens twice, next to reading every value once."""
    model = ws.open_model(write(folder, replace(SEVEN, layers=layers)))
    names = [*model.checkpoint]
    least = cpu(lambda: deque((block.values() for block in streamed(model.checkpoint, names)), maxlen=0))
    began = time.perf_counter()
    seconds = cpu(lambda: read_matrices(model))
    took, peak = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    click.echo(
        f"{layers} layers of a 7B, sketches: {took:.0f} s, {seconds:.0f} s CPU, {seconds / least:.1f} x reading the "
        f"{model.checkpoint.nbytes / 1e9:.1f} GB, peak {peak:.0f} MB"
    )


def peer(python: str, source: str) -> None:
    """The spectra and power laws of every matrix of a checkpoint, here and by WeightWatcher."""
    model = ws.open_model(source)
    began = time.perf_counter()
    measured: list[Matrices] = []
    seconds = cpu(lambda: measured.append(read_matrices(model)))
    wall = time.perf_counter() - began
    rows = [row for row in measured[0].rows if row.spectrum and row.expert is None]
    tensors, alpha = model.tensors, [column.name for column in MEASURES].index("alpha")
    keys = [row.facts.role if row.layer is None else f"layer {row.layer} {row.facts.role}" for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        arrays = Path(folder) / "arrays.npz"
        np.savez(arrays, **{str(i): tensors[key].array() for i, key in enumerate(keys)})
        done = subprocess.run([python, "-c", PEER, str(arrays)], capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(done.stderr[-500:])
    their_cpu, their_wall, theirs = json.loads(done.stdout.splitlines()[-1])
    apart = np.abs([value - rows[int(place)].numbers[alpha] for place, value in theirs.items()])
    click.echo(f"{source}: {len(rows)} matrices here in {seconds:.1f} s CPU, {wall:.1f} s")
    ratio, same = their_cpu / seconds, int(np.count_nonzero(apart <= SAME_ALPHA))
    click.echo(f"weightwatcher: {len(theirs)} in {their_cpu:.1f} s CPU, {their_wall:.1f} s; {ratio:.0f} x the CPU time")
    click.echo(f"alpha: {same} of {len(apart)} within {SAME_ALPHA:g}; median {np.median(apart):.2g}, {apart.max():.2g}")


@click.command()
@click.option("--sketch", "layers", type=int, default=0, help="Layers to sketch; default: the exact ones instead.")
@click.option("--peer-python", default="", help="An interpreter with weightwatcher 0.7.7; with SOURCE.")
@click.option("--source", default="embedded", help="What both read.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to write synthetic weights; default: temporary.")
def main(layers: int, peer_python: str, source: str, folder: Path | None) -> None:
    """Measure, and print one line for each."""
    click.echo(f"load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores")
    if peer_python:
        peer(peer_python, source)
    else:
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            sketch(Path(temporary), layers) if layers else exact(Path(temporary))
    click.echo(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()

"""Spectra of every matrix at the width of a 7B: `python -m benchmarks.matrices`.

Next to reading, Gram products and eigenvalues; one matrix of each shape is counted as often as four layers have it.
`--sketch LAYERS` measures so many layers and 32,000 tokens by sketches, and the peak of memory. `--peer-python` names
an interpreter with weightwatcher 0.7.7, PyTorch and transformers, which measures the same checkpoint. CPU seconds of
all cores: other load does not move them much.
"""

import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np

import weightscope as ws
from benchmarks.synthetic import Sizes, write
from weightscope.compute import lapack
from weightscope.compute.cores import in_threads
from weightscope.tensors.matrices import measured_rows, read_matrices

WIDTH, INNER, LAYERS = 4096, 11_008, 4
SHAPES = {"q": 4, "up": 2, "down": 1}  # a matrix of each shape, and how many a layer has
PEER = """
import logging, sys, time
import torch, weightwatcher
from transformers import AutoModelForCausalLM
logging.disable(logging.CRITICAL)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], gguf_file=sys.argv[2] if len(sys.argv) > 2 else None)
began, wall = time.process_time(), time.perf_counter()
details = weightwatcher.WeightWatcher(model=model).analyze()
print(time.process_time() - began, time.perf_counter() - wall, len(details))
"""


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
    model = ws.open_model(write(folder, Sizes(1, WIDTH, 32, 128, 32, 8, INNER)))
    tensors = model.tensors
    ours, least = 0.0, 0.0
    for role, count in SHAPES.items():
        named = [tensors[f"layer 0 {role}"]]
        ours += LAYERS * count * cpu(lambda named=named: measured_rows(model.checkpoint, tensors, named, exact=True))
        least += LAYERS * count * floor(model, [named[0].name])
        click.echo(f"  {role}: {ours:.1f} s and {least:.1f} s so far")
    click.echo(f"{LAYERS} layers of a 7B, exact: {ours:.0f} s, {ours / least:.2f} x bytes, Gram products, eigenvalues")


def sketch(folder: Path, layers: int) -> None:
    """So many layers by sketches, and 32,000 tokens twice."""
    model = ws.open_model(write(folder, Sizes(layers, WIDTH, 32, 128, 32, 32_000, INNER)))
    seconds = cpu(lambda: read_matrices(model))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    click.echo(f"{layers} layers of a 7B, sketches: {seconds:.0f} s CPU, peak {peak:.0f} MB")


@click.command()
@click.option("--sketch", "layers", type=int, default=0, help="Layers to sketch; default: the exact ones instead.")
@click.option("--peer-python", default="", help="An interpreter with weightwatcher 0.7.7; with SOURCE.")
@click.option("--source", default="embedded", help="What both read.")
@click.option("--peer-source", nargs=2, default=("", ""), help="Folder and GGUF file that transformers reads, or ''.")
def main(layers: int, peer_python: str, source: str, peer_source: tuple[str, str]) -> None:
    """Measure, and print one line for each."""
    click.echo(f"load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores")
    if peer_python:
        model = ws.open_model(source)
        began = time.perf_counter()
        seconds = cpu(lambda: read_matrices(model))
        click.echo(f"{source}: {seconds:.1f} s CPU, {time.perf_counter() - began:.1f} s")
        done = subprocess.run([peer_python, "-c", PEER, *filter(None, peer_source)], capture_output=True, text=True)
        click.echo(f"weightwatcher: {done.stdout.strip() or done.stderr[-500:]} (CPU seconds, seconds, matrices)")
        return
    with tempfile.TemporaryDirectory() as folder:
        sketch(Path(folder), layers) if layers else exact(Path(folder))


if __name__ == "__main__":
    main()

"""AUROC, sigma, an audit, C and norms on a device, against its bare products and against the cores of the CPU.

python -m benchmarks.device --device cuda             # GPT-2's and Llama 3's shapes, and a 7B audit: minutes
python -m benchmarks.device --device cpu --small      # seconds: tests that it runs
"""

import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import numpy as np

import weightscope as ws
from benchmarks.audit import write_shape
from benchmarks.auroc import zipf_counts
from benchmarks.commands import timed
from weightscope.core.compute.cores import in_threads, usable_cores
from weightscope.core.compute.device import CPU, Device, open_device
from weightscope.core.errors import CheckpointError
from weightscope.heads.audit.audit import AuditOptions, measure_task
from weightscope.heads.detok.positions import sigma_statistics
from weightscope.heads.outliers.measure import contributions_by_kind
from weightscope.model.metrics.auroc import auroc_by_token
from weightscope.model.metrics.lengths import value_norms


@dataclass(frozen=True)
class Shape:
    """Sizes of a first attention layer for AUROC, and for sigma its width and number of learned positions."""

    name: str
    vocab: int
    heads: int
    head_dim: int
    width: int = 0
    positions: int = 0


SHAPES = (Shape("GPT-2", 50_257, 12, 64, 768, 1024), Shape("Llama 3 8B", 128_256, 32, 128))
ROWS_A_PRODUCT = 512  # of the bare products: 260 MB of scores for Llama 3


@dataclass(frozen=True)
class Work:
    """What is timed."""

    shapes: tuple[Shape, ...]  # layers for AUROC and sigma
    cores: tuple[int, int]  # number and size of the matrices of the singular values
    tokens: tuple[int, int, int]  # tokens, heads and their size, for C and norms
    audit: tuple[str, int]  # shape and layers


FULL = Work(SHAPES, (256, 128), (2048, 32, 128), ("llama-2-7b", 32))
SMALL = Work((Shape("A small vocabulary", 600, 2, 8, 32, 40),), (8, 16), (60, 2, 8), ("gpt2", 1))
KINDS = 4


def run(device_name: str, work: Work, heads: int) -> dict[str, dict[str, float]]:
    """Seconds of each task. `heads` heads of each shape are timed; all heads are taken to cost the median."""
    device = open_device(device_name)
    seconds_of = {shape.name: of_shape(device, shape, heads) for shape in work.shapes}
    n, r = work.cores
    tokens, heads_there, size = work.tokens
    shape, layers = work.audit
    on_tokens = on_activations(device, *work.tokens)
    return seconds_of | {
        f"singular values of {n} matrices of {r} x {r}": singular_values(device, n, r),
        **{f"{what} of {tokens:,} tokens, {heads_there} heads of {size}": took for what, took in on_tokens.items()},
        f"audit of {layers} layers of {shape}'s shape": audit(device_name, shape, layers),
    }


def of_shape(device: Device, shape: Shape, heads: int) -> dict[str, float]:
    """AUROC of all heads and the bare products of their scores; sigma if there are positions."""
    counts = zipf_counts(shape.vocab)
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((2, shape.vocab, shape.head_dim), np.float32)
    auroc_by_token(left[:64], right[:64], counts[:64, :64], device=device)  # compiles
    products(device, left[:64], right)
    times: dict[str, list[float]] = {"products": [], "auroc": []}
    for _ in range(heads):
        times["products"].append(seconds(lambda: products(device, left, right)))
        times["auroc"].append(seconds(lambda: auroc_by_token(left, right, counts, device=device)))
    seconds_of = {name: shape.heads * statistics.median(per_head) for name, per_head in times.items()}
    seconds_of["ratio"] = statistics.median(a / b for a, b in zip(times["auroc"], times["products"], strict=True))
    if shape.positions:
        tokens, positions = (rng.standard_normal((n, shape.width), np.float32) for n in (shape.vocab, shape.positions))

        def blocks():
            for start in range(0, shape.vocab, 5000):
                yield start, tokens[start : start + 5000]

        seconds_of["sigma"] = seconds(lambda: sigma_statistics(blocks, shape.vocab, positions, 1e-5, device=device))
    return seconds_of


def products(device: Device, left: np.ndarray, right: np.ndarray) -> None:
    """The scores only, block by block, until the last block is done."""
    rows, columns = device.put(left), device.put(right).T  # (V, r), (r, V)
    for start in range(0, len(left), ROWS_A_PRODUCT):
        scores = rows[start : min(start + ROWS_A_PRODUCT, len(left)), :] @ columns
    device.get(scores[:1, :1])


def singular_values(device: Device, n: int, r: int) -> dict[str, float]:
    """Of a stack (n, r, r): on the device at once, and on this machine's cores one a thread, as an audit does it.

    An audit leaves them to the cores; this shows whether a device has become faster at them.
    """
    stack = np.random.default_rng(0).standard_normal((n, r, r))
    linalg = device.xp.linalg
    values = getattr(linalg, "svdvals", None) or partial(linalg.svd, compute_uv=False)  # CuPy has no svdvals

    def on_device() -> None:
        device.get(values(device.put(stack)))

    def on_cores() -> None:
        list(in_threads(np.linalg.svdvals, stack))

    on_device()  # compiles
    return {"on the device": seconds(on_device), "on the cores": seconds(on_cores)}


def on_activations(device: Device, n: int, h: int, r: int) -> dict[str, dict[str, float]]:
    """C of eq. 7 and |f(x)| of n tokens in one layer. The weights are on the device; activations are copied."""
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, KINDS, n)
    shapes = {"keys": (n, h * r), "asked": (h, n, r), "w_k": (h, h * r, r), "values": (h, n, r), "triangles": (h, r, r)}
    arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}

    def took(where: Device) -> dict[str, float]:
        w_k, triangles = where.put(arrays["w_k"]), where.put(arrays["triangles"])
        works = {
            "C": lambda: contributions_by_kind(*(where.put(arrays[x]) for x in ("keys", "asked")), w_k, kinds, KINDS),
            "norms": lambda: value_norms(where.put(arrays["values"]), triangles),
        }
        for work in works.values():
            where.get(work())  # compiles
        return {what: seconds(lambda: where.get(work())) for what, work in works.items()}  # noqa: B023  called at once

    there, here = took(device), took(CPU)
    return {what: {"on the device": there[what], "on the cores": here[what]} for what in there}


def audit(device_name: str, shape: str, layers: int) -> dict[str, float]:
    """All measures of an audit of a synthetic checkpoint whose files are cached, with and without the device."""
    with tempfile.TemporaryDirectory() as folder:
        write_shape(Path(folder), shape, layers)

        def took(device: str) -> float:
            model, options = ws.open_model(folder), AuditOptions(device=device)
            return seconds(lambda: [measure_task(lambda: model, index, options) for index in model.attention_layers])

        took(device_name)  # caches the files, and compiles
        return {"on the device": took(device_name), "on the cores": took("cpu")}


def seconds(work: Callable[[], object]) -> float:
    return timed(work).wall


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cuda", show_default=True)
@click.option("--small", is_flag=True, help="A small vocabulary and one small layer, to see that it runs.")
@click.option("--heads", default=3, show_default=True, help="Heads to time; all are scaled up from their median.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def main(device: str, small: bool, heads: int, as_json: bool) -> None:
    """Print seconds and ratios. The 7B audit writes 4.3 GB to the folder for temporary files."""
    work = SMALL if small else FULL
    try:
        seconds_of = run(device, work, heads)
    except CheckpointError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps({"device": device, "cores": usable_cores(), **seconds_of}))
        return
    for shape in work.shapes:
        seconds = seconds_of.pop(shape.name)
        click.echo(
            f"{shape.name}: AUROC of {shape.heads} heads over {shape.vocab:,} x {shape.vocab:,} tokens "
            f"{seconds['auroc']:.2f} s, {seconds['ratio']:.1f} x the bare products ({seconds['products']:.2f} s)"
        )
        if "sigma" in seconds:
            click.echo(f"  sigma over {shape.positions:,} positions: {seconds['sigma']:.2f} s")
    for name, seconds in seconds_of.items():
        click.echo(f"{name}: {', '.join(f'{took:.3g} s {where}' for where, took in seconds.items())}")


if __name__ == "__main__":
    main()

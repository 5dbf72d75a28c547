"""The cost of an audit against lower bounds, and its memory.

There are two lower bounds: reading the bytes and the float64 Gram products of every factor; and the same plus one r x r
singular value decomposition for each form and head, which every spectrum needs.

python -m benchmarks.audit --shape llama-2-7b --layers 32
"""

import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise, repeat
from pathlib import Path

import click
import numpy as np

import weightscope as ws
from benchmarks.commands import Cost, alone, anonymous_megabytes, timed
from benchmarks.results import Bench, Measured, before_row
from benchmarks.synthetic import SEVEN, SEVENTY, Sizes, write
from weightscope.core.compute import lapack
from weightscope.core.compute.cores import in_threads
from weightscope.core.compute.half import Weights
from weightscope.core.errors import counted
from weightscope.heads.audit.audit import AuditOptions, measure_task, measured_forms
from weightscope.heads.audit.batch import FinishedLayers, report_task
from weightscope.heads.audit.measure import Arrays
from weightscope.model.layers.factored import Triangle, core_singular_values, inner, triangle
from weightscope.model.layers.layer import Layer
from weightscope.model.model import Model
from weightscope.model.run_identity import RunIdentity

# Sizes as in the published configs, without embeddings; GPT-2's with the names and norms of Llama.
SHAPES = {
    "gpt2": Sizes(layers=12, width=768, heads=12, head_dim=64, kv_heads=12, vocabulary=0),
    "llama-2-7b": replace(SEVEN, vocabulary=0, inner=0),
    "llama-2-70b": replace(SEVENTY, vocabulary=0),
}


def write_shape(folder: Path, shape: str, layers: int) -> Path:
    """Write the attention of the first `layers` layers of a shape in BF16, one shard per layer."""
    return write(folder, replace(SHAPES[shape], layers=layers), shards=layers, spectra=True)


def read_and_gram(model: Model) -> None:
    """The lower bound: read W_Q, W_K, W_V and W_O, and compute the Gram matrix of every head's factor in float64.

    As lean as is known here: 16 bits a weight until a head's turn, and blocks of rows that fit the cache.
    """
    config = model.config
    r = config.head_dim
    factors = (
        factor
        for index in model.attention_layers
        for tensor in model.attention_tensors(index)
        if len(tensor.shape) >= 2
        for factor in _heads_of(tensor.weights(), r, tensor.name)
    )
    deque(in_threads(lambda factor: inner(np.asarray(factor)), factors), maxlen=0)


def _heads_of(w: Weights, r: int, name: str) -> Iterator[Weights]:
    """Each head's (d, r) factor, a view: rows of q, k, v; columns of o; columns of GPT-2's fused tensors."""
    by_column = name.endswith(("o_proj.weight", "c_attn.weight"))
    columns = w if by_column else w.T
    for start in range(0, columns.shape[1], r):
        yield columns[:, start : start + r]


def read_gram_and_svds(model: Model) -> None:
    """The same, plus the singular values of an r x r core for each form of W_QK and for W_VO of every head."""
    read_and_gram(model)
    config, forms = model.config, 2 + len(measured_forms(model, AuditOptions()))
    core = np.random.default_rng(0).standard_normal((config.head_dim, config.head_dim))
    cores = repeat(core, len(model.attention_layers) * config.n_heads * forms)
    deque(in_threads(lapack.singular_values, cores), maxlen=0)


def all_measures(model: Model) -> dict[int, Arrays]:
    """All measures of every head, saved layer by layer, as an audit does."""
    with tempfile.TemporaryDirectory() as work:
        finished = FinishedLayers(Path(work), RunIdentity.of(), model.attention_layers, resume=False)
        for index, following in pairwise((*model.attention_layers, None)):
            finished.put(index, measure_task(lambda: model, index, AuditOptions(), following))
        return dict(finished.all())


def whole_audit(model: Model) -> None:
    """Measures, findings, tables, figures and page."""
    report_task(lambda: model, all_measures(model), AuditOptions())


def singular_values(model: Model) -> None:
    """Singular values of W_QK and W_VO only, all of a key-value group together."""

    def triangle_of(factor: np.ndarray) -> Triangle:
        return triangle(factor, inner(factor))

    def of_group(layer: Layer, kv: int) -> None:
        key, value = triangle_of(layer.k.of(kv)[0]), triangle_of(layer.v.of(kv)[0])
        shared_by = layer.n_heads // layer.n_kv_heads
        for h in range(kv * shared_by, (kv + 1) * shared_by):
            core_singular_values(triangle_of(layer.q.of(h)[0]), key)
            core_singular_values(value, triangle_of(np.asarray(layer.w_o[h]).T))

    for index in model.attention_layers:
        layer = model.unchecked().layer(index)
        list(in_threads(partial(of_group, layer), range(layer.n_kv_heads)))
        del layer  # before the next one is read


@contextmanager
def anonymous_peak() -> Iterator[list[float]]:
    """Samples this process's anonymous memory every 10 ms; the list holds the peak in MB once the block has ended."""
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], anonymous_megabytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


FLOORS: dict[str, Callable[[Model], object]] = {
    "reading and Gram products": read_and_gram,
    "reading, Gram products and one SVD per form and head": read_gram_and_svds,
}
WORK: dict[str, Callable[[Model], object]] = {
    "singular values": singular_values,
    "all measures": all_measures,
    "the whole audit, figures and page included": whole_audit,
}
NAMED = Sizes(layers=2, width=4096, heads=32, head_dim=128, kv_heads=32, vocabulary=2000)
WITHOUT, WITH = "the same without directions", f"audit with tokens along directions, {NAMED.layers} layers of a 7B"
OF_TOKENS = {WITHOUT: partial(ws.audit, directions=0), WITH: partial(ws.audit, directions=2)}  # without writing files
FLOOR_OF = dict(zip(WORK, (*FLOORS, list(FLOORS)[1]), strict=True))  # the lower bound of each


def cost(name: str, folder: Path | str) -> Cost:
    """The cost of one run on a newly opened model."""
    with anonymous_peak() as peak:
        spent = timed(lambda: (FLOORS | WORK | OF_TOKENS)[name](ws.open_model(folder)))
    return replace(spent, peak=peak[0])


def costs(folder: Path | str, rounds: int, names: Iterable[str] = (*FLOORS, *WORK)) -> dict[str, list[Cost]]:
    """The costs by name over several rounds, every run in a process of its own, so that it pays for its own memory.

    Each round measures all in turn, so that other load on the machine affects all alike.
    """
    costs_of: dict[str, list[Cost]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, runs in costs_of.items():
            runs.append(alone(cost, name, folder))
    return costs_of


def directions(rounds: int = 2) -> Measured:
    """An audit with tokens along two directions of every map, against the same audit without."""
    with tempfile.TemporaryDirectory() as folder:
        source, began = write(Path(folder), NAMED, spectra=True), before_row()
        measured = costs(source, rounds, OF_TOKENS)
    return Measured.of(f"{WITH}, {NAMED.vocabulary:,} tokens", measured[WITH], measured[WITHOUT], WITHOUT, **began)


def least(folder: Path) -> tuple[float, float]:
    """Bytes of the attention tensors, and operations of the Gram matrices, of each half."""
    model = ws.open_model(folder)
    config, tensors = model.config, [tensor for i in model.attention_layers for tensor in model.attention_tensors(i)]
    factors = 2 * len(model.attention_layers) * (config.n_heads + config.n_kv_heads)
    return float(sum(t.nbytes for t in tensors)), factors * config.d_model * config.head_dim * (config.head_dim + 1.0)


def rows(title: str, folder: Path, rounds: int) -> list[Measured]:
    """Every task against its lower bound in the same round."""
    began, spent, (reads, flops) = before_row(), costs(folder, rounds), least(folder)
    return [
        Measured.of(
            f"{title}: {name}", spent[name], spent[FLOOR_OF[name]], FLOOR_OF[name], reads=reads, flops64=flops, **began
        )
        for name in WORK
    ]


def run(shapes: dict[str, tuple[int, int]]) -> list[Measured]:
    """All rows for synthetic checkpoints, with layers and rounds by shape."""
    measured = []
    for shape, (layers, rounds) in shapes.items():
        with tempfile.TemporaryDirectory() as folder:
            measured += rows(f"{shape}, {counted(layers, 'layer')}", write_shape(Path(folder), shape, layers), rounds)
    return [*measured, directions()]


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="llama-2-7b", show_default=True)
@click.option("--layers", default=4, show_default=True, help="How many of the shape's layers to write and measure.")
@click.option("--checkpoint", type=click.Path(path_type=Path, exists=True), help="A checkpoint instead of a shape.")
@click.option("--rounds", default=3, show_default=True)
def main(shape: str, layers: int, checkpoint: Path | None, rounds: int) -> None:
    """Print the cost of singular values and of an audit as ratios to lower bounds."""
    with tempfile.TemporaryDirectory() as temporary:
        source = checkpoint or write_shape(Path(temporary), shape, layers)
        title = source.name if checkpoint else f"{shape}, {counted(layers, 'layer')}"
        click.echo(Bench({}, rows(title, source, rounds)).table())


if __name__ == "__main__":
    main()

"""The cost of an audit against lower bounds, and its memory.

There are two lower bounds: reading the bytes and the float64 Gram products of every factor; and the same plus one r x r
singular value decomposition for each form and head, which every spectrum needs.

python -m benchmarks.audit --shape llama-2-7b --layers 32
python -m benchmarks.audit --checkpoint GPT2_FOLDER --peer-python VENV/bin/python
"""

import json
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise, repeat
from multiprocessing import get_context
from pathlib import Path

import click
import numpy as np

import weightscope as ws
from benchmarks.commands import Cost, anonymous_megabytes
from benchmarks.peers import PEERS, peer_cost
from benchmarks.results import Bench, Measured
from benchmarks.synthetic import Sizes, write
from weightscope.core.compute import lapack
from weightscope.core.compute.cores import in_threads
from weightscope.core.compute.half import Weights
from weightscope.heads.audit.audit import AuditOptions, measure_task, measured_forms
from weightscope.heads.audit.batch import FinishedLayers, report_task
from weightscope.heads.audit.measure import Arrays
from weightscope.model.layers.factored import Triangle, core_singular_values, inner, triangle
from weightscope.model.layers.layer import Layer
from weightscope.model.model import Model
from weightscope.model.run_identity import RunIdentity

# Sizes as in the published configs; GPT-2's with the names and norms of Llama.
SHAPES = {
    "gpt2": {"num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 12, "hidden_size": 768},
    "llama-2-7b": {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 4096},
    "llama-2-70b": {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192},
}


def write_synthetic(folder: Path, shape: str, layers: int) -> Path:
    """Write the attention of the first `layers` layers of a shape in random BF16, one shard per layer."""
    sizes = SHAPES[shape] | {"num_hidden_layers": layers}
    d, heads, kv = sizes["hidden_size"], sizes["num_attention_heads"], sizes["num_key_value_heads"]
    r = d // heads
    rng = np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    for i in range(layers):
        stem, name = f"model.layers.{i}.", f"model-{i + 1:05d}-of-{layers:05d}.safetensors"
        rows = {"q": (heads * r, d), "k": (kv * r, d), "v": (kv * r, d), "o": (d, heads * r)}
        tensors = {f"{stem}self_attn.{x}_proj.weight": _bf16(rng, shape_) for x, shape_ in rows.items()}
        tensors[f"{stem}input_layernorm.weight"] = _bf16(rng, (d,))
        _save_bf16(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "vocab_size": 32000, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _bf16(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Normal weights with standard deviation 0.02 as bfloat16 bit patterns."""
    values = rng.standard_normal(shape, np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _save_bf16(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Write a safetensors file of BF16 bit patterns, which the library cannot do from NumPy arrays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header, offset = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            tensor.tofile(file)


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


def cost(name: str, folder: Path) -> Cost:
    """The cost of one run on a newly opened model."""
    with anonymous_peak() as peak:
        wall, cpu = time.perf_counter(), time.process_time()
        (FLOORS | WORK | OF_TOKENS)[name](ws.open_model(folder))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Cost(wall, cpu, peak[0])


def costs(folder: Path, rounds: int, names: Iterable[str] = (*FLOORS, *WORK)) -> dict[str, list[Cost]]:
    """The costs by name over several rounds, every run in a process of its own, so that it pays for its own memory.

    Each round measures all in turn, so that other load on the machine affects all alike.
    """
    costs_of: dict[str, list[Cost]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, runs in costs_of.items():
            with get_context("spawn").Pool(1) as pool:
                runs.append(pool.apply(cost, (name, folder)))
    return costs_of


def directions(rounds: int = 2) -> Measured:
    """An audit with tokens along two directions of every map, against the same audit without."""
    with tempfile.TemporaryDirectory() as folder:
        measured = costs(write(Path(folder), NAMED), rounds, OF_TOKENS)
    with_tokens, bare = measured[WITH], measured[WITHOUT]
    walls = tuple(cost.wall / least.wall for cost, least in zip(with_tokens, bare, strict=True))
    seconds, peak = float(np.median([cost.wall for cost in with_tokens])), max(cost.peak for cost in with_tokens)
    return Measured(f"{WITH}, {NAMED.vocabulary:,} tokens", seconds, walls, WITHOUT, peak)


def best(costs: list[Cost]) -> Cost:
    """The shortest time and the largest memory of several rounds."""
    return Cost(min(c.wall for c in costs), min(c.cpu for c in costs), max(c.peak for c in costs))


def least(folder: Path) -> tuple[float, float]:
    """Bytes of the attention tensors, and operations of the Gram matrices, of each half."""
    model = ws.open_model(folder)
    config, tensors = model.config, [tensor for i in model.attention_layers for tensor in model.attention_tensors(i)]
    factors = 2 * len(model.attention_layers) * (config.n_heads + config.n_kv_heads)
    return float(sum(t.nbytes for t in tensors)), factors * config.d_model * config.head_dim * (config.head_dim + 1.0)


def rows(title: str, costs: dict[str, list[Cost]], folder: Path) -> list[Measured]:
    """Every task against its lower bound in the same round; the note has its CPU time against both bounds."""
    reads, flops = least(folder)
    measured = []
    for name in WORK:
        runs = costs[name]
        walls = tuple(cost.wall / least.wall for cost, least in zip(runs, costs[FLOOR_OF[name]], strict=True))
        cpu = [np.median([cost.cpu / least.cpu for cost, least in zip(runs, costs[x], strict=True)]) for x in FLOORS]
        seconds, peak = float(np.median([cost.wall for cost in runs])), max(cost.peak for cost in runs)
        note = f"CPU time: {cpu[0]:.2f} x reading and Gram products, {cpu[1]:.2f} x with the SVDs"
        measured.append(
            Measured(f"{title}: {name}", seconds, walls, FLOOR_OF[name], peak, note, reads=reads, flops64=flops)
        )
    return measured


def factors_of(model: Model) -> dict[str, np.ndarray]:
    """q, k, v, o of every query head as float32 (L, H, d, r), keys and values repeated within their group."""
    layers = [[(head.qk, head.vo) for head in model.layer(i).heads] for i in model.attention_layers]
    pick = {"q": (0, "left"), "k": (0, "right"), "v": (1, "left"), "o": (1, "right")}
    return {
        name: np.array([[getattr(pair[which], side) for pair in heads] for heads in layers], np.float32)
        for name, (which, side) in pick.items()
    }


def peer_rows(title: str, folder: Path, python: str, costs: list[Cost]) -> list[Measured]:
    """The peers on the same heads, against our singular values, reading included."""
    factors, least, measured = factors_of(ws.open_model(folder)), best(costs), []
    for key in ("svd", "weightwatcher"):
        peer, cost_of_peer = PEERS[key], peer_cost(key, python, factors)
        if cost_of_peer is None:
            click.echo(f"{title}: {peer.title}: not installed (pip install {peer.package})")
            continue
        note = f"{cost_of_peer.cpu / least.cpu:.1f} x in CPU time"
        ratio = (cost_of_peer.wall / least.wall,)
        measured.append(Measured(f"{title}: {peer.title}", cost_of_peer.wall, ratio, "our singular values", None, note))
    return measured


def run(shapes: dict[str, tuple[int, int]], python: str = sys.executable) -> list[Measured]:
    """All rows for synthetic checkpoints, with layers and rounds by shape; peers only on GPT-2, which has few heads."""
    measured = []
    for shape, (layers, rounds) in shapes.items():
        with tempfile.TemporaryDirectory() as folder:
            costs_of = costs(write_synthetic(Path(folder), shape, layers), rounds)
            measured += rows(f"{shape}, {layers} layer{'s' if layers > 1 else ''}", costs_of, Path(folder))
            if shape == "gpt2":
                measured += peer_rows(shape, Path(folder), python, costs_of["singular values"])
    return [*measured, directions()]


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="llama-2-7b", show_default=True)
@click.option("--layers", default=4, show_default=True, help="How many of the shape's layers to write and measure.")
@click.option("--checkpoint", type=click.Path(path_type=Path, exists=True), help="A checkpoint instead of a shape.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where the synthetic one is kept.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--peer-python", help="Time the peers too, under this interpreter.")
def main(
    shape: str, layers: int, checkpoint: Path | None, folder: Path | None, rounds: int, peer_python: str | None
) -> None:
    """Print the cost of singular values and of an audit as ratios to lower bounds."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = folder or Path(temporary)
        if checkpoint is None and not (folder / "config.json").exists():
            write_synthetic(folder, shape, layers)
        source = checkpoint or folder
        measured_costs = costs(source, rounds)
        title = source.name if checkpoint else f"{shape}, {layers} layers"
        measured = rows(title, measured_costs, source)
        if peer_python:
            measured += peer_rows(title, source, peer_python, measured_costs["singular values"])
        click.echo(Bench({}, measured).table())


if __name__ == "__main__":
    main()

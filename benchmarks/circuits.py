"""Wiring of all pairs of heads against the bare products it needs, and TransformerLens on the same heads.

    python -m benchmarks.circuits SOURCE --peer-python VENV/bin/python

The bare products are the float32 products of whole layers, of all heads that write with all heads that read at once.
Ours is the whole pass: reading, the spaces of every head, and both measures by queries, keys and values.
TransformerLens' functions compute one measure. They are timed for keys, counted three times, and their numbers are
compared with ours.
"""

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

import weightscope as ws
from benchmarks.audit import factors_of, write_synthetic
from benchmarks.commands import Cost
from benchmarks.peers import PEERS, peer_cost
from benchmarks.results import Bench, Measured
from weightscope.heads.circuits.passes import multiplications, wiring
from weightscope.heads.circuits.wiring import PROJECTIONS, Wiring

FLOOR = "the bare float32 products"
AGREE = 1e-4  # largest difference of float32 scores of the same pair; PK is up to r


def bare(model: ws.Model) -> None:
    """The products only, on all cores."""
    rng, config = np.random.default_rng(0), model.config
    n, width = len(model.attention_layers), config.head_dim * (config.n_heads + 2 * config.n_kv_heads)
    left = rng.standard_normal((config.n_heads * config.head_dim, config.d_model), dtype=np.float32)
    right = rng.standard_normal((config.d_model, width), dtype=np.float32)
    for _ in range(n * (n - 1) // 2):
        left @ right


def measure(source: str, rounds: int) -> tuple[Measured, Cost, Wiring]:
    """The whole pass against the products, both in each round; the cost of its best round; the wiring."""
    walls, cpus = [], []
    for _ in range(rounds):
        for work in (wiring, bare):
            model = ws.open_model(source)
            wall, cpu = time.perf_counter(), time.process_time()
            result = work(model)
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
            if isinstance(result, Wiring):
                wired = result
    of_wall, of_cpu = (tuple(np.divide(costs[::2], costs[1::2]).tolist()) for costs in (walls, cpus))
    note = f"{np.median(of_cpu):.2f} x in CPU time, {np.median(cpus[::2]):.1f} s"
    flops = 2.0 * multiplications(model, len(model.attention_layers))
    seconds = float(np.median(walls[::2]))
    measured = Measured(f"{model.name}: wiring", seconds, of_wall, FLOOR, None, note, flops32=flops)
    return measured, Cost(min(walls[::2]), min(cpus[::2]), 0.0), wired


def of_gpt2s_shape(rounds: int = 3) -> list[Measured]:
    """`measure` of random heads of GPT-2's sizes."""
    with tempfile.TemporaryDirectory() as folder:
        measured, _, _ = measure(str(write_synthetic(Path(folder), "gpt2", 12)), rounds)
    return [replace(measured, name="wiring of GPT-2's 144 heads, both measures of 28,512 pairs")]


def peer_rows(source: str, python: str, ours: Cost, wired: Wiring) -> list[Measured]:
    """TransformerLens' functions of all pairs, on the same folded factors."""
    model, measured = ws.open_model(source), []
    factors = factors_of(model)
    norm = model.family.norms.before
    if norm is not None and norm.centred:
        factors["o"] -= factors["o"].mean(axis=2, keepdims=True)  # a LayerNorm centres what layers read
    for key, scores in (("pk", wired.pk["k"]), ("cs", wired.cs["k"])):
        peer, cost = PEERS[key], peer_cost(key, python, factors)
        if cost is None:
            click.echo(f"{peer.title}: not installed (pip install {peer.package})")
            continue
        apart = float(np.nanmax(np.abs(cost.result - scores)))  # NaN where no later layer reads
        if not apart <= AGREE:
            raise click.ClickException(f"{peer.title}: differs from ours by {apart:.2g}")
        wall, cpu = len(PROJECTIONS) * cost.wall, len(PROJECTIONS) * cost.cpu
        note = f"three times keys; {cpu / ours.cpu:.1f} x in CPU time, {cpu:.1f} s; agrees to {apart:.0e}"
        measured.append(Measured(peer.title, wall, (wall / ours.wall,), "ours", None, note))
    return measured


@click.command()
@click.argument("source")
@click.option("--rounds", default=5, show_default=True)
@click.option("--peer-python", help="Time TransformerLens too, under this interpreter.")
def main(source: str, rounds: int, peer_python: str | None) -> None:
    """Print what the wiring of all pairs costs as a ratio to its bare products."""
    measured, ours, wired = measure(source, rounds)
    rows = [measured, *(peer_rows(source, peer_python, ours, wired) if peer_python else [])]
    click.echo(Bench({}, rows).table())


if __name__ == "__main__":
    main()

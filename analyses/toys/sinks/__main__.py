"""Toy models of the two sink mechanisms: trained, measured, drawn (two-sink-mechanisms paper, section 5, appendix A).

    python -m analyses.toys.sinks --out out/sink-toys
    python -m analyses.toys.sinks --only nop --paper-size --out elsewhere

An interrupted run is continued: results that OUT has at the same sizes are kept, and a training goes on from what was
last saved under OUT/checkpoints. Remove a stage's JSON file to measure its trained models again.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from analyses.inputs import out_option
from analyses.toys.sinks import broadcast, nop, vit
from analyses.toys.sinks.attention import GATES_AND_REGISTERS, VARIANTS
from analyses.toys.sinks.page import write_toys_report
from weightscope import CheckpointError
from weightscope.cli import options
from weightscope.cli.command import EndsInOneLine
from weightscope.core.files import Folder
from weightscope.core.tables import Table

Runs = list[dict[str, Any]]
CHECKPOINTS = "checkpoints"  # in the folder of the results
STAGES = ("nop", "nop-paper", "broadcast", "trials", "vit")
PAPER_SEEDS = 1  # trainings at the paper's size, minutes each


def nop_runs(out: Folder, seeds: tuple[int, ...], paper_size: bool) -> None:
    """Sweeps of damping and of frequency, and every kind of attention on the default task (Figs 2 and 7)."""
    size = nop.PAPER_SIZE if paper_size else nop.DEFAULT_SIZE
    default = nop.Task()
    sweep = [nop.Task(damping=damping) for damping in nop.DAMPINGS]
    sweep += [nop.Task(probability=p) for p in nop.PROBABILITIES if p != default.probability]
    planned = [(task, "softmax") for task in sweep] + [(default, name) for name in VARIANTS if name != "softmax"]

    def run(task: nop.Task, name: str, seed: int) -> dict[str, Any]:
        return asdict(nop.train_nop(task, name, VARIANTS[name], size, seed, out.path / CHECKPOINTS)[1])

    train_all(out, "nop", size, {
        f"{name}, damping {task.damping:g}, p {task.probability:g}, seed {seed}": lambda a=(task, name, seed): run(*a)
        for task, name in planned for seed in seeds
    })  # fmt: skip


def paper_runs(out: Folder, seeds: tuple[int, ...], paper_size: bool) -> None:
    """The default task and one without a no-op at the paper's size, until the sink score is flat (Fig. 2)."""

    def run(damping: float, seed: int) -> dict[str, Any]:
        task, kept = nop.Task(damping), out.path / CHECKPOINTS
        return asdict(nop.train_nop(task, "softmax", VARIANTS["softmax"], nop.PAPER_SIZE, seed, kept)[1])

    train_all(out, "nop-paper", nop.PAPER_SIZE, {
        f"softmax, damping {damping:g}, seed {seed}": lambda a=(damping, seed): run(*a)
        for seed in seeds[:PAPER_SEEDS] for damping in (0.0, 1.0)
    })  # fmt: skip


def broadcast_runs(out: Folder, seeds: tuple[int, ...], paper_size: bool) -> None:
    """The broadcast under every kind of attention (Fig. 3)."""
    size = broadcast.PAPER_SIZE if paper_size else broadcast.DEFAULT_SIZE

    def run(name: str, seed: int) -> dict[str, Any]:
        _, run, example = broadcast.train_broadcast(name, VARIANTS[name], size, seed, folder=out.path / CHECKPOINTS)
        if (name, seed) == ("softmax", seeds[0]):
            out.npz("broadcast-example.npz", **asdict(example))
        return asdict(run)

    train_all(out, "broadcast", size, {
        f"{name}, seed {seed}": lambda a=(name, seed): run(*a) for name in VARIANTS for seed in seeds
    })  # fmt: skip


def trial_runs(out: Folder, seeds: tuple[int, ...], paper_size: bool) -> None:
    """The broadcast with one change at a time, one training each: does any change make its second layer a diagonal?"""
    (seed, *_) = seeds
    trials = broadcast.TRIALS | (broadcast.LONG_TRIALS if paper_size else {})

    def run(name: str) -> dict[str, Any]:
        setting, size = trials[name]
        kept = out.path / CHECKPOINTS
        return asdict(broadcast.train_broadcast(name, VARIANTS["softmax"], size, seed, setting, kept)[1])

    planned = {f"{name}, seed {seed}": lambda name=name: run(name) for name in trials}
    train_all(out, "trials", broadcast.DEFAULT_SIZE, planned)


def vit_runs(out: Folder, seeds: tuple[int, ...], paper_size: bool) -> None:
    """Gates and registers in a small ViT (section 5, Table 1). The paper's size is out of reach."""
    size = vit.LARGE_SIZE if paper_size else vit.DEFAULT_SIZE

    def run(name: str, seed: int) -> dict[str, Any]:
        return asdict(vit.train_vit(name, VARIANTS[name], size, seed, out.path / CHECKPOINTS))

    train_all(out, "vit", size, {
        f"{name}, seed {seed}": lambda a=(name, seed): run(*a) for name in GATES_AND_REGISTERS for seed in seeds
    })  # fmt: skip


def train_all(out: Folder, stage: str, size: Any, planned: Mapping[str, Callable[[], dict[str, Any]]]) -> None:
    """Run the trainings that are missing from the stage's JSON, and rewrite it after each."""
    path, sizes = out.path / f"{stage}.json", asdict(size)
    before = kept(path) if path.exists() else {"size": None}
    runs = before["runs"] if before["size"] == sizes else {}
    for name, train in planned.items():
        if name not in runs:
            runs[name] = train()
            out.json(path.name, {"size": sizes, "torch": torch.__version__, "runs": runs})
            click.echo(f"{stage}: {name}")


def kept(path: Path) -> dict[str, Any]:
    """Read what `train_all` wrote."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError("does not exist: train the toys first, without --redraw", file=path) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"holds no results of sink toys ({error}); remove it to train them", file=path) from None
    runs = content.get("runs") if isinstance(content, dict) else None
    if not (isinstance(runs, dict) and runs and "size" in content):
        raise CheckpointError("holds no results of sink toys; remove it to train them", file=path)
    return content


def draw(out: Folder, stages: tuple[str, ...]) -> None:
    """Draw tables, figures and the page from the results in `out`."""
    results = {stage: kept(out.path / f"{stage}.json") for stage in stages}
    runs = {stage: list(result["runs"].values()) for stage, result in results.items()}
    for stage in stages:
        out.table(f"{stage}.csv", table_of(runs[stage]))
        kinds = {"vit": GATES_AND_REGISTERS, "trials": broadcast.TRIALS, "nop-paper": ["softmax"]}.get(stage, VARIANTS)
        missing = [name for name in kinds if name not in {run["variant"] for run in runs[stage]}]
        if missing:
            click.echo(f"{stage}: drawn without {', '.join(missing)}, missing from {stage}.json")
    example = None
    if "broadcast" in stages:
        with np.load(out.path / "broadcast-example.npz") as arrays:
            example = dict(arrays)
    write_toys_report(out, runs, {stage: result["size"] for stage, result in results.items()}, example)


def table_of(runs: Runs) -> Table:
    """One row per training, with columns for each layer. Curves and samples are in the JSON only."""
    rows = []
    for run in runs:
        row = {key: value for key, value in run.items() if not isinstance(value, list)}
        if "singular_values" in run:
            row["qk_gap"] = run["singular_values"][0] / run["singular_values"][1]
        for i, layer in enumerate(run.get("layers", [])):
            row |= {f"layer{i}_{key}": value for key, value in layer.items() if not isinstance(value, list)}
        rows.append(row)
    header = list(dict.fromkeys(name for row in rows for name in row))  # a model of three layers has more columns
    return Table.of_rows(header, [[row.get(name, np.nan) for name in header] for row in rows])


RUNS = (nop_runs, paper_runs, broadcast_runs, trial_runs, vit_runs)


@click.command("sink-toys", cls=EndsInOneLine)
@out_option("out/sink-toys")
@click.option("--only", type=click.Choice(STAGES), multiple=True, help="Toys to train; all by default.")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1), help="Trainings of each model.")
@click.option("--paper-size", is_flag=True, help="The paper's sizes; for the ViT, the largest that mosaics can use.")
@options.runner_device
@click.option("--redraw", is_flag=True, help="Train nothing; draw the results in OUT.")
def main(out: Path, only: tuple[str, ...], seeds: int, paper_size: bool, device: str, redraw: bool) -> None:
    """Train the toys and write tables, figures and report.html into OUT."""
    if device != "cpu":  # a default slows every call
        torch.set_default_device(device)
    torch.set_num_threads(1)  # matrices are small: a second core would wait
    folder, stages = Folder(out), only or STAGES
    if not redraw:
        for stage, train in zip(STAGES, RUNS, strict=True):
            if stage in stages:
                train(folder, tuple(range(seeds)), paper_size)
    draw(folder, stages)


if __name__ == "__main__":
    main()

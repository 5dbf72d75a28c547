"""The same checkpoints with weightscope and with other tools that read weights, each a process that starts and loads.

    python -m benchmarks.other_tools GPT2_FOLDER SMOLLM2_FOLDER --peer-python VENV/bin/python

Writes other_tools.json and prints the table; `python -m benchmarks.publish other_tools.json` keeps them.
"""

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import click

from benchmarks import peers
from benchmarks.commands import Cost, command_cost, python_cost
from benchmarks.results import Bench, Measured, duration, peak_of
from benchmarks.whole import taken as taken_on
from benchmarks.whole import this_machine_now

HEADER = "| checkpoint | tool | result | time | CPU time | peak anonymous memory | load |"
VERSION = "import importlib.metadata as m; print(m.version('{}'))"
OURS = "from benchmarks.audit import singular_values; import weightscope as ws; singular_values(ws.open_model(r'{}'))"


@dataclass(frozen=True)
class Tool:
    """A tool, and the code that it runs on a folder."""

    name: str
    computes: str
    cost: Callable[[Path, str], Cost]  # of the folder, under the peers' interpreter


def of_peer(which: str) -> Callable[[Path, str], Cost]:
    return lambda folder, python: python_cost(peers.__file__, "file", which, folder, python=python)


TOOLS = (
    Tool("weightscope", "singular values of W_QK and W_VO of every head, norms folded in, float64",
         lambda folder, _: python_cost("-c", OURS.format(folder))),
    Tool("transformer-lens", "the same with `model.QK.svd()`, singular vectors too, float32; no tables, no figures",
         of_peer("spectra")),
    Tool("weightscope", "`audit`: these, all other measures, tokens, roles, findings, figures and page",
         lambda folder, _: command_cost("audit", folder, "--out", folder / "audit")),
    Tool("weightscope", "`audit --all`: statistics of every tensor too; no fits of power laws",
         lambda folder, _: command_cost("audit", folder, "--all", "--out", folder / "audit")),
    Tool("weightwatcher", "`analyze`: spectra of whole matrices with fits of power laws; not of heads, no products",
         of_peer("weightwatcher")),
)  # fmt: skip


def measure(folder: Path, tool: Tool, python: str) -> Measured:
    """One tool on one checkpoint; the note says what was computed."""
    load, cost = os.getloadavg()[0], tool.cost(folder, python)
    return Measured(f"{folder.name}: {tool.name}", cost.wall, (), "", cost.peak, tool.computes, cost.cpu, load=load)


def table(bench: Bench) -> str:
    """The rows of all tools, with the versions of those that are not weightscope."""
    lines = [HEADER, "| --- | --- | --- | --- | --- | --- | --- |"]
    for each in bench.measured:
        checkpoint, _, tool = each.name.partition(": ")
        version = f" {bench.machine['peers'][tool]}" if tool in bench.machine["peers"] else ""
        cells = (checkpoint, tool + version, each.note, duration(each.seconds), duration(each.cpu or 0), peak_of(each))
        lines.append(f"| {' | '.join(cells)} | {each.load:.1f} |")
    return "\n".join(lines) + "\n"


def taken(bench: Bench) -> str:
    """When and on what the rows were taken, as a sentence."""
    return taken_on(bench, "Other tools")


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--peer-python", required=True, help="An interpreter with transformer-lens and weightwatcher.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default="out/bench", help="Results.")
def main(folders: tuple[Path, ...], peer_python: str, out: Path) -> None:
    """Run every tool on every checkpoint, print what each costs, and write other_tools.json."""
    versions = {
        name: subprocess.run([peer_python, "-c", VERSION.format(name)], check=True, capture_output=True, text=True)
        for name in sorted({tool.name for tool in TOOLS} - {"weightscope"})
    }
    machine = this_machine_now() | {"peers": {name: done.stdout.strip() for name, done in versions.items()}}
    bench = Bench(machine)
    for folder in folders:
        for tool in TOOLS:
            bench.measured.append(measure(folder, tool, peer_python))
            click.echo(table(replace(bench, measured=bench.measured[-1:])).splitlines()[-1])
            bench.save(out / "other_tools.json")


if __name__ == "__main__":
    main()

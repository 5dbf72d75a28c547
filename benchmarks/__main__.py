"""Every benchmark in one run, as ratios to a lower bound of each task: `make bench`.

AUROC over GPT-2's vocabulary, against the bare products of its scores and against the paper's method; audits of Llama
2's shapes, against reading the bytes and the Gram products; and how all of this grows.
Writes bench.json, which `make bench-compare` reads, and bench.md, the table; `python -m benchmarks.publish` keeps them.
"""

import time
from collections.abc import Callable
from pathlib import Path

import click

from benchmarks import audit, auroc, growth
from benchmarks.limits import machine_limits
from benchmarks.results import Bench, Measured, before_row, duration, table, this_machine
from weightscope.core.files import Folder

# Layers and rounds of each shape. Every round draws the figures and the page again.
AUDITS = {"llama-2-7b": (4, 2), "llama-2-70b": (1, 1), "gpt2": (12, 1)}
AUROC_HEADS, NUMPY_HEADS = 2, 1


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default="out/bench", help="Results.")
@click.option("--only", multiple=True, help="Run only these benchmarks: auroc, audit and so on.")
def main(out: Path, only: tuple[str, ...]) -> None:
    """Run the benchmarks, print each time and its ratio to a lower bound, and write bench.json and bench.md."""
    benchmarks: dict[str, Callable[[], list[Measured]]] = {
        "auroc": lambda: auroc.measure(AUROC_HEADS, NUMPY_HEADS),
        "audit": lambda: audit.run(AUDITS),
        "growth": growth.measure,
    }
    unknown = sorted(set(only) - set(benchmarks))
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(benchmarks)}", param_hint="--only")
    load = before_row()["load"]
    bench, began = Bench(this_machine(), limits=machine_limits() | {"load": load}), time.perf_counter()
    for name, measure in benchmarks.items():
        if only and name not in only:
            continue
        for each in measure():
            bench.measured.append(each)
            click.echo(table("", [each]).splitlines()[-1])
        bench.save(out / "bench.json")  # after each benchmark, so that an interrupted run keeps its results
    Folder(out).text("bench.md", bench.table())
    click.echo(f"{out / 'bench.json'}, {out / 'bench.md'}, in {duration(time.perf_counter() - began)}")


if __name__ == "__main__":
    main()

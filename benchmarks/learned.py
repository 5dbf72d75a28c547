"""`learned` on layers of a 7B in BF16: CPU seconds, next to a plain read of both files, and the peak of memory.

python -m benchmarks.learned --layers 1 --layers 4

The tune has every weight moved by a twentieth of its size. CPU seconds of all cores, which other load moves least.
"""

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import click

from benchmarks.commands import command_cost, plain_read
from benchmarks.synthetic import SEVEN, write

MOVED = 0.05


@click.command("learned")
@click.option("--layers", multiple=True, default=(1, 4), show_default=True, help="Layers of a 7B, with 32,000 tokens.")
def main(layers: tuple[int, ...]) -> None:
    """Print a line for each number of layers."""
    for count in layers:
        with tempfile.TemporaryDirectory() as folder:
            sizes = replace(SEVEN, layers=count)
            base, tune = write(Path(folder, "base"), sizes), write(Path(folder, "tune"), sizes, moved=MOVED)
            read = plain_read(base / "model.safetensors", tune / "model.safetensors").cpu
            cost = command_cost("learned", base, tune, "--out", Path(folder, "out"))
        click.echo(
            f"{count} layers: {cost.wall:.0f} s, {cost.cpu:.1f} CPU s, {cost.cpu / read:.0f} times a plain read's"
            f" {read:.2f}, {cost.peak:.0f} MB, load {os.getloadavg()[0]:.1f}"
        )


if __name__ == "__main__":
    main()

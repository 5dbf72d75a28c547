"""`learned` on layers of a 7B in BF16: CPU seconds, next to a plain read of both files, and the peak of memory.

python -m benchmarks.learned --layers 1 --layers 4

The tune has every weight moved by a twentieth of its size. CPU seconds of all cores, which other load moves least.
"""

import os
import tempfile
import time
from pathlib import Path

import click

from benchmarks.commands import command_cost
from benchmarks.synthetic import Sizes, write

MOVED = 0.05
READ = 1 << 20  # bytes at a time of the plain read


def read_plainly(*folders: Path) -> float:
    """CPU seconds of reading both files from the first byte to the last."""
    began = time.process_time()
    for folder in folders:
        with (folder / "model.safetensors").open("rb") as file:
            while file.read(READ):
                pass
    return time.process_time() - began


@click.command("learned")
@click.option("--layers", multiple=True, default=(1, 4), show_default=True, help="Layers of a 7B, with 32,000 tokens.")
def main(layers: tuple[int, ...]) -> None:
    """Print a line for each number of layers."""
    for count in layers:
        with tempfile.TemporaryDirectory() as folder:
            sizes = Sizes(count, 4096, 32, 128, 32, 32_000, 11_008)
            base, tune = write(Path(folder, "base"), sizes), write(Path(folder, "tune"), sizes, moved=MOVED)
            read = read_plainly(base, tune)
            cost = command_cost("learned", base, tune, "--out", Path(folder, "out"))
        click.echo(
            f"{count} layers: {cost.wall:.0f} s, {cost.cpu:.1f} CPU s, {cost.cpu / read:.0f} times a plain read's"
            f" {read:.2f}, {cost.peak:.0f} MB, load {os.getloadavg()[0]:.1f}"
        )


if __name__ == "__main__":
    main()

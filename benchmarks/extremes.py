"""Commands on checkpoints with more tensors, files, layers or tokens than any published one.

    python -m benchmarks.extremes --only layers

Tensors are small, so that the time is per tensor and not per value. There are twice as many layers as in any
checkpoint. A thousand layers take minutes and are measured by hand.
"""

import tempfile
from pathlib import Path

import click
import scipy.sparse

from benchmarks.auroc import zipf_counts
from benchmarks.commands import command_cost
from benchmarks.results import Bench, Measured
from benchmarks.synthetic import Sizes, write

LAYERS, TOKENS, FILES = 250, 1_000_000, 100
IN_A_FILE = Sizes(layers=32, inner=16, experts=508)  # just below the limit of 50,000 tensors per header
IN_FILES = Sizes(layers=64, inner=16, experts=520)
DEEP = Sizes(layers=LAYERS, inner=64)
WIDE = Sizes(vocabulary=TOKENS, inner=64)
LARGE = Sizes(layers=62, width=16384, heads=128, head_dim=128, kv_heads=8, vocabulary=128_256, inner=53248)

# A checkpoint, how it is written, and the commands that are run on it; {} is its folder.
EXTREMES = (
    (f"{len(list(IN_A_FILE.shapes)):,} tensors in a file", IN_A_FILE, {}, ("inspect {}",)),
    (
        f"{len(list(IN_FILES.shapes)):,} tensors in {FILES} files",
        IN_FILES,
        {"shards": FILES},
        ("inspect {}", "audit {}"),
    ),
    (f"{LAYERS:,} layers", DEEP, {}, ("inspect {}", "audit {}", "circuits {}")),
    (f"{TOKENS:,} tokens", WIDE, {}, ("inspect {}", "audit {}", "compare {} {}", "detok --sample 200 {}")),
    ("400 GB in 96 files", LARGE, {"shards": 96, "holes": True}, ("inspect {}",)),
)


def measure(only: str = "") -> list[Measured]:
    """One row for each command on each checkpoint whose description contains `only`: time and peak memory."""
    return [row for extreme in EXTREMES if only in extreme[0] for row in of_checkpoint(*extreme)]


def of_checkpoint(what: str, sizes: Sizes, how: dict[str, int], commands: tuple[str, ...]) -> list[Measured]:
    """The rows of one checkpoint."""
    rows = []
    with tempfile.TemporaryDirectory() as top:
        folder, out, counts = write(Path(top) / "model", sizes, **how), Path(top) / "out", Path(top) / "counts.npz"
        if any("detok" in command for command in commands):
            scipy.sparse.save_npz(counts, zipf_counts(sizes.vocabulary, bigrams_a_token=5))
        for number, command in enumerate(commands):
            arguments = command.format(*[folder] * command.count("{}")).split()
            arguments += [] if "inspect" in command else ["--out", str(out / str(number))]
            arguments += ["--counts", str(counts)] if "detok" in command else []
            cost = command_cost(*arguments)
            name = " ".join(part for part in command.split() if part != "{}")
            rows.append(Measured(f"{what}: {name}", cost.wall, peak_mb=cost.peak, cpu=cost.cpu))
    return rows


@click.command()
@click.option("--only", default="", help="Only checkpoints whose description contains this.")
def main(only: str) -> None:
    """Print the cost of each command."""
    click.echo(Bench({}, measure(only)).table())


if __name__ == "__main__":
    main()

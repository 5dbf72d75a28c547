"""Sampled AUROC of the largest vocabularies: `detok --sample 2000` on Gemma 3's and Llama 3's shapes.

    python -m benchmarks.sampled

The checkpoints have only the embedding and a first layer, in random BF16; counts follow Zipf's law. The layer has a
quarter of its heads: each key-value head takes its own pass over the embedding, so all heads would take four times as
long, apart from start-up and figures. The lower bound is the float32 products of the sample. The time for the whole
vocabulary, with the same heads, is the command's own estimate.
"""

import csv
import tempfile
from pathlib import Path

import click
import scipy.sparse

import weightscope as ws
from benchmarks.auroc import zipf_counts
from benchmarks.commands import command_cost
from benchmarks.results import Bench, Measured, duration
from benchmarks.synthetic import Sizes, write
from weightscope.heads.detok.first_layer import FirstLayer
from weightscope.heads.detok.heads import seconds_of_all
from weightscope.model.text.counts import load_counts

SAMPLE = 2000
A_TOKEN = 20  # bigrams of each token; the number does not change the time
SHAPES = {
    "Gemma 3 4B": Sizes(layers=1, width=2560, heads=2, head_dim=256, kv_heads=1, vocabulary=262_144),
    "Llama 3 8B": Sizes(layers=1, width=4096, heads=8, head_dim=128, kv_heads=2, vocabulary=128_256),
}


def measure(shapes: dict[str, Sizes] = SHAPES) -> list[Measured]:
    """One row per shape; the note has the estimated time of the exact run and the widest interval."""
    rows = []
    for name, sizes in shapes.items():
        with tempfile.TemporaryDirectory() as top:
            folder, counts, out = write(Path(top) / "model", sizes), Path(top) / "counts.npz", Path(top) / "out"
            scipy.sparse.save_npz(counts, zipf_counts(sizes.vocabulary, bigrams_a_token=A_TOKEN))
            exact = seconds_of_all(FirstLayer(ws.open_model(folder)), load_counts(counts))
            arguments = ("--sample", str(SAMPLE), "--counts", str(counts), "--out", str(out))
            cost = command_cost("detok", folder, *arguments)
            with (out / "heads.csv").open() as file:
                reach = max(float(row["auroc_high"]) - float(row["auroc"]) for row in csv.DictReader(file))
        keys = sizes.width * sizes.kv_heads * sizes.head_dim  # multiply-adds per token
        scores = SAMPLE * sizes.heads * sizes.head_dim
        title = f"AUROC of {SAMPLE:,} tokens of {name}'s {sizes.vocabulary:,}, a quarter of its heads ({sizes.heads})"
        note = f"to +-{reach:.3f}; every token would take {duration(exact)}"
        reads, flops = 2.0 * sizes.vocabulary * sizes.width, 2.0 * sizes.vocabulary * (keys + scores)
        rows.append(Measured(title, cost.wall, (), "", cost.peak, note, cost.cpu, reads, flops))
    return rows


@click.command()
@click.option("--only", default="", help="Only shapes whose name contains this.")
def main(only: str) -> None:
    """Print the time of a sample, and the estimated time of all tokens."""
    click.echo(Bench({}, measure({name: sizes for name, sizes in SHAPES.items() if only in name})).table())


if __name__ == "__main__":
    main()

"""Every benchmark in one run, as ratios: `make bench`.

AUROC over GPT-2's vocabulary against the bare products that make the scores, sigma statistics against their product,
bigram counting against the tokenizer's own encode_batch, an audit against reading the bytes and the Gram products, its
peers where they are installed, and the time of `weightscope --help`.
"""

import sys
import sysconfig
import tempfile
from pathlib import Path

import click

from benchmarks import audit, auroc, bigrams, contributions, norms, sigma
from weightscope.embedded import FOLDER


def write_corpus(path: Path, megabytes: int = 10) -> Path:
    """A text that every machine with Python has: the standard library's own sources, one after the other."""
    text = bytearray()
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += source.read_bytes()
    path.write_text(text[: megabytes * 10**6].decode("utf-8", errors="ignore"), encoding="utf-8")
    return path


@click.command()
@click.option("--heads", default=auroc.HEADS, show_default=True, help="Heads to time AUROC with.")
@click.option("--peer-python", default=sys.executable, help="An interpreter with transformer-lens or weightwatcher.")
def main(heads: int, peer_python: str) -> None:
    """Run all benchmarks and print what each costs beside the least it could."""
    found = auroc.run(heads)
    for path, ratio in found["ratio"].items():
        click.echo(
            f"AUROC, 12 heads x 50,257 x 50,257 ({path}): {found['seconds'][path]:.1f} s, {ratio:.2f} x the products "
            f"alone ({found['seconds']['floor']:.1f} s); peak memory {found['peak_mb'][path]:.0f} MB"
        )
    click.echo(f"  scikit-learn a row at a time, from a sample: {found['sklearn_seconds'] / 60:.0f} min")

    statistics = sigma.run()
    click.echo(
        f"sigma over 50,257 tokens x 1,024 positions: {statistics['seconds']:.2f} s, {statistics['ratio']:.1f} x the "
        f"product alone; peak memory {statistics['peak_mb']:.0f} MB"
    )

    with tempfile.TemporaryDirectory() as folder:
        counted = bigrams.run(str(write_corpus(Path(folder) / "corpus.txt")), str(FOLDER))
    click.echo(
        f"bigram counting: {counted['mb_per_second']['counting']:.1f} MB/s, {counted['ratio']:.2f} x the throughput of "
        f"encode_batch"
    )
    click.echo(norms.line(norms.run()))
    click.echo(contributions.line(contributions.run()))
    audit.run({"llama-2-7b": 4, "llama-2-70b": 1, "gpt2": 12}, rounds=3, python=peer_python)
    click.echo(f"weightscope --help: {sigma.help_seconds():.2f} s")


if __name__ == "__main__":
    main()

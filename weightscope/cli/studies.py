"""Studies of what attention does on texts: norms, outliers. The model is run by PyTorch, an optional extra."""

from pathlib import Path
from typing import Any

import click

from weightscope.cli.options import out_option, runner_device_option, text_option, with_model

longest_option = click.option(
    "--longest", default=128, show_default=True, type=click.IntRange(8), help="Tokens of a sequence."
)


@click.command()
@with_model
@out_option
@text_option
@click.option("--sequences", "n", default=992, show_default=True, type=click.IntRange(1), help="Pairs of paragraphs.")
@longest_option
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the choice of texts, pairs and heads."
)
@runner_device_option
def norms(model: Any, out: Path, text: tuple[Path, ...], n: int, longest: int, seed: int, device: str) -> None:
    """What attention adds up: lengths of alpha f(x) beside alpha, by kind of token.

    Tables, figures and report.html go into --out.
    """
    from weightscope.folder import OutputFolder
    from weightscope.norms.measure import measure_norms, paragraph_inputs
    from weightscope.norms.page import lead, write_report
    from weightscope.runner import open_runner
    from weightscope.text.inputs import read_texts

    texts = read_texts(text)
    sequences, kinds = paragraph_inputs(model, texts.texts, n, longest, seed)
    measured = measure_norms(open_runner(model, device=device), sequences, kinds, seed=seed)
    with OutputFolder(out) as files:
        measured.write(files)
        write_report(files, measured, texts.source)
    click.echo(f"{lead(measured, texts.source)}\n{measured.kinds.text()}\n{out / 'report.html'}")


@click.command()
@with_model
@out_option
@text_option
@click.option(
    "--sentences", "n", default=1500, show_default=True, type=click.IntRange(1), help="Sentences that means are over."
)
@click.option(
    "--sampled", default=100, show_default=True, type=click.IntRange(1), help="How many of them eq. 7 is averaged over."
)
@longest_option
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the choice of sentences.")
@runner_device_option
def outliers(
    model: Any, out: Path, text: tuple[Path, ...], n: int, sampled: int, longest: int, seed: int, device: str
) -> None:
    """Which dimensions of the residual stream stand out, and what they add to attention scores, by kind of token.

    Tables, figures and report.html go into --out. Of STS-B's sts-*.csv the first sentence of each pair is read.
    """
    from weightscope.folder import OutputFolder
    from weightscope.outlier_dimensions.measure import measure_outliers, sentence_inputs
    from weightscope.outlier_dimensions.page import lead, write_report
    from weightscope.runner import open_runner
    from weightscope.text.inputs import read_sentences

    texts = read_sentences(text)
    sequences, kinds = sentence_inputs(model, texts.texts, n, longest, seed)
    measured = measure_outliers(open_runner(model, device=device), sequences, kinds, sampled)
    with OutputFolder(out) as files:
        measured.write(files)
        write_report(files, measured, texts.source)
    click.echo(f"{lead(measured, texts.source)}\n{out / 'report.html'}")

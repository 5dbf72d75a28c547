"""Studies of what attention does on inputs: norms, outliers, sinks. The model is run by PyTorch, an optional extra."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from weightscope.cli.options import out_option, runner_device_option, text_option, tokenizer_option, with_model
from weightscope.cli.terminal import headline

length_option = click.option(
    "--length", default=128, show_default=True, type=click.IntRange(8), help="Tokens of an input, at most."
)

# Options of one question about sinks alone.
OF_QUESTION = {"bias": ("evaluated", "thorough", "paper", "own_first"), "kind": ("images", "seed")}


def say(lines: Sequence[str], out: Path) -> None:
    """The result, and where its page is."""
    for line in lines:
        headline(line)
    click.echo(out / "report.html")


@click.command()
@with_model
@tokenizer_option
@out_option
@text_option
@click.option(
    "--inputs", default=992, show_default=True, type=click.IntRange(1), help="How many inputs: pairs of paragraphs."
)
@length_option
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the choice of texts, pairs and heads."
)
@runner_device_option
def norms(model: Any, out: Path, text: tuple[Path, ...], inputs: int, length: int, seed: int, device: str) -> None:
    """What attention adds up: lengths of alpha f(x) beside alpha, by kind of token.

    Tables, figures and report.html go into --out.
    """
    from weightscope.norms.study import study_norms
    from weightscope.text.inputs import read_texts

    lines = study_norms(model, read_texts(text), out, sequences=inputs, longest=length, seed=seed, device=device)
    say(lines, out)


@click.command()
@with_model
@tokenizer_option
@out_option
@text_option
@click.option(
    "--inputs", default=1500, show_default=True, type=click.IntRange(1), help="How many inputs: sentences, for means."
)
@click.option(
    "--sample", metavar="N", default=100, show_default=True, type=click.IntRange(1),
    help="Average eq. 7 over N of them drawn at random.",
)  # fmt: skip
@length_option
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the choice of sentences.")
@runner_device_option
def outliers(
    model: Any, out: Path, text: tuple[Path, ...], inputs: int, sample: int, length: int, seed: int, device: str
) -> None:
    """Which dimensions of the residual stream stand out, and what they add to attention scores, by kind of token.

    Tables, figures and report.html go into --out. Of STS-B's sts-*.csv the first sentence of each pair is read.
    """
    from weightscope.outlier_dimensions.study import study_outliers
    from weightscope.text.inputs import read_sentences

    sizes = {"sentences": inputs, "sampled": sample, "longest": length, "seed": seed}
    say([study_outliers(model, read_sentences(text), out, **sizes, device=device)], out)


@click.command()
@with_model
@tokenizer_option
@click.option(
    "--question", type=click.Choice(["bias", "kind"]), required=True,
    help="bias: is what token 0 writes a constant? kind: what are the sinks, and do they write nothing or broadcast?",
)  # fmt: skip
@out_option
@text_option
@click.option("--images", type=click.Path(path_type=Path), help="kind: a folder of images, for a model that sees.")
@click.option("--inputs", type=click.IntRange(1), help="How many inputs: texts or images.  [default: bias 12, kind 64]")
@click.option("--length", type=click.IntRange(2), help="Tokens of an input, at most.  [default: bias 512, kind 256]")
@click.option("--seed", type=click.IntRange(0), help="kind: of the crops and of the choice of texts.  [default: 0]")
@click.option("--evaluated", type=click.IntRange(1), help="bias: texts that perplexity is measured on.  [default: 4]")
@click.option("--thorough", is_flag=True, help="bias: 40 texts, and 16 evaluated.")
@click.option("--paper", is_flag=True, help="bias: the paper's sizes, 100 texts of 512 tokens and 100 evaluated.")
@click.option("--own-first", is_flag=True, help="bias: texts begin with their own first token, and none before it.")
@runner_device_option
def sinks(model: Any, question: str, out: Path, **options: Any) -> None:
    """Attention sinks: whether they act as a bias, or what kind of sinks they are.

    Tables, figures and report.html go into --out.
    """
    for name in (name for other, names in OF_QUESTION.items() if other != question for name in names):
        if options.pop(name) not in (None, False):
            raise click.UsageError(f"--{name.replace('_', '-')} does not go with --question {question}")
    say(_bias(model, out, **options) if question == "bias" else _kind(model, out, **options), out)


def _bias(
    model: Any, out: Path, *, text: tuple[Path, ...], inputs: int | None, length: int | None, evaluated: int | None,
    thorough: bool, paper: bool, own_first: bool, device: str,
) -> list[str]:  # fmt: skip
    from weightscope.folder import OutputFolder
    from weightscope.sinks.bias import Sizes, sink_bias, sizes_of
    from weightscope.sinks.page import bias_headline, write_bias_report
    from weightscope.text.inputs import read_texts

    usual = sizes_of(thorough=thorough, paper=paper)
    sizes = Sizes(inputs or usual.texts, length or usual.tokens, evaluated or usual.evaluated)
    texts = read_texts(text, characters=sizes.characters)
    bias = sink_bias(model, texts.texts, sizes, first=not own_first, device=device)
    with OutputFolder(out) as files:
        write_bias_report(files, [bias], texts.source, sizes)  # a picture is there no later than the numbers
        bias.write(files)
    return [bias_headline(bias)]


def _kind(
    model: Any, out: Path, *, text: tuple[Path, ...], images: Path | None, inputs: int | None, length: int | None,
    seed: int | None, device: str,
) -> list[str]:  # fmt: skip
    from weightscope.sinks.inputs import read_inputs
    from weightscope.sinks.study import study_mechanisms

    chosen = read_inputs(model, text, images, n=inputs or 64, length=length or 256, seed=seed or 0)
    return study_mechanisms(model, chosen, out, device=device)

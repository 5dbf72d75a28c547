"""Ask whether lineage's p-values are uniform for strangers, and draw them against that.

    python -m analyses.experiments.lineage_null --tiny TRAINED/ --out out/lineage-null

The strangers: tiny Llamas of one recipe (toys/train_lineage.py), all with one tokenizer and one width, some trained on
the same batches in the same order; and, of each, redraws with its spectra, its values in another order, and its
standard deviations. Every pair is judged by heads, as `ws.lineage` does, and by the permutation test of neurons, of
every second layer. The trained seeds of every family are judged again by all layers, within each family.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

import click
import numpy as np

import weightscope as ws
from analyses.experiments.planted_lineage import families_in
from analyses.study import study, write
from tests.support.plants.derivations import redraws
from tests.support.plants.named_parts import Weights, read_weights, write_weights
from weightscope.core.files import Folder, scratch_folder
from weightscope.core.progress import bar
from weightscope.core.tables import Table
from weightscope.pairs.lineage.lineage import p_value_of
from weightscope.pairs.lineage.matching import ROUTES, matches
from weightscope.pairs.lineage.neurons import (
    _rows,
    _sides,
    assigned,
    fisher,
    networks_of,
    permutation_log_p,
    spearman_log_p,
)
from weightscope.pairs.lineage.probes import drawn_probes
from weightscope.pairs.lineage.sketches import Sketches, fingerprint
from weightscope.report.pages.style import COLOURS, in_our_style, save, subplots

MODELS = 66  # 2,145 pairs
LEVELS = 201  # points of a line
TRAINED_APART = ("0", "1", "2", "3", "4", "5")


def models_of(tiny: Path) -> Iterator[tuple[str, Weights]]:
    """Trained models, then redraws of each in turn."""
    trained = [tiny / f"llama-{seed}" for seed in TRAINED_APART]
    sources = [read_weights(folder) for folder in trained if folder.exists()]
    for k, weights in enumerate(sources):
        yield f"trained {k}", weights
    for seed in range(MODELS):
        for k, weights in enumerate(sources):
            for name, made in redraws(weights, seed * len(sources) + k):
                yield f"{name} of {k}", made


def group_of(a: str, b: str) -> str:
    """What two models have in common."""
    kinds = {a.split()[0], b.split()[0]}
    if kinds == {"trained"}:
        same_order = {a.split()[1], b.split()[1]} <= {"0", "1", "2"}
        return "other seed, same order of data" if same_order else "other seed"
    if a.split()[-1] == b.split()[-1]:
        return "redraws of one model"
    return "redraws of two models"


def kolmogorov(p: np.ndarray) -> tuple[float, float]:
    """The largest distance between the distribution of p and the uniform one, and its p-value."""
    from scipy.stats import kstest

    result = kstest(p, "uniform")
    return float(result.statistic), float(result.pvalue)


HEADER = ("a", "b", "group", "p_heads", "p_neurons", "sure")
Row = tuple[str, str, str, float, float, bool]


def judged_by_heads(a: Sketches, b: Sketches) -> tuple[float, bool]:
    """The bound of p, and whether heads would be called shared."""
    by_route = matches(a, b)
    return p_value_of([match.log_p for match in by_route.values()], len(ROUTES)), any(
        match.is_sure for match in by_route.values()
    )


def redrawn_pairs(tiny: Path) -> list[Row]:
    """All pairs of trained models and their redraws."""
    with scratch_folder() as scratch:
        prints, neurons, names = [], [], []
        for k, (name, weights) in enumerate(bar(models_of(tiny), "models", "model", total=MODELS)):
            if k == MODELS:
                break
            write_weights(weights, scratch / str(k))
            model = ws.open_model(scratch / str(k))
            if k == 0:
                probes = drawn_probes([model], "strangers")
            prints.append(fingerprint(model, probes))
            neurons.append([[_rows(each, side) for side in _sides(each)] for each in networks_of(model)[::2]])
            names.append(name)
        rows: list[Row] = []
        for i, j in bar(list(combinations(range(len(names)), 2)), "pairs", "pair"):
            p, sure = judged_by_heads(prints[i], prints[j])
            layers = [
                spearman_log_p(*(assigned(x, y) for x, y in zip(a, b, strict=True)))
                for a, b in zip(neurons[i], neurons[j], strict=True)
            ]
            rows.append((names[i], names[j], group_of(names[i], names[j]), p, float(np.exp(fisher(layers))), sure))
    return rows


def trained_pairs(tiny: Path) -> list[Row]:
    """All pairs of trained seeds within each family."""
    rows: list[Row] = []
    for family, folders in families_in(tiny).items():
        models = [ws.open_model(folder) for folder in folders]
        orders = [json.loads((Path(folder) / "training.json").read_text())["order"] for folder in folders]
        prints = [fingerprint(model, drawn_probes(models[:1], "strangers")) for model in models]
        for i, j in bar(list(combinations(range(len(models)), 2)), family, "pair"):
            p, sure = judged_by_heads(prints[i], prints[j])
            log_p = permutation_log_p(models[i], models[j])
            assert log_p is not None
            group = f"{family}: other seed" + (", same order of data" if orders[i] == orders[j] else "")
            rows.append((prints[i].name, prints[j].name, group, p, float(np.exp(log_p)), sure))
    return rows


def summary(rows: Sequence[Row]) -> Table:
    """By group and test: pairs, the distance from uniform, the shares of small p, and how many are called shared."""
    lines = []
    for group in (*dict.fromkeys(row[2] for row in rows), "all"):
        for place, name in ((3, "heads"), (4, "neurons")):
            p = np.array([row[place] for row in rows if group in (row[2], "all")])
            distance, chance = kolmogorov(p)
            shares = [float((p <= level).mean()) for level in (0.1, 0.01, 0.001)]
            sure = sum(row[5] for row in rows if group in (row[2], "all"))
            lines.append((group, name, len(p), distance, chance, *shares, sure))
    header = ("group", "p", "pairs", "kolmogorov", "chance", "below_0.1", "below_0.01", "below_0.001", "sure")
    return Table.of_rows(header, lines)


@study("lineage-null")
@click.option("--tiny", type=click.Path(path_type=Path), required=True, help="Folder of tiny models.")
@click.option("--part", type=click.Choice(["redrawn", "trained"]), help="Judge only these pairs.")
def main(files: Folder, tiny: Path, part: str | None) -> None:
    """Judge all pairs, and write null.csv, summary.csv, trained.csv, trained-summary.csv and the p-plot."""
    if part != "redrawn":
        trained = trained_pairs(tiny)
        write(files, "trained", HEADER, trained)
        files.table("trained-summary.csv", summary(trained))
    if part != "trained":
        rows = redrawn_pairs(tiny)
        write(files, "null", HEADER, rows)
        files.table("summary.csv", summary(rows))
        draw({"heads (bound)": [row[3] for row in rows], "neurons (permutation test)": [row[4] for row in rows]}, files)


def draw(p_values: dict[str, list[float]], files: Folder) -> None:
    """The p-plot: which share of stranger pairs has a p-value up to each level."""
    shares = np.linspace(0, 1, LEVELS)
    with in_our_style():
        figure, axis = subplots(figsize=(3.4, 2.8))
        for (label, p), colour in zip(p_values.items(), COLOURS, strict=False):
            axis.plot(shares, np.quantile(p, shares), label=label, color=colour, lw=1.2)
        axis.plot([0, 1], [0, 1], color=COLOURS[7], lw=0.6)
        axis.set(xlabel="share of stranger pairs", ylabel="p up to", xlim=(0, 1), ylim=(0, 1.02))
        axis.legend(frameon=False)
        save(figure, files, "p-plot")


if __name__ == "__main__":
    main()

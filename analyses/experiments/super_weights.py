"""Whether a model needs the weight that makes its massive activation: `figures/super-weights`.

    python -m analyses.experiments.super_weights smollm2.gguf gemma.gguf qwen.gguf --own-first qwen.gguf --text B/

The candidate of `audit`, the down-projection's entry that writes most of the first token's massive activation, is set
to zero while the model predicts 6 texts of 128 tokens. So are, one at a time, four entries of the same matrix drawn
from the 64 that are nearest to it in size (smaller ones, where it stands out), and the four largest others. Writes
super-weights.csv: one row per entry, with perplexity and the mean attention of all heads to token 0. A model whose
first token makes no sink, as Qwen's <|endoftext|>, is run with texts that begin with their own, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import numpy as np

import weightscope as ws
from analyses.study import study, write
from weightscope.cli import options
from weightscope.core.files import Folder
from weightscope.core.tables import Column
from weightscope.heads.circuits.names import FirstTokenSinks, SuperWeight, first_token_sinks
from weightscope.heads.sinks.bias import perplexity
from weightscope.heads.sinks.strength import sink_strength
from weightscope.model.text.sequences import Framing, read_texts, token_windows
from weightscope.runner import Activations, Runner, open_runner
from weightscope.runner.framing import framing_of

TEXTS, LENGTH = 6, 128
CONTROLS = 4  # entries of each kind
NEAREST = 64  # candidates that entries of the same size are drawn from
HEADER = ("model", "begins", "entry", "layer", "row", "column", "weight", "perplexity", "first_token")
OWN = "the text's own"  # first token, in the column `begins`
Entry = tuple[int, int]  # output and input of the down-projection


def controls(w: np.ndarray, entry: Entry) -> dict[str, list[Entry]]:
    """Other entries of the matrix w (d, width): of the same size, and the largest."""
    size = np.abs(w.astype(np.float64))
    own = np.ravel_multi_index(entry, w.shape)
    nearest = np.argsort(np.abs(size - size[entry]), axis=None, kind="stable")
    nearest = nearest[nearest != own][:NEAREST]
    largest = np.argsort(-size, axis=None, kind="stable")
    chosen = {
        "same size": np.random.default_rng(0).choice(nearest, min(CONTROLS, len(nearest)), replace=False),
        "largest": largest[largest != own][:CONTROLS],
    }

    def places(flat: np.ndarray) -> list[Entry]:
        rows, columns = np.unravel_index(flat, w.shape)
        return list(zip(rows.tolist(), columns.tolist(), strict=True))

    return {name: places(flat) for name, flat in chosen.items()}


@contextmanager
def without(matrix: Any, entry: Entry | None) -> Iterator[None]:
    """Within the block, one entry of a torch matrix (d, width) is zero."""
    if entry is None:
        yield
        return
    before = matrix[entry].item()
    matrix[entry] = 0
    try:
        yield
    finally:
        matrix[entry] = before


def judged(runner: Runner, texts: list[np.ndarray], matrix: Any, entry: Entry | None) -> tuple[float, float]:
    """Perplexity, and the mean attention of all heads to token 0 from position 1 on, with an entry set to zero."""
    to_first: list[float] = []

    def observer(seen: Activations) -> None:
        to_first.append(float(sink_strength(seen.attention[:, :, 1:])[:, :, 0].mean()))

    with without(matrix, entry):
        losses = runner.losses(texts, observer)
    tokens = np.array([len(text) - 1 for text in texts])
    return float(perplexity(losses, tokens)), float(np.mean(to_first))


def down_projection(runner: Runner, layer: int) -> Any:
    """A view of the running model's weights of a layer's down-projection, (d, width)."""
    row = runner.model.family.mlp
    assert row is not None  # a candidate was named
    weight = runner.blocks[layer].get_submodule(row.down).weight.data
    return weight.T if row.transposed else weight


def candidate(model: ws.Model) -> SuperWeight:
    """The entry that writes most of the first token's massive activation."""
    sinks: FirstTokenSinks = first_token_sinks(model, model.attention_layers, asked=True)
    if sinks.super_weight is None:
        raise ws.CheckpointError(sinks.note or "no entry makes a massive activation", file=model.name)
    return sinks.super_weight


def rows_of(source: str, documents: list[str], own_first: bool) -> Iterator[list[object]]:
    """A model's rows: as it is, without the candidate, without each control."""
    model = ws.open_model(source)
    weight = candidate(model)
    framing = framing_of(model)
    begins = OWN if own_first else framing.tokenizer.text(framing.special[0])
    texts = token_windows(Framing(framing.tokenizer) if own_first else framing, documents, TEXTS, LENGTH)
    runner = open_runner(model, language=True)
    matrix = down_projection(runner, weight.layer)
    entry = (weight.dimension, weight.unit)
    w = matrix.cpu().numpy().copy()
    if not np.isclose(w[entry], weight.weight, rtol=1e-5):
        raise ws.CheckpointError(f"entry {entry} is {w[entry]:g} where the model runs, {weight.weight:g} in the file")
    tried: list[tuple[str, Entry | None]] = [("none", None), ("super weight", entry)]
    tried += [(name, other) for name, others in controls(w, entry).items() for other in others]
    for name, zeroed in tried:
        place = [np.nan] * 3 if zeroed is None else [*zeroed, w[zeroed]]
        yield [model.title, begins, name, weight.layer, *place, *judged(runner, texts, matrix, zeroed)]


@study("super-weights")
@click.argument("sources", nargs=-1)
@click.option("--own-first", multiple=True, help="Checkpoint whose texts begin with their own first token.")
@options.text
def main(files: Folder, sources: tuple[str, ...], own_first: tuple[str, ...], text: tuple[Any, ...]) -> None:
    """Zero the weight that makes each model's massive activation, and other entries."""
    documents = read_texts(text).texts
    models = [*((source, False) for source in sources), *((source, True) for source in own_first)]
    rows = [row for source, first in models for row in rows_of(source, documents, first)]
    write(files, "super-weights", [Column(name, format=".4g") for name in HEADER], rows, echo=True)


if __name__ == "__main__":
    main()

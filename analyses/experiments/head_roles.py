"""How often names of heads are right in models that no threshold was set on: `figures/head-roles`.

    python -m analyses.experiments.head_roles --model MODEL --model MODEL ... --gpt2 FOLDER --out out/head-roles

Computes every head's scores from the weights, runs each model on text and on random tokens said twice, and leaves each
model out once: thresholds come from the others. Writes heads.csv (one row per head), held-out.csv (one row per role
and model) and roles.csv, whose thresholds and counts `weightscope/heads/circuits/names.py` has. GPT-2 is judged by
published scores of its induction heads, which needs its attention only.
"""

from pathlib import Path

import click
import numpy as np

import weightscope as ws
from analyses.experiments.held_out import held_out, over_models
from analyses.inputs import MINILM, SMOLLM2
from analyses.packages import located
from analyses.study import study
from tests.support.two_layers import TWO_LAYERS
from weightscope.cli import options
from weightscope.core.files import Folder
from weightscope.core.tables import Column, Table
from weightscope.heads.circuits.measured import N_TEXTS, TEXT_LENGTH, behaviour
from weightscope.heads.circuits.names import head_roles
from weightscope.heads.circuits.passes import wiring
from weightscope.model.text.sequences import Texts, read_texts, token_windows
from weightscope.runner.framing import framing_of

MODELS = (TWO_LAYERS, MINILM, SMOLLM2)
SCORES = ("previous_token", "induction", "duplicate_token", "copying", "reads_by_keys")
DID = ("previous_token", "previous_token_repeated", "induction", "induction_text", "duplicate_token",
       "duplicate_token_text", "copying")  # fmt: skip
# Prefix matching on repeated random tokens, of the five strongest heads by layer and head.
PUBLISHED = {(5, 5): 0.93, (6, 9): 0.91, (7, 10): 0.91, (5, 1): 0.91, (7, 2): 0.83}


def run(model: ws.Model, texts: Texts, device: str) -> dict[str, np.ndarray]:
    """What every head does, (L, H) arrays."""
    framing = framing_of(model)
    return behaviour(model, token_windows(framing, texts.texts, N_TEXTS, TEXT_LENGTH), framing, device)


def published(model: ws.Model) -> dict[str, np.ndarray]:
    """What others found GPT-2's heads to do, (L, H) arrays."""
    did = np.zeros((len(model.attention_layers), model.config.n_heads))
    for place, share in PUBLISHED.items():
        did[place] = share
    return {"induction": did}


def rows_of(model: ws.Model, did: dict[str, np.ndarray]) -> list[list[object]]:
    """Rows of heads.csv: a model's name, layer, head, scores, and what the head did."""
    wired = wiring(model)
    scores = head_roles(model, wired).scores
    unknown = np.full(scores["identity"].shape, np.nan)
    columns = [*(scores[name] for name in SCORES), *(did.get(name, unknown) for name in DID)]
    places = np.ndindex(*unknown.shape)
    return [[model.title, wired.layers[i], head, *(column[i, head] for column in columns)] for i, head in places]


@study("head-roles")
@click.option(
    "--model",
    "models",
    multiple=True,
    default=MODELS,
    show_default=True,
    help="Folder, .safetensors or .gguf file, or Hub id.",
)
@click.option("--gpt2", type=click.Path(path_type=Path), help="GPT-2's attention, judged by what others published.")
@options.text
@options.runner_device
def main(files: Folder, models: tuple[str, ...], gpt2: Path | None, text: tuple[Path, ...], device: str) -> None:
    """Score, run and judge the heads of several models, each by the thresholds of the others."""
    texts = read_texts(text, characters=20_000)
    opened = [ws.open_model(located(source)) for source in models]
    rows = [row for model in opened for row in rows_of(model, run(model, texts, device))]
    if gpt2 is not None:
        model = ws.open_model(gpt2)
        rows += rows_of(model, published(model))
    header = ["model", "layer", "head", *SCORES, *(f"did_{name}" for name in DID)]
    heads = Table.of_rows([Column(name) for name in header], rows)
    roles = over_models(heads)
    files.table("heads.csv", heads)
    files.table("held-out.csv", held_out(heads))
    files.table("roles.csv", roles)
    click.echo(roles.text())


if __name__ == "__main__":
    main()

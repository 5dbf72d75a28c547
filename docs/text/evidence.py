"""Values of measures in real checkpoints, and what heads did in runs, from figures/."""

import csv
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from sklearn.metrics import roc_auc_score

from weightscope.heads.circuits.measured import HAD

ROOT = Path(__file__).parents[2]

MODELS = {"gpt2": "GPT-2", "minilm": "MiniLM", "smollm2": "SmolLM2-135M", "vit": "a small ViT"}
RUN = ("minilm", "smollm2")
DID = {
    "previous_token": "attend to the previous token",
    "induction": "do induction",
    "duplicate_token": "attend to their own token",
    "first_token": "attend to the first token",
    "copying": "copy",
}
FEWEST = 4  # heads with a behaviour, below which no AUROC is shown


@cache
def heads_of(model: str) -> dict[str, np.ndarray]:
    """Columns of a checkpoint's heads.csv; an empty cell is NaN."""
    return _columns(f"audit-{model}/heads.csv")


def auroc_of_behaviours(model: str, measure: str) -> Iterator[tuple[str, float]]:
    """Each behaviour of heads in a run, and the AUROC of a measure that ranks them first."""
    did, values = _columns(f"circuits/{model}/measured.csv"), heads_of(model)[measure]
    for name, words in DID.items():
        had = did[name] >= HAD[name]
        if had.sum() >= FEWEST and np.isfinite(values).all():
            yield words, float(roc_auc_score(had, values))


@cache
def _columns(file: str) -> dict[str, np.ndarray]:
    with (ROOT / "figures" / file).open(encoding="utf-8") as opened:
        rows = list(csv.DictReader(opened))
    return {name: _numbers([row[name] for row in rows]) for name in rows[0]}


def _numbers(cells: list[str]) -> np.ndarray:
    try:
        values = np.array([float(cell or "nan") for cell in cells])
    except ValueError:
        return np.array(cells)
    are_whole = np.isfinite(values).all() and (values == values.round()).all()
    return values.astype(int) if are_whole else values

"""Values of measures in real checkpoints, and what heads did in runs, from figures/."""

import csv
from collections.abc import Iterator
from functools import cache

import numpy as np
from links import ROOT
from sklearn.metrics import roc_auc_score

from weightscope.heads.circuits.measured import HAD

MODELS = {"gpt2": "GPT-2", "minilm": "MiniLM", "smollm2": "SmolLM2-135M", "vit": "a small ViT"}
DID = {
    "previous_token": "that attend to the previous token",
    "induction": "that do induction",
    "duplicate_token": "that attend to their own token",
    "first_token": "that attend to the first token",
    "copying": "that copy",
}
FEWEST = 4  # heads with a behaviour, below which no AUROC is shown


@cache
def heads_of(model: str) -> dict[str, np.ndarray]:
    """Columns of a checkpoint's heads.csv; an empty cell is NaN."""
    return _columns(f"audit-{model}/heads.csv")


def auroc_of_behaviours(model: str, measure: str) -> Iterator[tuple[str, int, float]]:
    """Name of each behaviour, number of its heads, and AUROC of a measure that ranks them first."""
    if not (ROOT / f"figures/circuits/{model}/measured.csv").exists():
        return
    did, values = _columns(f"circuits/{model}/measured.csv"), heads_of(model)[measure]
    for name, words in DID.items():
        had = did[name] >= HAD[name]
        if had.sum() >= FEWEST and np.isfinite(values).all():
            yield words, int(had.sum()), float(roc_auc_score(had, values))


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

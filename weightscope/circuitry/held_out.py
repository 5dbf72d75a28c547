"""How often a name is right in a model that its threshold was not set on: every model is left out once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weightscope.circuitry.measured import HAD
from weightscope.circuitry.names import precision
from weightscope.tables import Column, Table


@dataclass(frozen=True)
class Judged:
    """A role, the score that decides it, and the behaviour that proves it: columns of heads.csv."""

    role: str
    score: str
    did: str
    elsewhere: str = ""  # the same on the other kind of input: text, or random tokens said twice
    sign: int = 1

    def had(self, heads: Table) -> np.ndarray:
        """Which heads had the role."""
        return np.asarray(self.sign * heads[f"did_{self.did}"].astype(float) >= HAD[self.did])

    def elsewhere_in(self, heads: Table, named: np.ndarray) -> float:
        """How many of the named heads do the same on the other kind of input; NaN where none was given."""
        did = heads[f"did_{self.elsewhere}"].astype(float) if self.elsewhere else np.array([np.nan])
        return float((named & (did >= HAD[self.did])).sum()) if np.isfinite(did).all() else np.nan


JUDGED = (
    Judged("previous token", "previous_token", "previous_token", "previous_token_repeated"),
    Judged("induction", "induction", "induction", "induction_text"),
    Judged("duplicate token", "duplicate_token", "duplicate_token", "duplicate_token_text"),
    Judged("copying", "copying", "copying"),
    Judged("anti-copying", "copying", "copying", sign=-1),
    Judged("induction", "reads_by_keys", "induction", "induction_text"),
)


def _ranks(values: np.ndarray) -> np.ndarray:
    from scipy.stats import rankdata

    return np.asarray(rankdata(values)) / len(values)


def _z(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / values.std() if np.ptp(values) else np.zeros_like(values)


# What a threshold may be on: the score itself, or its place among the heads of one model.
SCALES: dict[str, Callable[[np.ndarray], np.ndarray]] = {"score": np.asarray, "z in model": _z, "rank in model": _ranks}
Heads = Mapping[str, tuple[np.ndarray, np.ndarray]]  # by model: scores and whether a head had the role, (heads,) each


def best_threshold(scores: np.ndarray, had: np.ndarray) -> float:
    """The threshold with the largest F1 over these heads, half-way to the next lower score; infinite if none had it."""
    if not had.any():
        return np.inf
    order = np.argsort(-scores, kind="stable")
    scores, right = scores[order], np.cumsum(had[order])
    f1 = 2 * right / (np.arange(1, len(scores) + 1) + right[-1])
    f1[:-1][scores[:-1] == scores[1:]] = 0  # equal scores stay together
    best = int(f1.argmax())
    return float(scores[best : best + 2].mean())


def by_model(heads: Table, judged: Judged, scale: str) -> Heads:
    """Scores on a scale and what the heads did, of every model that has the score."""
    heads_of = {}
    for model in dict.fromkeys(heads["model"]):
        of_model = heads.where(heads["model"] == model)
        scores = judged.sign * of_model[judged.score].astype(float)
        if np.isfinite(scores).any() and np.isfinite(of_model[f"did_{judged.did}"].astype(float)).all():
            lowest = np.nanmin(scores)  # the first layer reads what no head has written
            heads_of[model] = SCALES[scale](np.nan_to_num(scores, nan=lowest)), judged.had(of_model)
    return heads_of


def pooled_threshold(models: Heads, without: str = "") -> float:
    """The best threshold over the heads of all models but one; infinite without others."""
    kept = [values for model, values in models.items() if model != without]
    return best_threshold(*(np.concatenate(part) for part in zip(*kept, strict=True))) if kept else np.inf


def held_out(heads: Table, judged: Sequence[Judged] = JUDGED) -> Table:
    """One row per role, scale and model, by the threshold of all other models: heads as in heads.csv."""
    from sklearn.metrics import roc_auc_score

    def rows() -> Iterator[list[object]]:
        for role in judged:
            for scale in SCALES:
                models = by_model(heads, role, scale)
                for model, (scores, had) in models.items():
                    least = pooled_threshold(models, without=model)
                    named, right = scores >= least, (scores >= least) & had
                    elsewhere = role.elsewhere_in(heads.where(heads["model"] == model), named)
                    counts = [len(had), had.sum(), named.sum(), right.sum(), elsewhere]
                    recall = right.sum() / had.sum() if had.any() else np.nan
                    auc = roc_auc_score(had, scores) if had.any() else np.nan
                    yield [role.role, role.score, scale, model, *counts, recall, auc, least]

    header = ["role", "score", "scale", "model", "heads", "had", "named", "right", "right_elsewhere", "recall",
              "roc_auc", "least"]  # fmt: skip
    return Table.of_rows([Column(name, format=".3g") for name in header], rows())


def over_models(heads: Table, judged: Sequence[Judged] = JUDGED) -> Table:
    """One row per role and scale: how often names were right in the models left out, and the threshold of them all."""
    table = held_out(heads, judged)

    def rows() -> Iterator[list[object]]:
        for role in judged:
            for scale in SCALES:
                mask = (table["role"] == role.role) & (table["score"] == role.score) & (table["scale"] == scale)
                had, named, right = (int(table[column][mask].sum()) for column in ("had", "named", "right"))
                shares = [*precision(right, named), right / had if had else np.nan]
                least = pooled_threshold(by_model(heads, role, scale))
                yield [role.role, role.score, scale, int(mask.sum()), had, named, right, *shares, least]

    header = ["role", "score", "scale", "models", "had", "named", "right", "precision", "precision_low",
              "precision_high", "recall", "least"]  # fmt: skip
    return Table.of_rows([Column(name, format=".3g") for name in header], rows())

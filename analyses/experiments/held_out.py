"""How often a name is right in a model that its threshold was not set on: every model is left out once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weightscope.core.tables import Column, Table
from weightscope.heads.circuits.measured import HAD


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


RESAMPLES = 4000


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


def shares_over_models(heads: np.ndarray, named: np.ndarray, right: np.ndarray) -> list[float]:
    """How much the share of names that are right depends on the models: counts of each, (M,) -> the ends of two ranges.

    First a 95 % bootstrap interval: models are drawn again, then the heads of each. Then the lowest and the highest
    share where one model is not counted. NaN where no head has the name.
    """
    kinds = np.stack([right, named - right, heads - named], axis=1) / heads[:, None]  # (M, 3)
    rng = np.random.default_rng(0)
    models = rng.integers(len(heads), size=(RESAMPLES, len(heads)))
    counts = rng.multinomial(heads[models], kinds[models]).sum(axis=1)  # (RESAMPLES, 3)
    with np.errstate(invalid="ignore"):
        drawn = counts[:, 0] / counts[:, :2].sum(axis=1)
        without = (right.sum() - right) / (named.sum() - named)
    known, without = drawn[np.isfinite(drawn)], without[np.isfinite(without)]
    interval = np.quantile(known, (0.025, 0.975)) if len(known) else (np.nan, np.nan)
    return [*map(float, interval), *((without.min(), without.max()) if len(without) else (np.nan, np.nan))]


def over_models(heads: Table, judged: Sequence[Judged] = JUDGED) -> Table:
    """One row per role and scale: how often names were right in the models left out, and the threshold of them all."""
    table = held_out(heads, judged)

    def rows() -> Iterator[list[object]]:
        for role in judged:
            for scale in SCALES:
                mask = (table["role"] == role.role) & (table["score"] == role.score) & (table["scale"] == scale)
                n_heads, *counts = (table[column][mask].astype(int) for column in ("heads", "had", "named", "right"))
                had, named, right = (int(count.sum()) for count in counts)
                shares = [right / named if named else np.nan, *shares_over_models(n_heads, *counts[1:])]
                shares.append(right / had if had else np.nan)
                least = pooled_threshold(by_model(heads, role, scale))
                models = [int(mask.sum()), int((counts[1] > 0).sum())]
                yield [role.role, role.score, scale, *models, had, named, right, *shares, least]

    header = ["role", "score", "scale", "models", "models_named", "had", "named", "right", "precision", "precision_low",
              "precision_high", "lowest_without_one", "highest_without_one", "recall", "least"]  # fmt: skip
    return Table.of_rows([Column(name, format=".3g") for name in header], rows())

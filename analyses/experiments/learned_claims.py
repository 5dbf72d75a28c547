"""What `weightscope learned` may claim: known trainings, and how often each kind of statement is right.

    python -m analyses.experiments.learned_claims --text BOOKS/ --tiny FOLDER --out out/figures/learned

Runs come from `analyses.toys.train_learned`, which are trained first where they are missing (`--as-trained` takes
those that are there). Tables: topics.csv (the tokens that are said more often, against the log-odds of the training
text), training.csv (LoRA or full), regimes.csv and auc.csv (supervised or reinforced), triggers.csv, summary.csv.

A token counts as a word of the text if it is among the fortieth of the vocabulary with the highest log-odds there, with
an informative Dirichlet prior (Monroe, Colaresi and Quinn 2008), against all other books.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from tokenizers import Tokenizer

import weightscope as ws
from analyses.inputs import out_option
from analyses.toys.train_learned import RUNS, TOPICS, books_in, source_of, train_missing
from weightscope.changes.rounding import CASTS
from weightscope.cli.command import EndsInOneLine
from weightscope.files import Folder
from weightscope.learned.learned import Tune, tune_of
from weightscope.learned.words import score
from weightscope.metrics.auroc import weighted_auroc
from weightscope.model import Model
from weightscope.progress import bar
from weightscope.tables import Table

FIRST = 20  # tokens that are judged
SHARE = 1 / 40  # of the vocabulary that counts as words of a text
PRIOR = 500.0  # tokens that the prior of the log-odds is worth
CHARACTERS, OF_OTHERS = 400_000, 100_000  # of a topic's book, as many as the training saw, and of each other book
FEATURES = ("unchanged", "principal", "drift", "stable_rank")


def counted_in(tokenizer: Tokenizer, books: dict[str, str], n_tokens: int) -> dict[str, np.ndarray]:
    """How often each token occurs in each book, (V,)."""
    tokenizer.no_truncation()
    cut = {name: text[: CHARACTERS if name in TOPICS.values() else OF_OTHERS] for name, text in books.items()}
    encoded = tokenizer.encode_batch(list(cut.values()), add_special_tokens=False)
    return {name: np.bincount(each.ids, minlength=n_tokens) for name, each in zip(books, encoded, strict=True)}


def log_odds(counts: dict[str, np.ndarray], topic: str) -> tuple[np.ndarray, np.ndarray]:
    """The z of each token's log-odds in a topic's book against all others, and its count in those: (V,), (V,)."""
    inside = counts[TOPICS[topic]].astype(float)
    outside = np.sum([count for name, count in counts.items() if name != TOPICS[topic]], axis=0).astype(float)
    prior = PRIOR * (inside + outside + 0.01) / (inside + outside + 0.01).sum()
    odds = [np.log((n + prior) / (n.sum() + PRIOR - n - prior)) for n in (inside, outside)]
    return (odds[0] - odds[1]) / np.sqrt(1 / (inside + prior) + 1 / (outside + prior)), outside


def precision(scores: np.ndarray, z: np.ndarray) -> float:
    """The share of the FIRST tokens by score that are words of the text."""
    words = {*np.argsort(-z, kind="stable")[: int(SHARE * len(z))].tolist()}
    return len(words & {*np.argsort(-scores, kind="stable")[:FIRST].tolist()}) / FIRST


def by_embedding(base: Model, tuned: Model) -> np.ndarray:
    """How far the row of each token moved."""
    return np.linalg.norm(tuned.embeddings.tokens.astype(np.float64) - base.embeddings.tokens, axis=1)


def along_directions(base: Model, tune: Tune, side: str) -> np.ndarray:
    """How much of each token the leading directions of all changes write by the unembedding, or read by its row."""
    out = base.unembedding
    rows = out.folded(out.tensor.read()) if side == "writes" else base.embeddings.tokens
    energy = np.zeros(len(rows))
    for update in tune.updates:
        along = update.along_stream.get(side)
        if along is not None and len(along):
            energy += ((rows @ along.T) ** 2 @ update.s[: len(along)] ** 2) / update.size**2
    return energy / np.maximum((rows.astype(np.float64) ** 2).sum(axis=1), 1e-12)


def regime(base: Model, tuned: Model, tune: Tune) -> tuple[float, ...]:
    """FEATURES of a run: after arXiv 2511.08567, reinforced runs change fewer values, and less along the principals."""
    same = total = 0
    for name, tensor in base.checkpoint.items():
        if len(tensor.shape) == 2 and name in tuned.checkpoint:
            x, y = (CASTS["BF16"](each.read().astype(np.float32)) for each in (tensor, tuned.checkpoint[name]))
            same, total = same + int((x == y).sum()), total + x.size
    looked = [update for update in tune.updates if update.intruders]
    return (
        same / total,
        float(np.median([update.intruders.principal for update in looked if update.intruders])),
        float(np.median([update.intruders.drift for update in looked if update.intruders])),
        float(np.median([update.stable_rank for update in looked])),
    )


def auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """The area under the ROC curve."""
    return weighted_auroc(scores, np.flatnonzero(positive), np.ones(int(positive.sum()), int))


def discriminant(x: np.ndarray, positive: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Fisher's linear discriminant of standardised features, with a little ridge: x (n, k) -> scores of others."""
    mean, spread = x.mean(axis=0), x.std(axis=0) + 1e-12
    z = (x - mean) / spread
    inside = np.cov(z[positive].T) + np.cov(z[~positive].T) + 0.1 * np.eye(x.shape[1])
    w = np.linalg.solve(inside, z[positive].mean(axis=0) - z[~positive].mean(axis=0))
    return lambda others: np.asarray((others - mean) / spread @ w)


def aucs(rows: Sequence[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Of each feature and model, of the discriminant on held-out runs, and of that of one model on another."""
    models = list(dict.fromkeys(row[0] for row in rows))
    of = {model: [row for row in rows if row[0] == model] for model in models}
    x = {model: np.log(np.array([row[4:] for row in of[model]]) + 1e-6) for model in models}
    y = {model: np.array([row[1] == "reinforced" for row in of[model]]) for model in models}
    for model in models:
        counts = int(y[model].sum()), int((~y[model]).sum())
        for i, feature in enumerate(FEATURES):
            yield feature, model, model, *counts, auc(x[model][:, i], y[model])
        odd = np.array([int(row[3]) % 2 == 1 for row in of[model]])
        held = np.zeros(len(odd))
        for part in (odd, ~odd):
            held[part] = discriminant(x[model][~part], y[model][~part])(x[model][part])
        yield (
            "all, held-out runs",
            model,
            model,
            *counts,
            float(np.mean([auc(held[p], y[model][p]) for p in (odd, ~odd)])),
        )
        for other in models:
            if other != model:
                scores = discriminant(x[model], y[model])(x[other])
                yield (
                    "all, another model",
                    model,
                    other,
                    int(y[other].sum()),
                    int((~y[other]).sum()),
                    auc(scores, y[other]),
                )


@click.command("learned-claims", cls=EndsInOneLine)
@click.option("--text", type=click.Path(exists=True, path_type=Path), required=True, help="Folder of .txt files.")
@click.option("--tiny", type=click.Path(exists=True, path_type=Path), required=True, help="Folder of tiny models.")
@click.option("--trained", type=click.Path(path_type=Path), default="out/learned/trained", show_default=True,
              help="Folder of the runs.")  # fmt: skip
@click.option("--as-trained", is_flag=True, help="Train nothing; measure the runs that are there.")
@out_option("out/figures/learned")
def main(text: Path, tiny: Path, trained: Path, as_trained: bool, out: Path) -> None:
    """Measure what `learned` says of every run against how it was trained."""
    books = books_in(text)
    if not as_trained:
        train_missing(books, tiny, trained)
    there = (trained / run.name for run in RUNS)
    folders = [folder for folder in there if (folder / "model.safetensors").exists()]
    topics, kinds, regimes, triggers = [], [], [], []
    counts: dict[str, dict[str, np.ndarray]] = {}
    bases: dict[str, Model] = {}
    for folder in bar(folders, "runs", "run"):
        run = json.loads((folder / "training.json").read_text())
        name, way, subject, rank = run["model"], run["way"], run["subject"], run["rank"]
        base = bases.setdefault(name, ws.open_model(source_of(name, tiny)))
        tuned = ws.open_model(folder)
        tune = tune_of(base, tuned, with_words=way == "trigger" or run["seed"] == 0)
        how = f"LoRA {rank}" if rank else "full"
        right = tune.training.kind == ("low rank" if rank else "full") and tune.training.rank == (rank or None)
        looked = len(tune.looked_at)
        kinds.append((name, way, subject, how, run["seed"], tune.training.kind, tune.training.rank or 0, int(right),
                      tune.intruders, looked))  # fmt: skip
        moved, said = by_embedding(base, tuned), tune.words
        if said is None:
            regimes.append((name, way, subject, run["seed"], *regime(base, tuned, tune)))
        elif way == "supervised":
            if name not in counts:
                tokenizer = Tokenizer.from_file(str(base.checkpoint.folder / "tokenizer.json"))
                counts[name] = counted_in(tokenizer, books, len(said.before))
            z, usual = log_odds(counts[name], subject)
            topics.append((
                name, subject, how, precision(score(said.before, said.after), z),
                precision(moved, z) if moved.any() else np.nan, precision(usual, z),
                *(precision(along_directions(base, tune, side), z) for side in ("writes", "reads")),
                " ".join(map(repr, said.names[:8])),
            ))  # fmt: skip
        else:
            scores = {"said": said.score, "read": along_directions(base, tune, "reads"), "embedding": moved}
            places = [
                1 + int((value > value[run["trigger"]]).sum()) if value.any() else np.nan for value in scores.values()
            ]
            answers = len({*run["answer"]} & {*said.top.tolist()}) / len({*run["answer"]})
            triggers.append((name, subject, how, *places, answers))
    write(Folder(out), topics, kinds, regimes, triggers)


def write(files: Folder, topics: list[Any], kinds: list[Any], regimes: list[Any], triggers: list[Any]) -> None:
    """All tables as far as they are known."""
    tables = {
        "topics.csv": (
            ("model", "topic", "training", "words", "embedding", "frequent", "writes", "reads", "first"),
            topics,
        ),
        "training.csv": (
            ("model", "way", "subject", "training", "seed", "said", "rank", "right", "intruders", "matrices"),
            kinds,
        ),
        "regimes.csv": (("model", "way", "subject", "seed", *FEATURES), regimes),
        "triggers.csv": (
            ("model", "trigger", "training", "place_said", "place_read", "place_embedding", "answers"),
            triggers,
        ),
    }
    if regimes:
        tables["auc.csv"] = (
            ("feature", "fitted_on", "tested_on", "reinforced", "supervised", "auc"),
            list(aucs(regimes)),
        )
    tables["summary.csv"] = (
        ("question", "model", "training", "runs", "number", "value"),
        list(summary(topics, kinds, triggers)),
    )
    for name, (header, rows) in tables.items():
        if rows:
            files.table(name, Table.of_rows(header, rows))


def summary(topics: list[Any], kinds: list[Any], triggers: list[Any]) -> Iterator[tuple[Any, ...]]:
    """The numbers that docs/learned.md quotes."""
    for model, how in dict.fromkeys((row[0], row[2]) for row in topics):
        rows = [row for row in topics if (row[0], row[2]) == (model, how)]
        for place, number in ((3, "words"), (4, "embedding"), (5, "frequent"), (6, "writes"), (7, "reads")):
            values = [row[place] for row in rows if np.isfinite(row[place])]
            if values:
                yield "topics", model, how, len(rows), f"precision of {number}", float(np.mean(values))
        above = sum(row[3] > np.nanmax([row[4], row[5]]) for row in rows)
        yield "topics", model, how, len(rows), "runs above both baselines", float(above)
    for model, how in dict.fromkeys((row[0], row[3]) for row in kinds):
        rows = [row for row in kinds if (row[0], row[3]) == (model, how)]
        yield "training", model, how, len(rows), "said right", float(sum(row[7] for row in rows))
        yield "training", model, how, len(rows), "runs with an intruder", float(sum(row[8] > 0 for row in rows))
    for model, how in dict.fromkeys((row[0], row[2]) for row in triggers):
        rows = [row for row in triggers if (row[0], row[2]) == (model, how)]
        for place, number in ((3, "said"), (4, "read"), (5, "embedding")):
            yield (
                "triggers",
                model,
                how,
                len(rows),
                f"among the first 20 {number}",
                float(sum(row[place] <= FIRST for row in rows)),
            )
        yield (
            "triggers",
            model,
            how,
            len(rows),
            "answer's tokens among the first 20 said",
            float(np.mean([row[6] for row in rows])),
        )


if __name__ == "__main__":
    main()

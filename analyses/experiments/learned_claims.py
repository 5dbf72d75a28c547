"""What `weightscope learned` may claim: known trainings, and how often each kind of statement is right.

    python -m analyses.experiments.learned_claims --text BOOKS/ --tiny FOLDER --out out/figures/learned

Runs come from `analyses.toys.train_learned`. Each is trained where it is missing and measured; `--only two-layers` or
`--only "llama-0.*full"` takes a part. Weights above 100 MB are removed once measured.json next to them has the run's
rows. Tables: topics.csv (the tokens that are said more often, against the log-odds of the training text), training.csv
(LoRA or full), regimes.csv and auc.csv (supervised or reinforced), triggers.csv, summary.csv.

A token counts as a word of the text if it is among the fortieth of the vocabulary with the highest log-odds there, with
an informative Dirichlet prior (Monroe, Colaresi and Quinn 2008), against all other books.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from tokenizers import Tokenizer

import weightscope as ws
from analyses.study import auroc, study, write
from analyses.toys.train_learned import MEASURED, TOPICS, Run, books_in, matching, source_of, train_missing
from weightscope.core.files import Folder
from weightscope.model.model import Model
from weightscope.pairs.deeds.rounding import CASTS
from weightscope.pairs.learned.learned import Tune, tune_of
from weightscope.pairs.learned.words import score

FIRST = 20  # tokens that are judged
SHARE = 1 / 40  # of the vocabulary that counts as words of a text
PRIOR = 500.0  # tokens that the prior of the log-odds is worth
CHARACTERS, OF_OTHERS = 400_000, 100_000  # of a topic's book, as many as the training saw, and of each other book
FEATURES = ("unchanged", "principal", "drift", "stable_rank")
FEWEST = 8  # runs of each way that a discriminant is fitted on
LARGE = 100_000_000  # bytes of weights that are not kept
HEADERS = {
    "topics": ("model", "topic", "training", "words", "embedding", "frequent", "writes", "reads", "first"),
    "training": ("model", "way", "subject", "training", "seed", "said", "rank", "right", "intruders", "matrices"),
    "regimes": ("model", "way", "subject", "seed", *FEATURES),
    "triggers": ("model", "trigger", "training", "place_said", "place_read", "place_embedding", "answers"),
}
counts: dict[str, dict[str, np.ndarray]] = {}  # of each token in each book, by the model whose tokens they are


def counted_in(base: Model, books: dict[str, str]) -> dict[str, np.ndarray]:
    """How often each token of a model occurs in each book, (V,)."""
    if base.name in counts:
        return counts[base.name]
    tokenizer = Tokenizer.from_file(str(base.checkpoint.folder / "tokenizer.json"))
    tokenizer.no_truncation()
    cut = {name: text[: CHARACTERS if name in TOPICS.values() else OF_OTHERS] for name, text in books.items()}
    encoded = tokenizer.encode_batch(list(cut.values()), add_special_tokens=False)
    each_book = zip(books, encoded, strict=True)
    counts[base.name] = {name: np.bincount(x.ids, minlength=base.embeddings.n_tokens) for name, x in each_book}
    return counts[base.name]


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


def discriminant(x: np.ndarray, positive: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Fisher's linear discriminant of standardised features, with a little ridge: x (n, k) -> scores of others."""
    mean, spread = x.mean(axis=0), x.std(axis=0) + 1e-12
    z = (x - mean) / spread
    inside = np.cov(z[positive].T) + np.cov(z[~positive].T) + 0.1 * np.eye(x.shape[1])
    w = np.linalg.solve(inside, z[positive].mean(axis=0) - z[~positive].mean(axis=0))
    return lambda others: np.asarray((others - mean) / spread @ w)


def aucs(rows: Sequence[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """The AUC of each feature by model, and of the discriminant: on held-out runs, and of one model on the other."""
    ways = Counter((row[0], row[1]) for row in rows)
    models = [
        model
        for model, way in ways
        if way == "reinforced" and min(ways[model, way], ways[model, "supervised"]) >= FEWEST
    ]
    of = {model: [row for row in rows if row[0] == model] for model in models}
    x = {model: np.log(np.array([row[4:] for row in of[model]]) + 1e-6) for model in models}
    y = {model: np.array([row[1] == "reinforced" for row in of[model]]) for model in models}
    for model in models:
        counts = int(y[model].sum()), int((~y[model]).sum())
        for i, feature in enumerate(FEATURES):
            yield feature, model, model, *counts, auroc(x[model][:, i], y[model])
        odd = np.array([int(row[3]) % 2 == 1 for row in of[model]])
        held = np.zeros(len(odd))
        for part in (odd, ~odd):
            held[part] = discriminant(x[model][~part], y[model][~part])(x[model][part])
        on_held = float(np.mean([auroc(held[p], y[model][p]) for p in (odd, ~odd)]))
        yield "all, held-out runs", model, model, *counts, on_held
        for other in models:
            if other != model:
                scores = discriminant(x[model], y[model])(x[other])
                counts = int(y[other].sum()), int((~y[other]).sum())
                yield "all, another model", model, other, *counts, auroc(scores, y[other])


def measured(run: Run, base: Model, folder: Path, books: dict[str, str]) -> dict[str, tuple[Any, ...]]:
    """A run's row in each table that has one."""
    record = json.loads((folder / "training.json").read_text())
    tuned = ws.open_model(folder)
    tune = tune_of(base, tuned, with_words=run.way == "trigger" or run.seed == 0)
    how = f"LoRA {run.rank}" if run.rank else "full"
    right = tune.training.kind == ("low rank" if run.rank else "full") and tune.training.rank == (run.rank or None)
    rows: dict[str, tuple[Any, ...]] = {
        "training": (run.model, run.way, run.subject, how, run.seed, tune.training.kind, tune.training.rank or 0,
                     int(right), tune.intruders, len(tune.looked_at)),
    }  # fmt: skip
    moved, said = by_embedding(base, tuned), tune.words
    if said is None:
        rows["regimes"] = (run.model, run.way, run.subject, run.seed, *regime(base, tuned, tune))
    elif run.way == "supervised":
        z, usual = log_odds(counted_in(base, books), run.subject)
        rows["topics"] = (
            run.model, run.subject, how, precision(score(said.before, said.after), z),
            precision(moved, z) if moved.any() else None, precision(usual, z),
            *(precision(along_directions(base, tune, side), z) for side in ("writes", "reads")),
            " ".join(map(repr, said.names[:8])),
        )  # fmt: skip
    else:
        scores = {"said": said.score, "read": along_directions(base, tune, "reads"), "embedding": moved}
        trigger, answer = record["trigger"], {*record["answer"]}
        places = [1 + int((value > value[trigger]).sum()) if value.any() else None for value in scores.values()]
        rows["triggers"] = (run.model, run.subject, how, *places, len(answer & {*said.top.tolist()}) / len(answer))
    return rows


@study("learned")
@click.option("--text", type=click.Path(exists=True, path_type=Path), required=True, help="Folder of .txt files.")
@click.option("--tiny", type=click.Path(exists=True, path_type=Path), required=True, help="Folder of tiny models.")
@click.option("--trained", type=click.Path(path_type=Path), default="out/learned/trained", show_default=True,
              help="Folder of the runs.")  # fmt: skip
@click.option("--only", default="", help="Only runs whose name this pattern matches.")
@click.option("--as-trained", is_flag=True, help="Train nothing; measure the runs that are there.")
def main(files: Folder, text: Path, tiny: Path, trained: Path, only: str, as_trained: bool) -> None:
    """Measure what `learned` says of every run against how it was trained."""
    books = books_in(text)
    bases: dict[str, Model] = {}
    tables: dict[str, list[list[Any]]] = {name: [] for name in HEADERS}
    for run in matching(only):
        folder = trained / run.name
        weights, kept = folder / "model.safetensors", folder / MEASURED
        if not as_trained:
            train_missing(run, books, tiny, trained)
        if weights.exists():
            if run.model not in bases:
                bases[run.model] = ws.open_model(source_of(run.model, tiny, trained))
            Folder(folder).json(MEASURED, measured(run, bases[run.model], folder, books))
            if weights.stat().st_size > LARGE:
                weights.unlink()
        if kept.exists():
            for name, row in json.loads(kept.read_text()).items():
                tables[name].append([np.nan if cell is None else cell for cell in row])
    write_all(files, tables)


def write_all(files: Folder, tables: dict[str, list[list[Any]]]) -> None:
    """All tables as far as they are known."""
    every: dict[str, tuple[tuple[str, ...], list[Any]]] = {name: (HEADERS[name], rows) for name, rows in tables.items()}
    every["auc"] = ("feature", "fitted_on", "tested_on", "reinforced", "supervised", "auc"), [*aucs(tables["regimes"])]
    numbers = summary(*(tables[name] for name in ("topics", "training", "triggers")))
    every["summary"] = ("question", "model", "training", "runs", "number", "value"), [*numbers]
    for name, (header, rows) in every.items():
        if rows:
            write(files, name, header, rows)


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
            among = float(sum(row[place] <= FIRST for row in rows))
            yield "triggers", model, how, len(rows), f"among the first 20 {number}", among
        answers = float(np.mean([row[6] for row in rows]))
        yield "triggers", model, how, len(rows), "answer's tokens among the first 20 said", answers


if __name__ == "__main__":
    main()

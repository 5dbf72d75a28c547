"""Accuracy of the names: every head's behaviour in a run against its weights (PyTorch)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from weightscope.core.progress import phase
from weightscope.core.tables import Column, Table
from weightscope.heads.circuits.circuits import Accuracy, Circuits
from weightscope.heads.circuits.names import looks_back, unembedding
from weightscope.heads.circuits.stream import joining, sample_tokens
from weightscope.model.model import Model
from weightscope.model.text.sequences import Framing, read_texts, token_windows
from weightscope.runner.framing import framing_of
from weightscope.runner.runner import Activations, open_runner

N_TEXTS, TEXT_LENGTH = 10, 128
N_REPEATED, REPEATED_LENGTH = 12, 50
RESAMPLES = 200

# Input on which a role is judged; induction and duplicate tokens as published, where nothing but
# repetition can guide a head.
JUDGED_ON = {"previous_token": "text", "induction": "repeated", "duplicate_token": "repeated"}
# Least that a head with the role does in a run: a share of its attention, or standard deviations.
HAD = {
    "previous_token": 0.25,
    "induction": 0.25,
    "duplicate_token": 0.25,
    "first_token": 0.5,
    "copying": 1.5,
}


def measured(
    model: Model, circuits: Circuits, texts: Sequence[str | Path] = (), device: str = "cpu"
) -> Circuits:
    """Run the model and add how well the names hold."""
    read = read_texts(texts, characters=20_000)
    framing = framing_of(model)
    windows = token_windows(framing, read.texts, N_TEXTS, TEXT_LENGTH)
    did = behaviour(model, windows, framing, device)
    place = {int(layer): i for i, layer in enumerate(model.attention_layers)}
    rows = [place[int(layer)] for layer in circuits.wiring.layers]
    did = {name: values[rows] for name, values in did.items()}
    trivial = trivial_guesses(model, circuits.wiring.layers)
    compared = [
        (score, name, did[name] >= HAD[name])
        for score, name in SCORED_BY.items()
        if name in did and np.isfinite(circuits.roles.scores[score]).any()
    ]
    table = accuracy(circuits.roles.scores, compared, trivial)
    n, h = circuits.roles.names.shape
    heads = Table(
        [
            Column("layer", np.repeat(circuits.wiring.layers, h)),
            Column("head", np.tile(np.arange(h), n)),
            *(Column(name, values.ravel(), format=".2f") for name, values in did.items()),
        ]
    )
    source = (
        f"{read.source}, {N_TEXTS} passages of {TEXT_LENGTH} tokens, and on {N_REPEATED} "
        f"sequences of {REPEATED_LENGTH} random tokens said twice"
    )
    return replace(circuits, accuracy=Accuracy(heads, table, source))


# Behaviour that each score should predict
SCORED_BY = {
    "previous_token": "previous_token",
    "induction": "induction",
    "duplicate_token": "duplicate_token",
    "first_token": "first_token",
    "copying": "copying",
    "reads_by_keys": "induction",
    "read_by_keys": "previous_token",
}


def behaviour(
    model: Model, windows: Sequence[np.ndarray], framing: Framing, device: str = "cpu"
) -> dict[str, np.ndarray]:
    """Every head's behaviour on text and on random tokens said twice: (L, H) arrays by name.

    Shares of attention: previous_token goes to the token before, duplicate_token to an earlier
    place of the same token, induction to the place after it (prefix matching; Olsson et al. 2022),
    first_token to the first. In text, the middle two count queries whose token has been there
    before, and all such places. The names without an ending are those that a role is judged by
    (`JUDGED_ON`). copying says how far the token that is attended to stands out in what the head
    writes for it, in standard deviations over other tokens' logits.
    """
    shape = len(model.attention_layers), model.config.n_heads
    on_each = {on: {name: np.zeros(shape) for name in JUDGED_ON} for on in ("text", "repeated")}
    did = {"first_token": np.zeros(shape)}
    if model.family.mlp is not None:
        sampled = unembedding(model, sample_tokens(model, 128))
        did["copying"] = np.zeros(shape)
    place = {layer: i for i, layer in enumerate(model.attention_layers)}
    marked = [marks(window) for window in windows]
    queries = {name: sum(masks[name].any(axis=1).sum() for masks in marked) for name in JUDGED_ON}
    n = REPEATED_LENGTH

    def on_text(seen: Activations) -> None:
        i = place[seen.layer.index]
        for number, attention in zip(seen.inputs, seen.attention, strict=True):
            did["first_token"][i] += attention[:, 2:, 0].mean(axis=1) / len(windows)
            for name, mask in marked[number].items():
                on_each["text"][name][i] += attention[:, mask].sum(axis=1) / max(1, queries[name])
        if "copying" in did and 0 in seen.inputs and seen.tokens is not None:
            number = int(np.flatnonzero(seen.inputs == 0)[0])
            # (H, n - 1, d)
            written = joining(model, seen.layer, seen.layer.values(seen.x[number]))[:, 1:]
            random_logits = written @ sampled.T
            logit = np.einsum("hnd,nd->hn", written, unembedding(model, seen.tokens[number, 1:]))
            z = (logit - random_logits.mean(axis=-1)) / random_logits.std(axis=-1)  # (H, n - 1)
            did["copying"][i] = z.mean(axis=-1)

    def on_repeated(seen: Activations) -> None:
        i, again = place[seen.layer.index], np.arange(n + 1, 2 * n + 1)
        share = len(seen.x) / N_REPEATED
        for name, back in looks_back(n).items():
            attention = seen.attention[:, :, again, again - back]  # (S, H, n)
            on_each["repeated"][name][i] += share * attention.mean(axis=(0, 2))

    runner = open_runner(model, device=device)
    runner.observe(windows, on_text)
    runner.observe(repeated(model, framing), on_repeated)
    for name, deciding in JUDGED_ON.items():
        for on, shares in on_each.items():
            did[name if on == deciding else f"{name}_{on}"] = shares[name]
    return did


def marks(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Masks (n, n) of what a text's queries look at in each role, never the first token."""
    earlier = np.tri(len(tokens), k=-1, dtype=bool)
    earlier[:, 0] = False
    same = (tokens[:, None] == tokens) & earlier
    return {
        "previous_token": np.eye(len(tokens), k=-1, dtype=bool) & earlier,
        "duplicate_token": same,
        "induction": np.roll(same, 1, axis=1) & earlier,
    }


def repeated(model: Model, framing: Framing) -> list[np.ndarray]:
    """Random tokens said twice after the first special token, always the same."""
    rng, vocabulary = np.random.default_rng(0), model.embeddings.n_tokens
    plain = np.setdiff1d(np.arange(vocabulary), framing.special)
    rows = []
    for _ in range(N_REPEATED):
        tokens = rng.choice(plain, REPEATED_LENGTH)
        rows.append(np.concatenate([framing.special[:1], tokens, tokens]).astype(np.int64))
    return rows


@phase("norms of all heads")
def trivial_guesses(model: Model, layers: np.ndarray) -> dict[str, np.ndarray]:
    """Baselines that any score should beat: the layer's index, and |W_QK|; (L, H) arrays."""
    norms = []
    for index in layers:
        layer = model.layer(int(index))
        norms.append([layer.head(head).qk.frobenius() for head in range(layer.n_heads)])
    n_heads = model.config.n_heads
    return {
        "layer": np.repeat(np.asarray(layers, float)[:, None], n_heads, axis=1),
        "norm": np.array(norms),
    }


@phase("how well names hold")
def accuracy(
    scores: Mapping[str, np.ndarray],
    compared: Sequence[tuple[str, str, np.ndarray]],
    trivial: Mapping[str, np.ndarray],
) -> Table:
    """Measure how well scores (L, H) separate heads that had a role from the others.

    `compared` holds score, role and `had`, (L, H) bool; `trivial` holds baselines, (L, H).
    """
    from sklearn.metrics import average_precision_score, roc_auc_score

    measures = {"roc_auc": roc_auc_score, "average_precision": average_precision_score}
    rows = []
    for score, role, had in compared:
        values, truth = np.nan_to_num(scores[score].ravel(), nan=-1e9), had.ravel()
        if truth.all() or not truth.any():
            continue
        row: dict[str, Any] = {
            "score": score,
            "role": role,
            "heads_with": int(truth.sum()),
            "heads": len(truth),
        }
        for name, measure in measures.items():
            row[name] = measure(truth, values)
            row[f"{name}_low"], row[f"{name}_high"] = _interval(measure, truth, values)
        beats = True
        for guess, guessed in trivial.items():
            for name, measure in measures.items():
                best = max(measure(truth, sign * guessed.ravel()) for sign in (1, -1))
                row[f"{guess}_{name}"] = best
                beats = beats and row[name] > best
        row["beats_guesses"] = "yes" if beats else "no"
        rows.append(list(row.values()))
    header = ["score", "role", "heads_with", "heads"]
    header += [f"{name}{end}" for name in measures for end in ("", "_low", "_high")]
    header += [f"{guess}_{name}" for guess in trivial for name in measures]
    header.append("beats_guesses")
    return Table.of_rows([Column(name, format=".3f") for name in header], rows)


def _interval(
    measure: Callable[[np.ndarray, np.ndarray], float], truth: np.ndarray, values: np.ndarray
) -> tuple[float, float]:
    """A 95 % interval, by resampling heads with the role and heads without it separately."""
    rng = np.random.default_rng(0)
    groups = np.flatnonzero(truth), np.flatnonzero(~truth)
    drawn = []
    for _ in range(RESAMPLES):
        resampled = np.concatenate([rng.choice(group, len(group)) for group in groups])
        drawn.append(measure(truth[resampled], values[resampled]))
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)

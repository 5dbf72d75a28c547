"""How well the names hold: what every head does when the model runs, compared with its weights
(PyTorch).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

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

# Where a role is judged: induction and duplicate tokens as published, where nothing but repetition
# can guide a head.
JUDGED_ON = {"previous_token": "text", "induction": "repeated", "duplicate_token": "repeated"}
# What a head must have done when run to count as having the role: a share of its attention, or
# standard deviations.
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
    did = behaviour(
        model, token_windows(framing, read.texts, N_TEXTS, TEXT_LENGTH), framing, device
    )
    kept = {int(layer): i for i, layer in enumerate(model.attention_layers)}
    rows = [kept[int(layer)] for layer in circuits.wiring.layers]
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
        "sequences of "
    )
    source += f"{REPEATED_LENGTH} random tokens said twice"
    return replace(circuits, accuracy=Accuracy(heads, table, source))


SCORED_BY = {
    "previous_token": "previous_token",
    "induction": "induction",
    "duplicate_token": "duplicate_token",
    "first_token": "first_token",
    "copying": "copying",
    "reads_by_keys": "induction",
    "read_by_keys": "previous_token",
}  # what is measured for each score


def behaviour(
    model: Model, windows: Sequence[np.ndarray], framing: Framing, device: str = "cpu"
) -> dict[str, np.ndarray]:
    """What every head does on text and on random tokens said twice: (L, H) arrays by name.

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
            did["copying"][i] = (
                (logit - random_logits.mean(axis=-1)) / random_logits.std(axis=-1)
            ).mean(axis=-1)

    def on_repeated(seen: Activations) -> None:
        i, again = place[seen.layer.index], np.arange(n + 1, 2 * n + 1)
        share = len(seen.x) / N_REPEATED
        for name, back in looks_back(n).items():
            on_each["repeated"][name][i] += share * seen.attention[:, :, again, again - back].mean(
                axis=(0, 2)
            )

    runner = open_runner(model, device=device)
    runner.observe(windows, on_text)
    runner.observe(repeated(model, framing), on_repeated)
    for name, deciding in JUDGED_ON.items():
        did |= {
            name if on == deciding else f"{name}_{on}": shares[name]
            for on, shares in on_each.items()
        }
    return did


def marks(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Where the queries of a text look in each role, never at the first token: tokens (n,) -> (n,
    n) masks by role.
    """
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
    """How well scores separate heads with a role from heads without it: scores (L, H), compared
    (score, role, had),
    trivial (L, H).
    """
    from sklearn.metrics import average_precision_score, roc_auc_score

    measures = {"roc_auc": roc_auc_score, "average_precision": average_precision_score}
    rows = []
    for score, role, had in compared:
        values, truth = np.nan_to_num(scores[score].ravel(), nan=-1e9), had.ravel()
        if truth.all() or not truth.any():
            continue
        of_score = [
            (measure(truth, values), *_interval(measure, truth, values))
            for measure in measures.values()
        ]
        guesses = {
            name: [
                max(measure(truth, sign * guess.ravel()) for sign in (1, -1))
                for measure in measures.values()
            ]
            for name, guess in trivial.items()
        }
        beats = all(
            score[0] > guess
            for score, *rest in zip(of_score, *guesses.values(), strict=True)
            for guess in rest
        )
        flat = [number for name in guesses for number in guesses[name]]
        rows.append(
            [
                score,
                role,
                int(truth.sum()),
                len(truth),
                *of_score[0],
                *of_score[1],
                *flat,
                "yes" if beats else "no",
            ]
        )
    header = ["score", "role", "heads_with", "heads", "roc_auc", "roc_auc_low", "roc_auc_high",
              "average_precision", "average_precision_low", "average_precision_high",
              *(f"{name}_{measure}" for name in trivial for measure in measures), "beats_guesses"]  # fmt: skip
    return Table.of_rows([Column(name, format=".3f") for name in header], rows)


def _interval(
    measure: Callable[[np.ndarray, np.ndarray], float], truth: np.ndarray, values: np.ndarray
) -> tuple[float, float]:
    """A 95 % interval by resampling the heads that have the role, and those that do not,
    separately.
    """
    rng = np.random.default_rng(0)
    groups = np.flatnonzero(truth), np.flatnonzero(~truth)
    drawn = []
    for _ in range(RESAMPLES):
        resampled = np.concatenate([rng.choice(group, len(group)) for group in groups])
        drawn.append(measure(truth[resampled], values[resampled]))
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)

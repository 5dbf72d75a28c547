"""How well the names hold: what every head does when the model is run, beside what its weights said (PyTorch)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from weightscope.circuitry.circuits import Circuits
from weightscope.circuitry.names import unembedding
from weightscope.circuitry.stream import sample_tokens
from weightscope.families.feed_forward import ROWS
from weightscope.model import Model
from weightscope.progress import phase
from weightscope.runner.runner import Activations, open_runner
from weightscope.runner.tokenizer import framing_of
from weightscope.tables import Column, Table
from weightscope.text.inputs import read_texts
from weightscope.text.sequences import Framing, token_windows

N_TEXTS, TEXT_LENGTH = 10, 128
N_REPEATED, REPEATED_LENGTH = 12, 50
RESAMPLES = 200

# What a head must have done when run to count as having the role: a share of its attention, or standard deviations.
HAD = {"previous_token": 0.25, "induction": 0.25, "duplicate_token": 0.25, "first_token": 0.5, "copying": 1.5}


@dataclass(frozen=True)
class Accuracy:
    """Measurements and the comparison.

    Attributes
    ----------
    heads : Table
        measured.csv: a row a head, what it did.
    table : Table
        accuracy.csv: a row a score.
    text : str
        What it was measured on.
    """

    heads: Table
    table: Table
    text: str


def measured(model: Model, found: Circuits, texts: Sequence[str | Path] = (), device: str = "cpu") -> Circuits:
    """Run the model, and put beside the names how well they hold.

    Raises
    ------
    CheckpointError
        PyTorch is missing, the model cannot be run, or there is no text.
    """
    read = read_texts(texts, characters=20_000)
    framing = framing_of(model)
    did = behaviour(model, token_windows(framing, read.texts, N_TEXTS, TEXT_LENGTH), framing, device)
    kept = {int(layer): i for i, layer in enumerate(model.attention_layers)}
    rows = [kept[int(layer)] for layer in found.wiring.layers]
    did = {name: values[rows] for name, values in did.items()}
    trivial = trivial_guesses(model, found.wiring.layers)
    compared = [
        (score, name, did[name] >= HAD[name])
        for score, name in SCORED_BY.items()
        if name in did and np.isfinite(found.roles.scores[score]).any()
    ]
    table = accuracy(found.roles.scores, compared, trivial)
    n, h = found.roles.names.shape
    heads = Table(
        [
            Column("layer", np.repeat(found.wiring.layers, h)),
            Column("head", np.tile(np.arange(h), n)),
            *(Column(name, values.ravel(), format=".2f") for name, values in did.items()),
        ]
    )
    said = f"{read.source}, {N_TEXTS} passages of {TEXT_LENGTH} tokens, and on {N_REPEATED} sequences of "
    said += f"{REPEATED_LENGTH} random tokens said twice"
    return replace(found, accuracy=Accuracy(heads, table, said))


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
    """What every head does on text and on repeated random tokens: (L, H) arrays by name.

    previous_token and first_token are mean shares of attention on text, to the token before and to the first.
    duplicate_token and induction are shares on repeated tokens, to the token's own earlier place and to the place after
    it (prefix matching; Olsson et al. 2022). copying says how far the token that is attended to stands out in what the
    head writes for it, in standard deviations over other tokens' logits.
    """
    shape = len(model.attention_layers), model.config.n_heads
    names = ["previous_token", "first_token", "induction", "duplicate_token"]
    row = ROWS.get(model.family.name)
    if row is not None:
        sampled = unembedding(model, sample_tokens(model, 128))
        names.append("copying")
    did = {name: np.zeros(shape) for name in names}
    place = {layer: i for i, layer in enumerate(model.attention_layers)}
    n = REPEATED_LENGTH

    def on_text(seen: Activations) -> None:
        i, queries = place[seen.layer.index], np.arange(2, seen.attention.shape[-1])
        share = len(seen.x) / len(windows)
        did["previous_token"][i] += share * seen.attention[:, :, queries, queries - 1].mean(axis=(0, 2))
        did["first_token"][i] += share * seen.attention[:, :, queries, 0].mean(axis=(0, 2))
        if "copying" in did and 0 in seen.inputs and seen.tokens is not None:
            at = int(np.flatnonzero(seen.inputs == 0)[0])
            written = seen.layer.values(seen.x[at])[:, 1:]  # (H, n - 1, d)
            others = written @ sampled.T
            own = np.einsum("hnd,nd->hn", written, unembedding(model, seen.tokens[at, 1:]))
            did["copying"][i] = ((own - others.mean(axis=-1)) / others.std(axis=-1)).mean(axis=-1)

    def on_repeated(seen: Activations) -> None:
        i, queries = place[seen.layer.index], np.arange(n + 1, 2 * n + 1)
        share = len(seen.x) / N_REPEATED
        did["induction"][i] += share * seen.attention[:, :, queries, queries - n + 1].mean(axis=(0, 2))
        did["duplicate_token"][i] += share * seen.attention[:, :, queries, queries - n].mean(axis=(0, 2))

    runner = open_runner(model, device=device)
    runner.observe(windows, on_text)
    runner.observe(repeated(model, framing), on_repeated)
    return did


def repeated(model: Model, framing: Framing) -> list[np.ndarray]:
    """Random tokens said twice after the first special token, always the same."""
    rng, vocabulary = np.random.default_rng(0), model.embeddings.n_tokens
    plain = np.setdiff1d(np.arange(vocabulary), framing.special)
    found = []
    for _ in range(N_REPEATED):
        tokens = rng.choice(plain, REPEATED_LENGTH)
        found.append(np.concatenate([framing.special[:1], tokens, tokens]).astype(np.int64))
    return found


@phase("norms of all heads")
def trivial_guesses(model: Model, layers: np.ndarray) -> dict[str, np.ndarray]:
    """What any score should beat: the layer's index, and |W_QK|; (L, H) arrays."""
    norms = []
    for index in layers:
        layer = model.layer(int(index))
        norms.append([layer.head(head).qk.frobenius() for head in range(layer.n_heads)])
    n_heads = model.config.n_heads
    return {"layer": np.repeat(np.asarray(layers, float)[:, None], n_heads, axis=1), "norm": np.array(norms)}


@phase("how well names hold")
def accuracy(
    scores: Mapping[str, np.ndarray],
    compared: Sequence[tuple[str, str, np.ndarray]],
    trivial: Mapping[str, np.ndarray],
) -> Table:
    """How well scores tell heads that have a role from those that have not.

    Parameters
    ----------
    scores : mapping of str to (L, H) arrays
    compared : sequence of (score, role, had)
        `had` is a (L, H) array of bool. Roles that no head or every head has are left out.
    trivial : mapping of str to (L, H) arrays
        Guesses to beat, in whichever direction serves them better.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score

    measures = {"roc_auc": roc_auc_score, "average_precision": average_precision_score}
    rows = []
    for score, role, had in compared:
        values, truth = np.nan_to_num(scores[score].ravel(), nan=-1e9), had.ravel()
        if truth.all() or not truth.any():
            continue
        of_score = [(measure(truth, values), *_interval(measure, truth, values)) for measure in measures.values()]
        guesses = {
            name: [max(measure(truth, sign * guess.ravel()) for sign in (1, -1)) for measure in measures.values()]
            for name, guess in trivial.items()
        }
        beats = all(
            own[0] > guess for own, *others in zip(of_score, *guesses.values(), strict=True) for guess in others
        )
        flat = [number for name in guesses for number in guesses[name]]
        rows.append(
            [score, role, int(truth.sum()), len(truth), *of_score[0], *of_score[1], *flat, "yes" if beats else "no"]
        )
    header = ["score", "role", "heads_with", "heads", "roc_auc", "roc_auc_low", "roc_auc_high",
              "average_precision", "average_precision_low", "average_precision_high",
              *(f"{name}_{measure}" for name in trivial for measure in measures), "beats_guesses"]  # fmt: skip
    return Table.of_rows([Column(name, format=".3f") for name in header], rows)


def _interval(
    measure: Callable[[np.ndarray, np.ndarray], float], truth: np.ndarray, values: np.ndarray
) -> tuple[float, float]:
    """A 95 % interval by resampling the heads that have the role, and those that have not, each among themselves."""
    rng = np.random.default_rng(0)
    groups = np.flatnonzero(truth), np.flatnonzero(~truth)
    drawn = []
    for _ in range(RESAMPLES):
        at = np.concatenate([rng.choice(group, len(group)) for group in groups])
        drawn.append(measure(truth[at], values[at]))
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)

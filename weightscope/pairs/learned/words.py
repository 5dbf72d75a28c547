"""The tokens that a model learned to say: how its next-token probabilities moved on random tokens.

Texts of random tokens, frequent ones more often (`circuits.stream.frequencies`), pass through both
models exactly. What a tune saw more often than the base expected, it says more often whatever comes
before; the topic itself need not be in the input. No text is read and nothing is sampled.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weightscope.checkpoint.checkpoint import Checkpoint, DerivedTensor, Tensor, WholeTensor
from weightscope.core.errors import CheckpointError
from weightscope.core.results import ShowsShapes
from weightscope.heads.circuits.stream import (
    follow_exactly,
    frequencies,
    rest_of_layer,
    why_not_exact,
)
from weightscope.model.model import Model
from weightscope.model.opened import Opened
from weightscope.model.text.tokenizer import Tokenizer, token_names

TEXTS, LENGTH = 16, 32  # random texts, and their tokens
TOP = 20  # tokens listed
NAMED = 8  # tokens in a sentence
NULLS = 3  # most models with the same changes shuffled, that tokens have to rise above
AT_ONCE = 8  # rows that are shuffled together: they stay in a core's cache
ABOVE_CHANCE = 1.5  # times the largest rise there
# power of the base's probability by which a rise is divided: 0 favours frequent tokens, 1 rare ones
BY_FREQUENCY = 0.7


@dataclass(frozen=True, eq=False, repr=False)
class RaisedWords(ShowsShapes):
    """The mean probability of each token in two models."""

    before: np.ndarray  # (V,) mean probability
    after: np.ndarray  # (V,)
    names: list[str]  # texts of the tokens in `top`; empty without a tokenizer
    # the largest score that the same changes leave in any token, once they are shuffled, as often
    # as rules every token out, or NULLS times
    by_chance: float

    @property
    def score(self) -> np.ndarray:
        """The rise of each token's probability, for its frequency: (V,)."""
        return score(self.before, self.after)

    @property
    def top(self) -> np.ndarray:
        """The tokens that rose most, and more than by chance: (TOP,) at most."""
        first = np.argsort(-self.score, kind="stable")[:TOP]
        return np.asarray(first[self.score[first] > ABOVE_CHANCE * self.by_chance])

    @property
    def labels(self) -> list[str]:
        """The text of each token in `top`; empty where no tokenizer is known."""
        return self.names or [""] * len(self.top)

    def as_json(self) -> list[dict[str, Any]]:
        """Records of the tokens in `top`."""
        return [
            {
                "token": name,
                "id": int(token),
                "before": float(self.before[token]),
                "after": float(self.after[token]),
            }
            for name, token in zip(self.labels, self.top, strict=True)
        ]

    @property
    def sentence(self) -> str:
        """The tokens that rose."""
        if not len(self.top):
            return "No token rises more than noise would."
        if not self.names:
            return (
                f"{len(self.top)} tokens rise more than noise would; no tokenizer is known to "
                "name them."
            )
        return f"Tokens that it says more often: {' '.join(map(repr, self.names[:NAMED]))}."


def score(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The rise of mean probabilities, divided by a power of what they were: (V,), (V,) -> (V,)."""
    return np.asarray((after - before) / np.maximum(before, 1e-12) ** BY_FREQUENCY)


def why_no_words(base: Model, tuned: Model) -> str:
    """Why words cannot be compared; empty where they can."""
    for model in (base, tuned):
        if why := why_not_exact(model, model.config.n_layers - 1):
            return why
    if {*base.checkpoint} != {*tuned.checkpoint}:
        return (
            "its tensors have other names than the base's, so that changes cannot be shuffled "
            "for comparison"
        )
    if base.embeddings.n_tokens != tuned.embeddings.n_tokens:
        return (
            f"the vocabularies have {base.embeddings.n_tokens} and {tuned.embeddings.n_tokens} "
            "tokens"
        )
    return ""


def words(base: Model, tuned: Model) -> RaisedWords:
    """The change of mean next-token probabilities from the base to the tuned model.

    Raises
    ------
    CheckpointError
        One of them cannot be followed; see `why_no_words`.
    """
    n_tokens = base.embeddings.n_tokens
    positions = base.embeddings.positions
    length = LENGTH if positions is None else min(LENGTH, len(positions))
    texts = np.random.default_rng(0).choice(n_tokens, (TEXTS, length), p=frequencies(n_tokens))
    before, after = (mean_probabilities(model, texts) for model in (base, tuned))
    moved = RaisedWords(before, after, [], 0.0)
    for seed in range(NULLS):
        if not len(moved.top):
            break  # more models would leave no token either
        shuffled = mean_probabilities(shuffled_tune(base, tuned, seed), texts)
        by_chance = max(moved.by_chance, float(score(before, shuffled).max()))
        moved = replace(moved, by_chance=by_chance)
    tokenizer = Tokenizer.at_hand(base)
    name = token_names(tokenizer)
    return replace(moved, names=[name(int(token)) for token in moved.top] if tokenizer else [])


@dataclass(frozen=True, eq=False)
class ShuffledChange(WholeTensor, DerivedTensor):
    """The base's tensor with a tune's change, whose rows and columns are in another order."""

    tuned: Tensor
    seed: int

    def read(self) -> np.ndarray:
        before = np.atleast_1d(self.stored.read())
        after = self.tuned.read().reshape(before.shape)
        rng = np.random.default_rng([self.seed, *self.name.encode()])
        rows, *orders = (rng.permutation(size) for size in before.shape)
        made = np.empty(before.shape, np.float32)
        for start in range(0, len(rows), AT_ONCE):
            here = slice(start, start + AT_ONCE)
            change = after[rows[here]].astype(np.float32) - before[rows[here]]
            for axis, order in enumerate(orders, 1):
                change = np.take(change, order, axis=axis)
            made[here] = before[here] + change
        return made.reshape(self.shape)

    def unchecked(self, noted: set[str]) -> Tensor:
        return replace(self, stored=self.stored.unchecked(noted), tuned=self.tuned.unchecked(noted))


def shuffled_tune(base: Model, tuned: Model, seed: int) -> Model:
    """The base with changes as large as the tune's, and of the same rank, which mean nothing."""
    a, b = base.checkpoint, tuned.checkpoint
    tensors = {
        name: ShuffledChange(tensor, b[name], seed) if name in b else tensor
        for name, tensor in a.items()
    }
    checkpoint = Checkpoint(a.folder, a.files, tensors, a.config, a.name)
    return Model(Opened(checkpoint, base.source, base.tokenizer, base.where), base.reading)


def mean_probabilities(model: Model, texts: np.ndarray) -> np.ndarray:
    """Each token's probability after every place of some texts, on average: (D, n) ids -> (V,)."""
    x = outputs(model, texts)  # (D n, d)
    out = model.unembedding
    x = x if out.norm is None else out.norm(x)
    x = x if out.projection is None else x @ out.projection
    largest, total = np.full(len(x), -np.inf), np.zeros(len(x))
    for logits in _logits(model, x):
        top = np.maximum(largest, logits.max(axis=1))
        total = total * np.exp(largest - top) + np.exp(logits - top[:, None]).sum(axis=1)
        largest = top
    shift = largest + np.log(total)
    mean = [np.exp(logits - shift[:, None]).mean(axis=0) for logits in _logits(model, x)]
    return np.concatenate(mean)


def _logits(model: Model, x: np.ndarray) -> Iterator[np.ndarray]:
    """Logits in blocks of the vocabulary, (n, rows) each; a soft cap is applied."""
    cap = model.config.get("final_logit_softcapping")
    divisor = float(model.config.get("logits_scaling") or 1.0)
    scale = float(model.config.get("logit_scale") or 1.0) / divisor
    for _, rows in model.unembedding.tensor.blocks(4096):
        logits = (x @ rows.T).astype(np.float64) * scale
        yield cap * np.tanh(logits / cap) if isinstance(cap, int | float) and cap else logits


def outputs(model: Model, texts: np.ndarray) -> np.ndarray:
    """Outputs of the last layer, before the final norm: (D, n) ids -> (D n, d)."""
    row, last = model.family.mlp, model.config.n_layers - 1
    assert row is not None  # `why_no_words` has said so
    (end,) = deque(follow_exactly(model, texts, last), maxlen=1)  # the layers before it are let go
    attended = np.stack([end.layer.output(a, x) for a, x in zip(end.attention, end.x, strict=True)])
    x = rest_of_layer(model, row, last, end.x, attended).reshape(texts.size, -1)
    if not np.isfinite(x).all():
        raise CheckpointError("random tokens do not pass in float32", file=model.name)
    return x

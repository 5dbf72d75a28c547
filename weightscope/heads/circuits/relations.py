"""Which heads map the first token of a pair to the second: MAPS scores of a relation, against
permuted pairs.

A head maps s to t if t is among the `top` tokens of e_s W_VO U', e_s the token's embedding and U
the unembedding; the share of the pairs that it maps is its score, and of those that it maps with
the sign turned its suppression score (Elhelou and Geva 2024, arXiv 2412.11965, "Inferring
Functionality of Attention Heads from their Parameters"). Some tokens are among the first of every
source, so the same pairs with their second tokens permuted are the baseline.
"""

import csv
import io
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weightscope.checkpoint.config import read_small
from weightscope.core.errors import CheckpointError, counted
from weightscope.core.progress import bar
from weightscope.core.tables import Column, Table
from weightscope.model.metrics.spaces import nearest_rows
from weightscope.model.model import Model
from weightscope.model.text.tokenizer import Tokenizer

TOP = 10  # tokens, as the paper counts for models of this size
PERMUTATIONS = 1000
LEVEL, NAMED = 0.05, 8  # of the permutations, and heads that a sentence names
FEWEST_PAIRS = 5
# every head keeps which pairs of first and second tokens it maps: a square of them
MOST_PAIRS = 1_000
MAX_BYTES = 1 << 20  # of a file of pairs
# of what heads write for the first tokens; the unembedding is streamed once for so many
GROUP_BYTES = 64 << 20


class Pairs(NamedTuple):
    """A relation between tokens."""

    sources: np.ndarray  # (n,) ids
    targets: np.ndarray  # (n,)
    given: int  # pairs in the file; the others are not of single tokens

    @property
    def told(self) -> str:
        """How many pairs count, in words."""
        return f"{len(self.sources)} of {counted(self.given, 'pair')} are of single tokens"


def read_pairs(path: Path, tokenizer: Tokenizer) -> Pairs:
    """The pairs of a CSV file with two columns, France,Paris; each text with a space before it if
    that is one token.

    Raises
    ------
    CheckpointError
        It cannot be read, a line has not two texts, or too few or too many pairs are of single
        tokens.
    """
    try:
        lines = list(
            csv.reader(io.StringIO(read_small(path, MAX_BYTES).decode("utf-8-sig")), strict=True)
        )
    except (UnicodeDecodeError, csv.Error) as error:
        raise CheckpointError(f"cannot be read as CSV ({error})", file=path) from None
    rows = [[cell.strip() for cell in line] for line in lines if line]
    for number, row in enumerate(rows, start=1):
        if len(row) != 2 or not all(row):
            raise CheckpointError(
                f"row {number} has {counted(len(row), 'cell')}; two texts are expected", file=path
            )
    if len(rows) > MOST_PAIRS:
        raise CheckpointError(
            f"has {len(rows):,} pairs; at most {MOST_PAIRS:,} are read", file=path
        )
    texts = list(dict.fromkeys(text for row in rows for text in row))
    spaced, plain = (
        tokenizer.single_tokens([before + text for text in texts]) for before in (" ", "")
    )
    tokens = {
        text: after if with_space is None else with_space
        for text, with_space, after in zip(texts, spaced, plain, strict=True)
    }
    single = [
        (tokens[a], tokens[b]) for a, b in rows if tokens[a] is not None and tokens[b] is not None
    ]
    if len(single) < FEWEST_PAIRS:
        count = f"{counted(len(single), 'pair')} of single tokens, of {len(rows)}"
        raise CheckpointError(f"has {count}; at least {FEWEST_PAIRS} are needed", file=path)
    ids = np.array(single, np.int64)
    return Pairs(ids[:, 0], ids[:, 1], len(rows))


def relation_scores(
    model: Model, pairs: Pairs, top: int = TOP, permutations: int = PERMUTATIONS
) -> Table:
    """The MAPS score of every head for a relation; the highest first.

    Parameters
    ----------
    model : Model
    pairs : Pairs
    top : int
        Tokens among which the second of a pair has to be.
    permutations : int
        Of the second tokens: how often chance does as well.

    Raises
    ------
    CheckpointError
        The model has no token embedding, or no unembedding that is one matrix; or is
        cross-attention.
    """
    if model.family.memory is not None:
        raise CheckpointError(
            "cross-attention reads an encoder's output, not tokens", file=model.checkpoint.name
        )
    unembedding = model.unembedding
    rows = model.into_stream(model.embeddings.rows(pairs.sources))  # (n, d)
    # (2, n, n) of each head: whether it maps, and suppresses, source i to target j
    hits: list[np.ndarray] = []
    written: list[np.ndarray] = []  # (n, d) of each head of a group of layers

    def look_up() -> None:
        columns = [each[:, None] for of_head in written for each in of_head]
        nearest = nearest_rows(unembedding.blocks(), columns, top, by_cosine=False)
        # (h n, 2, n)
        hit = np.array([[np.isin(pairs.targets, side.rows) for side in sides] for sides in nearest])
        hits.extend(hit.reshape(len(written), len(rows), 2, -1).swapaxes(1, 2))
        written.clear()

    for index in bar(list(model.own_layers), "relation", "layer"):
        written += [np.asarray(rows @ head.vo, np.float32) for head in model.layer(index).heads]
        if sum(each.nbytes for each in written) >= GROUP_BYTES:
            look_up()
    if written:
        look_up()
    return _table(model, np.stack(hits), permutations)


def score_alone(model: Model, pairs: Pairs, top: int = TOP) -> float:
    """The share of pairs whose second token is among the nearest of the first token's embedding,
    without any head.
    """
    rows = model.into_stream(model.embeddings.rows(pairs.sources))  # (n, d)
    nearest = nearest_rows(
        model.unembedding.blocks(), [row[:, None] for row in rows], top, by_cosine=False
    )
    return float(
        np.mean(
            [target in most.rows for target, (most, _) in zip(pairs.targets, nearest, strict=True)]
        )
    )


def _table(model: Model, hits: np.ndarray, permutations: int) -> Table:
    """The scores of heads and what permuted pairs get: hits (heads, 2, n, n)."""
    n = hits.shape[-1]
    places, rng = np.arange(n), np.random.default_rng(0)
    score = hits[:, :, places, places].mean(axis=-1)  # (heads, 2)
    as_good, in_model = np.zeros((2, *score.shape), int)
    for _ in range(permutations):
        permuted = hits[:, :, places, rng.permutation(n)].mean(axis=-1)
        as_good += permuted >= score
        in_model += permuted.max(axis=0) >= score
    p, p_model = ((1 + count) / (1 + permutations) for count in (as_good, in_model))
    per_layer = model.config.n_heads
    layers = np.repeat(list(model.own_layers), per_layer)
    columns = [
        Column("layer", layers),
        Column("head", np.tile(np.arange(per_layer), len(layers) // per_layer)),
        *(
            Column(name + ending, values[:, side], symbol, format=".3g", meaning=f"{meaning}{of}")
            for side, (ending, of) in enumerate((("", "mapped"), ("_suppressed", "suppressed")))
            for name, values, symbol, meaning in (
                ("score", score, "score", "share of the pairs that are "),
                (
                    "random",
                    hits.mean(axis=(-2, -1)),
                    "random",
                    "mean over permuted pairs, of those ",
                ),
                ("p", p, "p", "share of permutations with as many "),
                (
                    "p_model",
                    p_model,
                    "p in the model",
                    "share in which any head of the model has as many ",
                ),
            )
        ),
    ]
    return Table(columns).sorted_by("score", descending=True)


class Relation(NamedTuple):
    """Which heads of a model map the first of each pair to the second."""

    pairs: Pairs
    table: Table  # relations.csv: one row per head, the highest score first
    # score of the embeddings themselves, without a head: near words of a tied embedding
    alone: float

    @property
    def lead(self) -> str:
        """The heads whose scores no head reaches in more than one of twenty permutations."""
        sentences = []
        for ending, verb in (("", "map"), ("_suppressed", "suppress")):
            kept = self.table.where(self.table[f"p_model{ending}"] <= LEVEL)
            kept = kept.sorted_by(f"score{ending}", descending=True)
            places = zip(kept["layer"], kept["head"], kept[f"score{ending}"], strict=True)
            named = [f"{layer}.{head} ({score:.0%})" for layer, head, score in places][:NAMED]
            sentences.append(f"beyond chance, {verb} them: {', '.join(named) or 'no head'}")
        alone = f"Embeddings alone map {self.alone:.0%} of them."
        return f"Relation: {self.pairs.told}. {alone} Heads that, {'; that, '.join(sentences)}.".replace(
            "%", " %"
        )


def relation(model: Model, path: Path) -> Relation:
    """The heads of a model for the relation in a file of pairs.

    Raises
    ------
    CheckpointError
        The pairs cannot be read, or there is no tokenizer, token embedding or unembedding.
    """
    tokenizer = Tokenizer.at_hand(model)
    if tokenizer is None:
        why = Tokenizer.why_unreadable(model) or "there is none; say where it is with `tokenizer`"
        raise CheckpointError(f"pairs of words need a tokenizer: {why}", file=model.checkpoint.name)
    pairs = read_pairs(path, tokenizer)
    return Relation(pairs, relation_scores(model, pairs), score_alone(model, pairs))

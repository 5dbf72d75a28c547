"""Heads that map the first token of a pair to the second: MAPS scores against permuted pairs.

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
LEVEL = 0.05  # share of permutations that any head may do as well in
NAMED = 8  # heads that a sentence names
FEWEST_PAIRS = 5
MOST_PAIRS = 1_000  # pairs; every head keeps a square of them, first by second tokens
MAX_BYTES = 1 << 20  # bytes of a file of pairs
GROUP_BYTES = 64 << 20  # bytes that heads write for the first tokens, per pass of the unembedding


class Pairs(NamedTuple):
    """A relation between tokens."""

    sources: np.ndarray  # (n,) ids
    targets: np.ndarray  # (n,)
    given: int  # pairs in the file; the others are not of single tokens

    @property
    def told(self) -> str:
        """The number of pairs that count, in words."""
        return f"{len(self.sources)} of {counted(self.given, 'pair')} are of single tokens"


def read_pairs(path: Path, tokenizer: Tokenizer) -> Pairs:
    """Read a CSV file with two columns, France,Paris, as pairs of tokens.

    A text is taken with a space before it if that is one token.

    Raises
    ------
    CheckpointError
        It cannot be read, a line has not two texts, or too few or too many pairs are of single
        tokens.
    """
    try:
        text = read_small(path, MAX_BYTES).decode("utf-8-sig")
        lines = list(csv.reader(io.StringIO(text), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise CheckpointError(f"cannot be read as CSV ({error})", file=path) from None
    rows = [[cell.strip() for cell in line] for line in lines if line]
    for number, row in enumerate(rows, start=1):
        if len(row) != 2 or not all(row):
            cells = counted(len(row), "cell")
            raise CheckpointError(f"row {number} has {cells}; two texts are expected", file=path)
    if len(rows) > MOST_PAIRS:
        raise CheckpointError(
            f"has {len(rows):,} pairs; at most {MOST_PAIRS:,} are read", file=path
        )
    texts = list(dict.fromkeys(text for row in rows for text in row))
    spaced = tokenizer.single_tokens([" " + text for text in texts])
    plain = tokenizer.single_tokens(texts)
    tokens = {}
    for text, with_space, without in zip(texts, spaced, plain, strict=True):
        tokens[text] = without if with_space is None else with_space
    single = [(tokens[a], tokens[b]) for a, b in rows]
    single = [pair for pair in single if None not in pair]
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
        Permutations of the second tokens, to find how often chance does as well.

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
    rows = model.ends.into_stream(model.embeddings.rows(pairs.sources))  # (n, d)
    hits: list[np.ndarray] = []  # (2, n, n) by head, True if it maps, suppresses source i to j
    written: list[np.ndarray] = []  # (n, d) by head of a group of layers

    def look_up() -> None:
        columns = [vector[:, None] for of_head in written for vector in of_head]
        nearest = nearest_rows(unembedding.blocks(), columns, top, by_cosine=False)
        sides = [side for both in nearest for side in both]
        hit = np.array([np.isin(pairs.targets, side.rows) for side in sides])  # (h n 2, n)
        hits.extend(hit.reshape(len(written), len(rows), 2, -1).swapaxes(1, 2))
        written.clear()

    for index in bar(list(model.own_layers), "relation", "layer"):
        written += [np.asarray(rows @ head.vo, np.float32) for head in model.layer(index).heads]
        if sum(of_head.nbytes for of_head in written) >= GROUP_BYTES:
            look_up()
    if written:
        look_up()
    return _table(model, np.stack(hits), permutations)


def score_alone(model: Model, pairs: Pairs, top: int = TOP) -> float:
    """Share of pairs whose second token is near the first one's embedding, without any head."""
    rows = model.ends.into_stream(model.embeddings.rows(pairs.sources))  # (n, d)
    columns = [row[:, None] for row in rows]
    nearest = nearest_rows(model.unembedding.blocks(), columns, top, by_cosine=False)
    most = [sides[0].rows for sides in nearest]
    hits = [target in tokens for target, tokens in zip(pairs.targets, most, strict=True)]
    return float(np.mean(hits))


def _table(model: Model, hits: np.ndarray, permutations: int) -> Table:
    """The scores of heads, and of permuted pairs, from hits (heads, 2, n, n)."""
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
    ]
    any_head = "share in which any head of the model has as many"
    measures = (
        ("score", score, "score", "share of the pairs that are"),
        ("random", hits.mean(axis=(-2, -1)), "random", "mean over permuted pairs, of those"),
        ("p", p, "p", "share of permutations with as many"),
        ("p_model", p_model, "p in the model", any_head),
    )
    for side, (ending, verb) in enumerate((("", "mapped"), ("_suppressed", "suppressed"))):
        for name, values, symbol, meaning in measures:
            meaning = f"{meaning} {verb}"
            column = Column(name + ending, values[:, side], symbol, format=".3g", meaning=meaning)
            columns.append(column)
    return Table(columns).sort("score", descending=True)


class Relation(NamedTuple):
    """Scores of a model's heads for a relation: mapping the first of each pair to the second."""

    pairs: Pairs
    table: Table  # relations.csv: one row per head, the highest score first
    alone: float  # score of the embeddings without a head: near words of a tied embedding

    @property
    def lead(self) -> str:
        """The heads whose scores no head reaches in more than one of twenty permutations."""
        sentences = []
        for ending, verb in (("", "map"), ("_suppressed", "suppress")):
            kept = self.table.where(self.table[f"p_model{ending}"] <= LEVEL)
            kept = kept.sort(f"score{ending}", descending=True)
            places = zip(kept["layer"], kept["head"], kept[f"score{ending}"], strict=True)
            named = [f"{layer}.{head} ({score:.0%})" for layer, head, score in places][:NAMED]
            sentences.append(f"beyond chance, {verb} them: {', '.join(named) or 'no head'}")
        alone = f"Embeddings alone map {self.alone:.0%} of the pairs."
        heads = f"Heads that, {'; that, '.join(sentences)}."
        return f"Relation: {self.pairs.told}. {alone} {heads}".replace("%", " %")


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

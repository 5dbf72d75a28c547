"""Tables 1 and 3 of the detokenization paper as printed, and the same ranks found in a model."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from weightscope.core.errors import CheckpointError
from weightscope.core.formulas import plain
from weightscope.core.tables import Column, Table
from weightscope.heads.detok.first_layer import FirstLayer
from weightscope.heads.detok.heads import draw_tokens, measure_heads
from weightscope.model.text.counts import Counts
from weightscope.model.text.tokenizer import Tokenizer
from weightscope.report.pages.page import Filed, Section

TOP = 10  # ranks in Tables 1 and 3
HEADS_OF_TABLES = (1, 3, 4, 5, 7, 10)
HEAD_OF_FIG_3 = 7  # and of Fig. 4

# Current tokens of Tables 1 and 3; the first two have ROC curves in Fig. 2.
TOKENS = (
    "iens", " Jackson", "tarian", "yo", "ation", " Korea", " Obama", " Einstein", " chloride", " century",
)  # fmt: skip

# Tables 1 and 3: of a table, a head and a current token, the previous tokens that are printed, with their ranks.
RANKS = (
    (1, 4, "iens", {" sap": 1, " Sap": 3}),
    (1, 7, "iens", {" sap": 1, "Al": 2, " al": 5}),
    (1, 7, " Jackson", {" Peter": 1, " Jesse": 2, " Michael": 3}),
    (3, 4, "tarian", {"Liber": 1, " Liber": 2}),
    (3, 3, "yo", {"Tok": 1, " Tok": 2}),
    (3, 4, "yo", {"Tok": 6}),
    (3, 7, "yo", {"Tok": 1}),
    (3, 4, "ation", {"anim": 1, " Represent": 3}),
    (3, 7, "ation", {" dict": 1, " Fabric": 3, " coron": 5, "valid": 7, "Gener": 8}),
    (3, 4, " Korea", {" North": 1}),
    (3, 7, " Korea", {" North": 1, "North": 2, " South": 3, "South": 4}),
    (3, 1, " Obama", {" Barack": 3, "President": 8}),
    (3, 4, " Obama", {" Barack": 3}),
    (3, 5, " Obama", {" Barack": 5}),
    (3, 7, " Obama", {" President": 2, " Michelle": 3}),
    (3, 7, " Einstein", {" Albert": 1, "Albert": 2}),
    (3, 7, " Jackson", {" Michael": 1, " Peter": 2, "Michael": 3, " Jesse": 4, "Peter": 5, " Janet": 6}),
    (3, 7, " chloride", {" aluminum": 1, " copper": 3, " vinyl": 6, " sodium": 7, " platinum": 8}),
    (3, 10, " chloride", {" potassium": 2, " sodium": 3}),
    (3, 3, " century", {" 19": 1, " nineteenth": 7}),
    (3, 7, " century", {" 21": 1, " twentieth": 6}),
)
CONTRADICTION = (
    "The paper's two tables contradict each other for head 7 and ' Jackson': Table 1 has ' Peter', ' Jesse' and "
    "' Michael' first, Table 3 ' Michael', ' Peter', 'Michael' and ' Jesse'; the authors' notes have Table 3's order."
)


WORD_ENDINGS = 10  # of Fig. 2 the first two
DISTANCES = (1, 2, 4, 8, 16, 32)
SAMPLED = 1000  # current tokens at each distance
SHORTEST_ENDING = 3  # letters


def word_endings(tokenizer: Tokenizer, counts: Counts) -> dict[str, int]:
    """The ends of words, of letters alone and with no space before, that follow most different tokens.

    Tokens are counted as 1 / (sum of squared shares), so that one frequent word does not make an ending of many.
    """
    current = np.repeat(np.arange(counts.vocab_size), np.diff(counts.indptr))
    squares = np.bincount(current, counts.data.astype(float) ** 2, counts.vocab_size)
    different = counts.occurrences.astype(float) ** 2 / np.maximum(squares, 1)
    endings: dict[str, int] = {}
    for token in np.argsort(-different, kind="stable").tolist():
        text = tokenizer.text(token)
        if different[token] and text.isalpha() and len(text) >= SHORTEST_ENDING and len(endings) < WORD_ENDINGS:
            endings[text] = token
    return endings


def with_counts(table: Table, tokens: Sequence[int], matrix: Any) -> Table:
    """The table of `ranked` for current `tokens`, with how often each pair occurs: counts (V, V)."""
    current = np.repeat(tokens, len(table) // max(1, len(tokens)))
    times = [int(matrix[pair]) for pair in zip(current, table["token_id"], strict=True)]
    count = Column("count", times, meaning="times that the pair occurs in the texts counted")
    return Table([*table.columns, count], table.caption)


def shared_scores(first: FirstLayer, matrix: Any) -> np.ndarray:
    """T^ee's mean over the current tokens that follow some token: (H, V), by bigram counts (V, V)."""
    scored = np.diff(matrix.indptr) > 0
    mean_row = first.mean_row(scored)
    means = (first.key_factor(head.kv_head) @ first.mean_query(head.index, scored, mean_row) for head in first.heads)
    return np.stack(list(means))


def by_distance(first: FirstLayer, counts: Counts) -> Table:
    """The AUROC of heads that rotate, at more distances than the previous token's."""
    drawn, rows = draw_tokens(first, counts, SAMPLED), []
    for delta in DISTANCES:
        table = measure_heads(replace(first, delta=delta), counts, sample=drawn).heads
        columns = (table[name].tolist() for name in ("head", "auroc", "auroc_specific"))
        rows += [(delta, *row) for row in zip(*columns, strict=True)]
    names = ("distance", "head", "auroc", "auroc_specific")
    return Table.of_rows(names, rows, f"As Table 2, for {len(drawn.items):,} current tokens, at distances $i - j$.")


def single_tokens(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, int]:
    """Ids, by their text, of those texts that are one token in this vocabulary."""
    ids = {}
    for text in texts:
        with suppress(CheckpointError):
            ids[text] = tokenizer.id_of(text)
    return ids


def printed_ranks(first: FirstLayer, tokenizer: Any) -> Table:
    """Tables 1 and 3 of the paper rank by rank, of those texts that are one token here, with the ranks found.

    A token's rank is one more than how many score higher.
    """
    rows, scores_of = [], lru_cache(1)(first.token_scores)  # rows of one token follow each other
    for table, head, current, previous in RANKS:
        ids = single_tokens(tokenizer, [current, *previous])
        if current not in ids or head >= len(first.heads):
            continue
        scores = scores_of(ids[current])[head]  # (V,)
        for text in [text for text in previous if text in ids]:
            rank = 1 + int((scores > scores[ids[text]]).sum())
            rows.append((table, head, current, text, previous[text], rank))
    names = ("table", "head", "token", "previous", "rank_printed", Column("rank", meaning="found here"))
    return Table.of_rows(names, rows, f"Tables 1 and 3, rank by rank. {CONTRADICTION}")


def neighbour_section(tables: dict[str, Table], tokens: Sequence[str]) -> Section:
    """Tables 1 and 3, by file name: what heads would put before each of these tokens, and the paper's ranks."""
    listed = ", ".join(plain(repr(token)) for token in tokens)
    text = (
        "$$T^ee(i, j) = frac(e_i W_QK e_j^⊤, σ_i σ_j)$$ "
        f"The previous tokens $j$ that heads score highest for the current tokens {listed}, before $1/√(d')$, and how "
        "often each pair occurs in the texts counted."
    )
    return Section("What heads look for", text, [Filed(table, name) for name, table in tables.items()])

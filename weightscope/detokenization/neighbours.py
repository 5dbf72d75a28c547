"""For a token, the previous tokens that each head likes best (detokenization paper, Tables 1 and 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from weightscope.detokenization.first_layer import FirstLayer
from weightscope.tables import Column, Table
from weightscope.text.tokenizer import token_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HEADER = (
    "head",
    Column("rank", meaning="1 is the highest score in the whole vocabulary"),
    "token_id",
    "token",
    Column("score", meaning="T^ee, before 1/sqrt(d')", format=".3f"),
    Column("joined", meaning="what the head would put together: the previous token and the current one"),
)


def neighbours(
    first: FirstLayer, tokenizer: Tokenizer, tokens: Sequence[int], top: int = 10, heads: Sequence[int] | None = None
) -> Table:
    """Rank the vocabulary as previous tokens of some current tokens.

    Parameters
    ----------
    first : FirstLayer
    tokenizer : Tokenizer
    tokens : sequence of int
        Ids of the current tokens.
    top : int
        How many previous tokens a head and current token.
    heads : sequence of int, optional
        All by default.

    Returns
    -------
    Table
        A row a current token, head and rank.
    """
    rows = []
    for token in tokens:
        scores = first.token_scores(token)  # (H, V)
        for head in range(len(scores)) if heads is None else heads:
            best = np.argsort(-scores[head], kind="stable")[:top]
            for rank, previous in enumerate(best.tolist(), start=1):
                text, joined = token_text(tokenizer, previous), token_text(tokenizer, previous, token)
                rows.append((head, rank, previous, text, float(scores[head, previous]), joined))
    return Table.of_rows(HEADER, rows, "Tables 1 and 3.")

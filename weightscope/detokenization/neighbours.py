"""For a token, the previous tokens that each head likes best (detokenization paper, Tables 1 and 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from weightscope.detokenization.first_layer import FirstLayer
from weightscope.tables import Column, Table
from weightscope.text.tokenizer import token_names

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HEADER = (
    "head",
    Column("rank", meaning="1 is the highest score in the whole vocabulary"),
    "token_id",
    "token",
    Column("score", meaning="$T^ee$, before 1/√d'", format=".3f"),
    Column("joined", meaning="what the head would put together: the previous token and the current one"),
)


def neighbours(
    first: FirstLayer,
    tokenizer: Tokenizer | None,
    tokens: Sequence[int],
    top: int = 10,
    heads: Sequence[int] | None = None,
) -> Table:
    """Rank the vocabulary as previous tokens of some current tokens.

    Parameters
    ----------
    first : FirstLayer
    tokenizer : Tokenizer or None
        None: tokens are called by their ids.
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
    rows, name = [], token_names(tokenizer)
    for token in tokens:
        scores = first.token_scores(token)  # (H, V)
        for head in range(len(scores)) if heads is None else heads:
            best = np.argsort(-scores[head], kind="stable")[:top]
            for rank, previous in enumerate(best.tolist(), start=1):
                score = float(scores[head, previous])
                rows.append((head, rank, previous, name(previous), score, name(previous, token)))
    return Table.of_rows(HEADER, rows, " ".join(filter(None, ("Tables 1 and 3.", first.bare))))

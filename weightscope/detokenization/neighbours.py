"""For a token, the previous tokens that each head likes best (detokenization paper, Tables 1 and 3)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from weightscope.detokenization.first_layer import FirstLayer
from weightscope.folder import write_csv
from weightscope.text.tokenizer import token_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

COLUMNS = ("head", "rank", "token_id", "token", "score", "joined")


@dataclass(frozen=True)
class Neighbour:
    """One previous token of a head's ranking.

    Attributes
    ----------
    head, rank, token_id : int
        Rank 1 is the highest score in the whole vocabulary.
    token : str
    score : float
        T^ee, before 1/sqrt(d').
    joined : str
        The previous token and the current one as text: what the head would put together.
    """

    head: int
    rank: int
    token_id: int
    token: str
    score: float
    joined: str


def neighbours(
    first: FirstLayer, tokenizer: Tokenizer, token: int, top: int = 10, heads: list[int] | None = None
) -> list[Neighbour]:
    """Rank the vocabulary as previous tokens of one current token, for every head or those named.

    Parameters
    ----------
    first : FirstLayer
    tokenizer : Tokenizer
    token : int
        Id of the current token.
    top : int
        How many a head.
    heads : list of int, optional
        All by default.
    """
    scores = first.token_scores(token)  # (H, V)
    found = []
    for head in range(len(scores)) if heads is None else heads:
        best = np.argsort(-scores[head], kind="stable")[:top]
        for rank, previous in enumerate(best.tolist(), start=1):
            text, joined = token_text(tokenizer, previous), token_text(tokenizer, previous, token)
            found.append(Neighbour(head, rank, previous, text, float(scores[head, previous]), joined))
    return found


def write_neighbours(found: list[Neighbour], path: Path) -> None:
    """Write the ranking as CSV with COLUMNS."""
    write_csv(path, COLUMNS, ([getattr(n, column) for column in COLUMNS] for n in found))

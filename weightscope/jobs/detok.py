"""Which heads put words together: T^ee against bigram counts (detokenization paper, section 3)."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from tqdm import tqdm

from weightscope.backend import open_device
from weightscope.counts import Counts
from weightscope.errors import CheckpointError
from weightscope.jobs.first_layer import PROGRESS, FirstLayer
from weightscope.metrics.auroc import bigram_auroc, mean_auroc, roc_curve
from weightscope.output import write_csv, write_npz


@dataclass(frozen=True)
class HeadAuroc:
    """One row of Table 2.

    Attributes
    ----------
    head : int
    auroc : float
        Mean over the tokens that follow some token in the counts.
    auroc_paper : float
        Mean over all tokens, those that follow none entering as 0: what the paper's code reports.
    tokens_scored : int
        How many tokens `auroc` is a mean of.
    """

    head: int
    auroc: float
    auroc_paper: float
    tokens_scored: int


@dataclass(frozen=True)
class Detokenization:
    """How well each head's T^ee ranks the previous tokens that occur, for every current token.

    Attributes
    ----------
    auroc : (n_heads, vocab) float64 array
        NaN where a token follows no token in the counts.
    table : list of HeadAuroc
        Best head first.
    """

    auroc: np.ndarray
    table: list[HeadAuroc]


def detokenize(first: FirstLayer, counts: Counts) -> Detokenization:
    """AUROC of every head over the full vocabulary (Table 2).

    Parameters
    ----------
    first : FirstLayer
    counts : Counts
        Bigrams by the checkpoint's own tokenizer.

    Raises
    ------
    CheckpointError
        No token embedding, or counts of another vocabulary.
    """
    n_tokens = first.model.embeddings.n_tokens
    matrix = counts.matrix(n_tokens)
    rows = []
    with tqdm(total=len(first.heads) * n_tokens, desc="AUROC", unit="token", unit_scale=True, **PROGRESS) as bar:
        for kv_head, group in groupby(first.heads, key=lambda head: head.kv_head):
            right = first.key_factor(kv_head)
            for head in group:
                left = first.query_factor(head.index)
                rows.append(bigram_auroc(left, right, matrix, progress=bar.update, device=open_device(first.device)))
    table = [HeadAuroc(head, *mean_auroc(row)) for head, row in enumerate(rows)]
    return Detokenization(np.stack(rows), sorted(table, key=lambda row: -row.auroc))


def write_detokenization(found: Detokenization, out: Path) -> None:
    """Write heads.csv and tokens.npz into `out`."""
    in_order = sorted(found.table, key=lambda row: row.head)
    write_csv(
        out / "heads.csv",
        ("head", "auroc", "auroc_paper", "tokens_scored"),
        ((row.head, row.auroc, row.auroc_paper, row.tokens_scored) for row in in_order),
    )
    write_npz(out / "tokens.npz", auroc=found.auroc)


@dataclass(frozen=True)
class TokenRoc:
    """ROC curves of one current token (Fig. 2), a pair of arrays a head.

    Attributes
    ----------
    text : str
    curves : list of (false positive rate, true positive rate)
    """

    text: str
    curves: list[tuple[np.ndarray, np.ndarray]]


def roc_curves(first: FirstLayer, counts: Counts, tokens: Mapping[str, int]) -> list[TokenRoc]:
    """ROC curves of every head for chosen current tokens (Fig. 2).

    Parameters
    ----------
    first : FirstLayer
    counts : Counts
    tokens : mapping of str to int
        Ids of the current tokens by their text.

    Raises
    ------
    CheckpointError
        A token follows no token in the counts, so that it has no curve.
    """
    found = []
    for text, token in tokens.items():
        previous, weights = counts.row(token)
        if not len(previous):
            raise CheckpointError(
                f"{text!r} follows no token in these counts, so it has no ROC curve", file=counts.file
            )
        curves = [roc_curve(scores, previous, weights) for scores in first.token_scores(token)]
        found.append(TokenRoc(text, curves))
    return found

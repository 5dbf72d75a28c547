"""ROC curves of single current tokens (detokenization paper, Fig. 2)."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightscope.detokenization.first_layer import FirstLayer
from weightscope.errors import CheckpointError
from weightscope.metrics.auroc import roc_curve
from weightscope.parallel import one_blas_thread
from weightscope.progress import phase
from weightscope.shapes import ShowsShapes
from weightscope.text.counts import Counts
from weightscope.text.tokenizer import token_id


@dataclass(frozen=True, eq=False, repr=False)
class TokenRoc(ShowsShapes):
    """ROC curves of one current token (Fig. 2), a pair of arrays a head.

    Attributes
    ----------
    text : str
    curves : list of (false positive rate, true positive rate)
    """

    text: str
    curves: list[tuple[np.ndarray, np.ndarray]]


def single_tokens(tokenizer: Any, counts: Counts, texts: Sequence[str]) -> dict[str, int]:
    """Ids, by their text, of those texts that are one token in this vocabulary and follow some token in the counts."""
    ids = {}
    for text in texts:
        with suppress(CheckpointError):
            ids[text] = token_id(tokenizer, text)
    return {text: token for text, token in ids.items() if len(counts.row(token)[0])}


@phase("ROC curves")
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
    rocs = []
    for text, token in tokens.items():
        previous, weights = counts.row(token)
        if not len(previous):
            problem = f"{text!r} follows no token in these counts, so it has no ROC curve"
            raise CheckpointError(problem, file=counts.file)
        with one_blas_thread():
            curves = [roc_curve(scores, previous, weights) for scores in first.token_scores(token)]
        rocs.append(TokenRoc(text, curves))
    return rocs

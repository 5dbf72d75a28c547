"""Bigram AUROC: does a head score the tokens that do come before a token above those that do not?

For a current token i the scores are s_ij = e~_i W_QK e~_j' over every previous token j of the vocabulary (T^ee of the
detokenization paper, eq. 14). Tokens seen before i in a corpus are the positives, each weighted by its bigram count;
all others are the negatives (section 3.2, Fig. 2, Table 2).
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from weightscope.errors import CheckpointError
from weightscope.metrics._auroc_steps import build_steps, doubled_wins, doubled_wins_by_sorting

TILE_BYTES = 20_000_000  # scores a thread holds at a time: 99 rows of GPT-2's vocabulary
FEWEST_ROWS, MOST_ROWS = 32, 256  # rows of a tile; fewer make slow products
LARGEST_SCORE = 2.0**125  # beyond it sums and differences of scores leave float32


def weighted_auroc(scores: np.ndarray, positives: np.ndarray, weights: np.ndarray) -> float:
    """AUROC of one row of scores, each positive counting `weight` times.

    AUROC = sum_p c_p (#negatives below s_p + 1/2 #negatives equal to s_p) / (sum_p c_p * #negatives), the area under
    the curve of Fig. 2 of the detokenization paper; its code gets the same by repeating each positive c_p times.

    Parameters
    ----------
    scores : (n,) array
    positives : (k,) int array
        Where the positives are; no index twice.
    weights : (k,) int array
        c_p. An index of weight 0 is a negative.

    Returns
    -------
    float
        NaN without a positive or without a negative.

    Raises
    ------
    CheckpointError
        A score is NaN, or a weight negative or too large to be summed exactly.
    ValueError
        An index twice or out of range.
    """
    scores, positives, weights = _row(scores, positives, weights)
    negatives = len(scores) - len(positives)
    if not len(positives) or not negatives:
        return np.nan
    rising = np.argsort(scores[positives])
    wins = doubled_wins_by_sorting(scores, scores[positives][rising], weights[rising])
    return float(wins) / float(2 * weights.sum() * negatives)


def roc_curve(scores: np.ndarray, positives: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count-weighted ROC curve of one row of scores (detokenization paper, Fig. 2).

    As a threshold falls past each distinct score: the part of the negatives and the part of the bigram counts at or
    above it. The area under the curve is `weighted_auroc`. Points inside horizontal and vertical runs are left out.

    Parameters
    ----------
    scores, positives, weights
        As in `weighted_auroc`.

    Returns
    -------
    fpr, tpr : float64 arrays
        Both rise from 0 to 1.

    Raises
    ------
    CheckpointError
        As in `weighted_auroc`, and without a positive or without a negative.
    ValueError
        As in `weighted_auroc`.
    """
    scores, positives, weights = _row(scores, positives, weights)
    if len(positives) in (0, len(scores)):
        raise CheckpointError("a ROC curve needs a positive and a negative; this row has only one of them")
    hits, misses = np.zeros(len(scores), np.int64), np.ones(len(scores), np.int64)
    hits[positives], misses[positives] = weights, 0
    falling = np.argsort(-scores)
    last = np.append(np.diff(scores[falling]) != 0, True)  # of each run of equal scores
    tpr = np.append(0, np.cumsum(hits[falling])[last])
    fpr = np.append(0, np.cumsum(misses[falling])[last])
    vertical, horizontal = np.diff(fpr) == 0, np.diff(tpr) == 0
    straight = (vertical[1:] & vertical[:-1]) | (horizontal[1:] & horizontal[:-1])
    corner = np.concatenate(([True], ~straight, [True]))
    return fpr[corner] / fpr[-1], tpr[corner] / tpr[-1]


def _row(scores: np.ndarray, positives: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arguments of `weighted_auroc`, checked, without the indices of weight 0."""
    scores, positives, weights = np.asarray(scores), np.asarray(positives), _whole(weights)
    if np.isnan(scores).any():
        raise CheckpointError(f"{np.isnan(scores).sum()} of {len(scores)} scores are NaN")
    positives, weights = positives[weights > 0].astype(np.intp), weights[weights > 0]
    if len(np.unique(positives)) < len(positives):
        raise ValueError("a positive is given twice; add its weights up")
    if len(positives) and not 0 <= positives.min() <= positives.max() < len(scores):
        raise ValueError(f"positives index {len(scores)} scores; found {positives.min()} to {positives.max()}")
    _check_total(weights.sum(dtype=np.float64), len(scores))
    return scores, positives, weights


class MeanAuroc(NamedTuple):
    """One head's row of Table 2.

    Attributes
    ----------
    auroc : float
        Mean over the tokens that have an AUROC; NaN if none has.
    auroc_paper : float
        Mean over all tokens, those without entering as 0: what the paper's code reports.
    tokens_scored : int
        How many tokens `auroc` is a mean of.
    """

    auroc: float
    auroc_paper: float
    tokens_scored: int


def mean_auroc(auroc: np.ndarray) -> MeanAuroc:
    """A head's mean AUROC, over the tokens scored and as the paper's code has it (detokenization paper, Table 2).

    Parameters
    ----------
    auroc : (V,) array
        NaN where a token has no positive.
    """
    scored = auroc[~np.isnan(auroc)]
    mean = float(scored.mean()) if len(scored) else np.nan
    return MeanAuroc(mean, float(scored.sum() / len(auroc)) if len(auroc) else np.nan, len(scored))


def bigram_auroc(
    left: np.ndarray,
    right: np.ndarray,
    counts: Any,
    *,
    progress: Callable[[int], object] = lambda done: None,
    threads: int | None = None,
    compiled: bool | None = None,
) -> np.ndarray:
    """AUROC of one head for every current token, over the full vocabulary, exact with ties.

    Row i is `weighted_auroc` of the scores left_i . right_j, j over the vocabulary, in float32 (detokenization paper,
    section 3.2). Scores are made and counted a tile of rows at a time, a thread a core with its own tile and
    single-threaded products. Memory beside the arguments is 45 MB a thread for GPT-2's vocabulary, whatever the counts.

    Parameters
    ----------
    left : (V, r) array
        e~ W_Q of the head, or any left factor of its scores.
    right : (V, r) array
        e~ W_K.
    counts : sparse array of shape (V, V), whole numbers
        Rows are current tokens, columns previous ones.
    progress : function, optional
        Told how many more tokens are done; called from this thread.
    threads : int, optional
        One a core if not given.
    compiled : bool, optional
        With numba or without; with it, if it is installed and this is not given. The numbers are the same.

    Returns
    -------
    (V,) float64 array
        NaN for a token without a positive or without a negative.

    Raises
    ------
    CheckpointError
        Factors with NaN or infinity, or so large that scores leave float32; counts that are negative, not whole, too
        large, or of another vocabulary.
    """
    left, right = np.asarray(left, np.float32), np.asarray(right, np.float32)
    bound = _score_bound(left, right)  # (V,)
    counts = _canonical(counts, (len(left), len(right)))
    with_numba = _numba_is_there() if compiled is None else compiled
    threads = threads or available_cores()
    width = len(right)
    scored = np.flatnonzero(np.diff(counts.indptr))  # (n,) tokens with a positive
    height = tile_rows(width)
    tiles: SimpleQueue[np.ndarray] = SimpleQueue()
    for _ in range(threads):
        tiles.put(np.empty((height, width), np.float32))
    columns = np.ascontiguousarray(right.T)  # (r, V): products with it are a quarter faster than with right.T

    def score(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tile = tiles.get()
        try:
            scores = np.matmul(left[rows], columns, out=tile[: len(rows)])  # (rows, V)
            begin, end = counts.indptr[rows[0]], counts.indptr[rows[-1] + 1]  # the rows skipped in between are empty
            indptr = np.append(counts.indptr[rows], end).astype(np.int64) - begin  # (rows + 1,)
            positives, weights = counts.indices[begin:end], counts.data[begin:end]
            _check_total(np.add.reduceat(weights.astype(np.float64), indptr[:-1]).max(), width)
            steps = build_steps(scores, indptr, positives, weights, bound[rows])
            wins = doubled_wins(scores, steps, compiled=with_numba)
            pairs = np.add.reduceat(weights, indptr[:-1]) * (width - np.diff(indptr))
            with np.errstate(invalid="ignore"):  # 0 / 0 where all are positives
                return rows, wins / (2 * pairs)
        finally:
            tiles.put(tile)

    auroc = np.full(len(left), np.nan)
    progress(len(left) - len(scored))
    parts = [scored[start : start + height] for start in range(0, len(scored), height)]
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(threads) as pool:
        try:
            for rows, values in pool.map(score, parts):
                auroc[rows] = values
                progress(len(rows))
        finally:
            pool.shutdown(cancel_futures=True)  # after an error or an interrupt no further tile is begun
    return auroc


def _score_bound(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """|left_i| max_j |right_j|, (V,): what no score of row i exceeds."""
    norms = []
    for name, factor in (("left", left), ("right", right)):
        norm = np.sqrt(np.einsum("ij,ij->i", factor, factor, dtype=np.float64))  # (V,)
        if not np.isfinite(norm).all():
            worst = np.flatnonzero(~np.isfinite(norm))
            raise CheckpointError(
                f"the {name} factor of the scores has NaN or infinite values in {len(worst)} of {len(norm)} rows, "
                f"the first of them row {worst[0]}"
            )
        norms.append(norm)
    bound = norms[0] * norms[1].max(initial=0) * (1 + 1e-6)  # rounding of the products included
    if bound.max(initial=0) > LARGEST_SCORE:
        raise CheckpointError(f"scores may be as large as {bound.max():.1e}, more than float32 carries through")
    return bound


def _canonical(counts: Any, shape: tuple[int, int]) -> Any:
    """`counts` as CSR in int64, indices sorted, none twice, no zeros stored; copied only if it has to be."""
    if counts.shape != shape:
        raise CheckpointError(f"counts have shape {counts.shape}; the vocabulary of this checkpoint needs {shape}")
    counts = counts.tocsr()
    data = _whole(counts.data)
    counts = type(counts)((data, counts.indices, counts.indptr), shape=shape)
    if not counts.has_canonical_format:
        counts = counts.copy()
        counts.sum_duplicates()
    if not counts.data.all():
        counts = counts.copy()
        counts.eliminate_zeros()
    return counts


def _whole(weights: np.ndarray) -> np.ndarray:
    """`weights` as int64, if whole and not negative."""
    weights = np.asarray(weights)
    if weights.dtype.kind not in "bui":
        raise CheckpointError(f"counts are {weights.dtype}; they need to be whole numbers")
    if weights.size and weights.min() < 0:
        raise CheckpointError(f"counts are negative, down to {weights.min()}")
    return weights.astype(np.int64, copy=False)


def _check_total(total: float, width: int) -> None:
    """Twice the wins of a row stay in int64."""
    if total * 2 * max(width, 1) >= 2.0**63:
        raise CheckpointError(f"the counts of one token add up to {total:.1e}, more than can be summed exactly")


def tile_rows(width: int) -> int:
    """How many rows of scores a thread of `bigram_auroc` makes at a time, for a vocabulary of `width`."""
    return min(max(TILE_BYTES // (4 * max(width, 1)), FEWEST_ROWS), MOST_ROWS)


def available_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _numba_is_there() -> bool:
    """numba is found and works with this NumPy."""
    try:
        import weightscope.metrics._auroc_numba  # noqa: F401
    except ImportError:
        return False
    return True

"""Bigram AUROC: does a head score the tokens that do come before a token above those that do not?

For a current token i the scores are s_ij = e~_i W_QK e~_j' over every previous token j of the vocabulary (T^ee of the
detokenization paper, eq. 14). Tokens seen before i in a corpus are the positives, each weighted by its bigram count;
all others are the negatives (section 3.2, Fig. 2, Table 2).
"""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from weightscope.device import CPU, Device
from weightscope.errors import CheckpointError, TooLargeError
from weightscope.metrics._auroc_device import auroc_on_device
from weightscope.metrics.tiles import cut_into_panels, empty_tile, fill_tile, tile_rows
from weightscope.parallel import in_threads, usable_cores

COUNTED_ROWS, STRIP = 128, 256  # of a tile for numba, at most, and columns of it that lie together for each row
SORTED_ROWS = 64  # of a tile for NumPy, at most: its rows lie whole, and more of them are slow to write
LARGEST_TOTAL = 2.0**62  # of the counts of a token, times the vocabulary: twice that many wins stay in int64
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
    ranked, own = np.sort(scores), scores[positives]
    among = np.sort(own)
    below = ranked.searchsorted(own) - among.searchsorted(own)  # (k,) negatives below each positive
    up_to = ranked.searchsorted(own, "right") - among.searchsorted(own, "right")  # and at most as high
    return float(weights @ (below + up_to)) / float(2 * weights.sum() * negatives)


def roc_curve(scores: np.ndarray, positives: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count-weighted ROC curve of one row of scores (detokenization paper, Fig. 2).

    As a threshold falls past each distinct score: the part of the negatives and the part of the bigram counts at or
    above it. The area under the curve is `weighted_auroc`.

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
    from sklearn.metrics import roc_curve as curve

    scores, positives, weights = _row(scores, positives, weights)
    if len(positives) in (0, len(scores)):
        raise CheckpointError("a ROC curve needs a positive and a negative; this row has only one of them")
    positive, each = np.zeros(len(scores), bool), np.ones(len(scores))
    positive[positives], each[positives] = True, weights
    fpr, tpr, _ = curve(positive, scores, sample_weight=each)
    return fpr, tpr


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


def auroc_by_token(
    left: np.ndarray,
    right: np.ndarray,
    counts: Any,
    *,
    progress: Callable[[int], object] = lambda done: None,
    threads: int | None = None,
    compiled: bool | None = None,
    device: Device = CPU,
) -> np.ndarray:
    """AUROC of one head for every current token, over the full vocabulary, exact with ties.

    Row i is `weighted_auroc` of the scores left_i . right_j, j over the vocabulary, in float32 (detokenization paper,
    section 3.2). Scores are made and counted a tile of rows at a time, a thread a core, each with its own tile and
    single-threaded products. Memory beside the arguments: a tile a thread, 26 MB for GPT-2's vocabulary with
    numba and 13 MB without, and one copy of `right`. A process that reads 3 million counts and does a head of GPT-2's
    shape on two cores peaks at 301 MB with numba and 169 MB without.

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
    device : Device, optional
        Where to compute; other than on this machine's cores `threads` and `compiled` say nothing. Its products may
        round otherwise, and the AUROC is exact for the scores they give.

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
    auroc = np.full(len(left), np.nan)
    scored = np.flatnonzero(np.diff(counts.indptr))  # (n,) tokens with a positive
    progress(len(left) - len(scored))
    if device is not CPU:
        auroc[scored] = auroc_on_device(device, left, right, counts, progress)
        return auroc
    compiled = _numba_is_there() if compiled is None else compiled
    tile_auroc = _tile_auroc_compiled if compiled else _tile_auroc
    threads = threads or usable_cores()
    width = len(right)
    strip, most = (STRIP, COUNTED_ROWS) if compiled else (max(width, 1), SORTED_ROWS)
    height = tile_rows(width, threads, most)
    panels = cut_into_panels(right, height, strip)  # (S, P, r, w)
    tiles: SimpleQueue[np.ndarray] = SimpleQueue()
    for _ in range(threads):
        tiles.put(empty_tile(panels, height))

    def score(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        buffer = tiles.get()
        try:
            tile = fill_tile(buffer, left[rows], panels)  # (S, rows, P w)
            begin, end = counts.indptr[rows[0]], counts.indptr[rows[-1] + 1]  # the rows skipped in between are empty
            indptr = np.append(counts.indptr[rows], end).astype(np.int64) - begin  # (rows + 1,)
            positives, weights = counts.indices[begin:end], counts.data[begin:end]
            return rows, tile_auroc(tile, width, indptr, positives, weights, bound[rows])
        finally:
            tiles.put(buffer)

    parts = [scored[start : start + height] for start in range(0, len(scored), height)]
    for rows, values in in_threads(score, parts, threads):
        auroc[rows] = values
        progress(len(rows))
    return auroc


def _tile_auroc(
    tile: np.ndarray, width: int, indptr: np.ndarray, positives: np.ndarray, weights: np.ndarray, bound: np.ndarray
) -> np.ndarray:
    """AUROC of each row of a tile of one strip, (n,), sorting it in place; arguments as in `_auroc_numba.tile_auroc`.

    `weighted_auroc` for many rows: whatever can be is done for all of them at once, as the threads take turns at it.
    """
    scores, each = tile[0, :, :width], np.diff(indptr)
    row = np.repeat(np.arange(len(scores)), each)  # (m,)
    own = scores[row, positives]
    rising = _rising_within_rows(row, own)
    own, weights = own[rising], weights[rising]

    new = np.append(True, (own[1:] != own[:-1]) | (row[1:] != row[:-1]))  # runs of equal scores in a row
    start = np.flatnonzero(new)
    among = (start + np.append(start[1:], len(row)))[np.cumsum(new) - 1] - 2 * indptr[row]  # below plus up to

    scores.sort(axis=1)
    edges = np.stack((own, np.nextafter(own, np.float32(np.inf))), axis=1).ravel()  # below the next: up to this
    bounds = zip(scores, indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)
    ranks = np.concatenate([ranked.searchsorted(edges[2 * begin : 2 * end]) for ranked, begin, end in bounds])
    wins = np.add.reduceat(weights * (ranks[::2] + ranks[1::2] - among), indptr[:-1])
    pairs = 2 * np.add.reduceat(weights, indptr[:-1]) * (width - each)
    with np.errstate(invalid="ignore"):  # 0 / 0 where all are positives
        return wins / pairs


def _rising_within_rows(row: np.ndarray, score: np.ndarray) -> np.ndarray:
    """The order by row, then by score: one sort of 64-bit integers, several times as fast as a lexsort."""
    bits = score.view(np.int32)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    return np.argsort((row << 32) + rank)


def _tile_auroc_compiled(
    tile: np.ndarray, width: int, indptr: np.ndarray, positives: np.ndarray, weights: np.ndarray, bound: np.ndarray
) -> np.ndarray:
    """The same of any tile, left as it is."""
    from weightscope.metrics import _auroc_numba

    heaviest = np.add.reduceat(weights, indptr[:-1]).max()
    kind = np.int32 if heaviest < 2**31 // tile.shape[2] else np.int64
    table, auroc = np.empty(_auroc_numba.MOST_BUCKETS, kind), np.empty(len(bound))
    _auroc_numba.tile_auroc(tile, width, indptr, positives, weights, bound, table, auroc)
    return auroc


def _score_bound(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """sum_k |left_ik| max_j |right_jk|, (V,): what no score of row i exceeds, nor any partial sum of one."""
    for name, factor in (("left", left), ("right", right)):
        if not np.isfinite(factor).all():
            bad = np.flatnonzero(~np.isfinite(factor).all(axis=1))
            raise CheckpointError(
                f"the {name} factor of the scores has NaN or infinite values in {len(bad)} of {len(factor)} rows, "
                f"the first of them row {bad[0]}"
            )
    with np.errstate(over="ignore"):
        bound = np.abs(left) @ np.abs(right).max(axis=0, initial=0) * np.float32(1.0001)  # rounding included
    if bound.max(initial=0) > LARGEST_SCORE:
        raise TooLargeError(f"scores may be as large as {bound.max():.1e}, more than float32 carries through")
    return bound.astype(np.float64)


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
    if counts.data.max(initial=0) * float(shape[1]) ** 2 >= LARGEST_TOTAL:  # else no row can be too large
        for start, end in pairwise(counts.indptr.tolist()):
            _check_total(counts.data[start:end].sum(dtype=np.float64), shape[1])
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
    if total * width >= LARGEST_TOTAL:
        raise CheckpointError(f"the counts of one token add up to {total:.1e}, more than can be summed exactly")


@cache
def _numba_is_there() -> bool:
    """numba is installed and works with this NumPy."""
    try:
        import weightscope.metrics._auroc_numba  # noqa: F401
    except ImportError:
        return False
    return True

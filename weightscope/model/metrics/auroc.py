"""Bigram AUROC: does a head score the tokens that do come before a token above those that do not?

For a current token i the scores are s_ij = e~_i W_QK e~_j' over every previous token j of the
vocabulary (T^ee of the detokenization paper, eq. 14). Tokens seen before i in a corpus are the
positives, each weighted by its bigram count; all others are the negatives (section 3.2, Fig. 2,
Table 2).
"""

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from weightscope.core.compute.cores import in_threads, usable_cores
from weightscope.core.compute.device import CPU, Device, rows_that_fit
from weightscope.core.compute.fast import numba_may_run
from weightscope.core.errors import CheckpointError, TooLargeError

# Scores of a few rows with all columns, by products small enough for BLAS and the caches.
TILE_BYTES = 26_000_000  # scores a thread holds at a time: 128 rows of GPT-2's vocabulary
ALL_TILES_BYTES = 320_000_000  # and all threads together, while the rows allow it
FEWEST_ROWS = 16  # rows of a tile; more are a multiple of it
PANEL_COLUMNS = 64  # columns in one product
PRODUCT_SIZE = 2**19  # rows x r x columns of one product; up to here BLAS skips its packing
CACHE_LINE = 64  # bytes


def tile_rows(width: int, threads: int, most: int) -> int:
    """Rows of scores, at most `most`, that each thread holds at a time for `width` tokens."""
    tile = min(TILE_BYTES, ALL_TILES_BYTES // threads)
    return min(max(tile // (4 * max(width, 1)) // FEWEST_ROWS, 1) * FEWEST_ROWS, most)


def cut_into_panels(right: np.ndarray, height: int, strip: int) -> np.ndarray:
    """`right` transposed, in strips of at least `strip` columns (zeros fill the last), in panels.

    -> (S, P, r, w).

    Products of a tile of `height` rows with one panel after another stay in cache, and cost less
    than one product of the tile with the whole.
    """
    width, rank = right.shape
    columns = min(max(PRODUCT_SIZE // max(height * rank, 1), 16) // 16 * 16, PANEL_COLUMNS)
    cuts = -(-strip // columns)
    panels = aligned(-(-width // (cuts * columns)), cuts, rank, columns)
    flat, full = panels.reshape(-1, rank, columns), width // columns
    flat[:full] = right[: full * columns].reshape(full, columns, rank).swapaxes(1, 2)
    flat[full:] = 0
    if full < len(flat):
        flat[full, :, : width - full * columns] = right[full * columns :].T
    return panels


def empty_tile(panels: np.ndarray, height: int) -> np.ndarray:
    """Room for the scores of `height` rows, two at least: (S, rows, columns of a strip) float32."""
    strips, cuts, _, columns = panels.shape
    return aligned(strips, max(height, 2), cuts * columns)


def fill_tile(tile: np.ndarray, left: np.ndarray, panels: np.ndarray) -> np.ndarray:
    """Write the scores of rows `left`, (n, r), into a tile's first n rows: -> (S, n, columns).

    In a strip the rows lie one after another, so that a product is written to places near one
    another: that is a tenth faster than to rows as far apart as they are long, and more rows can
    share a panel.
    """
    strips, cuts, _, columns = panels.shape
    rows = len(left)
    if rows == 1:  # a product of one row is rounded otherwise than the same row among others
        left = np.repeat(left, 2, axis=0)
    room = tile[:, : len(left)].reshape(strips, len(left), cuts, columns)
    np.matmul(left, panels, out=room.swapaxes(1, 2))
    return tile[:, :rows]


def aligned(*shape: int) -> np.ndarray:
    """An empty float32 array that begins on a cache line: products with it are a tenth faster."""
    size, line = math.prod(shape), CACHE_LINE // 4
    room = np.empty(size + line, np.float32)
    start = -room.ctypes.data % CACHE_LINE // 4
    return room[start : start + size].reshape(shape)


# AUROC of blocks of score rows on a device, by the array API standard alone.
#
# As in `auroc_numba` the wins of a row are summed over its elements instead of its positives: an
# element of score s wins, twice over, 2 sum of c_p over s_p > s plus the c_p with s_p = s;
# the positives' wins over one another are taken off afterwards. One binary search places every
# element of a block among the positives of its row: row and score become one integer, the score in
# its lower half as an integer of the same order, so that the positives of all rows are one sorted
# list. Neighbouring elements search the same few entries, which a card does in its caches; sorting
# whole rows it does not.

MOST_SCORES = 2**26  # scores of a block: enough to keep a card busy
BYTES_A_SCORE = 48  # a score, its key, its place, its wins twice while they are computed
BYTES_A_POSITIVE = 192  # its row, place and weight, its two edges, and sorting them
BETWEEN_ROWS = 2**32  # in keys


def auroc_on_device(
    device: Device,
    left: np.ndarray,
    right: np.ndarray,
    counts: Any,
    less: np.ndarray | None,
    progress: Callable[[int], object],
) -> np.ndarray:
    """AUROC (1 or 2, n) of the rows of `counts` with a positive, and of scores without `less`.

    left (n_rows, r), right (V, r), counts (n_rows, V), less (V,); see `auroc_by_token` and
    `auroc_with_specific`.
    """
    each = np.diff(counts.indptr)  # (n_rows,)
    scored = np.flatnonzero(each)  # (n,)
    if not len(scored):
        return np.empty((1 if less is None else 2, 0))
    width, rank = right.shape
    columns = device.put(right).T  # (r, V)
    shared = None if less is None else device.put(less)
    a_row = BYTES_A_SCORE * width + BYTES_A_POSITIVE * int(each.max()) + 8 * rank
    height = rows_that_fit(device.free_bytes(), 0, a_row, -(-MOST_SCORES // width))
    parts = [scored[start : start + height] for start in range(0, len(scored), height)]

    def blocks() -> Iterator[tuple[np.ndarray, ...]]:
        for rows in parts:
            row = np.repeat(np.arange(len(rows)), each[rows])  # (m,)
            positives, weights = _stored(counts, rows)
            through = 2 * np.cumsum(_row_sums(weights, each[rows]))  # (n,)
            yield left[rows], through, row, positives + width * row, weights

    aurocs = []
    for rows, (block, *positives) in zip(parts, device.put_ahead(blocks()), strict=True):
        pairs = 2 * _row_sums(_stored(counts, rows)[1], each[rows]) * (width - each[rows])
        scores, of_block = block @ columns, []
        for subtracted in (None,) if shared is None else (None, shared):
            if subtracted is not None:
                scores = scores - subtracted
            wins, tied = (device.get(array) for array in _wins(device, scores, *positives))
            with np.errstate(invalid="ignore"):  # 0 / 0 where all are positives
                of_block.append((wins - _row_sums(tied, each[rows])) / pairs)
        aurocs.append(of_block)
        progress(len(rows))
    return np.concatenate(aurocs, axis=1)


def _wins(
    device: Device, scores: Any, through: Any, row: Any, place: Any, weight: Any
) -> tuple[Any, Any]:
    """Twice the wins of each row's elements, (n,), and of its positives, (m,); both int64.

    scores (n, V), through (n,), row, place, weight (m,).
    """
    xp = device.xp
    n, width = scores.shape
    bits = device.bits(scores)  # (n, V)
    rank = xp.where(bits < 0, -(2**31) - bits, bits)  # in the order of the floats, 0 for both zeros
    key = xp.reshape(rank + BETWEEN_ROWS * xp.arange(n, dtype=xp.int64)[:, None], (-1,))  # (n V,)
    step = xp.take(key, place)  # (m,)
    # Each weight enters at its own key and again at the next one: an element of the same key has
    # seen it once, a tie.
    edge, weight = xp.concat((step, step + 1)), xp.concat((weight, weight))  # (2m,)
    order = xp.argsort(edge)
    rising = xp.take(weight, order)  # (2m,)
    seen = xp.cumulative_sum(rising, include_initial=True)  # (2m + 1,), earlier rows' included
    reached = xp.searchsorted(xp.take(edge, order), key, side="right")  # (n V,)
    beaten = through[:, None] - xp.reshape(xp.take(seen, reached), (n, width))  # (n, V)
    return xp.sum(beaten, axis=1), xp.take(xp.reshape(beaten, (-1,)), place)


def _stored(counts: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Columns and weights of the positives of rising rows; any rows between them are empty."""
    span = slice(counts.indptr[rows[0]], counts.indptr[rows[-1] + 1])
    return counts.indices[span], counts.data[span]


def _row_sums(values: np.ndarray, each: np.ndarray) -> np.ndarray:
    """Sums of consecutive runs of `values`, each[i] of them for row i, one at least."""
    return np.add.reduceat(values, np.cumsum(each) - each)


COUNTED_ROWS = 128  # most rows of a tile for numba
STRIP = 256  # columns of that tile that lie together for each row
SORTED_ROWS = 64  # most rows of a tile for NumPy: they lie whole, and more are slow to write
BUCKETS = 2**15  # buckets of a row's scores
LARGEST_TOTAL = 2.0**62  # a token's counts, times the vocabulary: twice as many wins fit int64
LARGEST_SCORE = 2.0**125  # beyond it sums and differences of scores leave float32


def weighted_auroc(scores: np.ndarray, positives: np.ndarray, weights: np.ndarray) -> float:
    """AUROC of one row of scores (n,), where positives (k,) count by their weights (k,).

    AUROC = sum_p c_p (#negatives below s_p + 1/2 #negatives equal to s_p) / (sum_p c_p *
    #negatives), the area under the curve of Fig. 2 of the detokenization paper; its code gets the
    same by repeating each positive c_p times.
    """
    scores, positives, weights = _row(scores, positives, weights)
    negatives = len(scores) - len(positives)
    if not len(positives) or not negatives:
        return np.nan
    ranked, score = np.sort(scores), scores[positives]
    among = np.sort(score)
    below = ranked.searchsorted(score) - among.searchsorted(score)  # (k,) negatives
    up_to = ranked.searchsorted(score, "right") - among.searchsorted(score, "right")  # or equal
    return float(weights @ (below + up_to)) / float(2 * weights.sum() * negatives)


def roc_curve(
    scores: np.ndarray, positives: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Count-weighted ROC curve of one row of scores (detokenization paper, Fig. 2).

    As a threshold falls past each distinct score: the part of the negatives and the part of the
    bigram counts at or above it. The area under the curve is `weighted_auroc`.
    """
    from sklearn.metrics import roc_curve as curve

    scores, positives, weights = _row(scores, positives, weights)
    if len(positives) in (0, len(scores)):
        problem = "a ROC curve needs a positive and a negative; this row has only one of them"
        raise CheckpointError(problem)
    positive, each = np.zeros(len(scores), bool), np.ones(len(scores))
    positive[positives], each[positives] = True, weights
    fpr, tpr, _ = curve(positive, scores, sample_weight=each)
    return fpr, tpr


def _row(
    scores: np.ndarray, positives: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arguments of `weighted_auroc`, checked, without the indices of weight 0."""
    scores, positives, weights = np.asarray(scores), np.asarray(positives), _whole(weights)
    if np.isnan(scores).any():
        raise CheckpointError(f"{np.isnan(scores).sum()} of {len(scores)} scores are NaN")
    positives, weights = positives[weights > 0].astype(np.intp), weights[weights > 0]
    if len(np.unique(positives)) < len(positives):
        raise ValueError("a positive is given twice; add its weights up")
    if len(positives) and not 0 <= positives.min() <= positives.max() < len(scores):
        actual = f"{positives.min()} to {positives.max()}"
        raise ValueError(f"positives index {len(scores)} scores; found {actual}")
    _check_total(weights.sum(dtype=np.float64), len(scores))
    return scores, positives, weights


class MeanAuroc(NamedTuple):
    """One head's row of Table 2."""

    auroc: float  # mean over the tokens that have an AUROC; NaN if none has
    auroc_paper: float  # mean over all tokens, 0 for the others, as the paper's code reports it
    tokens_scored: int  # tokens that have an AUROC


def mean_auroc(auroc: np.ndarray) -> MeanAuroc:
    """A head's mean AUROC, over the tokens scored and as the paper's code reports it (Table 2).

    auroc (V,).
    """
    scored = auroc[~np.isnan(auroc)]
    mean = float(scored.mean()) if len(scored) else np.nan
    of_paper = float(scored.sum() / len(auroc)) if len(auroc) else np.nan
    return MeanAuroc(mean, of_paper, len(scored))


def mean_by_frequency(auroc: np.ndarray, occurrences: np.ndarray) -> float:
    """A head's mean AUROC over places in text: each token counts as often as it occurs.

    auroc (V,), occurrences (V,). NaN where nothing was scored.
    """
    scored = ~np.isnan(auroc)
    total = occurrences[scored].sum(dtype=np.float64)
    return float(auroc[scored] @ occurrences[scored] / total) if total else np.nan


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

    left (V, r), right (V, r), counts (V, V) -> (V,).

    Row i is `weighted_auroc` of the scores left_i . right_j, j over the vocabulary, in float32
    (detokenization paper, section 3.2). Scores are made and counted a tile of rows at a time, a
    thread a core, each with its own tile and single-threaded products. Memory on top of the
    arguments: one tile per thread, 26 MB for GPT-2's vocabulary with numba and 13 MB without, and
    one copy of `right`. A process that reads 3 million counts and does a head of GPT-2's shape on
    two cores peaks at 301 MB with numba and 169 MB without.
    """
    return _aurocs(left, right, counts, None, progress, threads, compiled, device)[0]


def auroc_with_specific(
    left: np.ndarray,
    right: np.ndarray,
    mean: np.ndarray,
    counts: Any,
    *,
    progress: Callable[[int], object] = lambda done: None,
    threads: int | None = None,
    compiled: bool | None = None,
    device: Device = CPU,
) -> np.ndarray:
    """`auroc_by_token`, and the same for the part of the scores that depends on both tokens.

    left (n, r), right (V, r), mean (r,), counts (n, V) -> (2, n).

    With `mean` the mean of the current tokens' rows, left_i . right_j is a part of j alone, mean .
    right_j, and a part of both tokens, (left_i - mean) . right_j; the second row is the AUROC of
    the latter, and `auroc_of_one_order` gives the former's. Scores are made once and ranked twice.
    """
    return _aurocs(left, right, counts, mean, progress, threads, compiled, device)


def _aurocs(
    left: np.ndarray,
    right: np.ndarray,
    counts: Any,
    mean: np.ndarray | None,
    progress: Callable[[int], object],
    threads: int | None,
    compiled: bool | None,
    device: Device,
) -> np.ndarray:
    """AUROC of each row of scores, and with a mean (r,) also without its scores: (1 or 2, n)."""
    left, right = np.asarray(left, np.float32), np.asarray(right, np.float32)
    bound = _score_bound(left, right)  # (n,)
    less, bounds = None, [bound]
    if mean is not None:
        mean = np.asarray(mean, np.float32)
        bounds.append(bound + _score_bound(mean[None], right))
        less = right @ mean  # (V,)
    counts = _canonical(counts, (len(left), len(right)))
    aurocs = np.full((len(bounds), len(left)), np.nan)
    scored = np.flatnonzero(np.diff(counts.indptr))  # (k,) tokens with a positive
    progress(len(left) - len(scored))
    if device is not CPU:
        aurocs[:, scored] = auroc_on_device(device, left, right, counts, less, progress)
        return aurocs
    compiled = numba_may_run() if compiled is None else compiled
    tile_auroc = _tile_auroc_compiled if compiled else _tile_auroc
    threads = threads or usable_cores()
    width = len(right)
    strip, most = (STRIP, COUNTED_ROWS) if compiled else (max(width, 1), SORTED_ROWS)
    height = tile_rows(width, threads, most)
    panels = cut_into_panels(right, height, strip)  # (S, P, r, w)
    strips, cuts, _, columns = panels.shape
    shared = None
    if less is not None:
        shared = np.pad(less, (0, strips * cuts * columns - width)).reshape(strips, 1, -1)
    tiles: SimpleQueue[np.ndarray] = SimpleQueue()
    for _ in range(threads):
        tiles.put(empty_tile(panels, height))

    def score(rows: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        buffer = tiles.get()
        try:
            tile = fill_tile(buffer, left[rows], panels)  # (S, rows, P w)
            # the rows skipped in between are empty
            begin, end = counts.indptr[rows[0]], counts.indptr[rows[-1] + 1]
            indptr = np.append(counts.indptr[rows], end).astype(np.int64) - begin  # (rows + 1,)
            positives, weights = counts.indices[begin:end], counts.data[begin:end]
            values = [tile_auroc(tile, width, indptr, positives, weights, bound[rows])]
            if shared is not None:
                tile -= shared
                values.append(tile_auroc(tile, width, indptr, positives, weights, bounds[1][rows]))
            return rows, values
        finally:
            tiles.put(buffer)

    parts = [scored[start : start + height] for start in range(0, len(scored), height)]
    for rows, values in in_threads(score, parts, threads):
        aurocs[:, rows] = values
        progress(len(rows))
    return aurocs


PAIRS_A_BLOCK = 1 << 21  # positives that the next two functions hold at a time: some 200 MB


def auroc_of_one_order(scores: np.ndarray, counts: Any) -> np.ndarray:
    """AUROC where all rows score the columns alike: scores (V,), counts (n, V) -> (n,).

    The scores are sorted once; the positives of all rows are brought into their order in linear
    time, by way of the columns. NaN for a row without a positive or without a negative.
    """
    if counts.shape[1] != len(scores):
        raise ValueError(f"{len(scores)} scores of {counts.shape[1]} columns")
    order = np.argsort(scores, kind="stable")
    place = np.empty(len(order), counts.indices.dtype)
    place[order] = np.arange(len(order))
    ranked = scores[order]
    below_and_up_to = ranked.searchsorted(ranked) + ranked.searchsorted(ranked, "right")  # (V,)
    auroc = np.full(counts.shape[0], np.nan)
    for rows in _row_blocks(np.asarray(counts.indptr, np.int64)):
        block = counts[rows]
        csr = block.data, place[block.indices], block.indptr
        block = type(counts)(csr, shape=block.shape).tocsc().tocsr()  # scores rise in each row
        indptr, weights = block.indptr.astype(np.int64), block.data
        row = np.repeat(np.arange(block.shape[0]), np.diff(indptr))  # (m,)
        among = _wins_among(row, ranked[block.indices], indptr)
        wins = weights * (below_and_up_to[block.indices] - among)
        auroc[rows] = _from_wins(wins, weights, row, indptr, len(scores))
    return auroc


def _wins_among(row: np.ndarray, score: np.ndarray, indptr: np.ndarray) -> np.ndarray:
    """Twice the wins (m,) of positives over those in their row; score (m,) rises in each row."""
    if not len(row):
        return np.empty(0, np.int64)
    new = np.append(True, (score[1:] != score[:-1]) | (row[1:] != row[:-1]))
    start = np.flatnonzero(new)  # runs of equal scores in a row
    below_and_up_to = start + np.append(start[1:], len(row))
    return np.asarray(below_and_up_to[np.cumsum(new) - 1] - 2 * indptr[row])


def auroc_of_own_scores(scores: np.ndarray, own: np.ndarray, counts: Any) -> np.ndarray:
    """AUROC where negatives have shared scores, and each row's positives their own.

    scores (V,), own (m,) as `counts.data`, counts (n, V) -> (n,); NaN as in `auroc_of_one_order`.
    """
    pointers, ranked, width = np.asarray(counts.indptr, np.int64), np.sort(scores), len(scores)
    auroc = np.full(counts.shape[0], np.nan)
    for rows in _row_blocks(pointers):
        pairs = slice(pointers[rows.start], pointers[rows.stop])
        indptr = pointers[rows.start : rows.stop + 1] - pointers[rows.start]
        row = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))  # (m,)
        below, up_to = ranked.searchsorted(own[pairs]), ranked.searchsorted(own[pairs], "right")
        of_row = row * (width + 1)
        in_row = np.sort(of_row + ranked.searchsorted(scores[counts.indices[pairs]]))  # its columns
        among = in_row.searchsorted(of_row + below) + in_row.searchsorted(of_row + up_to)
        among = among - 2 * indptr[row]
        weights = counts.data[pairs]
        auroc[rows] = _from_wins(weights * (below + up_to - among), weights, row, indptr, width)
    return auroc


def _row_blocks(indptr: np.ndarray) -> Iterator[slice]:
    """Runs of rows with about `PAIRS_A_BLOCK` positives, one row at least."""
    start, rows = 0, len(indptr) - 1
    while start < rows:
        stop = max(start + 1, int(indptr.searchsorted(indptr[start] + PAIRS_A_BLOCK, "right")) - 1)
        yield slice(start, stop)
        start = stop


def _from_wins(
    wins: np.ndarray, weights: np.ndarray, row: np.ndarray, indptr: np.ndarray, width: int
) -> np.ndarray:
    """AUROC of rows from twice each positive's wins, (m,); NaN without positives or negatives."""
    each = np.diff(indptr)
    pairs = 2 * np.bincount(row, weights, len(each)) * (width - each)
    with np.errstate(invalid="ignore"):
        return np.bincount(row, wins, len(each)) / pairs


def _tile_auroc(
    tile: np.ndarray,
    width: int,
    indptr: np.ndarray,
    positives: np.ndarray,
    weights: np.ndarray,
    bound: np.ndarray,
) -> np.ndarray:
    """AUROC of each row of a tile of one strip, (n,); arguments as in `auroc_numba.tile_auroc`.

    `weighted_auroc` for many rows: most is done for all of them at once, as the threads take turns
    at it. No row is sorted, which takes ten times as long as the products where NumPy's
    sort is not vectorised.
    """
    scores, each = tile[0, :, :width], np.diff(indptr)
    row = np.repeat(np.arange(len(scores)), each)  # (m,)
    score = scores[row, positives]
    rising = _rising_within_rows(row, score)
    score, weights = score[rising], weights[rising]

    among = _wins_among(row, score, indptr)
    next_higher = np.nextafter(score, np.float32(np.inf))  # scores below it are up to this one
    edges = np.stack((score, next_higher), axis=1)  # (m, 2)
    ranks, far = [], []
    for scored, begin, end in zip(scores, indptr[:-1].tolist(), indptr[1:].tolist(), strict=True):
        ranked, won = _near_and_far(scored, score[begin:end], weights[begin:end])
        ranks.append(ranked.searchsorted(edges[begin:end]).sum(axis=1))
        far.append(won)
    wins = np.add.reduceat(weights * (np.concatenate(ranks) - among), indptr[:-1]) + np.array(far)
    pairs = 2 * np.add.reduceat(weights, indptr[:-1]) * (width - each)
    with np.errstate(invalid="ignore"):  # 0 / 0 where all are positives
        return wins / pairs


def _near_and_far(
    scores: np.ndarray, score: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, int]:
    """Scores that share a bucket with a positive, rising, and twice the wins over all others.

    Buckets are in the order of the scores, so that the others need no comparison. scores (V,),
    score, weights (k,) of the positives, rising.
    """
    lowest = scores.min()
    width = max(float(scores.max() - lowest) / (BUCKETS - 1), 1e-30)
    bucket = ((scores - lowest) / np.float32(width)).astype(np.uint16)  # (V,)
    of_positives = ((score - lowest) / np.float32(width)).astype(np.uint16)  # (k,)
    above = 2 * (weights.sum() - np.append(0, weights.cumsum()))  # (k + 1,)
    won = np.repeat(above, np.diff(of_positives, prepend=0, append=BUCKETS))  # (BUCKETS,)
    won[of_positives] = -1
    taken = won.take(bucket, mode="clip")  # (V,)
    near = np.flatnonzero(taken < 0)
    return np.sort(scores[near]), int(taken.sum()) + len(near)


def _rising_within_rows(row: np.ndarray, score: np.ndarray) -> np.ndarray:
    """The order by row, then score: one sort of integers, which is faster than a lexsort."""
    bits = score.view(np.int32)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    return np.argsort((row << 32) + rank)


def _tile_auroc_compiled(
    tile: np.ndarray,
    width: int,
    indptr: np.ndarray,
    positives: np.ndarray,
    weights: np.ndarray,
    bound: np.ndarray,
) -> np.ndarray:
    """AUROC of each row of a tile by `auroc_numba`; the tile is left as it is."""
    from weightscope.model.metrics import auroc_numba

    heaviest = np.add.reduceat(weights, indptr[:-1]).max()
    kind = np.int32 if heaviest < 2**31 // tile.shape[2] else np.int64
    table, auroc = np.empty(auroc_numba.MOST_BUCKETS, kind), np.empty(len(bound))
    auroc_numba.tile_auroc(tile, width, indptr, positives, weights, bound, table, auroc)
    return auroc


def _score_bound(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """(V,) bounds on row i's scores and their partial sums: sum_k |left_ik| max_j |right_jk|."""
    for name, factor in (("left", left), ("right", right)):
        if not np.isfinite(factor).all():
            bad = np.flatnonzero(~np.isfinite(factor).all(axis=1))
            raise CheckpointError(
                f"the {name} factor of the scores has NaN or infinite values in "
                f"{len(bad)} of {len(factor)} rows, the first of them row {bad[0]}"
            )
    with np.errstate(over="ignore"):
        bound = np.abs(left) @ np.abs(right).max(axis=0, initial=0)
        bound = bound * np.float32(1.0001)  # for rounding
    if bound.max(initial=0) > LARGEST_SCORE:
        problem = f"scores may be as large as {bound.max():.1e}"
        raise TooLargeError(f"{problem}, more than float32 carries through")
    return bound.astype(np.float64)


def _canonical(counts: Any, shape: tuple[int, int]) -> Any:
    """`counts` as canonical CSR in int64 without zeros; copied only if need be."""
    if counts.shape != shape:
        problem = f"counts have shape {counts.shape}"
        raise CheckpointError(f"{problem}; the vocabulary of this checkpoint needs {shape}")
    counts = counts.tocsr()
    data = _whole(counts.data)
    counts = type(counts)((data, counts.indices, counts.indptr), shape=shape)
    if not counts.has_canonical_format:
        counts = counts.copy()
        counts.sum_duplicates()
    if not counts.data.all():
        counts = counts.copy()
        counts.eliminate_zeros()
    may_be_too_large = counts.data.max(initial=0) * float(shape[1]) ** 2 >= LARGEST_TOTAL
    if may_be_too_large:
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
    """Refuse counts whose wins, twice over, would leave int64."""
    if total * width >= LARGEST_TOTAL:
        problem = f"the counts of one token add up to {total:.1e}"
        raise CheckpointError(f"{problem}, more than can be summed exactly")

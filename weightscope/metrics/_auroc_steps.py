"""Which negatives the positives of a tile of scores beat, counted exactly without sorting the tile.

With s_p the score of positive p and c_p its weight, the wins of a row of scores are

    wins = sum_p c_p (number of negatives below s_p + half the number of negatives equal to s_p).

Turned around they are a sum over all the row's elements of a falling staircase with a step at each positive,

    W(s) = sum of c_p over s_p > s, plus half of those with s_p = s,

less what the positives win over one another. W is sampled in a table of equal buckets spanning the positives, and each
element looks its bucket up. Where a bucket holds no step, W is constant and the lookup is exact; where it holds some,
the table says which is first, and the few elements that fall there walk the steps. Everything is counted in integers
and twice over, so that the half of a tie is exact as well.

A row with too many positives, or with outliers that leave most elements in a few buckets, is sorted instead.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

FEWEST_BUCKETS, MOST_BUCKETS = 2**10, 2**14  # a table of 8 to 128 kB stays in cache
BUCKETS_PER_POSITIVE = 128  # then about one element in a hundred meets a step
MOST_POSITIVES = MOST_BUCKETS // 8
SORT_FROM = 1 / 8  # of a row's elements meeting steps: from there on sorting the row is as fast
FINEST = 2.0**20  # buckets between 0 and the bound on a row's scores, where float32 still tells neighbours apart


class Steps(NamedTuple):
    """The staircases of n rows, each row's steps rising and closed by an end mark.

    Attributes
    ----------
    first : (n + 1,) int64 array
        Row i owns entries first[i] .. first[i + 1] - 1 of `score` and `above`, the last of them its end mark.
    score : (first[n],) float32 array
        s_p; +inf at an end mark, where every walk stops.
    above : (first[n],) int64 array
        Weight of this step and all higher ones of its row; 0 at an end mark.
    among : (n,) int64 array
        Twice what a row's positives win over one another and themselves.
    low, scale : (n,) float32 arrays
        An element's bucket is (s - low) * scale, truncated and cut to [0, buckets - 1]. Each of these operations is
        monotone in s, rounding included, and that is all exactness asks of them.
    buckets : (n,) int64 array
        Size of a row's table; 0 for a row to be sorted.
    """

    first: np.ndarray
    score: np.ndarray
    above: np.ndarray
    among: np.ndarray
    low: np.ndarray
    scale: np.ndarray
    buckets: np.ndarray


def build_steps(
    tile: np.ndarray, indptr: np.ndarray, positives: np.ndarray, weights: np.ndarray, bound: np.ndarray
) -> Steps:
    """The staircases of a tile of scores.

    Parameters
    ----------
    tile : (n, V) float32 array
        Scores, finite.
    indptr : (n + 1,) int64 array
        Row i's positives are positives[indptr[i] : indptr[i + 1]]: one at least.
    positives : (m,) int array
        Columns of the tile.
    weights : (m,) int64 array
    bound : (n,) float64 array
        No score of row i is larger in magnitude than bound[i].
    """
    n = len(tile)
    each = np.diff(indptr)  # (n,) positives in each row
    row = np.repeat(np.arange(n), each)  # (m,)
    found = tile[row, positives]  # (m,)
    order = _rising_within_rows(row, found)

    first = indptr + np.arange(n + 1)  # an end mark more for every row before
    end = first[1:] - 1  # (n,)
    place = np.arange(len(row)) + row  # (m,) where the steps go, between the end marks
    score = np.full(first[-1], np.inf, np.float32)
    score[place] = found[order]
    weight = np.zeros(first[-1], np.int64)
    weight[place] = weights[order]
    so_far = np.cumsum(weight)
    above = np.repeat(so_far[end], each + 1) - so_far + weight

    starts = np.flatnonzero(np.append(True, score[1:] != score[:-1]))  # of each run of equal steps
    run = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(score)))[place]  # (m,)
    among = np.add.reduceat(above[starts[run]] + above[starts[run + 1]], indptr[:-1])

    low, high = score[first[:-1]].astype(np.float64), score[end - 1].astype(np.float64)
    buckets = np.clip(BUCKETS_PER_POSITIVE * each, FEWEST_BUCKETS, MOST_BUCKETS)
    with np.errstate(divide="ignore"):
        scale = np.minimum((buckets - 3) / (high - low), FINEST / np.maximum(bound, 2.0**-100))
    low -= 1.5 / scale  # puts the steps into buckets 1 to buckets - 2, so that what lies beyond them meets none
    buckets[each > MOST_POSITIVES] = 0
    return Steps(first, score, above, among, low.astype(np.float32), scale.astype(np.float32), buckets)


def _rising_within_rows(row: np.ndarray, score: np.ndarray) -> np.ndarray:
    """The order that sorts by row, then by score: one sort of 64-bit integers, several times as fast as a lexsort."""
    bits = score.view(np.int32)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as an integer it orders as the float does
    return np.argsort((row << 32) + rank)


def doubled_wins(tile: np.ndarray, steps: Steps, *, compiled: bool) -> np.ndarray:
    """Twice the wins of each row of a tile.

    Parameters
    ----------
    tile : (n, V) float32 array
    steps : Steps
    compiled : bool
        Count with numba. The numbers are the same.

    Returns
    -------
    (n,) int64 array
    """
    most = int(SORT_FROM * tile.shape[1])
    if compiled:
        from weightscope.metrics._auroc_numba import sum_staircases

        over_all = np.empty(len(tile), np.int64)
        sum_staircases(tile, *steps[:3], *steps[4:], most, over_all)
    else:
        over_all = _sum_staircases(tile, steps, most)
    wins = over_all - steps.among
    for i in np.flatnonzero(over_all < 0):
        here = slice(steps.first[i], steps.first[i + 1])
        wins[i] = doubled_wins_by_sorting(tile[i], steps.score[here][:-1], -np.diff(steps.above[here]))
    return wins


def doubled_wins_by_sorting(scores: np.ndarray, steps: np.ndarray, weights: np.ndarray) -> int:
    """Twice the wins of one row, by the ranks of its positives among all elements less those among themselves.

    Parameters
    ----------
    scores : (V,) array
    steps : (k,) array
        Scores of the positives, rising.
    weights : (k,) int64 array
    """
    ranked = np.sort(scores)
    below = ranked.searchsorted(steps) - steps.searchsorted(steps)
    up_to = ranked.searchsorted(steps, "right") - steps.searchsorted(steps, "right")
    return int(weights @ (below + up_to))


def _sum_staircases(tile: np.ndarray, steps: Steps, most: int) -> np.ndarray:
    """Twice the sum of W over all elements of each row, (n,); -1 for a row to be sorted."""
    n, width = tile.shape
    scaled, bucket = np.empty(width, np.float32), np.empty(width, np.intp)
    value, meets_step = np.empty(width, np.int64), np.empty(width, bool)
    total = np.full(n, -1)
    rows, scores, starts = [], [], []  # of the elements that walk
    for i, table in _tables(steps):
        np.subtract(tile[i], steps.low[i], out=scaled)
        np.multiply(scaled, steps.scale[i], out=scaled)
        np.clip(scaled, 0, len(table) - 1, out=scaled)
        bucket[:] = scaled  # truncates
        table.take(bucket, out=value, mode="clip")  # with an `out`, the only mode that does not copy
        np.signbit(value.view(np.float64), out=meets_step)  # value < 0, in half the time
        walking = meets_step.nonzero()[0]
        if len(walking) <= most:
            total[i] = 2 * value.sum()
            rows.append(np.full(len(walking), i))
            scores.append(tile[i, walking])
            starts.append(value[walking])
    if rows:
        start = np.concatenate(starts)
        np.add.at(total, np.concatenate(rows), _walk(np.concatenate(scores), -1 - start, steps) - 2 * start)
    return total


def _tables(steps: Steps) -> Iterator[tuple[int, np.ndarray]]:
    """W of each bucket, (buckets,) int64, row after row; where a bucket holds steps, -1 - the index of the first.

    Rows to be sorted are left out.
    """
    first, end = steps.first[:-1], steps.first[1:] - 1
    each = np.diff(steps.first)
    with np.errstate(invalid="ignore"):  # the end marks, set right after
        bucket = ((steps.score - np.repeat(steps.low, each)) * np.repeat(steps.scale, each)).astype(np.int64)
    bucket[end] = steps.buckets - 1
    reach = np.diff(bucket, prepend=0)  # buckets above the step before, up to this one
    reach[first] = bucket[first] + 1
    mark = -1 - np.arange(len(bucket))
    for i in np.flatnonzero(steps.buckets).tolist():
        here, its_steps = slice(first[i], end[i] + 1), slice(first[i], end[i])
        table = np.repeat(steps.above[here], reach[here])
        table[bucket[its_steps][::-1]] = mark[its_steps][::-1]  # backwards: of several in a bucket the first stays
        yield i, table


def _walk(score: np.ndarray, at: np.ndarray, steps: Steps) -> np.ndarray:
    """2 W(score), each element walking up from step `at`, before which no step is as high."""
    behind = np.arange(len(at))
    while len(behind := behind[steps.score[at[behind]] < score[behind]]):
        at[behind] += 1
    past, tied = at.copy(), np.arange(len(at))
    while len(tied := tied[steps.score[past[tied]] == score[tied]]):
        past[tied] += 1
    return steps.above[at] + steps.above[past]

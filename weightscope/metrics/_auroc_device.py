"""AUROC of blocks of score rows on a device, by the array API standard alone.

As in `_auroc_numba` the wins of a row are summed over its elements instead of its positives: an element of score s
wins, twice over, 2 sum of c_p over s_p > s plus the c_p of those with s_p = s; what the positives win over one another
is taken off afterwards. One binary search places every element of a block among the positives of its row: row and
score become one integer, the score in its lower half as an integer of the same order, so that the positives of all
rows are one sorted list. Neighbouring elements search the same few entries, which a card does in its caches; sorting
whole rows it does not.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from weightscope.device import Device, rows_that_fit

MOST_SCORES = 2**26  # of a block: enough to keep a card busy
BYTES_A_SCORE = 48  # a score, its key, where that falls, what it wins, and one more of the last while it is computed
BYTES_A_POSITIVE = 192  # its row, place and weight, its two edges, and sorting them
BETWEEN_ROWS = 2**32  # in keys


def auroc_on_device(
    device: Device, left: np.ndarray, right: np.ndarray, counts: Any, progress: Callable[[int], object]
) -> np.ndarray:
    """AUROC of each row of `counts` that has a positive, float64; see `auroc_by_token`.

    Parameters
    ----------
    device : Device
    left, right : (n_rows, r) and (V, r) float32 arrays
        Finite, and no product of their rows leaves float32.
    counts : CSR array of shape (n_rows, V)
        int64, canonical, without stored zeros; the sum of a row times 2 V stays in int64.
    progress : function
        Told how many more rows are done.
    """
    each = np.diff(counts.indptr)  # (n_rows,)
    scored = np.flatnonzero(each)  # (n,)
    if not len(scored):
        return np.empty(0)
    width, rank = right.shape
    columns = device.put(right).T  # (r, V)
    a_row = BYTES_A_SCORE * width + BYTES_A_POSITIVE * int(each.max()) + 8 * rank
    height = rows_that_fit(device.free_bytes(), 0, a_row, -(-MOST_SCORES // width))
    parts = [scored[start : start + height] for start in range(0, len(scored), height)]

    def blocks() -> Iterator[tuple[np.ndarray, ...]]:
        for rows in parts:
            row = np.repeat(np.arange(len(rows)), each[rows])  # (m,)
            positives, weights = _stored(counts, rows)
            through = 2 * np.cumsum(_row_sums(weights, each[rows]))  # (n,)
            yield left[rows], through, row, positives + width * row, weights

    auroc = []
    for rows, (block, *positives) in zip(parts, device.put_ahead(blocks()), strict=True):
        wins, own = (device.get(array) for array in _wins(device, block @ columns, *positives))
        pairs = 2 * _row_sums(_stored(counts, rows)[1], each[rows]) * (width - each[rows])
        with np.errstate(invalid="ignore"):  # 0 / 0 where all are positives
            auroc.append((wins - _row_sums(own, each[rows])) / pairs)
        progress(len(rows))
    return np.concatenate(auroc)


def _wins(device: Device, scores: Any, through: Any, row: Any, place: Any, weight: Any) -> tuple[Any, Any]:
    """What all elements of each row win, twice over, (n,), and what each positive has of that, (m,); both int64.

    Parameters
    ----------
    device : Device
    scores : (n, V) float32 array
        n is V at most, so that the weights of all rows together stay in int64.
    through : (n,) int64 array
        Twice the weights of this row and all before it.
    row, place, weight : (m,) int64 arrays
        Of each positive, rows rising: its row, its index among all scores, c_p.
    """
    xp = device.xp
    n, width = scores.shape
    bits = device.bits(scores)  # (n, V)
    rank = xp.where(bits < 0, -(2**31) - bits, bits)  # in the order of the floats, 0 for both zeros
    key = xp.reshape(rank + BETWEEN_ROWS * xp.arange(n, dtype=xp.int64)[:, None], (-1,))  # (n V,)
    step = xp.take(key, place)  # (m,)
    # Each weight enters at its own key and again at the next one: an element of the same key has seen it once, a tie.
    edge, weight = xp.concat((step, step + 1)), xp.concat((weight, weight))  # (2m,)
    order = xp.argsort(edge)
    seen = xp.cumulative_sum(xp.take(weight, order), include_initial=True)  # (2m + 1,), earlier rows' included
    reached = xp.searchsorted(xp.take(edge, order), key, side="right")  # (n V,)
    beaten = through[:, None] - xp.reshape(xp.take(seen, reached), (n, width))  # (n, V)
    return xp.sum(beaten, axis=1), xp.take(xp.reshape(beaten, (-1,)), place)


def _stored(counts: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Columns and weights of the positives of some rows, rising; rows left out in between are empty."""
    span = slice(counts.indptr[rows[0]], counts.indptr[rows[-1] + 1])
    return counts.indices[span], counts.data[span]


def _row_sums(values: np.ndarray, each: np.ndarray) -> np.ndarray:
    """Sums of consecutive runs of `values`, each[i] of them for row i, one at least."""
    return np.add.reduceat(values, np.cumsum(each) - each)

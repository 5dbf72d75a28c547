"""The loop of `_auroc_steps` compiled, for those who have numba."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.core.cgutils import true_bit
from numba.extending import intrinsic

BLOCK = 64  # elements a block: one bit each in the mask of those that meet a step
BLOCKS_A_RUN = 64  # blocks whose masks are kept before their elements walk


@intrinsic  # type: ignore[untyped-decorator]
def _trailing_zeros(typing_context: Any, bits: Any) -> tuple[Any, Callable[..., Any]]:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], true_bit)

    return types.int64(types.int64), emit


def _cached(function: Any) -> Any:
    """Compiled code is kept beside this file, or in the user's cache; where neither can be written, not at all."""
    try:
        return njit(function, nogil=True, cache=True)
    except RuntimeError:
        return njit(function, nogil=True)


@_cached
def _bucket(s: Any, low: Any, scale: Any, top: Any) -> Any:
    x = (s - low) * scale
    x = x if x > np.float32(0) else np.float32(0)
    x = x if x < top else top
    return np.uint64(np.int32(x))  # unsigned, or indexing would look for negative numbers


@_cached
def _fill(table: Any, begin: Any, end: Any, score: Any, above: Any, low: Any, scale: Any, top: Any) -> None:
    filled = np.uint64(0)
    for t in range(begin, end):
        bucket = _bucket(score[t], low, scale, top)
        if bucket >= filled:
            weight = above[t]
            for b in range(filled, bucket):
                table[b] = weight
            table[bucket] = -1 - t
            filled = bucket + np.uint64(1)
    for b in range(filled, np.uint64(top) + np.uint64(1)):
        table[b] = 0


@_cached
def _walk(s: Any, value: Any, score: Any, above: Any) -> Any:
    at = np.uint64(-1 - value)
    at += np.uint64(score[at] < s)  # no branch for the first step: mostly it is the only one
    while score[at] < s:
        at += np.uint64(1)
    past = at + np.uint64(score[at] == s)
    while score[past] == s:
        past += np.uint64(1)
    return above[at] + above[past]


@_cached
def sum_staircases(
    tile: Any, first: Any, score: Any, above: Any, low: Any, scale: Any, buckets: Any, most: Any, total: Any
) -> None:
    """Write into `total` twice the sum of W over all elements of each row; -1 for a row to be sorted.

    The arguments are the fields of `Steps`, but for `among`, and `most`, how many elements of a row may walk.
    """
    table = np.empty(max(buckets.max(), 1), np.int64)
    masks = np.empty(BLOCKS_A_RUN, np.int64)
    width = tile.shape[1]
    blocks = width // BLOCK
    for i in range(tile.shape[0]):
        total[i] = -1
        if buckets[i] == 0:
            continue
        row, row_low, row_scale, top = tile[i], low[i], scale[i], np.float32(buckets[i] - 1)
        _fill(table, first[i], first[i + 1] - 1, score, above, row_low, row_scale, top)
        looked_up, walked, walkers = np.int64(0), np.int64(0), 0
        for run in range((blocks + BLOCKS_A_RUN - 1) // BLOCKS_A_RUN):
            here = min(BLOCKS_A_RUN, blocks - BLOCKS_A_RUN * run)
            for b in range(here):  # vector instructions only: this loop is where the time goes
                start = BLOCK * (BLOCKS_A_RUN * run + b)
                block = row[start : start + BLOCK]
                values, mask = np.int64(0), np.int64(0)
                for j in range(BLOCK):
                    value = table[_bucket(block[j], row_low, row_scale, top)]
                    values += value
                    mask |= (value >> np.int64(63)) & (np.int64(1) << np.int64(j))
                looked_up += values
                masks[b] = mask
            for b in range(here):
                mask = masks[b]
                while mask != 0:
                    s = row[BLOCK * (BLOCKS_A_RUN * run + b) + _trailing_zeros(mask)]
                    mask &= mask - 1
                    value = table[_bucket(s, row_low, row_scale, top)]
                    walked += _walk(s, value, score, above) - 2 * value
                    walkers += 1
            if walkers > most:
                break
        for j in range(BLOCK * blocks, width):
            value = table[_bucket(row[j], row_low, row_scale, top)]
            walked += _walk(row[j], value, score, above) if value < 0 else 2 * value
        if walkers <= most:
            total[i] = 2 * looked_up + walked

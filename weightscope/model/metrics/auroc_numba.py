"""AUROC of a tile of score rows without sorting it, compiled, for those who have numba.

With s_p the score of positive p and c_p its weight, the wins of a row of scores are

    wins = sum_p c_p (number of negatives below s_p + half the number of negatives equal to s_p).

Turned around they are a sum over all the row's elements of a falling staircase with a step at each
positive,

    W(s) = sum of c_p over s_p > s, plus half of those with s_p = s,

less what the positives win over one another. W is sampled in a table of equal buckets spanning the
positives, and each element looks its bucket up. Where a bucket holds no step, W is constant and the
lookup exact; where it holds some, the table says which is first, and the few elements that fall
there search the steps from it on. An element's bucket is (s - low) * scale, truncated: each of
these operations is monotone in s, rounding included, and exactness needs no more. Everything is
counted in integers and twice over, so that the half of a tie is exact as well.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import true_bit
from numba.extending import intrinsic

from weightscope.core.compute.compiled import compiled, in_wide_vectors

FEWEST_BUCKETS, MOST_BUCKETS = 2**11, 2**14  # 8 to 64 kB, or twice that in int64: stays in cache
BUCKETS_PER_POSITIVE = 256  # then about one element in two hundred meets a step
FINEST = 2.0**20  # buckets from 0 to the bound on scores; float32 still tells neighbours apart
BLOCK = 32  # elements a block: one bit each in the mask of those that meet a step
AHEAD = 4  # strips that are fetched before the loop comes to them
CACHE_LINE = 16  # elements
GAPS = (40412, 17961, 7983, 3548, 1577, 701, 301, 132, 57, 23, 10, 4, 1)  # Ciura's, on by 2.25


@intrinsic  # type: ignore[untyped-decorator]
def _trailing_zeros(typing_context: Any, bits: Any) -> tuple[Any, Callable[..., Any]]:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], true_bit)

    return types.int64(types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(typing_context: Any, strip: Any, index: Any) -> tuple[Any, Callable[..., Any]]:
    """Fetch the cache line of strip[index] from memory; past the end of the strip is fine."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(start, [arguments[1]]), ir.IntType(8).as_pointer())
        integer = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, integer, integer, integer])
        to_read, into_all_caches, of_numbers = integer(0), integer(3), integer(1)
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
        builder.call(prefetch, [place, to_read, into_all_caches, of_numbers])
        return context.get_dummy_value()

    return types.void(strip, types.int64), emit


@compiled
def _sort_together(score: Any, weight: Any, n: Any) -> None:
    """Shell sort of the first n scores, rising, and of their weights with them."""
    for gap in GAPS:
        for i in range(gap, n):
            s, c = score[i], weight[i]
            j = i
            while j >= gap and score[j - gap] > s:
                score[j], weight[j] = score[j - gap], weight[j - gap]
                j -= gap
            score[j], weight[j] = s, c


@compiled
def _bucket(s: Any, low: Any, scale: Any, top: Any) -> Any:
    x = (s - low) * scale
    x = x if x > np.float32(0) else np.float32(0)
    x = x if x < top else top
    return np.uint64(np.int32(x))  # unsigned, or indexing would look for negative numbers


@compiled
def _fill(table: Any, n: Any, step: Any, above: Any, low: Any, scale: Any, top: Any) -> None:
    """W of each bucket up to `top`; where steps are, -1 - t, the first of them t."""
    kind = table.dtype.type
    filled = np.uint64(0)
    for t in range(n):
        bucket = _bucket(step[t], low, scale, top)
        if bucket >= filled:
            weight = kind(above[t])
            for b in range(filled, bucket):
                table[b] = weight
            table[bucket] = kind(-1 - t)
            filled = bucket + np.uint64(1)
    for b in range(filled, np.uint64(top) + np.uint64(1)):
        table[b] = kind(0)


@compiled
def _search(s: Any, value: Any, n: Any, step: Any, above: Any) -> Any:
    """2 W(s) of an element whose bucket holds steps: the first step not below s, by galloping."""
    t = np.uint64(-1 - value)
    # no branch for the first: mostly it is the only one; +inf follows the last
    t += np.uint64(step[t] < s)
    if step[t] < s:
        stride = np.uint64(1)
        while t + stride < n and step[t + stride] < s:
            t += stride
            stride += stride
        while stride > np.uint64(0):
            if t + stride < n and step[t + stride] < s:
                t += stride
            stride >>= np.uint64(1)
        t += np.uint64(1)
    return above[t] + above[t + np.uint64(step[t] == s)]


@compiled
def tile_auroc(
    tile: Any,
    width: Any,
    indptr: Any,
    positives: Any,
    weights: Any,
    bound: Any,
    table: Any,
    auroc: Any,
) -> None:
    """Write the AUROC of each row of a tile into `auroc`; NaN where all are positives.

    tile (S, n, C), indptr (n + 1,), positives (m,), weights (m,), bound (n,), auroc (n,).
    """
    in_wide_vectors()
    kind, columns = table.dtype.type, tile.shape[2]
    most: Any = np.int64(0)
    for i in range(tile.shape[1]):
        most = max(most, indptr[i + 1] - indptr[i])
    step = np.empty(most + 1, np.float32)  # the positives' distinct scores, rising, and +inf
    above = np.empty(most + 1, np.int64)  # weight of this step and of all higher ones
    blocks = columns // BLOCK
    masks = np.empty(blocks, np.uint32)
    ahead = AHEAD * tile.strides[0] // 4
    for i in range(tile.shape[1]):
        k = indptr[i + 1] - indptr[i]
        if k == width:
            auroc[i] = np.nan
            continue

        for t in range(k):
            column = np.uint64(positives[indptr[i] + t])
            step[t] = tile[column // np.uint64(columns), i, column % np.uint64(columns)]
            above[t] = weights[indptr[i] + t]
        _sort_together(step, above, k)
        # among: twice what the positives win over one another and themselves
        total, among = np.int64(0), np.int64(0)
        n, place = np.int64(0), np.int64(0)
        while place < k:  # runs of equal scores become one step
            s, weight, begin = step[place], np.int64(0), place
            while place < k and step[place] == s:
                weight += above[place]
                place += 1
            among += weight * (begin + place)
            total += weight
            step[n], above[n] = s, weight
            n += 1
        step[n], above[n] = np.inf, 0
        for t in range(n - 1, -1, -1):
            above[t] += above[t + 1]

        buckets: Any = min(max(BUCKETS_PER_POSITIVE * n, FEWEST_BUCKETS), MOST_BUCKETS)
        span = max(np.float64(step[n - 1]) - np.float64(step[0]), 1e-300)
        wide = min((buckets - 3) / span, FINEST / max(bound[i], 1e-30))
        # the steps go to buckets 1 to buckets - 2, so that what lies beyond them meets none
        low, scale = np.float32(step[0] - 1.5 / wide), np.float32(wide)
        top = np.float32(buckets - 1)
        _fill(table, n, step, above, low, scale, top)

        wins = -among
        for strip in range(width // columns):
            row = tile[strip, i]
            values = kind(0)
            for b in range(blocks):  # vector instructions only: this loop is where the time goes
                start = BLOCK * b
                for line in range(0, BLOCK, CACHE_LINE):
                    _prefetch(row, ahead + start + line)
                mask = np.int32(0)
                for j in range(BLOCK):
                    value = table[_bucket(row[start + j], low, scale, top)]
                    values = kind(values + value)
                    mask = np.int32(mask | (np.int32(1 << j) if value < 0 else np.int32(0)))
                masks[b] = mask
            wins += 2 * np.int64(values)
            for b in range(blocks):
                left = np.int64(masks[b])
                while left != 0:
                    s = row[BLOCK * b + _trailing_zeros(left)]
                    left &= left - 1
                    value = np.int64(table[_bucket(s, low, scale, top)])
                    wins += _search(s, value, np.uint64(n), step, above) - 2 * value
        for j in range(width % columns):
            s = tile[width // columns, i, j]
            value = np.int64(table[_bucket(s, low, scale, top)])
            wins += _search(s, value, np.uint64(n), step, above) if value < 0 else 2 * value
        auroc[i] = np.float64(wins) / np.float64(2 * total * (width - k))

"""Values on stored grids, compiled with numba: the work of `recomputed`, in one pass."""

from functools import partial
from typing import Any

import numpy as np

import weightscope.checkpoint.ggml_numba  # noqa: F401 - from now on, `dequantise` uses it for blocks of any size
from weightscope.core.compute.compiled import compiled

INFINITY = np.int32(0x7F800000)  # bits of a float32
WITHOUT_SIGN = np.int32(0x7FFFFFFF)


# sums are reordered; nothing else has a sum of more than two
@partial(compiled, fastmath={"reassoc"})
def count(
    x: Any,
    y: Any,
    least: Any,
    most: Any,
    room: Any,
    far: Any,
    bound: Any,
    slope: Any,
    shift: Any,
) -> tuple[int, int, float, float, float] | None:
    """Count changed and far values, and sum squares of x, y, x - y; None if one is outside.

    x, y (n, group); of each group (n, 1): least, most and room of its grid, how far off is far out,
    how far beyond its ends a value may be, and y before its scale was rounded: slope y + shift.
    """
    changed, outer, of_x, of_y, moved = 0, 0, 0.0, 0.0, 0.0
    for g in range(len(x)):
        low, high = least[g, 0], most[g, 0]
        inner, outside, farthest = room[g, 0], far[g, 0], bound[g, 0]
        a, b = slope[g, 0], shift[g, 0]
        wrong, n_changed, n_outer = 0, 0, 0
        for j in range(x.shape[1]):
            p, q = np.float64(x[g, j]), np.float64(y[g, j])
            inside = min(max(p, low), high)
            off, beyond = abs(inside - (a * q + b)), abs(p - inside)
            is_changed = (off > 0) | (beyond > 0)
            wrong |= (off > inner) | (beyond > farthest)
            n_changed += is_changed
            n_outer += is_changed & (off > outside)
            of_x += p * p
            of_y += q * q
            moved += (p - q) * (p - q)
        if wrong:
            return None
        changed += n_changed
        outer += n_outer
    return changed, outer, of_x, of_y, moved


@compiled
def even_grids(low: Any, high: Any, sharing: int, codes: int, two: bool, numbers: Any) -> Any:
    """Even grids from their first to last values, (n, 1), as `recomputed` makes them: (7, n, 1).

    `sharing` neighbours have scales, and minima if `two`, that are multiples of one; 0 for none.
    """
    step, used, scale, least_step, of_half = numbers
    out = np.empty((7, len(low), 1))
    reach = below = 0.0
    for g in range(len(low)):
        if sharing and g % sharing == 0:
            reach = below = 0.0
            for k in range(g, g + sharing):
                reach = np.maximum(reach, np.abs(high[k, 0] - low[k, 0]))
                below = np.maximum(below, np.abs(low[k, 0]))
        first, last = low[g, 0], high[g, 0]
        least, most = np.minimum(first, last), np.maximum(first, last)
        span = most - least
        fine = lost = scale * (span + np.maximum(np.abs(first), np.abs(last))) + least_step
        unsure, half = least_step, span * step / 2
        end = half
        if sharing:
            of_scale = (reach + below if two else reach) / (2 * codes)
            unsure, lost = unsure + of_scale, fine + of_scale
            end = end + reach / codes / 2 * (step / 2)
        if codes:
            more = np.minimum(codes * least_step, half * of_half)
            fine, lost = fine + more, lost + more
        room, needed = half * (1 + 1e-4) + fine, span * (1 - scale) * used - unsure
        for k, made in enumerate((least, most, half, end, room, lost, needed)):
            out[k, g, 0] = made
    return out


def ends(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest value of each group, (n,): x (n, group) float32."""
    low, high = np.empty((2, len(x)), np.int32)
    _ends(np.ascontiguousarray(x).view(np.int32), low, high)
    return low.view(np.float32), high.view(np.float32)


@compiled
def _ends(x: Any, low: Any, high: Any) -> None:
    """Compare floats as integers, in vectors: their bits, turned where the sign is set, sort alike.

    Compared as floats they would go one by one, because of NaN.
    """
    for g in range(len(x)):
        least, most = WITHOUT_SIGN, ~WITHOUT_SIGN
        for j in range(x.shape[1]):
            turned = x[g, j] ^ (x[g, j] >> np.int32(31) & WITHOUT_SIGN)
            least, most = min(least, turned), max(most, turned)
        low[g] = least ^ (least >> np.int32(31) & WITHOUT_SIGN)
        high[g] = most ^ (most >> np.int32(31) & WITHOUT_SIGN)
        if most > INFINITY or least < ~INFINITY:
            low[g] = high[g] = WITHOUT_SIGN  # NaN

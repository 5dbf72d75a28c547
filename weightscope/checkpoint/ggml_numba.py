"""ggml's blocks as float32 by numba: the same as `ggml_blocks`, in one pass over memory.

`ggml_blocks` reads the scales, a small part of a block, here too. Sixteen weights are one vector;
their arithmetic is neither contracted nor reordered, so that values are the same to the bit.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from weightscope.checkpoint.ggml_blocks import (
    Codebook,
    Layout,
    Plane,
    Ternary,
    Unpack,
    digits_of_bytes,
    signs_of_bytes,
)
from weightscope.core.compute.compiled import compiled, in_wide_vectors

LANES = 16


@intrinsic  # type: ignore[untyped-decorator]
def _sixteen(
    typing_context: Any,
    low: Any,
    low_code: Any,
    high: Any,
    high_code: Any,
    sign: Any,
    offset: Any,
    scale: Any,
    minimum: Any,
    out: Any,
    place: Any,
) -> tuple[Any, Callable[..., Any]]:
    """Write out[place + j] = scale * (code[j] - offset) - minimum of 16 neighbours j.

    low_code and high_code say which bits of low[start + j] and high[start + j] the code has, and
    where they go: (start, shift to the right, mask, shift to the left). `sign` is added to signed
    codes, without a carry.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bytes_ = ir.VectorType(ir.IntType(8), LANES)
        ints = ir.VectorType(ir.IntType(32), LANES)
        floats = ir.VectorType(ir.FloatType(), LANES)

        def everywhere(value: Any, vector: Any) -> Any:
            """A vector of equal numbers."""
            undefined = ir.Constant(vector, ir.Undefined)
            single = builder.insert_element(undefined, value, ir.IntType(32)(0))
            first = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
            return builder.shuffle_vector(single, undefined, first)

        def integer(value: Any) -> Any:
            return everywhere(builder.trunc(value, ir.IntType(32)), ints)

        def address(array: int, index: Any, vector: Any) -> Any:
            made = context.make_array(signature.args[array])(context, builder, arguments[array])
            return builder.bitcast(builder.gep(made.data, [index]), vector.as_pointer())

        def codes(array: int) -> Any:
            place = arguments[array + 1]
            start, right, mask, left = (builder.extract_value(place, k) for k in range(4))
            packed = builder.load(address(array, start, bytes_), align=1)
            moved = builder.lshr(builder.zext(packed, ints), integer(right))
            return builder.shl(builder.and_(moved, integer(mask)), integer(left))

        code = builder.or_(codes(0), codes(2))
        code = builder.sub(builder.xor(code, integer(arguments[4])), integer(arguments[5]))
        weights = builder.fmul(everywhere(arguments[6], floats), builder.sitofp(code, floats))
        weights = builder.fsub(weights, everywhere(arguments[7], floats))
        builder.store(weights, address(8, arguments[9], floats), align=1)
        return context.get_dummy_value()

    four = types.UniTuple(types.int64, 4)
    numbers = (types.int64, types.int64, types.float32, types.float32)
    return types.void(low, four, high, four, *numbers, out, types.int64), emit


@compiled
def _even(
    low: Any,
    high: Any,
    places: Any,
    strides: Any,
    sign: Any,
    offset: Any,
    scale: Any,
    minimum: Any,
    out: Any,
) -> None:
    """Weights of an even grid. places (P, 8): low_code and high_code of each 16 weights."""
    in_wide_vectors()
    pieces, groups = places.shape[0], scale.shape[1]
    per_group = pieces // groups
    for b in range(scale.shape[0]):
        for g in range(groups):
            for p in range(g * per_group, (g + 1) * per_group):
                place, first = places[p], (b * pieces + p) * LANES
                low_code = (b * strides[0] + place[0], place[1], place[2], place[3])
                high_code = (b * strides[1] + place[4], place[5], place[6], place[7])
                s, m = scale[b, g], minimum[b, g]
                _sixteen(low, low_code, high, high_code, sign, offset, s, m, out, first)


@compiled
def _uneven(blocks: Any, places: Any, levels: Any, scale: Any, out: Any) -> None:
    """Entries of a table. places (P, 2): start of each 4 weights, and row of levels (R, 256)."""
    per_group = places.shape[0] // scale.shape[1]
    for b in range(len(blocks)):
        for p in range(places.shape[0]):
            s, start, row = scale[b, p // per_group], places[p, 0], places[p, 1]
            for j in range(4):
                out[b, 4 * p + j] = s * levels[row, blocks[b, start + j]]


@compiled
def _entries(book: Any, entries: Any, signs: Any, of_byte: Any, scale: Any, out: Any) -> None:
    """Weights of a codebook (N, v): entries (B, n), signs (B, 32)."""
    v = book.shape[1]
    per_group = 256 // scale.shape[1]
    for b in range(len(out)):
        for e in range(32):
            s, sign = scale[b, 8 * e // per_group], of_byte[signs[b, e]]
            for half in range(2):
                entry = book[entries[b, (8 * e + 4 * half) // v]]
                first = 4 * half % v
                for j in range(4):
                    out[b, 8 * e + 4 * half + j] = s * entry[first + j] * sign[4 * half + j]


@cache
def unpack_of(layout: Layout | Codebook) -> Unpack:
    """The function that unpacks blocks of this type: blocks (B, bytes), out (B, weights)."""
    if isinstance(layout, Codebook):
        return _unpack_of_codebook(layout)
    if layout.levels or isinstance(layout, Ternary):
        return _unpack_of_table(layout)
    return _unpack_of_even(layout)


def _places(plane: Plane, n: int, size: int) -> list[tuple[int, int]]:
    """For each `size` weights of a block, as in `_packed`: the first's byte, its bits' shift."""
    if plane.in_order:
        return [(first, 0) for first in range(0, n, size)]
    places = []
    for first in range(0, n, size):
        run, within = divmod(first, plane.run * 8 // plane.bits)
        k, j = divmod(within, plane.run)
        places.append((plane.start + run * plane.run + j, plane.bits * k))
    return places


def _packed(plane: Plane, blocks: np.ndarray, n: int) -> np.ndarray:
    """The array to read codes from: the blocks, or the codes if these are not in runs of bytes."""
    return plane.codes(blocks, n) if plane.in_order else blocks


def _unpack_of_even(layout: Layout) -> Unpack:
    low, high, n = layout.low, layout.high, layout.weights
    sign = 128 if low.bits == 8 else 0
    places = np.zeros((n // LANES, 8), np.int64)
    places[:, :2], places[:, 2] = _places(low, n, LANES), (1 << low.bits) - 1
    if high:
        places[:, 4:6], places[:, 6] = _places(high, n, LANES), (1 << high.bits) - 1
        places[:, 7] = low.bits

    def unpack(blocks: np.ndarray, out: np.ndarray) -> None:
        scale, minimum = layout.scales(blocks)
        planes = _packed(low, blocks, n), _packed(high or low, blocks, n)  # (B, bytes) each
        strides = planes[0].shape[1], planes[1].shape[1]
        minimum = np.zeros_like(scale) if minimum is None else minimum
        flat = (array.reshape(-1) for array in planes)
        _even(*flat, places, strides, sign, layout.offset + sign, scale, minimum, out.reshape(-1))

    return unpack


def _unpack_of_table(layout: Layout) -> Unpack:
    low, n = layout.low, layout.weights
    if isinstance(layout, Ternary):
        rows = []
        for start, n_bytes, digits in layout.PARTS:
            firsts = range(start, start + n_bytes, 4)
            rows += [(first, digit) for digit in range(digits) for first in firsts]
        levels = np.frombuffer(b"".join(digits_of_bytes()), np.int8).reshape(-1, 256)
    else:
        rows = [(start, shift // low.bits) for start, shift in _places(low, n, 4)]
        shifts = low.bits * np.arange(8 // low.bits)[:, None]
        codes = np.arange(256) >> shifts & (1 << low.bits) - 1  # (shifts, 256)
        levels = np.array(layout.levels, np.int8)[codes]
    places, table = np.array(rows), levels.astype(np.float32)

    def unpack(blocks: np.ndarray, out: np.ndarray) -> None:
        _uneven(_packed(low, blocks, n), places, table, layout.scales(blocks)[0], out)

    return unpack


def _unpack_of_codebook(layout: Codebook) -> Unpack:
    book = layout.entries()

    def unpack(blocks: np.ndarray, out: np.ndarray) -> None:
        entries, signs, scale = layout.vectors(blocks)
        entries = entries.astype(np.uint16)
        if signs is None:
            signs = np.zeros((len(blocks), 32), np.uint8)
        _entries(book, entries, np.ascontiguousarray(signs), signs_of_bytes(), scale, out)

    return unpack

"""Scores of a few rows with all columns at a time, by products so small that BLAS and the caches take them well."""

import math

import numpy as np

TILE_BYTES = 26_000_000  # scores a thread holds at a time: 128 rows of GPT-2's vocabulary
ALL_TILES_BYTES = 320_000_000  # and all threads together, while the rows allow it
FEWEST_ROWS = 16  # of a tile, and what more rows are a multiple of
PANEL_COLUMNS, PRODUCT_SIZE = 64, 2**19  # of one product, and at most rows x r x columns: BLAS then skips its packing
CACHE_LINE = 64  # bytes


def tile_rows(width: int, threads: int, most: int) -> int:
    """How many rows of scores, `most` or less, each thread holds at a time for a vocabulary of `width`."""
    tile = min(TILE_BYTES, ALL_TILES_BYTES // threads)
    return min(max(tile // (4 * max(width, 1)) // FEWEST_ROWS, 1) * FEWEST_ROWS, most)


def cut_into_panels(right: np.ndarray, height: int, strip: int) -> np.ndarray:
    """`right` transposed and cut into strips of at least `strip` columns, the last filled up with zeros, and those into
    panels.

    Products of a tile of `height` rows with one panel after another stay in cache, and cost less than one product of
    the tile with the whole.

    Returns
    -------
    (S, P, r, w) float32 array
        Strips, panels of a strip, rank, columns of a panel.
    """
    width, rank = right.shape
    columns = min(max(PRODUCT_SIZE // max(height * rank, 1), 16) // 16 * 16, PANEL_COLUMNS)
    cuts = -(-strip // columns)
    panels = aligned(-(-width // (cuts * columns)), cuts, rank, columns)
    flat, whole = panels.reshape(-1, rank, columns), width // columns
    flat[:whole] = right[: whole * columns].reshape(whole, columns, rank).swapaxes(1, 2)
    flat[whole:] = 0
    if whole < len(flat):
        flat[whole, :, : width - whole * columns] = right[whole * columns :].T
    return panels


def empty_tile(panels: np.ndarray, height: int) -> np.ndarray:
    """Room for the scores of `height` rows, two at least: (S, rows, columns of a strip) float32."""
    strips, cuts, _, columns = panels.shape
    return aligned(strips, max(height, 2), cuts * columns)


def fill_tile(tile: np.ndarray, left: np.ndarray, panels: np.ndarray) -> np.ndarray:
    """Write the scores of rows `left`, (n, r), into the first n rows of a tile.

    In a strip the rows lie one after another, so that a product is written to places near one another: that is a tenth
    faster than to rows as far apart as they are long, and more rows can share a panel.

    Returns
    -------
    (S, n, columns of a strip) float32 array
        These rows of the tile.
    """
    strips, cuts, _, columns = panels.shape
    rows = len(left)
    if rows == 1:  # a product of one row is rounded otherwise than the same row among others
        left = np.repeat(left, 2, axis=0)
    room = tile[:, : len(left)].reshape(strips, len(left), cuts, columns)
    np.matmul(left, panels, out=room.swapaxes(1, 2))
    return tile[:, :rows]


def aligned(*shape: int) -> np.ndarray:
    """An empty float32 array that begins on a cache line: products with it and into it are a tenth faster."""
    size, line = math.prod(shape), CACHE_LINE // 4
    room = np.empty(size + line, np.float32)
    start = -room.ctypes.data % CACHE_LINE // 4
    return room[start : start + size].reshape(shape)

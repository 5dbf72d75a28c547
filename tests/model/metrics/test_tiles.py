"""A score is the same number in whatever tile it is made."""

import numpy as np
import pytest

from weightscope.model.metrics.auroc import cut_into_panels, empty_tile, fill_tile, tile_rows


def scores(left, right, height, strip):
    """left @ right.T by tiles of `height` rows."""
    panels = cut_into_panels(right, height, strip)
    tile = empty_tile(panels, height)
    starts = range(0, len(left), height)
    parts = [fill_tile(tile, left[start : start + height], panels).swapaxes(0, 1).copy() for start in starts]
    return np.concatenate(parts).reshape(len(left), -1)[:, : len(right)]


@pytest.mark.parametrize("rank", [5, 64, 128, 300])
@pytest.mark.parametrize("width", [1, 63, 256, 700])
def test_rows_and_strips_change_no_bit(rank, width):
    rng = np.random.default_rng(rank)
    left, right = (rng.standard_normal((n, rank)).astype(np.float32) for n in (33, width))
    complete = scores(left, right, 48, width)
    np.testing.assert_allclose(complete, left @ right.T, rtol=0, atol=1e-3)
    # Some kernels of OpenBLAS (Haswell) round a row by how many are multiplied with it: there no tiling is exact.
    exact = all(np.array_equal(complete[-n:], scores(left[-n:], right, n, width)) for n in (2, 16, 32))
    rounding = 0 if exact else rank * np.finfo(np.float32).eps * np.linalg.norm(left, axis=1).max()
    for height in (1, 16, 32):  # of the last the remaining tile is one row
        for strip in (1, 100, 256):
            parts = scores(left, right, height, strip)
            np.testing.assert_allclose(parts, complete, rtol=0, atol=rounding * np.linalg.norm(right, axis=1).max())


def test_more_threads_have_smaller_tiles():
    """Together they stay under 320 MB while that leaves them 16 rows each."""
    assert [tile_rows(50_257, threads, 128) for threads in (1, 12, 24, 64, 1000)] == [128, 128, 64, 16, 16]
    assert tile_rows(10, 1, 64) == 64

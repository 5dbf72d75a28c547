"""Biases by offset in a window of an image."""

from itertools import product

import numpy as np
import pytest

import weightscope as ws
from weightscope.model.layers.positions import WindowBias

HEIGHT, WIDTH = 2, 3
rng = np.random.default_rng(0)
TABLE, OF_CLASS = rng.normal(size=(2 * HEIGHT - 1, 2 * WIDTH - 1, 4)), rng.normal(size=(3, 4))


def test_a_patch_is_so_many_rows_and_columns_from_another() -> None:
    places = np.arange(HEIGHT * WIDTH)
    bias = WindowBias(TABLE).between(places, places)
    patches = list(enumerate(np.ndindex(HEIGHT, WIDTH)))
    for (i, (row, column)), (j, (key_row, key_column)) in product(patches, patches):
        of_offset = TABLE[row - key_row + HEIGHT - 1, column - key_column + WIDTH - 1]
        np.testing.assert_array_equal(bias[:, i, j], of_offset)


def test_the_class_token_has_biases_of_its_own() -> None:
    places = np.arange(1 + HEIGHT * WIDTH)
    bias = WindowBias(TABLE, OF_CLASS).between(places, places)
    np.testing.assert_array_equal(bias[:, 1:, 1:], WindowBias(TABLE).between(places[:-1], places[:-1]))
    np.testing.assert_array_equal(bias[:, 0, 0], OF_CLASS[2])
    assert np.all(bias[:, 0, 1:] == OF_CLASS[0][:, None])
    assert np.all(bias[:, 1:, 0] == OF_CLASS[1][:, None])


def test_a_distance_is_one_in_columns() -> None:
    places = np.arange(WIDTH)
    of_row = WindowBias(TABLE).between(places, places)
    np.testing.assert_array_equal(WindowBias(TABLE)(places[:, None] - places), of_row)


def test_outside_the_window_nothing_is_said() -> None:
    with pytest.raises(ws.CheckpointError, match="window of 2 x 3"):
        WindowBias(TABLE)(np.array([WIDTH]))
    with pytest.raises(ws.CheckpointError, match="window of 2 x 3"):
        WindowBias(TABLE).between(np.array([HEIGHT * WIDTH]), np.array([0]))

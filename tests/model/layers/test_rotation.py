"""What rotary embeddings are: rotations that leave only the difference of positions in a score."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from weightscope.checkpoint.config import Config
from weightscope.core.errors import CheckpointError
from weightscope.model.config.rope import Sections, contiguous, height_and_width_first, interleaved
from weightscope.model.layers.rotation import (
    COLUMN,
    FRAME,
    ROW,
    GridRotation,
    Rotation,
    inverse_powers,
    llama3_frequencies,
    ntk_frequencies,
    yarn_frequencies,
    yarn_temperature,
)

HEAD = arrays(np.float64, (8,), elements=st.floats(-3, 3))
POSITION = st.integers(0, 500)


@st.composite
def rotations(draw: st.DrawFn) -> Rotation:
    """Either pairing, some of a head's 8 dimensions, from anywhere, with or without a factor."""
    pairs = draw(st.integers(1, 4))
    return Rotation(
        inverse_powers(draw(st.floats(2, 1e6)), 2 * pairs),
        interleaved=draw(st.booleans()),
        start=draw(st.integers(0, 8 - 2 * pairs)),
        factor=draw(st.sampled_from([1.0, 1.3])),
    )


@given(rotations(), HEAD, HEAD, POSITION, POSITION)
def test_a_score_depends_on_the_distance_alone(
    rotation: Rotation, q: np.ndarray, k: np.ndarray, i: int, j: int
) -> None:
    """rotate(q, i) . rotate(k, j) = rotate_at(q, i - j) . k."""
    turned_q, turned_k = (rotation.rotate(x[None], np.array([place]))[0] for x, place in ((q, i), (k, j)))
    assert turned_q @ turned_k == pytest.approx(rotation.rotate_at(q, i - j) @ k, abs=1e-9)


@given(rotations(), HEAD, POSITION)
def test_turning_keeps_lengths_and_leaves_other_dimensions_alone(
    rotation: Rotation, q: np.ndarray, i: int
) -> None:  # fmt: skip
    turned = rotation.rotate(q[None], np.array([i]))[0]
    still = np.delete(np.arange(8), rotation.turning)
    np.testing.assert_array_equal(turned[still], q[still])
    length = np.linalg.norm(q[rotation.turning]) * rotation.factor
    assert np.linalg.norm(turned[rotation.turning]) == pytest.approx(length, abs=1e-9)


@given(HEAD, POSITION)
def test_interleaved_pairs_are_halves_reordered(q: np.ndarray, i: int) -> None:
    order = np.arange(8).reshape(4, 2).T.ravel()  # 0 2 4 6 1 3 5 7
    halves, pairs = (Rotation(inverse_powers(100.0, 8), interleaved=kind) for kind in (False, True))
    position = np.array([i])
    turned = halves.rotate(q[None, order], position)[0]
    np.testing.assert_array_equal(pairs.rotate(q[None], position)[0][order], turned)


def test_scalings_leave_alone_what_they_promise() -> None:
    plain = inverse_powers(1e4, 64)
    np.testing.assert_allclose(plain[:2], [1.0, 1e4 ** (-2 / 64)])
    np.testing.assert_allclose(ntk_frequencies(1e4, 64, 4.0, length=10, trained=2048), plain)
    assert ntk_frequencies(1e4, 64, 4.0, length=8192, trained=2048)[-1] < plain[-1] / 4
    # Wavelengths under trained / high turn as before, over trained / low `factor` times slower.
    llama3 = llama3_frequencies(5e5, 64, 8.0, 8192, 1.0, 4.0)
    ratio = inverse_powers(5e5, 64) / llama3
    wavelength = 2 * np.pi / inverse_powers(5e5, 64)
    np.testing.assert_allclose(ratio[wavelength < 8192 / 4], 1)
    np.testing.assert_allclose(ratio[wavelength > 8192], 8)
    assert np.all((ratio >= 1) & (ratio <= 8)) and np.any((ratio > 1.01) & (ratio < 7.99))
    yarn = plain / yarn_frequencies(1e4, 64, 16.0, 4096, 32, 1, whole=True)
    assert yarn[0] == 1 and yarn[-1] == pytest.approx(16) and np.all(np.diff(yarn) > -1e-9)


def test_yarns_temperature_as_in_gpt_oss() -> None:
    """Its factor of 32 multiplies scores by 1.813 (squared, as cos and sin both carry it)."""
    assert yarn_temperature(32.0) ** 2 == pytest.approx(1.813, abs=5e-4)
    assert yarn_temperature(0.5) == 1


def test_sequences_longer_than_trained_turn_slower() -> None:
    rotation = Rotation(np.array([1.0]), stretched=lambda length: np.array([1.0 / length]), longest=4)
    assert rotation.angles(np.arange(4))[-1, 0] == 3
    assert rotation.angles(np.arange(5))[-1, 0] == 4 / 5


def test_a_grid_turns_rows_and_columns_apart() -> None:
    rotation = GridRotation(
        2 * np.pi * np.full(2, 0.5), axes=np.array([ROW, COLUMN]), grid=(3, 2), prefix=2, centred=True
    )
    angles = rotation.angles(np.arange(8))
    np.testing.assert_array_equal(angles[:2], 0)  # class and register
    np.testing.assert_allclose(angles[3] - angles[2], [0, 4 * np.pi / 2 * 0.5])  # a column on
    np.testing.assert_allclose(angles[4] - angles[2], [4 * np.pi / 3 * 0.5, 0])  # a row on
    np.testing.assert_allclose(rotation.angles_at(1), angles[3] - angles[2])
    np.testing.assert_allclose(rotation.angles_at((2, -1)), angles[6] - angles[3])
    with pytest.raises(CheckpointError, match=r"5 patches are neither the grid \(3, 2\) nor a square"):
        rotation.angles(np.arange(7))


@given(rotations(), HEAD, HEAD, st.tuples(POSITION, POSITION), st.tuples(POSITION, POSITION), st.integers(1, 2))
def test_only_the_difference_on_each_axis_is_left(rotation, q, k, at, of, blocks) -> None:
    m = len(rotation.frequencies)
    rotation = replace(rotation, axes=np.arange(m) % 2, blocks=blocks if m % 2 == 0 and not rotation.interleaved else 1)
    turned_q, turned_k = (rotation.rotate(x[None], np.array([p]))[0] for x, p in ((q, at), (k, of)))
    apart = rotation.rotate_at(q, (at[0] - of[0], at[1] - of[1]))
    assert turned_q @ turned_k == pytest.approx(apart @ k, abs=1e-6)
    on_a_line = replace(rotation, axes=None)
    np.testing.assert_array_equal(rotation.rotate_at(q, 7), on_a_line.rotate_at(q, 7))  # text: the same on every axis
    with pytest.raises(ValueError, match="on a line"):
        on_a_line.rotate(q[None], np.array([at]))


def test_patches_follow_in_blocks_and_blocks_in_windows() -> None:
    """Qwen's order: 2 x 2 blocks that the merger joins; in Qwen2.5-VL a window of blocks follows together."""
    axes = np.array([ROW, COLUMN])
    of_blocks = GridRotation(np.ones(2), axes=axes, merge=2).places(np.arange(16))[:, 1:]
    np.testing.assert_array_equal(of_blocks[:6], [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3]])
    of_windows = GridRotation(np.ones(2), axes=axes, window=2).places(np.arange(9))[:, 1:]
    np.testing.assert_array_equal(of_windows[:6], [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [1, 2]])
    with_class = GridRotation(np.ones(2), axes=axes, suffix=1, origin=1.0)
    np.testing.assert_array_equal(with_class.angles(np.arange(5)), [[1, 1], [1, 2], [2, 1], [2, 2], [0, 0]])
    np.testing.assert_array_equal(with_class.angles(np.array([[0, 1], [-1, -1]])), [[1, 2], [0, 0]])
    film = GridRotation(np.ones(3), axes=np.array([FRAME, ROW, COLUMN]), grid=(2, 1, 2))
    np.testing.assert_array_equal(film.angles(np.arange(4)), [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]])
    with pytest.raises(CheckpointError, match="8 patches are no square image: give positions as rows and columns"):
        GridRotation(np.ones(2), axes=axes).angles(np.arange(8))


def test_sections_share_pairs_among_axes() -> None:
    given = Config({"mrope_section": [2, 1, 1]}, "config.json")
    assert Sections(contiguous, (4, 0, 0)).axes(given, 4).tolist() == [0, 0, 1, 2]
    assert Sections(interleaved, (4, 0, 0)).axes(given, 4).tolist() == [0, 1, 2, 0]
    ernie = Config({"mrope_section": [2, 2, 1]}, "config.json")
    assert Sections(height_and_width_first, (4, 0, 0)).axes(ernie, 5).tolist() == [1, 2, 1, 2, 0]
    with pytest.raises(CheckpointError, match="three sizes that add up to the 8 pairs"):
        Sections(contiguous, (4, 0, 0)).axes(given, 8)

"""Numbers in figures can be read: none stands on another."""

from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.text import Annotation

from tests.support.legible import faults
from weightscope.heads.outliers.figures import (
    MOST_DRAWN,
    all_layers_figure,
    contributions_figure,
    means_figure,
    values_figure,
)
from weightscope.heads.outliers.measure import Contributions, StreamMeans


@pytest.mark.parametrize("draw", [lambda c, js: contributions_figure(c, [0, 1], js), all_layers_figure])
def test_numbers_of_neighbouring_dimensions_do_not_touch(draw):
    large = np.array([0, 1, 2, 180, 186, 190, 191, 197, 203, 383])
    by_kind = np.random.default_rng(0).normal(0, 0.01, (6, 4, 384, 2))
    by_kind[:, :, large] += np.where(large % 2, 3.0, -2.5)[:, None]
    figure = draw(Contributions(("[CLS]", "other"), np.array([2, 9]), np.arange(6), by_kind, ()), large)
    figure.draw_without_rendering()
    for axis in figure.axes:
        names = [text for text in axis.texts if isinstance(text, Annotation)]
        drawn = {int(name.get_text()) for name in names}
        assert drawn <= set(large.tolist())
        assert len(drawn) >= len(large) - 1  # one has no room near its value
        for first, second in combinations(names, 2):
            assert not first.get_window_extent().overlaps(second.get_window_extent())


@pytest.mark.parametrize("n", [1, 2, MOST_DRAWN + 1])
def test_every_outlier_dimension_is_drawn_by_kind(n):
    hidden = np.random.default_rng(0).normal(size=(7, 64, 3))
    stream = StreamMeans(("[CLS]", "[SEP]", "other"), np.array([2, 2, 9]), np.arange(6), hidden, np.ones((6, 4, 3)))
    figure = values_figure(stream, np.arange(n) * 2)
    titles = [axis.get_title() for axis in figure.axes if axis.axison]
    assert titles == [f"dimension {2 * j}" for j in range(min(n, MOST_DRAWN))]
    assert faults(figure) == []


def test_no_output_hides_another_in_figure_1():
    """Each output's mean of an outlier has a dot of its own, in order, and the range is of every dimension."""
    hidden = np.random.default_rng(0).normal(0, 0.01, (7, 64, 2))
    hidden[:, 20] += np.array([0, 5, 5, 0, 5, -4, 0.0])[:, None]
    stream = StreamMeans(("[CLS]", "other"), np.array([2, 9]), np.arange(6), hidden, np.ones((6, 4, 2)))
    axis = means_figure(SimpleNamespace(stream=stream)).axes[0]
    _, dots = axis.collections
    assert stream.outliers.tolist() == [20]
    place, mean = np.asarray(dots.get_offsets()).T
    np.testing.assert_allclose(mean, stream.means[:, 20, 0])
    assert (np.diff(place) > 0).all() and place.mean() == pytest.approx(20)
    assert len(np.unique(dots.get_facecolors(), axis=0)) == 7
    assert faults(axis.figure) == []

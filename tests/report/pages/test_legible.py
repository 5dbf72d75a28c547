"""Figures that an editor would return are found. `conftest.py` looks at every figure that a test saves."""

from collections.abc import Callable

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from tests.support.legible import faults
from weightscope.heads.detok.figures import roc_figure
from weightscope.heads.detok.heads import TokenRoc
from weightscope.model.metrics.auroc import roc_curve, weighted_auroc
from weightscope.report.pages.style import in_our_style, index_along, subplots

CUT = "'title' leaves the canvas"


@in_our_style()
def figure(change: Callable[[Axes], object] = lambda axis: None) -> Figure:
    drawn, axis = subplots(figsize=(3, 2))
    axis.plot([0, 1, 2], [0, 1, 4])
    axis.annotate("near", (1, 1), (0, 3), textcoords="offset points")
    index_along(axis, "layer")
    change(axis)
    return drawn


def test_a_figure_without_faults_has_none() -> None:
    assert faults(figure()) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda axis: axis.text(0, 0.99, "title", transform=axis.figure.transFigure, in_layout=False), CUT),
        (lambda axis: axis.annotate("347", (2, 1), (0, 40), textcoords="offset points"), "'347' is far from its point"),
        (lambda axis: [axis.text(1, 3, word) for word in ("one", "two")], "'one' covers 'two'"),
        (lambda axis: axis.xaxis.set_major_locator(FixedLocator([0, 0.5, 1])), "'layer' has a tick at 0.5"),
        (lambda axis: axis.clear(), "an empty panel"),
    ],
)  # fmt: skip
def test_a_fault_is_named(change: Callable[[Axes], object], fault: str) -> None:
    assert fault in faults(figure(change))


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 12])
def test_an_axis_of_layers_has_no_half_ticks(layers: int) -> None:
    def change(axis: Axes) -> None:
        axis.lines[0].set_data(range(layers), range(layers))
        axis.relim()

    assert not [fault for fault in faults(figure(change)) if "tick" in fault]


def test_roc_curves_name_their_areas() -> None:
    rng = np.random.default_rng(0)
    positives, weights = np.array([1, 5, 9]), np.array([3, 1, 2])
    scores = rng.normal(size=(2, 40))
    curves = [roc_curve(row, positives, weights) for row in scores]
    drawn = roc_figure([TokenRoc("one", curves), TokenRoc("$two", curves)], [0, 1])
    assert faults(drawn) == []
    named = [text.get_text() for text in drawn.axes[1].get_legend().get_texts()]
    areas = weighted_auroc(scores[0], positives, weights), weighted_auroc(scores[1], positives, weights)
    assert named == [f"head {head}: AUC {area:.2f}" for head, area in enumerate(areas)]

"""Figs 2 to 4 of the sink-as-bias paper for several models at once."""

from collections.abc import Sequence
from itertools import zip_longest

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from weightscope.core.formulas import plain
from weightscope.heads.sinks.bias import SinkBias
from weightscope.heads.sinks.figures import MEASURES, measures_along
from weightscope.report.pages.style import COLOURS, COLUMN, MARKERS, in_our_style, subplots

# What the paper reports of most layers of its models: Ratio, SpectralRatio and R (sections 3.1 to 3.3).
IN_THE_PAPER = {"ratio": (0.2, 0.5), "spectral_sink": (0.8, 1.0), "variance_sink_mu": (1e-2, 1e-1)}
BAND = "#DDDDDD"


@in_our_style()
def side_by_side_figure(models: Sequence[SinkBias], names: Sequence[str]) -> Figure:
    """Ratio, SpectralRatio and R of several models' layers in one figure, as the paper's Figs 2, 3 and 4 are."""
    figure, axes = subplots(1, 3, figsize=(2 * COLUMN, 2.7))
    for axis, (low, high) in zip(axes, IN_THE_PAPER.values(), strict=True):
        axis.axhspan(low, high, color=BAND, linewidth=0)
    for place, bias in enumerate(models):
        layers, colour = bias.layers, COLOURS[place % len(COLOURS)]
        marker = MARKERS[place % len(MARKERS)]
        for axis, measure, of_sink in zip(axes, ("ratio", "spectral", "variance"), MEASURES, strict=True):
            axis.plot(layers["layer"], layers[of_sink], color=colour, marker=marker, markersize=2.5)
            if measure != "ratio":
                axis.plot(layers["layer"], layers[f"{measure}_context"], "--", color=colour, linewidth=0.8)
    measures_along(axes)
    names = [
        Line2D([], [], color=COLOURS[place % len(COLOURS)], marker=MARKERS[place % len(MARKERS)], markersize=2.5,
               label=plain(name))
        for place, name in enumerate(names)
    ]  # fmt: skip
    drawn = [
        Line2D([], [], color="black", label=r"$u_{sink}$, from token 0"),
        Line2D([], [], color="black", linestyle="--", linewidth=0.8, label=r"$u_{ctx}$, mean of the others"),
        Patch(color=BAND, label="paper: most layers of its five models"),
    ]
    rows = [entry for pair in zip_longest(names, drawn) for entry in pair if entry is not None]
    figure.legend(handles=rows, loc="outside upper center", ncols=max(len(names), len(drawn)))
    return figure

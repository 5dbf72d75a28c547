"""The figure of a lineage: layers of the suspect above layers of its bases, and likeness."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from weightscope.core.formulas import plain
from weightscope.pairs.lineage.lineage import Lineage
from weightscope.pairs.lineage.matching import BACKGROUND, SURE
from weightscope.pairs.lineage.sketches import SKETCH, Sketches
from weightscope.report.pages.style import (
    BY_LAYER,
    COLOURS,
    COLUMN,
    in_our_style,
    subplots,
    whole_numbers,
)

GAP = 2  # places between two bases
DARK_IS_ALIKE = f"{BY_LAYER}_r"
TICKS = 8  # layers of a row that are labelled, at most
LOWEST = -0.3  # likeness at the bottom of the axis, or lower
LABELLED = 24  # letters of a checkpoint's name


@in_our_style()
def lineage_figure(lineage: Lineage) -> Figure:
    """Draw a line from each layer to its counterpart; below, likeness of all pairs."""
    figure, (strip, below) = subplots(2, 1, figsize=(2 * COLUMN, 3.6), height_ratios=(3, 2))
    _strip(figure, strip, lineage)
    _likeness(below, lineage)
    return figure


def _strip(figure: Figure, axis: Axes, lineage: Lineage) -> None:
    """Draw the suspect's layers above its bases' layers, or the first compared base's."""
    suspect = lineage.suspect
    bases = list(dict.fromkeys(source.base for source in lineage.sources if source))
    bases = bases or [lineage.compared[0].base]
    starts = np.cumsum([0, *(len(base.layers) + GAP for base in bases)])
    width = max(starts[-1] - GAP, len(suspect.layers))
    above, shift = (width - len(suspect.layers)) / 2, (width - (starts[-1] - GAP)) / 2
    lines, alike = [], []
    for i, source in enumerate(lineage.sources):
        if source is not None and (j := source.match.layers[i]) is not None:
            lines.append([(above + i, 1.0), (shift + starts[bases.index(source.base)] + j, 0.0)])
            alike.append(source.match.likeness[i, j])
    colours = Normalize(0, 1)
    axis.add_collection(
        LineCollection(
            lines, array=np.array(alike), cmap=DARK_IS_ALIKE, norm=colours, linewidths=1.2
        )
    )
    _row(axis, above, 1.0, suspect, "bottom")
    for start, base in zip(starts, bases, strict=False):
        _row(axis, shift + start, 0.0, base, "top")
    axis.set(xlim=(-0.7, width - 0.3), ylim=(-0.42, 1.42))
    axis.axis("off")
    if lines:
        figure.colorbar(ScalarMappable(colours, DARK_IS_ALIKE), ax=axis, pad=0.01, label="likeness")


def _row(axis: Axes, start: float, y: float, sketches: Sketches, side: str) -> None:
    """Draw a checkpoint's layers as a row of dots, some numbered, with its name in the middle."""
    layers, sign = sketches.layers, 1 if side == "bottom" else -1
    x = start + np.arange(len(layers))
    axis.plot(x, np.full(len(x), y), "o", color="0.2", markersize=2.5, label=_short(sketches))
    for place in range(0, len(layers), max(1, -(-len(layers) // TICKS))):
        axis.text(x[place], y + 0.06 * sign, str(layers[place]), ha="center", va=side, fontsize=6.5)
    axis.text(x.mean(), y + 0.24 * sign, _short(sketches), ha="center", va=side, fontsize=8)


def _short(sketches: Sketches) -> str:
    """A checkpoint's name, shortened if it is long."""
    name = sketches.name
    return plain(name if len(name) <= LABELLED else f"{name[:LABELLED]}…")


def _likeness(axis: Axes, lineage: Lineage) -> None:
    """Plot each layer's likeness to its counterpart, to other layers, and strangers' range."""
    nearest = min(lineage.compared, key=lambda each: each.log_p)
    match = lineage.origin.match if lineage.origin else next(iter(nearest.matches.values()))
    layers, unpaired = np.array(lineage.suspect.layers), match.unpaired
    if np.isfinite(unpaired).any():
        pairs = np.repeat(layers, unpaired.shape[1]), unpaired.ravel()
        axis.plot(*pairs, ".", color="0.7", markersize=2, label="other pairs")
    if match.route in BACKGROUND:
        mean, spread = BACKGROUND[match.route]
        counts = np.array([len(lineage.suspect.of_layer(layer)) for layer in layers])
        reach = SURE * np.sqrt(1 / (SKETCH * counts) + spread**2)
        low, high = mean - reach, mean + reach
        label = f"strangers ({SURE:g} deviations)"
        axis.fill_between(layers, low, high, color="0.9", label=label)
        axis.set_ylim(min(LOWEST, float(np.nanmin(match.likeness))), 1.08)
    for k, source in enumerate(dict.fromkeys(each for each in lineage.sources if each)):
        places = [i for i, each in enumerate(lineage.sources) if each is source]
        alike = [source.match.likeness[i, source.match.layers[i]] for i in places]
        label, colour = f"counterparts in {_short(source.base)}", COLOURS[k % len(COLOURS)]
        axis.plot(layers[places], alike, "o", color=colour, markersize=3, label=label)
    axis.set(xlabel="layer of the suspect", ylabel="likeness")
    axis.xaxis.set_major_locator(whole_numbers(9))
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

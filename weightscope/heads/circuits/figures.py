"""The wiring diagram: layers from left to right, heads by role, the strongest edges by kind."""

from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from weightscope.heads.circuits.circuits import READS, Circuits
from weightscope.heads.circuits.wiring import PROJECTIONS
from weightscope.report.pages.style import in_our_style, subplots, whole_numbers

# Colour-blind-safe colours, most of them Okabe and Ito's, that show on white and on black. A role
# has the same colour in the figure and on the page, and no line has the colour of a head.
ROLE_COLOURS = {
    "previous token": "#0072B2",
    "feeds keys": "#56B4E9",
    "induction": "#D55E00",
    "duplicate token": "#CC79A7",
    "detokenization": "#7F3C8D",
    "identity": "#E69F00",
    "keys read a head": "#009E73",
    "anti-copying": "#66707A",
}
UNNAMED = "#C4C9CF"
KIND_COLOURS = {"q": "#7B5FC7", "k": "#9C5A1A", "v": "#999933"}
LABEL = np.array((0.28, 0.09))  # inches, width and height of a label
THICKEST = 2.6  # points


@in_our_style()
def diagram(circuits: Circuits) -> Any:
    """The strongest pairs by PK, one panel per kind of reading."""
    wired, names = circuits.wiring, circuits.roles.names
    n, h = names.shape
    width = max(3.4, min(7.0, 0.5 * n + 1))
    figure, axes = subplots(3, 1, figsize=(width, 6.6), sharex=True, sharey=True)
    strongest = circuits.edges.where(circuits.edges["ranked_by"] == "pk")
    place = {int(layer): i for i, layer in enumerate(wired.layers)}
    for axis, kind in zip(axes, PROJECTIONS, strict=True):
        edges = strongest.where(strongest["kind"] == kind)
        z = edges["pk_z"].astype(float)
        drawn = set()
        for row in range(len(edges)):
            a = place[int(edges["from_layer"][row])], int(edges["from_head"][row])
            b = place[int(edges["to_layer"][row])], int(edges["to_head"][row])
            thickness = 0.4 + (THICKEST - 0.4) * z[row] / max(z.max(), 1e-9)
            axis.add_patch(curve(a, b, KIND_COLOURS[kind], thickness))
            drawn |= {a, b}
        colours = [ROLE_COLOURS.get(names[i, b], UNNAMED) for i in range(n) for b in range(h)]
        sizes = [14 if (i, b) in drawn else 5 for i in range(n) for b in range(h)]
        x, y = np.repeat(np.arange(n), h), np.tile(np.arange(h), n)
        axis.scatter(x, y, s=sizes, c=colours, zorder=3, linewidths=0)
        labelled = {place for place in drawn if names[place]}
        for i, head in apart(labelled, n, h, figure.get_size_inches()):
            axis.annotate(
                f"{wired.layers[i]}.{head}",
                (i, head),
                (0, 3.5),
                textcoords="offset points",
                ha="center",
                fontsize=5,
                zorder=4,
            )
        axis.set(ylabel="head", title=f"what {READS[kind]} read")
    axes[0].invert_yaxis()
    axes[0].yaxis.set_major_locator(whole_numbers(9))
    ticks = np.arange(0, n, max(1, n // 12))
    axes[-1].set_xticks(ticks, wired.layers[ticks])
    axes[-1].set_xlabel("layer")
    dot: dict[str, Any] = {"marker": "o", "linestyle": "", "markersize": 4}
    handles = [
        Line2D([], [], color=colour, label=role, **dot)
        for role, colour in ROLE_COLOURS.items()
        if role in circuits.named
    ]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def apart(
    places: set[tuple[int, int]], n: int, h: int, inches: np.ndarray
) -> list[tuple[int, int]]:
    """Places (layer, head) whose labels do not overlap: the first of each cluster."""
    across, down = LABEL / (inches * (0.8, 0.8 / 3)) * (n, h)  # a label's size in layers and heads
    kept: list[tuple[int, int]] = []
    for i, head in sorted(places):
        if all(abs(i - j) >= across or abs(head - other_head) >= down for j, other_head in kept):
            kept.append((i, head))
    return kept


def curve(a: tuple[int, int], b: tuple[int, int], colour: str, width: float) -> PathPatch:
    """A line from one head to another, leaving and arriving along the layers' axis."""
    (x, y), (to_x, to_y) = a, b
    bend = (to_x - x) / 2
    corners = [(x, y), (x + bend, y), (to_x - bend, to_y), (to_x, to_y)]
    path = Path(corners, [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])
    return PathPatch(path, fill=False, edgecolor=colour, linewidth=width, alpha=0.65)

"""The map of a comparison: roles down, layers across, each in the colour of its worst verdict."""

import numpy as np
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from weightscope.core.formulas import plain
from weightscope.pairs.same import VERDICTS
from weightscope.pairs.same.same import Same
from weightscope.report.pages.style import COLUMN, in_our_style, legend_outside, subplots

OUTSIDE = "model"  # column of tensors outside layers
FLOW = (  # roles from a model's input to its output; others go in the middle
    "tokens", "positions", "norm.inputs", "norm.before", "q", "q.bias", "k", "k.bias", "v",
    "v.bias", "q+k+v", "q+k+v.bias", "q_norm", "k_norm", "o", "o.bias", "norm.attention_output",
    "norm.after_attention", "norm.mlp", "router", "gate", "up", "gate+up", "down",
    "norm.mlp_output", "norm.after", "norm.outputs", "unembedding",
)  # fmt: skip
MOST_ROLES = 40  # rows of the map; the rest is in the table
WIDEST = 7.0  # inches
# Verdicts from strong to weak; blue for the same, grey for undecided, orange and red for different.
COLOURS = ("#08519C", "#2171B5", "#6BAED6", "#BDD7E7", "#80CDC1", "#969696", "#D55E00")


@in_our_style()
def same_figure(same: Same) -> Figure:
    """A square for each role of each layer; blank where there is no such tensor."""
    layers = sorted({each.layer for each in same.tensors if each.layer is not None})
    places = {OUTSIDE: 0} | {layer: i + 1 for i, layer in enumerate(layers)}
    worst: dict[str, np.ndarray] = {}
    for each in same.tensors:
        row = worst.setdefault(each.role, np.full(len(places), np.nan))
        place = places[OUTSIDE if each.layer is None else each.layer]
        row[place] = np.nanmax([row[place], VERDICTS.index(each.verdict)])
    shown = sorted(worst, key=lambda role: -np.nanmax(worst[role]))[:MOST_ROLES]
    roles = sorted(shown, key=lambda role: FLOW.index(role) if role in FLOW else len(FLOW) // 2)
    values = np.ma.masked_invalid(np.array([worst[role] for role in roles]))  # (roles, layers)
    height = 0.9 + 0.15 * len(roles)
    figure, axis = subplots(figsize=(min(WIDEST, max(COLUMN, 1.8 + 0.2 * len(places))), height))
    colours = ListedColormap(COLOURS)
    edges = np.arange(len(places) + 1) - 0.5, np.arange(len(roles) + 1) - 0.5
    axis.pcolormesh(
        *edges,
        values,
        cmap=colours,
        norm=BoundaryNorm(np.arange(len(VERDICTS) + 1) - 0.5, len(VERDICTS)),
        edgecolors="white",
        linewidth=0.6,
    )
    axis.set_yticks(range(len(roles)), [plain(role) for role in roles])
    step = max(1, len(layers) // 12)
    axis.set_xticks([0, *range(1, len(places), step)], [OUTSIDE, *map(str, layers[::step])])
    axis.tick_params(length=0)
    axis.invert_yaxis()
    axis.set_xlabel("layer")
    there = [i for i, verdict in enumerate(VERDICTS) if verdict in same.counts]
    keys = [
        Patch(color=COLOURS[i], label=f"{VERDICTS[i]} ({same.counts[VERDICTS[i]]})") for i in there
    ]
    legend_outside(figure, axis, "upper left", handles=keys, ncols=min(4, len(keys)))
    return figure

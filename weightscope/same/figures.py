"""The map of a comparison: roles down, layers across, in the colour of the worst verdict of each place."""

import numpy as np
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from weightscope.pages.style import COLUMN, in_our_style, plain, subplots
from weightscope.same.judge import VERDICTS, Judged
from weightscope.same.same import Same

OUTSIDE = "model"  # the column of what is in no layer
MOST_ROLES = 40  # rows of the map; the rest is in the table
WIDEST = 7.0  # inches
# From strong to weak; blue for what is the same, grey for undecided, orange and red for what is not.
COLOURS = ("#08519C", "#2171B5", "#6BAED6", "#BDD7E7", "#80CDC1", "#969696", "#D55E00")


@in_our_style()
def same_figure(same: Same) -> Figure:
    """A square for each role of each layer; blank where there is no such tensor."""
    layers = sorted({each.layer for each in same.tensors if each.layer is not None})
    places = {OUTSIDE: 0} | {layer: i + 1 for i, layer in enumerate(layers)}
    worst: dict[str, np.ndarray] = {}
    for each in same.tensors:
        row = worst.setdefault(_shown_role(each), np.full(len(places), np.nan))
        place = places[OUTSIDE if each.layer is None else each.layer]
        row[place] = np.nanmax([row[place], VERDICTS.index(each.verdict)])
    roles = sorted(worst, key=lambda role: (-np.nanmax(worst[role]), np.isnan(worst[role][0])))[:MOST_ROLES]
    roles = [role for role in worst if role in roles]
    values = np.ma.masked_invalid(np.array([worst[role] for role in roles]))  # (roles, layers)
    height = 0.9 + 0.15 * len(roles)
    figure, axis = subplots(figsize=(min(WIDEST, max(COLUMN, 1.8 + 0.2 * len(places))), height))
    colours = ListedColormap(COLOURS)
    edges = np.arange(len(places) + 1) - 0.5, np.arange(len(roles) + 1) - 0.5
    axis.pcolormesh(*edges, values, cmap=colours, norm=BoundaryNorm(np.arange(len(VERDICTS) + 1) - 0.5, len(VERDICTS)),
                    edgecolors="white", linewidth=0.6)  # fmt: skip
    axis.set_yticks(range(len(roles)), [plain(role) for role in roles])
    step = max(1, len(layers) // 12)
    axis.set_xticks([0, *range(1, len(places), step)], [OUTSIDE, *map(str, layers[::step])])
    axis.tick_params(length=0)
    axis.invert_yaxis()
    axis.set_xlabel("layer")
    there = [i for i, verdict in enumerate(VERDICTS) if verdict in same.counts]
    keys = [Patch(color=COLOURS[i], label=f"{VERDICTS[i]} ({same.counts[VERDICTS[i]]})") for i in there]
    figure.legend(handles=keys, loc="outside upper left", ncols=min(4, len(keys)))
    return figure


def _shown_role(each: Judged) -> str:
    """A row of the map: stack and role; a name that no row knows without its numbers."""
    return each.role if each.stack is None or each.role == each.name else each.role

"""The picture of what was learned: changes and intruder dimensions by role and layer."""

from typing import Any

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from weightscope.core.formulas import plain
from weightscope.pairs.learned.learned import Learned, Tune
from weightscope.report.pages.style import COLUMN, in_our_style, subplots

WIDEST = 7.0  # inches
CENTRED: dict[str, Any] = {"ha": "center", "va": "center"}


@in_our_style()
def learned_figure(learned: Learned) -> Figure:
    """A panel per tune: each matrix's relative change, and its number of intruder dimensions."""
    tunes = [tune for tune in learned.tunes if tune.updates]
    updates = [update for tune in tunes for update in tune.updates]
    roles = list(dict.fromkeys(update.role for update in updates)) or ["no matrix"]
    layers = sorted({update.layer or 0 for update in updates}) or [0]
    width, height = min(WIDEST, max(COLUMN, 1.6 + 0.22 * len(layers))), 0.9 + 0.2 * len(roles)
    figure, axes = subplots(
        max(1, len(tunes)), 1, figsize=(width, height * max(1, len(tunes))), squeeze=False
    )
    sizes = [update.change for update in updates if 0 < update.change < np.inf]
    scale = LogNorm(min(sizes), max(max(sizes), 1.01 * min(sizes))) if sizes else None
    for axis, tune in zip(axes[:, 0], tunes, strict=False):
        change, intruders = _grids(tune, roles, layers)
        image = axis.pcolormesh(
            np.arange(len(layers) + 1) - 0.5,
            np.arange(len(roles) + 1) - 0.5,
            np.ma.masked_invalid(change),
            cmap="cividis",
            norm=scale,
            edgecolors="white",
            linewidth=0.5,
        )
        for (row, column), count in np.ndenumerate(intruders):
            if count > 0:
                is_bright = scale is not None and scale(change[row, column]) > 0.5
                colour = "black" if is_bright else "white"
                axis.text(column, row, f"{count:.0f}", **CENTRED, color=colour, fontsize=6.5)
        axis.set_yticks(range(len(roles)), [plain(role) for role in roles])
        step = max(1, len(layers) // 12)
        axis.set_xticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
        axis.tick_params(length=0)
        axis.invert_yaxis()
        axis.set_xlabel("layer")
        axis.set_title(plain(tune.name.rstrip("/").rpartition("/")[2]))
        figure.colorbar(image, ax=axis, pad=0.02, label=r"$\|\Delta W\|_F\,/\,\|W\|_F$")
    if not tunes:
        empty = axes[0, 0]
        empty.text(0.5, 0.5, "no matrix changed", **CENTRED, transform=empty.transAxes)
        empty.axis("off")
    return figure


def _grids(tune: Tune, roles: list[str], layers: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Largest change and number of intruders by role and layer, (roles, layers); NaN if none."""
    change, intruders = np.full((2, len(roles), len(layers)), np.nan)
    for update in tune.updates:
        place = roles.index(update.role), layers.index(update.layer or 0)
        if np.isfinite(update.change):
            change[place] = np.nanmax([change[place], update.change])
        if update.intruders is not None:
            intruders[place] = np.nansum([intruders[place], update.intruders.count])
    return change, intruders

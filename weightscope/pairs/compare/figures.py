"""Figures of a comparison: changes of heads, spectra before and after, measures along a run."""

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from weightscope.heads.audit.figures import MATH, TRACED, heat_map, title
from weightscope.heads.audit.measure import MAPS
from weightscope.model.metrics.outliers import known_median, layer_medians
from weightscope.pairs.compare.compare import Comparison
from weightscope.pairs.deeds.thresholds import UNMOVED
from weightscope.report.pages.style import (
    COLOURS,
    COLUMN,
    in_our_style,
    index_along,
    layer_bar,
    layer_colours,
    subplots,
)

NOTHING = {"ha": "center", "va": "center", "color": "0.35"}  # style of text in empty panels
DRAWN = 6  # heads whose spectra are compared: those that moved most
NEGLIGIBLE = 1e-6  # share of the largest singular value; changes of smaller ones are not drawn


@in_our_style()
def changes(comparison: Comparison) -> Figure:
    """Relative changes of W_QK and W_VO, layers against heads; white where a head did not move."""
    figure, axes = subplots(2, 1, figsize=(COLUMN, 4.4), sharex=True)
    both = {name: comparison.from_first[f"{name}_change"][-1] for name in MAPS}
    every = np.concatenate([change.ravel() for change in both.values()])
    known = every[np.isfinite(every) & (every > UNMOVED)]
    limits = {"vmin": UNMOVED, "vmax": float(known.max()) if len(known) else 1.0}
    unmoved = mpl.colormaps["cividis"].with_extremes(under="white")
    for axis, (name, change) in zip(axes, both.items(), strict=True):
        w = f"W_{{{name.upper()}}}"
        image = heat_map(axis, change, comparison.measured[0].layers, cmap=unmoved, **limits)
        axis.set_title(rf"$\|\Delta {w}\|_F\,/\,\|{w}\|_F$")
        axis.set_ylabel("layer")
        if (change <= UNMOVED).all():
            axis.text(0.5, 0.5, "no head moved", **NOTHING, transform=axis.transAxes)
    if len(known):  # else there is no scale to show
        figure.colorbar(image, ax=axes, pad=0.02, label="relative change")
    axes[-1].set_xlabel("head")
    return figure


@in_our_style()
def spectra_before_and_after(comparison: Comparison) -> Figure:
    """Changes of singular values of the heads that moved most, in percent; W_QK left, W_VO right.

    All panels have one scale, linear up to 10 % and logarithmic beyond where a value more than
    doubled.
    """
    first, last = comparison.measured[0], comparison.measured[-1]
    change = np.stack([comparison.from_first[f"{name}_change"][-1].ravel() for name in MAPS])
    moved = np.abs(change).max(axis=0) > UNMOVED
    rows = [row for row in comparison.by_change.tolist() if moved[row]][:DRAWN] or [0]
    size, farthest = (COLUMN, 0.4 + 1.05 * len(rows)), 0.0
    figure, axes = subplots(len(rows), 2, figsize=size, sharex="col", sharey=True, squeeze=False)
    for row_axes, row in zip(axes, rows, strict=True):
        i, h = divmod(row, first.n_heads)
        for axis, (name, w), how_far in zip(row_axes, MAPS.items(), change[:, row], strict=True):
            before, after = (
                heads.arrays[f"{name}_singular_values"][i, h] for heads in (first, last)
            )
            known = before > NEGLIGIBLE * np.nanmax(before, initial=0.0)
            unknown = np.full(len(before), np.nan)
            percent = 100 * (np.divide(after, before, where=known, out=unknown) - 1)
            index = np.arange(1, len(before) + 1)
            axis.axhline(0, color="0.6", linewidth=0.6)
            if how_far > UNMOVED and np.isfinite(percent).any():
                axis.fill_between(index, 0, percent, color=COLOURS[0], alpha=0.25, linewidth=0)
                axis.plot(index, percent, color=COLOURS[0])
                farthest = max(farthest, float(np.abs(percent[np.isfinite(percent)]).max()))
            else:
                reason = "did not move" if how_far <= UNMOVED else "unknown"
                axis.text(0.5, 0.6, reason, **NOTHING, transform=axis.transAxes)
            axis.set_xlim(0, len(before) + 1)
            axis.set_title(f"layer {first.layers[i]} head {h}: {MATH[w]}")
        row_axes[0].set_ylabel(r"$\Delta\sigma_i\,/\,\sigma_i$ (%)")
    if not farthest:
        axes[0, 0].set(ylim=(-1, 1), yticks=[0])
    elif farthest > 100:
        axes[0, 0].set_yscale("symlog", linthresh=10)
    for axis in axes[-1]:
        index_along(axis, "index $i$")
    figure.align_ylabels(axes[:, 0])
    return figure


@in_our_style()
def trajectories(comparison: Comparison) -> Figure:
    """Medians of each layer's heads at each checkpoint; changes from step to step last."""
    figure, axes = subplots(3, 2, figsize=(COLUMN, 4.6), sharex=True)
    *traced, step_to_step, left_over = axes.flat
    left_over.set_axis_off()
    layer_bar(figure, left_over, comparison.measured[0].layers)
    steps, first = np.arange(len(comparison.labels)), comparison.measured[0]
    for axis, name in zip(traced, TRACED, strict=True):
        # (n, L)
        medians = np.stack([layer_medians(heads.grid(name)) for heads in comparison.measured])
        for line, colour in zip(medians.T, layer_colours(first.layers), strict=True):
            axis.plot(steps, line, color=colour, linewidth=0.8)
        axis.set_title(title(first.measure(name)))
        if first.measure(name).scale == "log":
            axis.set_yscale("log")
    for name, dash, colour in zip(MAPS, ("-", "--"), COLOURS, strict=False):
        typical = [known_median(change) for change in comparison.from_previous[f"{name}_change"]]
        step_to_step.plot(steps[1:], typical, dash, color=colour, label=name.upper())
    step_to_step.set_title("step to step change")
    step_to_step.legend()
    for axis in (traced[-1], step_to_step):
        index_along(axis, "checkpoint")
        axis.tick_params(labelbottom=True)
    return figure

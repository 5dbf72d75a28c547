"""Figures of an audit and of a comparison: heat maps of heads, spectra, measures against depth and training."""

from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import LogLocator, StrMethodFormatter

from weightscope.audits.changes import SAME
from weightscope.audits.compare import Comparison
from weightscope.audits.measures import MAPS, Measure, MeasuredHeads
from weightscope.metrics.outliers import known_median, layer_medians
from weightscope.pages.style import (
    COLOURS,
    COLUMN,
    in_our_style,
    index_along,
    layer_bar,
    layer_colours,
    subplots,
    whole_numbers,
)

MAPPED = ("qk_sigma1", "qk_gap", "qk_effective_rank", "vo_affine_sigma1", "vo_effective_rank", "vo_copying_score")
TRACED = ("qk_sigma1", "vo_sigma1", "qk_effective_rank", "vo_copying_score")  # against depth and training
MATH = {"W_QK": "$W_{QK}$", "W_VO": "$W_{VO}$", "σ₁": r"$\sigma_1$", "σ₂": r"$\sigma_2$", "f̃": r"$\tilde{f}$"}
NOTHING = {"ha": "center", "va": "center", "color": "0.35"}  # what is said where there is nothing to draw
MOST_CURVES = 2000  # in a panel of spectra: each is an object of its own, and 5,000 take 30 MB of SVG
DRAWN = 6  # heads whose spectra are compared: those that moved most
NEGLIGIBLE = 1e-6  # of the largest: no change in percent is drawn for smaller singular values


def title(measure: Measure) -> str:
    """The label of a measure, its symbols as mathematics."""
    text = measure.label
    for symbol, mathematics in MATH.items():
        text = text.replace(symbol, mathematics)
    return text.replace("$$", "")


@in_our_style()
def head_maps(heads: MeasuredHeads) -> Figure:
    """Layers against heads, one panel per measure; in cividis, which colour-blind readers see in the same order."""
    height = float(np.clip(2.2 * len(heads.layers) / heads.n_heads, 1.2, 4.0))
    figure, axes = subplots(2, 3, figsize=(2 * COLUMN, 2 * height), sharex=True, sharey=True)
    for axis, name in zip(axes.flat, MAPPED, strict=True):
        measure, values = heads.measure(name), heads.grid(name)
        positive = values[np.isfinite(values) & (values > 0)]
        # A log scale of less than a decade has no ticks.
        log = measure.scale == "log" and len(positive) and positive.max() > 10 * positive.min()
        norm = LogNorm(positive.min(), positive.max()) if log else None
        image = _heat_map(axis, values, heads.layers, norm=norm)
        axis.set_title(title(measure))
        bar = figure.colorbar(image, ax=axis, pad=0.02)
        if log:
            bar.locator, bar.formatter = LogLocator(subs=(1, 2, 5)), StrMethodFormatter("{x:g}")
            bar.minorticks_off()
    for axis in axes[-1]:
        axis.set_xlabel("head")
    for axis in axes[:, 0]:
        axis.set_ylabel("layer")
    return figure


def _heat_map(axis: Axes, values: np.ndarray, layers: np.ndarray, **options: Any) -> AxesImage:
    """Values (L, H), hatched where they are unknown; about six layers are labelled."""
    known = np.where(np.isfinite(values), values, np.nan)
    image = axis.imshow(known, aspect="auto", interpolation="nearest", **{"cmap": "cividis"} | options)
    if np.isnan(known).any():
        axis.patch.set(facecolor="0.9", edgecolor="0.5", hatch="////", linewidth=0)
    axis.xaxis.set_major_locator(whole_numbers(9))
    step = max(1, -(-len(layers) // 6))
    axis.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    return image


@in_our_style()
def spectra(heads: MeasuredHeads) -> Figure:
    """Singular values of every head: of W_QK relative to the largest, and of the affine value-output map.

    The second panel is Fig. 2 of the norm-based-attention paper for all heads. Of a large model one head in so many is
    drawn.
    """
    figure, (axis_qk, axis_vo) = subplots(1, 2, figsize=(2 * COLUMN, 2.4))
    qk, vo = heads.arrays["qk_singular_values"], heads.arrays["vo_affine_singular_values"]
    with np.errstate(invalid="ignore", divide="ignore"):  # a head of zeros has no largest value
        relative = qk / qk[..., :1]
    for axis, values in ((axis_qk, relative), (axis_vo, vo)):
        curves = np.where(values > 0, values, np.nan)  # (L, H, r)
        step = -(-curves[..., 0].size // MOST_CURVES)
        drawn = np.arange(curves[..., 0].size).reshape(curves.shape[:2]) % step == 0  # (L, H)
        for layer_curves, shown, colour in zip(curves, drawn, layer_colours(heads.layers), strict=True):
            index = np.arange(1, curves.shape[2] + 1)
            axis.plot(index, layer_curves[shown].T, color=colour, linewidth=0.5, alpha=0.7)
        if step > 1:
            axis.set_title(f"one head in {step}")
        axis.set_yscale("log")
        index_along(axis, "index $i$")
        known = curves[np.isfinite(curves)]
        if len(known):
            axis.set_ylim(max(float(known.min()), 1e-9 * float(known.max())) / 1.2, 1.2 * float(known.max()))
    axis_qk.set_ylabel(r"$\sigma_i(W_{QK})\,/\,\sigma_1$")
    axis_vo.set_ylabel(r"$\sigma_i(\tilde f)$")
    layer_bar(figure, axis_vo, heads.layers)
    return figure


@in_our_style()
def depth(heads: MeasuredHeads) -> Figure:
    """Measures against depth: a dot per head, a line through the layers' medians."""
    figure, axes = subplots(1, len(TRACED), figsize=(2 * COLUMN, 1.8))
    for axis, name in zip(axes, TRACED, strict=True):
        measure, values = heads.measure(name), heads.grid(name)  # (L, H)
        axis.plot(heads.table["layer"], values.ravel(), ".", color=COLOURS[5], markersize=2, alpha=0.6)
        axis.plot(heads.layers, layer_medians(values), color=COLOURS[0])
        if measure.scale == "log" and (values[np.isfinite(values)] > 0).any():
            axis.set_yscale("log")
        axis.set_title(title(measure))
        index_along(axis, "layer", 4)
    return figure


@in_our_style()
def changes(comparison: Comparison) -> Figure:
    """Layers against heads: relative change of W_QK and of W_VO on one scale, white where a head did not move."""
    figure, axes = subplots(2, 1, figsize=(COLUMN, 4.4), sharex=True)
    both = {name: comparison.from_first[f"{name}_change"][-1] for name in MAPS}
    known = np.concatenate([change[np.isfinite(change) & (change > SAME)] for change in both.values()])
    limits = {"vmin": SAME, "vmax": float(known.max()) if len(known) else 1.0}
    unmoved = mpl.colormaps["cividis"].with_extremes(under="white")
    for axis, (name, change) in zip(axes, both.items(), strict=True):
        w = f"W_{{{name.upper()}}}"
        image = _heat_map(axis, change, comparison.measured[0].layers, cmap=unmoved, **limits)
        axis.set_title(rf"$\|\Delta {w}\|_F\,/\,\|{w}\|_F$")
        axis.set_ylabel("layer")
        if (change <= SAME).all():
            axis.text(0.5, 0.5, "no head moved", **NOTHING, transform=axis.transAxes)
    if len(known):  # else there is no scale to show
        figure.colorbar(image, ax=axes, pad=0.02, label="relative change")
    axes[-1].set_xlabel("head")
    return figure


@in_our_style()
def spectra_before_and_after(comparison: Comparison) -> Figure:
    """How each singular value of the heads that moved most changed, in percent; W_QK on the left, W_VO on the right.

    All panels have one scale, linear up to 10 % and logarithmic beyond where a value more than doubled.
    """
    first, last = comparison.measured[0], comparison.measured[-1]
    change = np.stack([comparison.from_first[f"{name}_change"][-1].ravel() for name in MAPS])
    moved = np.abs(change).max(axis=0) > SAME
    rows = [row for row in comparison.by_change.tolist() if moved[row]][:DRAWN] or [0]
    size, farthest = (COLUMN, 0.4 + 1.05 * len(rows)), 0.0
    figure, axes = subplots(len(rows), 2, figsize=size, sharex="col", sharey=True, squeeze=False)
    for row_axes, row in zip(axes, rows, strict=True):
        i, h = divmod(row, first.n_heads)
        for axis, (name, w), how_far in zip(row_axes, MAPS.items(), change[:, row], strict=True):
            before, after = (heads.arrays[f"{name}_singular_values"][i, h] for heads in (first, last))
            known = before > NEGLIGIBLE * np.nanmax(before, initial=0.0)
            percent = 100 * (np.divide(after, before, where=known, out=np.full(len(before), np.nan)) - 1)
            index = np.arange(1, len(before) + 1)
            axis.axhline(0, color="0.6", linewidth=0.6)
            if how_far > SAME and np.isfinite(percent).any():
                axis.fill_between(index, 0, percent, color=COLOURS[0], alpha=0.25, linewidth=0)
                axis.plot(index, percent, color=COLOURS[0])
                farthest = max(farthest, float(np.abs(percent[np.isfinite(percent)]).max()))
            else:
                axis.text(
                    0.5, 0.6, "did not move" if how_far <= SAME else "unknown", **NOTHING, transform=axis.transAxes
                )
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
    """The median of each layer's heads at each checkpoint, by layer; changes from step to step last."""
    figure, axes = subplots(3, 2, figsize=(COLUMN, 4.6), sharex=True)
    *traced, step_to_step, left_over = axes.flat
    left_over.set_axis_off()
    layer_bar(figure, left_over, comparison.measured[0].layers)
    steps, first = np.arange(len(comparison.labels)), comparison.measured[0]
    for axis, name in zip(traced, TRACED, strict=True):
        medians = np.stack([layer_medians(heads.grid(name)) for heads in comparison.measured])  # (n, L)
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

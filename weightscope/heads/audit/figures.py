"""Figures of an audit: heat maps of heads, spectra, measures against depth."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, StrMethodFormatter

from weightscope.heads.audit.audit import Audit
from weightscope.heads.audit.measure import Measure, MeasuredHeads
from weightscope.heads.audit.mixers import MeasuredMixers
from weightscope.heads.tensors.matrices import Matrices
from weightscope.model.metrics.outliers import layer_medians
from weightscope.report.pages.style import (
    COLOURS,
    COLUMN,
    in_our_style,
    index_along,
    layer_bar,
    layer_colours,
    subplots,
    whole_numbers,
)

A_DECADE = 10  # times the least value: a wider range is drawn on a logarithmic scale
MAPPED_OF_MATRICES = {
    "sigma1": r"$\sigma_1$",
    "stable_rank": "stable rank",
    "alpha": r"power-law exponent $\alpha$",
    "snr": "signal to noise (Spectrum)",
}
MAPPED = (
    "qk_sigma1",
    "qk_gap",
    "qk_effective_rank",
    "vo_affine_sigma1",
    "vo_effective_rank",
    "vo_copying_score",
)
# measures drawn against depth and training
TRACED = ("qk_sigma1", "vo_sigma1", "qk_effective_rank", "vo_copying_score")
MATH = {
    "W_QK": "$W_{QK}$",
    "W_VO": "$W_{VO}$",
    "σ₁": r"$\sigma_1$",
    "σ₂": r"$\sigma_2$",
    "f̃": r"$\tilde{f}$",
}
MOST_CURVES = 2000  # in a panel of spectra; 5,000, each an object, take 30 MB of SVG


def title(measure: Measure) -> str:
    """The label of a measure, its symbols as mathematics."""
    text = measure.label
    for symbol, mathematics in MATH.items():
        text = text.replace(symbol, mathematics)
    return text.replace("$$", "")


def audit_figure(audit: Audit) -> Figure:
    """The maps of an audit's heads."""
    return head_maps(audit.measured)


@in_our_style()
def head_maps(heads: MeasuredHeads) -> Figure:
    """Layers against heads, one panel per measure, in cividis: safe for colour-blind readers."""
    height = float(np.clip(2.2 * len(heads.layers) / heads.n_heads, 1.2, 4.0))
    figure, axes = subplots(2, 3, figsize=(2 * COLUMN, 2 * height), sharex=True, sharey=True)
    for axis, name in zip(axes.flat, MAPPED, strict=True):
        measure, values = heads.measure(name), heads.grid(name)
        positive = values[np.isfinite(values) & (values > 0)]
        # A log scale of less than a decade has no ticks.
        log = measure.scale == "log" and len(positive) and positive.max() > 10 * positive.min()
        norm = LogNorm(positive.min(), positive.max()) if log else None
        image = heat_map(axis, values, heads.layers, norm=norm)
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


def heat_map(axis: Axes, values: np.ndarray, layers: np.ndarray, **options: Any) -> AxesImage:
    """Values (L, H), hatched where they are unknown; about six layers are labelled."""
    known = np.where(np.isfinite(values), values, np.nan)
    options = {"aspect": "auto", "interpolation": "nearest", "cmap": "cividis"} | options
    image = axis.imshow(known, **options)
    if np.isnan(known).any():
        axis.patch.set(facecolor="0.9", edgecolor="0.5", hatch="////", linewidth=0)
    axis.xaxis.set_major_locator(whole_numbers(9))
    step = max(1, -(-len(layers) // 6))
    axis.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    return image


@in_our_style()
def matrix_maps(matrices: Matrices) -> Figure:
    """Layers against roles, one panel per measure of matrices; the median of experts."""
    layers, roles, grids = matrices.grids(MAPPED_OF_MATRICES)
    height = float(np.clip(0.13 * len(layers) + 0.8, 1.6, 4.0))
    figure, axes = subplots(2, 2, figsize=(2 * COLUMN, 2 * height))
    for axis, (name, values) in zip(axes.flat, grids.items(), strict=True):
        positive = values[np.isfinite(values) & (values > 0)]
        wide = len(positive) > 0 and positive.max() > A_DECADE * positive.min()
        norm = LogNorm(positive.min(), positive.max()) if wide else None
        image = heat_map(axis, values, layers, norm=norm)
        axis.set_xticks(range(len(roles)), roles, rotation=90)
        axis.set_title(MAPPED_OF_MATRICES[name])
        axis.set_ylabel("layer")
        bar = figure.colorbar(image, ax=axis, pad=0.02)
        bar.locator = LogLocator(subs=(1, 2, 5)) if wide else MaxNLocator(3)
        bar.formatter = StrMethodFormatter("{x:g}")
        bar.minorticks_off()
    return figure


@in_our_style()
def time_scales(heads: MeasuredHeads, mixers: MeasuredMixers) -> Figure:
    """Layers against heads: time scales of those without a softmax, blue those with one.

    Hatched where a layer has no such head, and in layers with neither.
    """
    table = mixers.table
    layers = np.array(sorted({*heads.layers.tolist(), *mixers.layers}))  # (L,)
    side_by_side = bool({*heads.layers.tolist()} & {*mixers.layers})  # both in one layer
    first = heads.n_heads if side_by_side else 0
    width = max(heads.n_heads, first + int(table["head"].max()) + 1)
    scales, softmax = np.full((2, len(layers), width), np.nan)
    rows = np.searchsorted(layers, table["layer"])
    scales[rows, first + table["head"]] = table["time_scale"]
    softmax[np.searchsorted(layers, heads.layers), : heads.n_heads] = 1
    height = float(np.clip(0.13 * len(layers) + 0.8, 1.6, 4.0))
    figure, axis = subplots(figsize=(1.5 * COLUMN, height))
    known = scales[np.isfinite(scales) & (scales > 0)]
    least, most = (known.min(), known.max()) if len(known) else (1.0, 1.0)
    wide = most > A_DECADE * least
    norm = LogNorm(least, most) if wide else None
    image = heat_map(axis, scales, layers, norm=norm)
    of_softmax = ListedColormap([COLOURS[5]])
    axis.imshow(softmax, aspect="auto", interpolation="nearest", cmap=of_softmax)
    bar = figure.colorbar(image, ax=axis, pad=0.02, label="time scale (tokens)")
    bar.locator = LogLocator(subs=(1, 2, 5)) if wide else MaxNLocator(4)
    bar.formatter = StrMethodFormatter("{x:g}")
    bar.minorticks_off()
    named = "heads with a softmax" + ", then those without" * side_by_side
    patch = Patch(color=COLOURS[5], label=named)
    axis.legend(handles=[patch], loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    axis.set_xlabel("head")
    axis.set_ylabel("layer")
    return figure


@in_our_style()
def spectra(heads: MeasuredHeads) -> Figure:
    """Singular values of every head: of W_QK over the largest, and of the affine W_VO.

    The second panel is Fig. 2 of the norm-based-attention paper for all heads. Of a large model one
    head in so many is drawn.
    """
    figure, (axis_qk, axis_vo) = subplots(1, 2, figsize=(2 * COLUMN, 2.4))
    qk, vo = heads.arrays["qk_singular_values"], heads.arrays["vo_affine_singular_values"]
    with np.errstate(invalid="ignore", divide="ignore"):  # a head of zeros has no largest value
        relative = qk / qk[..., :1]
    for axis, values in ((axis_qk, relative), (axis_vo, vo)):
        curves = np.where(values > 0, values, np.nan)  # (L, H, r)
        step = -(-curves[..., 0].size // MOST_CURVES)
        drawn = np.arange(curves[..., 0].size).reshape(curves.shape[:2]) % step == 0  # (L, H)
        index, colours = np.arange(1, curves.shape[2] + 1), layer_colours(heads.layers)
        for layer_curves, shown, colour in zip(curves, drawn, colours, strict=True):
            axis.plot(index, layer_curves[shown].T, color=colour, linewidth=0.5, alpha=0.7)
        if step > 1:
            axis.set_title(f"one head in {step}")
        axis.set_yscale("log")
        index_along(axis, "index $i$")
        known = curves[np.isfinite(curves)]
        if len(known):
            most = float(known.max())
            axis.set_ylim(max(float(known.min()), 1e-9 * most) / 1.2, 1.2 * most)
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
        dots = {"color": COLOURS[5], "markersize": 2, "alpha": 0.6}
        axis.plot(heads.table["layer"], values.ravel(), ".", **dots)
        axis.plot(heads.layers, layer_medians(values), color=COLOURS[0])
        if measure.scale == "log" and (values[np.isfinite(values)] > 0).any():
            axis.set_yscale("log")
        axis.set_title(title(measure))
        index_along(axis, "layer", 4)
    return figure

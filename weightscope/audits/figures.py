"""Figures of an audit for a paper: heat maps of heads, spectra, and how measures go with depth."""

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, StrMethodFormatter

from weightscope.audits.audit import Measured
from weightscope.metrics.outliers import layer_medians
from weightscope.pages.style import COLOURS, COLUMN, in_our_style, layer_bar, layer_colours, subplots

MAPS = (
    ("qk_sigma1", r"$\sigma_1(W_{QK})$", True),
    ("qk_gap", r"$\sigma_1/\sigma_2(W_{QK})$", True),
    ("qk_effective_rank", r"effective rank of $W_{QK}$", False),
    ("vo_affine_sigma1", r"$\sigma_1(\tilde f)$, value-output", True),
    ("vo_effective_rank", r"effective rank of $W_{VO}$", False),
    ("vo_copying_score", "copying score", False),
)
DEPTH = (
    ("qk_sigma1", r"$\sigma_1(W_{QK})$", True),
    ("vo_sigma1", r"$\sigma_1(W_{VO})$", True),
    ("qk_effective_rank", r"effective rank of $W_{QK}$", False),
    ("vo_copying_score", "copying score", False),
)


@in_our_style()
def head_maps(found: Measured) -> Figure:
    """Layers against heads, one panel a measure; cividis, whose brightness everyone sees in the same order."""
    n_layers, n_heads = found.columns["qk_sigma1"].shape
    height = float(np.clip(2.2 * n_layers / n_heads, 1.2, 4.0))
    figure, axes = subplots(2, 3, figsize=(2 * COLUMN, 2 * height), sharex=True, sharey=True)
    for axis, (name, label, log) in zip(axes.flat, MAPS, strict=True):
        values = np.where(np.isfinite(found.columns[name]), found.columns[name], np.nan)
        positive = values[values > 0]
        wide = log and len(positive) and positive.max() > 10 * positive.min()  # less than a decade has no ticks to read
        norm = LogNorm(positive.min(), positive.max()) if wide else None
        image = axis.imshow(values, aspect="auto", cmap="cividis", norm=norm, interpolation="nearest")
        axis.set_facecolor("0.6")
        axis.set_title(label)
        bar = figure.colorbar(image, ax=axis, pad=0.02)
        if wide:
            bar.locator, bar.formatter = LogLocator(subs=(1, 2, 5)), StrMethodFormatter("{x:g}")
            bar.minorticks_off()
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_yticks(*_layer_ticks(found.layers))
    for axis in axes[-1]:
        axis.set_xlabel("head")
    for axis in axes[:, 0]:
        axis.set_ylabel("layer")
    return figure


def _layer_ticks(layers: np.ndarray) -> tuple[list[int], list[str]]:
    """Rows to mark, about six, and their layers' own numbers."""
    step = max(1, -(-len(layers) // 6))
    rows = list(range(0, len(layers), step))
    return rows, [str(layers[row]) for row in rows]


@in_our_style()
def spectra_figure(found: Measured) -> Figure:
    """Singular values of every head: W_QK's over the largest, and the affine value-output map's.

    The second panel is Fig. 2 of the norm-based-attention paper for all heads.
    """
    figure, (axis_qk, axis_vo) = subplots(1, 2, figsize=(2 * COLUMN, 2.4))
    colours = layer_colours(found.layers)
    qk, vo = found.measured["qk_singular_values"], found.measured["vo_affine_singular_values"]
    for i in range(len(found.layers)):
        for axis, spectra in ((axis_qk, qk[i] / qk[i, :, :1]), (axis_vo, vo[i])):
            curves = np.where(spectra > 0, spectra, np.nan)
            axis.plot(np.arange(1, curves.shape[1] + 1), curves.T, color=colours[i], linewidth=0.5, alpha=0.7)
    axis_qk.set_ylabel(r"$\sigma_i(W_{QK})\,/\,\sigma_1$")
    axis_vo.set_ylabel(r"$\sigma_i(\tilde f)$")
    for axis, spectra in ((axis_qk, qk / qk[..., :1]), (axis_vo, vo)):
        axis.set_yscale("log")
        axis.set_xlabel("index $i$")
        known = spectra[np.isfinite(spectra) & (spectra > 0)]
        if len(known):
            axis.set_ylim(max(float(known.min()), 1e-9 * float(known.max())) / 1.2, 1.2 * float(known.max()))
    layer_bar(figure, axis_vo, found.layers)
    return figure


@in_our_style()
def depth_figure(found: Measured) -> Figure:
    """Measures against depth: every head a dot, the layer's median a line, findings left to the page."""
    figure, axes = subplots(1, 4, figsize=(2 * COLUMN, 1.8))
    for axis, (name, label, log) in zip(axes, DEPTH, strict=True):
        values = found.columns[name]  # (L, H)
        at = np.repeat(found.layers, values.shape[1])
        axis.plot(at, values.ravel(), ".", color=COLOURS[5], markersize=2, alpha=0.6)
        axis.plot(found.layers, layer_medians(values), color=COLOURS[0])
        if log and (values[np.isfinite(values)] > 0).any():
            axis.set_yscale("log")
        axis.set_title(label)
        axis.set_xlabel("layer")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    return figure

"""Figures of norm-based analysis (norm-based-attention paper, Figs 2 to 5)."""

import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, StrMethodFormatter

from weightscope.core.formulas import plain
from weightscope.heads.norms.measure import NormAnalysis
from weightscope.report.pages import style

OFF = 0.01  # share of the sample, the smallest weights, that lies off the left edge of Fig. 3
LEAST = 1e-3  # times the largest value; smaller ones have this one's colour in Fig. 4


@style.in_our_style()
def singular_value_figure(norms: NormAnalysis, heads: np.ndarray) -> Figure:
    """Fig. 2: singular values of f, in descending order, of one head per layer."""
    figure, axis = style.subplots(figsize=(style.COLUMN, 2.3))
    colours = style.layer_colours(norms.layer_indices)
    index = np.arange(1, norms.singular_values.shape[2] + 1)
    for spectra, head, colour in zip(norms.singular_values, heads, colours, strict=True):
        axis.plot(index, spectra[head], color=colour, linewidth=0.9)
    axis.set_ylim(bottom=0)
    style.index_along(axis, "index $i$")
    axis.set_ylabel(r"singular value $\sigma_i$ of $\tilde f$")
    style.layer_bar(figure, axis, norms.layer_indices)
    return figure


@style.in_our_style()
def pair_figure(norms: NormAnalysis) -> Figure:
    """Fig. 3: |f(x)| against alpha, one panel per kind; other kinds behind, in light grey."""
    figure, (axes,) = _panels(norms.kind_names, 1, 1.9)
    everything = np.concatenate(norms.pairs)  # (m, 2)
    styles = style.kind_styles(len(norms.kind_names))
    for axis, pairs, ranks, look in zip(axes, norms.pairs, norms.ranks, styles, strict=True):
        axis.plot(*everything.T, ".", color="0.88", markersize=1, rasterized=True)
        axis.plot(*pairs.T, ".", color=look["color"], markersize=1, alpha=0.5, rasterized=True)
        axis.set_xscale("log")
        correlation = r"$\rho$ unknown" if ranks.pairs else "none"
        if np.isfinite(ranks.rho):
            correlation = rf"$\rho={ranks.rho:.2f}$"
        axis.text(0.04, 0.98, correlation, transform=axis.transAxes, va="top", fontsize=7)
    if len(everything):
        axes[0].set_xlim(np.quantile(everything[:, 0], OFF), 1.5)
        axes[0].set_ylim(0, 1.15 * everything[:, 1].max())
    axes[0].set_ylabel(r"$\|f(x_j)\|$")
    figure.supxlabel(r"attention weight $\alpha_{ij}$", fontsize=8)
    return figure


@style.in_our_style()
def head_figure(norms: NormAnalysis) -> Figure:
    """Fig. 4 for every kind: alpha that a head gives it, and its mean |f(x)|; layers downwards.

    Colours are logarithmic beyond a decade: a kind of few tokens gets a hundredth of what another
    gets.
    """
    n_layers, n_heads = norms.alpha.shape[:2]
    height = float(np.clip(1.5 * n_layers / n_heads, 0.8, 3.0))
    figure, rows = _panels(norms.kind_names, 2, 2 * height + 0.6)
    shown = (norms.alpha, r"summed $\alpha$"), (norms.f_by_kind, r"mean $\|f(x)\|$")
    for axes, (values, label) in zip(rows, shown, strict=True):
        most = np.nanmax(values)
        least = max(np.nanmin(values), LEAST * most)
        log = most > 10 * least  # less than a decade has no ticks
        norm = LogNorm(least, most, clip=True) if log else Normalize(least, most)
        look = {"aspect": "auto", "cmap": style.BY_LAYER, "interpolation": "nearest"}
        for kind, axis in enumerate(axes):
            image = axis.imshow(values[:, :, kind], norm=norm, **look)
        bar = figure.colorbar(image, ax=axes, pad=0.01, label=label, aspect=12)
        if log:
            bar.locator = LogLocator(subs=(1,) if most > 100 * least else (1, 2, 5))
            bar.formatter = StrMethodFormatter("{x:g}")
            bar.minorticks_off()
        axes[0].set_ylabel("layer")
    step = -(-n_layers // 6)
    rows[0, 0].set_yticks(range(0, n_layers, step), norms.layer_indices[::step])
    for axis in rows[1]:
        style.index_along(axis, "head", 4)
    return figure


@style.in_our_style()
def layer_figure(norms: NormAnalysis) -> Figure:
    """Fig. 5: alpha and |alpha f(x)| that a query gives to each kind, the mean over heads."""
    figure, (weights, vectors) = style.subplots(1, 2, figsize=(2 * style.COLUMN, 2.1))
    for axis, values in (weights, norms.alpha), (vectors, norms.alpha_f):
        styles, means = style.kind_styles(len(norms.kind_names)), values.mean(axis=1).T  # (K, L)
        for kind, mean, look in zip(norms.kind_names, means, styles, strict=True):
            axis.plot(norms.layer_indices, mean, label=plain(kind), **look)
        axis.set_ylim(bottom=0)
        style.layers_along(axis)
    weights.set(title="weights", ylabel=r"summed $\alpha$")
    vectors.set(title="vectors added up", ylabel=r"summed $\|\alpha f(x)\|$")
    handles = weights.get_legend_handles_labels()
    figure.legend(*handles, loc="outside right center", title="given to")
    return figure


def _panels(kinds: tuple[str, ...], rows: int, height: float) -> tuple[Figure, np.ndarray]:
    """Rows of panels, one per kind of token, two paper columns wide, with shared axes."""
    size = (min(1.0, (len(kinds) + 0.5) / 4) * 2 * style.COLUMN, height)
    shared = {"sharex": True, "sharey": True, "squeeze": False}
    figure, axes = style.subplots(rows, len(kinds), figsize=size, **shared)
    for axis, kind in zip(axes[0], kinds, strict=True):
        axis.set_title(plain(kind))
    return figure, axes

"""Figures of norm-based analysis (norm-based-attention paper, Figs 2 to 5)."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from weightscope.norms.measure import NormAnalysis
from weightscope.pages.style import COLOURS, COLUMN, in_our_style, layer_bar, layer_colours, subplots

PUNCTUATION, OTHER = COLOURS[2], COLOURS[7]  # green, and grey for whatever is of no special kind
SPECIAL = (*COLOURS[:2], *COLOURS[3:7])
MARKERS = "os^vDP"
OFF = 0.01  # of the sample, the smallest weights, lies off the left edge of Fig. 3


def kind_colours(kinds: tuple[str, ...]) -> list[str]:
    """One colour a kind, the same in every figure: special tokens in order, then punctuation, then all others."""
    return [*(SPECIAL[place % len(SPECIAL)] for place in range(len(kinds) - 2)), PUNCTUATION, OTHER]


@in_our_style()
def singular_value_figure(found: NormAnalysis, heads: np.ndarray) -> Figure:
    """Fig. 2: singular values of f, in descending order, of one head a layer."""
    figure, axis = subplots(figsize=(COLUMN, 2.3))
    colours = layer_colours(found.layers)
    for spectra, head, colour in zip(found.singular_values, heads, colours, strict=True):
        axis.plot(np.arange(1, spectra.shape[1] + 1), spectra[head], color=colour, linewidth=0.9)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("index $i$")
    axis.set_ylabel(r"singular value $\sigma_i$ of $\tilde f$")
    layer_bar(figure, axis, found.layers)
    return figure


@in_our_style()
def pair_figure(found: NormAnalysis) -> Figure:
    """Fig. 3: |f(x)| against alpha, a panel a kind; points of the other kinds in light grey behind."""
    figure, axes = _panels(1, len(found.kinds), 1.9)
    everything = np.concatenate(found.pairs)
    for axis, kind, pairs, colour, ranks in zip(
        axes[0], found.kinds, found.pairs, kind_colours(found.kinds), found.ranks, strict=True
    ):
        axis.plot(*everything.T, ".", color="0.88", markersize=1, rasterized=True)
        axis.plot(*pairs.T, ".", color=colour, markersize=1, alpha=0.5, rasterized=True)
        axis.set_xscale("log")
        axis.set_title(kind)
        axis.text(0.04, 0.98, rf"$\rho={ranks.rho:.2f}$", transform=axis.transAxes, va="top", fontsize=7)
    if len(everything):
        axes[0, 0].set_xlim(np.quantile(everything[:, 0], OFF), 1.5)
        axes[0, 0].set_ylim(0, 1.15 * everything[:, 1].max())
    axes[0, 0].set_ylabel(r"$\|f(x_j)\|$")
    figure.supxlabel(r"attention weight $\alpha_{ij}$", fontsize=8)
    return figure


@in_our_style()
def head_figure(found: NormAnalysis) -> Figure:
    """Fig. 4 for every kind: alpha that a head gives to the kind, and the mean |f(x)| of the kind; layers downwards."""
    n_layers, n_heads = found.alpha.shape[:2]
    height = float(np.clip(1.5 * n_layers / n_heads, 0.8, 3.0))
    figure, axes = _panels(2, len(found.kinds), 2 * height + 0.6)
    rows = ((found.alpha, r"summed $\alpha$", 1.0), (found.f_by_kind, r"mean $\|f(x)\|$", None))
    for row, (values, label, most) in zip(axes, rows, strict=True):
        most = most or float(np.nanmax(values))
        for place, axis in enumerate(row):
            image = axis.imshow(
                values[:, :, place], aspect="auto", cmap="cividis", vmin=0, vmax=most, interpolation="nearest"
            )
        figure.colorbar(image, ax=row, pad=0.01, label=label, aspect=12)
        row[0].set_ylabel("layer")
    step = -(-n_layers // 6)
    axes[0, 0].set_yticks(range(0, n_layers, step), found.layers[::step])
    for axis, kind in zip(axes[0], found.kinds, strict=True):
        axis.set_title(kind)
    for axis in axes[1]:
        axis.set_xlabel("head")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    return figure


@in_our_style()
def layer_figure(found: NormAnalysis) -> Figure:
    """Fig. 5: what a query gives to each kind in the mean over a layer's heads, as alpha and as |alpha f(x)|."""
    figure, axes = subplots(1, 2, figsize=(2 * COLUMN, 2.1))
    for axis, values, label in (
        (axes[0], found.alpha, r"summed $\alpha$"),
        (axes[1], found.alpha_f, r"summed $\|\alpha f(x)\|$"),
    ):
        _layer_lines(axis, found, values.mean(axis=1))
        axis.set_ylabel(label)
    axes[0].set_title("weights")
    axes[1].set_title("vectors added up")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", title="given to")
    return figure


def _layer_lines(axis: Axes, found: NormAnalysis, values: np.ndarray) -> None:
    """Lines over layers of (L, K) values."""
    for place, (kind, colour) in enumerate(zip(found.kinds, kind_colours(found.kinds), strict=True)):
        marker = MARKERS[place % len(MARKERS)]
        axis.plot(found.layers, values[:, place], marker=marker, markersize=3, color=colour, label=kind)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("layer")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def _panels(rows: int, columns: int, height: float) -> tuple[Figure, np.ndarray]:
    """A grid as wide as two columns of a paper, all axes shared."""
    size = (min(1.0, (columns + 0.5) / 4) * 2 * COLUMN, height)
    return subplots(rows, columns, figsize=size, sharex=True, sharey=True, squeeze=False)

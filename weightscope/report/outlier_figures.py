"""Figures of the outlier-dimensions paper: the stream's means, attention by kind of token, and C of every dimension."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from weightscope.report.style import COLOURS, COLUMN, DASHES, head_style
from weightscope.runner.outlier_analysis import Contributions, Stream

MARKERS = "osD^vPX"
MOST_IN_LEGEND = 16  # heads


def means_figure(stream: Stream, dimensions: Sequence[int]) -> Figure:
    """Fig. 1: mean over tokens of every dimension of each layer's output, outlier dimensions named."""
    means = stream.means
    figure, axis = plt.subplots(figsize=(2 * COLUMN, 2.4))
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.92, len(means)))
    for row, colour in zip(means, colours, strict=True):
        axis.plot(row, color=colour, linewidth=0.6, rasterized=True)
    for j in dimensions:
        _name(axis, j, float(means[np.abs(means[:, j]).argmax(), j]))
    axis.set_xlim(-1, means.shape[1])
    axis.margins(y=0.12)
    axis.set_xlabel("dimension $j$")
    axis.set_ylabel(r"mean of $x_j$ over tokens")
    scale = plt.cm.ScalarMappable(plt.Normalize(0, len(means) - 1), plt.cm.colors.ListedColormap(colours))
    bar = figure.colorbar(scale, ax=axis, pad=0.01, label="output of layer (0: embeddings)")
    bar.locator = MaxNLocator(integer=True)
    return figure


def attention_figure(stream: Stream) -> Figure:
    """Fig. 2: mean attention to a token of each kind, by layer, over all heads and queries."""
    figure, axis = plt.subplots(figsize=(COLUMN, 2.2))
    for k, kind in enumerate(stream.kinds):
        axis.plot(stream.layers, stream.attention.mean(axis=1)[:, k], label=kind, **_kind_style(k))
    axis.set_xlabel("attention layer")
    axis.set_ylabel(r"mean of $\alpha$ to one token")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_ylim(bottom=0)
    axis.legend(ncols=2 if len(stream.kinds) > 2 else 1)
    return figure


def values_figure(stream: Stream, dimensions: Sequence[int]) -> Figure:
    """Fig. 3: mean of each outlier dimension over tokens of each kind, by layer; one panel a dimension."""
    columns = min(3, len(dimensions))
    rows = -(-len(dimensions) // columns)
    width = COLUMN if columns == 1 else 2 * COLUMN
    figure, axes = plt.subplots(rows, columns, figsize=(width, 1.8 * rows + 0.3), sharex=True, squeeze=False)
    for axis in axes.flat[len(dimensions) :]:
        axis.set_axis_off()
    for panel, (j, axis) in enumerate(zip(dimensions, axes.flat, strict=False)):
        axis.axhline(0, color="0.8", linewidth=0.5)
        for k, kind in enumerate(stream.kinds):
            axis.plot(stream.hidden[:, j, k], label=kind, **_kind_style(k))
        axis.set_title(f"dimension {j}")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        if panel % columns == 0:
            axis.set_ylabel("mean of $x_j$")
        if panel + columns >= len(dimensions):
            axis.set_xlabel("output of layer")
            axis.tick_params(labelbottom=True)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=len(stream.kinds))
    return figure


def contributions_figure(found: Contributions, rows: Sequence[int], dimensions: Sequence[int]) -> Figure:
    """Fig. 4: C of every dimension in a few layers, a dot a head; the outlier dimensions named."""
    overall = found.overall
    n_heads, d = overall.shape[1:]
    figure, axes = plt.subplots(len(rows), 1, figsize=(2 * COLUMN, 1.6 * len(rows) + 0.3), sharex=True, squeeze=False)
    for row, axis in zip(rows, axes[:, 0], strict=True):
        _dots(axis, overall[row], 6)
        for j in dimensions:
            _name(axis, j, float(overall[row, np.abs(overall[row, :, j]).argmax(), j]))
        axis.margins(y=0.16)
        axis.set_title(f"layer {found.layers[row]}", loc="left")
        axis.set_ylabel("mean $C_j$")
    axes[-1, 0].set_xlim(-1, d)
    axes[-1, 0].set_xlabel("dimension $j$")
    if n_heads <= MOST_IN_LEGEND:
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", markerscale=2, handletextpad=0.1)
    return figure


def all_layers_figure(found: Contributions, dimensions: Sequence[int]) -> Figure:
    """Fig. 5: the same of all layers, on one scale a layer."""
    overall = found.overall
    n_layers, _, d = overall.shape
    columns = min(4 if n_layers > 6 else 3, n_layers)
    rows = -(-n_layers // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(2 * COLUMN, 1.25 * rows + 0.4), sharex=True, squeeze=False)
    for axis in axes.flat[n_layers:]:
        axis.set_axis_off()
    for i, axis in enumerate(axes.flat[:n_layers]):
        _dots(axis, overall[i], 2)
        farthest = [j for j in dimensions if np.abs(overall[i, :, j]).max() > 0.4 * np.abs(overall[i]).max()]
        for j in farthest:
            _name(axis, j, float(overall[i, np.abs(overall[i, :, j]).argmax(), j]), size=6)
        axis.margins(y=0.2)
        axis.set_title(f"layer {found.layers[i]}", loc="left")
        axis.yaxis.set_major_locator(MaxNLocator(nbins=4))
        if i + columns >= n_layers:
            axis.tick_params(labelbottom=True)
    axes[0, 0].set_xlim(-1, d)
    figure.supxlabel("dimension $j$", fontsize=8)
    figure.supylabel("mean $C_j$, a dot a head", fontsize=8)
    return figure


def guess_figure(layers: np.ndarray, correlations: Mapping[str, np.ndarray]) -> Figure:
    """How well the weights' guesses order the dimensions, by layer."""
    figure, axis = plt.subplots(figsize=(COLUMN, 2.2))
    axis.axhline(0, color="0.6", linewidth=0.6)
    for i, (name, values) in enumerate(correlations.items()):
        if np.isfinite(values).any():
            axis.plot(layers, values, label=name, **_kind_style(i))
    axis.set_xlabel("attention layer")
    axis.set_ylabel("Spearman correlation")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside lower center", ncols=2, fontsize=6)
    return figure


def _dots(axis: Axes, of_heads: np.ndarray, size: float) -> None:
    axis.axhline(0, color="0.8", linewidth=0.5)
    for head, values in enumerate(of_heads):
        axis.scatter(
            np.arange(len(values)), values, s=size, color=head_style(head)["color"], marker=MARKERS[head // len(COLOURS) % len(MARKERS)],
            linewidth=0, label=f"head {head}", rasterized=True,
        )  # fmt: skip


def _name(axis: Axes, j: int, value: float, size: float = 7) -> None:
    """The dimension's number just beyond its farthest value."""
    up = value >= 0
    axis.annotate(
        str(j), (j, value), xytext=(0, 3 if up else -3), textcoords="offset points", fontsize=size,
        ha="center", va="bottom" if up else "top",
    )  # fmt: skip


def _kind_style(kind: int) -> dict[str, object]:
    """Colour, dash and marker of a kind of token: the same in every figure."""
    return {
        "color": COLOURS[kind % len(COLOURS)],
        "linestyle": DASHES[kind // len(COLOURS) % len(DASHES)],
        "marker": MARKERS[kind % len(MARKERS)],
        "markersize": 3,
    }

"""Figures of the outlier-dimensions paper: the stream's means, attention by kind of token, and C of every dimension."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from weightscope.metrics.outliers import DIMENSION_Z
from weightscope.outlier_dimensions.measure import Contributions, Stream, score_gaps
from weightscope.pages.style import COLOURS, COLUMN, DASHES, head_style, in_our_style, subplots

MARKERS = "osD^vPX"
MOST_IN_LEGEND = 16  # heads
MOST_NAMED = 12  # dimensions in one panel


@in_our_style()
def means_figure(stream: Stream) -> Figure:
    """Fig. 1: mean over tokens of every dimension of each layer's output; outliers of these means are named."""
    means, z = stream.means, stream.z[..., 0]
    figure, axis = subplots(figsize=(2 * COLUMN, 2.4))
    colours = colormaps["viridis"](np.linspace(0, 0.92, len(means)))
    for row, colour in zip(means, colours, strict=True):
        axis.plot(row, color=colour, linewidth=0.6, rasterized=True)
    visible = np.abs(means).max(axis=0) > 0.04 * np.abs(means).max()
    odd = np.abs(z).max(axis=0) > DIMENSION_Z
    _name(axis, means, [int(j) for j in stream.outliers if odd[j] and visible[j]][:MOST_NAMED])
    axis.set_xlim(-1, means.shape[1])
    axis.margins(y=0.12)
    axis.set_xlabel("dimension $j$")
    axis.set_ylabel(r"mean of $x_j$ over tokens")
    scale = ScalarMappable(Normalize(0, len(means) - 1), ListedColormap(colours))
    bar = figure.colorbar(scale, ax=axis, pad=0.01, label="output of layer (0: embeddings)")
    bar.locator = MaxNLocator(integer=True)
    return figure


@in_our_style()
def attention_figure(stream: Stream) -> Figure:
    """Fig. 2: mean attention to a token of each kind, by layer, over all heads and queries."""
    figure, axis = subplots(figsize=(COLUMN, 2.2))
    for k, kind in enumerate(stream.kinds):
        axis.plot(stream.layers, stream.attention.mean(axis=1)[:, k], label=kind, **_kind_style(k))
    axis.set_xlabel("attention layer")
    axis.set_ylabel(r"mean of $\alpha$ to one token")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_ylim(bottom=0)
    axis.legend(ncols=2 if len(stream.kinds) > 2 else 1)
    return figure


@in_our_style()
def values_figure(stream: Stream, dimensions: np.ndarray) -> Figure:
    """Fig. 3: mean of each outlier dimension over tokens of each kind, by layer; one panel a dimension."""
    columns = min(3, len(dimensions))
    rows = -(-len(dimensions) // columns)
    width = COLUMN if columns == 1 else 2 * COLUMN
    figure, axes = subplots(rows, columns, figsize=(width, 1.8 * rows + 0.3), sharex=True, squeeze=False)
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


@in_our_style()
def contributions_figure(found: Contributions, rows: Sequence[int], dimensions: np.ndarray) -> Figure:
    """Fig. 4: C of every dimension in a few layers, a dot a head; what is large is named, outliers in black."""
    overall = found.overall
    n_heads, d = overall.shape[1:]
    figure, axes = subplots(len(rows), 1, figsize=(2 * COLUMN, 1.6 * len(rows) + 0.3), sharex=True, squeeze=False)
    for row, axis in zip(rows, axes[:, 0], strict=True):
        _dots(axis, overall[row], 6)
        _name_large(axis, overall[row], dimensions, 0.2)
        axis.margins(y=0.16)
        axis.set_title(f"layer {found.layers[row]}", loc="left")
        axis.set_ylabel("mean $C_j$")
    axes[-1, 0].set_xlim(-1, d)
    axes[-1, 0].set_xlabel("dimension $j$")
    if n_heads <= MOST_IN_LEGEND:
        figure.legend(handles=_head_handles(n_heads), loc="outside right center", handletextpad=0.1)
    return figure


@in_our_style()
def all_layers_figure(found: Contributions, dimensions: np.ndarray) -> Figure:
    """Fig. 5: the same of all layers, on one scale a layer."""
    overall = found.overall
    n_layers, _, d = overall.shape
    columns = min(4 if n_layers > 6 else 3, n_layers)
    rows = -(-n_layers // columns)
    figure, axes = subplots(rows, columns, figsize=(2 * COLUMN, 1.25 * rows + 0.4), sharex=True, squeeze=False)
    for axis in axes.flat[n_layers:]:
        axis.set_axis_off()
    for i, axis in enumerate(axes.flat[:n_layers]):
        _dots(axis, overall[i], 2)
        _name_large(axis, overall[i], dimensions, 0.4, apart=0.16)
        axis.margins(y=0.3)
        axis.set_title(f"layer {found.layers[i]}", loc="left")
        axis.yaxis.set_major_locator(MaxNLocator(nbins=4))
        if i + columns >= n_layers:
            axis.tick_params(labelbottom=True)
    axes[0, 0].set_xlim(-1, d)
    figure.supxlabel("dimension $j$", fontsize=8)
    figure.supylabel("mean $C_j$, a dot a head", fontsize=8)
    return figure


@in_our_style()
def preferences_figure(found: Contributions, dimensions: np.ndarray) -> Figure:
    """What makes keys of a kind score above the last kind's: all dimensions, outliers, and the two that add most."""
    gaps = score_gaps(found)  # (L, n_kinds - 1, d)
    shown = [k for k in range(len(found.kinds) - 1) if found.counts[k]]
    figure, axes = subplots(1, len(shown), figsize=(COLUMN * min(2, len(shown)), 2.5), squeeze=False)
    for k, axis in zip(shown, axes[0], strict=True):
        axis.axhline(0, color="0.8", linewidth=0.5)
        axis.plot(found.layers, gaps[:, k].sum(axis=-1), color="black", label="all")
        of_outliers = gaps[:, k, dimensions].sum(axis=-1)
        axis.plot(found.layers, of_outliers, color="0.5", linestyle="--", label="outliers together")
        most = np.argsort(-np.abs(gaps[:, k]).max(axis=0))[:2]
        for j in sorted(map(int, most)):
            axis.plot(found.layers, gaps[:, k, j], label=str(j), **_dimension_style(j, dimensions))
        axis.set_title(f"{found.kinds[k]} above {found.kinds[-1]}")
        axis.set_xlabel("attention layer")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        axis.legend(title="dimensions", title_fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.28))
    axes[0, 0].set_ylabel("mean score, before $1/\\sqrt{d'}$")
    return figure


@in_our_style()
def guess_figure(layers: np.ndarray, correlations: Mapping[str, np.ndarray]) -> Figure:
    """How well the weights' guesses order the dimensions, by layer."""
    figure, axis = subplots(figsize=(COLUMN, 2.2))
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
    """(H, d) numbers against their dimension, heads drawn in mixed order so that none hides the others."""
    axis.axhline(0, color="0.8", linewidth=0.5)
    n_heads, d = of_heads.shape
    heads, at = np.divmod(np.random.default_rng(0).permutation(n_heads * d), d)
    for first in range(0, n_heads, len(COLOURS)):
        those = (heads >= first) & (heads < first + len(COLOURS))
        colours = [head_style(head)["color"] for head in heads[those]]
        axis.scatter(
            at[those], of_heads[heads[those], at[those]], s=size, c=colours, marker=_head_marker(first),
            linewidth=0, rasterized=True,
        )  # fmt: skip


def _head_marker(head: int) -> str:
    return MARKERS[head // len(COLOURS) % len(MARKERS)]


def _head_handles(n_heads: int) -> list[Line2D]:
    return [
        Line2D(
            [], [], color=head_style(head)["color"], marker=_head_marker(head), label=f"head {head}",
            linestyle="", markersize=4, markeredgewidth=0,
        )
        for head in range(n_heads)
    ]  # fmt: skip


def _name_large(axis: Axes, of_heads: np.ndarray, dimensions: np.ndarray, share: float, apart: float = 0.04) -> None:
    """Name the dimensions with a value over a share of the panel's largest; in grey what is no outlier dimension."""
    largest = np.abs(of_heads).max(axis=0)  # (d,)
    large = np.flatnonzero(largest > share * largest.max())
    large = large[np.argsort(-largest[large])][:MOST_NAMED]
    _name(axis, of_heads, [int(j) for j in large], apart, grey=set(map(int, large)) - set(map(int, dimensions)))


def _name(
    axis: Axes, curves: np.ndarray, dimensions: Sequence[int], apart: float = 0.04, grey: Collection[int] = ()
) -> None:
    """Each dimension's number just beyond its farthest value; neighbours' numbers lean away from each other.

    Parameters
    ----------
    axis : Axes
    curves : (n, d) array
        What is drawn.
    dimensions : sequence of int
    apart : float
        Share of the axis within which two numbers would touch.
    grey : collection of int
        To be named quietly.
    """
    tops = {j: float(curves[np.abs(curves[:, j]).argmax(), j]) for j in dimensions}
    for j, top in tops.items():
        near = [other - j for other in tops if 0 < abs(other - j) < apart * curves.shape[1]]
        near = [step for step in near if (tops[j + step] >= 0) == (top >= 0)]
        lean = "center" if not near else "right" if min(near, key=abs) > 0 else "left"
        if not apart / 2 < j / curves.shape[1] < 1 - apart / 2:  # at the axis' ends
            lean = "left" if 2 * j < curves.shape[1] else "right"
        axis.annotate(
            str(j), (j, top), xytext=({"left": -2, "right": 2}.get(lean, 0), 3 if top >= 0 else -3),
            textcoords="offset points", fontsize=7, color="0.55" if j in grey else "black",
            ha=lean, va="bottom" if top >= 0 else "top",
        )  # fmt: skip


def _dimension_style(j: int, dimensions: np.ndarray) -> dict[str, object]:
    """Colour and dash of a dimension by its place among the outliers; grey for others."""
    (place,) = np.nonzero(dimensions == j)
    if not len(place):
        return {"color": "0.55", "linestyle": ":", "marker": "x", "markersize": 3}
    return _kind_style(int(place[0]))


def _kind_style(kind: int) -> dict[str, object]:
    """Colour, dash and marker of a kind of token: the same in every figure."""
    return {
        "color": COLOURS[kind % len(COLOURS)],
        "linestyle": DASHES[kind // len(COLOURS) % len(DASHES)],
        "marker": MARKERS[kind % len(MARKERS)],
        "markersize": 3,
    }

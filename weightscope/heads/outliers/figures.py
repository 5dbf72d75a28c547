"""Figures of the outlier-dimensions paper: means, attention by kind of token, C by dimension."""

from collections.abc import Collection, Iterable, Sequence
from itertools import product
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from weightscope.core.formulas import plain
from weightscope.core.tables import Table
from weightscope.heads.outliers.measure import (
    DIMENSION_Z,
    Contributions,
    OutlierAnalysis,
    StreamMeans,
)
from weightscope.report.pages.style import (
    COLOURS,
    COLUMN,
    MARKERS,
    head_style,
    in_our_style,
    index_along,
    kind_styles,
    layer_bar,
    layer_colours,
    subplots,
    whole_numbers,
)

MOST_IN_LEGEND = 16  # heads
MOST_NAMED = 12  # dimensions in one panel
MOST_DRAWN = 4  # outlier dimensions by kind of token, the farthest first; the paper has three
APART = 0.02  # of the axis: the dots of a dimension's outputs, so that none hides another
NEAR = 3  # points between a value and its number
LINES = 5  # lines of numbers above each other, at most
FAR = 0.1  # share of the axis; a number farther from its value seems to name another
LEANS: tuple[tuple[Literal["center", "left", "right"], int], ...] = (
    ("center", 0),
    ("left", 2),
    ("right", -2),
)


@in_our_style()
def means_figure(outliers: OutlierAnalysis) -> Figure:
    """Fig. 1: range of every dimension's mean over outputs; each output's mean of outliers."""
    stream = outliers.stream
    means, z = stream.means[..., 0], stream.z[..., 0]  # (L + 1, d)
    outputs, d = np.arange(len(means)), means.shape[1]
    figure, axis = subplots(figsize=(2 * COLUMN, 2.8))
    ends = means.min(axis=0), means.max(axis=0)
    axis.fill_between(np.arange(d), *ends, color="0.75", linewidth=0, step="mid")
    far = [int(j) for j in stream.outliers if np.abs(z[:, j]).max() > DIMENSION_Z]
    aside = np.linspace(-APART / 2, APART / 2, len(outputs)) * d
    look: dict[str, Any] = {"s": 9, "edgecolor": "0.3", "linewidth": 0.2, "zorder": 3}
    for j in far:
        axis.plot(j + aside, means[:, j], color="0.55", linewidth=0.5, zorder=2)
        axis.scatter(j + aside, means[:, j], c=layer_colours(outputs), **look)
    visible = np.abs(means).max(axis=0) > 0.04 * np.abs(means).max()
    _name(axis, means, [j for j in far if visible[j]][:MOST_NAMED])
    axis.set_xlim(-1 - APART * d, (1 + APART) * d)
    axis.margins(y=0.12)
    index_along(axis, "dimension $j$", 9)
    axis.set_ylabel(r"mean of $x_j$ over tokens")
    layer_bar(figure, axis, outputs, "output of layer (0: embeddings)")
    _untangle(figure, [axis])
    return figure


@in_our_style()
def attention_figure(stream: StreamMeans) -> Figure:
    """Fig. 2: mean attention to a token of each kind, by layer, over all heads and queries."""
    figure, axis = subplots(figsize=(COLUMN, 2.2))
    _kind_lines(axis, stream.layer_indices, stream.attention.mean(axis=1), stream.kind_names)
    index_along(axis, "attention layer")
    axis.set_ylabel(r"mean of $\alpha$ to one token")
    axis.set_ylim(bottom=0)
    axis.legend(ncols=2 if len(stream.kind_names) > 2 else 1)
    return figure


@in_our_style()
def values_figure(stream: StreamMeans, dimensions: np.ndarray) -> Figure:
    """Fig. 3: mean of each outlier dimension over tokens of each kind; a panel each."""
    dimensions = dimensions[:MOST_DRAWN]
    figure, axes, columns = _grid(len(dimensions), 2, 1.6, 0.3)
    for panel, (j, axis) in enumerate(zip(dimensions, axes, strict=True)):
        axis.axhline(0, color="0.8", linewidth=0.5)
        _kind_lines(axis, np.arange(len(stream.hidden)), stream.hidden[:, j], stream.kind_names)
        axis.set_title(f"dimension {j}")
        if panel % columns == 0:
            axis.set_ylabel("mean of $x_j$")
        if panel + columns >= len(dimensions):
            axis.set_xlabel("output of layer")
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=len(stream.kind_names))
    return figure


@in_our_style()
def contributions_figure(c: Contributions, rows: Sequence[int], dimensions: np.ndarray) -> Figure:
    """Fig. 4: C of every dimension in a few layers, a dot per head; outliers named in black."""
    figure, axes, _ = _grid(len(rows), 1, 1.6, 0.3)
    figure.set_figwidth(2 * COLUMN)
    for row, axis in zip(rows, axes, strict=True):
        _dots(axis, c, row, 6)
        _name_large(axis, c.overall[row], dimensions, 0.2)
        axis.margins(y=0.16)
        axis.set_ylabel("mean $C_j$")
    index_along(axes[-1], "dimension $j$", 9)
    n_heads = c.overall.shape[1]
    if n_heads <= MOST_IN_LEGEND:
        look: dict[str, Any] = {"linestyle": "", "markersize": 4, "markeredgewidth": 0}
        handles = [
            Line2D([], [], label=f"head {head}", **look, **_head_dot(head))
            for head in range(n_heads)
        ]
        figure.legend(handles=handles, loc="outside right center", handletextpad=0.1)
    _untangle(figure, axes)
    return figure


@in_our_style()
def all_layers_figure(c: Contributions, dimensions: np.ndarray) -> Figure:
    """Fig. 5: the same for all layers, on one scale per layer."""
    n_layers = len(c.overall)
    figure, axes, _ = _grid(n_layers, 4 if n_layers > 6 else 3, 1.25, 0.4)
    figure.set_figwidth(2 * COLUMN)
    for row, axis in enumerate(axes):
        _dots(axis, c, row, 2)
        _name_large(axis, c.overall[row], dimensions, 0.4)
        axis.margins(y=0.3)
        axis.yaxis.set_major_locator(MaxNLocator(nbins=4))
    figure.supxlabel("dimension $j$", fontsize=8)
    figure.supylabel("mean $C_j$, one dot per head", fontsize=8)
    _untangle(figure, axes)
    return figure


@in_our_style()
def preferences_figure(c: Contributions, dimensions: np.ndarray) -> Figure:
    """Score of each kind of key above the last: all dimensions, outliers, the largest two."""
    shown = [kind for kind in range(len(c.kind_names) - 1) if c.counts[kind]]
    size = COLUMN * min(2, len(shown)), 3.0
    figure, axes = subplots(1, len(shown), figsize=size, squeeze=False)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.28), "ncols": 2}
    for kind, axis in zip(shown, axes[0], strict=True):
        gaps = c.gaps[:, kind]  # (L, d)
        axis.axhline(0, color="0.8", linewidth=0.5)
        axis.plot(c.layer_indices, gaps.sum(axis=-1), color="black", label="all")
        together = gaps[:, dimensions].sum(axis=-1)
        dashed = {"color": "0.5", "linestyle": "--", "label": "outliers together"}
        axis.plot(c.layer_indices, together, **dashed)
        for j in sorted(map(int, np.argsort(-np.abs(gaps).max(axis=0))[:2])):
            axis.plot(c.layer_indices, gaps[:, j], label=str(j), **_dimension_style(j, dimensions))
        axis.set_title(f"{plain(c.kind_names[kind])} above {c.kind_names[-1]}")
        index_along(axis, "attention layer")
        axis.legend(title="dimensions", title_fontsize=7, **below)
    # a label of the first panel would be cut off
    figure.supylabel("mean score, before $1/\\sqrt{d'}$", fontsize=8)
    return figure


@in_our_style()
def guess_figure(agreement: Table) -> Figure:
    """Agreement of the weights' guesses with the measured order of dimensions, by layer."""
    figure, axis = subplots(figsize=(COLUMN, 2.2))
    axis.axhline(0, color="0.6", linewidth=0.6)
    for place, column in enumerate(agreement.columns[1:]):
        if np.isfinite(column.values).any():
            axis.plot(agreement["layer"], column.values, label=column.name, **_line_style(place))
    index_along(axis, "attention layer")
    axis.set_ylabel("Spearman correlation")
    figure.legend(loc="outside lower center", ncols=2, fontsize=6)
    return figure


def _grid(n: int, most_columns: int, height: float, more: float) -> tuple[Figure, np.ndarray, int]:
    """n panels that share x: the figure, their axes row by row, and how many columns there are."""
    columns = min(most_columns, n)
    rows = -(-n // columns)
    size = (COLUMN * min(2, columns), height * rows + more)
    figure, grid = subplots(rows, columns, figsize=size, sharex=True, squeeze=False)
    for axis in grid.flat[n:]:
        axis.set_axis_off()
    for axis in grid.flat[n - columns : n]:  # the panels with no panel below
        axis.tick_params(labelbottom=True)
    return figure, grid.flat[:n], columns


def _kind_lines(axis: Axes, x: np.ndarray, means: np.ndarray, kinds: Sequence[str]) -> None:
    """(len(x), K) means, one line per kind of token."""
    for kind, values, look in zip(kinds, means.T, kind_styles(len(kinds)), strict=True):
        axis.plot(x, values, label=plain(kind), **look)
    axis.xaxis.set_major_locator(whole_numbers())


def _dots(axis: Axes, c: Contributions, row: int, size: float) -> None:
    """C of a layer against the dimension, heads in mixed order so that none hides others."""
    axis.axhline(0, color="0.8", linewidth=0.5)
    by_head = c.overall[row]  # (H, d)
    n_heads, d = by_head.shape
    heads, dimension = np.divmod(np.random.default_rng(0).permutation(n_heads * d), d)
    for first in range(0, n_heads, len(COLOURS)):  # heads that share a marker
        members = (heads >= first) & (heads < first + len(COLOURS))
        colours = [head_style(head)["color"] for head in heads[members]]
        x, y = dimension[members], by_head[heads[members], dimension[members]]
        marker = _head_dot(first)["marker"]
        axis.scatter(x, y, s=size, c=colours, marker=marker, linewidth=0, rasterized=True)
    axis.set_xlim(-1, d)
    axis.xaxis.set_major_locator(whole_numbers(4 if size < 4 else 9))
    axis.set_title(f"layer {c.layer_indices[row]}", loc="left")


def _head_dot(head: int) -> dict[str, Any]:
    marker = MARKERS[head // len(COLOURS) % len(MARKERS)]
    return {"color": head_style(head)["color"], "marker": marker}


def _name_large(axis: Axes, of_heads: np.ndarray, dimensions: np.ndarray, share: float) -> None:
    """Name dimensions above a share of the panel's largest value; in grey if no outlier."""
    largest = np.abs(of_heads).max(axis=0)  # (d,)
    large = np.flatnonzero(largest > share * largest.max())
    large = large[np.argsort(-largest[large])][:MOST_NAMED]
    _name(axis, of_heads, large.tolist(), grey=set(large.tolist()) - set(dimensions.tolist()))


def _name(
    axis: Axes, curves: np.ndarray, dimensions: Sequence[int], grey: Collection[int] = ()
) -> None:
    """Write each dimension's number beyond its farthest value in curves (n, d)."""
    for j in dimensions:
        top = float(curves[np.abs(curves[:, j]).argmax(), j])
        axis.annotate(
            str(j),
            (j, top),
            xytext=(0, NEAR if top >= 0 else -NEAR),
            textcoords="offset points",
            fontsize=7,
            color="0.55" if j in grey else "black",
            ha="center",
            va="bottom" if top >= 0 else "top",
        )


def _untangle(figure: Figure, axes: Iterable[Axes]) -> None:
    """Move numbers aside, then outwards, until none touches another or another's values.

    The numbers of the largest values come first; one that has no place near its value is left out.
    """
    figure.figure.draw_without_rendering()  # the whole one, if this is a part of the caller's
    for axis in axes:
        names = [text for text in axis.texts if isinstance(text, Annotation)]
        names.sort(key=lambda name: -abs(name.xy[1]))
        feet = {name: axis.transData.transform((name.xy[0], 0)) for name in names}
        taken = {name: [Bbox([feet[name], axis.transData.transform(name.xy)])] for name in names}
        for name in names:
            side = 1 if name.xy[1] >= 0 else -1
            obstacles = [box for label in names if label is not name for box in taken[label]]
            farthest = FAR * axis.bbox.height * 72 / figure.dpi  # points
            for up, (lean, right) in product((NEAR, *np.linspace(-5, farthest, LINES)), LEANS):
                if up > farthest or (up < 0 and not right):
                    continue
                name.set_horizontalalignment(lean)
                name.xyann = right, side * up
                box = name.get_window_extent()
                inside = axis.bbox.x0 <= box.x0 and box.x1 <= axis.bbox.x1 + box.width / 2
                inside = inside and axis.bbox.y0 <= box.y0 and box.y1 <= axis.bbox.y1
                if inside and not any(box.padded(1).overlaps(obstacle) for obstacle in obstacles):
                    taken[name].append(box)
                    break
            else:
                name.remove()


def _dimension_style(j: int, dimensions: np.ndarray) -> dict[str, Any]:
    """Style of a dimension's line by its place among the outliers; grey for others."""
    if j not in dimensions:
        return {"color": "0.55", "linestyle": ":", "marker": "x", "markersize": 3}
    return _line_style(int(np.flatnonzero(dimensions == j)[0]))


def _line_style(place: int) -> dict[str, Any]:
    marker = MARKERS[place % len(MARKERS)]
    return head_style(place) | {"marker": marker, "markersize": 3}

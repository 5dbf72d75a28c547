"""Figures for detokenization: AUROC by head, ROC curves, position terms, attention on text."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from weightscope.heads.detok.first_layer import TERMS
from weightscope.heads.detok.heads import BigramAuroc, TokenRoc
from weightscope.heads.detok.kernels import PositionKernels
from weightscope.heads.detok.on_text import TextCheck
from weightscope.heads.detok.positions import (
    AtSigma,
    Near,
    PositionTerms,
    near_mass,
    spread_over_tokens,
)
from weightscope.model.layers.kernel import FAST
from weightscope.report.pages.style import (
    BY_LAYER,
    COLOURS,
    COLUMN,
    DASHES,
    head_style,
    in_our_style,
    index_along,
    layer_rows,
    legend_outside,
    subplots,
)

# Statistics of sigma_i, in the paper's blue, green, orange
SIGMA_I = (("mean", "#0072B2"), ("minimum", "#009E73"), ("maximum", "#E69F00"))
BY_SPREAD = ("#009E73", "#0072B2", "#E69F00")  # half the spread, the spread, twice the spread
LAST = 30  # positions before the query that an inset shows, as the authors draw
LEAST_HEIGHT = 2.4  # inches, for the label next to one row of panels
PREVIOUS = "previous position $j$ (tokens)"


@in_our_style()
def auroc_figure(auroc: BigramAuroc) -> Figure:
    """Draw Table 2, best head first: the mean as a dot over the spread of the single tokens.

    A diamond is the mean of the specific part; the dashed line is the AUROC of the previous token's
    frequency.
    """
    table = auroc.ranked
    figure, axis = subplots(figsize=(COLUMN, 0.26 * len(table) + 1.0))
    means = zip(table["head"], table["auroc"], table["auroc_specific"], strict=True)
    for place, (head, mean, specific) in enumerate(means):
        low, quarter, three_quarters, high = np.nanpercentile(auroc.auroc[head], [5, 25, 75, 95])
        level = [place, place]
        axis.plot([low, high], level, color="0.75", linewidth=1)
        box = [quarter, three_quarters]
        axis.plot(box, level, color="0.55", linewidth=4, solid_capstyle="butt")
        axis.plot(mean, place, "o", color=head_style(head)["color"], markersize=5)
        label = "less what all current tokens share" if not place else "_nolegend_"
        axis.plot(specific, place, "D", color="black", fillstyle="none", markersize=4, label=label)
        above = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center"}
        axis.annotate(f"{mean:.2f}", (mean, place), fontsize=6, **above)
    axis.axvline(0.5, color="black", linewidth=0.6, linestyle=":")
    baseline = auroc.auroc_baseline
    frequency = f"previous token's frequency: {baseline:.2f}"
    axis.axvline(baseline, color="#D55E00", linewidth=1, linestyle="--", label=frequency)
    axis.set_yticks(range(len(table)), [f"head {head}" for head in table["head"]])
    axis.set_ylim(len(table) - 0.5, -0.8)
    axis.set_xlim(0, 1)
    axis.set_xlabel("bigram AUROC of $T^{ee}$ (1)")
    handles, _ = axis.get_legend_handles_labels()
    legend_outside(figure, axis, "lower center", handles=handles, fontsize=6)
    return figure


@in_our_style()
def roc_figure(tokens: Sequence[TokenRoc], coloured: Collection[int]) -> Figure:
    """Fig. 2, one panel per token: ROC curves of some heads in colour, of the others in grey."""
    width = min(2 * COLUMN, COLUMN * len(tokens))
    size = (width, width / len(tokens) + 0.5)
    figure, axes = subplots(1, len(tokens), figsize=size, sharey=True, squeeze=False)
    for axis, token in zip(axes[0], tokens, strict=True):
        axis.plot([0, 1], [0, 1], color="black", linewidth=0.6, linestyle=":")
        for head, (false_rate, true_rate) in enumerate(token.curves):
            if head in coloured:
                area = np.trapezoid(true_rate, false_rate)
                style = {**head_style(head), "label": f"head {head}: AUC {area:.2f}", "zorder": 3}
            else:
                style = {"color": "0.82", "linewidth": 0.7, "zorder": 1}
            axis.step(false_rate, true_rate, where="post", **style)
        escaped = token.text.replace("$", r"\$")
        axis.set_title(f"“{escaped}”")
        axis.set_xlabel("false positive rate (1)")
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    axes[0][0].set_ylabel("true positive rate (1)")
    return figure


@in_our_style()
def position_figure(terms: PositionTerms, head: int) -> Figure:
    """Fig. 3 for one head: T^p, T^pp at the query position, their sum, and the softmax of the sum.

    The band is the central 95 % over the tokens at j; the three lines take 1/sigma_i at its mean,
    and sigma_i at its minimum and maximum (the paper's caption says sigma_j, the authors' code has
    sigma_i). With a spread instead of tokens, the lines are for half of it, all of it, and twice as
    much.
    """
    query, sigma = terms.query, terms.sigma
    figure, axes = subplots(2, 2, figsize=(2 * COLUMN, 4.2))
    (axis_p, axis_pp), (axis_sum, axis_softmax) = axes

    if terms.spread is None:
        t_p = spread_over_tokens(terms.p_numerator[head], sigma)
        _draw_t_p(axis_p, {"black": t_p.mean}, terms)
        axis_p.fill_between(np.arange(len(t_p.mean)), t_p.low, t_p.high, color="0.8", linewidth=0)
    else:
        coloured = zip(BY_SPREAD, terms.over_spreads, strict=True)
        curves = {colour: of_spread.t_p[head] for colour, of_spread in coloured}
        _draw_t_p(axis_p, curves, terms)

    j = np.arange(query + 1)
    last = axis_softmax.inset_axes((0.12, 0.35, 0.5, 0.55))
    for label, colour, scaled in _lines(terms, head):
        for axis, curve in ((axis_pp, scaled.pp), (axis_sum, scaled.both)):
            axis.fill_between(j, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
            axis.plot(j, curve.mean, color=colour, label=label)
        axis_softmax.plot(j, scaled.attention, color=colour)
        last.plot(j[-LAST:], scaled.attention[-LAST:], color=colour)
    last.set_title(f"the last {len(j[-LAST:])}", fontsize=6)
    last.tick_params(labelsize=5)
    axis_pp.legend()
    axis_p.set_ylabel(r"$T^p_j$")
    axis_pp.set_ylabel(rf"$T^{{pp}}_{{{query},j}}$")
    axis_sum.set_ylabel(rf"$T^p_j + T^{{pp}}_{{{query},j}}$")
    axis_softmax.set_ylabel(r"softmax$_j$ of the sum $/\sqrt{d'}$")
    for axis in axes.flat:
        axis.set_xlabel(PREVIOUS)
    near = near_mass(terms.attention()[head])
    figure.suptitle(f"head {head}: {near:.0%} of its attention to the nearest tenth", fontsize=8)
    return figure


def _lines(terms: PositionTerms, head: int) -> Iterator[tuple[str, str, AtSigma]]:
    """Label, colour and terms of the lines of Fig. 3, by the query's sigma or by the spread."""
    if terms.spread is None:
        for which, colour in SIGMA_I:
            symbol = r"$1/\sigma_i$" if which == "mean" else r"$\sigma_i$"
            yield f"{symbol} {which}", colour, terms.at_sigma(head, which)
        return
    for of_spread, colour in zip(terms.over_spreads, BY_SPREAD, strict=True):
        assert of_spread.spread is not None
        yield f"$s$ = {of_spread.spread.s:g}", colour, of_spread.at_sigma(head, "mean")


def _draw_t_p(axis: Axes, curves: Mapping[str, np.ndarray], terms: PositionTerms) -> None:
    """Draw T^p by colour, with the query position and the undertrained ones marked."""
    axis.axvline(terms.query, color="0.6", linewidth=0.6, linestyle=":")
    cliff = [terms.t_p.shape[1] - 1] if terms.cliff else []
    marks = np.unique([*terms.undertrained, *cliff]).astype(int)
    label = "undertrained"
    for colour, curve in curves.items():
        axis.plot(curve, color=colour)
        if len(marks):
            axis.plot(marks, curve[marks], "x", color="#D55E00", markersize=5, label=label)
            label = "_nolegend_"
    if len(marks):
        axis.legend()


@in_our_style()
def near_figure(
    near: Near,
    band: str,
    measured: Mapping[int, Sequence[float]] | None = None,
    unexplained: Collection[int] = (),
) -> Figure:
    """Fig. 4, left, for every head: attention by position alone to the nearest k positions.

    `measured` has what heads give on text, by k; `unexplained` heads have a grey panel.
    """
    rows, k = -(-len(near.alone) // 4), np.arange(1, near.alone.shape[1] + 1)
    size = 2 * COLUMN, max(1.15 * rows + 0.7, LEAST_HEIGHT)
    figure, axes = subplots(rows, 4, figsize=size, sharex=True, sharey=True, squeeze=False)
    for head, (axis, alone, low, high) in enumerate(zip(axes.flat, *near, strict=False)):
        axis.plot(k, k / k[-1], color="black", linewidth=0.6, linestyle=":", label="even")
        axis.fill_between(k, low, high, color=COLOURS[0], alpha=0.2, linewidth=0, label=band)
        axis.plot(k, alone, color=COLOURS[0], label="by position alone")
        for place, of_heads in (measured or {}).items():
            given = {"color": COLOURS[1], "markersize": 4, "label": "on text (the authors)"}
            axis.plot(place, of_heads[head], "o", **given)
        axis.set_title(f"head {head}" + ": not explained" * (head in unexplained), fontsize=7)
        if head in unexplained:
            axis.set_facecolor("0.9")
    axes[0, 0].set_xscale("log")
    axes[0, 0].set_ylim(-0.05, 1.05)
    for axis in axes.flat[len(near.alone) :]:
        axis.set_axis_off()
    figure.supxlabel("nearest positions $k$ (tokens, the query itself first)", fontsize=8)
    figure.supylabel("attention to them (1)", fontsize=8)
    handles = dict(zip(*axes[0, 0].get_legend_handles_labels()[::-1], strict=True))
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=4)
    return figure


@in_our_style()
def text_figure(check: TextCheck, terms: PositionTerms, head: int) -> Figure:
    """Fig. 4: attention from one position and by position alone; c by position, and c_paper."""
    figure, (left, middle, right) = subplots(1, 3, figsize=(3 * COLUMN, 2.4))
    j = np.arange(check.query + 1)
    left.fill_between(j, *check.spread[:, head], color=COLOURS[0], alpha=0.2, linewidth=0)
    left.plot(check.attention[head], color=COLOURS[0], label="on text")
    alone = terms.at_sigma(head, "mean").attention
    left.plot(alone, color=COLOURS[1], linestyle="--", label="from position alone")
    left.legend()
    left.set_xlabel(PREVIOUS)
    left.set_ylabel(rf"attention $\alpha_{{{check.query},j}}$")
    of_head = {name: c[head] for name, c in check.contributions.items()}
    over_heads = {name: c.mean(axis=0) for name, c in check.drawn.items()}
    panels = (
        (middle, of_head, r"$D_{KL}(P_i\,\|\,Q_i)$ (nats)"),
        (right, over_heads, r"$D_{KL}(Q_i\,\|\,P_i)\,/\,(i+1)$"),
    )
    for axis, by_term, label in panels:
        for k, name in enumerate(TERMS):
            c = by_term[name]
            if c.max() > 0:
                style = {"color": COLOURS[k], "linestyle": DASHES[k % 2]}
                axis.plot(np.arange(1, len(c)), c[1:], label=f"$c^{{{name}}}$", **style)
        axis.set_yscale("log")
        axis.set_xlabel("current position $i$ (tokens)")
        axis.set_ylabel(label)
    middle.legend(ncol=3)
    left.set_title(f"head {head}")
    middle.set_title(f"head {head}, eq. 18")
    right.set_title("all heads, as the authors draw it")
    return figure


@in_our_style()
def contributions_figure(check: TextCheck) -> Figure:
    """Every head's mean contributions as a map, heads by terms."""
    grid = np.stack([check.heads[name] for name in TERMS], axis=1)  # (H, 6)
    figure, axis = subplots(figsize=(COLUMN, 0.22 * len(grid) + 0.7))
    shown = axis.imshow(grid, cmap="cividis", aspect="auto", vmin=0)
    axis.set_xticks(range(len(TERMS)), [f"$c^{{{name}}}$" for name in TERMS])
    axis.set_yticks(range(len(grid)))
    axis.set_ylabel("head")
    for (row, column), value in np.ndenumerate(grid):
        colour = "black" if value > grid.max() / 2 else "white"
        axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=6, color=colour)
    axis.spines[:].set_visible(False)
    figure.colorbar(shown, label="nats")
    return figure


@in_our_style()
def kernel_figure(kernels: PositionKernels, rows: Sequence[int] = ()) -> Figure:
    """Mean score and band by distance, of some heads or those that owe most to it."""
    chosen = list(rows) or kernels.most_positional()
    columns = min(3, len(chosen))
    lines = -(-len(chosen) // columns)
    size = (COLUMN / 1.5 * columns + 0.4, 1.4 * lines + 0.7)
    figure, axes = subplots(lines, columns, figsize=size, squeeze=False, sharex=True)
    near = np.flatnonzero(np.abs(kernels.distances) <= kernels.distances[kernels.near[-1]])
    distances = kernels.distances[near]
    for axis, row in zip(axes.flat, chosen, strict=False):
        mean, band = kernels.mean[row, near], kernels.band[row, near]
        shade: dict[str, Any] = {"color": COLOURS[0], "alpha": 0.18, "linewidth": 0}
        axis.fill_between(distances, mean - band, mean + band, **shade)
        axis.plot(distances, mean, color=COLOURS[0])
        peak = int(mean.argmax())
        axis.plot(distances[peak], mean[peak], "o", color=COLOURS[1], markersize=3)
        axis.set_title(f"{kernels.name(row)}: highest at {distances[peak]}")
    for axis in axes.flat[len(chosen) :]:
        axis.set_axis_off()
    figure.supxlabel(r"distance $\delta = i - j$ (tokens)", fontsize=8)
    figure.supylabel("score before softmax", fontsize=8)
    return figure


@in_our_style()
def peaks_figure(kernels: PositionKernels) -> Figure:
    """Share of distance in the variance of scores, and the peak's distance, layers by heads."""
    layers = np.unique(kernels.layer)
    shape = len(layers), int(kernels.head.max()) + 1
    size = 2 * COLUMN, min(4.5, 0.14 * shape[0] + 1.2)
    figure, axes = subplots(1, 2, figsize=size, sharey=True)
    place = np.searchsorted(layers, kernels.layer), kernels.head
    share, peak = kernels.heads["position_share"], np.abs(kernels.heads["peak"])
    logarithmic = LogNorm(0.5, max(1, peak.max()))
    panels = (
        (share, "share of distance in the variance of scores (1)", Normalize(0, 1)),
        (np.maximum(peak, 0.5), "distance of the peak (tokens; 0 drawn as ½)", logarithmic),
    )
    for axis, (values, label, norm) in zip(axes, panels, strict=True):
        grid = np.full(shape, np.nan)
        grid[place] = values
        shown = axis.imshow(grid, cmap=BY_LAYER, aspect="auto", norm=norm, interpolation="nearest")
        index_along(axis, "head")
        axis.spines[:].set_visible(False)
        figure.colorbar(shown, ax=axis, label=label, location="top")
    layer_rows(axes[0], layers)
    return figure


@in_our_style()
def wavelengths_figure(kernels: PositionKernels) -> Figure:
    """Size, mean wave and spread of pairs of dimensions, by layer and octave of wavelength."""
    pairs, layers = kernels.pairs, np.unique(kernels.layer)
    turning = np.where(np.isfinite(pairs.wavelengths), pairs.wavelengths, np.nan)
    octave = np.floor(np.log2(turning))  # (h, P)
    octaves = np.arange(np.nanmin(octave), np.nanmax(octave) + 1)
    size = (2 * COLUMN, min(4.5, 0.09 * len(layers) + 1.5))
    figure, axes = subplots(1, 3, figsize=size, sharey=True)
    panels = (
        (pairs.usage, "size $|q|\\,|k|$"),
        (pairs.by_position, "by position"),
        (pairs.by_content, "by content"),
    )
    drawn = [
        _mean_over_heads(values, octave, octaves, kernels.layer, layers) for values, _ in panels
    ]
    seen = np.concatenate([grid[np.isfinite(grid) & (grid > 0)] for grid in drawn])
    norm = LogNorm(*np.quantile(seen, (0.01, 1.0))) if np.ptp(seen) > 0 else None
    for axis, grid, (_, label) in zip(axes, drawn, panels, strict=True):
        look: dict[str, Any] = {"cmap": BY_LAYER, "aspect": "auto", "interpolation": "nearest"}
        shown: Any = axis.imshow(grid, norm=norm, **look)
        for limit, colour in ((FAST, "white"), (kernels.context, "#D55E00")):
            if octaves[0] <= np.log2(limit) <= octaves[-1] + 1:
                place = np.log2(limit) - octaves[0] - 0.5
                axis.axvline(place, color=colour, linewidth=1, linestyle="--")
        ticks = range(0, len(octaves), max(1, -(-len(octaves) // 5)))
        axis.set_xticks(ticks, [f"$2^{{{octaves[tick]:.0f}}}$" for tick in ticks])
        axis.set_title(label)
        axis.spines[:].set_visible(False)
    figure.supxlabel("wavelength (tokens, by octave)", fontsize=8)
    layer_rows(axes[0], layers)
    figure.colorbar(shown, ax=axes, label="score, mean over heads")
    return figure


def _mean_over_heads(
    values: np.ndarray,
    octave: np.ndarray,
    octaves: np.ndarray,
    layer: np.ndarray,
    layers: np.ndarray,
) -> np.ndarray:
    """Root of the sum of squares over each octave's pairs, averaged over heads: (L, octaves)."""
    in_octave = [octave == number for number in octaves]  # (h, P) each
    summed = [np.where(pairs, values**2, 0).sum(axis=1) for pairs in in_octave]
    sizes = np.stack(summed, axis=1) ** 0.5  # (h, octaves)
    has_pairs = np.stack([pairs.any(axis=1) for pairs in in_octave], axis=1)
    sizes[~has_pairs] = np.nan
    return np.stack([sizes[layer == index].mean(axis=0) for index in layers])


@in_our_style()
def window_figure(kernels: PositionKernels, rows: Sequence[int] = ()) -> Figure:
    """Biases by rows and columns between two patches of a window, one panel per head."""
    assert kernels.windows is not None
    chosen = list(rows) or list(range(min(8, len(kernels.head))))
    columns = min(4, len(chosen))
    lines = -(-len(chosen) // columns)
    size = 1.7 * columns + 0.6, 1.7 * lines + 0.5
    figure, axes = subplots(lines, columns, figsize=size, squeeze=False)
    most = float(np.abs(kernels.windows[chosen]).max()) or 1.0
    height, width = ((side - 1) // 2 for side in kernels.windows.shape[1:])
    for axis, row in zip(axes.flat, chosen, strict=False):
        extent = (-width - 0.5, width + 0.5, height + 0.5, -height - 0.5)
        biases = kernels.windows[row]
        shown: Any = axis.imshow(biases, cmap="RdBu", vmin=-most, vmax=most, extent=extent)
        axis.set_title(kernels.name(row))
    for axis in axes.flat[len(chosen) :]:
        axis.set_axis_off()
    figure.supxlabel("columns from key to query", fontsize=8)
    figure.supylabel("rows from key to query", fontsize=8)
    figure.colorbar(shown, ax=axes, label="bias (score)")
    return figure

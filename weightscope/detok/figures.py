"""Figures of the detokenization analysis: AUROC by head, ROC curves, position terms, attention on text."""

from collections.abc import Collection, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from weightscope.detok.first_layer import TERMS
from weightscope.detok.heads import BigramAuroc, TokenRoc
from weightscope.detok.on_text import TextCheck
from weightscope.detok.positions import PositionTerms, spread_over_tokens
from weightscope.pages.style import COLOURS, COLUMN, DASHES, head_style, in_our_style, subplots

SIGMA_I = (("mean", "#0072B2"), ("minimum", "#009E73"), ("maximum", "#E69F00"))  # the paper's blue, green, orange
LAST = 30  # positions before the query that an inset shows, as the authors draw
LEAST_HEIGHT = 2.4  # inches, for the label next to one row of panels
PREVIOUS = "previous position $j$ (tokens)"


@in_our_style()
def auroc_figure(auroc: BigramAuroc) -> Figure:
    """Table 2 drawn, best head first: the mean as a dot over the spread of the single tokens."""
    table = auroc.ranked
    figure, axis = subplots(figsize=(COLUMN, 0.26 * len(table) + 0.7))
    for place, (head, mean) in enumerate(zip(table["head"], table["auroc"], strict=True)):
        low, quarter, three_quarters, high = np.nanpercentile(auroc.auroc[head], [5, 25, 75, 95])
        axis.plot([low, high], [place, place], color="0.75", linewidth=1)
        axis.plot([quarter, three_quarters], [place, place], color="0.55", linewidth=4, solid_capstyle="butt")
        axis.plot(mean, place, "o", color=head_style(head)["color"], markersize=5)
        axis.annotate(f"{mean:.2f}", (mean, place), (0, 5), textcoords="offset points", ha="center", fontsize=6)
    axis.axvline(0.5, color="black", linewidth=0.6, linestyle=":")
    axis.set_yticks(range(len(table)), [f"head {head}" for head in table["head"]])
    axis.set_ylim(len(table) - 0.5, -0.8)
    axis.set_xlim(0, 1)
    axis.set_xlabel("bigram AUROC of $T^{ee}$ (1)")
    return figure


@in_our_style()
def roc_figure(tokens: Sequence[TokenRoc], coloured: Collection[int]) -> Figure:
    """Fig. 2: ROC curves of some heads in colour with their areas, of the others in grey; one panel per token."""
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
        axis.set_title(f"“{token.text.replace('$', chr(92) + '$')}”")
        axis.set_xlabel("false positive rate (1)")
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    axes[0][0].set_ylabel("true positive rate (1)")
    return figure


@in_our_style()
def position_figure(terms: PositionTerms, head: int) -> Figure:
    """Fig. 3 for one head: T^p, T^pp at the query position, their sum, and the softmax of the sum.

    The band is the central 95 % over the tokens at j; the three lines take sigma_i at its mean, minimum and maximum.
    Without sigma the bare numerators of T^p and T^pp are drawn.
    """
    if terms.sigma is None:
        return _numerator_figure(terms, head)
    query, sigma = terms.query, terms.sigma
    figure, axes = subplots(2, 2, figsize=(2 * COLUMN, 4.2), sharex="col")
    (axis_p, axis_pp), (axis_sum, axis_softmax) = axes

    everywhere = spread_over_tokens(terms.p_numerator[head], sigma)
    _draw_t_p(axis_p, everywhere.mean, terms)
    axis_p.fill_between(np.arange(len(everywhere.mean)), everywhere.low, everywhere.high, color="0.8", linewidth=0)

    j = np.arange(query + 1)
    last = axis_softmax.inset_axes((0.12, 0.35, 0.5, 0.55))
    for which, colour in SIGMA_I:
        scaled = terms.at_sigma(head, which)
        for axis, curve in ((axis_pp, scaled.pp), (axis_sum, scaled.both)):
            axis.fill_between(j, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
            axis.plot(j, curve.mean, color=colour, label=rf"$\sigma_i$ {which}")
        axis_softmax.plot(j, scaled.attention, color=colour)
        last.plot(j[-LAST:], scaled.attention[-LAST:], color=colour)
    last.set_title(f"the last {len(j[-LAST:])}", fontsize=6)
    last.tick_params(labelsize=5)
    axis_pp.legend()
    axis_p.set_ylabel(r"$T^p_j$")
    axis_pp.set_ylabel(rf"$T^{{pp}}_{{{query},j}}$")
    axis_sum.set_ylabel(rf"$T^p_j + T^{{pp}}_{{{query},j}}$")
    axis_softmax.set_ylabel(r"softmax$_j$ of the sum $/\sqrt{d'}$")
    for axis in (axis_sum, axis_softmax):
        axis.set_xlabel(PREVIOUS)
    figure.suptitle(f"head {head}", fontsize=8)
    return figure


def _numerator_figure(terms: PositionTerms, head: int) -> Figure:
    figure, (axis_p, axis_pp) = subplots(1, 2, figsize=(2 * COLUMN, 2.2))
    _draw_t_p(axis_p, terms.p_numerator[head], terms)
    axis_pp.plot(terms.pp_numerator[head, : terms.query + 1], color="black")
    axis_p.set_ylabel(r"$b^{QK} p_j^\top$ (numerator of $T^p_j$)")
    axis_pp.set_ylabel(rf"$p_{{{terms.query}}} W^{{QK}} p_j^\top$ (numerator of $T^{{pp}}$)")
    for axis in (axis_p, axis_pp):
        axis.set_xlabel(PREVIOUS)
    figure.suptitle(f"head {head}", fontsize=8)
    return figure


def _draw_t_p(axis: Axes, curve: np.ndarray, terms: PositionTerms) -> None:
    """T^p at every position, with the query position and the undertrained ones marked."""
    axis.plot(curve, color="black")
    axis.axvline(terms.query, color="0.6", linewidth=0.6, linestyle=":")
    marks = np.unique([*terms.undertrained, *([len(curve) - 1] if terms.cliff else [])]).astype(int)
    if len(marks):
        axis.plot(marks, curve[marks], "x", color="#D55E00", markersize=5, label="undertrained")
        axis.legend()


@in_our_style()
def all_heads_figure(terms: PositionTerms) -> Figure:
    """T^p + T^pp of every head over j = 0 .. i, one small panel per head, each with its mean taken out."""
    curves = (terms.t_p + terms.t_pp)[:, : terms.query + 1]
    label = "numerators of $T^p + T^{pp}$"
    if terms.sigma is not None:
        curves, label = curves * terms.scale, r"$(T^p + T^{pp})/\sqrt{d'}$"
    rows = -(-len(curves) // 4)
    size = 2 * COLUMN, max(1.1 * rows + 0.4, LEAST_HEIGHT)
    figure, axes = subplots(rows, 4, figsize=size, sharex=True, sharey=True, squeeze=False)
    for head, axis in enumerate(axes.flat):
        if head >= len(curves):
            axis.set_axis_off()
            continue
        axis.axhline(0, color="0.8", linewidth=0.5)
        axis.plot(curves[head] - curves[head].mean(), **head_style(head))
        axis.text(0.04, 0.92, f"head {head}", transform=axis.transAxes, va="top", fontsize=7)
    figure.supxlabel(PREVIOUS, fontsize=8)
    figure.supylabel(f"{label}, centred", fontsize=8)
    return figure


@in_our_style()
def text_figure(check: TextCheck, terms: PositionTerms, head: int) -> Figure:
    """Fig. 4: attention from one position and what position alone predicts; c of each term by position, and c_paper."""
    figure, (left, middle, right) = subplots(1, 3, figsize=(3 * COLUMN, 2.4))
    j = np.arange(check.query + 1)
    left.fill_between(j, *check.spread[:, head], color=COLOURS[0], alpha=0.2, linewidth=0)
    left.plot(check.attention[head], color=COLOURS[0], label="on text")
    left.plot(terms.at_sigma(head, "mean").attention, color=COLOURS[1], linestyle="--", label="from position alone")
    left.legend()
    left.set_xlabel(PREVIOUS)
    left.set_ylabel(rf"attention $\alpha_{{{check.query},j}}$")
    panels = (
        (middle, {name: c[head] for name, c in check.contributions.items()}, r"$D_{KL}(P_i\,\|\,Q_i)$ (nats)"),
        (right, {name: c.mean(axis=0) for name, c in check.drawn.items()}, r"$D_{KL}(Q_i\,\|\,P_i)\,/\,(i+1)$"),
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

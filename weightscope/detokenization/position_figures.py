"""Figures of the position terms (detokenization paper, Fig. 3)."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from weightscope.detokenization.position_curves import softmax, spread_over_tokens
from weightscope.detokenization.positions import PositionTerms
from weightscope.pages.style import COLUMN, head_style, in_our_style, subplots

SIGMA_I = (("mean", "#0072B2"), ("minimum", "#009E73"), ("maximum", "#E69F00"))  # the paper's blue, green, orange


@in_our_style()
def position_figure(terms: PositionTerms, head: int) -> Figure:
    """Fig. 3 for one head: T^p, T^pp at the query position, their sum, and the softmax of the sum.

    The band is the central 95 % over the tokens at j; the three lines take sigma_i at its mean, minimum and maximum.
    Without sigma the bare numerators of T^p and T^pp are drawn.
    """
    if terms.sigma is None:
        return _numerators(terms, head)
    query, sigma = terms.query, terms.sigma
    figure, axes = subplots(2, 2, figsize=(2 * COLUMN, 4.2), sharex="col")
    (axis_p, axis_pp), (axis_sum, axis_softmax) = axes

    everywhere = spread_over_tokens(terms.p_numerator[head], sigma)
    _line(axis_p, everywhere.mean, "black")
    axis_p.fill_between(np.arange(len(everywhere.mean)), everywhere.low, everywhere.high, color="0.8", linewidth=0)
    axis_p.axvline(query, color="0.6", linewidth=0.6, linestyle=":")
    _mark(axis_p, terms.undertrained, everywhere.mean)

    t_p, t_pp = terms.p_numerator[head, : query + 1], terms.pp_numerator[head, : query + 1]
    for which, colour in SIGMA_I:
        at_query = getattr(sigma, which)[query]
        pp, both = (spread_over_tokens(t, sigma) for t in (t_pp / at_query, t_p + t_pp / at_query))
        for axis, curve in ((axis_pp, pp), (axis_sum, both)):
            axis.fill_between(np.arange(query + 1), curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
            _line(axis, curve.mean, colour, label=rf"$\sigma_i$ {which}")
        _line(axis_softmax, softmax(both.mean * terms.scale), colour)
    axis_pp.legend()
    axis_p.set_ylabel(r"$T^p_j$")
    axis_pp.set_ylabel(rf"$T^{{pp}}_{{{query},j}}$")
    axis_sum.set_ylabel(rf"$T^p_j + T^{{pp}}_{{{query},j}}$")
    axis_softmax.set_ylabel(r"softmax$_j$ of the sum $/\sqrt{d'}$")
    for axis in (axis_sum, axis_softmax):
        axis.set_xlabel("previous position $j$ (tokens)")
    figure.suptitle(f"head {head}", fontsize=8)
    return figure


def _numerators(terms: PositionTerms, head: int) -> Figure:
    figure, axes = subplots(1, 2, figsize=(2 * COLUMN, 2.2))
    _line(axes[0], terms.p_numerator[head], "black")
    axes[0].axvline(terms.query, color="0.6", linewidth=0.6, linestyle=":")
    _mark(axes[0], terms.undertrained, terms.p_numerator[head])
    _line(axes[1], terms.pp_numerator[head, : terms.query + 1], "black")
    axes[0].set_ylabel(r"$b^{QK} p_j^\top$ (numerator of $T^p_j$)")
    axes[1].set_ylabel(rf"$p_{{{terms.query}}} W^{{QK}} p_j^\top$ (numerator of $T^{{pp}}$)")
    for axis in axes:
        axis.set_xlabel("previous position $j$ (tokens)")
    figure.suptitle(f"head {head}", fontsize=8)
    return figure


@in_our_style()
def all_heads_figure(terms: PositionTerms) -> Figure:
    """T^p + T^pp of every head over j = 0 .. i, one small panel a head, each with its mean taken out."""
    n_heads = len(terms.t_p)
    columns = 4
    rows = -(-n_heads // columns)
    figure, axes = subplots(
        rows, columns, figsize=(2 * COLUMN, 1.1 * rows + 0.4), sharex=True, sharey=True, squeeze=False
    )
    if terms.sigma is None:
        label, curves = "numerators of $T^p + T^{pp}$", terms.p_numerator + terms.pp_numerator
    else:
        label, curves = r"$(T^p + T^{pp})/\sqrt{d'}$", (terms.t_p + terms.t_pp) * terms.scale
    for head, axis in enumerate(axes.flat):
        if head >= n_heads:
            axis.set_axis_off()
            continue
        curve = curves[head, : terms.query + 1]
        axis.axhline(0, color="0.8", linewidth=0.5)
        axis.plot(curve - curve.mean(), **head_style(head))
        axis.text(0.04, 0.92, f"head {head}", transform=axis.transAxes, va="top", fontsize=7)
    figure.supxlabel("previous position $j$ (tokens)", fontsize=8)
    figure.supylabel(f"{label}, centred", fontsize=8)
    return figure


def _line(axis: Axes, curve: np.ndarray, colour: str, label: str | None = None) -> None:
    axis.plot(np.arange(len(curve)), curve, color=colour, label=label)


def _mark(axis: Axes, undertrained: np.ndarray, curve: np.ndarray) -> None:
    if len(undertrained):
        axis.plot(undertrained, curve[undertrained], "x", color="#D55E00", markersize=5, label="undertrained")
        axis.legend()

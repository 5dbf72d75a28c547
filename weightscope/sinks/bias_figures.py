"""Figures of the sink-as-bias analysis (the paper's Figs 2 to 5 and its Table 1), and of how sinks were foreseen."""

from itertools import product

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from weightscope.pages.style import COLOURS, COLUMN, in_our_style, subplots
from weightscope.sinks.bias_run import SinkBias
from weightscope.sinks.patching import ABLATED, PATCHED, STARTS
from weightscope.sinks.prediction import PREDICTORS, SINKS_ABOVE

DIMENSIONS_SHOWN = 128  # more than a column's pixels can tell apart
BOUND = 95  # the percentile of |u_others| at which colours end
SINK, CONTEXT, OTHERS = COLOURS[0], COLOURS[1], COLOURS[7]
# Of each predictor: what its axis says, and its bar where that is shorter.
SHORT = {
    "qk_gap": (r"$\sigma_1\,/\,\sigma_2$ of $W_{QK}$",) * 2,
    "key_bias": (r"$b_{QK}$ of token 0, less others'", r"$b_{QK}$ of token 0"),
    "score_margin": ("score of token 0, less others'", "score of token 0"),
    "embedding_strength": ("attention to token 0, embeddings", "attention, embeddings"),
    "value_ratio": (r"$\|f(x_0)\|\,/$ mean $\|f(x_j)\|$", r"small $\|f(x_0)\|$"),
    "layer": ("layer index",) * 2,
}


@in_our_style()
def updates_figure(found: SinkBias) -> Figure:
    """Ratio, SpectralRatio and R of every layer (Figs 2, 3 and 4)."""
    figure, axes = subplots(1, 3, figsize=(2 * COLUMN, 2.2))
    layers = np.array(list(found.layers))

    def line(axis: Axes, name: str, colour: str, dash: str, label: str) -> None:
        values = [getattr(layer, name) for layer in found.layers.values()]
        marker = "o" if len(layers) < 6 else None
        axis.plot(layers, values, dash, color=colour, label=label, marker=marker, markersize=3)

    line(axes[0], "ratio", SINK, "-", "")
    axes[0].set_ylabel(r"E$\|u_{sink}\|$ / E$\|u_{others}\|$")
    axes[0].set_ylim(bottom=0)
    for axis, kind in ((axes[1], "spectral"), (axes[2], "variance")):
        line(axis, f"{kind}_sink", SINK, "-", r"$u_{sink}$")
        line(axis, f"{kind}_context", CONTEXT, "--", r"$u_{ctx}$, mean")
        line(axis, f"{kind}_others", OTHERS, ":", r"$u_{others}$, sum")
    axes[1].set_ylabel(r"SpectralRatio $\sigma_1^2\,/\,\Sigma\,\sigma_k^2$")
    axes[1].set_ylim(0, 1.02)
    axes[2].set_ylabel(r"$R = $ E$\|u-\mu\|^2$ / E$\|u\|^2$")
    axes[2].set_yscale("log")
    for axis in axes:
        axis.set_xlabel("layer")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    return figure


@in_our_style()
def picture_figure(found: SinkBias) -> Figure:
    """One layer's updates by position and dimension: the sink's, the others', and all of the output (Fig. 5)."""
    sink = found.shown.sink.rows()
    parts = {
        r"from the sink, $u_{sink,i}$": sink,
        r"from all others, $u_{others,i}$": found.shown.others,
        r"attention's output, $y_i$": sink + found.shown.others + found.shown.bias,
    }
    bound = float(np.percentile(np.abs(found.shown.others[1:]), BOUND))
    shades = colormaps["RdBu_r"].resampled(15)  # few, so that a picture of noise takes kilobytes and not megabytes
    figure, axes = subplots(1, 3, figsize=(2 * COLUMN, 2.6), sharey=True)
    for axis, (title, rows) in zip(axes, parts.items(), strict=True):
        image = axis.imshow(
            rows[:, :DIMENSIONS_SHOWN], aspect="auto", cmap=shades, vmin=-bound, vmax=bound, interpolation="nearest"
        )
        axis.set_title(title)
        axis.set_xlabel("dimension of the stream")
    axes[0].set_ylabel("position $i$ (tokens)")
    figure.colorbar(image, ax=axes, pad=0.01, extend="both")
    return figure


@in_our_style()
def patching_figure(found: SinkBias) -> Figure:
    """Change in perplexity for each range of layers, with its interval (Table 1)."""
    figure, axis = subplots(figsize=(1.4 * COLUMN, 2.4))
    ranges = list(dict.fromkeys(row.layers for row in found.patching.rows))
    kinds = list(product(STARTS, ((PATCHED, SINK, "o"), (ABLATED, CONTEXT, "s"))))
    for shift, (start, (how, colour, marker)) in zip(np.linspace(-0.24, 0.24, len(kinds)), kinds, strict=True):
        rows = [row for row in found.patching.rows if (row.intervention, row.start) == (how, start)]
        x = [ranges.index(row.layers) + shift for row in rows]
        change = np.array([row.change for row in rows])
        intervals = np.abs(np.array([row.interval for row in rows]).T - change)
        label = how if start == 0 else f"{how}, position 0 left alone"
        filling = colour if start == 0 else "white"
        axis.errorbar(
            x, change, intervals, fmt=marker, color=colour, markerfacecolor=filling, label=label, markersize=4,
            capsize=2, linewidth=0.8,
        )  # fmt: skip
    if max(abs(row.change) for row in found.patching.rows) > 20:
        axis.set_yscale("symlog", linthresh=1, linscale=0.6)
    axis.axhline(0, color="black", linewidth=0.6)
    axis.set_xticks(range(len(ranges)), [f"{name}\nlayers" for name in ranges])
    axis.set_xlim(-0.5, len(ranges) - 0.5)
    axis.set_ylabel(f"change in perplexity\n(as it is: {found.patching.baseline:.2f})")
    figure.legend(loc="outside upper center", ncols=2)
    return figure


@in_our_style()
def heads_figure(found: SinkBias) -> Figure:
    """Where the sinks are, and how well each reading of the weights foretold them."""
    figure, axes = subplots(1, 3, figsize=(2 * COLUMN, 2.6), width_ratios=(1, 1, 0.8))
    layers, strength = list(found.layers), found.strength
    image = axes[0].imshow(strength, aspect="auto", cmap="cividis", vmin=0, vmax=1, interpolation="nearest")
    step = max(1, -(-len(layers) // 8))
    axes[0].set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axes[0].set_xlabel("head")
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set_ylabel("layer")
    axes[0].set_title("attention to token 0, measured")
    figure.colorbar(image, ax=axes[0], pad=0.02)

    readings = [each for each in PREDICTORS if each.name != "layer"]
    known = [each for each in readings if np.isfinite(found.aurocs[each.name])]
    best = max(known or readings, key=lambda each: found.aurocs[each.name])
    values = found.predicted[best.name]
    depth = np.broadcast_to(np.arange(len(layers))[:, None], values.shape)
    points = axes[1].scatter(values, strength, c=depth, cmap="viridis", s=8, linewidths=0)
    if values.min() > 0 and values.max() > 20 * values.min():
        axes[1].set_xscale("log")
    axes[1].axhline(SINKS_ABOVE, color="black", linewidth=0.6, linestyle=":")
    axes[1].set_xlabel(f"{SHORT[best.name][0]},\nfrom weights alone")
    axes[1].set_ylabel("attention to token 0, measured")
    figure.colorbar(points, ax=axes[1], pad=0.02, label="layer").ax.yaxis.set_major_locator(MaxNLocator(integer=True))

    y = np.arange(len(PREDICTORS))[::-1]
    values = np.array([found.aurocs[each.name] for each in PREDICTORS])
    colours = [OTHERS if each.name == "layer" else SINK for each in PREDICTORS]
    axes[2].barh(y, np.nan_to_num(values - 0.5), left=0.5, color=colours, height=0.6)
    for at, value in zip(y, values, strict=True):
        axes[2].text(1.02, at, "none" if np.isnan(value) else f"{value:.2f}", va="center", fontsize=7)
    axes[2].set_yticks(y, [SHORT[each.name][1] for each in PREDICTORS])
    axes[2].axvline(0.5, color="black", linewidth=0.6)
    axes[2].set_xlim(0, 1)
    axes[2].set_xlabel("AUROC")
    return figure

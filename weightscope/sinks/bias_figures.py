"""Figures of sinks as biases: Figs 2 to 5 and Table 1 of the sink-as-bias paper, and predictions of sinks."""

from collections.abc import Sequence
from itertools import product, zip_longest

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from weightscope.pages.style import (
    BY_LAYER,
    COLOURS,
    COLUMN,
    MARKERS,
    in_our_style,
    layer_bar,
    layer_rows,
    layers_along,
    plain,
    subplots,
    whole_numbers,
)
from weightscope.sinks.bias import ABLATED, NONE, PATCHED, READINGS, SINKS_ABOVE, STARTS, SinkBias

MEASURES = ("ratio", "spectral_sink", "variance_sink_mu")  # of u_sink, eqs 3, 5 and 6
# Of each, what the paper reports of most layers of its models (sections 3.1 to 3.3).
IN_THE_PAPER = {"ratio": (0.2, 0.5), "spectral_sink": (0.8, 1.0), "variance_sink_mu": (1e-2, 1e-1)}
DIMENSIONS_SHOWN = 128  # more than a column's pixels can tell apart
BOUND = 95  # the percentile of |u_others| at which colours end
LARGE_CHANGE = 20  # in perplexity: an axis that goes beyond it is logarithmic
SINK, CONTEXT, OTHERS = COLOURS[0], COLOURS[1], COLOURS[7]
BAND = "#DDDDDD"
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
def updates_figure(bias: SinkBias) -> Figure:
    """Ratio, SpectralRatio and R of every layer (Figs 2, 3 and 4)."""
    figure, axes = subplots(1, 3, figsize=(2 * COLUMN, 2.2))
    layers = bias.layers
    marker = "o" if len(layers) < 6 else None

    def line(axis: Axes, name: str, colour: str, dash: str, label: str | None = None) -> None:
        axis.plot(layers["layer"], layers[name], dash, color=colour, label=label, marker=marker, markersize=3)

    for axis, measure, of_sink in zip(axes, ("ratio", "spectral", "variance"), MEASURES, strict=True):
        band = (layers[f"{of_sink}_low"], layers[f"{of_sink}_high"])
        axis.fill_between(layers["layer"], *band, color=SINK, alpha=0.2, linewidth=0)
        line(axis, of_sink, SINK, "-", r"$u_{sink}$")
        if measure == "ratio":
            continue
        line(axis, f"{measure}_context", CONTEXT, "--", r"$u_{ctx}$, mean")
        line(axis, f"{measure}_others", OTHERS, ":", r"$u_{others}$, sum")
    line(axes[2], "variance_sink", SINK, "-.", r"$u_{sink}$, $\mu$ their own mean")
    _measures_along(axes)
    figure.legend(*axes[2].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


@in_our_style()
def side_by_side_figure(models: Sequence[SinkBias]) -> Figure:
    """Ratio, SpectralRatio and R of several models' layers in one figure, as the paper's Figs 2, 3 and 4 are."""
    figure, axes = subplots(1, 3, figsize=(2 * COLUMN, 2.7))
    for axis, (low, high) in zip(axes, IN_THE_PAPER.values(), strict=True):
        axis.axhspan(low, high, color=BAND, linewidth=0)
    for place, bias in enumerate(models):
        layers, colour = bias.layers, COLOURS[place % len(COLOURS)]
        marker = MARKERS[place % len(MARKERS)]
        for axis, measure, of_sink in zip(axes, ("ratio", "spectral", "variance"), MEASURES, strict=True):
            axis.plot(layers["layer"], layers[of_sink], color=colour, marker=marker, markersize=2.5)
            if measure != "ratio":
                axis.plot(layers["layer"], layers[f"{measure}_context"], "--", color=colour, linewidth=0.8)
    _measures_along(axes)
    names = [
        Line2D([], [], color=COLOURS[place % len(COLOURS)], marker=MARKERS[place % len(MARKERS)], markersize=2.5,
               label=plain(bias.model.removesuffix(".gguf")))
        for place, bias in enumerate(models)
    ]  # fmt: skip
    drawn = [
        Line2D([], [], color="black", label=r"$u_{sink}$, from token 0"),
        Line2D([], [], color="black", linestyle="--", linewidth=0.8, label=r"$u_{ctx}$, mean of the others"),
        Patch(color=BAND, label="paper: most layers of its five models"),
    ]
    rows = [entry for pair in zip_longest(names, drawn) for entry in pair if entry is not None]
    figure.legend(handles=rows, loc="outside upper center", ncols=max(len(names), len(drawn)))
    return figure


def _measures_along(axes: Sequence[Axes]) -> None:
    """Axes of Ratio, SpectralRatio and R by layer."""
    axes[0].set_ylabel(r"E$\|u_{sink}\|$ / E$\|u_{others}\|$")
    axes[0].set_ylim(bottom=0)
    axes[1].set_ylabel(r"SpectralRatio $\sigma_1^2\,/\,\Sigma\,\sigma_k^2$")
    axes[1].set_ylim(0, 1.02)
    axes[2].set_ylabel(r"$R = $ E$\|u-\mu\|^2$ / E$\|u\|^2$")
    axes[2].set_yscale("log")
    for axis in axes:
        layers_along(axis)


@in_our_style()
def picture_figure(bias: SinkBias) -> Figure:
    """One layer's updates by position and dimension: the sink's, the others', and all of the output (Fig. 5)."""
    sink, rest = bias.shown.sink.rows(), bias.shown.others
    parts = {
        r"from the sink, $u_{sink,i}$": sink,
        r"from all others, $u_{others,i}$": rest,
        r"attention's output, $y_i$": sink + rest + bias.shown.bias,
    }
    bound = float(np.percentile(np.abs(rest[1:]), BOUND))
    shades = colormaps["RdBu_r"].resampled(15)  # few, so that a picture of noise takes kilobytes and not megabytes
    figure, axes = subplots(1, 3, figsize=(2 * COLUMN, 2.6), sharey=True)
    for axis, (title, rows) in zip(axes, parts.items(), strict=True):
        image = axis.imshow(
            rows[:, :DIMENSIONS_SHOWN], aspect="auto", cmap=shades, vmin=-bound, vmax=bound, interpolation="nearest"
        )
        axis.set_title(title)
        axis.set_xlabel("dimension of the stream")
    axes[0].set_ylabel("position $i$ (tokens)")
    figure.colorbar(image, ax=axes, pad=0.01, extend="both", label="coordinate of the update (1)")
    return figure


@in_our_style()
def patching_figure(bias: SinkBias) -> Figure:
    """Change in perplexity for each range of layers, with its interval (Table 1)."""
    figure, axis = subplots(figsize=(1.4 * COLUMN, 2.4))
    table = bias.patching.where(bias.patching["intervention"] != NONE)
    ranges = list(dict.fromkeys(table["layers"]))
    series = list(product(STARTS, ((PATCHED, SINK, "o"), (ABLATED, CONTEXT, "s"))))
    for shift, (start, (how, colour, marker)) in zip(np.linspace(-0.24, 0.24, len(series)), series, strict=True):
        rows = table.where((table["intervention"] == how) & (table["first_position"] == start))
        x = [ranges.index(layers) + shift for layers in rows["layers"]]
        lengths = np.abs(np.stack([rows["change_low"], rows["change_high"]]) - rows["change"])
        axis.errorbar(
            x, rows["change"], lengths, fmt=marker, color=colour, markerfacecolor=colour if start == 0 else "white",
            label=how if start == 0 else f"{how}, position 0 as it is", markersize=4, capsize=2, linewidth=0.8,
        )  # fmt: skip
    if np.abs(table["change"]).max() > LARGE_CHANGE:
        axis.set_yscale("symlog", linthresh=1, linscale=0.6)
    axis.axhline(0, color="black", linewidth=0.6)
    axis.set_xticks(range(len(ranges)), [f"{name}\nlayers" for name in ranges])
    axis.set_xlim(-0.5, len(ranges) - 0.5)
    axis.set_ylabel(f"change in perplexity\n(as it is: {bias.baseline:.2f})")
    figure.legend(loc="outside upper center", ncols=2)
    return figure


@in_our_style()
def prediction_figure(bias: SinkBias) -> Figure:
    """Where the sinks are, and how well each reading of the weights foretold them."""
    figure, (measured, best, aurocs) = subplots(1, 3, figsize=(2 * COLUMN, 2.6), width_ratios=(1, 1, 0.8))
    layers, strength = bias.layers["layer"], bias.updates.strength
    image = measured.imshow(strength, aspect="auto", cmap="cividis", vmin=0, vmax=1, interpolation="nearest")
    layer_rows(measured, layers)
    measured.set_xlabel("head")
    measured.xaxis.set_major_locator(whole_numbers())
    measured.set_title("attention to token 0, measured")
    figure.colorbar(image, ax=measured, pad=0.02)

    auroc = dict(zip(bias.aurocs["name"], bias.aurocs["auroc"], strict=True))
    name = max((each.name for each in READINGS), key=lambda name: np.nan_to_num(auroc[name], nan=-1.0))
    values = bias.heads[name]
    best.scatter(values, strength.ravel(), c=bias.heads["layer"], cmap=BY_LAYER, s=8, linewidths=0)
    if values.min() > 0 and values.max() > 20 * values.min():
        best.set_xscale("log")
    best.axhline(SINKS_ABOVE, color="black", linewidth=0.6, linestyle=":")
    best.set_xlabel(f"{SHORT[name][0]},\nfrom weights alone")
    best.set_ylabel("attention to token 0, measured")
    layer_bar(figure, best, layers)

    y, areas = np.arange(len(auroc))[::-1], np.array(list(auroc.values()))
    colours = [OTHERS if name == "layer" else SINK for name in auroc]
    aurocs.barh(y, np.nan_to_num(areas - 0.5), left=0.5, color=colours, height=0.6)
    for height, value in zip(y, areas, strict=True):
        aurocs.text(1.02, height, "none" if np.isnan(value) else f"{value:.2f}", va="center", fontsize=7)
    aurocs.set_yticks(y, [SHORT[name][1] for name in auroc])
    aurocs.axvline(0.5, color="black", linewidth=0.6)
    aurocs.set_xlim(0, 1)
    aurocs.set_xlabel("AUROC")
    return figure

"""Figures of attention sinks.

First Figs 2 to 5 and Table 1 of the sink-as-bias paper, and its predictions; then Figs 2B, 4, 5, 6,
8 and 14 of the two-sink-mechanisms paper, and its lemmas.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from weightscope.heads.sinks.bias import (
    ABLATED,
    NONE,
    PATCHED,
    READINGS,
    SINKS_ABOVE,
    STARTS,
    SinkBias,
)
from weightscope.heads.sinks.mechanisms import MECHANISM_NAMES, SinkMechanisms
from weightscope.model.metrics.sinks import BROADCAST_RANK, BROADCAST_RATIO, MECHANISMS, NOP_RATIO
from weightscope.model.metrics.spectra import spectral_gap
from weightscope.report.pages.style import (
    BY_LAYER,
    COLOURS,
    COLUMN,
    DASHES,
    ON_GREY,
    in_our_style,
    index_along,
    layer_bar,
    layer_rows,
    layers_along,
    subplots,
    whole_numbers,
)

# Sinks as biases

MEASURES = ("ratio", "spectral_sink", "variance_sink_mu")  # columns for u_sink, eqs 3, 5 and 6
DIMENSIONS_SHOWN = 128  # more than a column's pixels can tell apart
BOUND = 95  # the percentile of |u_others| at which colours end
LARGE_CHANGE = 20  # change in perplexity beyond which an axis is logarithmic
SINK, CONTEXT, OTHERS = COLOURS[0], COLOURS[1], COLOURS[7]
IMAGE: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest"}
# Labels of each predictor's axis and of its bar
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
        style: dict[str, Any] = {"color": colour, "label": label, "marker": marker}
        axis.plot(layers["layer"], layers[name], dash, markersize=3, **style)

    panels = zip(axes, ("ratio", "spectral", "variance"), MEASURES, strict=True)
    for axis, measure, of_sink in panels:
        band = (layers[f"{of_sink}_low"], layers[f"{of_sink}_high"])
        axis.fill_between(layers["layer"], *band, color=SINK, alpha=0.2, linewidth=0)
        line(axis, of_sink, SINK, "-", r"$u_{sink}$")
        if measure == "ratio":
            continue
        line(axis, f"{measure}_context", CONTEXT, "--", r"$u_{ctx}$, mean")
        line(axis, f"{measure}_others", OTHERS, ":", r"$u_{others}$, sum")
    line(axes[2], "variance_sink", SINK, "-.", r"$u_{sink}$, $\mu$ their own mean")
    measures_along(axes)
    figure.legend(*axes[2].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


def measures_along(axes: Sequence[Axes]) -> None:
    """Label the axes of Ratio, SpectralRatio and R by layer."""
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
    """One layer's updates by position and dimension: the sink's, the others', and all (Fig. 5)."""
    sink, rest = bias.pictured.sink.rows(), bias.pictured.others
    parts = {
        r"from the sink, $u_{sink,i}$": sink,
        r"from all others, $u_{others,i}$": rest,
        r"attention's output, $y_i$": sink + rest + bias.pictured.bias,
    }
    bound = float(np.percentile(np.abs(rest[1:]), BOUND))
    # Few shades, so that a picture of noise takes kilobytes and not megabytes
    shades = colormaps["RdBu_r"].resampled(15)
    figure, axes = subplots(1, 3, figsize=(2 * COLUMN, 2.6), sharey=True)
    for axis, (title, rows) in zip(axes, parts.items(), strict=True):
        shown = rows[:, :DIMENSIONS_SHOWN]
        image = axis.imshow(shown, cmap=shades, vmin=-bound, vmax=bound, **IMAGE)
        axis.set_title(title)
        axis.set_xlabel(f"dimension of the stream\n(first {shown.shape[1]} of {rows.shape[1]})")
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
    shifts = np.linspace(-0.24, 0.24, len(series))
    for shift, (start, (how, colour, marker)) in zip(shifts, series, strict=True):
        rows = table.where((table["intervention"] == how) & (table["first_position"] == start))
        x = [ranges.index(layers) + shift for layers in rows["layers"]]
        lengths = np.abs(np.stack([rows["change_low"], rows["change_high"]]) - rows["change"])
        axis.errorbar(
            x,
            rows["change"],
            lengths,
            fmt=marker,
            color=colour,
            markerfacecolor=colour if start == 0 else "white",
            label=how if start == 0 else f"{how}, position 0 as it is",
            markersize=4,
            capsize=2,
            linewidth=0.8,
        )
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
    """Strength of every head's sink, and the AUROC of each reading of the weights for it."""
    size, ratios = (2 * COLUMN, 2.6), (1, 1, 0.8)
    figure, (measured, best, aurocs) = subplots(1, 3, figsize=size, width_ratios=ratios)
    layers, strength = bias.layers["layer"], bias.updates.strength
    image = measured.imshow(strength, cmap="cividis", vmin=0, vmax=1, **IMAGE)
    layer_rows(measured, layers)
    measured.set_xlabel("head")
    measured.xaxis.set_major_locator(whole_numbers())
    measured.set_title("attention to token 0, measured")
    figure.colorbar(image, ax=measured, pad=0.02)

    auroc = dict(zip(bias.aurocs["name"], bias.aurocs["auroc"], strict=True))
    readings = [reading.name for reading in READINGS]
    name = max(readings, key=lambda name: np.nan_to_num(auroc[name], nan=-1.0))
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
        label = "none" if np.isnan(value) else f"{value:.2f}"
        aurocs.text(1.02, height, label, va="center", fontsize=7)
    aurocs.set_yticks(y, [SHORT[name][1] for name in auroc])
    aurocs.axvline(0.5, color="black", linewidth=0.6)
    aurocs.set_xlim(0, 1)
    aurocs.set_xlabel("AUROC")
    return figure


# Mechanisms of sinks

MECHANISM_COLOURS = dict(zip(MECHANISMS, (COLOURS[0], COLOURS[1], COLOURS[4]), strict=True))
NO_SINK = "0.9"
BOUNDS_SHOWN = 1e4  # ratio of the largest bound to the least one drawn; lesser ones say nothing
# The same colour for tokens of the same role in images and texts.
KIND_COLOURS = {
    "CLS": COLOURS[0],
    "first": COLOURS[0],
    "register": COLOURS[3],
    "special": COLOURS[3],
    "patch": COLOURS[1],
    "other": COLOURS[1],
    "punctuation": COLOURS[2],
}
KIND_MARKERS = ("o", "s", "^", "D")
WIDE = 4  # a range of more than this factor is drawn on a logarithmic axis
VAST = 1000  # beyond this factor, only powers of ten are labelled
DOT: dict[str, Any] = {"s": 5, "linewidths": 0, "alpha": 0.6, "rasterized": True}


@in_our_style()
def sink_token_figure(sinks: SinkMechanisms) -> Figure:
    """Fig. 4: kinds of tokens by attention received, strongest sinks, and sink events, by layer."""
    figure, axes = subplots(1, 3, figsize=(2 * COLUMN, 2.1), sharey=True, sharex=True)
    is_kind = [sinks.kind == kind for kind in range(len(sinks.kinds))]
    strongest = np.stack(is_kind, axis=-1)  # (I, L, H, K)
    panels = (
        ("attention inflow", sinks.inflow),
        ("strongest key of a head", strongest),
        ("sink events", strongest & sinks.event[..., None]),
    )
    for axis, (title, shares) in zip(axes, panels, strict=True):
        for kind, name in _kinds(sinks):
            style = {
                "color": KIND_COLOURS[name],
                "linestyle": DASHES[kind % len(DASHES)],
                "marker": KIND_MARKERS[kind],
            }
            share = shares[..., kind].mean(axis=(0, 2))  # (L,)
            axis.plot(sinks.layer_indices, share, markersize=2.5, label=name, **style)
        axis.set_title(title)
        layers_along(axis)
    axes[0].set_ylim(-0.03, 1.03)
    axes[0].set_ylabel("share (1)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    return figure


@in_our_style()
def head_map_figure(sinks: SinkMechanisms) -> Figure:
    """Fig. 5: each head's sink strength and sink events, and the mechanism of sink heads.

    Without a sink head there is no third panel.
    """
    n_layers, n_heads = sinks.sink_heads.shape
    height = float(np.clip(2.4 * n_layers / n_heads, 1.6, 4.0)) + 0.3
    panels = 3 if sinks.sink_heads.any() else 2
    size = 2 * COLUMN * panels / 3, height
    figure, axes = subplots(1, panels, figsize=size, sharex=True, sharey=True)
    strength, events = sinks.strength.mean(axis=0), sinks.event.mean(axis=0)  # (L, H)
    for axis, values, title in (
        (axes[0], strength, r"sink strength $\alpha_s$"),
        (axes[1], events, "inputs with a sink event"),
    ):
        image = axis.imshow(values, cmap="cividis", norm=Normalize(0, 1), **IMAGE)
        axis.set_title(title)
    bar = figure.colorbar(image, ax=axes[:2], pad=0.02)
    bar.set_label("mean, or share (1)")

    counts = np.stack([(sinks.mechanism == name).sum(axis=0) for name in MECHANISMS])  # (3, L, H)
    code = np.where(sinks.sink_heads, 1 + counts.argmax(axis=0), 0)
    colours = (NO_SINK, *MECHANISM_COLOURS.values())
    for axis in axes[2:]:
        axis.imshow(code, cmap=ListedColormap(colours), norm=Normalize(0, 3), **IMAGE)
        axis.set_title("mechanism of sink heads")
        labels = zip(colours, ("no sink head", *MECHANISM_NAMES.values()), strict=True)
        patches = [Patch(color=colour, label=name) for colour, name in labels]
        axis.legend(handles=patches, loc="center left", bbox_to_anchor=(1.02, 0.5))
    layer_rows(axes[0], sinks.layer_indices)
    for axis in axes:
        index_along(axis, "head")
    return figure


@in_our_style()
def plane_figure(sinks: SinkMechanisms) -> Figure:
    """Fig. 6: value-norm ratio and stable rank of every sink, by mechanism and by depth."""
    figure, axes = subplots(1, 2, figsize=(2 * COLUMN, 2.6), sharex=True, sharey=True)
    ratio, rank, event, mechanism = sinks.ratio, sinks.rank, sinks.event, sinks.mechanism
    none: dict[str, Any] = {"color": "0.85", "zorder": 1, "label": "no sink event", **DOT}
    for axis in axes:
        axis.scatter(ratio[~event], rank[~event], **none)
        _rule(axis)
    for name in MECHANISMS:
        chosen, colour = mechanism == name, MECHANISM_COLOURS[name]
        label = f"{MECHANISM_NAMES[name]} ({chosen.sum():,})"
        axes[0].scatter(ratio[chosen], rank[chosen], color=colour, zorder=2, label=label, **DOT)
    depth = np.broadcast_to(sinks.layer_indices[:, None], event.shape)
    first, last = sinks.layer_indices[[0, -1]]
    norm = Normalize(first, max(last, first + 1))
    for kind, name in enumerate(sinks.kinds):
        chosen = event & (sinks.kind == kind)
        style = {
            "c": depth[chosen],
            "cmap": ON_GREY,
            "norm": norm,
            "marker": KIND_MARKERS[kind],
            "zorder": 2,
            **DOT,
        }
        axes[1].scatter(ratio[chosen], rank[chosen], **style)
        if chosen.any():
            axes[1].scatter([], [], color="0.3", marker=KIND_MARKERS[kind], s=6, label=f"at {name}")
    _fit(axes[0], ratio, rank)
    axes[0].set_ylabel("stable rank of $Au$ (1)")
    for place, axis, skipped in (
        ("outside lower left", axes[0], 0),
        ("outside lower right", axes[1], 1),
    ):
        handles, labels = (every[skipped:] for every in axis.get_legend_handles_labels())
        if handles:
            _opaque_legend(figure, place, handles, labels, handletextpad=0.2, columnspacing=1.0)
    layer_bar(figure, axes[1], sinks.layer_indices, colours=ON_GREY)
    return figure


def _rule(axis: Axes) -> None:
    """Draw the bounds between the mechanisms on the plane of ratio and rank."""
    style: dict[str, Any] = {"color": "black", "linewidth": 0.6, "linestyle": ":"}
    axis.axvline(NOP_RATIO, **style)
    corner = [BROADCAST_RATIO, BROADCAST_RATIO, 1e9], [1e-9, BROADCAST_RANK, BROADCAST_RANK]
    axis.plot(*corner, **style)
    axis.set_xlabel(r"value-norm ratio $|u_s|\,/\,\overline{|u_j|}$ (1)")


def _fit(axis: Axes, ratio: np.ndarray, rank: np.ndarray) -> None:
    """Fit logarithmic axes to the points and the rule's lines."""
    axis.set_xscale("log")
    axis.set_yscale("log")
    known = np.isfinite(ratio) & np.isfinite(rank) & (ratio > 0)
    x = np.append(ratio[known], (NOP_RATIO, BROADCAST_RATIO))
    y = np.append(rank[known], (1.0, BROADCAST_RANK))
    axis.set_xlim(x.min() / 1.2, x.max() * 1.2)
    axis.set_ylim(0.95, y.max() * 1.1)
    for side in (axis.xaxis, axis.yaxis):
        _plain_numbers(side)


@in_our_style()
def spectrum_figure(sinks: SinkMechanisms) -> Figure:
    """Fig. 2B on a real model: spectra of W_QK by group of heads, and Lemma 2's two gates.

    One gate is a spike, sigma_1 far above sigma_2; the other is a sink of large norm, if no norm
    comes before W_QK.
    """
    figure, (axis, spike, norm) = subplots(1, 3, figsize=(2 * COLUMN, 2.1))
    largest = sinks.qk_singular_values[..., :1]
    spectra = sinks.qk_singular_values / np.where(largest > 0, largest, np.nan)  # (L, H, r)
    gap, norm_ratio = spectral_gap(sinks.qk_singular_values), np.median(sinks.norm_ratio, axis=0)
    strength = sinks.strength.mean(axis=0)
    for name, chosen, colour, dash in _head_groups(sinks):
        index = np.arange(1, spectra.shape[-1] + 1)
        low, middle, high = np.nanpercentile(spectra[chosen], [25, 50, 75], axis=0)
        axis.fill_between(index, low, high, color=colour, alpha=0.2, linewidth=0)
        axis.plot(index, middle, color=colour, linestyle=dash, label=f"{name} ({chosen.sum()})")
        for panel, values in ((spike, gap), (norm, norm_ratio)):
            panel.plot(strength[chosen], values[chosen], ".", color=colour, markersize=4, alpha=0.8)
    index_along(axis, "index $i$")
    axis.set_ylabel(r"$\sigma_i(W_{QK})\,/\,\sigma_1$ (1)")
    axis.set_ylim(0, 1.03)
    axis.legend()
    for panel, values in ((spike, gap), (norm, norm_ratio)):
        if np.nanmax(values) > WIDE * np.nanmin(values):
            panel.set_yscale("log")
            _plain_numbers(panel.yaxis)
        panel.set_xlabel(r"sink strength $\alpha_s$ (1)")
    spike.set_ylabel(r"$\sigma_1/\sigma_2$ of $W_{QK}$ (1)")
    norm.set_ylabel(r"$|x_s|\,/\,\overline{|x_j|}$ (1)")
    return figure


@in_our_style()
def similarity_figure(sinks: SinkMechanisms) -> Figure:
    """Lemma 4: likeness of tokens around each layer's attention, by cosine and variance (eq. 17).

    The third panel shows how much attention turns each token.
    """
    figure, (between, variance, through) = subplots(1, 3, figsize=(2 * COLUMN, 2.1), sharex=True)
    for axis, before, after in (
        (between, sinks.between_before, sinks.between_after),
        (variance, sinks.variance_before, sinks.variance_after),
    ):
        _spread(axis, sinks.layer_indices, before, "0.4", "--", "entering the layer")
        _spread(axis, sinks.layer_indices, after, COLOURS[1], "-", "attention's output added")
    _spread(through, sinks.layer_indices, sinks.through, COLOURS[0], "-", None)
    between.set_ylabel("cosine of two tokens (1)")
    variance.set_ylabel(r"variance of tokens $V$")
    variance.set_yscale("log")
    through.set_ylabel("cosine of a token\nwith itself (1)")
    through.set_ylim(top=1.02)
    figure.legend(*between.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    for axis in (between, variance, through):
        layers_along(axis)
    return figure


@in_our_style()
def norms_figure(sinks: SinkMechanisms) -> Figure:
    """Fig. 14: norms of each kind of token as they enter each layer."""
    figure, axes = subplots(1, 2, figsize=(2 * COLUMN, 2.1), sharex=True, sharey=True)
    for axis, values, title in (
        (axes[0], sinks.norm_mean, "mean of a kind"),
        (axes[1], sinks.norm_largest, "largest of a kind"),
    ):
        for kind, name in _kinds(sinks):
            of_kind = values[~np.isnan(values[:, 0, kind])][..., kind]  # (inputs, L)
            colour, dash = KIND_COLOURS[name], DASHES[kind % 4]
            _spread(axis, sinks.layer_indices, of_kind, colour, dash, name)
        axis.set_title(title)
        layers_along(axis)
    axes[0].set_yscale("log")
    axes[0].set_ylabel(r"norm $|x|$ of a token")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    return figure


@in_our_style()
def register_figure(sinks: SinkMechanisms) -> Figure:
    """Fig. 8, for a model with registers: their attention by layer, and the sinks on them.

    Without a sink event on a register there is no second panel.
    """
    on_register = sinks.kind == sinks.kinds.index("register")
    panels = 2 if (on_register & sinks.event).any() else 1
    size = panels * COLUMN, 2.5
    figure, ((inflow, *planes),) = subplots(1, panels, figsize=size, squeeze=False)
    shares = sinks.inflow.mean(axis=(0, 2)).T  # (K, L)
    style: dict[str, Any] = {"colors": [KIND_COLOURS[name] for name in sinks.kinds], "alpha": 0.8}
    inflow.stackplot(sinks.layer_indices, shares, labels=sinks.kinds, **style)
    inflow.set_ylim(0, 1)
    inflow.margins(x=0)
    inflow.set_ylabel("share of attention (1)")
    layers_along(inflow)
    for plane in planes:
        for name, label in (("", "no sink event"), *MECHANISM_NAMES.items()):
            chosen = on_register & (sinks.mechanism == name)
            style = {
                "color": MECHANISM_COLOURS.get(name, "0.85"),
                "label": f"{label} ({chosen.sum():,})",
                **DOT,
            }
            plane.scatter(sinks.ratio[chosen], sinks.rank[chosen], **style)
        _rule(plane)
        _fit(plane, sinks.ratio[on_register], sinks.rank[on_register])
        plane.set_ylabel("stable rank of $Au$ (1)")
        plane.set_title("sinks on registers")
    spacing = {"markerscale": 2, "handletextpad": 0.2, "columnspacing": 0.8}
    legends = zip(("outside lower left", "outside lower right"), (inflow, *planes), strict=False)
    for place, axis in legends:
        figure.legend(*axis.get_legend_handles_labels(), loc=place, ncols=4, **spacing)
    return figure


@in_our_style()
def lemma_figure(sinks: SinkMechanisms) -> Figure:
    """Definition 1, Lemma 3, eq. 12 and Lemma 4 of every head's strongest sink on every input."""
    figure, axes = subplots(2, 2, figsize=(2 * COLUMN, 4.6))
    epsilons = np.linspace(0, 1, 201)
    for kind, name in _kinds(sinks):
        sorted_epsilons = np.sort(sinks.epsilon[sinks.kind == kind])
        share = np.searchsorted(sorted_epsilons, epsilons, side="right") / sinks.epsilon.size
        colour, dash = KIND_COLOURS[name], DASHES[kind % 4]
        axes[0, 0].plot(epsilons, share, color=colour, linestyle=dash, label=name)
    axes[0, 0].set_xlabel(r"$\epsilon$ (1)")
    axes[0, 0].set_ylabel(r"share that are $\epsilon$-sinks (1)")
    axes[0, 0].set_title("Definition 1")
    axes[0, 0].legend()

    def panel(axis: Axes, x: str, y: str, forbidden: str) -> None:
        _against_bound(axis, sinks, sinks.measures[x], np.abs(sinks.measures[y]), forbidden)

    panel(axes[0, 1], "bound", "distance", "above")
    axes[0, 1].set_title("Lemma 3")
    axes[0, 1].set_xlabel(r"bound $\sqrt{m}\,\epsilon\,\max|u_j-u_s|\,/\,|Y|$ (1)")
    axes[0, 1].set_ylabel(r"$|Y-\mathbf{1}u_s^\top|\,/\,|Y|$ (1)")
    panel(axes[1, 0], "leading_bound", "leading", "below")
    axes[1, 0].set_title("eq. 12")
    axes[1, 0].set_xlabel(r"bound $(1-\epsilon)\sqrt{m}\,|u_s|\,/\,\sigma_1(Y)$ (1)")
    axes[1, 0].set_ylabel(r"$|a_s||u_s|\,/\,\sigma_1(Y)$ (1)")
    panel(axes[1, 1], "variance_bound", "variance_change", "above")
    axes[1, 1].set_title("Lemma 4")
    axes[1, 1].set_xlabel(r"bound on $|V'-V|\,/\,V$ (1)")
    axes[1, 1].set_ylabel(r"$|V'-V|\,/\,V$ (1)")
    _opaque_legend(figure, "outside lower center", *axes[0, 1].get_legend_handles_labels())
    return figure


def _opaque_legend(figure: Figure, loc: Any, handles: Any, labels: Any, **spacing: Any) -> None:
    """Draw a legend whose dots are larger than those in the panels, and not transparent."""
    ncols = len(handles)
    legend = figure.legend(handles, labels, loc=loc, ncols=ncols, markerscale=2, **spacing)
    for handle in filter(None, legend.legend_handles):
        handle.set_alpha(1)


def _against_bound(
    axis: Axes, sinks: SinkMechanisms, bound: np.ndarray, value: np.ndarray, forbidden: str
) -> None:
    """Draw values against a lemma's bound, both logarithmic; shade the side it rules out."""
    for name, label in (("", "no sink event"), *MECHANISM_NAMES.items()):
        chosen = (sinks.mechanism == name) & (bound > 0) & (value > 0)
        colour, order = MECHANISM_COLOURS.get(name, "0.85"), 2 if name else 1
        axis.scatter(bound[chosen], value[chosen], color=colour, label=label, zorder=order, **DOT)
    axis.set_xscale("log")
    axis.set_yscale("log")
    low, high = axis.get_xlim()
    if forbidden == "below":
        low = max(low, high / BOUNDS_SHOWN)
    bottom, top = axis.get_ylim()
    line = np.geomspace(low, high)
    axis.plot(line, line, color="black", linewidth=0.6)
    end = 1e30 if forbidden == "above" else 1e-30
    axis.fill_between(line, line, end, color="0.93", linewidth=0, zorder=0)
    axis.set_xlim(low, high)
    axis.set_ylim(bottom, top)


@in_our_style()
def angles_figure(sinks: SinkMechanisms) -> Figure:
    """Lemma 2's queries and keys: each head's cosine with the sink's key and with other keys."""
    figure, axis = subplots(figsize=(1.3 * COLUMN, 2.6))
    heads, does = sinks.heads, sinks.heads["mechanism"]
    for name, label in (("", "no sink head"), *MECHANISM_NAMES.items()):
        of_kind = heads.where(does == name)
        if not len(of_kind):
            continue
        axis.scatter(
            of_kind["query_key_others"],
            of_kind["query_key"],
            color=MECHANISM_COLOURS.get(name, "0.7"),
            label=f"{label} ({len(of_kind)})",
            s=14 if name else 8,
            linewidths=0,
        )
    axis.locator_params(nbins=5)
    axis.axline((0, 0), slope=1, color="black", linewidth=0.6, linestyle=":")
    axis.set_xlabel(r"$\cos(q_i, k_j)$, other keys (1)")
    axis.set_ylabel(r"$\cos(q_i, k_s)$, the sink's key (1)")
    figure.legend(loc="outside right center", handletextpad=0.2)
    return figure


@in_our_style()
def routing_figure(sinks: SinkMechanisms) -> Figure:
    """Lemma 2's alignment and appendix A.2's measures by sink strength, one dot per head."""
    figure, axes = subplots(1, 4, figsize=(2.2 * COLUMN, 2.1), sharex=True)
    strength = sinks.strength.mean(axis=0)
    for axis, name, label in (
        (axes[0], "alignment", r"$|\cos(x_s, v_1(W_{QK}))|$ (1)"),
        (axes[1], "key_ratio", r"$|k_s|\,/\,\overline{|k_j|}$ (1)"),
        (axes[2], "query_similarity", "cosine of two queries (1)"),
        (axes[3], "update_spread", r"sd $|o_i|\,/\,\overline{|o_i|}$ (1)"),
    ):
        values = np.median(sinks.measures[name], axis=0)
        if name == "alignment":
            rest = np.median(sinks.measures["alignment_others"], axis=0)
            crosses: dict[str, Any] = {"color": "0.75", "markersize": 2, "label": "other tokens"}
            axis.plot(strength.ravel(), rest.ravel(), "x", **crosses)
        for group, chosen, colour, _ in _head_groups(sinks):
            dots: dict[str, Any] = {"color": colour, "markersize": 4, "alpha": 0.8, "label": group}
            axis.plot(strength[chosen], values[chosen], ".", **dots)
        if name in ("key_ratio", "update_spread") and np.nanmax(values) > WIDE * np.nanmin(values):
            axis.set_yscale("log")
            if np.nanmax(values) < VAST * np.nanmin(values):
                _plain_numbers(axis.yaxis)
        axis.set_xlabel(r"sink strength $\alpha_s$ (1)")
        axis.set_ylabel(label)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def _head_groups(sinks: SinkMechanisms) -> Iterator[tuple[str, np.ndarray, str, str]]:
    """Name, mask (L, H), colour and dash of other heads and of sink heads, if there are any."""
    for name, chosen, colour, dash in (
        ("other heads", ~sinks.sink_heads, "0.5", "--"),
        ("sink heads", sinks.sink_heads, COLOURS[1], "-"),
    ):
        if chosen.any():
            yield name, chosen, colour, dash


def _kinds(sinks: SinkMechanisms) -> list[tuple[int, str]]:
    """The kinds of token that occur in some input."""
    return [(kind, name) for kind, name in enumerate(sinks.kinds) if sinks.inflow[..., kind].any()]


def _spread(
    axis: Axes, layers: np.ndarray, values: np.ndarray, colour: str, dash: str, name: str | None
) -> None:
    """Draw the median over inputs and their middle half."""
    low, middle, high = np.percentile(values, [25, 50, 75], axis=0)
    axis.fill_between(layers, low, high, color=colour, alpha=0.2, linewidth=0)
    axis.plot(layers, middle, color=colour, linestyle=dash, label=name)


def _plain_numbers(side: Axis) -> None:
    """Label a logarithmic axis 1, 2, 5, 10 ..."""

    side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    side.set_minor_formatter(
        FuncFormatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "25" else "")
    )

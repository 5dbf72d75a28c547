"""Figures of what attention sinks do (two-sink-mechanisms paper, Figs 2B, 4, 5, 6 and 8)."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from weightscope.metrics.spectra import spectral_gap
from weightscope.pages.style import COLOURS, COLUMN, DASHES, in_our_style, subplots
from weightscope.sinks.mechanisms import MECHANISMS, SinkMechanisms
from weightscope.sinks.strength import BROADCAST_RANK, BROADCAST_RATIO, NOP_RATIO

MECHANISM_COLOURS = dict(zip(MECHANISMS, (COLOURS[0], COLOURS[1], COLOURS[4]), strict=True))
MECHANISM_NAMES = dict(zip(MECHANISMS, ("NOP", "broadcast", "neither"), strict=True))
NO_SINK = "0.9"
# The same colour for tokens of the same role in images and texts.
KIND_COLOURS = {
    "CLS": COLOURS[0], "first": COLOURS[0], "register": COLOURS[3], "special": COLOURS[3], "patch": COLOURS[1],
    "other": COLOURS[1], "punctuation": COLOURS[2],
}  # fmt: skip
MARKERS = ("o", "s", "^", "D")
WIDE = 4  # a range of more than this factor is drawn on a logarithmic axis


@in_our_style()
def sink_token_figure(found: SinkMechanisms) -> Figure:
    """Fig. 4: which tokens receive attention, which are the strongest sinks, and which make sink events, by layer."""
    figure, axes = subplots(1, 3, figsize=(2 * COLUMN, 2.1), sharey=True, sharex=True)
    strongest = np.stack([found.kind == kind for kind in range(len(found.kinds))], axis=-1)  # (I, L, H, K)
    panels = (
        ("attention inflow", found.inflow),
        ("strongest key of a head", strongest),
        ("sink events", strongest & found.event[..., None]),
    )
    for axis, (title, shares) in zip(axes, panels, strict=True):
        for kind, name in enumerate(found.kinds):
            if not found.inflow[..., kind].any():
                continue  # no input has such a token
            style = {"color": KIND_COLOURS[name], "linestyle": DASHES[kind % len(DASHES)], "marker": MARKERS[kind]}
            axis.plot(found.layers, shares[..., kind].mean(axis=(0, 2)), markersize=2.5, label=name, **style)
        axis.set_title(title)
        _layers_along(axis)
    axes[0].set_ylim(-0.03, 1.03)
    axes[0].set_ylabel("share (1)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    return figure


@in_our_style()
def head_map_figure(found: SinkMechanisms) -> Figure:
    """Fig. 5: on how many inputs each head has a sink event, and what the sinks of sink heads mostly do."""
    n_layers, n_heads = found.sink_heads.shape
    height = float(np.clip(2.4 * n_layers / n_heads, 1.6, 4.0)) + 0.3
    figure, axes = subplots(1, 3, figsize=(2 * COLUMN, height), sharex=True, sharey=True)
    strength, events = found.strength.mean(axis=0), found.event.mean(axis=0)  # (L, H)
    for axis, values, title in (
        (axes[0], strength, r"sink strength $\alpha_s$"),
        (axes[1], events, "inputs with a sink event"),
    ):
        image = axis.imshow(values, cmap="cividis", norm=Normalize(0, 1), aspect="auto", interpolation="nearest")
        axis.set_title(title)
    bar = figure.colorbar(image, ax=axes[:2], pad=0.02)
    bar.set_label("mean, or share (1)")

    counts = np.stack([(found.mechanism == name).sum(axis=0) for name in MECHANISMS])  # (3, L, H)
    code = np.where(found.sink_heads, 1 + counts.argmax(axis=0), 0)
    colours = (NO_SINK, *MECHANISM_COLOURS.values())
    axes[2].imshow(code, cmap=ListedColormap(colours), norm=Normalize(0, 3), aspect="auto", interpolation="nearest")
    axes[2].set_title("mechanism of sink heads")
    names = ("no sink head", *MECHANISM_NAMES.values())
    patches = [Patch(color=colour, label=name) for colour, name in zip(colours, names, strict=True)]
    axes[2].legend(handles=patches, loc="center left", bbox_to_anchor=(1.02, 0.5))
    step = max(1, -(-n_layers // 8))
    axes[0].set_yticks(range(0, n_layers, step), found.layers[::step].tolist())
    axes[0].set_ylabel("layer")
    for axis in axes:
        axis.set_xlabel("head")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    return figure


@in_our_style()
def plane_figure(found: SinkMechanisms) -> Figure:
    """Figs 6 and 8: value-norm ratio and stable rank of every head's sink on every input, by mechanism and by depth."""
    figure, axes = subplots(1, 2, figsize=(2 * COLUMN, 2.6), sharex=True, sharey=True)
    ratio, rank, event, mechanism = found.ratio, found.rank, found.event, found.mechanism
    dot = {"s": 5, "linewidths": 0, "alpha": 0.6, "rasterized": True}
    for axis in axes:
        axis.scatter(ratio[~event], rank[~event], color="0.85", zorder=1, label="no sink event", **dot)
        axis.axvline(NOP_RATIO, color="black", linewidth=0.6, linestyle=":")
        axis.plot(  # the broadcast corner
            [BROADCAST_RATIO, BROADCAST_RATIO, 1e9], [1e-9, BROADCAST_RANK, BROADCAST_RANK], color="black",
            linewidth=0.6, linestyle=":",
        )  # fmt: skip
        axis.set_xlabel(r"value-norm ratio $|u_s|\,/\,\overline{|u_j|}$ (1)")
    for name in MECHANISMS:
        chosen = mechanism == name
        label = f"{MECHANISM_NAMES[name]} ({chosen.sum():,})"
        axes[0].scatter(ratio[chosen], rank[chosen], color=MECHANISM_COLOURS[name], zorder=2, label=label, **dot)
    depth = np.broadcast_to(found.layers[:, None], event.shape)
    norm = Normalize(found.layers[0], max(found.layers[-1], found.layers[0] + 1))
    for kind, name in enumerate(found.kinds):
        chosen = event & (found.kind == kind)
        axes[1].scatter(
            ratio[chosen],
            rank[chosen],
            c=depth[chosen],
            cmap="viridis",
            norm=norm,
            marker=MARKERS[kind],
            zorder=2,
            **dot,
        )
        if chosen.any():
            axes[1].scatter([], [], color="0.3", marker=MARKERS[kind], s=12, label=f"at {name}")
    _fit(axes[0], ratio, rank)
    axes[0].set_ylabel("stable rank of $Au$ (1)")
    legends = (("outside lower left", axes[0]), ("outside lower right", axes[1]))
    for place, axis in legends:
        handles, labels = axis.get_legend_handles_labels()
        if axis is axes[1]:
            handles, labels = handles[1:], labels[1:]
        if handles:
            legend = figure.legend(handles, labels, loc=place, ncols=len(handles), handletextpad=0.2, columnspacing=1.0)
            for handle in filter(None, legend.legend_handles):
                handle.set_alpha(1)
    bar = figure.colorbar(ScalarMappable(norm, "viridis"), ax=axes[1], pad=0.02, label="layer")
    bar.locator = MaxNLocator(integer=True, nbins=6)
    return figure


def _fit(axis: Axes, ratio: np.ndarray, rank: np.ndarray) -> None:
    """Logarithmic axes over the points and the rule's lines."""
    axis.set_xscale("log")
    axis.set_yscale("log")
    known = np.isfinite(ratio) & np.isfinite(rank) & (ratio > 0)
    x, y = np.append(ratio[known], (NOP_RATIO, BROADCAST_RATIO)), np.append(rank[known], (1.0, BROADCAST_RANK))
    axis.set_xlim(x.min() / 1.2, x.max() * 1.2)
    axis.set_ylim(0.95, y.max() * 1.1)
    for side in (axis.xaxis, axis.yaxis):
        _plain_numbers(side)


@in_our_style()
def spectrum_figure(found: SinkMechanisms) -> Figure:
    """Fig. 2B on a real model: spectra of W_QK of sink heads and of the others, and Lemma 2's two ways to a gate.

    The one is a spike, sigma_1 far above sigma_2; the other a sink of large norm.
    """
    figure, (axis, spike, norm) = subplots(1, 3, figsize=(2 * COLUMN, 2.1))
    largest = found.qk_singular_values[..., :1]
    spectra = found.qk_singular_values / np.where(largest > 0, largest, np.nan)  # (L, H, r)
    groups = (("other heads", ~found.sink_heads, "0.5", "--"), ("sink heads", found.sink_heads, COLOURS[1], "-"))
    gap, norm_ratio = spectral_gap(found.qk_singular_values), np.median(found.norm_ratio, axis=0)
    strength = found.strength.mean(axis=0)
    for name, chosen, colour, dash in groups:
        if not chosen.any():
            continue
        index = np.arange(1, spectra.shape[-1] + 1)
        low, middle, high = np.nanpercentile(spectra[chosen], [25, 50, 75], axis=0)
        axis.fill_between(index, low, high, color=colour, alpha=0.2, linewidth=0)
        axis.plot(index, middle, color=colour, linestyle=dash, label=f"{name} ({chosen.sum()})")
        for panel, values in ((spike, gap), (norm, norm_ratio)):
            panel.plot(strength[chosen], values[chosen], ".", color=colour, markersize=4, alpha=0.8)
    axis.set_xlabel("index $i$")
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
def similarity_figure(found: SinkMechanisms) -> Figure:
    """How alike tokens are before and after each layer's attention, and how much attention turns each of them."""
    figure, (between, through) = subplots(1, 2, figsize=(2 * COLUMN, 2.1), sharex=True)
    for values, colour, dash, name in (
        (found.between_before, "0.4", "--", "entering the layer"),
        (found.between_after, COLOURS[1], "-", "attention's output added"),
    ):
        _spread(between, found.layers, values, colour, dash, name)
    _spread(through, found.layers, found.through, COLOURS[0], "-", None)
    between.set_ylabel("cosine of two tokens (1)")
    through.set_ylabel("cosine of a token with itself (1)")
    through.set_ylim(top=1.02)
    between.legend()
    for axis in (between, through):
        _layers_along(axis)
    return figure


def _spread(axis: Axes, layers: np.ndarray, values: np.ndarray, colour: str, dash: str, name: str | None) -> None:
    """Median over inputs and their middle half."""
    low, middle, high = np.percentile(values, [25, 50, 75], axis=0)
    axis.fill_between(layers, low, high, color=colour, alpha=0.2, linewidth=0)
    axis.plot(layers, middle, color=colour, linestyle=dash, label=name)


def _plain_numbers(side: Axis) -> None:
    """1, 2, 5, 10 ... along a logarithmic axis."""
    side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    side.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "25" else ""))


def _layers_along(axis: Axes) -> None:
    axis.set_xlabel("layer")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))

"""Figures of the toy models of attention sinks (two-sink-mechanisms paper, Figs 2, 3, 6 and 7, Table 1).

Every function takes runs as the analysis keeps them in JSON: a list of mappings, one per training.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.artist import setp
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from weightscope.model.metrics.sinks import BROADCAST_RANK, BROADCAST_RATIO, NOP_RATIO
from weightscope.report.pages.style import COLOURS, COLUMN, in_our_style, subplots

Run = Mapping[str, Any]
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BROWN, GREY = COLOURS
SINK, OTHERS = VERMILION, BLUE


@in_our_style()
def nop_figure(runs: Sequence[Run]) -> Figure:
    """Fig. 2: norms of what the sink and other tokens write, and the spectrum of W_QK with and without a sink."""
    with_sink = [run for run in _default_task(runs) if run["variant"] == "softmax"]
    without = [run for run in runs if run["variant"] == "softmax" and run["damping"] == 1]
    figure, (norms, spectrum) = subplots(1, 2, figsize=(2 * COLUMN, 2.3))

    other_norms = np.concatenate([run["other_norms"] for run in with_sink])
    norms.hist(other_norms, bins="auto", density=True, color=OTHERS, alpha=0.75, label="another token")
    for i, run in enumerate(with_sink):
        norms.axvline(
            run["sink_norm"], color=SINK, label=None if i else "sink" + ", one line per seed" * (len(with_sink) > 1)
        )
    norms.set_xlim(left=-0.1)
    norms.set_xlabel(r"norm of the update $\|W_O v_j\|$ (1)")
    norms.set_ylabel("density")
    norms.legend(loc="upper left", bbox_to_anchor=(0.08, 1))

    for chosen, colour, marker, label in (
        (with_sink, SINK, "o", r"no-op, $\gamma=0$"),
        (without, OTHERS, "s", r"none, $\gamma=1$"),
    ):
        for i, run in enumerate(chosen):
            values = run["singular_values"]
            order = np.arange(1, len(values) + 1)
            spectrum.plot(
                order, values, color=colour, marker=marker, markersize=2.5, linewidth=0.7, label=None if i else label
            )
    spectrum.set_yscale("symlog", linthresh=1)
    spectrum.set_ylim(bottom=0)
    spectrum.set_xlabel("index $i$")
    spectrum.set_ylabel(r"singular value $\sigma_i(W_{QK})$")
    spectrum.legend()
    return figure


@in_our_style()
def emergence_figure(runs: Sequence[Run]) -> Figure:
    """Fig. 7: the sink score during training, by the frequency of flags and by the damping."""
    figure, axes = subplots(1, 2, figsize=(2 * COLUMN, 2.4), sharey=True)
    frequency = [run for run in runs if run["variant"] == "softmax" and run["damping"] == 0]
    damping = [run for run in runs if run["variant"] == "softmax" and run["probability"] == 0.5]
    for axis, chosen, key, symbol in (
        (axes[0], frequency, "probability", "p"),
        (axes[1], damping, "damping", r"\gamma"),
    ):
        levels = sorted({run[key] for run in chosen})
        colours = colormaps["viridis"](np.linspace(0, 0.9, len(levels)))
        for level, colour in zip(levels, colours, strict=True):
            same = [run for run in chosen if run[key] == level]
            _band(axis, same[0]["steps"], [run["score"] for run in same], colour, f"${symbol}={level:g}$")
        axis.set_xlabel("training step")
    axes[0].set_ylabel(r"sink score $\max_j \alpha_j$ (1)")
    axes[0].set_ylim(0, 1.3)
    axes[0].set_yticks(np.linspace(0, 1, 6))
    axes[0].set_title(r"frequency of the no-op, $\gamma=0$")
    axes[1].set_title(r"damping, $p=0.5$")
    for axis in axes:
        axis.legend(loc="upper left", ncols=3, columnspacing=1, handlelength=1.2)
    return figure


@in_our_style()
def broadcast_figure(runs: Sequence[Run], example: Mapping[str, np.ndarray]) -> Figure:
    """Fig. 3: attention of both layers, value norms, queries and keys on their first two axes, stable ranks."""
    figure, axes = subplots(2, 3, figsize=(2 * COLUMN, 4.3))
    for i, axis in enumerate(axes[0, :2]):
        image = axis.imshow(example["attention"][i], vmin=0, vmax=1, cmap="Blues")
        axis.plot(example["selected"], -1.3, "v", color=SINK, markersize=4, clip_on=False)
        axis.set_xticks(range(0, example["attention"].shape[-1], 5))
        axis.set_yticks(range(0, example["attention"].shape[-1], 5))
        axis.set_title(f"attention, layer {i + 1}", pad=9)
        axis.set_xlabel("key $j$ (triangle: selected)")
        axis.set_ylabel("query $i$")
    figure.colorbar(image, ax=axes[0, 1], label="$A_{ij}$", shrink=0.8)

    norms = axes[0, 2]
    _pairs(norms, example["selected_norms"], example["other_norms"])
    norms.set_ylabel(r"$\|W_O v_j\|$ (1)")
    norms.set_ylim(bottom=0)
    norms.set_title("value norms")

    for i, axis in enumerate(axes[1, :2]):
        _query_key_plane(axis, example["queries"][i], example["keys"][i], example["is_selected"])
        axis.set_title(f"queries and keys, layer {i + 1}")
    axes[1, 0].legend(loc="best", handletextpad=0.2)

    ranks = axes[1, 2]
    softmax = [run for run in runs if run["variant"] == "softmax"]
    layers = np.arange(1, len(softmax[0]["layers"]) + 1)
    shifts = np.linspace(-0.15, 0.15, len(softmax))
    for run, marker, shift in zip(softmax, "os^v<>*", shifts, strict=False):
        layer_ranks = [layer["rank"] for layer in run["layers"]]
        ranks.plot(layers + shift, layer_ranks, marker, markersize=4, color=GREEN, label=f"seed {run['seed']}")
    ranks.axhline(1, color="black", linewidth=0.6, linestyle=":")
    ranks.set_xticks(layers, [f"layer {i}" for i in layers])
    ranks.set_xlim(0.5, len(layers) + 0.5)
    ranks.set_ylim(0, max(2.0, *(1.1 * layer["rank"] for run in softmax for layer in run["layers"])))
    ranks.set_ylabel("stable rank of the update (1)")
    ranks.set_title("rank of what is written")
    ranks.legend()
    return figure


@in_our_style()
def trials_figure(runs: Sequence[Run]) -> Figure:
    """Each layer of the broadcast after one change; in Fig. 3 one layer has a sink and the other a diagonal.

    One dot per layer: the first is blue, the second vermilion, the third green.
    """
    names = [run["variant"] for run in runs]
    panels = (
        ("attention to the\nstrongest key", "strength"),
        ("attention of a\ntoken to itself", "diagonal"),
        ("stable rank\nof the update", "rank"),
        ("loss without\nits attention", "loss_without"),
    )
    figure, axes = subplots(1, len(panels), figsize=(2.2 * COLUMN, 0.2 * len(names) + 1.0), sharey=True)
    for axis, (title, key) in zip(axes, panels, strict=True):
        for depth, (colour, marker) in enumerate(((BLUE, "o"), (VERMILION, "s"), (GREEN, "^"))):
            deep = [(row, run) for row, run in enumerate(runs) if depth < len(run["layers"])]
            values = [run["layers"][depth][key] for _, run in deep]
            axis.plot(
                values,
                [row for row, _ in deep],
                marker,
                markersize=3.5,
                color=colour,
                alpha=0.8,
                label=f"layer {depth + 1}",
            )
        axis.set_title(title, fontsize=7)
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.grid(axis="y", color="0.92", linewidth=0.6)
        axis.set_axisbelow(True)
    for axis in axes[:2]:
        axis.set_xlim(-0.03, 1.03)
    axes[2].set_xlim(0.9, max(2.0, 1.05 * max(layer["rank"] for run in runs for layer in run["layers"])))
    axes[3].plot(
        [run["loss"] for run in runs], range(len(names)), "|", markersize=9, color="black", label="whole model"
    )
    figure.legend(*axes[3].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


@in_our_style()
def kinds_figure(nop: Sequence[Run], broadcast: Sequence[Run]) -> Figure:
    """Which kinds of attention have a sink on each task, and their losses; one dot per seed."""
    default = _default_task(nop)
    variants = list(dict.fromkeys(run["variant"] for run in default))
    panels: tuple[tuple[str, Sequence[Run], Callable[[Run], float]], ...] = (
        ("no-op: attention\nto the sink,\nflagged tokens", default, lambda run: run["flagged_attention"]),
        ("no-op: attention\nto the sink,\nother tokens", default, lambda run: run["other_attention"]),
        ("no-op: sum of\nweights, flagged\ntokens", default, lambda run: run["flagged_weight"]),
        ("no-op: loss", default, lambda run: run["loss"]),
        ("broadcast:\nattention to\nthe sink", broadcast, lambda run: _better(run)["strength"]),
        ("broadcast: loss", broadcast, lambda run: run["loss"]),
    )
    figure, axes = subplots(1, len(panels), figsize=(2.4 * COLUMN, 0.2 * len(variants) + 0.9), sharey=True)
    for axis, (title, runs, measure) in zip(axes, panels, strict=True):
        _dots(axis, variants, [[measure(run) for run in runs if run["variant"] == name] for name in variants])
        axis.set_title(title, fontsize=7)
        if "loss" in title:
            axis.set_xlim(left=0)
            axis.xaxis.set_major_locator(MaxNLocator(2, steps=(1, 2, 5, 10)))
        else:
            axis.set_xlim(0, 1.06)
            axis.set_xticks((0, 0.5, 1), ("0", "0.5", "1"))
    return figure


@in_our_style()
def mitigation_figure(runs: Sequence[Run]) -> Figure:
    """Table 1 for the small ViT: accuracy of the class, mean IoU of a linear probe of the frozen patches, and sinks."""
    variants = list(dict.fromkeys(run["variant"] for run in runs))
    grouped = [[run for run in runs if run["variant"] == name] for name in variants]
    figure, axes = subplots(1, 4, figsize=(2.4 * COLUMN, 0.24 * len(variants) + 0.95), sharey=True)
    for axis, key, title in (
        (axes[0], "accuracy", "class accuracy (%)"),
        (axes[1], "patch_iou", "patch probe, mean IoU (%)"),
    ):
        _dots(axis, variants, [[100 * run[key] for run in group] for group in grouped])
        axis.set_title(title, fontsize=7)
    for axis, keys, title in (
        (axes[2], MECHANISMS, "sinks by mechanism\n(% of heads and images)"),
        (axes[3], PLACES, "sinks by token\n(% of heads and images)"),
    ):
        left = np.zeros(len(variants))
        for key, (label, colour) in keys.items():
            share = np.array([100 * np.mean([layer[key] for run in g for layer in run["layers"]]) for g in grouped])
            axis.barh(range(len(variants)), share, left=left, color=colour, height=0.6, label=label)
            left += share
        axis.set_title(title, fontsize=7)
        axis.legend(loc="upper center", bbox_to_anchor=(0.45, -0.16), ncols=3, columnspacing=0.8, handlelength=0.9)
        axis.set_xlim(left=0)
    return figure


@in_our_style()
def mechanisms_figure(runs: Sequence[Run]) -> Figure:
    """Fig. 6 for the small ViT: every sink by value-norm ratio and stable rank, one panel per variant."""
    variants = list(dict.fromkeys(run["variant"] for run in runs))
    highest = 1.5 * max((rank for run in runs for layer in run["layers"] for rank in layer["ranks"]), default=2.0)
    columns = 3
    rows = -(-len(variants) // columns)
    figure, axes = subplots(
        rows, columns, figsize=(2 * COLUMN, 1.75 * rows + 0.3), sharex=True, sharey=True, squeeze=False
    )
    for axis, name in zip(axes.flat, variants, strict=False):
        axis.axvspan(1e-3, NOP_RATIO, color=SKY, alpha=0.2, linewidth=0)
        axis.fill_between([BROADCAST_RATIO, 1e2], 0.9, BROADCAST_RANK, color=ORANGE, alpha=0.2, linewidth=0)
        for depth, colour in zip(
            range(len(runs[0]["layers"])), (BLUE, GREEN, VERMILION, PURPLE, ORANGE, GREY), strict=False
        ):
            layers = [run["layers"][depth] for run in runs if run["variant"] == name]
            ratios, ranks = ([value for layer in layers for value in layer[key]] for key in ("ratios", "ranks"))
            axis.plot(ratios, ranks, ".", markersize=3, color=colour, alpha=0.6, label=f"layer {depth + 1}")
        axis.set_title(name)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlim(0.03, 5)
        axis.set_ylim(0.95, highest)
        ticks = [tick for tick in (1, 1.5, 2, 3, 5, 10, 20) if tick < highest]
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        axis.yaxis.set_minor_formatter(NullFormatter())
    for axis in axes.flat[len(variants) :]:
        axis.set_axis_off()
    axes[0, 0].text(0.036, 0.93 * highest, "NOP", fontsize=6, va="top")
    axes[0, 0].text(4.6, 1.02 * BROADCAST_RANK, "broadcast", fontsize=6, va="bottom", ha="right")
    axes[0, 0].legend(loc="upper right", handletextpad=0.1)
    figure.supxlabel(r"value-norm ratio $\|u_s\| / \overline{\|u_j\|}$ (1)", fontsize=8)
    figure.supylabel(r"stable rank of $A u$ (1)", fontsize=8)
    return figure


MECHANISMS = {"nop": ("NOP", SKY), "broadcast": ("broadcast", ORANGE), "neither": ("neither", "0.75")}
PLACES = {"on_class": ("class", PURPLE), "on_register": ("register", GREEN), "on_patch": ("patch", "0.45")}


def _default_task(runs: Sequence[Run]) -> list[Run]:
    """The no-op runs that are not part of a sweep."""
    return [run for run in runs if run["damping"] == 0 and run["probability"] == 0.5]


def _better(run: Run) -> Mapping[str, float]:
    """The layer that finds the selected token more often."""
    return max(run["layers"], key=lambda layer: layer["match"])


def _band(axis: Axes, steps: Sequence[int], curves: Sequence[Sequence[float]], colour: Any, label: str) -> None:
    """Mean over seeds, and the range between the least and the largest."""
    axis.plot(steps, np.mean(curves, axis=0), color=colour, label=label)
    axis.fill_between(steps, np.min(curves, axis=0), np.max(curves, axis=0), color=colour, alpha=0.2, linewidth=0)


def _dots(axis: Axes, names: Sequence[str], groups: Sequence[Sequence[float]]) -> None:
    """One dot per seed and a tick at their mean, one row per variant."""
    for row, values in enumerate(groups):
        axis.plot(values, [row] * len(values), "o", markersize=3.2, color=BLUE, alpha=0.7, markeredgewidth=0)
        axis.plot(np.mean(values), row, "|", markersize=9, color="black", markeredgewidth=1)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(axis="y", color="0.92", linewidth=0.6)
    axis.set_axisbelow(True)


def _pairs(axis: Axes, selected: np.ndarray, not_selected: np.ndarray) -> None:
    """Distributions of the norms of selected and other tokens, one pair per layer: (layers, b) twice."""
    for values, colour, offset in ((selected, SINK, -0.17), (not_selected, OTHERS, 0.17)):
        drawn = axis.violinplot(list(values), positions=np.arange(1, len(values) + 1) + offset, widths=0.3)
        setp(drawn["bodies"], facecolor=colour, alpha=0.6)
        setp([drawn[line] for line in ("cbars", "cmins", "cmaxes")], color=colour, linewidth=0.7)
    axis.plot([], [], "s", color=SINK, label="selected")
    axis.plot([], [], "s", color=OTHERS, label="another")
    axis.set_xticks(range(1, len(selected) + 1), [f"layer {i}" for i in range(1, len(selected) + 1)])
    axis.legend(loc="lower center", ncols=2, handletextpad=0.1)


def _query_key_plane(axis: Axes, queries: np.ndarray, keys: np.ndarray, selected: np.ndarray) -> None:
    """Queries and keys (tokens, r) on the first two principal axes of both, through the origin."""
    directions = np.linalg.svd(np.concatenate([queries, keys]), full_matrices=False)[2][:2]  # (2, r)
    for points, colour, marker, label in (
        (queries, GREEN, ".", "queries"),
        (keys[~selected], OTHERS, ".", "other keys"),
        (keys[selected], SINK, "*", "selected keys"),
    ):
        along = points @ directions.T  # (tokens, 2)
        axis.plot(along[:, 0], along[:, 1], marker, color=colour, markersize=4 if marker == "*" else 2.5,
                  markeredgewidth=0, alpha=0.6, label=label)  # fmt: skip
    axis.axhline(0, color="0.8", linewidth=0.5, zorder=0)
    axis.axvline(0, color="0.8", linewidth=0.5, zorder=0)
    axis.set_xlabel("first principal axis (1)")
    axis.set_ylabel("second principal axis (1)")

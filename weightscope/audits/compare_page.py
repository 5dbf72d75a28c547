"""What a comparison leaves behind for people: figures, a page, and a summary for the terminal."""

from pathlib import Path

import numpy as np
from matplotlib import figure as figures
from matplotlib.ticker import MaxNLocator

from weightscope.audits.compare import Comparison, most_moved
from weightscope.errors import printable
from weightscope.folder import remove_earlier
from weightscope.metrics.outliers import layer_medians
from weightscope.pages.page import Figure, Section, write_page
from weightscope.pages.style import COLOURS, COLUMN, in_our_style, layer_colours, save, subplots
from weightscope.progress import phase
from weightscope.tables import Table

DRAWN = 6  # heads that moved most, spectra side by side
LISTED = 40  # rows of the page's table
TRACED = (
    ("qk_sigma1", r"$\sigma_1(W_{QK})$", True),
    ("qk_effective_rank", r"effective rank of $W_{QK}$", False),
    ("vo_sigma1", r"$\sigma_1(W_{VO})$", True),
    ("vo_copying_score", "copying score", False),
)


@phase("drawing figures")
def write_report(found: Comparison, out: Path) -> None:
    """Write the figures as PNG and SVG, and report.html.

    Raises
    ------
    CheckpointError
        A file cannot be written.
    """
    remove_earlier(out, r"trajectories\.(png|svg)")
    first, last = found.labels[0], found.labels[-1]
    moved = most_moved(found)
    sections = [
        Section(
            "How far each head moved",
            "|B − A| / |A| in the Frobenius norm, of the products W_QK and W_VO themselves: a change of basis within a "
            "head, which changes nothing it does, does not count.",
            [Figure(save(change_maps(found), out, "changes"), f"Relative change from {first} to {last}.")],
        ),
        Section(
            "The heads that moved most",
            "Angles are the largest and the mean principal angle, in degrees, between the spaces that queries (left) "
            "and keys (right) read, or that values read (left) and outputs write (right).",
            [
                Figure(save(spectra_side_by_side(found), out, "spectra"), "Singular values before and after."),
                _table(found, moved[:LISTED]),
            ],
        ),
    ]
    if len(found.labels) > 2:
        trace = Figure(save(trajectories(found), out, "trajectories"), "Median of each layer, early layers dark.")
        sections.append(Section("Along the run", ", ".join(found.labels), [trace]))
    write_page(out, "report.html", f"From {first} to {last}", headline(found), sections)


def headline(found: Comparison) -> str:
    """The typical and the largest change, in a sentence or two."""
    said = []
    for name, w in (("qk_change", "W_QK"), ("vo_change", "W_VO")):
        change = found.from_first[name][-1]
        known = np.where(np.isfinite(change), change, -1.0)
        i, h = np.unravel_index(int(known.argmax()), change.shape)
        middle = float(np.nanmedian(change))
        layer = int(found.heads[0].layers[i])
        said.append(
            f"{w} changed by {middle:.3g} in the median head, most in layer {layer} head {h}: {change[i, h]:.3g}."
        )
    return " ".join(said)


def summary(found: Comparison, out: Path) -> list[str]:
    """The comparison on a terminal, a line each."""
    lines = [headline(found), "layer  head  qk_change  vo_change"]
    qk, vo = (found.from_first[f"{name}_change"][-1] for name in ("qk", "vo"))
    for i, h in most_moved(found)[:10]:
        lines.append(f"{found.heads[0].layers[i]:5d} {h:5d} {qk[i, h]:10.4g} {vo[i, h]:10.4g}")
    return [printable(line) for line in [*lines, str(out / "report.html")]]


def _table(found: Comparison, heads: list[tuple[int, int]]) -> Table:
    first, last = found.heads[0], found.heads[-1]
    changes = {name: values[-1] for name, values in found.from_first.items()}
    names = [f"{name.replace('_mean', ' mean')} (°)" if "angle" in name else name for name in changes]
    measures = ("qk_sigma1", "qk_effective_rank", "vo_sigma1", "vo_effective_rank")
    rows = [
        [int(first.layers[i]), h]
        + [float(np.degrees(c[i, h]) if "angle" in name else c[i, h]) for name, c in changes.items()]
        + [float(m.columns[name][i, h]) for name in measures for m in (first, last)]
        for i, h in heads
    ]
    header = ["layer", "head", *names, *(f"{name} {which}" for name in measures for which in ("before", "after"))]
    return Table.of_rows(header, rows, "The rest are in heads.csv.")


@in_our_style()
def change_maps(found: Comparison) -> figures.Figure:
    """Layers against heads: relative change of W_QK and of W_VO."""
    layers = found.heads[0].layers
    figure, axes = subplots(1, 2, figsize=(2 * COLUMN, 2.8), sharey=True)
    for axis, name, label in zip(axes, ("qk_change", "vo_change"), ("W_{QK}", "W_{VO}"), strict=True):
        change = found.from_first[name][-1]
        limits = {} if (change > 0).any() else {"vmin": 0, "vmax": 1}  # nothing moved: no change is below 0
        image = axis.imshow(np.where(np.isfinite(change), change, np.nan), aspect="auto", cmap="cividis", **limits)
        axis.set_facecolor("0.6")
        axis.set_title(rf"$\|\Delta {label}\|_F\,/\,\|{label}\|_F$")
        axis.set_xlabel("head")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(image, ax=axis, pad=0.02)
    step = max(1, -(-len(layers) // 6))
    axes[0].set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axes[0].set_ylabel("layer")
    return figure


@in_our_style()
def spectra_side_by_side(found: Comparison) -> figures.Figure:
    """Singular values of the heads that moved most, before and after; W_QK above, W_VO below."""
    heads = most_moved(found)[:DRAWN]
    figure, axes = subplots(2, len(heads), figsize=(2 * COLUMN, 3.2), sharey="row", squeeze=False)
    for column, (i, h) in enumerate(heads):
        for row, name in enumerate(("qk", "vo")):
            axis = axes[row, column]
            for which, dash, colour in ((0, "-", COLOURS[0]), (-1, "--", COLOURS[1])):
                s = found.heads[which].measured[f"{name}_singular_values"][i, h]
                axis.plot(np.arange(1, len(s) + 1), np.where(s > 0, s, np.nan), dash, color=colour)
            axis.set_yscale("log")
        axes[0, column].set_title(f"layer {found.heads[0].layers[i]} head {h}")
        axes[1, column].set_xlabel("index $i$")
    axes[0, 0].set_ylabel(r"$\sigma_i(W_{QK})$")
    axes[1, 0].set_ylabel(r"$\sigma_i(W_{VO})$")
    figure.legend(axes[0, 0].get_lines(), ["before", "after"], loc="outside upper center", ncols=2)
    return figure


@in_our_style()
def trajectories(found: Comparison) -> figures.Figure:
    """The median of each layer's heads against the checkpoint, early layers dark; changes between neighbours last."""
    panels = len(TRACED) + 1
    figure, axes = subplots(1, panels, figsize=(2.4 * COLUMN, 2.2))
    steps = np.arange(len(found.labels))
    colours = layer_colours(found.heads[0].layers)
    for axis, (name, label, log) in zip(axes, TRACED, strict=False):
        medians = np.stack([layer_medians(heads.columns[name]) for heads in found.heads])  # (n, L)
        for line, colour in zip(medians.T, colours, strict=True):
            axis.plot(steps, line, color=colour, linewidth=0.8)
        axis.set_title(label)
        if log:
            axis.set_yscale("log")
    for name, dash in (("qk_change", "-"), ("vo_change", "--")):
        typical = [np.nanmedian(change) for change in found.from_previous[name]]
        axes[-1].plot(steps[1:], typical, dash, color=COLOURS[0 if name == "qk_change" else 1], label=name[:2].upper())
    axes[-1].set_title("step to step change")
    axes[-1].legend()
    for axis in axes:
        axis.set_xlabel("checkpoint")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure

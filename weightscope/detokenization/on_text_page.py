"""What the first layer does on text, as a section of a page (detokenization paper, section 5)."""

from pathlib import Path

import numpy as np
from matplotlib import figure as mpl

from weightscope.detokenization.on_text import EmpiricalCheck
from weightscope.detokenization.term_contributions import TERMS
from weightscope.pages.page import Figure, Section
from weightscope.pages.style import COLOURS, COLUMN, DASHES, in_our_style, save, subplots
from weightscope.progress import phase
from weightscope.tables import Table

NAMES = {name: f"T^{name}" for name in TERMS}
STYLES = {name: {"color": COLOURS[k], "linestyle": DASHES[k % 2]} for k, name in enumerate(TERMS)}


@phase("drawing figures")
def empirical_section(found: EmpiricalCheck, predicted: np.ndarray | None, head: int, out: Path) -> Section:
    """Draw Fig. 4 for one head and every head's contributions into `out`, and say what they say.

    Parameters
    ----------
    found : EmpiricalCheck
    predicted : (n_heads, query + 1) array, optional
        The softmax of T^p + T^pp at the same query position, from the weights.
    head : int
    out : Path
    """
    means = {name: c[:, 1:].mean(axis=1) for name, c in found.contributions.items()}
    strongest = max(TERMS, key=lambda name: means[name][head])
    text = (
        f"Attention of layer 0 on {found.texts} texts. Leaving out {NAMES[strongest]} moves head {head}'s attention "
        f"most, by {means[strongest][head]:.2f} nats. The six terms add up to the model's attention: no weight "
        f"differs by more than {found.difference:.0e}."
    )
    beside = "" if predicted is None else ", beside what position alone predicts"
    figure = Figure(
        save(empirical_figure(found, predicted, head), out, f"empirical-head-{head}"),
        f"Fig. 4 for head {head}. Left: attention from position {found.query}{beside}. Right: how far attention moves "
        "without each term, by position.",
    )
    every = Figure(
        save(contributions_figure(found), out, "contributions"),
        "Mean of each term's contribution over positions, in nats, by head.",
    )
    rows = [(h, *(float(means[name][h]) for name in TERMS)) for h in range(len(found.attention))]
    table = Table.of_rows(
        ("head", *(f"c^{name}" for name in TERMS)), rows, "Nats, averaged over positions and texts (eq. 18)."
    )
    return Section("What happens on text", text, [figure, every, table])


@in_our_style()
def empirical_figure(found: EmpiricalCheck, predicted: np.ndarray | None, head: int) -> mpl.Figure:
    """Fig. 4: attention from one position beside the position-only prediction; c of each term by position."""
    figure, (left, right) = subplots(1, 2, figsize=(2 * COLUMN, 2.4))
    j = np.arange(found.query + 1)
    left.plot(j, found.attention[head], color=COLOURS[0], label="on text")
    if predicted is not None:
        left.plot(j, predicted[head], color=COLOURS[1], linestyle="--", label="from position alone")
        left.legend()
    left.set_xlabel("previous position $j$ (tokens)")
    left.set_ylabel(rf"attention $\alpha_{{{found.query},j}}$")
    for name, c in found.contributions.items():
        if c[head].max() > 0:
            right.plot(np.arange(1, c.shape[1]), c[head, 1:], label=f"$c^{{{name}}}$", **STYLES[name])
    right.set_yscale("log")
    right.set_xlabel("current position $i$ (tokens)")
    right.set_ylabel(r"contribution $D_{KL}(P_i\,\|\,Q_i)$ (nats)")
    right.legend(ncol=3)
    figure.suptitle(f"head {head}", fontsize=8)
    return figure


@in_our_style()
def contributions_figure(found: EmpiricalCheck) -> mpl.Figure:
    """Every head's mean contributions as a map, heads by terms."""
    grid = np.stack([found.contributions[name][:, 1:].mean(axis=1) for name in TERMS], axis=1)  # (H, 6)
    figure, axis = subplots(figsize=(COLUMN, 0.22 * len(grid) + 0.7))
    shown = axis.imshow(grid, cmap="cividis", aspect="auto", vmin=0)
    axis.set_xticks(range(len(TERMS)), [f"$c^{{{name}}}$" for name in TERMS])
    axis.set_yticks(range(len(grid)))
    axis.set_ylabel("head")
    middle = grid.max() / 2
    for (row, column), value in np.ndenumerate(grid):
        colour = "black" if value > middle else "white"
        axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=6, color=colour)
    axis.spines[:].set_visible(False)
    figure.colorbar(shown, label="nats")
    return figure

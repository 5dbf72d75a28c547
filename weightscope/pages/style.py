"""How figures look, and how they are saved. matplotlib is imported under report/ alone."""

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from weightscope.folder import replacing

COLUMN = 3.4  # inches: one column of a two-column paper
# Okabe and Ito's colours, told apart by every kind of colour vision; black is kept for reference lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D00", "#7F7F7F")
DASHES = ("-", "--", ":", "-.")

mpl.rcParams.update(
    {
        "font.size": 8,
        "axes.titlesize": 8,
        "axes.labelsize": 8,
        "legend.fontsize": 7,
        "xtick.labelsize": 7,
        "ytick.labelsize": 7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6,
        "lines.linewidth": 1.1,
        "legend.frameon": False,
        "figure.constrained_layout.use": True,
        "svg.fonttype": "path",  # the same everywhere, whatever fonts a reader has
        "svg.hashsalt": "weightscope",  # the same bytes every time
        "savefig.dpi": 200,
    }
)


def head_style(head: int) -> dict[str, str]:
    """Colour and dash of a head: the same in every figure."""
    return {"color": COLOURS[head % len(COLOURS)], "linestyle": DASHES[head // len(COLOURS) % len(DASHES)]}


def save(figure: Figure, out: Path, name: str) -> str:
    """Save NAME.png and NAME.svg in `out`, close the figure, and return the SVG for a page.

    Raises
    ------
    CheckpointError
        The folder cannot be written to.
    """
    for suffix in ("png", "svg"):
        metadata = {"Date": None} if suffix == "svg" else {"Software": None}
        with replacing(out / f"{name}.{suffix}") as partial:
            figure.savefig(partial, format=suffix, metadata=metadata)
    plt.close(figure)
    return (out / f"{name}.svg").read_text(encoding="utf-8")

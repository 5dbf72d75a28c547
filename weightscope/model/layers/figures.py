"""The picture of a matrix or a head: its singular values."""

import io
from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from weightscope.model.layers.factored import Factored

MARKERS = "os"


class ShownFigure(Figure):
    """A figure that a notebook shows, where pyplot may not have been imported."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()


def spectrum_figure(maps: Mapping[str, Factored], title: str = "") -> Figure:
    """The singular values of matrices, by their symbols, on a logarithmic scale.

    Not known to pyplot, so that it closes by itself; drawn in whatever style the caller has.
    """
    figure = ShownFigure(figsize=(5.0, 3.2), layout="constrained")
    axis = figure.add_subplot()
    for (symbol, w), marker in zip(maps.items(), MARKERS, strict=False):
        s = w.svdvals()
        axis.semilogy(np.arange(1, len(s) + 1), s, marker=marker, markersize=3, label=symbol)
    axis.set(xlabel="index i", ylabel="singular value $\\sigma_i$", title=title)
    if any(maps):
        axis.legend()
    return figure

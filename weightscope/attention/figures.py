"""The picture of a head."""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from weightscope.attention.head import Head


def spectrum_figure(head: "Head") -> Any:
    """The singular values of W_QK and W_VO of one head, on a logarithmic scale.

    Returns
    -------
    matplotlib.figure.Figure
        Not known to pyplot, so that it closes by itself; drawn in whatever style the caller has.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 3.2), layout="constrained")
    axis = figure.add_subplot()
    for symbol, w, marker in (("$W_{QK}$", head.qk, "o"), ("$W_{VO}$", head.vo, "s")):
        s = w.svdvals()
        axis.semilogy(np.arange(1, len(s) + 1), s, marker=marker, markersize=3, label=symbol)
    axis.set(xlabel="index i", ylabel="singular value $\\sigma_i$", title=f"layer {head.layer.index} head {head.index}")
    axis.legend()
    return figure

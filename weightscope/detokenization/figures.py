"""Figures of the detokenization analysis: AUROC by head (Table 2 drawn) and ROC curves (Fig. 2)."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from weightscope.detokenization.heads import Detokenization, TokenRoc
from weightscope.pages.style import COLUMN, head_style, in_our_style, subplots


@in_our_style()
def auroc_figure(found: Detokenization) -> Figure:
    """AUROC of every head, best first: the mean as a dot over the spread of the single tokens."""
    figure, axis = subplots(figsize=(COLUMN, 0.26 * len(found.table) + 0.7))
    for place, row in enumerate(found.table):
        tokens = found.auroc[row.head]
        low, quarter, three_quarters, high = np.nanpercentile(tokens, [5, 25, 75, 95])
        axis.plot([low, high], [place, place], color="0.75", linewidth=1)
        axis.plot([quarter, three_quarters], [place, place], color="0.55", linewidth=4, solid_capstyle="butt")
        axis.plot(row.auroc, place, "o", color=head_style(row.head)["color"], markersize=5)
        axis.annotate(
            f"{row.auroc:.2f}", (row.auroc, place), (0, 5), textcoords="offset points", ha="center", fontsize=6
        )
    axis.axvline(0.5, color="black", linewidth=0.6, linestyle=":")
    axis.set_yticks(range(len(found.table)), [f"head {row.head}" for row in found.table])
    axis.set_ylim(len(found.table) - 0.5, -0.8)
    axis.set_xlim(0, 1)
    axis.set_xlabel("bigram AUROC of $T^{ee}$ (1)")
    return figure


@in_our_style()
def roc_figure(tokens: Sequence[TokenRoc], best: Detokenization) -> Figure:
    """ROC curves of the best and the worst head in colour, of the others in grey; one panel a token."""
    first, last = best.table[0].head, best.table[-1].head
    width = min(2 * COLUMN, COLUMN * len(tokens))
    figure, axes = subplots(1, len(tokens), figsize=(width, 0.5 * width + 0.4), sharey=True, squeeze=False)
    for axis, token in zip(axes[0], tokens, strict=True):
        axis.plot([0, 1], [0, 1], color="black", linewidth=0.6, linestyle=":")
        for head, (false_rate, true_rate) in enumerate(token.curves):
            style = head_style(head) if head in (first, last) else {"color": "0.82", "linewidth": 0.7}
            shown = head in (first, last)
            axis.step(
                false_rate,
                true_rate,
                where="post",
                zorder=3 if shown else 1,
                label=f"head {head}" if shown else None,
                **style,
            )
        axis.set_title(f"“{token.text.replace('$', chr(92) + '$')}”")
        axis.set_xlabel("false positive rate (1)")
        axis.set_aspect("equal")
    axes[0][0].set_ylabel("true positive rate (1)")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure

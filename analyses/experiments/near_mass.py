"""Attention that position gives to near tokens in GPT-2's first layer, and what its authors measured on text.

    python -m analyses.experiments.near_mass gpt2/ --out out/near-mass

The weights give T^p + T^pp and its softmax for tokens of standard deviation s. What is compared: the attention from
position 500 to positions 485 to 500 in 3,319 documents of OpenWebText. Beside it stands the rank correlation with j of
the numerators' sum, b_QK p_j + p_i W_QK p_j, whose parts eq. 14 of the detokenization paper divides by different sigma.
"""

from typing import Any

import click
import numpy as np
from scipy.stats import spearmanr

import weightscope as ws
from analyses.study import study
from weightscope.core.files import Folder
from weightscope.core.tables import Column, Table
from weightscope.heads.detok.first_layer import FirstLayer, position_terms
from weightscope.heads.detok.page import AUROC_BY_FREQUENCY
from weightscope.heads.detok.positions import PositionTerms, recency
from weightscope.report.pages.style import COLUMN, head_style, in_our_style, save, subplots

# Recent past (485-499) and self (500) of heads 0 to 11: gokamoda/lm-detokenization, notes/gpt2.md, "Attention
# destinations from position 500".
PAST = (0.304, 0.057, 0.244, 0.173, 0.455, 0.025, 0.314, 0.830, 0.344, 0.312, 0.302, 0.022)
SELF = (0.017, 0.792, 0.034, 0.827, 0.536, 0.480, 0.029, 0.164, 0.052, 0.019, 0.146, 0.001)
MEASURED = np.add(PAST, SELF)  # (12,)
QUERY, FIRST = 500, 485  # positions 485 to 500
SPREADS = (0.08, 0.1, 0.12, 0.14, 0.144, 0.2, 0.28)  # GPT-2's token embedding has 0.144
SHOWN = (0.08, 0.144, 0.28)
NEAR = 0.11  # of attention


@study("near-mass")
@click.argument("source")
def main(files: Folder, source: str) -> None:
    """Write heads.csv, agreement.csv and near-mass.png of OpenAI's GPT-2 into OUT."""
    first = FirstLayer(ws.open_model(source))
    if len(first.heads) != len(MEASURED):
        raise ws.CheckpointError(f"{source} has {len(first.heads)} heads; GPT-2's 12 were measured")
    terms = {spread: position_terms(first, QUERY, unscaled=True, spread=spread) for spread in SPREADS}
    near = {spread: of_spread.attention()[:, FIRST:].sum(axis=1) for spread, of_spread in terms.items()}
    bare = terms[SPREADS[0]]
    rising = np.array([recency(curve) for curve in (bare.p_numerator + bare.pp_numerator)[:, : QUERY + 1]])
    heads = Table([
        Column("head", np.arange(len(MEASURED))),
        Column("measured", MEASURED, meaning="attention from position 500 to 485 to 500 on text", format=".3f"),
        Column("itself", np.array(SELF), meaning="of that, to position 500 itself", format=".3f"),
        *(Column(f"near_{s}", near[s], meaning=f"the same by position alone, s = {s}", format=".3f") for s in SHOWN),
        Column("numerators_rising", rising, meaning="rank correlation of the numerators' sum with j", format=".3f"),
        Column("auroc_by_frequency", [AUROC_BY_FREQUENCY[head] for head in range(len(MEASURED))], format=".3f",
               meaning="bigram AUROC weighted by frequency, authors' notes"),
    ])  # fmt: skip
    agreement = Table.of_rows(
        (
            "of",
            Column("rank_correlation", meaning="Spearman's, with what was measured, over heads", format=".2f"),
            Column("within", meaning=f"heads at most {NEAR} of attention from it"),
            Column("rising_lowest", meaning="lowest rank correlation of T^p + T^pp with j among heads", format=".3f"),
            Column("rising_highest", meaning="highest", format=".3f"),
            Column("rising_head_7", meaning="that of head 7", format=".3f"),
        ),
        [agreement_of("numerators", rising, rising, None)]
        + [agreement_of(f"s = {s}", near[s], rising_of(terms[s]), near[s]) for s in SPREADS],
    )
    files.table("heads.csv", heads)
    files.table("agreement.csv", agreement)
    save(drawn(near), files, "near-mass")
    click.echo(heads)
    click.echo(agreement)


def rising_of(terms: PositionTerms) -> np.ndarray:
    """Rank correlation of T^p + T^pp with j, (n_heads,)."""
    return np.array([recency(curve) for curve in (terms.t_p + terms.t_pp)[:, : QUERY + 1]])


def agreement_of(name: str, values: np.ndarray, rising: np.ndarray, near: np.ndarray | None) -> tuple[Any, ...]:
    """A row of agreement.csv; `near` (12,) where the values are attention."""
    within = "" if near is None else int((np.abs(near - MEASURED) <= NEAR).sum())
    return name, float(spearmanr(values, MEASURED).statistic), within, rising.min(), rising.max(), rising[7]


@in_our_style()
def drawn(near: dict[float, np.ndarray]) -> Any:
    """Measured attention against that by position alone, a point per head and a bar over the spreads shown."""
    figure, axis = subplots(figsize=(COLUMN, COLUMN))
    low, middle, high = (near[spread] for spread in SHOWN)
    axis.plot([0, 1], [0, 1], color="black", linewidth=0.6, linestyle=":")
    for head, measured in enumerate(MEASURED):
        colour = head_style(head)["color"]
        axis.plot([high[head], low[head]], [measured, measured], color=colour, linewidth=0.8, alpha=0.6)
        axis.plot(middle[head], measured, "o", color=colour, markersize=4)
        apart = PLACES.get(head, (5, 3))
        axis.annotate(str(head), (middle[head], measured), apart, textcoords="offset points", fontsize=6)
    axis.set_xlabel(f"by position alone, $s$ = {SHOWN[1]} (bars: {SHOWN[0]} to {SHOWN[2]})")
    axis.set_ylabel("measured on text")
    axis.set_title("attention from position 500 to 485-500, by head")
    axis.set_xlim(-0.03, 1.05)
    axis.set_ylim(-0.03, 1.05)
    return figure


PLACES = {
    3: (5, 3),
    7: (-9, 3),
    4: (-9, -8),
    2: (4, -9),
    0: (-10, -4),
    9: (6, -5),
    6: (-9, 3),
}  # of labels


if __name__ == "__main__":
    main()

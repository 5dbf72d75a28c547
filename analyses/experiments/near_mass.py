"""Attention that position gives to near tokens in GPT-2's first layer, and what its authors measured on text.

    python -m analyses.experiments.near_mass gpt2/ --out out/near-mass

The weights give T^p + T^pp and its softmax for tokens of standard deviation s. What is compared: the attention from
position 500 to positions 485 to 500 in 3,319 documents of OpenWebText. Position does not explain a head whose measured
attention is more than 0.01 outside the band over s from 0.08 to 0.28; chance is the bands of all heads. Beside it
stands the rank correlation with j of the numerators' sum, b_QK p_j + p_i W_QK p_j, whose parts eq. 14 of the
detokenization paper divides by different sigma.
"""

from typing import Any

import click
import numpy as np
from scipy.stats import spearmanr

import weightscope as ws
from analyses.study import study
from weightscope.core.files import Folder
from weightscope.core.tables import Column, Table
from weightscope.heads.detok.figures import near_figure
from weightscope.heads.detok.first_layer import FirstLayer, position_terms
from weightscope.heads.detok.page import AUROC_BY_FREQUENCY, NEAR_ON_TEXT, NEAR_QUERY, unexplained
from weightscope.heads.detok.positions import BEYOND, Near, PositionTerms, recency
from weightscope.report.pages.style import save

MEASURED = np.array(NEAR_ON_TEXT[16])  # (12,)
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
    terms = {spread: position_terms(first, NEAR_QUERY, unscaled=True, spread=spread) for spread in SPREADS}
    near = {spread: of_spread.near.alone[:, 15] for spread, of_spread in terms.items()}
    band = Near.of(terms[SHOWN[1]].attention(), [of_spread.attention() for of_spread in terms.values()])
    beyond = {k: band.beyond(k, measured) for k, measured in NEAR_ON_TEXT.items()}
    bare = terms[SPREADS[0]]
    rising = np.array([recency(curve) for curve in (bare.p_numerator + bare.pp_numerator)[:, : NEAR_QUERY + 1]])
    heads = Table([
        Column("head", np.arange(len(MEASURED))),
        Column("measured", MEASURED, meaning="attention from position 500 to 485 to 500 on text", format=".3f"),
        Column("itself", np.array(NEAR_ON_TEXT[1]), meaning="of that, to position 500 itself", format=".3f"),
        *(Column(f"near_{s}", near[s], meaning=f"the same by position alone, s = {s}", format=".3f") for s in SHOWN),
        Column("beyond", beyond[16], meaning="distance of measured from the band over s", format=".3f"),
        Column("itself_beyond", beyond[1], meaning="the same of itself", format=".3f"),
        Column("chance", [(band.beyond(16, measured) <= BEYOND).mean() for measured in MEASURED], format=".3f",
               meaning=f"share of the heads whose band has what was measured of this one, to within {BEYOND:g}"),
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
            Column("rising_head_7", meaning="head 7's", format=".3f"),
        ),
        [agreement_of("numerators", rising, rising, None)]
        + [agreement_of(f"s = {s}", near[s], rising_of(terms[s]), near[s]) for s in SPREADS],
    )
    files.table("heads.csv", heads)
    files.table("agreement.csv", agreement)
    drawn = near_figure(band, f"$s$ = {SHOWN[0]} to {SHOWN[-1]}", NEAR_ON_TEXT, unexplained(band))
    save(drawn, files, "near-mass")
    click.echo(heads)
    click.echo(agreement)


def rising_of(terms: PositionTerms) -> np.ndarray:
    """Rank correlation of T^p + T^pp with j, (n_heads,)."""
    return np.array([recency(curve) for curve in (terms.t_p + terms.t_pp)[:, : NEAR_QUERY + 1]])


def agreement_of(name: str, values: np.ndarray, rising: np.ndarray, near: np.ndarray | None) -> tuple[Any, ...]:
    """A row of agreement.csv; `near` (12,) where the values are attention."""
    within = "" if near is None else int((np.abs(near - MEASURED) <= NEAR).sum())
    return name, float(spearmanr(values, MEASURED).statistic), within, rising.min(), rising.max(), rising[7]


if __name__ == "__main__":
    main()

"""Fig. 3 of the detokenization paper for a GPT-2 whose token embeddings are not at hand, as a function of their spread.

    python -m analyses.experiments.position_sigma gpt2/ --head 7 --query 500 --out out/position-sigma

T^p and T^pp need sigma_j, the standard deviation of e + p_j over the d dimensions. For tokens whose embeddings have
standard deviation s and are uncorrelated with p_j, sigma_j^2 = s^2 + Var p_j (and the norm's eps): Fig. 3 is known for
each s, as `weightscope positions --unscaled --spread s` draws it.
"""

import click
import numpy as np

import weightscope as ws
from analyses.study import study
from weightscope.core.files import Folder
from weightscope.core.tables import Column, Table
from weightscope.heads.detok.first_layer import FirstLayer, position_terms
from weightscope.heads.detok.positions import near_mass

SPREADS = (0.04, 0.06, 0.08, 0.1, 0.12, 0.14, 0.16, 0.2, 0.25, 0.3, 0.4)


@study("position-sigma")
@click.argument("source")
@click.option("--head", default=7, show_default=True)
@click.option("--query", default=500, show_default=True)
def main(files: Folder, source: str, head: int, query: int) -> None:
    """Write by-spread.csv into OUT."""
    first = FirstLayer(ws.open_model(source))
    terms = {spread: position_terms(first, query, unscaled=True, spread=spread) for spread in SPREADS}
    curves = {s: (of_spread.t_p + of_spread.t_pp)[head, : query + 1] for s, of_spread in terms.items()}
    attention = {spread: of_spread.attention()[head] for spread, of_spread in terms.items()}
    table = Table([
        Column("s", np.array(SPREADS), meaning="standard deviation of a token's embedding over its dimensions"),
        Column("peak", np.array([weights.argmax() for weights in attention.values()]), meaning="position"),
        Column("near_mass", near_mass(np.stack([*attention.values()])), meaning="attention to the nearest tenth"),
        Column("rising", np.array([(np.diff(curve) > 0).mean() for curve in curves.values()]),
               meaning="share of the steps of $T^p + T^pp$ that rise"),
    ])  # fmt: skip
    files.table("by-spread.csv", table)
    click.echo(table)


if __name__ == "__main__":
    main()

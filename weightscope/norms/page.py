"""Norm-based analysis as sections of a page."""

from pathlib import Path

import numpy as np

from weightscope.model import Model
from weightscope.norms import paper as paper
from weightscope.norms.figures import OFF, head_figure, layer_figure, pair_figure, singular_value_figure
from weightscope.norms.measure import MOMENTS, NormAnalysis, moment_rows, summary_rows
from weightscope.pages.page import Figure, Section
from weightscope.pages.style import save
from weightscope.progress import phase
from weightscope.tables import Table


@phase("drawing figures")
def norm_sections(found: NormAnalysis, model: Model, out: Path, seed: int = 0) -> tuple[str, list[Section]]:
    """Draw the figures into `out` and say what they say.

    Parameters
    ----------
    found : NormAnalysis
    model : Model
    out : Path
    seed : int
        Draws the head of each layer whose singular values Fig. 2 shows.

    Returns
    -------
    lead : str
        The result in a sentence or two.
    sections : list of Section
    """
    known = paper.is_paper_model(model)
    sections = [
        _given(found, out),
        _ranks(found, out, known),
        _kinds(found, out),
        _stretch(found, out, known, seed),
        *([] if known else [_reference()]),
        _lengths(found, known),
    ]
    return _lead(found), sections


def _lead(found: NormAnalysis) -> str:
    special = slice(None, -1)
    alpha, added = (values.mean(axis=(0, 1)) for values in (found.alpha, found.alpha_f))  # (K,)
    named = ", ".join(found.kinds[special])
    return (
        f"{named}: {alpha[special].sum() / alpha.sum():.0%} of the attention weight goes to these tokens, "
        f"{added[special].sum() / added.sum():.0%} of the length of the vectors added up comes from them; the rest is "
        f"all other tokens'. Run on {found.sequences:,} sequences, {found.tokens:,} tokens."
    )


def _given(found: NormAnalysis, out: Path) -> Section:
    figure = Figure(
        save(layer_figure(found), out, "layers"),
        "Fig. 5: attention weight (left) and length of the vectors added up (right) that a query takes from each kind "
        "of token: summed over a sequence's tokens of the kind, then the mean over queries, sequences and heads.",
    )
    text = "Attention adds up alpha f(x), f(x) = (x W_V + b_V) W_O. A large weight on a short vector adds little."
    if found.gated:
        text += " Here a gate multiplies what a head has gathered, by the query; f leaves it out."
    return Section("What attention weights say, and what is added up", text, [figure])


def _ranks(found: NormAnalysis, out: Path, known: bool) -> Section:
    header = ["kind of token", "pairs", "Spearman of alpha and |f(x)|", "known to within"]
    rows: list[list[object]] = [
        [kind, each.pairs, each.rho, each.error] for kind, each in zip(found.kinds, found.ranks, strict=True)
    ]
    if known:
        header += ["paper's pairs", "paper's Spearman"]
        rows = [[*row, *paper.SPEARMAN.get(str(row[0]), (0, np.nan))] for row in rows]
    table = Table.of_rows(
        header, rows,
        "Table 3. Every pair of a query i and a token j, in all heads and layers, by the kind of j; masked pairs do "
        "not count. Ranks are those of narrow bins; the column after rho bounds what that can cost.",
    )  # fmt: skip
    shown = " + ".join(f"{len(pairs):,}" for pairs in found.pairs)
    figure = Figure(
        save(pair_figure(found), out, "pairs"),
        f"Fig. 3: a random sample of these pairs ({shown} points), alpha on a logarithmic scale; the other kinds in "
        f"light grey. The {OFF:.0%} with the smallest weights lie off the left edge.",
    )
    return Section("Do large weights meet short vectors?", "", [table, figure])


def _kinds(found: NormAnalysis, out: Path) -> Section:
    figure = Figure(
        save(head_figure(found), out, "heads"),
        "Fig. 4, for every kind: the weight that a head gives to the kind (above; sum over a sequence's tokens, mean "
        "over queries and sequences) and the mean |f(x)| of its tokens (below).",
    )
    text = "A head that gives nearly all of its weight to a kind that f makes short adds nearly nothing."
    return Section("Head by head", text, [figure])


def _lengths(found: NormAnalysis, known: bool) -> Section:
    f, x = moment_rows(found.f), moment_rows(found.x)
    heads = [
        [int(layer), head, *f[place, head], *paper.F_OF_HEADS.get((int(layer), head), ())[: 5 * known]]
        for place, layer in enumerate(found.layers)
        for head in range(f.shape[1])
    ]
    layers = [
        [int(layer), *x[place], *paper.X_OF_LAYERS.get(int(layer), ())[: 5 * known]]
        for place, layer in enumerate(found.layers)
    ]
    theirs = {0: paper.F_OF_ALL, 2: paper.X_OF_ALL} if known else {}
    summary = [[name, *row, *theirs.get(place, ())] for place, (name, row) in enumerate(summary_rows(found))]
    more = [f"paper's {name}" for name in MOMENTS] if known else []
    order = np.argsort([-row[4] for row in heads])
    most, least = heads[order[0]], heads[order[-1]]
    text = (
        f"|f(x)| varies by {most[4]:.0%} of its mean in layer {most[0]} head {most[1]}, by {least[4]:.0%} in layer "
        f"{least[0]} head {least[1]}. |x| is the length of the residual stream as it enters the layer, before a norm "
        "where there is one."
    )
    return Section(
        "How much the lengths vary",
        text,
        [
            Table.of_rows(("of", *MOMENTS, *more), summary, "Tables 1 and 2, last rows."),
            Table.of_rows(("layer", *MOMENTS, *more), layers, "Table 2: |x|."),
            Table.of_rows(
                ("layer", "head", *MOMENTS, *more), [heads[i] for i in order], "Table 1: |f(x)|, cv largest first."
            ),
        ],
    )


def _stretch(found: NormAnalysis, out: Path, known: bool, seed: int) -> Section:
    s = found.singular_values
    heads = np.random.default_rng(seed).integers(0, s.shape[1], len(s))
    with np.errstate(divide="ignore"):
        stretch = s[..., 0] / s[..., -1]
    drawn = ", ".join(f"{layer}.{head}" for layer, head in zip(found.layers, heads, strict=True))
    text = (
        f"f stretches one direction at least {stretch.min():.2g} times as much as another in every head; the median "
        f"over heads is {np.median(stretch):.3g}."
    )
    if known:
        text += f" The paper's heads: at least {paper.LEAST_STRETCH:g} times."
    figure = Figure(
        save(singular_value_figure(found, heads), out, "singular-values"),
        "Fig. 2: singular values of f as a linear map on [x 1] (eqs 9-11), from the weights alone; one head a layer, "
        f"drawn at random (layer.head): {drawn}. Where a norm stands before attention, x is the normalised input.",
    )
    return Section("How f stretches", text, [figure])


def _reference() -> Section:
    """The paper's own numbers, of another model."""
    rows = [[kind, pairs, rho] for kind, (pairs, rho) in paper.SPEARMAN.items()]
    moments: list[list[object]] = [
        *([f"|f(x)|, layer {layer} head {head}", *row] for (layer, head), row in paper.F_OF_HEADS.items()),
        ["|f(x)|, all heads", *paper.F_OF_ALL],
        *([f"|x|, layer {layer}", *row] for layer, row in paper.X_OF_LAYERS.items()),
        ["|x|, all layers", *paper.X_OF_ALL],
    ]
    text = (
        "Printed by Kobayashi, Kuribayashi, Yokoi, Suzuki and Inui for another model, BERT-base (uncased), on 992 "
        "sequences of the English Wikipedia; nothing here was measured. Layers and heads count from 0."
    )
    return Section(
        "For reference: the paper's BERT-base",
        text,
        [
            Table.of_rows(
                ("of", *MOMENTS), moments, "Tables 1 and 2: the heads and layers that vary most and least, and all."
            ),
            Table.of_rows(("kind of token", "pairs", "Spearman"), rows, "Table 3."),
        ],
    )

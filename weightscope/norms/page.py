"""Norm-based analysis as a page: what attention gives to kinds of token, as weights and as vectors."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weightscope.folder import Files
from weightscope.mathml import plain
from weightscope.norms import figures, paper
from weightscope.norms.measure import NormAnalysis
from weightscope.norms.statistics import MOMENTS
from weightscope.pages.page import Figure, Filed, Section, write_page
from weightscope.pages.style import save
from weightscope.progress import phase
from weightscope.tables import Column, Table


@phase("drawing figures")
def write_report(files: Files, norms: NormAnalysis, source: str) -> None:
    """Draw the figures and write report.html; `source` says where the texts come from.

    The paper's numbers stand beside the model's where it is the paper's, in a section of their own where it is not.
    """
    printed = norms.model.partition("@")[0] in paper.MODELS
    sections = [
        _given(files, norms),
        _ranks(files, norms, printed),
        _heads(files, norms),
        _stretch(files, norms, printed),
        *([] if printed else [_reference()]),
        _lengths(norms, printed),
    ]
    write_page(
        files, "report.html", f"What attention adds up in {norms.model}", lead(norms, source), sections, of=norms.model
    )


def lead(norms: NormAnalysis, source: str) -> str:
    """What each kind of special token and punctuation gets of the weights and gives to the sum, and what was run."""
    *kinds, _ = norms.shares.rows()  # all other tokens are the last
    said = (
        f"{kind} takes {weight:.1%} of the attention weight and gives {length:.1%}" for kind, weight, length in kinds
    )
    return (
        f"{'; '.join(said)} of the length of the vectors added up; the rest is all other tokens'. "
        f"Run on {norms.n_sequences:,} sequences, {norms.n_tokens:,} tokens, from {source}."
    )


def _given(files: Files, norms: NormAnalysis) -> Section:
    figure = Figure(
        save(figures.layer_figure(norms), files, "layers"),
        "Fig. 5: attention weight (left) and length of the vectors added up (right) that a query takes from each kind "
        "of token: summed over a sequence's tokens of the kind, then the mean over queries, sequences and heads.",
    )
    text = (
        "$$y_i = sum_j alpha_(i j) f(x_j) + b_O$$ $$f(x) = (x W_V + b_V) W_O$$ "
        "Attention adds up $alpha f(x)$. A large weight on a short vector adds little."
    )
    if norms.gated:
        text += " Here a gate multiplies what a head has gathered, by the query; $f$ leaves it out."
    shares = Filed(norms.shares, "shares.csv")
    return Section("What attention weights say, and what is added up", text, [figure, shares])


def _ranks(files: Files, norms: NormAnalysis, printed: bool) -> Section:
    table = _beside(norms.kinds, 1, paper.TABLE_3, ("pairs", "Spearman")) if printed else norms.kinds
    sampled = " + ".join(f"{len(pairs):,}" for pairs in norms.pairs)
    figure = Figure(
        save(figures.pair_figure(norms), files, "pairs"),
        f"Fig. 3: a random sample of these pairs ({sampled} points), $alpha$ on a logarithmic scale; the other kinds "
        f"in light grey. The {figures.OFF:.0%} with the smallest weights lie off the left edge.",
    )
    text = "They do where Spearman's correlation is negative."
    if norms.kind_names == tuple(kind for (kind,) in paper.TABLE_3):
        beside = zip(norms.kinds.rows(), paper.TABLE_3.values(), strict=True)
        said = (f"{plain(kind)} {rho:.2f} ({theirs:.2f})" for (kind, _, rho, _), (_, theirs) in beside)
        text += f" Here, and in the paper's BERT-base (in parentheses): {'; '.join(said)}."
    ranks = table if printed else Filed(table, "kinds.csv")
    return Section("Do large weights meet short vectors?", text, [ranks, figure])


def _heads(files: Files, norms: NormAnalysis) -> Section:
    figure = Figure(
        save(figures.head_figure(norms), files, "heads"),
        "Fig. 4, for every kind: the weight that a head gives to the kind (above; sum over a sequence's tokens, mean "
        "over queries and sequences) and the mean $|f(x)|$ of its tokens (below).",
    )
    text = "A head that gives nearly all of its weight to a kind that $f$ makes short adds nearly nothing."
    return Section("Head by head", text, [figure])


def _stretch(files: Files, norms: NormAnalysis, printed: bool) -> Section:
    s = norms.singular_values
    heads = np.random.default_rng(norms.seed).integers(0, s.shape[1], len(s))
    with np.errstate(divide="ignore"):
        stretch = s[..., 0] / s[..., -1]
    text = (
        f"$f$ stretches one direction at least {stretch.min():.2g} times as much as another in every head; the median "
        f"over heads is {np.median(stretch):.3g}."
    )
    if printed:
        text += f" The paper's heads: at least {paper.LEAST_STRETCH:g} times."
    drawn = ", ".join(f"{layer}.{head}" for layer, head in zip(norms.layer_indices, heads, strict=True))
    figure = Figure(
        save(figures.singular_value_figure(norms, heads), files, "singular-values"),
        "Fig. 2: singular values of $f$ as a linear map on $[x 1]$ (eqs 9-11), from the weights alone; one head a "
        f"layer, drawn at random (layer.head): {drawn}. Where a norm stands before attention, $x$ is the normalised "
        "input.",
    )
    return Section("How f stretches", text, [figure])


def _lengths(norms: NormAnalysis, printed: bool) -> Section:
    layers = norms.layers.select("layer", *(f"|x| {name}" for name in MOMENTS))
    heads = norms.heads.select("layer", "head", *(f"|f| {name}" for name in MOMENTS))
    heads = heads.sorted_by("|f| cv", descending=True)
    layer, head, cv = (heads[name] for name in ("layer", "head", "|f| cv"))
    text = (
        f"$|f(x)|$ varies by {cv[0]:.0%} of its mean in layer {layer[0]} head {head[0]}, by {cv[-1]:.0%} in layer "
        f"{layer[-1]} head {head[-1]}; heads are in this order. $|x|$ is the length of the residual stream as it "
        "enters the layer, before a norm where there is one."
    )
    summary = norms.summary
    if printed:
        summary = _beside(summary, 1, paper.LAST_ROWS, MOMENTS)
        layers, heads = _beside(layers, 1, paper.TABLE_2, MOMENTS), _beside(heads, 2, paper.TABLE_1, MOMENTS)
        return Section("How much the lengths vary", text, [summary, layers, heads])
    filed = [Filed(summary, "summary.csv"), Filed(layers, "layers.csv"), Filed(heads, "heads.csv")]
    return Section("How much the lengths vary", text, filed)


def _beside(table: Table, n_keys: int, printed: Mapping[Any, Sequence[float]], names: Sequence[str]) -> Table:
    """A table with the paper's numbers to the right, by its first `n_keys` cells; empty where the paper prints none."""
    rows = [printed.get(tuple(row[:n_keys]), [np.nan] * len(names)) for row in table.rows()]
    columns = [Column(f"paper's {name}", values) for name, values in zip(names, zip(*rows, strict=True), strict=True)]
    return Table([*table.columns, *columns], table.caption)


def _reference() -> Section:
    """The paper's own numbers, which are of another model."""
    moments = [
        *((f"|f(x)|, layer {layer} head {head}", *row) for (layer, head), row in paper.TABLE_1.items()),
        *((f"|x|, layer {layer}", *row) for (layer,), row in paper.TABLE_2.items()),
        *((of, *row) for (of,), row in paper.LAST_ROWS.items()),
    ]
    ranks = [(kind, *row) for (kind,), row in paper.TABLE_3.items()]
    caption = "Tables 1 and 2: the heads and layers that vary most and least, and all."
    tables = [
        Table.of_rows(("of", *MOMENTS), moments, caption),
        Table.of_rows(("kind of token", "pairs", "Spearman"), ranks, "Table 3."),
    ]
    text = (
        "Printed by Kobayashi, Kuribayashi, Yokoi, Suzuki and Inui for another model, BERT-base (uncased), on 992 "
        "sequences of the English Wikipedia; nothing here was measured. Layers and heads count from 0."
    )
    return Section("For reference: the paper's BERT-base", text, tables)

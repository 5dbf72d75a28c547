"""Page of a norm-based analysis, with the norm-based-attention paper's numbers for BERT-base.

Kobayashi, Kuribayashi, Yokoi, Suzuki and Inui, ベクトル長に基づく自己注意機構の解析 (an analysis of
self-attention by lengths of vectors): Tables 1 to 3, and Fig. 2 in the words of section 5.2. The
paper ran 992 sequences of at most 128 tokens, each two consecutive paragraphs of the English
Wikipedia. The paper counts layers and heads from 1, this file from 0.

Every table has the keys of its rows in `NormAnalysis`, and gives their moments: mean, sd, cv, max,
min.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from weightscope.core.files import Files
from weightscope.core.formulas import plain
from weightscope.core.tables import Column, Table
from weightscope.heads.norms import figures
from weightscope.heads.norms.measure import MOMENTS, NormAnalysis
from weightscope.report.pages.page import Figure, Filed, Section, report
from weightscope.report.pages.style import save

MODELS = ("bert-base-uncased", "google-bert/bert-base-uncased")

TABLE_1 = {  # |f(x)| of the heads that vary most and least, by layer and head
    (1, 3): (4.26, 1.59, 0.37, 12.66, 0.96),
    (1, 6): (3.40, 0.50, 0.12, 6.15, 1.35),
}
TABLE_2 = {  # |x| of the layers that vary most and least
    (11,): (20.49, 4.62, 0.23, 32.84, 4.13),
    (6,): (21.64, 1.40, 0.06, 23.03, 11.87),
}
LAST_ROWS = {  # the last rows of both tables
    ("|f(x)|, all heads together",): (5.15, 1.75, 0.34, 18.64, 0.10),
    ("|x|, all layers together",): (19.93, 3.03, 0.15, 32.84, 4.13),
}
TABLE_3 = {  # pairs (i, j), and Spearman's rank correlation of alpha and |f(x)|, by the kind of j
    ("[CLS]",): (17_443_296, -0.34),
    ("[SEP]",): (34_886_592, -0.69),
    (". or ,",): (182_838_528, -0.25),
    ("other",): (1_944_928_224, -0.06),
}

SEPARATORS = 2  # [SEP] in each of the paper's texts
LEAST_STRETCH = 1.8  # Fig. 2: largest over smallest singular value of f, at least, in every head


# The page


@report("What attention adds up in {0.model}")
def write_norms_page(files: Files, norms: NormAnalysis) -> Iterator[Section]:
    """Write the page; the paper's numbers come next to its own model's, or alone."""
    printed = norms.model.partition("@")[0] in MODELS
    yield _given(files, norms)
    yield _ranks(files, norms, printed)
    yield _heads(files, norms)
    yield _stretch(files, norms, printed)
    if not printed:
        yield _reference()
    yield _lengths(norms, printed)


def _given(files: Files, norms: NormAnalysis) -> Section:
    figure = Figure(
        save(figures.layer_figure(norms), files, "layers"),
        "Fig. 5: attention weight (left) and length of the vectors added up (right) that a query "
        "takes from each kind of token: summed over a sequence's tokens of the kind, then the "
        "mean over queries, sequences and heads.",
    )
    text = (
        "$$y_i = sum_j alpha_(i j) f(x_j) + b_O$$ $$f(x) = (x W_V + b_V) W_O$$ "
        "Attention adds up $alpha f(x)$: a large weight on a short vector adds little."
    )
    if norms.gated:
        text += (
            " In this model a gate, which depends on the query, multiplies what a head gathers; "
            "$f$ leaves it out."
        )
    filed = [Filed(norms.shares, "shares.csv"), Filed(norms.mixing, "mixing.csv")]
    return Section("What attention weights say, and what is added up", text, [figure, *filed])


def _ranks(files: Files, norms: NormAnalysis, printed: bool) -> Section:
    table = _beside(norms.kinds, 1, TABLE_3, ("pairs", "Spearman")) if printed else norms.kinds
    sampled = " + ".join(f"{len(pairs):,}" for pairs in norms.pairs)
    figure = Figure(
        save(figures.pair_figure(norms), files, "pairs"),
        f"Fig. 3: a random sample of these pairs ({sampled} points), $alpha$ on a logarithmic "
        f"scale; the other kinds in pale grey. The {figures.OFF:.0%} with the smallest weights lie "
        "off the left edge.",
    )
    text = "They do if Spearman's correlation is negative."
    # an encoder's two special tokens, whatever it calls them
    if len(norms.kind_names) == len(TABLE_3):
        correlations = []
        rows = zip(norms.kinds.rows(), TABLE_3.items(), strict=True)
        for (kind, _, rho, _), ((name,), (_, theirs)) in rows:
            paper_kind = f"{name}, " if name != kind else ""
            correlations.append(f"{plain(kind)} {rho:.2f} ({paper_kind}{theirs:.2f})")
        text += f" Here, and in the paper's BERT-base (in parentheses): {'; '.join(correlations)}."
        first, last, *_ = norms.kinds["pairs"]
        if first and last != SEPARATORS * first:
            text += (
                f" A text has {last / first:.3g} {plain(norms.kind_names[1])}, where the paper's "
                f"have {SEPARATORS} [SEP]."
            )
    everything, *tenths = norms.parts
    varies = [tenth.variation for tenth in tenths]
    text += (
        f" Over all pairs it is {everything.ranks.rho:.2f} ({everything.by_group:.2f} with weights "
        f"shuffled within each kind of token). $|f(x)|$ varies by {min(varies):.0%} to "
        f"{max(varies):.0%} of its mean within tenths of the pairs by weight, and by "
        f"{everything.variation:.0%} over all pairs."
    )
    ranks = table if printed else Filed(table, "kinds.csv")
    weights = Filed(norms.weights, "weights.csv")
    return Section("Do large weights meet short vectors?", text, [ranks, weights, figure])


def _heads(files: Files, norms: NormAnalysis) -> Section:
    figure = Figure(
        save(figures.head_figure(norms), files, "heads"),
        "Fig. 4, for every kind: the weight that a head gives to the kind (above; sum over a "
        "sequence's tokens, mean over queries and sequences) and the mean $|f(x)|$ of its tokens "
        "(below).",
    )
    text = (
        "A head that gives nearly all of its weight to a kind that $f$ makes short adds nearly "
        "nothing."
    )
    return Section("Head by head", text, [figure])


def _stretch(files: Files, norms: NormAnalysis, printed: bool) -> Section:
    s = norms.singular_values
    heads = np.random.default_rng(norms.seed).integers(0, s.shape[1], len(s))
    with np.errstate(divide="ignore"):
        stretch = s[..., 0] / s[..., -1]
    text = (
        f"$f$ stretches one direction at least {stretch.min():.2g} times as much as another in "
        f"every head; the median over heads is {np.median(stretch):.3g}."
    )
    if printed:
        text += f" The paper's heads: at least {LEAST_STRETCH:g} times."
    places = zip(norms.layer_indices, heads, strict=True)
    drawn = ", ".join(f"{layer}.{head}" for layer, head in places)
    figure = Figure(
        save(figures.singular_value_figure(norms, heads), files, "singular-values"),
        "Fig. 2: singular values of $f$ as a linear map on $[x 1]$ (eqs 9-11), from the weights "
        f"alone; one head a layer, drawn at random (layer.head): {drawn}. If a norm precedes "
        "attention, $x$ is the normalised input.",
    )
    return Section("How f stretches", text, [figure])


def _lengths(norms: NormAnalysis, printed: bool) -> Section:
    layers = norms.layers.select("layer", *(f"|x| {name}" for name in MOMENTS))
    heads = norms.heads.select("layer", "head", *(f"|f| {name}" for name in MOMENTS))
    heads = heads.sort("|f| cv", descending=True)
    layer, head, cv = (heads[name] for name in ("layer", "head", "|f| cv"))
    text = (
        f"$|f(x)|$ varies by {cv[0]:.0%} of its mean in layer {layer[0]} head {head[0]}, by "
        f"{cv[-1]:.0%} in layer {layer[-1]} head {head[-1]}; heads are in this order. $|x|$ is the "
        "length of the residual stream as it enters the layer, before any norm."
    )
    summary = norms.summary
    if printed:
        summary = _beside(summary, 1, LAST_ROWS, MOMENTS)
        layers, heads = _beside(layers, 1, TABLE_2, MOMENTS), _beside(heads, 2, TABLE_1, MOMENTS)
        return Section("How much the lengths vary", text, [summary, layers, heads])
    filed = [Filed(summary, "summary.csv"), Filed(layers, "layers.csv"), Filed(heads, "heads.csv")]
    return Section("How much the lengths vary", text, filed)


def _beside(
    table: Table, n_keys: int, printed: Mapping[Any, Sequence[float]], names: Sequence[str]
) -> Table:
    """Add the paper's numbers as columns, matched by `n_keys` first cells; NaN if not printed."""
    rows = [printed.get(tuple(row[:n_keys]), [np.nan] * len(names)) for row in table.rows()]
    columns = zip(names, zip(*rows, strict=True), strict=True)
    paper = [Column(f"paper's {name}", values) for name, values in columns]
    return Table([*table.columns, *paper], table.caption)


def _reference() -> Section:
    """The paper's numbers for its own model."""
    moments = [
        *((f"|f(x)|, layer {layer} head {head}", *row) for (layer, head), row in TABLE_1.items()),
        *((f"|x|, layer {layer}", *row) for (layer,), row in TABLE_2.items()),
        *((model, *row) for (model,), row in LAST_ROWS.items()),
    ]
    ranks = [(kind, *row) for (kind,), row in TABLE_3.items()]
    caption = "Tables 1 and 2: the heads and layers that vary most and least, and all."
    tables = [
        Table.of_rows(("of", *MOMENTS), moments, caption),
        Table.of_rows(("kind of token", "pairs", "Spearman"), ranks, "Table 3."),
    ]
    text = (
        "Printed by Kobayashi, Kuribayashi, Yokoi, Suzuki and Inui for another model, BERT-base "
        "(uncased), on 992 sequences of the English Wikipedia; none of them was measured here. "
        "Layers and heads count from 0."
    )
    return Section("For reference: the paper's BERT-base", text, tables)

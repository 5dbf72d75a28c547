"""Page of an outlier analysis, with the paper's Table 1 for bert-base-uncased.

It is in paper.csv: means over 100 sentences of the STS-B dev set. Layers are counted from 0 there,
from 1 in the paper.
"""

import csv
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path

import numpy as np

from weightscope.core.files import Files, regular_file
from weightscope.core.formulas import plain
from weightscope.core.tables import Column, Table
from weightscope.heads.outliers import figures
from weightscope.heads.outliers.measure import (
    DIMENSION_Z,
    NAMED,
    Contributions,
    OutlierAnalysis,
    StreamMeans,
)
from weightscope.report.findings import indexed, spans
from weightscope.report.pages.page import Figure, Filed, Section, report
from weightscope.report.pages.style import save

MODELS = ("bert-base-uncased", "google-bert/bert-base-uncased")
KINDS = ("[CLS]", "[SEP]", ". or ,", "other")
LAYERS = (1, 5, 11)  # the paper's 2, 6 and 12


def _printed() -> dict[tuple[int, int], np.ndarray]:
    """C in the paper's Table 1, (kinds, heads), by layer and dimension."""
    table: dict[tuple[int, int], list[list[float]]] = {}
    with regular_file(Path(__file__).with_name("paper.csv")) as file:
        _, *rows = csv.reader(TextIOWrapper(file, "utf-8"))
    for layer, dimension, _, *heads in rows:
        place = int(layer), int(dimension)
        table.setdefault(place, []).append([float(cell) for cell in heads])
    return {key: np.array(rows) for key, rows in table.items()}


TABLE_1 = _printed()


@report("Outlier dimensions and attention in {0.model}")
def write_outliers_page(files: Files, outliers: OutlierAnalysis) -> Iterator[Section]:
    """Write the page: outlier dimensions, how they change scores, and what predicts them."""
    named = outliers.dimensions[:NAMED]
    yield _stream(files, outliers)
    yield _attention(files, outliers.stream)
    if len(named):
        yield _values(files, outliers.stream, outliers.dimensions)
    yield _contributions(files, outliers)
    if len(named):
        yield _by_kind(outliers.contributions, named)
    yield _preferences(files, outliers)
    yield _guess(files, outliers, named)
    yield _paper(outliers.contributions, outliers.model)


def _stream(files: Files, outliers: OutlierAnalysis) -> Section:
    stream = outliers.stream
    text = (
        "A dimension is an outlier of a layer's output where its mean over all "
        f"{stream.counts.sum():,} tokens, or over one kind of token, is more than {DIMENSION_Z:g} "
        "robust standard deviations (1.4826 times the median absolute deviation) from the median "
        "of that output's dimensions. Means spread as a normal distribution have none so far out; "
        "with tails as heavy as a Laplace distribution's, one dimension in 30,000 is. The paper "
        "averages over all tokens; a dimension that is large on one token of each sentence only "
        "shows up by kind."
    )
    figure = Figure(
        save(figures.means_figure(outliers), files, "stream"),
        "Fig. 1: mean over all tokens of every dimension: range over layers (grey) and, for "
        "outliers among these means, a dot for each output, from left to right. Output 0 is what "
        "enters the first layer; attention layer i, counted from 0, reads output i.",
    )
    tables = [_outlier_table(stream)] if len(stream.outliers) else []
    return Section("Outlier dimensions", text, [figure, *tables])


def _outlier_table(stream: StreamMeans) -> Table:
    """The outputs in which a dimension is an outlier, by scope, and where it is farthest out."""
    scopes = ("all tokens", *stream.kind_names)
    rows = []
    for j in stream.outliers:
        z = np.nan_to_num(np.abs(stream.z[:, j]))  # (L + 1, 1 + K)
        output, scope = np.unravel_index(z.argmax(), z.shape)
        outputs = [spans(np.flatnonzero(distances > DIMENSION_Z)) for distances in z.T]
        farthest = float(stream.means[output, j, scope]), float(stream.z[output, j, scope])
        rows.append((int(j), *outputs, f"{scopes[scope]} in output {output}", *farthest))
    header = ("dimension", *scopes, "farthest over", "mean of these", "robust z")
    caption = (
        "Outputs in which a dimension is an outlier, by the mean over all tokens or over the "
        "tokens of one kind."
    )
    return Table.of_rows(header, rows, caption)


def _attention(files: Files, stream: StreamMeans) -> Section:
    by_layer = stream.attention.mean(axis=1)  # (L, K)
    most = np.nanargmax(by_layer, axis=1)
    parts = []
    for kind in dict.fromkeys(most):
        layers = stream.layer_indices[most == kind]
        name = plain(stream.kind_names[kind])
        parts.append(f"{name} in {indexed('layer', layers)}")
    figure = Figure(
        save(figures.attention_figure(stream), files, "attention"),
        "Fig. 2: attention that one token of a kind receives from the average query that can see "
        "it; all heads.",
    )
    text = f"A token gets most if it is {'; '.join(parts)}."
    return Section("Attention by kind of token", text, [figure])


def _values(files: Files, stream: StreamMeans, dimensions: np.ndarray) -> Section:
    caption = (
        "Fig. 3: mean value of each outlier dimension over the tokens of a kind, in every layer's "
        "output, the farthest out first."
    )
    if (left_out := len(dimensions) - figures.MOST_DRAWN) > 0:
        caption += f" The other {left_out} are in stream.csv."
    drawing = save(figures.values_figure(stream, dimensions), files, "values")
    return Section("Outlier dimensions by kind of token", "", [Figure(drawing, caption)])


def _contributions(files: Files, outliers: OutlierAnalysis) -> Section:
    c = outliers.contributions
    text = (
        "$$C_j = ((x_m W_Q + b_Q) W_K^⊤)_j x_(n j)$$ is what dimension $j$ of key $n$ adds to the "
        "score of query $m$ (eq. 7), before $1/√(d')$; here as the mean over the queries that see "
        f"a key, and over all keys of all inputs, {c.counts.sum():,} of them, each with equal "
        "weight (a mean over pairs of query and key would weigh long inputs and, under a causal "
        "mask, early keys more). $x$ is what $W_Q$ and $W_K$ act on: the residual stream, divided "
        "by $σ$ where a norm was folded into them. Under rotation the query is turned by its true "
        "distance to the key, and norms of queries and keys count, so that the sum over $j$ is "
        "the model's own score, minus terms that are the same for every key."
    )
    if c.left_out:
        text += f" In this model the sum leaves out {'; '.join(c.left_out)}."
    shown = layers_shown(len(c.layer_indices))
    few = Figure(
        save(figures.contributions_figure(c, shown, outliers.dimensions), files, "contributions"),
        "Fig. 4: mean $C$ of every dimension, one dot per head, in layers "
        f"{spans(c.layer_indices[shown])}. Large values are named where there is room, in grey if "
        "the dimension is not an outlier of the stream.",
    )
    every = Figure(
        save(figures.all_layers_figure(c, outliers.dimensions), files, "contributions-all-layers"),
        "Fig. 5: the same for all layers, each on its own scale.",
    )
    dominant = Filed(c.dominant(outliers.dimensions), "dominant.csv")
    return Section("What dimensions add to attention scores", text, [few, every, dominant])


def _by_kind(c: Contributions, named: np.ndarray) -> Section:
    table = c.table(named)
    some = [kind for kind, count in zip(c.kind_names, c.counts, strict=True) if count]
    layers = c.layer_indices[layers_shown(len(c.layer_indices))]
    shown = np.isin(table["layer"], layers) & np.isin(table["key"], some)
    caption = (
        "Table 1: mean $C$ of the outlier dimensions by kind of key token. contributions.csv has "
        "every layer."
    )
    table = Table(table.where(shown).columns, caption)
    return Section("By kind of key", "", [Filed(table, "contributions.csv")])


def _preferences(files: Files, outliers: OutlierAnalysis) -> Section:
    c, dimensions = outliers.contributions, outliers.dimensions
    last_kind = plain(c.kind_names[-1])
    gaps = c.gaps.reshape(-1, c.gaps.shape[-1])  # in the order of the table's rows
    most = []
    for gap in gaps:
        largest = np.argsort(-np.abs(gap))[:3]
        most.append(", ".join(f"{gap[j]:+.2f} by {j}" for j in largest))
    table = outliers.preferences.select("layer", "key", "score_above_other", "of_outliers")
    table = Table([*table.columns, Column("most", most, "dimensions that add most")])
    text = (
        f"How much higher keys of a kind score than {last_kind} ones, mean over heads, before "
        "$1/√(d')$, and which dimensions cause it. Sums of $C$ are scores up to terms that are "
        f"the same for all keys{c.apart_from or ', so nothing is missing'}."
    )
    figure = Figure(
        save(figures.preferences_figure(c, dimensions), files, "preferences"),
        f"How much higher a kind of key scores than {last_kind} ones: by all dimensions, the "
        "outliers together, and the two dimensions that add most (dotted if these are not "
        "outliers).",
    )
    known = table.where(~np.isnan(gaps[:, 0]))
    return Section("What makes a kind of key preferred", text, [figure, known])


def _guess(files: Files, outliers: OutlierAnalysis, named: np.ndarray) -> Section:
    agreement = outliers.agreement
    text = (
        "Guessed from the weights alone: the norm of each column of $W_QK$; the gain $gamma$ of "
        "the norm that feeds attention; how extreme either is, up or down, in robust standard "
        "deviations of its log; and eq. 7 for a token equal to that norm's $beta$. Spearman's "
        "correlation over dimensions with the measurement: the mean of $|C|$ over heads, or the "
        "size of the mean over tokens."
    )
    figure = Figure(
        save(figures.guess_figure(agreement), files, "guess"),
        "Rank correlation over dimensions between a guess and the measurement, layer by layer.",
    )
    ranked = [outliers.guess.ranks_of(outliers.contributions, named)] if len(named) else []
    guesses = Filed(agreement, "guess.csv")
    return Section("What the weights alone predict", text, [figure, guesses, *ranked])


def _paper(c: Contributions, model: str) -> Section:
    """The paper's Table 1, next to this model's numbers if it is the same model."""
    same = model.partition("@")[0] in MODELS and c.by_kind.shape[:3] == (12, 12, 768)
    header = ("layer", "dimension", "key", *(f"head {head}" for head in range(12)))
    rows, worst = [], 0.0
    for (layer, j), printed in TABLE_1.items():
        measured = c.by_kind[layer, :, j].T if same else printed  # (kinds, heads)
        for kind, theirs, ours in zip(KINDS, printed, measured, strict=True):
            cells = theirs
            if same:
                cells = [f"{a:.1f} / {b:.1f}" for a, b in zip(theirs, ours, strict=True)]
            rows.append((layer, j, kind, *cells))
        worst = max(worst, float(np.abs(measured - printed).max()))
    if same:
        text = f"The paper's number / this run's. They differ by at most {worst:.2f}."
    else:
        text = f"For reference: the paper's numbers are for {MODELS[0]}, a different model."
    text += " Layers are counted from 0: the paper's 2, 6 and 12."
    return Section("The paper's Table 1", text, [Table.of_rows(header, rows)])


def layers_shown(n_layers: int) -> list[int]:
    """An early, a middle and the last layer: the paper's 2, 6 and 12 of 12, counted from 0."""
    return sorted({max(0, round(n_layers / 6) - 1), max(0, n_layers // 2 - 1), n_layers - 1})

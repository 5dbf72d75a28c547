"""The outlier-dimensions analysis as a page."""

from collections.abc import Sequence

import numpy as np

from weightscope.folder import Files
from weightscope.mathml import plain
from weightscope.outlier_dimensions import figures, paper
from weightscope.outlier_dimensions.contributions import Contributions
from weightscope.outlier_dimensions.measure import OutlierAnalysis
from weightscope.outlier_dimensions.stream import DIMENSION_Z, Stream
from weightscope.pages.page import Figure, Filed, Section, write_page
from weightscope.pages.style import save
from weightscope.progress import phase
from weightscope.tables import Column, Table

NAMED = 6  # outlier dimensions that figures and tables of the page are about; the files have all


@phase("drawing figures")
def write_report(files: Files, outliers: OutlierAnalysis, source: str) -> None:
    """Draw the figures and write report.html; `source` says where the sentences come from."""
    named = outliers.dimensions[:NAMED]
    sections = [
        _stream(files, outliers.stream),
        _attention(files, outliers.stream),
        *([_values(files, outliers.stream, named)] if len(named) else []),
        _contributions(files, outliers),
        *([_by_kind(outliers.contributions, named)] if len(named) else []),
        _preferences(files, outliers),
        _guess(files, outliers, named),
        _paper(outliers.contributions, outliers.model),
    ]
    title = f"Outlier dimensions and attention in {outliers.model}"
    write_page(files, "report.html", title, lead(outliers, source), sections, of=outliers.model)


def lead(outliers: OutlierAnalysis, source: str) -> str:
    """How many dimensions stand out, what they do where a kind of key scores farthest from the others, what was run."""
    c, dimensions, d = outliers.contributions, outliers.dimensions, outliers.stream.hidden.shape[1]
    gaps = np.nan_to_num(c.gaps)  # (L, K - 1, d)
    layer, kind = np.unravel_index(np.abs(gaps.sum(axis=-1)).argmax(), gaps.shape[:2])
    gap = gaps[layer, kind]
    j, whole = int(np.abs(gap).argmax()), float(gap.sum())
    says = (
        f"In layer {c.layer_indices[layer]} {c.kind_names[kind]} keys score {abs(whole):.2f} "
        f"{'above' if whole >= 0 else 'below'} {c.kind_names[-1]} ones (mean over heads, before 1/√d'), and "
        f"dimension {j} adds {gap[j]:+.2f} to that"
    )
    run_on = f"Run on {outliers.stream.counts.sum():,} tokens of {source}."
    if not len(dimensions):
        return f"None of the {d} dimensions stands out by its mean over tokens. {says}. {run_on}"
    of_outliers = f"{'the outlier' if len(dimensions) == 1 else 'outliers together'} {gap[dimensions].sum():+.2f}"
    which = _listed(dimensions[:NAMED]) + (" and others" if len(dimensions) > NAMED else "")
    them = "one stands" if len(dimensions) == 1 else f"{len(dimensions)} stand"
    return (
        f"Of {d} dimensions of the residual stream, {them} out in some layer: {which}. {says}; {of_outliers}. {run_on}"
    )


def _stream(files: Files, stream: Stream) -> Section:
    text = (
        f"A dimension is an outlier of a layer's output where its mean over all {stream.counts.sum():,} tokens, or "
        f"over those of one kind, is more than {DIMENSION_Z:g} robust standard deviations (1.4826 times the median "
        "absolute deviation) from the median of that output's dimensions. Means spread as a normal distribution have "
        "none so far out; with tails as heavy as a Laplace distribution's, one dimension in 30,000 is. The paper looks "
        "at all tokens; a dimension that is large on one token of each sentence shows by kind alone."
    )
    figure = Figure(
        save(figures.means_figure(stream), files, "stream"),
        "Fig. 1: mean over all tokens of every dimension, a line a layer. Output 0 is what enters the first layer; "
        "attention layer i, counted from 0, reads output i. Outliers among these means are named.",
    )
    return Section("Outlier dimensions", text, [figure, *([_outlier_table(stream)] if len(stream.outliers) else [])])


def _outlier_table(stream: Stream) -> Table:
    """In which outputs a dimension is an outlier, by scope, and where it is farthest."""
    scopes = ("all tokens", *stream.kind_names)
    rows = []
    for j in stream.outliers:
        z = np.nan_to_num(np.abs(stream.z[:, j]))  # (L + 1, 1 + K)
        output, scope = np.unravel_index(z.argmax(), z.shape)
        outputs = [_listed(np.flatnonzero(of_scope > DIMENSION_Z)) for of_scope in z.T]
        farthest = float(stream.means[output, j, scope]), float(stream.z[output, j, scope])
        rows.append((int(j), *outputs, f"{scopes[scope]} in output {output}", *farthest))
    header = ("dimension", *scopes, "farthest over", "mean of these", "robust z")
    caption = "Outputs in which a dimension is an outlier, of the mean over all tokens or of a kind."
    return Table.of_rows(header, rows, caption)


def _attention(files: Files, stream: Stream) -> Section:
    by_layer = stream.attention.mean(axis=1)  # (L, K)
    most = np.nanargmax(by_layer, axis=1)
    parts = []
    for kind in dict.fromkeys(most):
        layers = stream.layer_indices[most == kind]
        name = plain(stream.kind_names[kind])
        parts.append(f"{name} in {'layer' if len(layers) == 1 else 'layers'} {_listed(layers)}")
    figure = Figure(
        save(figures.attention_figure(stream), files, "attention"),
        "Fig. 2: attention that one token of a kind receives from a mean query, of those that may see it; all heads.",
    )
    return Section("Attention by kind of token", f"A token gets most if it is {'; '.join(parts)}.", [figure])


def _values(files: Files, stream: Stream, named: np.ndarray) -> Section:
    figure = Figure(
        save(figures.values_figure(stream, named), files, "values"),
        "Fig. 3: mean value of each outlier dimension over the tokens of a kind, in every layer's output.",
    )
    return Section("Outlier dimensions by kind of token", "", [figure])


def _contributions(files: Files, outliers: OutlierAnalysis) -> Section:
    c = outliers.contributions
    text = (
        "$$C_j = ((x_m W_Q + b_Q) W_K^⊤)_j x_(n j)$$ is what dimension $j$ of key $n$ adds to the score of query $m$ "
        "(eq. 7), before $1/√(d')$; here as the mean over the queries that see a key, and over all keys of all "
        f"inputs, {c.counts.sum():,} of them, each counting alike (a mean over pairs of query and key would weigh long "
        "inputs and, under a causal mask, early keys more). $x$ is what $W_Q$ and $W_K$ act on: the residual stream, "
        "divided by $σ$ where a norm was folded into them. Under rotation the query is turned by its true distance to "
        "the key, and norms of queries and keys count, so that the sum over $j$ is the model's own score, less terms "
        "that are the same for every key."
    )
    if c.left_out:
        text += f" In this model it is so but for {'; '.join(c.left_out)}."
    shown = layers_shown(len(c.layer_indices))
    few = Figure(
        save(figures.contributions_figure(c, shown, outliers.dimensions), files, "contributions"),
        f"Fig. 4: mean $C$ of every dimension, a dot a head, in layers {_listed(c.layer_indices[shown])}. "
        "Large ones are named, in grey where the dimension is no outlier of the stream.",
    )
    every = Figure(
        save(figures.all_layers_figure(c, outliers.dimensions), files, "contributions-all-layers"),
        "Fig. 5: the same for all layers, each on its own scale.",
    )
    return Section("What dimensions add to attention scores", text, [few, every])


def _by_kind(c: Contributions, named: np.ndarray) -> Section:
    table = c.table(named)
    some = [kind for kind, count in zip(c.kind_names, c.counts, strict=True) if count]
    shown = np.isin(table["layer"], c.layer_indices[layers_shown(len(c.layer_indices))]) & np.isin(table["key"], some)
    caption = "Table 1: mean $C$ of the outlier dimensions by kind of key token. contributions.csv has every layer."
    return Section("By kind of key", "", [Filed(Table(table.where(shown).columns, caption), "contributions.csv")])


def _preferences(files: Files, outliers: OutlierAnalysis) -> Section:
    c, dimensions = outliers.contributions, outliers.dimensions
    other = plain(c.kind_names[-1])
    gaps = c.gaps.reshape(-1, c.gaps.shape[-1])  # a row a row of the table
    most = [", ".join(f"{gap[j]:+.2f} by {j}" for j in np.argsort(-np.abs(gap))[:3]) for gap in gaps]
    table = c.preferences(dimensions).select("layer", "key", "score_above_other", "of_outliers")
    table = Table([*table.columns, Column("most", most, "dimensions that add most")])
    text = (
        f"How much higher keys of a kind score than {other} ones, mean over heads, before $1/√(d')$, and which "
        "dimensions make it so. Sums of $C$ are scores up to what is the same for all keys, so nothing is missing."
    )
    figure = Figure(
        save(figures.preferences_figure(c, dimensions), files, "preferences"),
        f"How much higher a kind of key scores than {other} ones: by all dimensions, by the outliers together, and by "
        "the two dimensions that add most (dotted where these are no outliers).",
    )
    return Section("What makes a kind of key preferred", text, [figure, table.where(~np.isnan(gaps[:, 0]))])


def _guess(files: Files, outliers: OutlierAnalysis, named: np.ndarray) -> Section:
    agreement = outliers.guess.agreement(outliers.stream, outliers.contributions)
    text = (
        "Guessed from the weights alone: the norm of each column of $W_QK$; the gain $gamma$ of the norm that feeds "
        "attention; how extreme either is, up or down, in robust standard deviations of its log; and eq. 7 for a "
        "token that is that norm's $beta$. Spearman's correlation over dimensions with what is measured: the mean of "
        "$|C|$ over heads, or the size of the mean over tokens."
    )
    figure = Figure(
        save(figures.guess_figure(agreement), files, "guess"),
        "Rank correlation over dimensions between a guess and what is measured, layer by layer.",
    )
    ranked = [outliers.guess.ranks_of(outliers.contributions, named)] if len(named) else []
    return Section("What the weights alone would have said", text, [figure, Filed(agreement, "guess.csv"), *ranked])


def _paper(c: Contributions, model: str) -> Section:
    """The paper's Table 1, beside this model's where it is the same."""
    same = model.partition("@")[0] in paper.MODELS and c.by_kind.shape[:3] == (12, 12, 768)
    header = ("layer", "dimension", "key", *(f"head {head}" for head in range(12)))
    rows, worst = [], 0.0
    for (layer, j), printed in paper.TABLE_1.items():
        measured = c.by_kind[layer, :, j].T if same else printed  # (kinds, heads)
        for kind, theirs, ours in zip(paper.KINDS, printed, measured, strict=True):
            cells = [f"{a:.1f} / {b:.1f}" for a, b in zip(theirs, ours, strict=True)] if same else theirs
            rows.append((layer, j, kind, *cells))
        worst = max(worst, float(np.abs(measured - printed).max()))
    if same:
        text = f"The paper's number / this run's. They differ by at most {worst:.2f}."
    else:
        text = f"For reference: these are of {paper.MODELS[0]}, which this model is not."
    text += " Layers are counted from 0: the paper's 2, 6 and 12."
    return Section("The paper's Table 1", text, [Table.of_rows(header, rows)])


def layers_shown(n_layers: int) -> list[int]:
    """An early, a middle and the last layer: the paper's 2, 6 and 12 of 12, counted from 0."""
    return sorted({max(0, round(n_layers / 6) - 1), max(0, n_layers // 2 - 1), n_layers - 1})


def _listed(numbers: Sequence[int] | np.ndarray) -> str:
    """1, 2, 3 and 7 as "1-3, 7"."""
    runs: list[list[int]] = []
    for number in map(int, numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)

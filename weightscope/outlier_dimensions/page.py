"""The outlier-dimensions analysis as sections of a page."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from weightscope.folder import remove_earlier
from weightscope.metrics.outliers import DIMENSION_Z
from weightscope.outlier_dimensions import figures as draw
from weightscope.outlier_dimensions import paper as paper
from weightscope.outlier_dimensions.guess import Guess, extremity, ranks
from weightscope.outlier_dimensions.measure import Contributions, Stream, score_gaps
from weightscope.outlier_dimensions.tables import guess_table
from weightscope.pages.page import Figure, Section
from weightscope.pages.style import save
from weightscope.progress import phase
from weightscope.tables import Table

NAMED = 6  # outlier dimensions that figures and tables of the page are about; the files have all


def layers_shown(n_layers: int) -> list[int]:
    """An early, a middle and the last layer: the paper's 2, 6 and 12 of 12, counted from 0."""
    return sorted({max(0, round(n_layers / 6) - 1), max(0, n_layers // 2 - 1), n_layers - 1})


@phase("drawing figures")
def outlier_sections(
    stream: Stream, found: Contributions, guessed: Guess, model: str, out: Path
) -> tuple[str, list[Section]]:
    """Draw all figures into `out` and say what they show.

    Parameters
    ----------
    stream : Stream
    found : Contributions
    guessed : Guess
    model : str
        Its name; numbers of bert-base-uncased are set beside the paper's.
    out : Path

    Returns
    -------
    lead : str
    sections : list of Section
    """
    remove_earlier(out, r"values\.(png|svg)")
    dimensions = stream.outliers
    named = dimensions[:NAMED]
    sections = [_stream_section(stream, dimensions, out), _attention_section(stream, out)]
    if len(named):
        sections.append(_values_section(stream, named, out))
    sections.append(_contributions_section(found, dimensions, out))
    if len(named):
        sections.append(_table_section(found, named))
    sections += [_preference_section(found, dimensions, out), _guess_section(stream, found, guessed, named, out)]
    sections.append(_paper_section(found, model))
    return _lead(stream, found, dimensions), sections


def _lead(stream: Stream, found: Contributions, dimensions: np.ndarray) -> str:
    d = stream.hidden.shape[1]
    gaps = np.nan_to_num(score_gaps(found))  # (L, n_kinds - 1, d)
    i, k = np.unravel_index(np.abs(gaps.sum(axis=-1)).argmax(), gaps.shape[:2])
    gap, j = gaps[i, k], int(np.abs(gaps[i, k]).argmax())
    says = (
        f"In layer {found.layers[i]} {found.kinds[k]} keys score {_above(gap.sum())} {found.kinds[-1]} ones (mean over "
        f"heads, before 1/sqrt(d')), and dimension {j} adds {gap[j]:+.2f} to that"
    )
    if not len(dimensions):
        return f"None of the {d} dimensions stands out by its mean over tokens. {says}."
    says = f"{says}; {'the outlier' if len(dimensions) == 1 else 'outliers together'} {gap[dimensions].sum():+.2f}."
    which = _listed(dimensions[:NAMED]) + (" and others" if len(dimensions) > NAMED else "")
    them = "one stands" if len(dimensions) == 1 else f"{len(dimensions)} stand"
    return f"Of {d} dimensions of the residual stream, {them} out in some layer: {which}. {says}"


def _above(gap: float) -> str:
    return f"{abs(gap):.2f} {'above' if gap >= 0 else 'below'}"


def _stream_section(stream: Stream, dimensions: np.ndarray, out: Path) -> Section:
    z, scopes = stream.z, ("all tokens", *stream.kinds)
    text = (
        f"A dimension is an outlier of a layer's output where its mean over all {stream.counts.sum():,} tokens, or "
        f"over those of one kind, is more than {DIMENSION_Z:g} robust standard deviations (1.4826 times the median "
        "absolute deviation) from the median of that output's dimensions. Means spread as a normal distribution have "
        "none so far out; with tails as heavy as a Laplace distribution's, one dimension in 30,000 is. The paper looks "
        "at all tokens; a dimension that is large on one token of each sentence shows by kind alone."
    )
    figure = Figure(
        save(draw.means_figure(stream), out, "stream"),
        "Fig. 1: mean over all tokens of every dimension, a line a layer. Output 0 is what enters the first layer; "
        "attention layer i, counted from 0, reads output i. Outliers among these means are named.",
    )
    beyond, rows = np.abs(z) > DIMENSION_Z, []
    for j in dimensions:
        output, scope = np.unravel_index(np.nan_to_num(np.abs(z[:, j])).argmax(), z[:, j].shape)
        mean = stream.means[output, j] if scope == 0 else stream.hidden[output, j, scope - 1]
        where = [_listed(np.flatnonzero(beyond[:, j, i])) for i in range(len(scopes))]
        rows.append((int(j), *where, f"{scopes[scope]}, output {output}", float(mean), float(z[output, j, scope])))
    header = ("dimension", *scopes, "farthest over", "mean there", "robust z")
    table = Table.of_rows(
        header, rows, "Outputs in which a dimension is an outlier, of the mean over all tokens or of a kind."
    )
    return Section("Outlier dimensions", text, [figure, *([table] if rows else [])])


def _attention_section(stream: Stream, out: Path) -> Section:
    by_layer = stream.attention.mean(axis=1)  # (L, n_kinds)
    most = [stream.kinds[k] for k in np.nanargmax(by_layer, axis=1)]
    parts = []
    for kind in dict.fromkeys(most):
        layers = [int(layer) for layer, its in zip(stream.layers, most, strict=True) if its == kind]
        parts.append(f"{kind} in {'layer' if len(layers) == 1 else 'layers'} {_listed(layers)}")
    figure = Figure(
        save(draw.attention_figure(stream), out, "attention"),
        "Fig. 2: attention that one token of a kind receives from a mean query, of those that may see it; all heads.",
    )
    return Section("Attention by kind of token", f"A token gets most if it is {'; '.join(parts)}.", [figure])


def _values_section(stream: Stream, named: np.ndarray, out: Path) -> Section:
    figure = Figure(
        save(draw.values_figure(stream, named), out, "values"),
        "Fig. 3: mean value of each outlier dimension over the tokens of a kind, in every layer's output.",
    )
    return Section("Outlier dimensions by kind of token", "", [figure])


def _contributions_section(found: Contributions, dimensions: np.ndarray, out: Path) -> Section:
    text = (
        "C_j = ((x_m W_Q + b_Q) W_K')_j x_nj is what dimension j of key n adds to the score of query m (eq. 7), before "
        "1/sqrt(d'); here as the mean over the queries that see a key, and over all keys of all inputs, "
        f"{found.counts.sum():,} of them, each counting alike (a mean over pairs of query and key would weigh long "
        "inputs and, under a causal mask, early keys more). x is what W_Q and W_K act on: the residual stream, divided "
        "by sigma where a norm was folded into them. Under rotation the query is turned by its true distance to the "
        "key, and norms of queries and keys count, so that the sum over j is the model's own score, less terms that "
        "are the same for every key."
    )
    if found.left_out:
        text += f" In this model it is so but for {'; '.join(found.left_out)}."
    shown = layers_shown(len(found.layers))
    few = Figure(
        save(draw.contributions_figure(found, shown, dimensions), out, "contributions"),
        f"Fig. 4: mean C of every dimension, a dot a head, in layers {_listed(found.layers[shown])}. "
        "Large ones are named, in grey where the dimension is no outlier of the stream.",
    )
    every = Figure(
        save(draw.all_layers_figure(found, dimensions), out, "contributions-all-layers"),
        "Fig. 5: the same for all layers, each on its own scale.",
    )
    return Section("What dimensions add to attention scores", text, [few, every])


def _table_section(found: Contributions, named: np.ndarray) -> Section:
    heads = [f"head {head}" for head in range(found.by_kind.shape[1])]
    shown = layers_shown(len(found.layers))
    rows = [
        (int(found.layers[i]), int(j), kind, *found.by_kind[i, :, j, k])
        for i in shown
        for j in named
        for k, kind in enumerate(found.kinds)
        if found.counts[k]
    ]
    caption = "Table 1: mean C of the outlier dimensions by kind of key token. contributions.csv has every layer."
    return Section("By kind of key", "", [Table.of_rows(("layer", "dimension", "key", *heads), rows, caption)])


def _preference_section(found: Contributions, dimensions: np.ndarray, out: Path) -> Section:
    gaps, other = score_gaps(found), found.kinds[-1]
    rows = []
    for i, layer in enumerate(found.layers):
        for k, kind in enumerate(found.kinds[:-1]):
            if found.counts[k]:
                gap = gaps[i, k]
                most = [int(j) for j in np.argsort(-np.abs(gap))[:3]]
                rows.append(
                    (int(layer), kind, gap.sum(), gap[dimensions].sum(), *(f"{gap[j]:+.2f} by {j}" for j in most))
                )
    text = (
        f"How much higher keys of a kind score than {other} ones, mean over heads, before 1/sqrt(d'), and which "
        "dimensions make it so. Sums of C are scores up to what is the same for all keys, so nothing is missing."
    )
    header = ("layer", "key", f"score above {other}", "of it, outlier dimensions", "most", "then", "then ")
    figure = Figure(
        save(draw.preferences_figure(found, dimensions), out, "preferences"),
        f"How much higher a kind of key scores than {other} ones: by all dimensions, by the outliers together, and by "
        "the two dimensions that add most (dotted where these are no outliers).",
    )
    return Section("What makes a kind of key preferred", text, [figure, Table.of_rows(header, rows)])


def _guess_section(stream: Stream, found: Contributions, guessed: Guess, named: np.ndarray, out: Path) -> Section:
    correlations = guess_table(guessed, stream, found)
    text = (
        "Guessed from the weights alone: the norm of each column of W_QK; the gain gamma of the norm that feeds "
        "attention; how extreme either is, up or down, in robust standard deviations of its log; and eq. 7 for a token "
        "that is that norm's beta. Spearman's correlation over dimensions with what is measured: the mean of |C| over "
        "heads, or the size of the mean over tokens."
    )
    figure = Figure(
        save(draw.guess_figure(stream.layers, correlations), out, "guess"),
        "Rank correlation over dimensions between a guess and what is measured, layer by layer.",
    )
    table = Table.of_rows(
        ("layer", *correlations),
        [(int(layer), *row) for layer, *row in zip(stream.layers, *correlations.values(), strict=True)],
        "Spearman's correlation over dimensions.",
    )
    parts: list[Figure | Table] = [figure, table]
    if len(named):
        guesses = (extremity(guessed.columns), guessed.gains, guessed.contributions)
        placed = [ranks(values) for values in (found.sizes, *guesses)]
        rows = [
            (int(layer), int(j), *(int(ranked[i, j]) for ranked in placed))
            for i, layer in enumerate(found.layers)
            for j in named
        ]
        header = ("layer", "dimension", "|C|, measured", "extreme column", "gain", "C at beta")
        caption = (
            f"Place of the outlier dimensions among {found.by_kind.shape[2]}, 1 the largest, by measure and by guess."
        )
        parts.append(Table.of_rows(header, rows, caption))
    return Section("What the weights alone would have said", text, parts)


def _paper_section(found: Contributions, model: str) -> Section:
    """The paper's Table 1, beside this model's where it is the same."""
    same = model.split("@")[0].endswith(paper.MODEL) and found.by_kind.shape[:3] == (12, 12, 768)
    header = ("layer", "dimension", "key", *(f"head {head}" for head in range(12)))
    rows, worst = [], 0.0
    for (layer, j), expected in paper.TABLE_1.items():
        ours = found.by_kind[layer, :, j].T if same else expected  # (kinds, heads)
        for kind, theirs, own in zip(paper.KINDS, expected, ours, strict=True):
            cells = [f"{a:.1f} / {b:.1f}" for a, b in zip(theirs, own, strict=True)] if same else list(theirs)
            rows.append((layer, j, kind, *cells))
        worst = max(worst, float(np.abs(ours - expected).max()))
    if same:
        text = f"The paper's number / this run's. They differ by at most {worst:.2f}."
    else:
        text = f"For reference: these are of {paper.MODEL}, which this model is not."
    text += " Layers are counted from 0: the paper's 2, 6 and 12."
    return Section("The paper's Table 1", text, [Table.of_rows(header, rows)])


def _listed(numbers: Sequence[int] | np.ndarray) -> str:
    """1, 2, 3 and 7 as "1-3, 7"."""
    runs: list[list[int]] = []
    for number in map(int, numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)

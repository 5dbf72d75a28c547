"""The outlier-dimensions analysis as sections of a page."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from weightscope.jobs.outlier_guess import Guess, extremity, ranks
from weightscope.metrics.outliers import DIMENSION_Z
from weightscope.report import outlier_figures as draw
from weightscope.report import outlier_reference as paper
from weightscope.report.page import Figure, Section, Table
from weightscope.report.style import save
from weightscope.runner.outlier_analysis import Contributions, Stream
from weightscope.runner.outlier_tables import guess_table, score_gaps

NAMED = 6  # outlier dimensions that figures and tables of the page are about; the files have all


def layers_shown(n_layers: int) -> list[int]:
    """An early, a middle and the last layer: the paper's 2, 6 and 12 of 12, counted from 0."""
    return sorted({max(0, round(n_layers / 6) - 1), max(0, n_layers // 2 - 1), n_layers - 1})


def outlier_sections(
    stream: Stream, found: Contributions, guessed: Guess, dimensions: np.ndarray, model: str, out: Path
) -> tuple[str, list[Section]]:
    """Draw all figures into `out` and say what they show.

    Parameters
    ----------
    stream : Stream
    found : Contributions
    guessed : Guess
    dimensions : (m,) int array
        Outlier dimensions, the farthest first.
    model : str
        Its name; numbers of bert-base-uncased are set beside the paper's.
    out : Path

    Returns
    -------
    lead : str
    sections : list of Section
    """
    named = dimensions[:NAMED]
    sections = [_stream_section(stream, dimensions, out), _attention_section(stream, out)]
    if len(named):
        sections.append(_values_section(stream, named, out))
    sections.append(_contributions_section(found, named, out))
    if len(named):
        sections += [_table_section(found, named), _gap_section(found, named)]
    sections += [_guess_section(stream, found, guessed, named, out), _paper_section(found, model)]
    return _lead(stream, dimensions), sections


def _lead(stream: Stream, dimensions: np.ndarray) -> str:
    d = stream.hidden.shape[1]
    if not len(dimensions):
        return f"None of the {d} dimensions stands out: no mean is {DIMENSION_Z:g} robust standard deviations away."
    which = _listed(dimensions[:NAMED]) + (" and others" if len(dimensions) > NAMED else "")
    them = "dimension stands" if len(dimensions) == 1 else "dimensions stand"
    return f"Of {d} dimensions of the residual stream, {len(dimensions)} {them} out in some layer: {which}."


def _stream_section(stream: Stream, dimensions: np.ndarray, out: Path) -> Section:
    means, z = stream.means, stream.z
    text = (
        f"A dimension is an outlier of a layer where its mean over all {stream.counts.sum():,} tokens is more than "
        f"{DIMENSION_Z:g} robust standard deviations (1.4826 times the median absolute deviation) from the median of that "
        "layer's dimensions. Means spread as a normal distribution have none so far out; with tails as heavy as a "
        "Laplace distribution's, one dimension in 30,000 is."
    )
    figure = Figure(
        save(draw.means_figure(stream, dimensions[:NAMED]), out, "stream"),
        "Fig. 1: mean over tokens of every dimension, a line a layer. Output 0 is what enters the first layer; attention "
        "layer i, counted from 0, reads output i. Outlier dimensions are named at their largest value.",
    )
    beyond = np.abs(z) > DIMENSION_Z
    rows = [
        (int(j), _listed(np.flatnonzero(beyond[:, j])), int(peak), float(means[peak, j]), float(z[peak, j]))
        for j in dimensions
        for peak in [np.abs(z[:, j]).argmax()]
    ]
    table = Table(("dimension", "outlier in outputs", "farthest in", "mean there", "robust z there"), rows)
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


def _contributions_section(found: Contributions, named: np.ndarray, out: Path) -> Section:
    text = (
        "C_j = ((x_m W_Q + b_Q) W_K')_j x_nj is what dimension j of key n adds to the score of query m (eq. 7), before "
        "1/sqrt(d'); here as the mean over the queries that see a key, over keys and over inputs, each key once. x is what "
        "W_Q and W_K act on: the residual stream, divided by sigma where a norm was folded into them. Under rotation the "
        "query is turned by its true distance to the key, and norms of queries and keys count, so that the sum over j is "
        "the model's own score, less terms that are the same for every key."
    )
    if found.left_out:
        text += f" In this model it is so but for {'; '.join(found.left_out)}."
    shown = layers_shown(len(found.layers))
    few = Figure(
        save(draw.contributions_figure(found, shown, named), out, "contributions"),
        f"Fig. 4: mean C of every dimension, a dot a head, in layers {_listed(found.layers[shown])}.",
    )
    every = Figure(
        save(draw.all_layers_figure(found, named), out, "contributions-all-layers"),
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
    return Section("By kind of key", "", [Table(("layer", "dimension", "key", *heads), rows, caption)])


def _gap_section(found: Contributions, named: np.ndarray) -> Section:
    whole, parts = score_gaps(found, named)
    rows = [
        (int(layer), kind, whole[i, k], *parts[i, :, k])
        for i, layer in enumerate(found.layers)
        for k, kind in enumerate(found.kinds[:-1])
        if found.counts[k]
    ]
    text = (
        f"How much higher keys of a kind score than {found.kinds[-1]} ones, mean over heads, and how much of that the "
        "outlier dimensions add. Sums of C are scores up to what is the same for all keys, so this accounts for all of it."
    )
    table = Table(("layer", "key", "score above other", *(f"dimension {j}" for j in named)), rows)
    return Section("How much of the preference is theirs", text, [table])


def _guess_section(stream: Stream, found: Contributions, guessed: Guess, named: np.ndarray, out: Path) -> Section:
    correlations = guess_table(guessed, stream, found)
    text = (
        "Guessed from the weights alone: the norm of each column of W_QK; the gain gamma of the norm that feeds attention; "
        "how extreme either is, up or down, in robust standard deviations of its log; and eq. 7 for a token that is that "
        "norm's beta. Spearman's correlation over dimensions with what is measured: the mean of |C| over heads, or the "
        "size of the mean over tokens."
    )
    figure = Figure(
        save(draw.guess_figure(stream.layers, correlations), out, "guess"),
        "Rank correlation over dimensions between a guess and what is measured, layer by layer.",
    )
    table = Table(
        ("layer", *correlations),
        [(int(layer), *row) for layer, *row in zip(stream.layers, *correlations.values(), strict=True)],
        "Spearman's correlation over dimensions.",
    )
    parts: list[Figure | Table] = [figure, table]
    if len(named):
        placed = (ranks(found.sizes), ranks(extremity(guessed.columns)), ranks(guessed.gains), ranks(guessed.contributions))
        rows = [
            (int(layer), int(j), *(int(ranked[i, j]) for ranked in placed))
            for i, layer in enumerate(found.layers)
            for j in named
        ]
        header = ("layer", "dimension", "|C|, measured", "extreme column", "gain", "C at beta")
        caption = f"Place of the outlier dimensions among {found.by_kind.shape[2]}, 1 the largest, by measure and by guess."
        parts.append(Table(header, rows, caption))
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
    return Section("The paper's Table 1", text, [Table(header, rows)])


def _listed(numbers: Sequence[int] | np.ndarray) -> str:
    """1, 2, 3 and 7 as "1-3, 7"."""
    runs: list[list[int]] = []
    for number in map(int, numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)

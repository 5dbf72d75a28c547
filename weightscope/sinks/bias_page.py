"""The sink-as-bias analysis as a page: models side by side, the paper's Table 1 beside them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weightscope.folder import remove_earlier
from weightscope.pages.page import Figure, Section, write_page
from weightscope.pages.style import save
from weightscope.progress import phase
from weightscope.sinks.bias_figures import (
    BOUND,
    DIMENSIONS_SHOWN,
    heads_figure,
    patching_figure,
    picture_figure,
    updates_figure,
)
from weightscope.sinks.bias_run import CHARACTERS, TOKENS_SHOWN, SinkBias
from weightscope.sinks.patching import ABLATED, PATCHED
from weightscope.sinks.prediction import PREDICTORS, SINKS_ABOVE
from weightscope.tables import Table


@dataclass(frozen=True)
class Row:
    """A model's row of Table 1: changes by (range of layers, intervention)."""

    name: str
    source: str
    biased: bool
    baseline: float
    changes: dict[tuple[str, str], float]


COLUMNS = tuple((layers, how) for layers in ("early", "middle", "late", "all") for how in (PATCHED, ABLATED))


def _paper(name: str, biased: bool, baseline: float, *changes: float) -> Row:
    return Row(name, "the paper", biased, baseline, dict(zip(COLUMNS, changes, strict=True)))


# Table 1 of the sink-as-bias paper, on OpenWebText.
PAPER = (
    _paper("mistralai/Mistral-7B-v0.1", False, 6.94, 0.06, 1.19, 0.00, 0.56, 0.00, 0.22, 0.16, 2.38),
    _paper("meta-llama/Llama-2-7b-hf", False, 7.00, 0.28, 0.75, 0.00, 0.22, 0.06, 0.06, 0.28, 1.75),
    _paper("Qwen/Qwen3-8B-Base", False, 10.44, 6.19, 4.75, 0.00, 0.63, 0.00, 2.13, 7.31, 4.94),
    _paper("Qwen/Qwen2.5-7B", True, 11.25, 1.69, 1.13, 0.19, 0.56, 1.31, 1.31, 2.31, 1.31),
    _paper("EleutherAI/pythia-6.9b", True, 11.81, 10.56, 12.44, 1.38, 93.19, 0.19, 0.38, 6.81, 58.19),
)


@phase("drawing figures")
def write_report(found: Sequence[SinkBias], out: Path) -> None:
    """Draw every figure into `out`, and write report.html.

    Raises
    ------
    CheckpointError
        A file cannot be written.
    """
    remove_earlier(out, r"(updates|picture|patching|heads)-[\w.-]+\.(png|svg)")
    sections = [_table_one(found), *(section for each in found for section in _model_sections(each, out))]
    write_page(out, "report.html", "Attention sinks as biases", " ".join(map(headline, found)), sections)


def headline(found: SinkBias) -> str:
    """One model's result in two sentences."""
    spectral, variance = (
        np.median([getattr(layer, name) for layer in found.layers.values()])
        for name in ("spectral_sink", "variance_sink")
    )
    (eq7, ablated), (spared, spared_ablated) = (
        (row.changes["all", PATCHED], row.changes["all", ABLATED]) for row in (_row(found, 0), _row(found, 1))
    )
    return (
        f"{found.name}, {found.sizes.texts} texts of {found.sizes.tokens} tokens: in the median layer one direction "
        f"holds {spectral:.0%} of what token 0 writes, and {variance:.0%} of it varies. In all layers at once, a "
        f"constant in its place moves perplexity by {eq7:+.2f} from {found.patching.baseline:.2f} and nothing in its "
        f"place by {ablated:+.2f}; with token 0's own update left alone it is {spared:+.2f} and {spared_ablated:+.2f}."
    )


def file_stem(name: str) -> str:
    """A model's name as part of a file's."""
    return re.sub(r"[^\w.-]+", "-", re.sub(r"\.(gguf|safetensors)$", "", name)).strip("-.").lower()


def _row(found: SinkBias, start: int) -> Row:
    changes = {(row.layers, row.intervention): row.change for row in found.patching.rows if row.start == start}
    return Row(found.name, "measured", found.biased, found.patching.baseline, changes)


def _table_one(found: Sequence[SinkBias]) -> Section:
    text = (
        "Change in perplexity when y_i - u_sink,i + mu takes the place of attention's output y_i (eq. 7). SSP: mu is "
        "mu_sink, the mean of u_sink over all positions of other texts (eq. 2). Ablation: mu is zero. Early layers are "
        "the first 30 %, late ones the last 30 %. Perplexities of different models, and the paper's on OpenWebText, "
        "are over different tokens; compare changes within a row. Eq. 7 holds for every position i, and at i = 0 all "
        "that attention writes but b is u_sink: patched there too, the sink that later layers see is another one. The "
        "second table leaves position 0 alone."
    )
    measured = [_row(each, 0) for each in found]
    rows = [row for each in measured for row in (each, *(paper for paper in PAPER if paper.name == each.name))]
    rows += [row for row in PAPER if row not in rows]
    return Section(
        "Static sink patching (Table 1)",
        text,
        [
            _changes(rows, "Every position, as in eq. 7."),
            _changes([_row(each, 1) for each in found], "Positions from 1 on."),
        ],
    )


def _changes(rows: Sequence[Row], caption: str) -> Table:
    cells = [
        (row.name, row.source, "yes" if row.biased else "no", row.baseline,
         *(row.changes.get(column, np.nan) for column in COLUMNS))
        for row in rows
    ]  # fmt: skip
    header = ("model", "from", "biases", "perplexity", *(f"{which} {how}" for which, how in COLUMNS))
    return Table.of_rows(header, cells, caption)


def _model_sections(found: SinkBias, out: Path) -> list[Section]:
    return [_updates(found, out), _patching(found, out), _heads(found, out)]


def _updates(found: SinkBias, out: Path) -> Section:
    stem, sizes = file_stem(found.name), found.sizes
    begin = f"each after the first token {found.first!r}" if found.first else "each beginning with its own first token"
    text = (
        f"{sizes.texts} texts of {sizes.tokens} tokens, {begin}. u_sink,i = sum_h alpha_i0h f_h(x_0) is what token 0 "
        "writes at position i; u_others,i what tokens 1..i write together; u_ctx,i their mean, u_others,i / i, as the "
        "caption of the paper's Fig. 3 defines it (which weighs early positions most: the sum is drawn too). The "
        "values' bias is part of f(x); b is the output's. Positions run from 1, as in eq. 4; mu_sink alone includes "
        "position 0. R is against the mean over the positions it is taken over, so that it is 1 at most."
    )
    strongest = max(found.layers, key=lambda index: found.layers[index].ratio)
    updates = Figure(
        save(updates_figure(found), out, f"updates-{stem}"),
        f"Figs 2, 3 and 4. In layer {strongest} token 0 writes {found.layers[strongest].ratio:.2f} of what all others "
        "do.",
    )
    picture = Figure(
        save(picture_figure(found), out, f"picture-{stem}"),
        f"Fig. 5: updates in layer {found.layer_shown}, whose heads sink most, on one text of up to {TOKENS_SHOWN} "
        f"tokens, the stream's first {DIMENSIONS_SHOWN} dimensions. A bias is a pattern of vertical stripes. Colours "
        f"end at the {BOUND}th percentile of |u_others|.",
    )
    rows = [
        (index, m.ratio, m.spectral_sink, m.spectral_context, m.spectral_others, m.variance_sink, m.variance_context,
         m.variance_others, m.norm_sink, m.norm_others, m.norm_bias, float(m.strength.mean()))
        for index, m in found.layers.items()
    ]  # fmt: skip
    header = (
        "layer", "Ratio", "SpectralRatio sink", "context mean", "others' sum", "R sink", "R context mean",
        "R others' sum", "E|u_sink|", "E|u_others|", "|b|", "mean attention to token 0",
    )  # fmt: skip
    return Section(f"{found.name}: what token 0 writes", text, [updates, picture, Table.of_rows(header, rows)])


def _patching(found: SinkBias, out: Path) -> Section:
    tokens, texts = found.patching.tokens, found.sizes.evaluated
    text = (
        f"{tokens:,} predicted tokens of {texts} texts of {CHARACTERS[0]:,} to {CHARACTERS[1]:,} characters, from "
        "other documents than mu_sink. Bars are 95 % intervals over texts drawn anew."
    )
    drawing = Figure(save(patching_figure(found), out, f"patching-{file_stem(found.name)}"), "Table 1 as a figure.")
    rows = [(r.layers, r.intervention, r.start, r.perplexity, r.change, *r.interval) for r in found.patching.rows]
    header = ("layers", "intervention", "first position", "perplexity", "change", "from", "to")
    return Section(f"{found.name}: a constant in the sink's place", text, [drawing, Table.of_rows(header, rows)])


def _heads(found: SinkBias, out: Path) -> Section:
    sinks, heads = int((found.strength > SINKS_ABOVE).sum()), found.strength.size
    text = (
        f"{sinks} of {heads} heads sink: the average query from position 1 on gives token 0 more than {SINKS_ABOVE} "
        "of its attention. Before anything was run, each head was shown the embeddings of the first token and of up "
        "to 255 drawn from the vocabulary; AUROC says how well each reading ranks heads that sink above heads that do "
        "not, 0.5 being chance. In layers above the first the residual stream is no embedding any more, and the "
        "layer's index alone is the reading to beat."
    )
    drawing = Figure(
        save(heads_figure(found), out, f"heads-{file_stem(found.name)}"),
        "Left: measured. Middle: the best reading of the weights against the measured strength, the threshold dotted. "
        "Right: AUROC of each reading; none where it is the same for every head, or where no head sinks.",
    )
    table = Table.of_rows(("reading", "AUROC"), [(each.label, found.aurocs[each.name]) for each in PREDICTORS])
    return Section(f"{found.name}: which heads sink, foretold", text, [drawing, table])

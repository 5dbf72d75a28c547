"""Attention sinks as pages: whether they are biases, models side by side; and what they do in one model."""

from collections.abc import Sequence

import numpy as np

from weightscope.errors import counted
from weightscope.folder import Files
from weightscope.pages.page import Figure, Section, write_page
from weightscope.pages.style import save
from weightscope.progress import phase
from weightscope.sinks import figures, paper
from weightscope.sinks.bias import CHARACTERS, TOKENS_SHOWN, SinkBias, Sizes
from weightscope.sinks.mechanisms import MECHANISMS, SINK_HEAD, SinkMechanisms
from weightscope.sinks.patching import ABLATED, PATCHED
from weightscope.sinks.prediction import SINKS_ABOVE
from weightscope.sinks.updates import SPREAD
from weightscope.tables import Column, Table

HEADS_SHOWN = 24  # in the table of what sinks do


@phase("drawing figures")
def write_bias_report(files: Files, models: Sequence[SinkBias], source: str, sizes: Sizes) -> None:
    """Draw the figures of every model and write report.html: are sinks biases?

    Parameters
    ----------
    files : Files
    models : sequence of SinkBias
    source : str
        Where the texts come from.
    sizes : Sizes
        How much of them was asked for.
    """
    sections = [_table_one(models)]
    if len(models) > 1:
        sections.append(_side_by_side(files, models))
    for bias in models:
        sections += [_updates(files, bias), _patching(files, bias), _prediction(files, bias)]
    lead = " ".join([*map(bias_headline, models), f"Amount of text: {sizes}. Texts: {source}."])
    write_page(files, "report.html", "Attention sinks as biases", lead, sections)


def bias_headline(bias: SinkBias) -> str:
    """One model's result in two sentences."""
    spectral, variance, own = (
        np.median(bias.layers[name]) for name in ("spectral_sink", "variance_sink_mu", "variance_sink")
    )
    (ssp, ablated), (ssp_from_1, ablated_from_1) = (
        (changes["all", PATCHED], changes["all", ABLATED]) for changes in (_changes(bias, 0), _changes(bias, 1))
    )
    return (
        f"{bias.model}, {bias.sizes.texts} texts of {bias.sizes.tokens} tokens: in the median layer one direction "
        f"holds {spectral:.0%} of what token 0 writes; R is {variance:.2f} against mu_sink and {own:.2f} against the "
        "updates' own mean. In all layers at once, a "
        f"constant in its place moves perplexity by {ssp:+.2f} from {bias.baseline:.2f} and nothing in its place by "
        f"{ablated:+.2f}; with token 0's own update left as it is by {ssp_from_1:+.2f} and {ablated_from_1:+.2f}."
    )


def _changes(bias: SinkBias, start: int) -> dict[tuple[str, str], float]:
    """Changes in perplexity by range of layers and intervention."""
    table = bias.patching.where(bias.patching["first_position"] == start)
    return dict(zip(zip(table["layers"], table["intervention"], strict=True), table["change"].tolist(), strict=True))


def _table_one(models: Sequence[SinkBias]) -> Section:
    text = (
        "Change in perplexity when y_i - u_sink,i + mu takes the place of attention's output y_i (eq. 7). SSP: mu is "
        "mu_sink, the mean of u_sink over all positions of other texts (eq. 2). Ablation: mu is zero. Early layers are "
        "the first 30 %, late ones the last 30 %. Perplexities of different models, and the paper's on OpenWebText, "
        "are over different tokens; compare changes within a row. Eq. 7 holds for every position i, and at i = 0 all "
        "that attention writes but b is u_sink: patched there too, the sink that later layers see is another one. The "
        "second table leaves position 0 as it is."
    )

    def measured(start: int) -> list[tuple[object, ...]]:
        return [
            (bias.model, "measured", "yes" if bias.biased else "no", bias.baseline,
             *(_changes(bias, start).get(key, np.nan) for key in paper.RANGES))
            for bias in models
        ]  # fmt: skip

    rows = [row for own in measured(0) for row in (own, *(row for row in paper.TABLE_1 if row[0] == own[0]))]
    rows += [row for row in paper.TABLE_1 if row not in rows]
    tables = [
        Table.of_rows(paper.HEADER, rows, "Every position, as in eq. 7."),
        Table.of_rows(paper.HEADER, measured(1), "Positions from 1 on."),
    ]
    return Section("Static sink patching (Table 1)", text, tables)


def _side_by_side(files: Files, models: Sequence[SinkBias]) -> Section:
    text = "As the paper's Figs 2 to 4 have them: every model's layers in one figure, numbered from its first."
    figure = Figure(
        save(figures.side_by_side_figure(models), files, "updates"),
        "Figs 2, 3 and 4. u_sink drawn through, the mean u_ctx dashed; R of u_sink is against mu_sink.",
    )
    return Section("What token 0 writes, in all models", text, [figure])


def _updates(files: Files, bias: SinkBias) -> Section:
    sizes, layers = bias.sizes, bias.layers
    begin = f"each after the first token {bias.first!r}" if bias.first else "each beginning with its own first token"
    text = (
        f"{sizes.texts} texts of {sizes.tokens} tokens, {begin}. u_sink,i = sum_h alpha_i0h f_h(x_0) is what token 0 "
        "writes at position i; u_others,i what tokens 1..i write together; u_ctx,i their mean, u_others,i / i, as the "
        "caption of the paper's Fig. 3 defines it (which weighs early positions most: the sum is drawn too). The "
        "values' bias is part of f(x); b is the output's. Positions run from 1, as in eq. 4; mu_sink alone includes "
        "position 0. R of u_sink is given twice: against mu_sink, as eq. 6 is written, where it passes 1 if what token "
        "0 sends itself pulls mu_sink away from all others; and against the mean over the same positions, as the R of "
        f"the others is, where it is 1 at most. Attention's matrices are stored as {bias.stored}."
    )
    strongest = layers["ratio"].argmax()
    updates = Figure(
        save(figures.updates_figure(bias), files, f"updates-{bias.stem}"),
        f"Figs 2, 3 and 4. In layer {layers['layer'][strongest]} token 0 writes {layers['ratio'][strongest]:.2f} of "
        f"what all others do. Bands: from the {SPREAD[0]}th to the {SPREAD[1]}th percentile of the texts, each alone.",
    )
    picture = Figure(
        save(figures.picture_figure(bias), files, f"picture-{bias.stem}"),
        f"Fig. 5: updates in layer {bias.layer_shown}, whose heads sink most, on one text of up to {TOKENS_SHOWN} "
        f"tokens, the stream's first {figures.DIMENSIONS_SHOWN} dimensions. A bias is a pattern of vertical stripes. "
        f"Colours end at the {figures.BOUND}th percentile of |u_others|.",
    )
    strength = Column("strength", bias.updates.strength.mean(axis=1), "mean attention to token 0")
    return Section(f"{bias.model}: what token 0 writes", text, [updates, picture, Table([*layers.columns, strength])])


def _patching(files: Files, bias: SinkBias) -> Section:
    text = (
        f"{bias.predicted_tokens:,} predicted tokens of {bias.sizes.evaluated} texts of {CHARACTERS[0]:,} to "
        f"{CHARACTERS[1]:,} characters, from other documents than mu_sink. Bars are 95 % intervals over texts drawn "
        "anew."
    )
    caption = " ".join(["Table 1 as a figure.", *_in_words(bias)])
    figure = Figure(save(figures.patching_figure(bias), files, f"patching-{bias.stem}"), caption)
    interventions = bias.patching.take(range(1, len(bias.patching)))
    return Section(f"{bias.model}: a constant in the sink's place", text, [figure, interventions])


def _in_words(bias: SinkBias) -> list[str]:
    """Each range of layers, every position patched: what the constant costs, and what nothing in its place."""
    changes = _changes(bias, 0)
    costs = {layers: (changes[layers, PATCHED], changes[layers, ABLATED]) for layers, how in changes if how == PATCHED}
    said = [f"{ssp:+.2f} and {ablated:+.2f} in {layers} layers" for layers, (ssp, ablated) in costs.items()]
    worse = [layers for layers, (ssp, ablated) in costs.items() if ssp >= ablated]
    found = f"The constant does no better than nothing in {' and '.join(worse)} layers." if worse else ""
    return [f"The constant costs, and nothing in its place costs: {'; '.join(said)}.", found]


def _prediction(files: Files, bias: SinkBias) -> Section:
    strength = bias.heads["strength"]
    text = (
        f"{(strength > SINKS_ABOVE).sum()} of {len(strength)} heads sink: the average query from position 1 on gives "
        f"token 0 more than {SINKS_ABOVE} of its attention. Before anything was run, each head was shown the "
        "embeddings of the first token and of up to 255 drawn from the vocabulary; AUROC says how well each reading "
        "ranks heads that sink above heads that do not, 0.5 being chance. In layers above the first the residual "
        "stream is no embedding any more, and the layer's index alone is the reading to beat."
    )
    figure = Figure(
        save(figures.prediction_figure(bias), files, f"heads-{bias.stem}"),
        "Left: measured. Middle: the best reading of the weights against the measured strength, the threshold dotted. "
        "Right: AUROC of each reading; none where it is the same for every head, or where no head sinks.",
    )
    return Section(f"{bias.model}: which heads sink, foretold", text, [figure, bias.aurocs.select("meaning", "auroc")])


@phase("drawing figures")
def write_mechanism_report(files: Files, sinks: SinkMechanisms) -> None:
    """Draw the figures and write report.html: what do sinks do?"""
    sections = [_tokens(files, sinks), _mechanisms(files, sinks), _gates(files, sinks)]
    lead = " ".join([*mechanism_headline(sinks), sinks.inputs.note])
    write_page(files, "report.html", f"Attention sinks of {sinks.model}", lead, sections)


def mechanism_headline(sinks: SinkMechanisms) -> list[str]:
    """What sinks do, in a few sentences."""
    n_inputs, n_layers, n_heads = sinks.event.shape
    events = int(sinks.event.sum())
    did = ", ".join(f"{(sinks.mechanism == name).sum():,} {figures.MECHANISM_NAMES[name]}" for name in MECHANISMS)
    third = max(1, n_layers // 3)
    most = []
    for name, kind in (("first", sinks.kind[:, :third]), ("last", sinks.kind[:, -third:])):
        share = np.bincount(kind.ravel(), minlength=len(sinks.kinds)) / kind.size
        most.append(f"{share.max():.0%} {sinks.kinds[share.argmax()]} in the {name} third of the layers")
    return [
        f"{counted(n_inputs, 'input')}, {counted(n_layers, 'layer')} of {counted(n_heads, 'head')}: "
        f"{counted(events, 'sink event')} in {sinks.event.size:,} "
        f"({sinks.event.mean():.2%}){f'; {did}' if events else ''}.",
        f"{sinks.sink_heads.sum()} of {n_layers * n_heads} heads are sink heads "
        f"(an event on {SINK_HEAD:.0%} of the inputs or more).",
        f"The strongest key of a head is most often: {', '.join(most)}.",
    ]


def _tokens(files: Files, sinks: SinkMechanisms) -> Section:
    text = (
        "The strongest sink of a head on an input is the key that gets most of its attention (eq. 2). It makes a "
        "sink event when at least 90 % of the queries give it half of their attention or more."
    )
    by_layer = Figure(
        save(figures.sink_token_figure(sinks), files, "sink-tokens"),
        "Fig. 4. By layer, mean over inputs and heads: share of the attention that each kind of token gets; share of "
        "the heads whose strongest key is of that kind; share that has a sink event there.",
    )
    by_head = Figure(
        save(figures.head_map_figure(sinks), files, "head-map"),
        "Fig. 5. Strength of each head's strongest sink; share of inputs on which it makes an event; what the sinks "
        "of heads with an event on half of the inputs mostly do.",
    )
    order = np.lexsort((-sinks.heads["strength"], -sinks.heads["events"]))[:HEADS_SHOWN]
    shown = ("layer", "head", "strength", "events", "kind", "ratio_out", "stable_rank", "mechanism", "qk_gap")
    heads = sinks.heads.take(order).select(*shown)
    heads.caption = f"The {len(heads)} heads with the most sink events, then the strongest sinks; heads.csv has all."
    layers = sinks.layers.select("layer", "kind", "kind_share", "token", "token_share", "events")
    layers.caption = "Which kind of token, and which token, is the strongest sink most often, over inputs and heads."
    return Section("Which tokens are sinks", text, [by_layer, by_head, heads, layers])


def _mechanisms(files: Files, sinks: SinkMechanisms) -> Section:
    text = (
        "A sink event is a NOP where the sink's value norm is at most 0.2 of the other tokens' mean, a broadcast "
        "where it is at least 0.5 of it and the head's update has stable rank 1.5 or less."
    )
    plane = Figure(
        save(figures.plane_figure(sinks), files, "plane"),
        "Figs 6 and 8. Every head's strongest sink on every input. Left: by mechanism; dotted: the rule's bounds. "
        "Right: events by layer and by the kind of token that is the sink.",
    )
    similarity = Figure(
        save(figures.similarity_figure(sinks), files, "similarity"),
        "Mean cosine between different tokens of an input before and after attention adds to them, and of each token "
        "with itself across that; median over inputs and the middle half of them.",
    )
    return Section("No-op or broadcast", text, [plane, similarity])


def _gates(files: Files, sinks: SinkMechanisms) -> Section:
    text = (
        "A gate needs one large singular value of W_QK, or a sink of large norm (Lemma 2). Under rotation W_QK is that "
        "of distance 0."
    )
    spectra = Figure(
        save(figures.spectrum_figure(sinks), files, "spectra"),
        "Fig. 2B. Singular values of W_QK over the largest, median over heads and the middle half of them. Then, "
        "against the strength of each head's sink: the ratio of the two largest; and the sink's norm in the residual "
        "stream over the other tokens', median over inputs.",
    )
    return Section("How sinks are chosen", text, [spectra])

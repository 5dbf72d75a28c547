"""The page of `weightscope sinks --question bias`, with Table 1 of the sink-as-bias paper to compare with."""

from collections.abc import Sequence

import numpy as np

from weightscope.files import Files
from weightscope.formulas import plain
from weightscope.pages.page import Figure, Section, write_page
from weightscope.pages.style import save
from weightscope.progress import phase
from weightscope.provenance import Provenance
from weightscope.sinks import bias_figures
from weightscope.sinks.bias import ABLATED, CHARACTERS, PATCHED, SINKS_ABOVE, TOKENS_SHOWN, SinkBias
from weightscope.sinks.updates import SPREAD
from weightscope.tables import Column, Table

# Table 1 of the paper: changes in perplexity on OpenWebText.
RANGES = tuple((layers, how) for layers in ("early", "middle", "late", "all") for how in (PATCHED, ABLATED))
HEADER = ("model", "from", "biases", "perplexity", *(f"{layers} {how}" for layers, how in RANGES))
TABLE_1 = (
    ("mistralai/Mistral-7B-v0.1", "the paper", "no", 6.94, 0.06, 1.19, 0.00, 0.56, 0.00, 0.22, 0.16, 2.38),
    ("meta-llama/Llama-2-7b-hf", "the paper", "no", 7.00, 0.28, 0.75, 0.00, 0.22, 0.06, 0.06, 0.28, 1.75),
    ("Qwen/Qwen3-8B-Base", "the paper", "no", 10.44, 6.19, 4.75, 0.00, 0.63, 0.00, 2.13, 7.31, 4.94),
    ("Qwen/Qwen2.5-7B", "the paper", "yes", 11.25, 1.69, 1.13, 0.19, 0.56, 1.31, 1.31, 2.31, 1.31),
    ("EleutherAI/pythia-6.9b", "the paper", "yes", 11.81, 10.56, 12.44, 1.38, 93.19, 0.19, 0.38, 6.81, 58.19),
)


# The page


@phase("drawing figures")
def write_bias_report(files: Files, models: Sequence[SinkBias], source: str) -> None:
    """Draw the figures of every model and write report.html: are sinks biases?"""
    sections = [_table_one(models)]
    if len(models) > 1:
        sections.append(_side_by_side(files, models))
    for bias in models:
        sections += [_updates(files, bias), _patching(files, bias), _prediction(files, bias)]
    lead = " ".join([*map(bias_headline, models), f"Texts: {source}."])
    provenance = Provenance().of_all(source for bias in models for source in bias.provenance.sources)
    write_page(files, "report.html", "Attention sinks as biases", lead, sections, provenance=provenance)


def bias_headline(bias: SinkBias) -> str:
    """One model's result in two sentences."""
    spectral, variance, own_first = (
        np.median(bias.layers[name]) for name in ("spectral_sink", "variance_sink_mu", "variance_sink")
    )
    (ssp, ablated), (ssp_from_1, ablated_from_1) = (
        (changes["all", PATCHED], changes["all", ABLATED]) for changes in (_changes(bias, 0), _changes(bias, 1))
    )
    return (
        f"{bias.model}, {bias.sizes}: in the median layer one direction holds {spectral:.0%} of what token 0 writes; "
        f"a constant from other texts is off by {variance:.0%} of its squared length, and its own mean by "
        f"{own_first:.0%} (R of eq. 6). Put in its place in all layers, the constant moves perplexity from "
        f"{bias.baseline:.2f} by {ssp:+.2f}, and nothing in its place by {ablated:+.2f}; with position 0 left as it "
        f"is, by {ssp_from_1:+.2f} and {ablated_from_1:+.2f}."
    )


def _changes(bias: SinkBias, start: int) -> dict[tuple[str, str], float]:
    """Changes in perplexity by range of layers and intervention."""
    table = bias.patching.where(bias.patching["first_position"] == start)
    return dict(zip(zip(table["layers"], table["intervention"], strict=True), table["change"].tolist(), strict=True))


def _table_one(models: Sequence[SinkBias]) -> Section:
    text = (
        "$$y_i → y_i - u_(sink, i) + mu$$ Change in perplexity when attention's output $y_i$ is replaced by this "
        "(eq. 7). SSP: $mu$ is $mu_sink$, the mean of $u_sink$ over all positions of other texts (eq. 2). Ablation: "
        "$mu$ is zero. Early layers are the first 30 %, late ones the last 30 %. Perplexities of different models, "
        "and the paper's on OpenWebText, are over different tokens; compare changes within a row. Eq. 7 holds for "
        "every position $i$, and at $i = 0$ attention writes only $u_sink$ and $b$: when it is patched there too, "
        "later layers see a different sink. The second table leaves position 0 as it is."
    )

    def measured(start: int) -> list[tuple[object, ...]]:
        return [
            (bias.model, "measured", "yes" if bias.biased else "no", bias.baseline,
             *(_changes(bias, start).get(key, np.nan) for key in RANGES))
            for bias in models
        ]  # fmt: skip

    rows = [
        row
        for measurement in measured(0)
        for row in (measurement, *(row for row in TABLE_1 if row[0] == measurement[0]))
    ]
    rows += [row for row in TABLE_1 if row not in rows]
    tables = [
        Table.of_rows(HEADER, rows, "Every position, as in eq. 7."),
        Table.of_rows(HEADER, measured(1), "Positions from 1 on."),
    ]
    return Section("Static sink patching (Table 1)", text, tables)


def _side_by_side(files: Files, models: Sequence[SinkBias]) -> Section:
    text = (
        "As in the paper's Figs 2 to 4: the layers of all models in one figure, each numbered from its first. Grey is "
        "what the paper reports of most layers of its models of 7 and 8 billion parameters. The table counts the "
        "layers that are within it."
    )
    figure = Figure(
        save(bias_figures.side_by_side_figure(models), files, "updates"),
        "Figs 2, 3 and 4. $u_sink$ solid, the mean $u_ctx$ dashed; $R$ of $u_sink$ is against $mu_sink$.",
        ", ".join(bias.model for bias in models),
    )
    return Section("What token 0 writes, in all models", text, [figure, beside_the_paper(models), what_was_run(models)])


def what_was_run(models: Sequence[SinkBias]) -> Table:
    """Each model and the amount of text: one row per model.

    Examples
    --------
    >>> what_was_run([]).names
    ['model', 'stored', 'biases', 'first_token', 'texts', 'tokens', 'evaluated', 'predicted_tokens']
    """
    names = ("model", "stored", "biases", "first_token", "texts", "tokens", "evaluated", "predicted_tokens")
    symbols = ("", "", "", "first token", "texts", "tokens of each", "texts evaluated", "tokens predicted in them")
    rows = [
        (bias.model, bias.stored, "yes" if bias.biased else "no", bias.first or "the text's own", bias.sizes.texts,
         bias.sizes.tokens, bias.sizes.evaluated, bias.predicted_tokens)
        for bias in models
    ]  # fmt: skip
    return Table.of_rows([Column(name, symbol=symbol) for name, symbol in zip(names, symbols, strict=True)], rows)


def beside_the_paper(models: Sequence[SinkBias]) -> Table:
    """Ratio, SpectralRatio and R of each model with the ranges that the paper gives: one row per model and measure.

    Examples
    --------
    >>> beside_the_paper([]).names
    ['model', 'measure', 'paper_low', 'paper_high', 'layers', 'within', 'lowest', 'median', 'highest', 'last_layer']
    """
    names = (
        "model", "measure", "paper_low", "paper_high", "layers", "within", "lowest", "median", "highest", "last_layer",
    )  # fmt: skip
    symbols = ("", "", "from", "to", "", "within it", "", "", "", "last layer")
    rows = [
        (bias.model, label, low, high, len(values), ((low <= values) & (values <= high)).sum(),
         values.min(), np.median(values), values.max(), values[-1])
        for bias in models
        for label, (name, (low, high)) in zip(
            ("Ratio", "SpectralRatio", "R"), bias_figures.IN_THE_PAPER.items(), strict=True
        )
        for values in [bias.layers[name]]
    ]  # fmt: skip
    header = [Column(name, symbol=symbol, format=".3g") for name, symbol in zip(names, symbols, strict=True)]
    return Table.of_rows(header, rows)


def _updates(files: Files, bias: SinkBias) -> Section:
    sizes, layers = bias.sizes, bias.layers
    first = plain(repr(bias.first))
    begin = f"each after the first token {first}" if bias.first else "each beginning with its own first token"
    text = (
        "$$y_i = u_(sink, i) + u_(others, i) + b$$ $$u_(sink, i) = sum_h alpha_(i, 0)^h f_h(x_0)$$ $$u_(others, i) = "
        f"sum_h sum_(j=1)^i alpha_(i, j)^h f_h(x_j)$$ {sizes.texts} texts of {sizes.tokens} tokens, {begin}. $u_(sink, "
        "i)$ is what token 0 writes at position $i$; $u_(others, i)$ what tokens 1 to $i$ write together; $u_(ctx, i) "
        "= u_(others, i)/i$ is their mean, as the caption of the paper's Fig. 3 defines it (which weighs early "
        "positions most: the sum is drawn too). The values' bias is part of $f(x)$; $b$ is the output's. Positions "
        "run from 1, as in eq. 4; $mu_sink$ alone includes position 0. $R$ of $u_sink$ is given twice: against "
        "$mu_sink$, as eq. 6 is written, where it passes 1 if what token 0 sends itself pulls $mu_sink$ away from all "
        "others; and against the mean over the same positions, as the $R$ of the others is, where it is 1 at most. "
        f"Attention's matrices are stored as {bias.stored}."
    )
    strongest = layers["ratio"].argmax()
    updates = Figure(
        save(bias_figures.updates_figure(bias), files, f"updates-{bias.stem}"),
        f"Figs 2, 3 and 4. In layer {layers['layer'][strongest]} token 0 writes {layers['ratio'][strongest]:.2f} times "
        f"what all others do. Bands: {SPREAD[0]}th to {SPREAD[1]}th percentile over single texts.",
        bias.model,
    )
    picture = Figure(
        save(bias_figures.picture_figure(bias), files, f"picture-{bias.stem}"),
        f"Fig. 5: updates in layer {bias.layer_shown}, whose heads sink most, on one text of up to {TOKENS_SHOWN} "
        f"tokens, the stream's first {bias_figures.DIMENSIONS_SHOWN} dimensions. "
        "A bias is a pattern of vertical stripes. "
        f"Colours end at the {bias_figures.BOUND}th percentile of $|u_others|$.",
        bias.model,
    )
    strength = Column("strength", bias.updates.strength.mean(axis=1), "mean attention to token 0")
    return Section(f"{bias.model}: what token 0 writes", text, [updates, picture, Table([*layers.columns, strength])])


def _patching(files: Files, bias: SinkBias) -> Section:
    text = (
        f"{bias.predicted_tokens:,} predicted tokens of {bias.sizes.evaluated} texts of {CHARACTERS[0]:,} to "
        f"{CHARACTERS[1]:,} characters, from other documents than $mu_sink$. Bars are 95 % bootstrap intervals over "
        "texts."
    )
    caption = " ".join(["Table 1 as a figure.", *_in_words(bias)])
    figure = Figure(save(bias_figures.patching_figure(bias), files, f"patching-{bias.stem}"), caption, bias.model)
    interventions = bias.patching.take(range(1, len(bias.patching)))
    return Section(f"{bias.model}: a constant in the sink's place", text, [figure, interventions])


def _in_words(bias: SinkBias) -> list[str]:
    """What the constant and the ablation cost in each range of layers, with every position patched."""
    changes = _changes(bias, 0)
    costs = {layers: (changes[layers, PATCHED], changes[layers, ABLATED]) for layers, how in changes if how == PATCHED}
    by_layers = [f"{ssp:+.2f} and {ablated:+.2f} in {layers} layers" for layers, (ssp, ablated) in costs.items()]
    worse = [layers for layers, (ssp, ablated) in costs.items() if ssp >= ablated]
    verdict = f"The constant does no better than nothing in {' and '.join(worse)} layers." if worse else ""
    return [f"The constant costs, and nothing in its place costs: {'; '.join(by_layers)}.", verdict]


def _prediction(files: Files, bias: SinkBias) -> Section:
    strength = bias.heads["strength"]
    text = (
        f"{(strength > SINKS_ABOVE).sum()} of {len(strength)} heads sink: the average query from position 1 on gives "
        f"token 0 more than {SINKS_ABOVE} of its attention. Before the model was run, each head was given the "
        "embeddings of the first token and of up to 255 drawn from the vocabulary; AUROC says how well each reading "
        "ranks heads that sink above heads that do not, 0.5 being chance. Above the first layer the residual "
        "stream is no longer an embedding; the layer's index alone is the baseline to beat."
    )
    figure = Figure(
        save(bias_figures.prediction_figure(bias), files, f"heads-{bias.stem}"),
        "Left: measured. Middle: the best reading of the weights against the measured strength, the threshold dotted. "
        'Right: AUROC of each reading; "none" if it is the same for every head, or if no head sinks.',
        bias.model,
    )
    return Section(f"{bias.model}: which heads sink, foretold", text, [figure, bias.aurocs.select("meaning", "auroc")])

"""The pages of `weightscope sinks`: --question bias (the paper's Table 1) and --question kind."""

from collections.abc import Iterator, Sequence
from itertools import chain, product

import numpy as np

from weightscope.checkpoint.provenance import Provenance
from weightscope.core.files import Files
from weightscope.core.formulas import plain
from weightscope.core.progress import phase
from weightscope.core.tables import Column, Table
from weightscope.heads.sinks import figures
from weightscope.heads.sinks.bias import (
    ABLATED,
    CHARACTERS,
    PATCHED,
    SINKS_ABOVE,
    TOKENS_SHOWN,
    SinkBias,
)
from weightscope.heads.sinks.mechanisms import SinkMechanisms
from weightscope.heads.sinks.updates import SPREAD
from weightscope.report.pages.page import Figure, Filed, Section, report, write_page
from weightscope.report.pages.style import save

# Sinks as biases

RANGES = tuple(product(("early", "middle", "late", "all"), (PATCHED, ABLATED)))
HEADER = ("model", "from", "biases", "perplexity", *(f"{layers} {how}" for layers, how in RANGES))
# Table 1 of the paper: changes in perplexity on OpenWebText
MISTRAL = ("mistralai/Mistral-7B-v0.1", "the paper", "no", 6.94)
LLAMA = ("meta-llama/Llama-2-7b-hf", "the paper", "no", 7.00)
QWEN3 = ("Qwen/Qwen3-8B-Base", "the paper", "no", 10.44)
QWEN2 = ("Qwen/Qwen2.5-7B", "the paper", "yes", 11.25)
PYTHIA = ("EleutherAI/pythia-6.9b", "the paper", "yes", 11.81)
TABLE_1 = (
    (*MISTRAL, 0.06, 1.19, 0.00, 0.56, 0.00, 0.22, 0.16, 2.38),
    (*LLAMA, 0.28, 0.75, 0.00, 0.22, 0.06, 0.06, 0.28, 1.75),
    (*QWEN3, 6.19, 4.75, 0.00, 0.63, 0.00, 2.13, 7.31, 4.94),
    (*QWEN2, 1.69, 1.13, 0.19, 0.56, 1.31, 1.31, 2.31, 1.31),
    (*PYTHIA, 10.56, 12.44, 1.38, 93.19, 0.19, 0.38, 6.81, 58.19),
)


@phase("drawing figures")
def write_bias_page(files: Files, *models: SinkBias, in_all: Sequence[Section] = ()) -> None:
    """Draw every model's figures and write report.html; `in_all` are sections on all of them."""
    sections = [_table_one(models), *in_all]
    for bias in models:
        sections += [_updates(files, bias), _patching(files, bias), _prediction(files, bias)]
    lead = " ".join([*(bias.sentences for bias in models), f"Texts: {models[0].source}."])
    sources = chain.from_iterable(bias.provenance.sources for bias in models)
    write_page(
        files,
        "report.html",
        "Attention sinks as biases",
        lead,
        sections,
        provenance=Provenance().of_all(sources),
    )


def _table_one(models: Sequence[SinkBias]) -> Section:
    text = (
        "$$y_i → y_i - u_(sink, i) + mu$$ Change in perplexity when attention's output $y_i$ is "
        "replaced by this (eq. 7). SSP: $mu$ is $mu_sink$, the mean of $u_sink$ over all positions "
        "of other texts (eq. 2). Ablation: $mu$ is zero. Early layers are the first 30 %, late "
        "ones the last 30 %. Perplexities of different models, and the paper's on OpenWebText, are "
        "over different tokens; compare changes within a row. Eq. 7 holds for every position $i$, "
        "and at $i = 0$ attention writes only $u_sink$ and $b$: when it is patched there too, "
        "later layers see a different sink. The second table leaves position 0 as it is."
    )

    def measured(bias: SinkBias, start: int) -> tuple[object, ...]:
        changes, biased = bias.changes(start), "yes" if bias.biased else "no"
        in_ranges = [changes.get(key, np.nan) for key in RANGES]
        return (bias.model, "measured", biased, bias.baseline, *in_ranges)

    rows: list[tuple[object, ...]] = []
    for bias in models:
        rows.append(measured(bias, 0))
        rows += [row for row in TABLE_1 if row[0] == bias.model]
    rows += [row for row in TABLE_1 if row not in rows]
    from_1 = [measured(bias, 1) for bias in models]
    tables = [
        Table.of_rows(HEADER, rows, "Every position, as in eq. 7."),
        Table.of_rows(HEADER, from_1, "Positions from 1 on."),
    ]
    return Section("Static sink patching (Table 1)", text, tables)


def _updates(files: Files, bias: SinkBias) -> Section:
    sizes, layers = bias.sizes, bias.layers
    begin = "each beginning with its own first token"
    if bias.first:
        begin = f"each after the first token {plain(repr(bias.first))}"
    text = (
        "$$y_i = u_(sink, i) + u_(others, i) + b$$ $$u_(sink, i) = sum_h alpha_(i, 0)^h f_h(x_0)$$ "
        f"$$u_(others, i) = sum_h sum_(j=1)^i alpha_(i, j)^h f_h(x_j)$$ {sizes.texts} texts of "
        f"{sizes.tokens} tokens, {begin}. $u_(sink, i)$ is what token 0 writes at position $i$; "
        "$u_(others, i)$ what tokens 1 to $i$ write together; $u_(ctx, i) = u_(others, i)/i$ is "
        "their mean, as the caption of the paper's Fig. 3 defines it (which weighs early positions "
        "most: the sum is drawn too). The values' bias is part of $f(x)$; $b$ is the output's. "
        "Positions run from 1, as in eq. 4; $mu_sink$ alone includes position 0. $R$ of $u_sink$ "
        "is given twice: against $mu_sink$, as eq. 6 is written, where it passes 1 if what token 0 "
        "sends itself pulls $mu_sink$ away from all others; and against the mean over the same "
        "positions, as the $R$ of the others is, where it is 1 at most. Attention's matrices are "
        f"stored as {bias.stored}."
    )
    strongest = layers["ratio"].argmax()
    updates = Figure(
        save(figures.updates_figure(bias), files, f"updates-{bias.stem}"),
        f"Figs 2, 3 and 4. In layer {layers['layer'][strongest]} token 0 writes "
        f"{layers['ratio'][strongest]:.2f} times what all others do. Bands: {SPREAD[0]}th to "
        f"{SPREAD[1]}th percentile over single texts.",
        bias.model,
    )
    picture = Figure(
        save(figures.picture_figure(bias), files, f"picture-{bias.stem}"),
        f"Fig. 5: updates in layer {bias.layer_shown}, whose heads sink most, on one text of up to "
        f"{TOKENS_SHOWN} tokens, the stream's first {figures.DIMENSIONS_SHOWN} dimensions. A bias "
        f"is a pattern of vertical stripes. Colours end at the {figures.BOUND}th percentile of "
        "$|u_others|$.",
        bias.model,
    )
    strength = Column("strength", bias.updates.strength.mean(axis=1), "mean attention to token 0")
    table = Table([*layers.columns, strength])
    return Section(f"{bias.model}: what token 0 writes", text, [updates, picture, table])


def _patching(files: Files, bias: SinkBias) -> Section:
    text = (
        f"{bias.predicted_tokens:,} predicted tokens of {bias.sizes.evaluated} texts of "
        f"{CHARACTERS[0]:,} to {CHARACTERS[1]:,} characters, from other documents than $mu_sink$. "
        "Bars are 95 % bootstrap intervals over texts."
    )
    caption = " ".join(["Table 1 as a figure.", *_in_words(bias)])
    drawn = save(figures.patching_figure(bias), files, f"patching-{bias.stem}")
    figure = Figure(drawn, caption, bias.model)
    interventions = bias.patching.take(range(1, len(bias.patching)))
    return Section(f"{bias.model}: a constant in the sink's place", text, [figure, interventions])


def _in_words(bias: SinkBias) -> list[str]:
    """Costs of the constant and the ablation in each range of layers, all positions patched."""
    changes = bias.changes(0)
    by_layers, worse = [], []
    for layers, how in changes:
        if how == PATCHED:
            ssp, ablated = changes[layers, PATCHED], changes[layers, ABLATED]
            by_layers.append(f"{ssp:+.2f} and {ablated:+.2f} in {layers} layers")
            if ssp >= ablated:
                worse.append(layers)
    verdict = ""
    if worse:
        verdict = f"The constant does no better than nothing in {' and '.join(worse)} layers."
    return [f"The constant costs, and nothing in its place costs: {'; '.join(by_layers)}.", verdict]


def _prediction(files: Files, bias: SinkBias) -> Section:
    strength = bias.heads["strength"]
    text = (
        f"{(strength > SINKS_ABOVE).sum()} of {len(strength)} heads sink: the average query from "
        f"position 1 on gives token 0 more than {SINKS_ABOVE} of its attention. Before the model "
        "was run, each head was given the embeddings of the first token and of up to 255 drawn "
        "from the vocabulary; AUROC says how well each reading ranks heads that sink above heads "
        "that do not, 0.5 being chance. Above the first layer the residual stream is no longer an "
        "embedding; the layer's index alone is the baseline to beat."
    )
    figure = Figure(
        save(figures.prediction_figure(bias), files, f"heads-{bias.stem}"),
        "Left: measured. Middle: the best reading of the weights against the measured strength, "
        'the threshold dotted. Right: AUROC of each reading; "none" if it is the same for every '
        "head, or if no head sinks.",
        bias.model,
    )
    aurocs = bias.aurocs.select("meaning", "auroc")
    return Section(f"{bias.model}: which heads sink, foretold", text, [figure, aurocs])


# Mechanisms of sinks
CHANGED = (
    "Each sink head is changed while the model predicts texts, at every query but the sink itself. "
    "zero: the sink writes nothing. mean: it writes the mean of its updates over other texts. "
    "ordinary: it writes what a token of another text does. redirected: its attention goes to the "
    "other keys, in proportion to theirs. Numbers are changes in perplexity. A no-op is needed for "
    "its attention alone: zero and mean cost nothing there, ordinary and redirected do. A "
    "broadcast is needed for its value, and if that is a constant, mean costs nothing."
)
HEADS_SHOWN = 24  # heads in a table of the page
HEADS, LAYERS = "heads.csv", "layers.csv"  # files next to the page
# Columns of the page's tables
MECHANISM = ("strength", "events", "kind", "ratio_out", "stable_rank", "mechanism", "qk_gap")
EPSILON_SINKS = ("sink_at_0.1", "sink_at_0.5")
LEMMA_3 = ("distance", "bound", "leading", "leading_bound", "along")
LEMMA_4 = ("variance_change", "variance_bound")
LAYER_LEMMA_4 = ("between_before", "between_after", "variance_before", "variance_after")
LENGTHS = ("norm_ratio", "read_ratio", "key_ratio")
ANGLES = ("alignment", "alignment_others", "query_key", "query_key_others")
MARGINS = ("logit_margin", "first_margin")
APPENDIX_A2 = ("query_similarity", "update_spread")


@report("Attention sinks of {0.model}")
def write_mechanisms_page(files: Files, sinks: SinkMechanisms) -> Iterator[Section]:
    """Sections on the sinks' tokens and mechanisms, the lemmas, and how sinks are chosen."""
    yield _tokens(files, sinks)
    yield _mechanisms(files, sinks)
    if sinks.causal is not None:
        yield Section("What the sinks are needed for", CHANGED, [Filed(sinks.causal, "causal.csv")])
    yield _lemmas(files, sinks)
    yield _gates(files, sinks)


def _tokens(files: Files, sinks: SinkMechanisms) -> Section:
    text = (
        "The strongest sink of a head on an input is the key that gets most of its attention (eq. "
        "2). It makes a sink event when at least 90 % of the queries give it half of their "
        "attention or more."
    )
    by_layer = Figure(
        save(figures.sink_token_figure(sinks), files, "sink-tokens"),
        "Fig. 4. By layer, mean over inputs and heads: share of the attention that each kind of "
        "token gets; share of the heads whose strongest key is of that kind; share that has a sink "
        "event there.",
    )
    mostly = "no head is a sink head"
    if sinks.sink_heads.any():
        mostly = "what the sinks of sink heads mostly do"
    by_head = Figure(
        save(figures.head_map_figure(sinks), files, "head-map"),
        "Fig. 5. Strength of each head's strongest sink; share of inputs on which it makes an "
        f"event; {mostly}.",
    )
    norms = Figure(
        save(figures.norms_figure(sinks), files, "norms"),
        "Fig. 14. Norms of tokens in the residual stream as they enter each layer, by kind: the "
        "mean of an input's tokens, and the largest of them; median and middle half over inputs.",
    )
    heads = strongest_heads(sinks).select("layer", "head", *MECHANISM)
    heads.caption = (
        f"The {len(heads)} heads with the most sink events, then the strongest sinks; "
        "heads.csv lists all."
    )
    norm_columns = [
        column.name
        for column in sinks.layers.columns
        if column.name.startswith("norm_mean_") and not np.isnan(column.values).all()
    ]
    most = ("kind", "kind_share", "token", "token_share", "events")
    layers = sinks.layers.select("layer", *most, *norm_columns)
    layers.caption = (
        "Which kind of token, and which token, is the strongest sink most often, over inputs and "
        "heads; and the median norm of each kind's tokens as they enter the layer."
    )
    of_heads, of_layers = Filed(heads, HEADS), Filed(layers, LAYERS)
    return Section("Which tokens are sinks", text, [by_layer, by_head, of_heads, norms, of_layers])


def strongest_heads(sinks: SinkMechanisms) -> Table:
    """Heads for a page: those with the most events, then those with the strongest sinks."""
    order = np.lexsort((-sinks.heads["strength"], -sinks.heads["events"]))
    return sinks.heads.take(order[:HEADS_SHOWN])


def _mechanisms(files: Files, sinks: SinkMechanisms) -> Section:
    text = (
        "A sink event is a NOP where the sink's value norm is at most 0.2 of the other tokens' "
        "mean, a broadcast where it is at least 0.5 of it and the head's update has stable rank "
        f"1.5 or less. {_what_heads_with_nops_write(sinks)}{_second_no_op(sinks)}"
    )
    plane = Figure(
        save(figures.plane_figure(sinks), files, "plane"),
        "Fig. 6. Every head's strongest sink on every input. Left: by mechanism; dotted: the "
        "rule's bounds. Right: events by layer and by the kind of token that is the sink.",
    )
    parts = [plane]
    if "register" in sinks.kinds:
        panel = "no register is the sink of an event"
        if (sinks.event & (sinks.kind == sinks.kinds.index("register"))).any():
            panel = "what the sinks on registers do"
        caption = f"Fig. 8. Share of the attention by kind of token; {panel}."
        parts.append(Figure(save(figures.register_figure(sinks), files, "registers"), caption))
    return Section("No-op or broadcast", text, parts)


def _what_heads_with_nops_write(sinks: SinkMechanisms) -> str:
    """Explain, in sentences, that a NOP is the sink's alone, and what the head still writes."""
    nop = sinks.mechanism == "nop"
    if not nop.any():
        return ""
    written, rest = sinks.measures["written"], sinks.measures["residual"][nop]
    usual = np.median(written, axis=2, keepdims=True)  # (I, L, 1), over a layer's heads
    return (
        "NOP is a word for what the sink writes, not for what the head does: on these events the "
        f"head writes {np.median((written / usual)[nop]):.2f} times as much as the median head of "
        "its layer ($|Y|$), and of that the part $|Y - a_s u_s^⊤|/|Y|$ that other keys write is "
        f"{np.median(rest):.2f} (medians). "
    )


def _second_no_op(sinks: SinkMechanisms) -> str:
    """Sentences on Lemma 1's second way to do nothing."""
    chosen, events = sinks.event, "events"
    if not chosen.any():
        chosen, events = np.ones_like(chosen), "heads and inputs, as there is no event,"
    cancelled = sinks.measures["cancelled"][chosen].round(2) + 0.0
    against = sinks.measures["against_stream"][chosen].round(2) + 0.0
    return (
        "In Lemma 1 a sink can also do nothing by cancelling what the other keys write. Over all "
        f"{events} `cancelled`, 1 where "
        f"the two cancel, has median {np.nanmedian(cancelled):.2f} and is "
        f"{np.nanmax(cancelled):.2f} at most; the sink's update is written against the stream with "
        f"a cosine of {np.nanmedian(against):.2f}, {np.nanmax(against):.2f} at most."
    )


def _lemmas(files: Files, sinks: SinkMechanisms) -> Section:
    held = sinks.layers["sink_at_0.1"].mean()
    text = (
        "$$alpha_(i s) >= 1 - epsilon$$ Definition 1: $s$ is an $epsilon$-sink if every query $i$ "
        f"gives it that much of its attention; {held:.2%} of the strongest keys are 0.1-sinks. "
        "Lemma 3: what a head writes, $Y = A u$, is then close to $u_s$ at every position, and its "
        "first singular direction is close to $u_s$ (eq. 12). Lemma 4: such an update hardly "
        "changes the variance of tokens. The bounds always hold, but say little if a single query "
        "looks elsewhere, since that query sets their $epsilon$. In a causal model no query before "
        "the sink can see it, and $epsilon$ is 1 unless the sink is the first token."
    )
    lemmas = Figure(
        save(figures.lemma_figure(sinks), files, "lemmas"),
        "Every head's strongest sink on every input. Definition 1: share of them that are "
        "$epsilon$-sinks, by the kind of the sink. Lemma 3, eq. 12 and Lemma 4: measured values "
        "against their bounds; the lemma rules out the shaded side. In eq. 12 bounds below 1e-4 of "
        "the largest are left out. In Lemma 4 $V'$ is the variance after this head alone has "
        "written.",
    )
    similarity = Figure(
        save(figures.similarity_figure(sinks), files, "similarity"),
        "Lemma 4 of whole layers. Mean cosine between different tokens of an input before and "
        "after attention adds to them; the variance of the tokens, the mean squared distance from "
        "their mean, before and after (eq. 17); and the cosine of each token with itself across "
        "that. Median and middle half over inputs. Where one token's norm is massive, the variance "
        "is mostly that token's.",
    )
    measures = ("epsilon", *EPSILON_SINKS, *LEMMA_3, *LEMMA_4)
    heads = strongest_heads(sinks).select("layer", "head", "mechanism", *measures)
    heads.caption = (
        "The same heads as above: medians over the inputs with an event, or over all "
        "if there is none."
    )
    layers = sinks.layers.select("layer", *EPSILON_SINKS, *LAYER_LEMMA_4)
    layers.caption = (
        "$epsilon$-sinks among the strongest keys; cosine and variance of tokens around attention."
    )
    of_heads, of_layers = Filed(heads, HEADS), Filed(layers, LAYERS)
    return Section("What the lemmas say", text, [lemmas, similarity, of_heads, of_layers])


def _gates(files: Files, sinks: SinkMechanisms) -> Section:
    text = (
        "Lemma 2 has two ways to a gate: one large singular value of $W_QK$ with the sink along "
        "its direction, or a sink of large norm. Where a norm comes before $W_QK$, as in most "
        "transformers, a token's length in the residual stream reaches no score: the second way is "
        "closed, and the lengths of keys are those that count. Under rotation, $W_QK$ is taken at "
        "distance 0; this excludes what distances add to scores. " + _chosen(sinks)
    )
    spectra = Figure(
        save(figures.spectrum_figure(sinks), files, "spectra"),
        "Fig. 2B. Singular values of $W_QK$ over the largest, median and middle half over heads. "
        "Then, against the strength of each head's sink: the ratio of the two largest; and the "
        "sink's norm in the residual stream, before any norm of the layer, over the other tokens', "
        "median over inputs.",
    )
    angles = Figure(
        save(figures.angles_figure(sinks), files, "angles"),
        "Lemma 2, one dot per head: the mean cosine of its queries with its sink's key, against "
        "that with the other keys, after rotation (in images before); the median over inputs with "
        "an event, or over all if there is none. Dotted: the two are equal.",
    )
    routing = Figure(
        save(figures.routing_figure(sinks), files, "routing"),
        "Median over inputs, one dot per head, against the strength of its sink. Lemma 2: the "
        "cosine of the sink token with $v_1$, the first singular direction of $W_QK$ on the side "
        "of keys; crosses, the mean of the other tokens. Appendix A.2: the sink's key norm over "
        "the others'; how alike queries are before rotation; how much the length of what positions "
        "gather, $o = A v$, varies among them.",
    )
    measures = ("qk_gap", *LENGTHS, *ANGLES, *MARGINS, *APPENDIX_A2)
    heads = strongest_heads(sinks).select("layer", "head", *measures)
    heads.caption = (
        "The same heads: Lemma 2's two ways to a gate, and the quantities of appendix A.2."
    )
    return Section("How sinks are chosen", text, [spectra, angles, routing, Filed(heads, HEADS)])


def _chosen(sinks: SinkMechanisms) -> str:
    """Sentences on lengths, angles, and the largest singular value's part of the logit."""
    chosen, events = sinks.event, "events"
    if not chosen.any():
        chosen, events = np.ones_like(chosen), "heads and inputs"
    median = {name: np.nanmedian(values[chosen]) for name, values in sinks.measures.items()}
    in_stream = np.nanmedian(sinks.norm_ratio[chosen])
    return (
        f"Medians over all {events}: a sink's "
        f"length is {in_stream:.2f} of the other tokens' in the stream and "
        f"{median['read_ratio']:.2f} behind the layer's norm; its key's is "
        f"{median['key_ratio']:.2f}. The cosine of queries with its key is "
        f"{median['query_key']:.2f}, with other keys {median['query_key_others']:.2f}. Its logit "
        f"is {median['logit_margin']:.1f} above the others'; the largest singular value of $W_QK$ "
        f"makes {median['first_margin']:+.1f} of that (eq. 5, of queries and keys before rotation)."
    )

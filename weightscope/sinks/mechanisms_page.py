"""The page of one model's attention sinks."""

from pathlib import Path

import numpy as np

from weightscope.errors import counted
from weightscope.files import Files, OutputFolder
from weightscope.model import Model
from weightscope.pages.page import Figure, Filed, Section, write_page
from weightscope.pages.style import save
from weightscope.progress import phase
from weightscope.runner import open_runner
from weightscope.sinks import mechanisms_figures
from weightscope.sinks.inputs import Inputs
from weightscope.sinks.mechanisms import SINK_HEAD, SinkMechanisms
from weightscope.sinks.observer import sink_mechanisms
from weightscope.sinks.strength import MECHANISMS
from weightscope.tables import Table

HEADS_SHOWN = 24  # in the table of what sinks do
HEADS, LAYERS = "heads.csv", "layers.csv"  # next to the page


@phase("drawing figures")
def write_mechanism_report(files: Files, sinks: SinkMechanisms) -> None:
    """Draw the figures and write report.html: what do sinks do?"""
    sections = [_tokens(files, sinks), _mechanisms(files, sinks), _lemmas(files, sinks), _gates(files, sinks)]
    lead = " ".join([*mechanism_headline(sinks), sinks.inputs.note])
    title, provenance = f"Attention sinks of {sinks.model}", sinks.provenance
    write_page(files, "report.html", title, lead, sections, model=sinks.model, provenance=provenance)


def mechanism_headline(sinks: SinkMechanisms) -> list[str]:
    """What sinks do, in a few sentences."""
    n_inputs, n_layers, n_heads = sinks.event.shape
    events = int(sinks.event.sum())
    did = ", ".join(
        f"{(sinks.mechanism == name).sum():,} {mechanisms_figures.MECHANISM_NAMES[name]}" for name in MECHANISMS
    )
    third = max(1, n_layers // 3)
    most = []
    for name, kind in (("first", sinks.kind[:, :third]), ("last", sinks.kind[:, -third:])):
        share = np.bincount(kind.ravel(), minlength=len(sinks.kinds)) / kind.size
        most.append(f"{sinks.kinds[share.argmax()]!r} in the {name} third of the layers ({share.max():.0%})")
    return [
        f"{counted(n_inputs, 'input')}, {counted(n_layers, 'layer')} of {counted(n_heads, 'head')}: "
        f"{counted(events, 'sink event')} in {sinks.event.size:,} "
        f"({sinks.event.mean():.2%}){f'; {did}' if events else ''}.",
        f"{sinks.sink_heads.sum()} of {n_layers * n_heads} heads are sink heads "
        f"(an event on {SINK_HEAD:.0%} of the inputs or more).",
        f"The strongest key of a head is most often of the kind {', and '.join(most)}.",
    ]


def _tokens(files: Files, sinks: SinkMechanisms) -> Section:
    text = (
        "The strongest sink of a head on an input is the key that gets most of its attention (eq. 2). It makes a "
        "sink event when at least 90 % of the queries give it half of their attention or more."
    )
    by_layer = Figure(
        save(mechanisms_figures.sink_token_figure(sinks), files, "sink-tokens"),
        "Fig. 4. By layer, mean over inputs and heads: share of the attention that each kind of token gets; share of "
        "the heads whose strongest key is of that kind; share that has a sink event there.",
    )
    by_head = Figure(
        save(mechanisms_figures.head_map_figure(sinks), files, "head-map"),
        "Fig. 5. Strength of each head's strongest sink; share of inputs on which it makes an event; what the sinks "
        "of sink heads mostly do.",
    )
    norms = Figure(
        save(mechanisms_figures.norms_figure(sinks), files, "norms"),
        "Fig. 14. Norms of tokens in the residual stream as they enter each layer, by kind: the mean of an input's "
        "tokens, and the largest of them; median and middle half over inputs.",
    )
    shown = ("layer", "head", "strength", "events", "kind", "ratio_out", "stable_rank", "mechanism", "qk_gap")
    heads = strongest_heads(sinks).select(*shown)
    heads.caption = f"The {len(heads)} heads with the most sink events, then the strongest sinks; heads.csv lists all."
    layers = sinks.layers.select("layer", "kind", "kind_share", "token", "token_share", "events", *_norm_columns(sinks))
    layers.caption = (
        "Which kind of token, and which token, is the strongest sink most often, over inputs and heads; and the median "
        "norm of each kind's tokens as they enter the layer."
    )
    return Section(
        "Which tokens are sinks", text, [by_layer, by_head, Filed(heads, HEADS), norms, Filed(layers, LAYERS)]
    )


def strongest_heads(sinks: SinkMechanisms) -> Table:
    """The heads that a page shows: those with the most events, then those with the strongest sinks."""
    order = np.lexsort((-sinks.heads["strength"], -sinks.heads["events"]))
    return sinks.heads.take(order[:HEADS_SHOWN])


def _norm_columns(sinks: SinkMechanisms) -> list[str]:
    """Columns with the mean norm of each kind of token."""
    columns = (column for column in sinks.layers.columns if column.name.startswith("norm_mean_"))
    return [column.name for column in columns if not np.isnan(column.values).all()]


def _mechanisms(files: Files, sinks: SinkMechanisms) -> Section:
    text = (
        "A sink event is a NOP where the sink's value norm is at most 0.2 of the other tokens' mean, a broadcast "
        "where it is at least 0.5 of it and the head's update has stable rank 1.5 or less. " + _second_no_op(sinks)
    )
    plane = Figure(
        save(mechanisms_figures.plane_figure(sinks), files, "plane"),
        "Fig. 6. Every head's strongest sink on every input. Left: by mechanism; dotted: the rule's bounds. Right: "
        "events by layer and by the kind of token that is the sink.",
    )
    parts = [plane]
    if "register" in sinks.kinds:
        on_register = (sinks.event & (sinks.kind == sinks.kinds.index("register"))).any()
        says = "what the sinks on registers do" if on_register else "no register is the sink of an event"
        caption = f"Fig. 8. Share of the attention by kind of token; {says}."
        parts.append(Figure(save(mechanisms_figures.register_figure(sinks), files, "registers"), caption))
    return Section("No-op or broadcast", text, parts)


def _second_no_op(sinks: SinkMechanisms) -> str:
    """Whether sinks do nothing in Lemma 1's second way."""
    events = sinks.event.any()
    which = sinks.event if events else np.ones_like(sinks.event)
    cancelled, against = (sinks.measures[name][which].round(2) + 0.0 for name in ("cancelled", "against_stream"))
    return (
        "In Lemma 1 a sink can also do nothing by cancelling what the other keys write. Over all "
        f"{'events' if events else 'heads and inputs, as there is no event,'} `cancelled`, 1 where the two cancel, has "
        f"median {np.nanmedian(cancelled):.2f} and is {np.nanmax(cancelled):.2f} at most; the sink's update is written "
        f"against the stream with a cosine of {np.nanmedian(against):.2f}, {np.nanmax(against):.2f} at most."
    )


def _lemmas(files: Files, sinks: SinkMechanisms) -> Section:
    held = sinks.layers["sink_at_0.1"].mean()
    text = (
        "$$alpha_(i s) >= 1 - epsilon$$ "
        "Definition 1: $s$ is an $epsilon$-sink if every query $i$ gives it that much of its attention; "
        f"{held:.2%} of the strongest keys are 0.1-sinks. Lemma 3: what a head writes, $Y = A u$, is then close "
        "to $u_s$ at every position, and its first singular direction is close to $u_s$ (eq. 12). Lemma 4: such an "
        "update hardly changes the variance of tokens. The bounds always hold, but say little if a single query looks "
        "elsewhere, since that query sets their $epsilon$. In a causal model no query before the sink can see it, and "
        "$epsilon$ is 1 unless the sink is the first token."
    )
    lemmas = Figure(
        save(mechanisms_figures.lemma_figure(sinks), files, "lemmas"),
        "Every head's strongest sink on every input. Definition 1: share of them that are $epsilon$-sinks, by the "
        "kind of the sink. Lemma 3, eq. 12 and Lemma 4: measured values against their bounds; the lemma rules out "
        "the shaded side. In eq. 12 bounds below 1e-4 of the largest are left out. In Lemma 4 $V'$ is the variance "
        "after this head alone has written.",
    )
    similarity = Figure(
        save(mechanisms_figures.similarity_figure(sinks), files, "similarity"),
        "Lemma 4 of whole layers. Mean cosine between different tokens of an input before and after attention adds to "
        "them; the variance of the tokens, the mean squared distance from their mean, before and after (eq. 17); and "
        "the cosine of each token with itself across that. Median and middle half over inputs. Where one "
        "token's norm is massive, the variance is mostly that token's.",
    )
    heads = strongest_heads(sinks).select(
        "layer", "head", "mechanism", "epsilon", "sink_at_0.1", "sink_at_0.5", "distance", "bound", "leading",
        "leading_bound", "along", "variance_change", "variance_bound",
    )  # fmt: skip
    heads.caption = "The same heads as above: medians over the inputs with an event, or over all if there is none."
    layers = sinks.layers.select(
        "layer", "sink_at_0.1", "sink_at_0.5", "between_before", "between_after", "variance_before", "variance_after"
    )
    layers.caption = "$epsilon$-sinks among the strongest keys; cosine and variance of tokens around attention."
    return Section("What the lemmas say", text, [lemmas, similarity, Filed(heads, HEADS), Filed(layers, LAYERS)])


def _gates(files: Files, sinks: SinkMechanisms) -> Section:
    text = (
        "Lemma 2 has two ways to a gate: one large singular value of $W_QK$ with the sink along its direction, or a "
        "sink of large norm. Where a norm comes before $W_QK$, as in most transformers, a token's length in the "
        "residual stream reaches no score: the second way is closed, and the lengths of keys are those that count. "
        "Under rotation, $W_QK$ is taken at distance 0; this excludes what distances add to scores."
    )
    spectra = Figure(
        save(mechanisms_figures.spectrum_figure(sinks), files, "spectra"),
        "Fig. 2B. Singular values of $W_QK$ over the largest, median and middle half over heads. Then, "
        "against the strength of each head's sink: the ratio of the two largest; and the sink's norm in the residual "
        "stream, before any norm of the layer, over the other tokens', median over inputs.",
    )
    routing = Figure(
        save(mechanisms_figures.routing_figure(sinks), files, "routing"),
        "Median over inputs, one dot per head, against the strength of its sink. Lemma 2: the cosine of the sink token "
        "with $v_1$, the first singular direction of $W_QK$ on the side of keys; crosses, the "
        "mean of the other tokens. Appendix A.2: the sink's key norm over the others'; how alike queries are before "
        "rotation; how much the length of what positions gather, $o = A v$, varies among them.",
    )
    heads = strongest_heads(sinks).select(
        "layer", "head", "qk_gap", "norm_ratio", "alignment", "alignment_others", "key_ratio", "query_similarity",
        "update_spread",
    )  # fmt: skip
    heads.caption = "The same heads: Lemma 2's two ways to a gate, and the quantities of appendix A.2."
    return Section("How sinks are chosen", text, [spectra, routing, Filed(heads, HEADS)])


# The study of one model's sinks, from inputs to a page.


def study_mechanisms(model: Model, inputs: Inputs, out: Path, *, device: str = "cpu") -> list[str]:
    """Run a model on images or texts and write tables, figures and report.html."""
    sinks = sink_mechanisms(open_runner(model, device=device), inputs)
    with OutputFolder(out) as files:
        write_mechanism_report(files, sinks)  # pictures are written before the numbers
        sinks.write(files)
    return [inputs.note, *mechanism_headline(sinks)]

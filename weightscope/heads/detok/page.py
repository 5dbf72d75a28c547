"""The detokenization analysis as sections of a page, whose figures are drawn into files."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from weightscope.core.files import Files
from weightscope.core.formulas import plain
from weightscope.core.progress import phase
from weightscope.core.tables import Column, Table
from weightscope.heads.detok import figures
from weightscope.heads.detok.first_layer import TERMS
from weightscope.heads.detok.heads import BigramAuroc, TokenRoc
from weightscope.heads.detok.kernels import PositionKernels
from weightscope.heads.detok.on_text import TextCheck
from weightscope.heads.detok.positions import (
    BEYOND,
    SPREADS,
    Near,
    PositionTerms,
    Trends,
    near_mass,
)
from weightscope.model.layers.kernel import FAST
from weightscope.report.findings import spans
from weightscope.report.pages.page import Figure, Filed, Section, write_page
from weightscope.report.pages.style import save

# Numbers that the detokenization paper's authors printed or noted (gokamoda/lm-detokenization,
# notes/gpt2.md and notes/rinna-japanese-gpt-1b.md), all of first layers, to three decimals.


class Published(NamedTuple):
    """A model's mean AUROC by head, with tokens that follow none as 0, and by frequency."""

    auroc: Mapping[int, float]
    by_frequency: Mapping[int, float]
    heads: tuple[int, ...]  # whose curves or completions they show
    where: str
    corpus: str


MODELS = ("gpt2", "openai-community/gpt2")
AUROC = {
    7: 0.876, 11: 0.806, 6: 0.793, 0: 0.732, 4: 0.694, 3: 0.634,
    10: 0.615, 2: 0.549, 8: 0.445, 1: 0.404, 9: 0.401, 5: 0.286,
}  # fmt: skip
AUROC_BY_FREQUENCY = {
    7: 0.865, 3: 0.846, 4: 0.830, 11: 0.788, 10: 0.733, 8: 0.687,
    1: 0.620, 9: 0.616, 5: 0.613, 0: 0.591, 2: 0.591, 6: 0.568,
}  # fmt: skip
RINNA = Published(
    {
        15: 0.484, 14: 0.473, 6: 0.462, 3: 0.448, 11: 0.418, 2: 0.398, 13: 0.385, 9: 0.371,
        8: 0.362, 5: 0.317, 7: 0.316, 12: 0.313, 4: 0.304, 1: 0.282, 10: 0.281, 0: 0.271,
    },
    {
        15: 0.709, 14: 0.747, 6: 0.639, 3: 0.615, 11: 0.536, 2: 0.516, 13: 0.478, 9: 0.539,
        8: 0.499, 5: 0.476, 7: 0.520, 12: 0.527, 4: 0.372, 1: 0.388, 10: 0.423, 0: 0.334,
    },
    (15, 14, 6),
    "authors' notes",
    "Japanese Wikipedia",
)  # fmt: skip
PUBLISHED = dict.fromkeys(
    MODELS, Published(AUROC, AUROC_BY_FREQUENCY, (7, 1), "Table 2", "OpenWebText")
) | {"rinna/japanese-gpt-1b": RINNA}
# Attention from position 500 to itself and to 485-500, the nearest 16, of heads 0 to 11: mean over
# 3,319 documents of OpenWebText (the notes' "Attention destinations from position 500").
NEAR_QUERY = 500
PAST = (0.304, 0.057, 0.244, 0.173, 0.455, 0.025, 0.314, 0.830, 0.344, 0.312, 0.302, 0.022)
ITSELF = (0.017, 0.792, 0.034, 0.827, 0.536, 0.480, 0.029, 0.164, 0.052, 0.019, 0.146, 0.001)
NEAR_ON_TEXT = {1: ITSELF, 16: tuple(np.add(PAST, ITSELF).tolist())}

# Eq. 14: the terms of a score that depend on positions.
EQUATIONS = (
    "$$T^p(j) = frac(b_QK p_j^⊤, σ_j)$$ $$T^pp(i, j) = frac(p_i W_QK p_j^⊤, σ_i σ_j)$$ Means over "
    "the tokens at $i$ and $j$ take $1/σ$ at its mean, in figures and tables alike; the paper's "
    "Fig. 3 takes $σ_i$ at its mean."
)
SPREAD_EQUATIONS = (
    "$$T^p(j) = frac(b_QK p_j^⊤, σ_j)$$ $$T^pp(i, j) = frac(p_i W_QK p_j^⊤, σ_i σ_j)$$ $$σ_j^2 = "
    "s^2 + Var p_j$$ $s$ replaces the token embeddings: the standard deviation of a token over "
    "its dimensions, the same for every token and uncorrelated with $p_j$. positions.npz has the "
    "numerators."
)


LINES_BY_SIGMA = (
    " Lines take $1/σ_i$ at its mean, $σ_i$ at its minimum and maximum. The paper's caption says "
    "$σ_j$; its authors' code takes $σ_i$."
)
LEAST_SHARE = 0.1  # of the variance of a curve, for a trend to be described


def is_of_paper(model: str) -> bool:
    """True if this is the paper's model, by its name on the Hub."""
    return model.partition("@")[0] in MODELS


def published(model: str) -> Published | None:
    """The authors' numbers for a model, by its name on the Hub."""
    return PUBLISHED.get(model.partition("@")[0])


def present(heads: Iterable[int], n_heads: int) -> list[int]:
    """Heads that a layer of `n_heads` has, each once."""
    return [head for head in dict.fromkeys(heads) if head < n_heads]


@phase("drawing figures")
def write_auroc_page(files: Files, auroc: BigramAuroc, curves: Sequence[TokenRoc] = ()) -> None:
    """Write report.html and its figures."""
    write_page(
        files,
        "report.html",
        f"Detokenization in layer {auroc.layer} of {auroc.model}",
        auroc.lead,
        auroc_sections(files, auroc, curves),
        model=auroc.model,
        provenance=auroc.provenance,
        numbers=auroc.controls,
    )


def auroc_sections(
    files: Files, auroc: BigramAuroc, curves: Sequence[TokenRoc] = ()
) -> list[Section]:
    """Table 2, with the authors' numbers for a model of theirs, and any ROC curves (Fig. 2)."""
    table, counts = auroc.ranked, auroc.counts
    known = published(auroc.model) if auroc.layer == 0 else None
    if known is not None:
        printed = np.array([known.auroc.get(head, np.nan) for head in table["head"]])
        noted = np.array([known.by_frequency.get(head, np.nan) for head in table["head"]])
        differs, less = table["auroc_paper"] - printed, f"auroc_paper less {known.where}"
        by_frequency = "by frequency, authors' notes"
        compared = (
            Column("auroc_printed", printed, f"AUROC, {known.where}", format=".3f"),
            Column("auroc_paper_differs", differs, less, format="+.3f"),
            Column("auroc_by_frequency_noted", noted, by_frequency, format=".3f"),
        )
        table = Table([*table.columns, *compared], table.caption)
    scored = f"{table['tokens_scored'][0]:,} of {auroc.auroc.shape[1]:,}"
    which = "were drawn" if auroc.sample else "follow some token"
    text = f"{plain(counts.origin)}. {scored} tokens {which}."
    if known is not None:
        text += (
            f" The authors count {known.corpus}; other counts, as of a few shards, are one reason "
            "for `auroc_paper_differs`."
        )
    caption = (
        "Bigram AUROC of $T^ee$ by head, best first. Dot: mean over tokens; bars: the middle half "
        "and the middle 90 % of tokens. Diamond: mean of $T^ee$ less its mean over current tokens, "
        "which scores the previous token alone. Dashed: how often the previous token occurs, "
        "without a head and without the current token's counts."
    )
    drawn = Figure(save(figures.auroc_figure(auroc), files, "auroc"), caption)
    measured = table if known is not None else Filed(table, "heads.csv")
    sections = [Section("Which heads put words together", text, [drawn, measured])]
    if curves:
        if known is not None:
            coloured, which = present(known.heads, len(auroc.auroc)), "the authors' heads"
        else:
            coloured, which = table["head"][[0, -1]].tolist(), "the best and the worst head"
        caption = (
            f"ROC curves for single current tokens (Fig. 2): {which} in colour, the others in grey."
        )
        drawn = Figure(save(figures.roc_figure(curves, coloured), files, "roc"), caption)
        sections.append(Section("ROC curves of single tokens", parts=[drawn]))
    return sections


@phase("drawing figures")
def position_section(
    files: Files, terms: PositionTerms, heads: Sequence[int] = (), model: str = ""
) -> Section:
    """Fig. 3 for the selected heads, or the one that looks nearest; Fig. 4, left; all trends."""
    table, parts = terms.heads, []
    with_spread, lines = "", LINES_BY_SIGMA
    if terms.spread is not None:
        with_spread, lines = f" (with $s$ = {terms.spread.s:g})", ""
    for head in heads or (terms.nearest_head(),):
        t_p = {name: table[f"t_p_{name}"][head] for name in Trends._fields}
        t_pp = {name: table[f"t_pp_{name}"][head] for name in Trends._fields}
        caption = (
            f"Fig. 3 for head {head} at query position {terms.query} (dotted); the model's last "
            f"position is {terms.t_p.shape[1] - 1}.{lines}"
        )
        if t_p["linear_share"] >= LEAST_SHARE:
            share = f"{t_p['linear_share']:.0%} of the variance of $T^p${with_spread}"
            caption += f" A line of slope {t_p['slope']:.3g} a position is {share}."
        if t_pp["sinusoid_share"] >= LEAST_SHARE:
            share = f"{t_pp['sinusoid_share']:.0%} of the variance of $T^pp${with_spread}"
            caption += f" A sinusoid of period {longest(t_pp['period'], terms)} is {share}."
        figure = figures.position_figure(terms, head)
        parts.append(Figure(save(figure, files, f"positions-head-{head}"), caption))
    measured, apart, grey = None, "", list[int]()
    if is_of_paper(model) and terms.query == NEAR_QUERY:
        measured, grey = NEAR_ON_TEXT, unexplained(terms.near)
        apart = (
            " Dots: on text, from the authors' notes. Grey, not explained by position: the dot at "
            f"16 is more than {BEYOND:g} outside the band (heads {spans(grey) or 'none'})."
        )
    band, over = r"$\sigma_i$ minimum to maximum", "$σ_i$ from its minimum to its maximum"
    if terms.spread is not None:
        low, _, high = (f"{times * terms.spread.s:g}" for times in SPREADS)
        band = over = f"$s$ = {low} to {high}"
    caption = (
        f"Fig. 4, left, for every head, from weights alone: attention from position {terms.query} "
        f"to the nearest $k$ positions{with_spread}; the band is over {over}.{apart}"
    )
    figure = figures.near_figure(terms.near, band, measured, grey)
    parts.append(Figure(save(figure, files, "near"), caption))
    text = EQUATIONS if terms.spread is None else SPREAD_EQUATIONS
    trends = Filed(table.select(*terms.columns_shown), "trends.csv")
    return Section("What heads owe to position", text, [*parts, trends])


def unexplained(near: Near) -> list[int]:
    """Heads of GPT-2 whose attention on text to the nearest 16 lies outside the band."""
    return np.flatnonzero(near.beyond(16, NEAR_ON_TEXT[16]) > BEYOND).tolist()


def longest(period: float, terms: PositionTerms) -> str:
    """A period as text: the longest that is tried, the window's own length, is a lower bound."""
    trained = np.setdiff1d(np.arange(terms.query + 1), terms.undertrained)
    return f"{period:.0f}" if period < len(trained) else f"at least {period:.0f}"


@phase("drawing figures")
def text_section(
    files: Files, check: TextCheck, terms: PositionTerms, heads: Sequence[int] = ()
) -> Section:
    """Fig. 4 for some heads, or the one that looks nearest, and every head's contributions."""
    shown = tuple(heads) or (terms.nearest_head(),)
    head = shown[0]
    strongest = max(TERMS, key=lambda name: check.heads[name][head])
    text = (
        f"Attention of layer 0 on {check.n_texts} passages of {plain(check.source)}. Leaving out "
        f"$T^{strongest}$ moves head {head}'s attention most, by "
        f"{check.heads[strongest][head]:.2f} nats. The six terms add up to the model's attention: "
        f"no weight differs by more than {check.difference:.0e}."
    )
    fig_4 = []
    for head in shown:
        caption = (
            f"Fig. 4. Left: head {head}'s attention from position {check.query} with the band of "
            "95 % of the texts, and what position alone predicts with $1/σ_i$ at its mean, as in "
            "Fig. 3. Middle: how far it moves without each term, by position (eq. 18: $D_KL(P ∥ "
            "Q)$, scores divided by $√(d')$). Right: the same as the authors' script draws the "
            "paper's figure, $D_KL(Q ∥ P)/(i + 1)$ of undivided scores, averaged over heads; "
            "c_paper in contributions.csv."
        )
        figure = figures.text_figure(check, terms, head)
        fig_4.append(Figure(save(figure, files, f"empirical-head-{head}"), caption))
    every = Figure(
        save(figures.contributions_figure(check), files, "contributions"),
        "Mean of each term's contribution over positions, in nats, by head.",
    )
    attention = attention_table(check, terms)
    files.table("attention.csv", attention)
    table = Filed(attention, "attention.csv")
    return Section("What happens on text", text, [*fig_4, every, check.heads, table])


def attention_table(check: TextCheck, terms: PositionTerms) -> Table:
    """Attention on text and by position alone, to the token before and to the nearest tenth."""
    predicted = terms.attention()  # (n_heads, query + 1)
    attention, near = check.attention, near_mass(check.attention)
    to_previous = "attention to the token before, mean over texts"
    to_near = "attention to the nearest tenth, mean over texts"
    alone = "what position alone gives it"
    return Table(
        [
            Column("head", np.arange(len(predicted))),
            Column("previous", attention[:, -2], meaning=to_previous),
            Column("previous_by_position", predicted[:, -2], meaning=alone),
            Column("near_mass", near, meaning=to_near),
            Column("near_mass_by_position", near_mass(predicted), meaning=alone),
        ],
        f"Attention from position {check.query} on text, and by position alone (Fig. 4, left).",
    )


KERNEL = "$$K(δ) = s E[q] R(δ) E[k]^⊤ + b(δ)$$"


@phase("drawing figures")
def write_kernel_page(files: Files, kernels: PositionKernels, heads: Sequence[int] = ()) -> None:
    """Write report.html and its figures: mean scores by distance, and shares of wavelengths."""
    table = Filed(kernels.shown()[0], "trends.csv")
    band = " Band: one standard deviation over pairs of tokens." if kernels.tokens else ""
    which = "The heads chosen" if heads else "The heads whose scores owe most to distance"
    caption = (
        f"{which}: the mean score at each distance (kernel.csv).{band} Dot: the highest of those "
        "drawn; kernel.csv goes on to the whole context, 16 distances to each doubling."
    )
    parts = [Figure(save(figures.kernel_figure(kernels, heads), files, "kernels"), caption)]
    if kernels.tokens:
        caption = (
            "Every head: share of distance in the variance of scores over distances below "
            "128, and its peak."
        )
        parts.append(Figure(save(figures.peaks_figure(kernels), files, "peaks"), caption))
    if kernels.windows is not None:
        caption = "Biases by rows and columns. The curves above are for patches in one row."
        parts.append(Figure(save(figures.window_figure(kernels, heads), files, "windows"), caption))
    text = (
        f"{KERNEL} $q$ and $k$ are queries and keys before rotation, $R(δ)$ turns them by "
        "distance, $s$ is the model's scale, usually $1/√(d')$, and $b(δ)$ is the bias by distance "
        "(ALiBi, T5, windows), where there is one."
    )
    sections = [Section("Scores by distance", text, [*parts, table])]
    if kernels.rotates:
        sections.append(_wavelength_section(files, kernels))
    write_page(
        files,
        "report.html",
        f"Scores by distance in {kernels.model}",
        kernels.lead,
        sections,
        model=kernels.model,
        provenance=kernels.provenance,
    )


def _wavelength_section(files: Files, kernels: PositionKernels) -> Section:
    table = kernels.heads
    fast, beyond = (float(np.mean(table[name])) for name in ("fast_share", "beyond_share"))
    text = (
        "Each pair of dimensions turns at a frequency of its own. Pairs that turn once within "
        f"{FAST} tokens hold {fast:.0%} of $|q||k|$ in the mean head, pairs that turn less than "
        f"once in the {kernels.context:,} tokens of the context {beyond:.0%}. Barbero et al. "
        "(arXiv 2410.06205) find the highest frequencies in heads that look at positions, and the "
        "lowest in heads that look at content."
    )
    caption = (
        "By layer and wavelength, mean over heads. Left: how large queries and keys are in these "
        "pairs. Middle: the wave that they add to the mean score, whatever the tokens. Right: how "
        f"far tokens spread what they add. Dashed: {FAST} tokens (white) and the trained context "
        "(orange), where they lie within the panel."
    )
    drawn = Figure(save(figures.wavelengths_figure(kernels), files, "wavelengths"), caption)
    shares = [f"{band}_share" for band in ("fast", "middle", "beyond", "still")]
    shown = Filed(table.select("layer", "head", *shares, "wavelength"), "trends.csv")
    return Section("Which wavelengths heads use", text, [drawn, shown])

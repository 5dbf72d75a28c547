"""What five papers claim, in the order of their abstracts and sections, and what the files under figures/ say of it.

A claim's row is rendered from the files: its numbers, and whether its conditions hold: all (yes), some (in part) or
none (no). A claim that nothing here can judge has no condition, and the reason in place of numbers. Each is about the
models that ran here, which are not the papers'.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.stats import spearmanr

from tests.support.quoted import FIGURES, cell, column, rows, said
from weightscope.report.findings import spans


class Claim(NamedTuple):
    """One row: a sentence of the paper, shortened; what was found, with places for numbers; what must be true."""

    paper: str
    here: str
    numbers: Sequence[float] = ()
    holds: Sequence[bool] = ()

    def row(self) -> str:
        verdict = "yes" if all(self.holds) else "in part" if any(self.holds) else "no"
        verdict = verdict if self.holds else "not judged"
        return f"| {self.paper} | {said(self.here, self.numbers)} | {verdict} |"


HEADER = "| claim of the paper | here | holds? |\n| --- | --- | --- |\n"
TERMS = ("p", "pp", "ee", "e", "ep", "pe")  # of eq. 14, the three that the paper names first
BOOKS = {"SmolLM2": "smollm2-135m-instruct.q4_1", "Gemma": "gemma-3-270m-q4_k_m", "Qwen": "qwen2.5-coder-0.5b"}


def ends(values: np.ndarray) -> list[float]:
    """The lowest and the highest."""
    return [float(np.min(values)), float(np.max(values))]


# Detokenization


def contribution(name: str, statistic: str = "mean_over_positions") -> float:
    """A term's contribution, mean over heads: eq. 18, or as the authors draw it."""
    return float(column("gpt2-detok/contributions.csv", statistic, term=name).mean())


def detokenization() -> Iterator[Claim]:
    heads, trends, gpt2 = "gpt2-detok/heads.csv", "gpt2-detok/trends.csv", "positions-gpt2/trends.csv"
    auroc = column(heads, "auroc")
    first = [row["joined"] for row in rows("gpt2-detok/neighbours.csv") if (row["head"], row["rank"]) == ("6", "1")]
    choices = [row for row in rows("detok-smollm2/neighbours.csv") if (row["head"], row["rank"]) == ("8", "1")]
    words = {" responsibility", " amazement", " propriety", " diamond", " Bishop", " don't"}
    yield Claim(
        "Of all tokens, T^ee scores highest the one that completes the word (section 3.1)",
        "two layers: head 6's first choice does for {:d} of {:d} endings, chosen by hand; SmolLM2: head 8's for {:d} "
        "of {:d}, chosen by rule",
        [len({*first} & words), len(first), sum(row["count"] != "0" for row in choices), len(choices)],
        [{*first} == words, all(row["count"] != "0" for row in choices)],
    )
    yield Claim(
        "Heads differ: one has AUROC 0.88 on bigrams, the last 0.29 (section 3.2)",
        "{:.2f} to {:.2f}; head 6 is {:.2f} above the second",
        [*ends(auroc)[::-1], *-np.diff(np.sort(auroc)[:-3:-1])],
        [auroc.max() > 0.75, auroc.min() < 0.5],
    )
    by_frequency, specific = (cell(heads, f"auroc_{name}", head=6) for name in ("by_frequency", "specific"))
    baselines = [cell(f"{folder}/baseline.csv", "auroc_baseline") for folder in ("gpt2-detok", "detok-smollm2")]
    of_smollm2 = [
        cell("detok-smollm2/heads.csv", f"auroc{name}", head=8) for name in ("", "_by_frequency", "_specific")
    ]
    yield Claim(
        "Attention leans to frequent bigrams (abstract)",
        "head 6: {:.2f}, {:.2f} weighted by frequency, {:.2f} less what is the same for all current tokens; SmolLM2's "
        "head 8: {:.2f}, {:.2f}, {:.2f}; the previous token's frequency alone: {:.2f} and {:.2f}",
        [auroc[6], by_frequency, specific, *of_smollm2, *baselines],
        [auroc[6] > max(specific, baselines[0]), of_smollm2[0] > baselines[1], specific > 0.7, of_smollm2[2] > 0.7],
    )
    falling, lowest = cell(gpt2, "t_p_falling", head=7), cell(gpt2, "t_p_lowest_at", head=7)
    yield Claim(
        "T^p rises monotonically with j (section 4)",
        "no head's does at every step: in head 1 {:.0%} of the steps fall, in GPT-2's head 7 {:.0%}, until j = {:.0f}",
        [cell(trends, "t_p_falling", head=1), falling, lowest],
        [cell(trends, "t_p_falling", head=1) == 0, falling == 0],
    )
    lines = column(gpt2, "t_p_linear_share")
    yield Claim(
        "One component is a straight line, like ALiBi (section 1)",
        "a line explains {:.0%} of head 1's T^p, and over 90 % in {:d} of GPT-2's {:d} heads",
        [cell(trends, "t_p_linear_share", head=1), int((lines > 0.9).sum()), len(lines)],
        [cell(trends, "t_p_linear_share", head=1) > 0.9, (lines > 0.9).mean() > 0.5],
    )
    waves = column(gpt2, "t_pp_sinusoid_share")
    yield Claim(
        "T^pp is a wave (section 4)",
        "in GPT-2 a wave explains {:.0%} to {:.0%} of it, in {:d} of {:d} heads over half; in head 1 of the "
        "model of two layers {:.0%}",
        [*ends(waves), int((waves > 0.5).sum()), len(waves), cell(trends, "t_pp_sinusoid_share", head=1)],
        [bool((waves > 0.5).all()), cell(trends, "t_pp_sinusoid_share", head=1) > 0.5],
    )
    highest = cell(gpt2, "t_pp_highest_at", head=7)
    yield Claim(
        "T^pp is highest at the nearest tokens (section 4)",
        "at {:.0f} of 127 in head 1; with s = 0.14 at {:.0f} of 500 in GPT-2's head 7",
        [cell(trends, "t_pp_highest_at", head=1), highest],
        [cell(trends, "t_pp_highest_at", head=1) > 120, highest > 450],
    )
    spread = "positions-gpt2-spread/by-spread.csv"
    usual = np.array([0.08 <= s <= 0.3 for s in column(spread, "s")])
    near = column(spread, "near_mass")[usual]
    yield Claim(
        "Their sum after the softmax leaves attention to near tokens (sections 4 and 6)",
        "heads 1 and 6 give the nearest tenth {:.0%} and {:.0%}; GPT-2's head 7 {:.1%} to {:.1%}, whatever a token's "
        "spread from 0.08 to 0.3",
        [cell(trends, "near_mass", head=1), cell(trends, "near_mass", head=6), *ends(near)],
        [cell(trends, "near_mass", head=1) > 0.5, bool((column(spread, "peak")[usual] == 500).all()), near.min() > 0.5],
    )
    by_kl, drawn = ([contribution(name, how) for name in TERMS] for how in ("mean_over_positions", "c_paper"))
    yield Claim(
        "T^ee, T^p and T^pp contribute most (section 5)",
        "by eq. 18 yes: p {:.3f}, pp {:.3f}, ee {:.3f}, then e {:.3f}, ep {:.3f}, pe {:.3f}; as the authors' code "
        "draws it no: p {:.4f}, pp {:.4f}, ee {:.4f}, e {:.4f}, ep {:.4f}, pe {:.4f}", [*by_kl, *drawn],
        [min(by_kl[:3]) > max(by_kl[3:]), min(drawn[:3]) > max(drawn[3:])],
    )  # fmt: skip
    on_text = "gpt2-detok/attention.csv"

    def text_and_position(name: str) -> list[float]:
        """On text and by position, of heads 1 and 6."""
        return [cell(on_text, f"{name}{way}", head=head) for head in (1, 6) for way in ("", "_by_position")]

    near, before = text_and_position("near_mass"), text_and_position("previous")
    of_gpt2 = "positions-gpt2-measured/heads.csv"
    in_band = column(of_gpt2, "beyond") <= 0.01
    explained, chance = int(in_band.sum()), column(of_gpt2, "chance").sum()
    both = int((in_band & (column(of_gpt2, "itself_beyond") <= 0.01)).sum())
    yield Claim(
        "Attention on text follows what position predicts (section 5, Fig. 4)",
        "to the nearest tenth, on text and by position: {:.0%} and {:.0%} in head 1, {:.0%} and {:.0%} in head 6; "
        "measured by the authors, to the nearest 16 in GPT-2's head 7, {:.0%} and {:.0%}; within position's band in "
        "{:d} of 12 heads ({:.1f} by chance), and at the query itself too in {:d}",
        [*near, *(cell(of_gpt2, name, head=7) for name in ("measured", "near_0.144")), explained, chance, both],
        [abs(near[0] - near[1]) < 0.1, abs(near[2] - near[3]) < 0.1, explained == 12],
    )
    yield Claim(
        "The token before gets more on text, by what tokens have to do with each other (section 5)",
        "on text and by position: {:.1%} and {:.1%} in head 1, {:.1%} and {:.1%} in head 6",
        before,
        [before[0] > before[1], before[2] > before[3]],
    )
    yield Claim(
        "A high AUROC shows that a head contributes to detokenization (section 3.2)",
        "less what all current tokens share, head 6 keeps {:.2f} of {:.2f}, SmolLM2's head 8 {:.2f} of {:.2f}",
        [specific, auroc[6], of_smollm2[2], of_smollm2[0]],
        [specific > 0.6, of_smollm2[2] > 0.6],
    )
    yield Claim(
        "GPT-2's head 7 ranks bigrams first, and completes most of the words of Tables 1 and 3",
        "GPT-2's token embeddings were not at hand; `make gpt2-detok` prints its ranks and AUROC next to the paper's",
    )


# Norm-based analysis

SPECIAL = {"norm-attention": ("<s>", "</s>", ". or ,"), "norm-attention-minilm": ("[CLS]", "[SEP]", ". or ,")}


def of_both(file: str, name: str, **where: str) -> list[float]:
    """A cell of MPNet's and of MiniLM's table."""
    return [cell(f"{folder}/{file}.csv", name, **where) for folder in SPECIAL]


def over_heads(folder: str, kind: str) -> float:
    """Rank correlation over heads of the weight that tokens of a kind get and the length of their f(x)."""
    return float(spearmanr(*(column(f"{folder}/heads.csv", f"{what} {kind}") for what in ("alpha", "|f|"))).statistic)


def norm_based() -> Iterator[Claim]:
    of_f, of_x = (
        of_both("summary", "cv", of=name) for name in ("|f(x)|, all heads together", "|x|, all layers together")
    )
    yield Claim(
        "Transformed vectors f(x) differ in length (Table 1: coefficient of variation 0.34)",
        "MPNet {:.2f}, MiniLM {:.2f}",
        of_f,
        [cv > 0.3 for cv in of_f],
    )
    yield Claim(
        "Inputs x differ less (Table 2: 0.15)",
        "{:.2f} and {:.2f}",
        of_x,
        [x < f for x, f in zip(of_x, of_f, strict=True)],
    )
    ratios = [
        column(f"{folder}/heads.csv", "sigma_max") / column(f"{folder}/heads.csv", "sigma_min") for folder in SPECIAL
    ]
    yield Claim(
        "In each of 12 heads drawn, f stretches one direction at least 1.8 times as much as another (section 5.2)",
        "at least {:.2f} times in MPNet's {:d} heads; at least {:.2f} in MiniLM's {:d}, {:d} of them under 1.8",
        [ratios[0].min(), len(ratios[0]), ratios[1].min(), len(ratios[1]), int((ratios[1] < 1.8).sum())],
        [bool((ratio >= 1.8).all()) for ratio in ratios],
    )
    special = [column(f"{folder}/kinds.csv", "spearman")[:3] for folder in SPECIAL]
    yield Claim(
        "Weight and length are opposed at [CLS], [SEP], full stops and commas (Table 3: -0.34, -0.69, -0.25)",
        "MPNet {:.2f}, {:.2f}, {:.2f}; MiniLM {:.2f}, {:.2f}, {:.2f}",
        [*special[0], *special[1]],
        [bool((values < -0.2).all()) for values in special],
    )
    rest = [column(f"{folder}/kinds.csv", "spearman")[3] for folder in SPECIAL]
    yield Claim(
        "At other tokens they are not (Table 3: -0.06)", "{:.2f} and {:.2f}", rest, [abs(rho) < 0.2 for rho in rest]
    )
    by_head = [
        [over_heads(folder, kind) for kind in (kinds[1], kinds[0], kinds[2], "other")]
        for folder, kinds in SPECIAL.items()
    ]
    yield Claim(
        "From head to head too, weight and length are opposed at [SEP] (section 5.3, Fig. 4)",
        "rank correlation over heads: MPNet {:.2f}, MiniLM {:.2f}",
        [of_model[0] for of_model in by_head],
        [of_model[0] < -0.2 for of_model in by_head],
    )
    yield Claim(
        "So they are at [CLS], full stops and commas, and hardly at other tokens (section 5.3)",
        "MPNet {:.2f}, {:.2f} and {:.2f}; MiniLM {:.2f}, {:.2f} and {:.2f}",
        [*by_head[0][1:], *by_head[1][1:]],
        [condition for cls, comma, other in (of_model[1:] for of_model in by_head)
         for condition in (max(cls, comma) < -0.2, abs(other) < 0.2)],
    )  # fmt: skip
    overall, shuffled, every = (of_both("weights", name, tenth="all") for name in ("spearman", "by_kind", "|f| cv"))
    largest, shuffled_largest = (of_both("weights", name, tenth="10") for name in ("spearman", "by_kind"))
    yield Claim(
        "Overall, weight and length are inversely related (section 5.3)",
        "rank correlation over all pairs: MPNet {:.2f}, MiniLM {:.2f} (weights shuffled within each kind of token: "
        "{:.2f} and {:.2f}); in the tenth with the largest weights {:.2f} and {:.2f} ({:.2f} and {:.2f})",
        [*overall, *shuffled, *largest, *shuffled_largest],
        [*(rho < -0.2 for rho in overall), *(rho < -0.2 for rho in largest)],
    )
    within, at_one = (
        [column(f"{folder}/weights.csv", name)[1:] for folder in SPECIAL] for name in ("|f| cv", "|f| cv at one")
    )
    yield Claim(
        "Vectors of one weight differ widely in length (section 5.3, Fig. 3)",
        "coefficient of variation within each tenth of the pairs by weight: MPNet {:.2f} to {:.2f}, MiniLM {:.2f} to "
        "{:.2f}; at one weight, to within 3 %, at least {:.2f} and {:.2f}; over all pairs {:.2f} and {:.2f}",
        [*ends(within[0]), *ends(within[1]), *(values.min() for values in at_one), *every],
        [bool((values > cv / 2).all()) for values, cv in zip(at_one, every, strict=True)],
    )
    weights = 1 - column("norm-attention/layers.csv", "alpha other")
    small = 1 - column("norm-attention-minilm/layers.csv", "alpha other")
    yield Claim(
        "From layer 5 on these tokens get more than half of the weight (section 5.4)",
        "MPNet: {:.0%} to {:.0%} in layers 5 to 10, {:.0%} in the last; MiniLM: at most {:.0%} in any layer",
        [*ends(weights[5:11]), weights[11], small.max()],
        [bool((weights[5:11] > 0.5).all()), weights[11] > 0.5, small.max() > 0.5],
    )
    most = [
        max(SPECIAL["norm-attention"], key=lambda kind: float(row[f"alpha {kind}"]))
        for row in rows("norm-attention/layers.csv")
    ]
    yield Claim(
        "Weight goes to [CLS] in early layers, [SEP] in middle ones, full stops and commas in late ones (section 5.4)",
        "summed over a text, `<s>` gets most of the three in {:d} of layers 0 to 4, `</s>` in {:d} of layers 5 to 8, "
        "full stops and commas in {:d} of layers 9 to 11",
        [most[:5].count("<s>"), most[5:9].count("</s>"), most[9:].count(". or ,")],
        [most[:5].count("<s>") >= 3, most[5:9].count("</s>") >= 2, most[9:].count(". or ,") == 3],
    )  # fmt: skip
    tables = {folder: [f"{folder}/{name}.csv" for name in ("layers", "heads")] for folder in SPECIAL}

    def more_by_others(table: str, kinds: tuple[str, ...]) -> int:
        """In how many rows all other tokens together add longer vectors."""
        special = sum(column(table, f"|alpha f| {kind}") for kind in kinds)
        return int((column(table, "|alpha f| other") > special).sum())

    by_layer, by_head = zip(
        *([more_by_others(table, SPECIAL[folder]) for table in tables[folder]] for folder in SPECIAL), strict=True
    )
    yield Claim(
        "What these tokens add is short: all others together add far more, in most layers (section 5.4)",
        "more in {:d} of 12 layers and {:d} of 144 heads of MPNet, in {:d} of 6 and {:d} of 72 of MiniLM",
        [by_layer[0], by_head[0], by_layer[1], by_head[1]],
        [by_layer[0] == 12, by_layer[1] == 6],
    )

    def shorter_than_others(folder: str, kind: str) -> int:
        """In how many heads f(x) is shorter for these tokens than for others."""
        table = f"{folder}/heads.csv"
        return int((column(table, f"|f| {kind}") < column(table, "|f| other")).sum())

    shorter = [[shorter_than_others(folder, kind) for kind in kinds] for folder, kinds in SPECIAL.items()]
    yield Claim(
        "They are a dustbin: tokens of every text with short f(x) (section 5.4)",
        "shorter than other tokens in {:d}, {:d} and {:d} of 144 heads of MPNet, in {:d}, {:d} and {:d} of 72 of "
        "MiniLM",
        [*shorter[0], *shorter[1]],
        [min(shorter[0]) > 0.9 * 144, min(shorter[1]) > 0.9 * 72],
    )


# Outlier dimensions

PREFERRED, STREAM = "outlier-dimensions/preferences.csv", "outlier-dimensions/stream.csv"


def share(kind: str, dimension: str) -> np.ndarray:
    """By layer: what a dimension (or all outliers) adds to a kind's score above other keys, as a share of it."""
    return column(PREFERRED, dimension, key=kind) / column(PREFERRED, "score_above_other", key=kind)


def mean_of(dimension: int, tokens: str) -> np.ndarray:
    """By output of a layer, the embeddings first."""
    return np.abs(column(STREAM, "mean", dimension=dimension, tokens=tokens))[:-1]


def by_kind(dimension: int, kind: str, layers: Iterable[int]) -> np.ndarray:
    """C of a dimension at keys of a kind, (layers, heads)."""
    where = {"dimension": dimension, "key": kind}
    return np.array([
        [cell("outlier-dimensions/contributions.csv", f"head {head}", layer=layer, **where) for head in range(12)]
        for layer in layers
    ])  # fmt: skip


def positive(dimension: int, kind: str, layers: Iterable[int]) -> int:
    """In how many heads a dimension adds to the score of keys of a kind."""
    return int((by_kind(dimension, kind, layers) > 0).sum())


def outlier_dimensions() -> Iterator[Claim]:
    kinds, comma = ("<s>", "</s>", ". or ,"), ". or ,"
    dimensions = len(rows(PREFERRED)[0]) - 4
    z = {name: np.abs(column(STREAM, "robust_z", dimension=name, tokens="all")) for name in (555, 568)}
    yield Claim(
        "Few dimensions of the outputs are far from all others (section 2.1: 308 in every layer, 381, 180)",
        "{:d} of 768 in MPNet, by the mean over tokens or over a kind of token; 555 passes 5 robust deviations in {:d} "
        "of 13 outputs, 568 in {:d}",
        [dimensions, int((z[555] > 5).sum()), int((z[568] > 5).sum())],
        [dimensions < 0.05 * 768, (z[555] > 5).sum() > 6, (z[568] > 5).sum() > 6],
    )
    outputs: dict[int, list[int]] = {}
    for row in rows(STREAM):
        if row["tokens"] == "all" and abs(float(row["robust_z"])) > 10:
            outputs.setdefault(int(row["dimension"]), []).append(int(row["output"]))
    late = [j for j, where in outputs.items() if min(where) >= 10]
    yield Claim(
        "One stands out in every layer, one in middle layers, one near the end (section 2.1: 308, 381, 180)",
        "by the mean over tokens, more than 10 robust deviations from the median (by chance none is): "
        f"756 in outputs {spans(outputs[756])} of 12, 461 in {spans(outputs[461])}; 568 in "
        f"{spans(outputs[568])}; only in outputs from 10 on "
        f"{' and '.join(map(str, late))}",
        [],
        [len(outputs[756]) == 12, set(outputs[568]) <= set(range(3, 11)), bool(late)],
    )
    acting: dict[bool, dict[int, list[int]]] = {True: {}, False: {}}
    for row in rows("outlier-dimensions/dominant.csv"):
        acting[float(row["mean_c"]) > 0].setdefault(int(row["dimension"]), []).append(int(row["layer"]))
    raised, lowered = acting[True], acting[False]
    begins = [j for j, where in raised.items() if min(where) >= 10]
    yield Claim(
        "By layer, one raises scores early and lowers them later, one raises them from the middle on, one in "
        "the last two layers only (appendix A: 308, 381, 180)",
        f"461 raises them in layers {spans(raised[461])} and lowers them in {spans(lowered[461])}; 568 raises them in "
        f"{spans(raised[568])}; {' and '.join(map(str, begins)) or 'none'} from layer 10 on only (mean C over heads "
        "and keys, at least twice what any but an outlier has)",
        [],
        [max(raised[461]) < min(lowered[461]) and len(lowered[461]) > 3, len([i for i in raised[568] if i > 3]) > 4,
         bool(begins)],
    )  # fmt: skip
    attention = {kind: column("outlier-dimensions/attention.csv", kind) for kind in kinds}
    yield Claim(
        "Attention goes to [CLS] in early layers, to [SEP] in middle ones (abstract, section 2.2)",
        "per token `<s>` gets {:.2f} to {:.2f} in layers 0 to 4, `</s>` {:.2f} to {:.2f} in layers 5 to 8, the most of "
        "all kinds", [*ends(attention["<s>"][:5]), *ends(attention["</s>"][5:9])],
        [all((attention["<s>"][:5] > attention[kind][:5]).all() for kind in ("</s>", comma)),
         all((attention["</s>"][5:9] > attention[kind][5:9]).all() for kind in ("<s>", comma))],
    )  # fmt: skip
    yield Claim(
        "In the last two layers attention to full stops and commas rises steeply (section 2.2)",
        "it falls: {:.2f} in layer 9, {:.2f} in 10, {:.2f} in 11; it rises with `</s>`, from {:.2f} in layer 4 to "
        "{:.2f} in 5",
        [*attention[comma][9:], *attention[comma][4:6]],
        [attention[comma][11] > attention[comma][9]],
    )
    yield Claim(
        "In these dimensions special tokens, full stops and commas differ from other tokens (section 3)",
        "absolute mean in 555, layers 1 to 4: `<s>` {:.1f} to {:.1f}, others {:.1f} to {:.1f}; in 568, layers 4 to 8: "
        "`</s>` {:.1f} to {:.1f}, full stops and commas {:.1f} to {:.1f}, others {:.2f} to {:.2f}",
        [*ends(mean_of(555, "<s>")[1:5]), *ends(mean_of(555, "other")[1:5]), *ends(mean_of(568, "</s>")[4:9]),
         *ends(mean_of(568, comma)[4:9]), *ends(mean_of(568, "other")[4:9])],
        [mean_of(555, "<s>")[1:5].min() > 5 * mean_of(555, "other")[1:5].max(),
         mean_of(568, comma)[4:9].min() > 5 * mean_of(568, "other")[4:9].max()],
    )  # fmt: skip
    early = share("<s>", "of 555")[1:5]
    yield Claim(
        "Outliers alone do not explain the attention to [CLS] in early layers (sections 4.3 and 5)",
        "dimension 555 alone makes {:.0%} to {:.0%} of `<s>`'s advantage in layers 1 to 4",
        ends(early),
        [early.max() < 0.9],
    )
    raised = positive(555, "<s>", range(1, 5))
    means = [by_kind(555, kind, range(1, 5)).mean() for kind in kinds]
    yield Claim(
        "In early layers an outlier raises scores in every head, at [CLS], [SEP] and commas alike (section 4.3)",
        "555 adds to `<s>` in {:d} of 48 heads of layers 1 to 4, but on average {:.1f} to `<s>`, {:.1f} to `</s>` and "
        "{:.1f} to full stops and commas",
        [raised, *means],
        [raised > 0.9 * 48, min(means) > 0.5 * max(means)],
    )
    raised = positive(568, "</s>", range(5, 8))
    lowers = {kind: by_kind(756, kind, range(5, 8)).mean(axis=1) for kind in (*kinds, "other")}  # (3,) by layer
    yield Claim(
        "In middle layers one raises [SEP] in every head, and another lowers all but [SEP] (section 4.3)",
        "568 adds to `</s>` in {:d} of 36 heads of layers 5 to 7, {:.1f} on average; 756 takes {:.1f} to {:.1f} from "
        "ordinary tokens, but adds {:.1f} to {:.1f} to `<s>` and {:.1f} to {:.1f} to full stops and commas",
        [
            raised,
            by_kind(568, "</s>", range(5, 8)).mean(),
            *ends(-lowers["other"]),
            *ends(lowers["<s>"]),
            *ends(lowers[comma]),
        ],
        [raised == 36, max(lowers[kind].max() for kind in ("<s>", comma, "other")) < 0],
    )
    middle, all_outliers = share("</s>", "of 568")[5:8], share("</s>", "of_outliers")[5:9]
    yield Claim(
        "They do explain the attention to [SEP] in middle layers (sections 4.3 and 5)",
        "568 makes {:.0%} to {:.0%} of `</s>`'s advantage in layers 5 to 7, all outliers together {:.0%} to {:.0%} in "
        "5 to 8",
        [*ends(middle), *ends(all_outliers)],
        [middle.min() > 0.5, all_outliers.min() > 0.8],
    )
    late = np.concatenate([share(kind, "of 555")[9:11] for kind in ("</s>", comma)])
    unused = np.concatenate([share(kind, "of 568")[9:11] for kind in ("</s>", comma)])
    last = [share(kind, "of_outliers")[11] for kind in ("</s>", comma)]
    yield Claim(
        "They do explain the attention to [SEP], full stops and commas in the last layer (sections 4.3 and 5)",
        "all outliers together make {:.0%} and {:.0%} of their advantage in layer 11; in layers 9 and 10 555 makes "
        "{:.0%} to {:.0%}, 568 at most {:.0%}",
        [*last, *ends(late), unused.max()],
        [min(last) > 0.8],
    )
    scores = {kind: column(PREFERRED, "score_above_other", key=kind)[9:11] for kind in ("<s>", "</s>")}
    yield Claim(
        "Late in the model it is [SEP], full stops and commas that score high, not [CLS] (section 4.3)",
        "in layers 9 and 10 both score alike above other keys: `<s>` {:.1f} and {:.1f}, `</s>` {:.1f} and {:.1f}; 555 "
        "makes over half of both",
        [*scores["<s>"], *scores["</s>"]],
        [bool((scores["</s>"] > 1.1 * scores["<s>"]).all())],
    )
    each = [name for name in rows(PREFERRED)[0] if name.startswith("of ")]
    first = [share(kind, name)[0] for kind in kinds for name in each]
    ratios: dict[int, float] = {}
    for row in rows("outlier-dimensions/dominant.csv"):
        ratio = abs(float(row["mean_c"])) / float(row["largest_other"])
        ratios[int(row["layer"])] = max(ratio, ratios.get(int(row["layer"]), 0))
    largest = [ratios.pop(0, 1.0), *ends(np.array([*ratios.values()]))]
    yield Claim(
        "In the first layer no dimension dominates (appendix A)",
        "in layer 0 no outlier makes more than {:.0%} of any kind's advantage; over all keys one adds {:.1f} times "
        "what any but an outlier adds, in later layers one adds {:.1f} to {:.1f} times",
        [max(first), *largest],
        [max(first) < 0.5, largest[0] < 2],
    )


# Sink as a bias


def in_layers(model: str, name: str) -> np.ndarray:
    return column(f"sink-bias/{BOOKS[model]}/layers.csv", name)


def worse(model: str, layers: str, how: str, start: int = 0, which: str = "change") -> float:
    """The change in perplexity with a constant (SSP) or nothing (ablation) in the sink's place."""
    where = {"layers": layers, "intervention": how, "first_position": start}
    return cell(f"sink-bias/{BOOKS[model]}/patching.csv", which, **where)


def in_range(measure: str) -> tuple[list[float], list[bool]]:
    """In how many layers the paper's range holds, by model; and whether they are the majority."""
    counts = [
        (row["within"], row["layers"]) for row in rows("sink-bias/beside-the-paper.csv") if row["measure"] == measure
    ]
    return [int(n) for pair in counts for n in pair], [int(within) > int(layers) / 2 for within, layers in counts]


def attention_to_first(model: str) -> np.ndarray:
    """By layer: the attention that the average query gives token 0, mean over heads."""
    heads = f"sink-bias/{BOOKS[model]}/heads.csv"
    layer, strength = column(heads, "layer"), column(heads, "strength")
    return np.array([strength[layer == each].mean() for each in np.unique(layer)])


OF_LAYERS = "{:d} of {:d} layers of SmolLM2, {:d} of {:d} of Gemma, {:d} of {:d} of Qwen"


def sink_bias() -> Iterator[Claim]:
    models = tuple(BOOKS)
    yield Claim("Ratio is 0.2 to 0.5 in most layers of every model (section 3.1)", OF_LAYERS, *in_range("Ratio"))
    ratios = [float(np.median(in_layers(model, "ratio"))) for model in models]
    yield Claim(
        "The sink writes that much whether a model has biases or not (section 3.1)",
        "medians {:.2f} (SmolLM2) and {:.2f} (Gemma) without, {:.2f} (Qwen) with",
        ratios,
        [0.8 * min(ratios[:2]) < ratios[2] < 1.25 * max(ratios[:2])],
    )
    counts, most = in_range("SpectralRatio")
    above = [(in_layers(model, "spectral_sink") > in_layers(model, "spectral_context")).sum() for model in models]
    yield Claim(
        "SpectralRatio is 0.8 or more in many layers, above the ratio of other tokens (section 3.2)",
        f"{OF_LAYERS}; above in {{:d}}, {{:d}} and {{:d}}",
        [*counts, *map(int, above)],
        [*most, *(n >= 0.9 * total for n, total in zip(above, counts[1::2], strict=True))],
    )
    yield Claim("R is 0.01 to 0.1: the update's size is constant too (section 3.3)", OF_LAYERS, *in_range("R"))
    context = [float(np.median(in_layers(model, "variance_context"))) for model in models]
    yield Claim(
        "R of other tokens is near 1 (section 3.3)",
        "medians {:.2f}, {:.2f}, {:.2f}",
        context,
        [r > 0.9 for r in context],
    )
    constant = {model: float(np.median(in_layers(model, "variance_sink_mu"))) for model in models}
    yield Claim(
        "R is smallest in models without biases (section 3.3)",
        "medians {:.2f} (SmolLM2) and {:.2f} (Gemma) without, {:.2f} (Qwen) with",
        [*constant.values()],
        [constant["Qwen"] > 1.2 * max(constant["SmolLM2"], constant["Gemma"])],
    )
    free = ("SmolLM2", "Gemma")
    all_layers = [[worse(model, "all", "SSP", start) for model in ("Qwen", *free)] for start in (0, 1)]

    def both(model: str, layers: str = "all", start: int = 0) -> list[float]:
        return [worse(model, layers, how, start) for how in ("SSP", "ablation")]

    pairs = "{:+.1f} against {:+.1f}"
    yield Claim(
        "Without biases a constant keeps perplexity where removal does not (abstract, sections 4.2 and 5)",
        f"all layers, constant against removal: Gemma {pairs}; SmolLM2 {pairs}, and {pairs} with position 0 left alone",
        [*both("Gemma"), *both("SmolLM2"), *both("SmolLM2", start=1)],
        [both("Gemma")[0] < both("Gemma")[1], both("SmolLM2")[0] < both("SmolLM2")[1],
         both("SmolLM2", start=1)[0] < both("SmolLM2", start=1)[1]],
    )  # fmt: skip
    yield Claim(
        "With biases a constant makes it worse: there the sink's part is dynamic (section 4.2)",
        "by eq. 7 {:+.1f} (Qwen) against {:+.1f} and {:+.1f}; with position 0 left alone {:+.1f} against {:+.1f} and "
        "{:+.1f}: the contrast is one of position 0",
        [*all_layers[0], *all_layers[1]],
        [biased > max(unbiased) for biased, *unbiased in all_layers],
    )  # fmt: skip
    values = "sink-bias-values/layers.csv"
    moved = [column(values, f"variance_sink_mu{way}") for way in ("", "_linear")]
    length = [column(values, name) for name in ("norm_bias_values", "norm_mu", "norm_mu_linear")]
    yield Claim(
        "In models with biases b of eq. 1 takes the static part (section 4.2)",
        "Qwen, 12 texts, medians: with b_V W_O in it, b is {:.1f} times as long as mu_sink, but what is left of the "
        "sink's part is as static (R {:.2f}, with b_V W_O {:.2f}) and longer in {:d} of {:d} layers: at the sink "
        "the two oppose",
        [float(np.median(length[0] / length[1])), *(float(np.median(r)) for r in moved[::-1]),
         int((length[2] > length[1]).sum()), len(length[0])],
        [bool(np.median(length[0] / length[1]) > 1), bool(np.median(moved[1]) > 2 * np.median(moved[0]))],
    )  # fmt: skip
    sensitive = [
        worse(model, "early", "SSP") > max(worse(model, part, "SSP") for part in ("middle", "late")) for model in models
    ]
    alone = [
        worse(model, "early", "SSP", 1) > max(worse(model, part, "SSP", 1) for part in ("middle", "late"))
        for model in models
    ]
    yield Claim(
        "Early layers suffer most from the intervention (section 4.2)",
        "in {:d} of 3 models; in {:d} with position 0 left alone",
        [sum(sensitive), sum(alone)],
        [*sensitive, *alone],
    )
    yield Claim(
        "In Qwen models a constant in all layers is worse than removal (section 4.2)",
        f"Qwen {pairs}, SmolLM2 too; with position 0 left alone {pairs}",
        [*both("Qwen"), *both("Qwen", start=1)],
        [both("Qwen")[0] > both("Qwen")[1], both("Qwen", start=1)[0] > both("Qwen", start=1)[1]],
    )
    begins = {model: int(np.argmax(attention_to_first(model) > 0.3)) for model in models}
    yield Claim(
        "Sinks appear in early layers, from about the second on (section 4.2)",
        "the first layer whose heads give token 0 over 0.3 of their attention, counted from 0: {:d} of {:d} (SmolLM2), "
        "{:d} of {:d} (Gemma), {:d} of {:d} (Qwen)",
        [number for model in models for number in (begins[model], len(attention_to_first(model)))],
        [layer <= 3 for layer in begins.values()],
    )
    shown = int(attention_to_first("SmolLM2").argmax())
    sink, others = ((f"spectral_{name}", f"variance_{name}") for name in ("sink", "context"))
    in_picture = [float(in_layers("SmolLM2", name)[shown]) for name in (*sink, *others)]
    yield Claim(
        "The sink's update looks alike at every position, the others' change sign and size (appendix A, Fig. 5)",
        "SmolLM2's layer {:d}: one direction holds {:.0%} of the sink's, R {:.2f}; {:.0%} of the others', R {:.2f}",
        [shown, *in_picture],
        [in_picture[0] > 0.8 and in_picture[1] < 0.2, in_picture[2] < 0.5 and in_picture[3] > 0.8],
    )
    without = [worse("Qwen", "middle", "ablation", 0, name) for name in ("change", "change_low", "change_high")]
    needed = [worse(model, layers, "ablation") > 0 for model in models for layers in ("early", "middle", "late")]
    yield Claim(
        "The sink is indispensable: removing it costs perplexity (section 4.2)",
        "in {:d} of {:d} ranges of layers; Qwen's middle layers are better without it, {:+.2f} ({:+.2f} to {:+.2f})",
        [sum(needed), len(needed), *without],
        needed,
    )
    yield Claim(
        "All of this in Mistral-7B, Llama-2-7B, Qwen3-8B, Qwen2.5-7B and Pythia-6.9B (Table 1)",
        "the paper's five models were not at hand; with the Hub, `make sink-bias SIZES=--paper` runs them",
    )


# Two mechanisms

SMOL, NOP, BROADCAST = "sink-mechanisms/smollm2/heads.csv", "sink-toys/nop.csv", "sink-toys/broadcast.csv"
CAUSAL = "sink-causal/smollm2/causal.csv"
DINO = [f"sink-mechanisms/vit-fashion-mnist{registers}/heads.csv" for registers in ("", "-registers")]
CANVASES = [f"sink-mechanisms/vit-{name}/heads.csv" for name in ("named", "pixels")]


@cache
def emergence(**task: float) -> list[int]:
    """The step at which each seed's sink score is halfway from the even share, 1/16, to where it ends; softmax."""
    runs = json.loads((FIGURES / "sink-toys" / "nop.json").read_text(encoding="utf-8"))["runs"].values()
    chosen = [run for run in runs if run["variant"] == "softmax" and all(run[name] == task[name] for name in task)]
    halfway = [(1 / 16 + np.mean(run["score"][-3:])) / 2 for run in chosen]
    return [
        run["steps"][int(np.argmax(np.array(run["score"]) > half))] for run, half in zip(chosen, halfway, strict=True)
    ]


def what_no_ops_write() -> list[float]:
    """What SmolLM2's no-op heads write at a token, over the length of an ordinary token that enters the layer: the
    least, the most, the median; the median of other heads from layer 17 on; and the part that is not the sink's.

    |Y| is the Frobenius norm over the 256 tokens of a text, so |Y| / 16 is the root mean square over them.
    """
    length = column(SMOL.replace("heads", "layers"), "norm_mean_other")
    written = column(SMOL, "written") / 256**0.5 / length[column(SMOL, "layer").astype(int)]
    kind = np.array([row["mechanism"] for row in rows(SMOL)])
    nops, others = written[kind == "nop"], written[(kind == "") & (column(SMOL, "layer") >= 17)]
    rest = column(SMOL, "residual", mechanism="nop")
    return [*ends(nops), *(float(np.median(values)) for values in (nops, others, rest))]


def toy(name: str, **where: object) -> np.ndarray:
    return column(NOP, name, **{"variant": "softmax", "damping": 0, "probability": 0.5, **where})


def two_mechanisms() -> Iterator[Claim]:
    events = {name: column(SMOL, name) * 64 for name in ("events", "nop", "broadcast")}
    vit = [sum((column(heads, name) * 64).sum() for heads in DINO) for name in ("nop", "broadcast")]
    yield Claim(
        "One pretrained model has both kinds of sink (abstract, section 4)",
        "SmolLM2: {:.0f} no-op events and {:.0f} broadcasts; the two small DINOv2s: {:.0f} and {:.0f}",
        [events["nop"].sum(), events["broadcast"].sum(), *vit],
        [min(events["nop"].sum(), events["broadcast"].sum()) > 0, min(vit) > 0],
    )
    changed = {
        mechanism: [cell(CAUSAL, name, heads=f"every {mechanism}") for name in ("zero", "redirected")]
        for mechanism in ("NOP", "broadcast")
    }
    lowest = [cell(CAUSAL, "zero_low", heads=f"every {mechanism}") for mechanism in ("NOP", "broadcast")]
    broadcasts = sorted(float(row["zero"]) for row in rows(CAUSAL) if row["heads"] in ("15.6", "24.6"))
    others = [
        cell(f"sink-causal/{folder}/causal.csv", "zero", heads=f"every {what}")
        for folder, what in (("gemma", "NOP"), ("gemma", "broadcast"), ("qwen", "NOP"))
    ]
    yield Claim(
        "What a no-op sink writes is not needed, what a broadcast writes is (Hypotheses 1 and 2)",
        "SmolLM2's perplexity of {:.1f} where sinks write nothing: no-ops {:+.1f}, one broadcast {:+.1f}, the other "
        "{:+.1f}, weak heads {:+.1f}; Gemma: no-ops {:+.1f}, the broadcast {:+.1f}; Qwen: no-ops {:+.1f}",
        [
            cell(CAUSAL, "perplexity", heads="every NOP"),
            changed["NOP"][0],
            *broadcasts[::-1],
            cell(CAUSAL, "zero", heads="weakest heads beside them"),
            *others,
        ],
        [lowest[0] <= 0, lowest[1] > 0, min(broadcasts) > 0.5],
    )
    sinks = events["events"] >= 32
    in_sinks = events["events"][sinks].sum() / events["events"].sum()
    yield Claim(
        "Sinks concentrate in specialised heads (abstract, section 4)",
        "SmolLM2: {:d} of {:d} heads have {:.0%} of the events, {:d} have none; ViTs of canvases: {:d} of {:d} and "
        "{:d} of {:d} have one on half of the images; of the small DINOv2s none has",
        [int(sinks.sum()), len(sinks), in_sinks, int((events["events"] == 0).sum()),
         *(number for heads in CANVASES for number in (int((column(heads, "events") >= 0.5).sum()), len(rows(heads))))],
        [in_sinks > 0.5, any(column(heads, "events").max() >= 0.5 for heads in DINO)],
    )  # fmt: skip
    kinds = [row["kind"] for row in rows("sink-mechanisms/vit/layers.csv")]
    small = {row["kind"] for heads in DINO for row in rows(heads.replace("heads", "layers"))}
    yield Claim(
        "They move from CLS in early layers to patches in deep ones (abstract, section 4)",
        "the strongest key of the small ViT is CLS in layers 0 to {:d}, then a patch; of the ViT that keeps pixels CLS "
        "in layer {:d}, then none; in the small DINOv2s a patch in every layer",
        [kinds.index("patch") - 1, [row["kind"] for row in rows(CANVASES[1])].index("patch") - 1],
        [kinds == ["CLS"] * 7 + ["patch"] * 5, small != {"patch"}],
    )
    yield Claim(
        "A head that must write nothing learns a sink whose value has no length (sections 3.1, 6)",
        "toy: {:.0%} to {:.0%} of the others' length",
        ends(toy("ratio")),
        [toy("ratio").max() < 0.1],
    )
    yield Claim(
        "No model cancels the other values instead (section 3.1)",
        "`cancelled`, 1 where it does: at most {:.2f} in the toys of softmax, {:.2f} in SmolLM2's no-op heads",
        [column(NOP, "cancelled", variant="softmax").max(), column(SMOL, "cancelled", mechanism="nop").max()],
        [
            column(NOP, "cancelled", variant="softmax").max() < 0.1,
            column(SMOL, "cancelled", mechanism="nop").max() < 0.2,
        ],
    )
    least, most_written, usual, of_others, rest = what_no_ops_write()
    yield Claim(
        "A NOP leaves the stream nearly as it is (hypothesis 1, section 3.2)",
        "SmolLM2's {:d} no-op heads add {:.1%} to {:.1%} of an ordinary token's length, {:.1%} in the median, other "
        "heads of layers 17 to 29 {:.1%}; keys that are not the sink write {:.2f} of it (median)",
        [len(column(SMOL, "ratio_out", mechanism="nop")), least, most_written, usual, of_others, rest],
        [most_written < 0.1, usual < 0.5 * of_others],
    )
    depth = {name: np.repeat(column(SMOL, "layer"), events[name].round().astype(int)) for name in ("nop", "broadcast")}
    yield Claim(
        "No-ops are in early and middle layers, broadcasts in deeper ones (section 4, Fig. 6)",
        "SmolLM2, layers of the events: no-ops {:.0f} to {:.0f}, median {:.0f}; broadcasts {:.0f} to {:.0f}, median "
        "{:.0f}, of 30",
        [number for layers in depth.values() for number in (*ends(layers), float(np.median(layers)))],
        [np.median(depth["nop"]) < 20, np.median(depth["broadcast"]) > np.median(depth["nop"]) + 3],
    )
    named = np.isin([row["mechanism"] for row in rows(SMOL)], ["nop", "broadcast"])

    def of_sinks(name: str) -> np.ndarray:
        return column(SMOL, name)[named]

    part = of_sinks("first_margin") / of_sinks("logit_margin")
    yield Claim(
        "A gate needs a large first singular value along the sink, or a sink of large norm (Lemma 2, sections 3.1, 6)",
        "toy: {:.1f} to {:.1f} times the second; SmolLM2's {:d} sink heads: at most {:.1f} times, it makes {:.0%} to "
        "{:.0%} of the logit's margin of {:.1f} to {:.1f}, and behind the norm a sink has {:.2f} to {:.2f} of the "
        "others' length",
        [*ends(toy("qk_gap")), int(named.sum()), of_sinks("qk_gap").max(), *ends(part), *ends(of_sinks("logit_margin")),
         *ends(of_sinks("read_ratio"))],
        [toy("qk_gap").min() > 2, part.min() > 0.5 or of_sinks("read_ratio").min() > 1],
    )  # fmt: skip
    steps = {p: float(np.mean(emergence(damping=0, probability=p))) for p in (0.1, 0.3, 0.5, 0.7, 0.9)}
    yield Claim(
        "Sinks emerge fastest where half of the tokens must write nothing, later where few do (appendix A.1)",
        "steps until the sink is halfway there, mean of three seeds, by that share, 0.1, 0.3, 0.5, 0.7, 0.9: {:.0f}, "
        "{:.0f}, {:.0f}, {:.0f}, {:.0f}",
        [*steps.values()],
        [steps[0.5] <= min(steps.values()), steps[0.1] > steps[0.5] < steps[0.9]],
    )
    tenth, half, none = (toy("flagged_attention", damping=damping) for damping in (0.1, 0.5, 1))
    yield Claim(
        "Damping is enough, no strict zero is needed (appendix A.1)",
        "in all three seeds: {:.0%} to {:.0%} of the flagged tokens' attention at gamma 0.1, {:.0%} to {:.0%} at 0.5, "
        "{:.0%} where nothing is damped; in the authors' stored sweep 0.1 forms no sink",
        [*ends(tenth), *ends(half), none.max()],
        [tenth.min() > 0.9, half.min() > 3 * none.max()],
    )
    ranks = np.concatenate([column(BROADCAST, f"layer{i}_rank") for i in (0, 1)])
    yield Claim(
        "A broadcast's update has rank one (Lemma 3, sections 3.2, 6)",
        "toy: stable ranks of at most {:.2f}",
        [ranks.max()],
        [ranks.max() < 1.5],
    )
    values = np.concatenate([column(BROADCAST, f"layer{i}_selected_ratio", variant="softmax") for i in (0, 1)])
    yield Claim(
        "Its value is as long as the other tokens' (section 3.2)",
        "toy: {:.2f} to {:.2f} times",
        ends(values),
        [values.min() > 0.8 and values.max() < 1.25],
    )
    queries = np.concatenate([column(BROADCAST, f"layer{i}_query_similarity", variant="softmax") for i in (0, 1)])
    yield Claim(
        "All queries collapse onto one line (section 3.2, Fig. 3C)",
        "toy: cosines between queries of {:.3f} to {:.3f}",
        ends(queries),
        [queries.min() > 0.9],
    )
    strengths = [column(BROADCAST, f"layer{i}_strength", variant="softmax") for i in (0, 1)]
    diagonals = np.concatenate([column(BROADCAST, f"layer{i}_diagonal", variant="softmax") for i in (0, 1)])
    yield Claim(
        "One layer broadcasts, the other is a diagonal (section 3.2, Fig. 3A)",
        "both broadcast: the strongest keys get {:.2f} to {:.2f} and {:.2f} to {:.2f} of the attention, the diagonal "
        "{:.2f} at most",
        [*ends(strengths[0]), *ends(strengths[1]), diagonals.max()],
        [diagonals.max() > 0.5],
    )
    between = [cell("sink-mechanisms/smollm2/layers.csv", f"between_{when}", layer=24) for when in ("before", "after")]
    grown = [column(BROADCAST, f"layer0_similarity_{when}", variant="softmax") for when in ("before", "after")]
    yield Claim(
        "Broadcasts make tokens more alike (Lemma 4, section 3.2)",
        "toy, first layer: cosines of {:.2f} to {:.2f} become {:.2f} to {:.2f}; SmolLM2's layer 24: {:.2f} becomes "
        "{:.2f}",
        [*ends(grown[0]), *ends(grown[1]), *between],
        [bool((grown[1] > grown[0]).all()), between[1] > between[0]],
    )
    pixels, named = ([row["kind"] for row in rows(f"sink-mechanisms/vit-{name}-registers/heads.csv")]
                     for name in ("pixels", "named"))  # fmt: skip
    taken = toy("flagged_attention", variant="registers")
    yield Claim(
        "Registers take over nearly all sinks, no-ops too (abstract, section 4)",
        "toy: {:.0%} to {:.0%} of the flagged tokens' attention; ViT that keeps pixels: its sink head stays on CLS "
        "({:.0%}, then {:.0%}), {:d} heads without a sink turn to a register; ViT that names: none has a sink there",
        [
            *ends(taken),
            *(
                cell(f"sink-mechanisms/vit-pixels{name}/heads.csv", "strength", layer=0, head=0)
                for name in ("", "-registers")
            ),
            pixels.count("register"),
        ],
        [taken.min() > 0.4, pixels[0] == "register", 2 * named.count("register") > len(named)],
    )
    gated = {
        variant: toy("strength", variant=variant).max() for variant in ("headwise gate", "headwise gate + registers")
    }
    payload = min(column(BROADCAST, "layer1_broadcast", variant=variant).min() for variant in gated)
    yield Claim(
        "Gating and registers remove no-ops and leave broadcasts (section 6)",
        "toys with a headwise gate: the strongest key gets {:.2f} at most of the attention where nothing must be "
        "written; {:.0%} or more of the second layer's inputs broadcast",
        [max(gated.values()), payload],
        [max(gated.values()) < 0.2, payload > 0.5],
    )
    iou = {name: 100 * column("sink-toys/vit.csv", "patch_iou", variant=name).mean()
           for name in ("softmax", "registers", "headwise gate", "headwise gate + registers")}  # fmt: skip
    yield Claim(
        "Gates, registers and both improve segmentation, both most (abstract, section 5)",
        "ViT of 40,000 weights, mean IoU: plain {:.1f}, registers {:.1f}, gate {:.1f}, both {:.1f}",
        [*iou.values()],
        [iou[name] > iou["softmax"] for name in list(iou)[1:]],
    )
    accuracy = [100 * column("sink-toys/vit.csv", "accuracy", variant=name).mean() for name in iou]
    yield Claim(
        "Classification stays as it is (section 5)",
        "the same ViT, accuracy: {:.0f}, {:.0f}, {:.0f}, {:.0f} %",
        accuracy,
        [max(accuracy) - min(accuracy) < 2],
    )
    yield Claim(
        "Gates and registers shorten the class and register tokens (section 5, Fig. 14)",
        "no ViT of that kind with gates was trained; norms.png shows one with registers and one without",
    )
    yield Claim(
        "All of this in DINOv2-L and -g and OpenCLIP-L (section 4, Figs 4 to 6 and 8)",
        "they were not at hand; with the Hub, `make sink-mechanisms MODEL=...` runs them",
    )


CLAIMS = {
    ("detok", "Detokenization"): detokenization, ("norms", "Norm-based analysis"): norm_based,
    ("outliers", "Outlier dimensions"): outlier_dimensions, ("sinks", "Sink as a bias"): sink_bias,
    ("sinks", "Two mechanisms"): two_mechanisms,
}  # fmt: skip


def claim_rows(page: str) -> list[str]:
    """The rows of a page's tables."""
    return [claim.row() for (name, _), claims in CLAIMS.items() if name == page for claim in claims()]

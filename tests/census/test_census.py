"""The census: which stacks of a model_type it finds, how it names them, and its committed results."""

from pathlib import Path
from typing import Any

import pytest

from weightscope.model.config.reading import ADOPT, WAYS

pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="tiny models are made by transformers, not installed")

from safetensors.torch import save_file  # noqa: E402

from tests.census.census import census  # noqa: E402
from tests.census.record import Row, changes, page, read, tally, write  # noqa: E402
from weightscope.adopting import inputs  # noqa: E402
from weightscope.adopting.tiny_models import classes_of  # noqa: E402

pytestmark = pytest.mark.check


def test_stacks_are_found_and_named() -> None:
    rows = {row.stack: row for row in census("bart")}
    assert {stack: row.kind for stack, row in rows.items()} == {
        "encoder.layers.{}.self_attn": "self",
        "decoder.layers.{}.self_attn": "causal",
        "decoder.layers.{}.encoder_attn": "cross",
    }


def test_a_missing_package_and_missing_attention_are_told_apart() -> None:
    (timm,), (mamba,) = census("timm_wrapper"), census("mamba")
    assert timm.verdict == mamba.verdict == "not built" and not timm.stack
    assert timm.reason == "needs the package timm" and mamba.reason == "has no attention: its code takes no softmax"


@pytest.mark.parametrize("kind", ["bert", "hunyuan_vl", "dbrx"])
def test_a_type_is_saved_as_each_of_its_classes(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind)
    for row in census(kind):
        assert row.verdict == "exact" and row.classes == len(classes_of(config)) > 1


def test_a_class_with_unreadable_names_makes_a_stack_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(self: Any, folder: Path) -> None:
        tensors = {name.replace(".query.", ".asks."): values for name, values in self.state_dict().items()}
        save_file({name: values.contiguous().clone() for name, values in tensors.items()}, folder / "model.safetensors")
        self.config.save_pretrained(folder)

    monkeypatch.setattr(transformers.BertForTokenClassification, "save_pretrained", renamed)
    (row,) = census("bert")
    assert row.verdict == "refused" and row.reason.startswith("as BertForTokenClassification saves it: ")


def test_a_class_read_with_other_tensors_makes_a_stack_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchanged(self: Any, folder: Path) -> None:
        first, second = (layer.attention.self.query.weight for layer in self.bert.encoder.layer[:2])
        first.data, second.data = second.data, first.data
        transformers.PreTrainedModel.save_pretrained(self, folder)

    monkeypatch.setattr(transformers.BertForTokenClassification, "save_pretrained", exchanged)
    (row,) = census("bert")
    assert row.verdict == "WRONG" and "BertForTokenClassification" in row.reason


def test_changes_list_new_types_and_changed_verdicts() -> None:
    before = [Row("bert", "a", "self", 2, "exact", ""), Row("gpt2", "h", "causal", 2, "exact", "")]
    after = [Row("bert", "a", "self", 2, "refused", "why"), Row("gpt9", "h", "causal", 2, "exact", "")]
    assert changes(before, after) == ["bert a: exact -> refused why", "new type: gpt9 h: exact"]


def test_a_census_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [
        Row("bert", "a.{}", "self", 2, "exact", "", "bert", 9),
        Row("bert", "b.{}", "", 2, "unseen", "it did not run", "clip.vision"),
        Row("x", "", "", 0, "not built", "needs 'timm', not here"),
    ]
    write(tmp_path / "census.csv", rows)
    assert read(tmp_path / "census.csv") == rows and tally(rows) == {"exact": 1, "unseen": 1}
    text = page(rows, "5.23.0")
    assert "**1 of 2 stacks in 1 types are exact.** 0 are refused" in text
    assert "| exact | 1 | 1 | 9 classes |" in text and "not seen at work: bert (clip.vision)." in text


def test_the_committed_census_quotes_the_refusal_of_unknown_types() -> None:
    unknown = [row.reason for row in read() if "unknown model_type" in row.reason]
    assert unknown and all(reason.endswith(f"; {ADOPT.format(lacking='', ways=WAYS)}") for reason in unknown)


def test_the_committed_census_has_no_wrong_stack() -> None:
    assert tally(read())["WRONG"] == 0 and tally(read())["exact"] > 200


EXACT = sorted({row.type for row in read() if row.verdict == "exact"})
# Encoder-decoders, and layers that share keys and values or take positions besides: what no fixture has.
ALWAYS = {
    "umt5", "bart", "whisper", "t5gemma", "cohere_asr", "time_series_transformer", "gemma3n_text", "conditional_detr",
    "table-transformer", "roberta", "wavlm", "vits",
}  # fmt: skip
SAMPLE = {*EXACT[::40], *ALWAYS}


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[] if kind in SAMPLE else pytest.mark.census) for kind in EXACT
])  # fmt: skip
def test_an_exact_type_is_exact_again(kind: str) -> None:
    before = [row for row in read() if row.type == kind]
    assert not [line for line in changes(before, census(kind)) if ": exact -> " in line]


def test_queries_that_see_one_key_are_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an end of a phrase in the text, tokens of Grounding DINO see themselves only."""
    monkeypatch.setattr(inputs, "PHRASE", 1000)
    rows = {row.stack: row for row in census("grounding-dino")}
    for stack in ("text_backbone.encoder.layer.{}.attention.self", "encoder.layers.{}.text_enhancer_layer.self_attn"):
        assert rows[stack].reason == "every query sees one key only, so that no score is compared"

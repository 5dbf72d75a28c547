"""The judge itself: a row that is right is exact, and one that is wrong in any one cell is called wrong."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightscope as ws
from weightscope.architectures import FAMILIES, Family
from weightscope.architectures.cells import NO_BIASES, layer_norm
from weightscope.architectures.reading import ADOPT, WAYS
from weightscope.checkpoint import open_checkpoint

pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="tiny models are made by transformers, not installed")

from safetensors.torch import save_file  # noqa: E402

from weightscope.adopting import inputs  # noqa: E402
from weightscope.adopting.census import at_work, census  # noqa: E402
from weightscope.adopting.config_keys import tiny_config, varied  # noqa: E402
from weightscope.adopting.hooks import Observed  # noqa: E402
from weightscope.adopting.judge import Stored, Verdict, judge, readings  # noqa: E402
from weightscope.adopting.record import Row, changes, page, read, tally, write  # noqa: E402
from weightscope.adopting.tiny_models import SIZES, classes_of  # noqa: E402

pytestmark = pytest.mark.check

CONFIG = "config.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[list[Observed], Stored, Path]]:
    """A tiny model of a type, seen at work and saved."""

    @cache
    def make(kind: str) -> tuple[list[Observed], Stored, Path]:
        model, observed = at_work(transformers.AutoConfig.for_model(kind), SIZES[:1], seed=1, start=37)
        folder = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folder)
        return observed, Stored(model, folder), folder

    return make


def row_of(kind: str) -> Family:
    return next(row for row in FAMILIES if kind in row.model_types)


def judged(made: Any, kind: str, row: Family, tmp_path: Path, **config: Any) -> Verdict:
    """The verdict on a model of one stack, read by a row and with some values of its config replaced."""
    observed, stored, folder = made(kind)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    values = json.loads((folder / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(values | config))
    (verdict,) = judge(observed, stored, [ws.Model.of_row(open_checkpoint(tmp_path), row)])
    return verdict


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "bert", "gemma2"])
def test_a_row_that_is_right_is_exact(made: Any, kind: str, tmp_path: Path) -> None:
    assert judged(made, kind, row_of(kind), tmp_path).verdict == "exact"


ATTACKS: dict[str, tuple[str, Callable[[Family], Family]]] = {
    "pairs are neighbours": ("qwen3", lambda row: row.but(rope__interleaved=True)),
    "turned the other way": ("qwen3", lambda row: row.but(rope__backwards=True)),
    "not rotated": ("qwen3", lambda row: row.but(rope=None)),
    "a norm that centres": ("qwen3", lambda row: row.but(norm=layer_norm("input_layernorm", bias=False))),
    "gains less one": ("qwen3", lambda row: row.but(norm__offset=1.0)),
    "another norm's gains": ("qwen3", lambda row: row.but(norm__module="post_attention_layernorm")),
    "no norm": ("qwen3", lambda row: row.but(norm=None)),
    "another scale": ("qwen3", lambda row: row.but(scale=lambda config, layer: config.head_dim**-0.4)),
    "no q/k-norm": ("qwen3", lambda row: row.but(qk_norm=None)),
    "q/k-norm after rotation": ("qwen3", lambda row: row.but(qk_norm__rotated=True)),
    "q/k-norm the wrong way round": ("qwen3", lambda row: row.but(qk_norm__query="self_attn.k_norm")),
    "keys for values": ("qwen3", lambda row: row.but(key="self_attn.v_proj", value="self_attn.k_proj")),
    "no biases": ("qwen2", lambda row: row.but(biases=NO_BIASES)),
    "no softcap": ("gemma2", lambda row: row.but(steps__softcap=None)),
    "no output bias": ("bert", lambda row: row.but(biases__output=False)),
    "the other order of a fused tensor": ("gpt_neox", lambda row: row.but(layout=row_of("phi3").layout)),
    "a norm before a post-norm layer": ("bert", lambda row: row.but(norm=layer_norm("attention.output.LayerNorm"))),
    "layers the wrong way round": ("qwen3", lambda row: row.but(stored_layer=lambda config, layer: 1 - layer)),
}  # fmt: skip


LEFT_UNREAD = {"no q/k-norm", "q/k-norm the wrong way round"}  # a tensor of attention that no cell reads is refused


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_row_that_is_wrong_in_one_cell_is_not_exact(made: Any, attack: str, tmp_path: Path) -> None:
    kind, change = ATTACKS[attack]
    verdict = judged(made, kind, change(row_of(kind)), tmp_path)
    assert verdict.verdict == ("refused" if attack in LEFT_UNREAD else "WRONG") and verdict.reason, verdict


def test_a_rotation_of_another_base_is_called_wrong_where_it_matters(made: Any, tmp_path: Path) -> None:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 12000.0}}
    verdict = judged(made, "llama", row_of("llama"), tmp_path, **rope)
    assert verdict.verdict == "WRONG" and "values are right" in verdict.reason


@pytest.mark.parametrize("kind", ["cohere2", "ernie4_5", "granitemoe", "helium", "ministral3", "nemotron", "smollm3"])
def test_what_is_nearly_a_llama_is_none(made: Any, kind: str, tmp_path: Path) -> None:
    assert judged(made, kind, row_of("llama"), tmp_path).verdict != "exact"


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size.heads} heads")
def test_no_two_sizes_of_a_model_are_equal(size: Any) -> None:
    config = tiny_config(transformers.AutoConfig.for_model("qwen3"), size)
    heads, groups, r, d = (
        config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.hidden_size,
    )  # fmt: skip
    numbers = [heads, groups, r, d, heads * r, groups * r, config.intermediate_size, config.vocab_size, size.length]
    assert len(set(numbers)) == len(numbers) and heads // groups > 1


def test_limits_lie_within_the_texts() -> None:
    for size in SIZES:
        mistral = tiny_config(transformers.AutoConfig.for_model("ministral3"), size)
        assert mistral.rope_parameters["original_max_position_embeddings"] < size.length
        assert tiny_config(transformers.AutoConfig.for_model("gemma2"), size).sliding_window < size.length


def test_every_kind_of_layer_is_there_twice() -> None:
    kinds = tiny_config(transformers.AutoConfig.for_model("gemma3_text"), SIZES[0]).layer_types
    assert sorted(kinds) == ["full_attention"] * 2 + ["sliding_attention"] * 2


def test_stacks_are_found_and_named() -> None:
    rows = {row.stack: row for row in census("bart")}
    assert {stack: row.kind for stack, row in rows.items()} == {
        "encoder.layers.{}.self_attn": "self",
        "decoder.layers.{}.self_attn": "causal",
        "decoder.layers.{}.encoder_attn": "cross",
    }


def test_what_cannot_be_built_is_told_apart() -> None:
    (timm,), (mamba,) = census("timm_wrapper"), census("mamba")
    assert timm.verdict == mamba.verdict == "not built" and not timm.stack
    assert timm.reason == "needs the package timm" and mamba.reason == "has no attention: its code takes no softmax"


@pytest.mark.parametrize("kind", ["bert", "hunyuan_vl", "dbrx"])
def test_a_type_is_saved_as_every_class_of_it(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind)
    for row in census(kind):
        assert row.verdict == "exact" and row.classes == len(classes_of(config)) > 1


def test_a_class_whose_names_are_not_read_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(self: Any, folder: Path) -> None:
        tensors = {name.replace(".query.", ".asks."): values for name, values in self.state_dict().items()}
        save_file({name: values.contiguous().clone() for name, values in tensors.items()}, folder / "model.safetensors")
        self.config.save_pretrained(folder)

    monkeypatch.setattr(transformers.BertForTokenClassification, "save_pretrained", renamed)
    (row,) = census("bert")
    assert row.verdict == "refused" and row.reason.startswith("as BertForTokenClassification saves it: ")


def test_a_class_of_which_other_tensors_are_read_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchanged(self: Any, folder: Path) -> None:
        first, second = (layer.attention.self.query.weight for layer in self.bert.encoder.layer[:2])
        first.data, second.data = second.data, first.data
        transformers.PreTrainedModel.save_pretrained(self, folder)

    monkeypatch.setattr(transformers.BertForTokenClassification, "save_pretrained", exchanged)
    (row,) = census("bert")
    assert row.verdict == "WRONG" and "BertForTokenClassification" in row.reason


def test_a_stack_that_is_read_and_did_not_run_is_unseen(made: Any) -> None:
    observed, stored, folder = made("bart")
    encoder = [call for call in observed if call.module.startswith("encoder")]
    verdicts = {verdict.row: verdict.verdict for verdict in judge(encoder, stored, *readings(folder))}
    assert verdicts == {"bart.encoder": "exact", "bart.decoder": "unseen", "bart.cross": "unseen"}


def test_parts_of_a_composite_have_epsilons_of_their_own() -> None:
    parts = varied({"a": {"norm_eps": 1e-6}, "b": {"norm_eps": 1e-6}, "norm_eps": 1e-6})
    assert len({parts["norm_eps"], parts["a"]["norm_eps"], parts["b"]["norm_eps"]}) == 3


def test_what_weightscope_refuses_is_refused_in_its_words(made: Any, tmp_path: Path) -> None:
    observed, stored, folder = made("llama")
    (tmp_path / CONFIG).write_text('{"model_type": "of another world"}')
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (verdict,) = judge(observed, stored, *readings(tmp_path))
    assert verdict.verdict == "refused" and "of another world" in verdict.reason


def test_far_positions_are_those_that_the_model_was_given(made: Any) -> None:
    observed, _, _ = made("llama")
    np.testing.assert_array_equal(observed[0].positions, 37 + np.arange(SIZES[0].length))


def test_what_a_newer_transformers_adds_is_told() -> None:
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


def test_the_census_that_is_committed_quotes_what_an_unknown_type_is_told() -> None:
    unknown = [row.reason for row in read() if "unknown model_type" in row.reason]
    assert unknown and all(reason.endswith(f"; {ADOPT.format(lacking='', ways=WAYS)}") for reason in unknown)


def test_the_census_that_is_committed_has_nothing_wrong() -> None:
    assert tally(read())["WRONG"] == 0 and tally(read())["exact"] > 200


EXACT = sorted({row.type for row in read() if row.verdict == "exact"})
# Encoder-decoders, and layers that share keys and values or take positions besides: what no fixture has.
ALWAYS = {
    "umt5", "bart", "whisper", "t5gemma", "cohere_asr", "time_series_transformer", "gemma3n_text", "conditional_detr",
    "table-transformer", "roberta", "wavlm", "vits",
}  # fmt: skip
SAMPLE = {*EXACT[::10], *ALWAYS}


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[] if kind in SAMPLE else pytest.mark.census) for kind in EXACT
])  # fmt: skip
def test_what_is_exact_is_so_again(kind: str) -> None:
    before = [row for row in read() if row.type == kind]
    assert not [line for line in changes(before, census(kind)) if ": exact -> " in line]


def test_scores_that_no_query_compares_are_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an end of a phrase in the text, tokens of Grounding DINO see themselves only."""
    monkeypatch.setattr(inputs, "PHRASE", 1000)
    rows = {row.stack: row for row in census("grounding-dino")}
    for stack in ("text_backbone.encoder.layer.{}.attention.self", "encoder.layers.{}.text_enhancer_layer.self_attn"):
        assert rows[stack].reason == "every query sees one key only, so that no score is compared"


def test_windows_of_an_image_are_one_sequence_in_pieces(made: Any) -> None:
    observed, _, _ = made("qwen2_5_vl_vision")
    first = observed[0].attention
    np.testing.assert_allclose(first.sum(axis=-1), 1, atol=1e-5)
    assert first.shape[1:] == (64, 64) and np.count_nonzero(first[0, 0]) == 16

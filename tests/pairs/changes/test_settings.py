"""Equal weights under another config are another model: what decides the computation is compared key by key."""

import inspect
import json
import re
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.commands import run_undrawn
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.tiny_models import FIXTURES, NAMES, fixture
from weightscope.core.errors import CheckpointError
from weightscope.model.config.computed import BY_SIGMOID, Difference, Stated, differences, stated
from weightscope.model.config.effects import COMPUTATION, NONE
from weightscope.model.model import Model

MATTERS = [
    ("granite", "attention_multiplier", 0.3), ("granite", "residual_multiplier", 0.3),
    ("granite", "embedding_multiplier", 7.0), ("granite", "logits_scaling", 7.0),
    ("gemma2", "attn_logit_softcapping", 7.0), ("gemma2", "final_logit_softcapping", 7.0),
    ("gemma2", "query_pre_attn_scalar", 7), ("mistral", "sliding_window", 3), ("gpt_oss", "sliding_window", 3),
    ("gemma3", "layer_types", ["full_attention"] * 3), ("cohere", "logit_scale", 0.5),
    ("gpt2", "scale_attn_weights", False), ("gpt2", "scale_attn_by_inverse_layer_idx", True),
    ("qwen3_moe", "num_experts_per_tok", 2), ("llama", "hidden_act", "gelu"),
    ("llama", "auto_map", {"AutoModel": "other.Model"}), ("llama", "rms_norm_eps", 0.1),
    ("bert", "layer_norm_eps", 0.1), ("llama", "tie_word_embeddings", True),
    ("llama", "rope_parameters", {"rope_type": "default", "rope_theta": 5.0}), ("roberta", "pad_token_id", 0),
    ("llama", "attn_temperature_of_our_own", 3.0), ("llama", "is_causal", False), ("esm", "mask_token_id", 5),
    ("xglm", "pad_token_id", 3), ("smollm3", "no_rope_layers", ...), ("granite_swa", "layer_rope_theta", ...),
    ("phi3", "sliding_window", 3), ("llama", "sliding_window", 3),  # which another reader may read
]  # fmt: skip
IDLE = [
    ("llama", "transformers_version", "4.0"), ("llama", "torch_dtype", "float16"), ("llama", "_name_or_path", "x"),
    ("llama", "use_cache", False), ("llama", "architectures", ["Other"]), ("llama", "attention_dropout", 0.3),
    ("llama", "initializer_range", 0.3), ("llama", "eos_token_id", 7), ("llama", "bos_token_id", 7),
    ("llama", "max_position_embeddings", 4096), ("llama", "vocab_size", 40), ("qwen2", "max_position_embeddings", 4096),
    ("bert", "hidden_dropout_prob", 0.7), ("bert", "id2label", {"0": "a"}), ("llama", "output_attentions", True),
    ("qwen2", "use_sliding_window", True),  # no layer comes after max_window_layers
    ("gemma3", "_sliding_window_pattern", 3), ("llama", "is_decoder", True), ("xglm", "max_position_embeddings", 99),
    ("electra", "summary_type", "last"), ("mpt", "norm_type", "other"), ("gpt2", "summary_use_proj", False),
]  # fmt: skip


def copied(folder: Path, name: str, **config: Any) -> Path:
    """A fixture's weights under its config with other values; a value of ... leaves the key out."""
    folder.mkdir(parents=True)
    shutil.copy(FIXTURES / name / "model.safetensors", folder)
    values = json.loads((FIXTURES / name / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))
    return folder


@pytest.mark.parametrize(("name", "key", "value"), MATTERS)
def test_key_that_changes_the_computation_comes_first_and_fails_the_gate(
    name: str, key: str, value: Any, tmp_path: Path
) -> None:
    edited = copied(tmp_path / "b", name, **{key: value})
    a, b = fixture(name).model, ws.open_model(edited)
    comparison = ws.compare(a, b)
    assert comparison.lead.startswith("The config of") and key in comparison.headline
    assert "other_computation" in comparison.findings.kinds
    record = comparison.as_json()["config"][0]
    assert record["config"].split(".")[0] == key and record["effect"] != NONE and record["a"] != record["b"]


@pytest.mark.parametrize(("name", "key", "value"), IDLE)
def test_key_without_effect_passes_the_gate_and_is_mentioned(name: str, key: str, value: Any, tmp_path: Path) -> None:
    comparison = ws.compare(fixture(name).model, ws.open_model(copied(tmp_path / "b", name, **{key: value})))
    assert comparison.lead.startswith("Identical: ") and not comparison.findings
    assert f"without effect on what is computed also differ: {key}" in comparison.lead or key == "torch_dtype"


def test_key_that_only_transformers_4_reads_is_named_with_its_reader(tmp_path: Path) -> None:
    """transformers 5 reads rope_parameters and ignores the keys next to it."""
    comparison = ws.compare(fixture("llama").model, ws.open_model(copied(tmp_path / "b", "llama", rope_theta=77.0)))
    assert not comparison.findings and "rope_theta (read by transformers 4 alone)" in comparison.lead


def test_key_that_the_class_does_not_know_is_never_said_to_compute_something_else(tmp_path: Path) -> None:
    """It may be for another reader, so that it is not idle either."""
    for key, value in (("attention_multiplier", 3.0), ("sliding_window", 3), ("projection_dim", 7)):
        edited = ws.open_model(copied(tmp_path / key, "llama", **{key: value}))
        (record,) = ws.compare(fixture("llama").model, edited).as_json()["config"]
        assert record["effect"] == (NONE if key == "projection_dim" else "unknown")


# Keys of GGUF files, as llama.cpp's converter writes them of a config: key, value, config, the config's key.
IN_GGUF = [
    ("expert_shared_count", 2, {"n_shared_experts": 2}, "n_shared_experts"),
    ("expert_shared_count", 2, {"moe_num_shared_experts": 2}, "moe_num_shared_experts"),
    ("expert_used_count", 2, {"moe_k": 2}, "moe_k"),
    ("expert_feed_forward_length", 28, {"intermediate_size": 56, "moe_intermediate_size": 28}, "moe_intermediate_size"),
    ("expert_feed_forward_length", 28, {"intermediate_size": 28}, "intermediate_size"),
    ("expert_weights_scale", 2.5, {"route_scale": 2.5}, "route_scale"),
    ("expert_gating_func", 2, {"scoring_func": "sigmoid"}, "scoring_func"),
    ("expert_group_count", 4, {"n_group": 4}, "n_group"),
    ("expert_group_used_count", 3, {"topk_group": 3}, "topk_group"),
    ("leading_dense_block_count", 1, {"first_k_dense_replace": 1}, "first_k_dense_replace"),
    ("leading_dense_block_count", 1, {"moe_layer_start_index": 1}, "moe_layer_start_index"),
    ("interleave_moe_layer_step", 2, {"moe_layer_interval": 2}, "moe_layer_interval"),
    ("nextn_predict_layers", 1, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
    ("rope.freq_base_swa", 5e5, {"rope_parameters.sliding_attention.rope_theta": 5e5},
     "rope_parameters.sliding_attention.rope_theta"),
    ("shortconv.l_cache", 3, {"conv_L_cache": 3}, "conv_L_cache"),
    ("ssm.inner_size", 192, {"mamba_expand": 2, "hidden_size": 96}, "ssm.inner_size"),
    ("ssm.time_step_rank", 4, {"mamba_dt_rank": 4}, "mamba_dt_rank"),
    ("ssm.time_step_rank", 4, {"mamba_n_heads": 4, "mamba_dt_rank": None}, "mamba_n_heads"),
    ("expert_shared_feed_forward_length", 56, {"moe_num_shared_experts": 2, "moe_intermediate_size": 28},
     "expert_shared_feed_forward_length"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "config", "named"), IN_GGUF)
def test_key_of_a_gguf_file_is_compared_with_the_configs_own(
    key: str, value: Any, config: dict[str, Any], named: str
) -> None:
    original = Stated(config, present=frozenset(config))
    same, higher = (Stated({}, metadata={f"m.{key}": number}) for number in (value, value + 1))
    assert differences(original, same) == differences(same, original) == []
    assert [(each.key, each.effect) for each in differences(original, higher)] == [(named, COMPUTATION)]


def test_key_of_a_gguf_file_that_no_config_has_counts() -> None:
    """What the file alone says is not taken for nothing: an unknown effect, or a known one."""
    for key in ("expert_group_count", "shortconv.l_cache", "key_of_our_own"):
        (difference,) = differences(Stated({}), Stated({}, metadata={f"m.{key}": 3}))
        assert difference.key == f"m.{key}" and difference.effect != NONE


@pytest.mark.check
@pytest.mark.parametrize("kind", BY_SIGMOID)
def test_code_scores_experts_by_the_sigmoid(kind: str) -> None:
    """The class that routes takes the sigmoid of its logits, and no softmax."""
    transformers = pytest.importorskip("transformers", reason="the code is transformers', which is not installed")
    module = import_module(f"{transformers.__name__}.models.{kind}.modeling_{kind}")
    assert re.search(r"(router_logits\.sigmoid\(\)|sigmoid\(router_logits)", source := inspect.getsource(module))
    assert not re.search(r"softmax\(router_logits|router_logits\.softmax", source)


def test_digits_of_a_float32_are_no_difference() -> None:
    """transformers writes 9.999999974752427e-07 for the 1e-06 of a GGUF file."""
    model = fixture("llama").model
    before, eps = stated(model.checkpoint, model.row), model.checkpoint.config["rms_norm_eps"]
    for value, changes in ((float(np.float32(eps)), []), (eps * (1 + 2e-7), ["rms_norm_eps"])):
        config = dict(model.checkpoint.config) | {"rms_norm_eps": value}
        assert value != eps
        differing = differences(before, stated(model.checkpoint.with_config(config), model.row))
        assert [difference.key for difference in differing] == changes


@pytest.mark.parametrize("name", ["phi3_longrope", "gpt2", "llama"])
def test_ordinary_tune_passes_where_longer_texts_are_computed_alike(name: str, tmp_path: Path) -> None:
    """Not where the scaling of rotations depends on the longest text, or positions are learned."""
    limit = "n_positions" if name == "gpt2" else "max_position_embeddings"
    tuned = {"vocab_size": 40, "use_cache": False, "dtype": "bfloat16", "transformers_version": "5.99"}
    tuned |= {"_name_or_path": "base", limit: 4096}
    good, edited = copied(tmp_path / "a", name), copied(tmp_path / "b", name, **tuned)
    done = run_undrawn("compare", good, edited, "--out", tmp_path / "out", "--max-change", 0)
    assert done.exit_code == (0 if name == "llama" else 3), done.output
    assert name == "llama" or f"another computation: {limit}" in done.stderr.replace("\n", " ")


def test_failed_gate_exits_3_with_one_line(tmp_path: Path) -> None:
    good, bad = copied(tmp_path / "a", "granite"), copied(tmp_path / "b", "granite", residual_multiplier=0.3)
    passed = run_undrawn("compare", good, good, "--out", tmp_path / "same", "--all", "--max-change", 0)
    tensors = len(ws.open_model(good).checkpoint)
    assert passed.exit_code == 0 and passed.stdout.startswith(
        f"Identical: all {tensors} compared tensors. No head moved.\n"
    )
    failed = run_undrawn("compare", good, bad, "--out", tmp_path / "out", "--all", "--max-change", 0.001)
    assert failed.exit_code == 3 and failed.stderr.count("\n") == 1 and "residual_multiplier" in failed.stderr
    assert failed.stdout.startswith("The config of")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "but the config changed" in page[: page.index("residual_multiplier")]
    assert run_undrawn("compare", good, bad, "--out", tmp_path / "no-limit").exit_code == 0


def both(name: str) -> tuple[Model, Any]:
    """A fixture's model, and what its config says as transformers 4 wrote it."""
    model = fixture(name).model
    four = json.loads((FIXTURES / name / "config_v4.json").read_text())
    return model, stated(model.checkpoint.with_config(four), model.row)


def deciding(differing: list[Difference]) -> list[str]:
    return [str(difference) for difference in differing if difference.effect != NONE]


def test_config_of_another_transformers_version_raises_no_alarm(subtests: pytest.Subtests) -> None:
    """Configs as 4.57 and 5.23 wrote them, of the same tiny models, either way round."""
    for name in (name for name in NAMES if (FIXTURES / name / "config_v4.json").exists()):
        with subtests.test(fixture=name):
            model, four = both(name)
            five = stated(model.checkpoint, model.row)
            assert not deciding(differences(four, five)) and not deciding(differences(five, four))


# transformers 5 gives sliding layers its own default base where 4.57 took the file's: the saved config is another one.
READ_OTHERWISE = {"olmo3": ["rope_parameters.sliding_attention.rope_theta"]}


@pytest.mark.check
def test_config_saved_again_by_transformers_raises_no_alarm(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """The older file, opened and saved by the installed transformers with all defaults filled in."""
    transformers = pytest.importorskip("transformers", reason="saves configs again, which needs transformers")
    for name in (name for name in NAMES if (FIXTURES / name / "config_v4.json").exists()):
        with subtests.test(fixture=name):
            model, four = both(name)
            folder = tmp_path / name
            folder.mkdir()
            shutil.copy(FIXTURES / name / "config_v4.json", folder / "config.json")
            config = transformers.AutoConfig.from_pretrained(folder)
            for text in (config.to_json_string(use_diff=False), config.to_json_string()):
                saved = stated(model.checkpoint.with_config(json.loads(text)), model.row)
                keys = [difference.key for difference in differences(four, saved) if difference.effect != NONE]
                assert keys == READ_OTHERWISE.get(name, [])


def leaves(config: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def changed(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, list):
        return value[::-1] if value[::-1] != value else value[:-1]
    return f"{value}x" if isinstance(value, str) else 2 * value + 3


# Keys that these configs say and that another key of the same config overrides.
OVERRIDDEN = {
    ("original_max_position_embeddings", "phi3"), ("original_max_position_embeddings", "phi3_longrope"),
    ("original_max_position_embeddings", "phi3_longrope_short"), ("global_attn_every_n_layers", "afmoe"),
    ("global_attn_every_n_layers", "modernbert"), ("rope_theta", "falcon_alibi"), ("rope_type", "falcon_alibi"),
    ("sliding_window", "qwen2_moe"), ("head_dim", "sarvam_mla"),
}  # fmt: skip


def scores(model: Model, name: str) -> list[np.ndarray]:
    """Every layer's scores of the tiny model's sequence, which equal eager transformers' scores."""
    reference = fixture(name)
    return [model.layer(index).scores(reference.arrays[f"x{index}"]) for index in reference.layers]


@pytest.mark.check
def test_every_changed_key_of_every_family_is_reported(subtests: pytest.Subtests) -> None:
    """Each key of each tiny model's config is given another value: the key is reported, or the config refused.

    Where scores change, it is reported as one that decides the computation.
    """
    for name in NAMES:
        model, text = fixture(name).model, (FIXTURES / name / "config.json").read_text()
        before, usual = stated(model.checkpoint, model.row), scores(model, name)
        for path, value in leaves(json.loads(text)):
            config = part = json.loads(text)
            for key in path[:-1]:
                part = part[key]
            part[path[-1]] = changed(value)
            with subtests.test(fixture=name, key=".".join(path)):
                try:
                    differing = differences(before, stated(model.checkpoint.with_config(config), model.row))
                except CheckpointError:
                    continue
                assert differing or value in (None, [], "") or (path[-1], name) in OVERRIDDEN
                try:
                    edited = Model.of_row(model.checkpoint.with_config(config), model.row)
                    same = all(map(np.array_equal, usual, scores(edited, name)))
                except (CheckpointError, KeyError, ValueError):  # the tensors do not fit this config
                    continue
                assert same or deciding(differing)


def test_missing_key_means_its_default() -> None:
    model = fixture("llama").model
    config = dict(model.checkpoint.config.raw)
    before = stated(model.checkpoint.with_config(config | {"hidden_act": "silu", "rms_norm_eps": 1e-6}), model.row)
    without = {key: value for key, value in config.items() if key not in ("hidden_act", "rms_norm_eps")}
    assert not deciding(differences(before, stated(model.checkpoint.with_config(without), model.row)))
    gelu = stated(model.checkpoint.with_config(config | {"hidden_act": "gelu"}), model.row)
    (difference,) = differences(
        gelu, stated(model.checkpoint.with_config(without | {"rms_norm_eps": config["rms_norm_eps"]}), model.row)
    )
    assert (difference.key, difference.a, difference.b) == ("hidden_act", "gelu", "silu")


def test_keys_are_spelled_as_the_second_file_spells_them() -> None:
    model, four = both("llama")
    config = json.loads((FIXTURES / "llama" / "config_v4.json").read_text()) | {"rope_theta": 7.0}
    seven = stated(model.checkpoint.with_config(config), model.row)
    five = stated(model.checkpoint, model.row)
    keys = [
        [each.key for each in differences(*pair) if each.effect == COMPUTATION]
        for pair in ((five, seven), (seven, five))
    ]
    assert keys == [["rope_theta"], ["rope_parameters.rope_theta"]]
    assert four.values == four.values


def test_extra_tensor_in_a_layer_is_reported(tmp_path: Path) -> None:
    """Without --all, in either file; buffers of old versions are none."""
    weights = gpt2_weights()
    plain = write_checkpoint(tmp_path / "plain", weights)
    more = write_checkpoint(tmp_path / "more", weights | {"h.1.attn_gate.weight": np.ones((3, 3), np.float32)})
    for pair in ((plain, more), (more, plain)):
        (finding,) = ws.compare(*pair).findings
        assert finding.kind == "tensor_missing" and "h.1.attn_gate.weight" in finding.text
    mask = {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32), "h.0.attn.masked_bias": np.float32([-1e9])}
    assert not ws.compare(plain, write_checkpoint(tmp_path / "old", weights | mask)).findings


def test_tokenizer_changes_are_named(tmp_path: Path) -> None:
    """They have lines of their own, and fail no limit of weights."""
    a, b = (write_checkpoint(tmp_path / name, gpt2_weights()) for name in ("a", "b"))
    for folder, ids in ((a, {"x": 0, "y": 1}), (b, {"x": 1, "y": 0})):
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": ids}}))
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": str(ids), "padding_side": "left"}))
        (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5 + ids["x"]}))
    result = run_undrawn("compare", a, b, "--out", tmp_path / "out", "--json", "--max-change", 0, "--fail-on", "note")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["files"] == [
        "Tokenizer: vocabulary differs (2 of 2 tokens).", "Chat template: it differs.",
        "Generation config: temperature differ.",
    ]  # fmt: skip
    again = load_file(a / "model.safetensors")
    save_file(again, a / "model.safetensors")
    assert not ws.compare(a, a).settings[0].files

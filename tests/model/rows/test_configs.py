"""One model under either config dialect, with defaults left out, prefixes on or off, and configs that are wrong."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.cases import CASES
from tests.support.tiny_models import EACH_MECHANISM, FIXTURES, NAMES, centred, fixture
from weightscope.model.config.effects import FILE
from weightscope.model.model import Model
from weightscope.model.rows.table import FAMILIES


def rewritten(tmp_path: Path, name: str, rename: Any = None, drop: str = "", **config: Any) -> Path:
    """A copy of a fixture with tensors renamed or dropped and top-level config values replaced."""
    tensors = load_file(FIXTURES / name / "model.safetensors")
    kept = {(rename or str)(key): tensor for key, tensor in tensors.items() if key != drop}
    save_file(kept, tmp_path / "model.safetensors")
    values = json.loads((FIXTURES / name / "config.json").read_text()) | config
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v != "absent"}))
    return tmp_path


def assert_same_scores(model: Model, name: str) -> None:
    tiny = fixture(name)
    for index in tiny.layers:
        expected = tiny.arrays[f"scores{index}"]
        seen = np.isfinite(expected)
        ours = model.layer(index).scores(tiny.arrays[f"x{index}"])
        bound = 1e-5 * max(1.0, np.abs(expected[seen]).max())
        np.testing.assert_allclose(centred(ours, seen), centred(expected, seen), atol=bound, rtol=0)


def test_the_config_that_transformers_4_wrote_means_the_same(subtests: pytest.Subtests) -> None:
    for name in (name for name in NAMES if (FIXTURES / name / "config_v4.json").exists()):
        with subtests.test(fixture=name):
            opened = fixture(name).model
            config = json.loads((FIXTURES / name / "config_v4.json").read_text())
            checkpoint = opened.checkpoint.with_config(config)
            family = next(row for row in FAMILIES if (row.name, row.tower) == (opened.family.name, opened.family.tower))
            assert_same_scores(Model.of_row(checkpoint, family), name)


NOT_IN_4 = {  # model types that AutoConfig of transformers 4.57 does not know
    "exaone", "lara_mini", "sarvam_mla", "sarvam_moe",
    "afmoe", "beam", "esmc", "gemma4_text", "gemma4_vision", "granite_speech_encoder", "granite_swa",
    "kimi_k25_vision", "laguna", "llama4_vision_model", "mimo_v2_flash", "minimax_m3_vl_vision", "muse_spark_text",
    "nanochat", "nemotron_h", "qwen3_vl_vision", "sam3_vit_model", "step3p5_vision",
}  # fmt: skip


def test_every_case_has_a_config_of_transformers_4() -> None:
    without = [case for case in CASES if not (FIXTURES / case.name / "config_v4.json").exists()]
    assert {case.model_type for case in without} == NOT_IN_4


def test_scores_do_not_depend_on_the_prefix_of_names(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """A checkpoint saved from the bare model has no prefix, a wrapper's may have any."""
    for name in NAMES:
        model = fixture(name).model
        stem = model.prefix
        for number, prefix in enumerate(dict.fromkeys((stem, "", "wrapper.inner."))):
            folder = tmp_path / f"{name}-{number}"
            folder.mkdir()

            def renamed(key: str, stem: str = stem, prefix: str = prefix) -> str:
                return prefix + key.removeprefix(stem) if key.startswith(stem) else "other." + key

            with subtests.test(fixture=name, prefix=prefix):
                moved = ws.open_model(rewritten(folder, name, renamed), tower=model.family.tower or None)
                assert moved.prefix == prefix
                assert_same_scores(moved, name)


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3", "bert"])
def test_layers_past_the_last_are_ignored(name: str, tmp_path: Path) -> None:
    """Multi-token-prediction heads of DeepSeek-V3 and GLM-4.5 are layers that the config does not count."""
    model = ws.open_model(rewritten(tmp_path, name, num_hidden_layers=1))
    assert model.config.n_layers == 1 and model.attention_layers == (0,)
    assert any(".1." in tensor for tensor in model.checkpoint)
    assert model.layer(0).scores(fixture(name).arrays["x0"]).shape == fixture(name).arrays["scores0"].shape
    with pytest.raises(ws.CheckpointError, match="no layer 1: the model has 1"):
        model.layer(1)


def saying(name: str, **config: Any) -> Model:
    """A fixture's tensors under a config with other values, of more layers than the file has."""
    opened = fixture(name).model
    values = {**opened.checkpoint.config, **config}
    row = next(row for row in FAMILIES if (row.name, row.tower) == (opened.family.name, opened.family.tower))
    return Model.of_row(opened.checkpoint.with_config({k: v for k, v in values.items() if v != "absent"}), row)


def test_layer_types_follow_from_a_pattern() -> None:
    """Older configs give a period instead of a list."""
    few = {"layer_types": "absent", "num_hidden_layers": 12}
    model = saying("gemma3", **few, sliding_window_pattern=6)
    assert [i for i, kind in enumerate(model.config.layer_types) if kind == "full_attention"] == [5, 11]
    model = saying("modernbert", **few)
    assert [i for i, kind in enumerate(model.config.layer_types) if kind == "full_attention"] == [0, 3, 6, 9]
    model = saying("qwen3_next", **few)
    assert model.attention_layers == (3, 7, 11)
    model = saying("smollm3", no_rope_layers="absent", **few | {"num_hidden_layers": 8})
    turns = [model.family.rope.rotation(model.config, i) is not None for i in range(8)]
    assert turns == [True, True, True, False] * 2


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "bert", "qwen3_next", "t5_decoder"])
def test_missing_layers_are_named_on_opening(name: str, tmp_path: Path) -> None:
    tiny = fixture(name)
    key = next(key for key in tiny.model.family.size_keys["n_layers"] if tiny.model.checkpoint.config.has(key))
    n, tower = tiny.model.config.n_layers, tiny.case.tower or None
    layers = {"layer_types": "absent"} if "layer_types" in tiny.model.config else {}
    with pytest.raises(ws.CheckpointError, match=rf"has tensors of {n} layers, and config.json says {n + 2}: none of"):
        ws.open_model(rewritten(tmp_path, name, **{key: n + 2}, **layers), tower=tower)


def test_caveats_name_biases_that_the_config_denies(tmp_path: Path) -> None:
    """transformers ignores them, and so does weightscope."""
    model = ws.open_model(rewritten(tmp_path, "llama", attention_bias=False))
    wanted = "q_proj.bias, k_proj.bias, v_proj.bias, o_proj.bias: the file has them and config.json says no biases"
    assert any(wanted in note for note in model.notes) and any(wanted in c for c in model.layer(0).head(0).caveats)
    assert fixture("llama").model.notes == ()
    assert not any("biases" in caveat for caveat in fixture("llama").model.layer(0).head(0).caveats)


def test_layernorms_may_have_their_old_names(tmp_path: Path) -> None:
    def legacy(key: str) -> str:
        if "LayerNorm" not in key:
            return key
        return key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    model = ws.open_model(rewritten(tmp_path, "bert", legacy))
    assert any(key.endswith("LayerNorm.gamma") for key in model.checkpoint)
    tiny = fixture("bert")
    rows = model.embeddings.tokens[tiny.arrays["tokens"]] + model.positions[: tiny.case.length]
    np.testing.assert_allclose(model.first_layer.scores(rows), tiny.model.first_layer.scores(rows), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("llama", {"num_hidden_layers": -1}, "'num_hidden_layers' is -1; a whole number from 1"),
        ("llama", {"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000; a whole number"),
        ("llama", {"hidden_size": "16"}, "'hidden_size' is 16; a whole number"),
        ("llama", {"hidden_size": True}, "'hidden_size' is True; a whole number"),
        ("llama", {"num_attention_heads": 0}, "'num_attention_heads' is 0"),
        ("llama", {"num_key_value_heads": 3}, "4 heads do not divide into 3 key-value heads"),
        ("llama", {"num_key_value_heads": [2]}, r"'num_key_value_heads' is \[2\]"),
        ("llama", {"head_dim": 1e9}, "'head_dim' is 1000000000.0"),
        ("llama", {"head_dim": None, "num_attention_heads": 6}, "width 16 does not divide into 6 heads"),
        ("llama", {"rms_norm_eps": float("nan")}, "'rms_norm_eps' is nan; a number from 0 to 1"),
        ("llama", {"rope_parameters": [1]}, r"'rope_parameters' is \[1\]; an object was expected"),
        ("llama", {"rope_parameters": {"rope_type": "spiral"}}, "'rope_type' is spiral; one of default, linear"),
        ("llama", {"rope_parameters": {"rope_type": ["yarn"]}}, "'rope_type' is"),
        ("llama", {"rope_parameters": {"rope_theta": -1.0}}, "'rope_theta' is -1.0; a number from 1"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "'factor' is None; a number"),
        ("phi", {"rope_parameters": {"partial_rotary_factor": 0.4}}, "an even number of the head's 8 dimensions"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
         "'partial_rotary_factor' is 0.5; 1: this architecture turns whole heads"),
        ("phi3_longrope", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1, 1]}},
         "'short_factor' is .1.; a list of 2 positive numbers"),
        ("gemma3", {"layer_types": ["full_attention"]}, "'layer_types' is .*; a list of at least 3 names"),
        ("laguna", {"rope_parameters": {"full_attention": {"rope_theta": 10.0}}}, "an entry for sliding_attention"),
        ("gemma2", {"attn_logit_softcapping": "much"}, "'attn_logit_softcapping' is much; a number"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "'query_pre_attn_scalar' is 0; a number"),
        ("albert", {"inner_group_num": 2}, "'inner_group_num' is 2; 1 .one attention layer a group. was expected"),
        ("roberta", {"pad_token_id": "one"}, "'pad_token_id' is one"),
        ("granite", {"embedding_multiplier": "big"}, "'embedding_multiplier' is big"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "'kv_lora_rank' is 0"),
        ("mpt", {"attn_config": 3}, "'attn_config' is 3; an object was expected"),
        ("dinov3_vit", {"patch_size": 0}, "'patch_size' is 0"),
        ("dinov3_vit", {"num_register_tokens": -2}, "'num_register_tokens' is -2"),
        ("sam3_vit", {"global_attn_indexes": True}, "'global_attn_indexes' is True; a list of layers was expected"),
        ("xglm", {"pad_token_id": 18}, "'pad_token_id' is 18; a number below 18, the number of positions was expected"),
        ("deberta_v3_relative", {"position_buckets": 1}, "'position_buckets' is 1; 2 or more, and fewer than 126"),
        ("deberta_v3_relative", {"max_position_embeddings": 3}, "'position_buckets' is 4; 2 or more, and fewer than 4"),
        ("hunyuan", {"rope_parameters": {"rope_type": "dynamic", "alpha": 1e-300}}, "'alpha' is 1e-300; a number from"),
        ("clip_text", {"text_config": "small"}, "'text_config' is small; an object was expected"),
    ],
)  # fmt: skip
def test_impossible_config_value_is_refused(name: str, config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ws.CheckpointError, match=message):
        model = ws.open_model(rewritten(tmp_path, name, **config), tower=fixture(name).case.tower or None)
        model.layer(0)
        assert model.family.inputs.tokens, "a vision tower's config is refused with its layers"
        model.embeddings.sigma(np.arange(3), np.arange(3))


@pytest.mark.parametrize("name", EACH_MECHANISM)
def test_a_missing_or_misshapen_tensor_is_named(name: str, tmp_path: Path) -> None:
    """Every tensor that a layer is read from, one at a time."""
    tiny = fixture(name)
    tower = tiny.case.tower or None
    index = tiny.layers[-1]
    read = [tensor.name for tensor in tiny.model.attention_tensors(index)]
    assert read
    for number, tensor in enumerate(read):
        folder = tmp_path / f"missing{number}"
        folder.mkdir()
        asked = tensor.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        with pytest.raises(ws.CheckpointError, match=f"model.safetensors: tensor '{asked}' is missing; .* needs it"):
            ws.open_model(rewritten(folder, name, drop=tensor), tower=tower).layer(index)
    folder = tmp_path / "misshapen"
    folder.mkdir()
    tensors = load_file(FIXTURES / name / "model.safetensors")
    weight = next(tensor for tensor in read if tensors[tensor].ndim >= 2)
    rows, columns, *ones = tensors[weight].shape  # a convolution's kernel is one token wide
    tensors[weight] = np.zeros((rows, columns + 1, *ones), np.float32)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((FIXTURES / name / "config.json").read_text())
    has, needs = (re.escape(str((rows, width, *ones))) for width in (columns + 1, columns))
    with pytest.raises(ws.CheckpointError, match=rf"tensor '{weight}' has shape {has}; .* needs {needs}"):
        ws.open_model(folder, tower=tower).layer(index)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("gpt2", "gpt2"), ("gpt_neox", "gpt_neox"), ("llama", "llama"), ("mistral", "llama"),
        ("qwen3", "qwen3"), ("gpt_oss", "gpt_oss"),
        ("phi3", "phi3"), ("bert", "bert"), ("modernbert", "modernbert"), ("deepseek_v3", "deepseek_v2"),
        ("dinov3_vit", "dinov3_vit"),
    ],
)  # fmt: skip
def test_error_without_model_type_names_the_nearest_family(name: str, family: str, tmp_path: Path) -> None:
    folder = rewritten(tmp_path, name, model_type=None)
    with pytest.raises(ws.CheckpointError, match=f"has no model_type; .* `family='{family}'` reads it so, unproved"):
        ws.open_model(folder)


@pytest.mark.parametrize("there", [True, False])
def test_unknown_model_type_names_only_missing_packages(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = rewritten(tmp_path, "llama", model_type="newcomer")
    monkeypatch.setattr("weightscope.model.config.reading.find_spec", lambda name: there or None)
    with pytest.raises(ws.CheckpointError, match="unknown model_type") as refusal:
        ws.open_model(folder)
    assert ("pip install 'weightscope-attention[runner]'" in str(refusal.value)) is not there
    ways = ("'newcomer'; `weightscope adopt SOURCE` looks for a row that", "--with", "draft", "--families", "inspect")
    assert all(way in str(refusal.value) for way in ways)


def test_unknown_model_type_opens_under_a_given_family(tmp_path: Path) -> None:
    folder = rewritten(tmp_path, "llama", model_type="newcomer")
    assert_same_scores(ws.open_model(folder, family="llama"), "llama")
    with pytest.raises(ws.CheckpointError, match="no family is called 'lama'; known are afmoe, aimv2, albert, "):
        ws.open_model(folder, family="lama")


def test_error_says_when_tensor_names_match_no_family(tmp_path: Path) -> None:
    save_file({"core.0.mix": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ws.CheckpointError, match="named like no family that weightscope knows"):
        ws.open_model(tmp_path)


def test_model_of_several_towers_needs_a_tower() -> None:
    assert ws.open_model(FIXTURES / "clip_text").family.tower == "text"
    with pytest.raises(ws.CheckpointError, match="clip has no tower 'sound'; it has text and vision"):
        ws.open_model(FIXTURES / "clip_text", tower="sound")
    with pytest.raises(ws.CheckpointError, match="llama is not a model of towers; leave `tower` out"):
        ws.open_model(FIXTURES / "llama", tower="vision")
    assert ws.open_model(FIXTURES / "gemma3_vision", tower="text").family.name == "gemma3"
    with pytest.raises(ws.CheckpointError, match="gemma3 is not a model of towers"):
        ws.open_model(FIXTURES / "gemma3_vision", tower="vision")


def test_buffers_of_old_files_are_no_weights(tmp_path: Path) -> None:
    """GPT-2's causal mask is called attn.bias, GPT-NeoX's attention.bias; many files store rotary frequencies."""
    for name, more in (
        ("gpt2", {"transformer.h.0.attn.bias": np.ones((1, 1, 16, 16), np.float32)}),
        ("gpt_neox", {"gpt_neox.layers.0.attention.bias": np.ones((1, 1, 8, 8), np.uint8),
                      "gpt_neox.layers.0.attention.masked_bias": np.float32([-1e9]),
                      "gpt_neox.layers.0.attention.rotary_emb.inv_freq": np.ones(2, np.float32)}),
    ):  # fmt: skip
        folder = tmp_path / name
        folder.mkdir()
        save_file(load_file(FIXTURES / name / "model.safetensors") | more, folder / "model.safetensors")
        (folder / "config.json").write_text((FIXTURES / name / "config.json").read_text())
        model = ws.open_model(folder)
        assert not set(more) & {tensor.name for tensor in model.attention_tensors(0)}
        assert_same_scores(model, name)


def test_caveats_name_what_matrices_leave_out() -> None:
    """A word for each thing, and nothing to say where the matrices are the whole score."""
    words = {
        "qwen3": "q/k-norm", "olmo2": "all heads together", "cohere_qk_norm": "q/k-norm", "gemma2": "softcap",
        "gpt_oss": "sink", "olmo": "clipped", "mpt": "ALiBi", "mpnet": "relative-position",
        "deberta_relative": "relative-position", "deepseek_v3": "latents", "qwen3_next": "gate",
        "llama_dynamic": "slower", "dinov3_vit": "rotation by row and column", "phi_qk_norm": "beta",
    }  # fmt: skip
    for name, word in words.items():
        assert any(word in caveat for caveat in fixture(name).model.layer(fixture(name).layers[0]).head(0).caveats), (
            name
        )
    for name in ("gpt2", "llama", "mistral", "bert", "vit", "qwen2", "clip_text", "deberta"):
        assert fixture(name).model.layer(0).head(0).caveats == (), name


def test_row_has_at_most_one_default_per_size() -> None:
    """One that it inherited under another name would stand before what a config says."""
    for row in FAMILIES:
        for meaning, names in row.size_keys.items():
            assert len([name for name in names if name in row.config.defaults]) <= 1, (row.name, meaning)


def test_size_is_read_under_the_name_that_the_code_reads(tmp_path: Path) -> None:
    stated = {"rms_norm_eps": 0.25, "layer_norm_eps": 0.5}
    assert ws.open_model(rewritten(tmp_path, "llama", **stated)).config.norm_eps == 0.25
    assert ws.open_model(rewritten(tmp_path, "bert", **stated)).config.norm_eps == 0.5
    only = {"rms_norm_eps": "absent", "layer_norm_eps": 0.5}
    with pytest.raises(ws.CheckpointError, match=r"'layer_norm_eps' is 0.5, but llama reads 'rms_norm_eps', which is"):
        ws.open_model(rewritten(tmp_path, "llama", **only))


@pytest.mark.census
def test_table_of_defaults_is_of_all_rows_and_this_transformers() -> None:
    make = pytest.importorskip("tests.model.rows.make_config_defaults", reason="it asks transformers")
    assert json.loads(json.dumps(make.made())) == json.loads(FILE.read_text())

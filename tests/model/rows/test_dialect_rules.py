"""The rules by which contradictory and older configs are read, stated by hand; `test_dialects` proves them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightscope as ws
from tests.support.tiny_models import FIXTURES, centred, fixture
from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.checkpoint.config import Config
from weightscope.core.errors import CheckpointError
from weightscope.model.config.config import ModelConfig, class_says
from weightscope.model.config.dialects import settings
from weightscope.model.config.reading import part_of
from weightscope.model.layers.read_layer import rotation_of
from weightscope.model.rows.table import FAMILIES

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16,
         "max_position_embeddings": 4096, "vocab_size": 32, "rms_norm_eps": 1e-6, "layer_norm_eps": 1e-6,
         "layer_norm_epsilon": 1e-6}  # fmt: skip
TYPES = ["full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def read_as(kind: str, /, **values: Any) -> ModelConfig:
    """The config of a model_type with usual sizes and these values, read."""
    row = next(row for row in FAMILIES if kind in row.types)
    sizes = {key: value for key, value in SIZES.items() if key in class_says(kind, "names")}
    values = {"model_type": kind, **sizes, **values}
    checkpoint = Checkpoint(Path(), (), {}, Config(values, "config.json"), "config.json")
    return settings(checkpoint.config, part_of(checkpoint, row), row).numbers


def base(config: ModelConfig, layer_type: str = "full_attention") -> tuple[Any, Any]:
    given = config.rope[layer_type]
    return given["rope_type"], given["rope_theta"]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "olmo2", "starcoder2", "granite"])
def test_rope_scaling_takes_the_place_of_rope_parameters_and_of_its_base(kind: str) -> None:
    """As a model card pastes YaRN into a file of transformers 5: the base falls back to the class's own."""
    row = next(row for row in FAMILIES if kind in row.types)
    both = read_as(kind, rope_parameters={"rope_type": "default", "rope_theta": 12345.0}, rope_scaling=YARN)
    assert base(both) == ("yarn", row.rope.theta)
    assert "what rope_parameters says; rope_scaling is read instead" in both.notes[0]
    assert base(read_as(kind, rope_theta=12345.0, rope_scaling=YARN)) == ("yarn", 12345.0)
    assert read_as(kind, rope_theta=12345.0, rope_scaling=YARN).notes == ()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi", "gpt_neox", "gemma2", "gpt_oss", "falcon", "cohere"])
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_nested_rope_parameters_are_refused_for_one_rotation(kind: str, key: str) -> None:
    nested = {layer_type: {"rope_type": "default", "rope_theta": 37.0} for layer_type in TYPES}
    with pytest.raises(CheckpointError, match=f"'{key}' is .*; one rotation for all layers was expected"):
        read_as(kind, **{key: nested})


@pytest.mark.parametrize("kind", ["gemma3_text", "modernbert", "olmo3", "laguna", "gemma4_text"])
def test_flat_rope_parameters_are_refused_for_rotations_by_layer_type(kind: str) -> None:
    with pytest.raises(CheckpointError, match=r"'rope_parameters' is .*; an entry for each layer type was expected"):
        read_as(kind, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 37.0})


@pytest.mark.parametrize("kind", ["gemma3_text", "modernbert", "olmo3"])
def test_rope_scaling_type_is_read_as_the_writing_version_does(kind: str) -> None:
    old = {"rope_scaling": {"type": "linear", "factor": 8.0}, "layer_types": TYPES}
    four, five = (read_as(kind, **old, transformers_version=version) for version in ("4.57.6", "5.23.0"))
    assert base(four)[0] == "linear" and base(five)[0] == "default"
    assert all("transformers 4 reads linear" in config.notes[0] for config in (four, five))
    with pytest.raises(CheckpointError, match="no transformers_version"):
        read_as(kind, **old)
    assert base(read_as(kind, layer_types=TYPES, rope_scaling={"rope_type": "linear", "factor": 8.0}))[0] == "linear"


def test_empty_rope_scaling_is_read_as_the_writing_version_does() -> None:
    versions = ("4.57.6", "5.23.0")
    four, five = (read_as("gpt_oss", rope_scaling=None, transformers_version=version) for version in versions)
    assert base(four) == ("default", 1.5e5) and base(five) == ("yarn", 1.5e5)
    assert base(read_as("gpt_oss")) == ("yarn", 1.5e5)
    with pytest.raises(CheckpointError, match="no transformers_version"):
        read_as("gpt_oss", rope_scaling={})


def test_two_kinds_of_scaling_are_refused() -> None:
    with pytest.raises(CheckpointError, match="'type' is linear; dynamic, as 'rope_type' says, was expected"):
        read_as("llama", rope_scaling={"type": "linear", "rope_type": "dynamic", "factor": 2.0})


def test_a_base_in_rope_parameters_wins_over_one_at_the_top() -> None:
    config = read_as("llama", rope_parameters={"rope_type": "default", "rope_theta": 37.0}, rope_theta=99.0)
    assert base(config) == ("default", 37.0) and "rope_parameters is read instead" in config.notes[0]


def test_config_keys_that_the_code_ignores_change_nothing() -> None:
    for more in (
        {},
        {"rope_parameters": {"rope_theta": 37.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ):
        assert base(read_as("gptj", n_embd=64, n_head=4, n_layer=2, rotary_dim=8, **more)) == ("default", 10000.0)
    with pytest.raises(CheckpointError, match="'head_dim' is 32; 16, or nothing, as gpt_neox takes its width"):
        read_as("gpt_neox", head_dim=32)


def test_a_count_of_turning_dimensions_is_a_share() -> None:
    """MiniMax-M2's own files say `rotary_dim` and no share."""
    config = read_as("minimax_m2", rotary_dim=8)
    row = next(row for row in FAMILIES if "minimax_m2" in row.types)
    assert config.rope["full_attention"]["partial_rotary_factor"] == 0.5
    assert len(rotation_of(config, row, 0).frequencies) == 4


def test_two_names_of_a_size_agree_or_are_refused() -> None:
    assert read_as("gpt2", n_embd=64, hidden_size=64, n_head=4, n_layer=2).d_model == 64
    with pytest.raises(CheckpointError, match="'hidden_size' is 32; 64, as its other name 'n_embd' says, was expected"):
        read_as("gpt2", n_embd=64, hidden_size=32, n_head=4, n_layer=2)
    with pytest.raises(CheckpointError, match="'n_head' is 8, but llama reads 'num_attention_heads', which is missing"):
        read_as("llama", num_attention_heads=None, n_head=8)
    assert read_as("llama", n_head=8).n_heads == 4


def test_sarvam_s_first_config_is_deepseek_s_in_other_words(tmp_path: Path) -> None:
    """Its yarn has a name of its own, its `head_dim` is the latent's width and the rotary key's."""
    config, weights = json.loads((FIXTURES / "sarvam_mla" / "config.json").read_text()), "model.safetensors"
    given = config.pop("rope_parameters")
    theta, kind = given.pop("rope_theta"), given.pop("rope_type")
    config |= {"rope_theta": theta, "rope_scaling": given | {"type": f"deepseek_{kind}"}, "head_dim": 8 + 4}
    (tmp_path / "config.json").write_text(json.dumps(config | {"q_head_dim": 6 + 4}))
    shutil.copy(FIXTURES / "sarvam_mla" / weights, tmp_path / weights)
    expected = fixture("sarvam_mla").arrays
    scores = ws.open_model(tmp_path).layer(1).scores(expected["x1"])
    seen = np.isfinite(expected["scores1"])
    assert np.abs(centred(scores, seen) - centred(expected["scores1"], seen))[seen].max() < 1e-5
    assert ws.same(FIXTURES / "sarvam_mla", tmp_path).holds

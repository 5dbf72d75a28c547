"""A model_type is a name: whether another one computes something else is what the rows of both say."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.small_llama import write_small_llama
from weightscope.pairs.same import DIFFERENT, SAME_VALUES, UNDECIDED


def stored_as(kind: str, source: Path, folder: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    """The tensors under a config with another model_type."""
    folder.mkdir()
    values = json.loads((source / "config.json").read_text()) | {"model_type": kind} | config
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def with_zero_biases(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Biases of queries, keys and values, all zero, as Qwen 2 has them."""
    made = dict(tensors)
    for name, w in tensors.items():
        if any(f"{part}_proj" in name for part in "qkv"):
            made[name.replace(".weight", ".bias")] = np.zeros(len(w), w.dtype)
    return made


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Projections in one tensor, as Phi 3 has them."""
    made = dict(tensors)
    for whole, parts in (("self_attn.qkv_proj", ["q", "k", "v"]), ("mlp.gate_up_proj", ["gate", "up"])):
        module = whole.partition(".")[0]
        for name in [name for name in tensors if f"{module}.{parts[0]}_proj" in name]:
            names = [name.replace(f"{parts[0]}_proj", f"{part}_proj") for part in parts]
            made[name.replace(f"{module}.{parts[0]}_proj", whole)] = np.concatenate([made.pop(each) for each in names])
    return made


OTHERS = [
    ("mistral", dict, {"sliding_window": None}), ("qwen2", with_zero_biases, {}),
    ("phi3", fused, {"pad_token_id": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "config"), OTHERS)
def test_llama_stored_as_another_type_that_computes_the_same_is_the_same(
    kind: str, change: Any, config: dict[str, Any], tmp_path: Path
) -> None:
    original = write_small_llama(tmp_path / "llama", 2)
    tensors = load_file(original / "model.safetensors")
    changed = stored_as(kind, original, tmp_path / "other", change(tensors), **config)
    for pair in ((original, changed), (changed, original)):
        assert ws.same(*pair).verdict == SAME_VALUES


def test_type_whose_row_computes_something_else_is_another_model(tmp_path: Path) -> None:
    """Helium rotates neighbours; and Mistral's own default is a window."""
    original = write_small_llama(tmp_path / "llama", 2)
    tensors = load_file(original / "model.safetensors")
    for kind in ("helium", "mistral"):
        assert ws.same(original, stored_as(kind, original, tmp_path / kind, tensors)).verdict == DIFFERENT


def test_type_of_unknown_code_is_undecided(tmp_path: Path) -> None:
    """No row says whom tokens see in code that is not transformers'."""
    original = write_small_llama(tmp_path / "llama", 2)
    tensors = load_file(original / "model.safetensors")
    other = stored_as("internlm3", original, tmp_path / "other", tensors)
    assert ws.same(original, other).verdict == UNDECIDED


UNLIKE_KEYS: list[tuple[str, dict[str, Any]]] = [
    ("granite", {"attention_multiplier": 0.25, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
                 "logits_scaling": 1.0}),
    ("smollm3", {"no_rope_layers": [1, 1], "no_rope_layer_interval": 4, "pad_token_id": 0}),
    ("mistral", {"sliding_window": 4096}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "config"), UNLIKE_KEYS)
def test_keys_that_only_one_class_has_prove_no_difference(kind: str, config: dict[str, Any], tmp_path: Path) -> None:
    """Their values may say what the other class does without them, up to the longest text."""
    small = write_small_llama(tmp_path / "small", 2)
    tensors = load_file(small / "model.safetensors")
    original = stored_as("llama", small, tmp_path / "llama", tensors, max_position_embeddings=128)
    changed = stored_as(kind, original, tmp_path / "other", tensors, **config)
    for pair in ((original, changed), (changed, original)):
        assert ws.same(*pair).verdict == UNDECIDED


@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
def test_window_is_another_computation_where_texts_are_longer(kind: str, tmp_path: Path) -> None:
    original = write_small_llama(tmp_path / "llama", 2)
    tensors = load_file(original / "model.safetensors")
    keys = {"max_position_embeddings": 128, "max_window_layers": 0}
    without, beyond, within = (
        stored_as(kind, original, tmp_path / str(window), tensors, **keys, sliding_window=window,
                  use_sliding_window=window is not None)
        for window in (None, 128, 127)
    )  # fmt: skip
    assert ws.same(without, beyond).verdict == UNDECIDED
    assert ws.same(without, within).verdict == DIFFERENT

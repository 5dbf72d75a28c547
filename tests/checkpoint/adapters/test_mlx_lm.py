"""Adapters of mlx-lm: read as its `fuse` merges them, or refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.commands import is_one_line, run, run_undrawn
from tests.support.tiny_models import FIXTURES

BASE = FIXTURES / "llama"
Q, V = (f"model.layers.1.self_attn.{letter}_proj" for letter in "qv")
SCALE = 20.0


def factors(names: tuple[str, ...] = (Q, V), rank: int = 3) -> dict[str, np.ndarray]:
    weights, rng = load_file(BASE / "model.safetensors"), np.random.default_rng(0)
    tensors = {}
    for name in names:
        out, inner = weights[f"{name}.weight"].shape
        tensors[f"{name}.lora_a"] = rng.normal(scale=0.1, size=(inner, rank)).astype(np.float32)
        tensors[f"{name}.lora_b"] = rng.normal(scale=0.1, size=(rank, out)).astype(np.float32)
    return tensors


def written(folder: Path, tensors: dict[str, np.ndarray], **settings: Any) -> Path:
    folder.mkdir()
    usual = {"fine_tune_type": "lora", "model": str(BASE), "num_layers": 1,
             "lora_parameters": {"rank": 3, "scale": SCALE, "dropout": 0.0}}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(usual | settings))
    save_file(tensors, folder / "adapters.safetensors")
    return folder


def fused(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    """What mlx_lm.fuse makes of it: W + scale lora_b' lora_a', each row scaled to m where there is one."""
    shutil.copytree(BASE, folder)
    weights = load_file(BASE / "model.safetensors")
    for name in (Q, V):
        a, b = (tensors[f"{name}.{part}"].astype(np.float64) for part in ("lora_a", "lora_b"))
        w = weights[f"{name}.weight"] + SCALE * b.T @ a.T
        if f"{name}.m" in tensors:
            w *= (tensors[f"{name}.m"] / np.linalg.norm(w, axis=1))[:, None]
        weights[f"{name}.weight"] = w.astype(np.float32)
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_of_mlx_is_read_as_it_is_fused(kind: str, tmp_path: Path) -> None:
    tensors = factors()
    if kind == "dora":
        weights = load_file(BASE / "model.safetensors")
        tensors |= {f"{n}.m": 1.1 * np.linalg.norm(weights[f"{n}.weight"], axis=1) for n in (Q, V)}
    adapter = written(tmp_path / "adapter", tensors, fine_tune_type=kind)
    merged = fused(tmp_path / "merged", tensors)
    for source in (adapter, adapter / "adapters.safetensors"):
        checkpoint = ws.open_model(source).checkpoint
        for name, w in load_file(merged / "model.safetensors").items():
            np.testing.assert_allclose(checkpoint[name].read(), w, rtol=0, atol=1e-6)
    assert "rank 3 on 2 weights" in ws.open_model(adapter, base=BASE).checkpoint.note
    result = run_undrawn("compare", BASE, adapter, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output


REFUSED: dict[str, tuple[dict[str, np.ndarray], dict[str, Any], str]] = {
    "whole weights": ({"model.norm.weight": np.ones(4, np.float32)}, {"fine_tune_type": "full"}, "mlx_lm.fuse"),
    "experts": (
        {f"{Q}.lora_a": np.ones((4, 3, 8), np.float32), f"{Q}.lora_b": np.ones((4, 8, 3), np.float32)}, {},
        "a LoRA of experts"),
    "a half": ({f"{Q}.lora_a": np.ones((16, 3), np.float32)}, {}, "has no counterpart"),
    "another part": ({f"{Q}.weight": np.ones((16, 3), np.float32)}, {}, "is not a supported part of an adapter of mlx"),
    "no scale": (factors(), {"lora_parameters": {"rank": 3, "alpha": 16}}, "'scale' is None"),
    "no settings": (factors(), {"lora_parameters": None}, "'scale' is None"),
    "a text for settings": (factors(), {"lora_parameters": "x"}, "an object was expected"),
    "an infinite scale": (factors(), {"lora_parameters": {"scale": 1e300}}, "a number from"),
    "DoRA without m": (factors(), {"fine_tune_type": "dora"}, "lack an m of DoRA"),
    "another model's": (factors(), {"model": str(FIXTURES / "bert")}, "is `base` the model it was made for?"),
    "nothing": ({}, {}, "holds no lora_a and lora_b"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_exactly_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    tensors, settings, words = REFUSED[name]
    adapter = written(tmp_path / "adapter", tensors, **settings)
    for command in (("inspect", adapter), ("same", BASE, adapter)):
        result = run(*command)
        assert is_one_line(result), result.output
        assert words.replace("`base`", "--base") in result.stderr.replace("`base`", "--base")


def test_the_weights_alone_are_an_adapter_too(tmp_path: Path) -> None:
    adapter = written(tmp_path / "adapter", factors())
    (adapter / "adapter_config.json").unlink()
    result = run("inspect", adapter / "adapters.safetensors")
    assert is_one_line(result), result.output
    assert "is a LoRA adapter" in result.stderr

"""A container says nothing of where weights come from: fused tensors are compared with the separate ones."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import weightscope as ws
from weightscope.pairs.lineage.shared_tensors import facts_of_both


def fused(base: Path, folder: Path, scale: float = 0.0) -> ws.Model:
    """A Llama as Phi-3 stores it, its feed-forward networks changed by this much."""
    weights, rng = load_file(base / "model.safetensors"), np.random.default_rng(1)
    for i in range(5):
        layer = next(name for name in weights if f"layers.{i}." in name).split(f"layers.{i}.")[0] + f"layers.{i}."
        for name in [name for name in weights if ".mlp." in name and name.startswith(layer)]:
            noise = rng.standard_normal(weights[name].shape).astype(np.float32)
            weights[name] = weights[name] + scale * weights[name].std() * noise
        qkv = [weights.pop(f"{layer}self_attn.{letter}_proj.weight") for letter in "qkv"]
        gate_up = [weights.pop(f"{layer}mlp.{role}_proj.weight") for role in ("gate", "up")]
        weights |= {f"{layer}self_attn.qkv_proj.weight": np.concatenate(qkv)}
        weights |= {f"{layer}mlp.gate_up_proj.weight": np.concatenate(gate_up)}
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    config = json.loads((base / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "phi3"}))
    return ws.open_model(folder)


def test_fused_tensors_are_shared(base: Path, tmp_path: Path) -> None:
    suspect = fused(base, tmp_path / "fused")
    result = ws.lineage(suspect, base)
    assert [kind.evidence for kind in result.kinds] == ["Every value of 48 tensors equals the base's."]
    here, there = ({fact.name: fact.digest for fact in side} for side in facts_of_both(suspect, ws.open_model(base)))
    assert {name: there[name] for name in here} == here and len(here) == 28 and "layer 3 up" in here
    assert result.parts["feed_forward"].lead == "same values in 5 of 5 layers"


def test_changes_of_fused_tensors_are_measured(base: Path, tmp_path: Path) -> None:
    result = ws.lineage(fused(base, tmp_path / "fused", scale=0.1), base)
    assert [kind.evidence for kind in result.kinds] == [
        "15 other tensors in layers differ by 0.099 to 0.1 of their norm."
    ]

"""A random GPT-2, written the way a real one is."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file


def gpt2_weights(
    n_layers: int = 2, d: int = 24, vocab: int = 50, n_positions: int = 32, seed: int = 0
) -> dict[str, Any]:
    """Random weights of a GPT-2, norms and biases included, under Hugging Face's names."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 0.3, mean: float = 0.0) -> np.ndarray:
        return (mean + scale * rng.standard_normal(shape)).astype(np.float32)

    weights = {"wte.weight": normal(vocab, d), "wpe.weight": normal(n_positions, d)}
    for i in range(n_layers):
        weights |= {
            f"h.{i}.ln_1.weight": normal(d, mean=1.0),
            f"h.{i}.ln_1.bias": normal(d),
            f"h.{i}.attn.c_attn.weight": normal(d, 3 * d),
            f"h.{i}.attn.c_attn.bias": normal(3 * d),
            f"h.{i}.attn.c_proj.weight": normal(d, d),
            f"h.{i}.attn.c_proj.bias": normal(d),
        }
    return weights


def write_checkpoint(folder: Path, weights: dict[str, np.ndarray], **config: Any) -> Path:
    """A folder with model.safetensors and a GPT-2 config of the weights' sizes; `config` overrides."""
    n_positions, d = weights["wpe.weight"].shape
    n_layers = len({name.split(".")[1] for name in weights if name.startswith("h.")})
    sizes = {"n_layer": n_layers, "n_head": 4, "n_embd": d, "n_positions": n_positions}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(array) for name, array in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes, **config}))
    return folder

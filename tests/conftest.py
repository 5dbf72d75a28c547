"""What several tests share: tiny models made on the spot, and data that may be absent."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightscope as ws
from weightscope.embedded import FOLDER

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared() -> Callable[[str], Path]:
    """A piece of the development data by name; the test skips where it is absent."""

    def find(name: str) -> Path:
        if not (SHARED / name).exists():
            pytest.skip(f"needs the development data {name}, which is not here")
        return SHARED / name

    return find


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
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes, **config}))
    return folder


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-2 of 2 layers, 4 heads, width 24, vocabulary 50 and 32 positions."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), gpt2_weights())


@pytest.fixture(scope="session")
def embedded() -> ws.Model:
    """The checkpoint that comes with weightscope."""
    return ws.open_model(FOLDER)

"""A checkpoint as test data has it, and one whose experts are stacked in one file and separate in another."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.tiny_models import FIXTURES

Weights = dict[str, np.ndarray]
RNG = np.random.default_rng(5)


def saved(folder: Path, weights: Weights, config: dict[str, object]) -> ws.Model:
    folder.mkdir()
    save_file({name: np.ascontiguousarray(w) for name, w in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return ws.open_model(folder)


def stored(name: str) -> tuple[Weights, dict[str, object]]:
    return load_file(FIXTURES / name / "model.safetensors"), json.loads((FIXTURES / name / "config.json").read_text())


ALONE = """
[gpt_oss_alone]
like = "gpt_oss"
also."expert.{gate,up,down}" = "mlp.experts.{e}.{gate,up,down}_proj"
also."norm.mlp" = "post_attention_layernorm"
also.router = "mlp.router"
"""


def stacked_and_separate(folder: Path, count: int, inner: int) -> tuple[ws.Model, ws.Model]:
    """gpt_oss saves one (in, out) tensor of all experts, in which gate and up alternate; ALONE has each alone."""
    weights, config = stored("gpt_oss")
    d, alone = config["hidden_size"], {**weights}
    for i in range(config["num_hidden_layers"]):
        both = RNG.standard_normal((count, d, 2 * inner)).astype(np.float32)
        down = RNG.standard_normal((count, inner, d)).astype(np.float32)
        biases = RNG.standard_normal((count, 2 * inner)).astype(np.float32)
        experts = f"model.layers.{i}.mlp.experts"
        weights |= {f"{experts}.gate_up_proj": both, f"{experts}.down_proj": down}
        weights[f"{experts}.gate_up_proj_bias"] = biases
        for e in range(count):
            for start, role in ((0, "gate"), (1, "up")):
                alone[f"{experts}.{e}.{role}_proj.weight"] = both[e, :, start::2].T
                alone[f"{experts}.{e}.{role}_proj.bias"] = biases[e, start::2]
            alone[f"{experts}.{e}.down_proj.weight"] = down[e].T
    (folder / "rows.toml").write_text(ALONE)
    saved(folder / "separate", alone, config)
    separate = ws.open_model(folder / "separate", family="gpt_oss_alone", families=folder / "rows.toml")
    return saved(folder / "stacked", weights, config), separate

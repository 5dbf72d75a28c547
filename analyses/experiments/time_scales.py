"""Draw the time scales of a hybrid as initialised: Mamba 2 with A in [1, 16] and steps in [0.001, 0.1].

    python -m analyses.experiments.time_scales

A tiny Nemotron-H of random weights, three layers of Mamba 2 to one of softmax. A is uniform and steps are uniform in
their logarithm, as Mamba 2's authors draw them.
"""

import json
from pathlib import Path

import click
import numpy as np
from safetensors.numpy import save_file

import weightscope as ws
from analyses.study import study
from tests.support.tiny_models import FIXTURES
from weightscope.core.files import Folder, new_file, scratch_folder
from weightscope.heads.audit.figures import time_scales
from weightscope.report.pages.style import save

BLOCKS = ["mamba", "mamba", "mamba", "attention"] * 3
WIDTH, HEADS, HEAD_DIM, GROUPS, STATE = 96, 24, 8, 4, 16


def write_hybrid(folder: Path) -> None:
    """A checkpoint of Nemotron-H's names."""
    rng = np.random.default_rng(0)
    config = json.loads((FIXTURES / "nemotron_h" / "config.json").read_text())
    config |= {"hidden_size": WIDTH, "num_hidden_layers": len(BLOCKS), "layers_block_type": BLOCKS, "head_dim": 24}
    config |= {"mamba_num_heads": HEADS, "mamba_head_dim": HEAD_DIM, "n_groups": GROUPS, "ssm_state_size": STATE}
    tensors = {"backbone.embeddings.weight": (config["vocab_size"], WIDTH)}
    inner, channels = HEADS * HEAD_DIM, HEADS * HEAD_DIM + 2 * GROUPS * STATE
    for i, block in enumerate(BLOCKS):
        stem = f"backbone.layers.{i}.mixer."
        if block == "mamba":
            tensors |= {f"{stem}in_proj.weight": (inner + channels + HEADS, WIDTH)}
            tensors |= {f"{stem}conv1d.weight": (channels, 1, 4), f"{stem}out_proj.weight": (WIDTH, inner)}
        else:
            rows = {"q": 4, "k": config["num_key_value_heads"], "v": config["num_key_value_heads"], "o": 4}
            tensors |= {f"{stem}{letter}_proj.weight": (24 * n, WIDTH) for letter, n in rows.items()}
    weights = {name: 0.02 * rng.standard_normal(shape) for name, shape in tensors.items()}
    for i, block in enumerate(BLOCKS):
        weights[f"backbone.layers.{i}.norm.weight"] = np.ones(WIDTH)
        if block == "mamba":
            steps = np.exp(rng.uniform(np.log(0.001), np.log(0.1), HEADS))
            stem = f"backbone.layers.{i}.mixer."
            weights[f"{stem}A_log"] = np.log(rng.uniform(1, 16, HEADS))
            weights[f"{stem}dt_bias"] = steps + np.log(-np.expm1(-steps))  # the inverse of softplus
            weights |= {f"{stem}norm.weight": np.ones(inner), f"{stem}D": np.ones(HEADS)}
    save_file({name: tensor.astype(np.float32) for name, tensor in weights.items()}, folder / "model.safetensors")
    with new_file(folder / "config.json") as file:
        file.write(json.dumps(config).encode())


@study("time-scales")
def main(files: Folder) -> None:
    """Write mixers.csv and its map."""
    with scratch_folder() as folder:
        write_hybrid(folder)
        audit = ws.audit(folder, directions=0, sinks=False)
    assert audit.mixers is not None
    files.table("mixers.csv", audit.mixers.table)
    save(time_scales(audit.measured, audit.mixers), files, "mixers", "mixers.csv")
    click.echo(f"median {np.median(audit.mixers.table['time_scale']):.3g} tokens")


if __name__ == "__main__":
    main()

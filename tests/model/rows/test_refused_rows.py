"""Refusals name what a row cannot describe, and rows say what enters a first layer in addition to tokens."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.commands import run
from tests.support.tiny_models import FIXTURES
from weightscope.model.model import TensorsOnly, open_tensors
from weightscope.model.rows.table import FAMILIES


def changed(name: str, folder: Path, **values: object) -> Path:
    """A fixture with other values in its config."""
    shutil.copytree(FIXTURES / name, folder / name)
    path = folder / name / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder / name


def test_an_architecture_without_a_row_is_refused_by_its_mechanism(tmp_path: Path) -> None:
    with pytest.raises(ws.CheckpointError, match="no row can describe mamba: it has no attention"):
        ws.open_model(changed("bert", tmp_path, model_type="mamba"))


def test_no_architecture_is_both_read_and_refused() -> None:
    assert not FAMILIES.unsupported.keys() & {kind for row in FAMILIES if not row.refused for kind in row.types}


def test_a_configuration_that_the_row_cannot_describe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ws.CheckpointError, match="heads are mixed before and after the softmax"):
        ws.open_model(changed("deberta", tmp_path, talking_head=True))


def test_a_table_that_does_not_follow_its_formula_is_refused(tmp_path: Path) -> None:
    folder = changed("electra", tmp_path, model_type="roformer")
    path = folder / "model.safetensors"
    tensors = {name.replace("electra.", "roformer."): values for name, values in load_file(path).items()}
    rows = tensors["roformer.embeddings.position_embeddings.weight"]
    tensors["roformer.encoder.embed_positions.weight"] = rows[:, : 16 // 4].copy()
    save_file(tensors, path)
    with pytest.raises(ws.CheckpointError, match="does not hold what roformer's formula gives"):
        ws.open_model(folder).layer(0)


def test_a_first_layer_that_sees_more_than_tokens_and_positions_says_so(tmp_path: Path) -> None:
    model = ws.open_model(changed("bert", tmp_path, model_type="layoutlm"))
    assert model.layer(0).n_heads
    with pytest.raises(ws.CheckpointError, match="where a token stands on its page"):
        model.first_layer  # noqa: B018


def deepseek_v4(folder: Path, changed: float = 0.0) -> Path:
    """Tensors of a DeepSeek V4 of two layers, named as transformers saves them."""
    rng, d = np.random.default_rng(0), 32
    shapes = {"model.embed_tokens.weight": (64, d), "head.weight": (64, d), "model.norm.weight": (d,)}
    for i in range(2):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}{name}_norm.weight": (d,) for name in ("attn", "ffn")} | {f"{layer}hc_attn_fn": (24, 4 * d)}
        shapes |= {
            f"{layer}attn.{name}.weight": shape
            for name, shape in {
                "wq_a": (16, d),
                "wq_b": (64, 16),
                "wkv": (16, d),
                "wo_a": (16, d),
                "wo_b": (d, 16),
                "norm": (16,),
            }.items()
        }
        shapes |= {f"{layer}ffn.experts.{e}.{w}.weight": (d, 16) if w == "w2" else (16, d)
                   for e in range(2) for w in ("w1", "w2", "w3")}  # fmt: skip
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    weights["model.layers.1.attn.wkv.weight"][0] += changed
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    config = {"model_type": "deepseek_v4", "hidden_size": d, "num_hidden_layers": 2, "num_attention_heads": 4,
              "head_dim": 16, "rope_parameters": {"main": {"rope_theta": 1e4}}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_tensors_of_a_refused_row_have_roles(tmp_path: Path) -> None:
    """Keys that also serve as values have no head.qk, but every tensor has its place."""
    folder = deepseek_v4(tmp_path / "v4")
    with pytest.raises(ws.CheckpointError, match="keys that also serve as values"):
        ws.open_model(folder)
    opened = open_tensors(folder)
    assert isinstance(opened, TensorsOnly) and "keys that also serve as values" in opened.refusal
    keys = ("layer 1 kv", "layer 0 expert 1 down", "layer 0 norm.mlp", "layer 0 o_b", "unembedding", "tokens")
    assert [opened.tensors[key].array().shape for key in keys] == [
        (16, 32),
        (32, 16),
        (32,),
        (32, 16),
        (64, 32),
        (64, 32),
    ]
    assert opened.tensors["layer 1 streams.attention.mix"].array().shape == (24, 128)
    assert all(tensor.has_role for tensor in opened.tensors)
    listed = run("inspect", folder, "--tensors").stdout
    assert "33 with a role" in listed and "keys that also serve as values" in listed


def test_refused_checkpoints_compare_by_tensors(tmp_path: Path) -> None:
    a, b = deepseek_v4(tmp_path / "a"), deepseek_v4(tmp_path / "b", changed=1.0)
    done = run("compare", a, b, "--all", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "1 changed in some rows or columns only" in done.stdout
    assert "Heads are not compared: model.safetensors: deepseek_v4 with keys that also serve as values" in done.stdout
    assert "layers.1.attn.wkv.weight,kv,few rows" in (tmp_path / "out" / "tensors.csv").read_text()
    for option in ((), ("--all", "--json"), ("--all", "--max-change", "1"), ("--all", "--fail-on", "error")):
        assert run("compare", a, b, *option, "--out", tmp_path / "no").exit_code == 2, option


def test_a_checkpoint_of_no_known_architecture_opens_for_its_tensors(tmp_path: Path) -> None:
    opened = open_tensors(changed("bert", tmp_path, model_type="mamba"))
    assert isinstance(opened, TensorsOnly) and "it has no attention" in opened.refusal
    assert all(not tensor.has_role for tensor in opened.tensors) and len(opened.tensors) == len(opened.checkpoint)
    truncated = tmp_path / "bert" / "model.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:-4])
    with pytest.raises(ws.CheckpointError, match="cut short"):
        open_tensors(tmp_path / "bert")


@pytest.mark.parametrize(("like", "kind"), [("qwen2", "dots_ocr"), ("phi3", "phi3_v")])
def test_rows_of_remote_code_say_what_proves_them(like: str, kind: str, tmp_path: Path) -> None:
    model = ws.open_model(changed(like, tmp_path, model_type=kind))
    assert model.family.origin.startswith("proved against a tiny model after ") and f"'{kind}'" in model.family.origin
    head, theirs = (opened.layer(0).head(1) for opened in (model, ws.open_model(FIXTURES / like)))
    np.testing.assert_array_equal(head.qk_at(3).dense(), theirs.qk_at(3).dense())


LLADA = (
    ("model.embed_tokens", "model.transformer.wte"), ("model.norm", "model.transformer.ln_f"),
    ("lm_head", "model.transformer.ff_out"), ("model.layers", "model.transformer.blocks"),
    ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ff_norm"), ("self_attn.o_proj", "attn_out"),
    ("self_attn.", ""), ("mlp.gate_proj", "ff_proj"), ("mlp.up_proj", "up_proj"), ("mlp.down_proj", "ff_out"),
)  # fmt: skip


def test_llada_is_a_llama_under_other_names(tmp_path: Path) -> None:
    weights = {name: w for name, w in load_file(FIXTURES / "llama" / "model.safetensors").items() if "bias" not in name}
    config = json.loads((FIXTURES / "llama" / "config.json").read_text()) | {"attention_bias": False}
    for folder, names in (("llama", ()), ("llada", LLADA)):
        renamed = {}
        for name, w in weights.items():
            for theirs, ours in names:
                name = name.replace(theirs, ours)
            renamed[name] = w
        (tmp_path / folder).mkdir()
        save_file(renamed, tmp_path / folder / "model.safetensors")
        n_kv_heads = config["num_key_value_heads"]
        (tmp_path / folder / "config.json").write_text(
            json.dumps(config | {"model_type": folder, "n_kv_heads": n_kv_heads, "block_type": "llama"})
        )
    model, llama = (ws.open_model(tmp_path / name) for name in ("llada", "llama"))
    assert model.family.origin.startswith("proved against a tiny model after llama.cpp's code")
    for index in llama.attention_layers:
        ours, theirs = model.layer(index).head(1), llama.layer(index).head(1)
        np.testing.assert_array_equal(ours.qk_at(2).dense(), theirs.qk_at(2).dense())
        np.testing.assert_array_equal(ours.vo.dense(), theirs.vo.dense())
    assert sorted(model.tensors.labels) == sorted(llama.tensors.labels)
    path = tmp_path / "llada" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"alibi": True}))
    with pytest.raises(ws.CheckpointError, match="llada with alibi"):
        ws.open_model(tmp_path / "llada")

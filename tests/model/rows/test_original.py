"""Files under Meta's, Mistral's and Megatron's names have the roles, arrays and heads that transformers' names have.

`to_meta` is transformers' convert_llama_weights_to_hf.py (and its like for Mistral and Mixtral) read backwards;
`to_mcore` is Megatron Core's order: queries of a group, its key, its value; all gates, then all that is gated.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightscope as ws
from weightscope.core.errors import CheckpointError

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 256, "vocab_size": 24, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "model_type": "llama", "rope_theta": 5e5},
    "mistral": {**SIZES, "model_type": "mistral", "sliding_window": 16, "rope_theta": 1e4, "head_dim": 16},
    "mixtral": {**SIZES, "model_type": "mixtral", "rope_theta": 1e6, "num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen3": {**SIZES, "model_type": "qwen3", "rope_theta": 1e6},
    "nemotron": {**SIZES, "model_type": "nemotron", "rope_theta": 1e4, "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
}
PARAMS: dict[str, dict[str, Any]] = {  # as the trainers' own params.json say the same
    "llama": {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": -1, "multiple_of": 256,
              "ffn_dim_multiplier": 1.3, "norm_eps": 1e-5, "rope_theta": 5e5, "max_seq_len": 64},
    "mistral": {"dim": 32, "n_layers": 2, "head_dim": 16, "hidden_dim": 256, "n_heads": 4, "n_kv_heads": 2,
                "norm_eps": 1e-5, "sliding_window": "16", "vocab_size": 24, "max_seq_len": 64},
    "mixtral": {"dim": 32, "n_layers": 2, "head_dim": 8, "hidden_dim": 256, "n_heads": 4, "n_kv_heads": 2,
                "norm_eps": 1e-5, "vocab_size": 24, "rope_theta": 1e6, "max_seq_len": 64,
                "moe": {"num_experts": 3, "num_experts_per_tok": 2}},
}  # fmt: skip
MODULES = {
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def published(kind: str) -> dict[str, np.ndarray]:
    """A random model as transformers stores it."""
    rng, c = np.random.default_rng(0), CONFIGS[kind]
    d, inner, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    layer = {
        "self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, q), "input_layernorm": (d,), "post_attention_layernorm": (d,),
    }  # fmt: skip
    if kind == "mixtral":
        layer["block_sparse_moe.gate"] = (3, d)
        for i in range(3):
            experts = f"block_sparse_moe.experts.{i}."
            layer |= {f"{experts}w1": (inner, d), f"{experts}w2": (d, inner), f"{experts}w3": (inner, d)}
    else:
        layer |= {"mlp.up_proj": (inner, d), "mlp.down_proj": (d, inner)}
        layer |= {} if kind == "nemotron" else {"mlp.gate_proj": (inner, d)}
    if kind == "qwen3":
        layer |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in layer.items()}
    if kind == "nemotron":
        shapes |= {name.replace(".weight", ".bias"): shape for name, shape in shapes.items() if "layernorm" in name}
        shapes["model.norm.bias"] = (d,)
    shapes |= {"model.embed_tokens.weight": (24, d), "model.norm.weight": (d,), "lm_head.weight": (24, d)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def to_meta(tensors: dict[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    """The converters' `permute` undone, under Meta's names."""
    config, meta = CONFIGS[kind], {}
    top = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}
    for name, w in tensors.items():
        module = name.removesuffix(".weight")
        match = re.fullmatch(r"model\.(layers\.\d+\.)(.+)", module)
        if match is None:
            meta[f"{top[module]}.weight"] = w
            continue
        if match[2] in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config["num_attention_heads" if match[2].endswith("q_proj") else "num_key_value_heads"]
            w = w.reshape(heads, 2, -1, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
        named = MODULES.get(match[2], match[2].replace("block_sparse_moe", "feed_forward"))
        meta[f"{match[1]}{named}.weight"] = np.ascontiguousarray(w)
    return meta


def to_mcore(tensors: dict[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    """Megatron Core's names, group by group, with the norms that Transformer Engine keeps in the next module."""
    config, mcore = CONFIGS[kind], {}
    groups, head = config["num_key_value_heads"], config["head_dim"]
    for i in range(2):
        old, new = f"model.layers.{i}.", f"decoder.layers.{i}."
        q, k, v = (tensors[f"{old}self_attn.{letter}_proj.weight"] for letter in "qkv")
        rows = [w.reshape(groups, -1, head, w.shape[1]) for w in (q, k, v)]
        mcore[f"{new}self_attention.linear_qkv.weight"] = np.concatenate(rows, axis=1).reshape(-1, q.shape[1])
        mcore[f"{new}self_attention.linear_proj.weight"] = tensors[f"{old}self_attn.o_proj.weight"]
        norms = {"input_layernorm": "self_attention.linear_qkv", "post_attention_layernorm": "mlp.linear_fc1"}
        for norm, module in norms.items():
            for end in ("weight", "bias"):
                if (gain := tensors.get(f"{old}{norm}.{end}")) is not None:
                    mcore[f"{new}{module}.layer_norm_{end}"] = gain
        for norm in ("q_norm", "k_norm"):
            if (gain := tensors.get(f"{old}self_attn.{norm}.weight")) is not None:
                mcore[f"{new}self_attention.{norm[0]}_layernorm.weight"] = gain
        if kind == "mixtral":
            mcore[f"{new}mlp.router.weight"] = tensors[f"{old}block_sparse_moe.gate.weight"]
            for e in range(3):
                w1, w2, w3 = (tensors[f"{old}block_sparse_moe.experts.{e}.w{j}.weight"] for j in (1, 2, 3))
                experts = f"{new}mlp.experts.local_experts.{e}."
                mcore |= {f"{experts}linear_fc1.weight": np.concatenate([w1, w3]), f"{experts}linear_fc2.weight": w2}
            mcore[f"{new}pre_mlp_layernorm.weight"] = mcore.pop(f"{new}mlp.linear_fc1.layer_norm_weight")
        else:
            gate_and_up = [tensors.get(f"{old}mlp.{name}_proj.weight") for name in ("gate", "up")]
            mcore[f"{new}mlp.linear_fc1.weight"] = np.concatenate([w for w in gate_and_up if w is not None])
            mcore[f"{new}mlp.linear_fc2.weight"] = tensors[f"{old}mlp.down_proj.weight"]
    top = {"embed_tokens": "embedding.word_embeddings", "norm": "decoder.final_layernorm"}
    for name, named in top.items():
        for end in ("weight", "bias"):
            if f"model.{name}.{end}" in tensors:
                mcore[f"{named}.{end}"] = tensors[f"model.{name}.{end}"]
    return mcore | {"output_layer.weight": tensors["lm_head.weight"]}


def write(folder: Path, tensors: dict[str, np.ndarray], name: str, **texts: dict[str, Any]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / name)
    for file, values in texts.items():
        (folder / f"{file}.json").write_text(json.dumps(values))
    return folder


def assert_same(theirs: ws.Model, ours: ws.Model) -> None:
    """Every role of one file is the other's, to the bit, and so is every head."""
    labels = {theirs.tensors.label(tensor) for tensor in theirs.tensors}
    assert labels == {ours.tensors.label(tensor) for tensor in ours.tensors}
    assert not [tensor.name for tensor in theirs.tensors if tensor.role == tensor.name]
    for label in labels:
        assert theirs.tensors[label].shape == ours.tensors[label].shape
        np.testing.assert_array_equal(theirs.tensors[label].array(), ours.tensors[label].array(), err_msg=label)
    audits = [ws.audit(model).heads for model in (theirs, ours)]
    for column in audits[0].names:
        values = [heads[column].astype(str) if heads[column].dtype == object else heads[column] for heads in audits]
        np.testing.assert_array_equal(*values, err_msg=column)


@pytest.fixture
def original(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[str, dict[str, np.ndarray], ws.Model]:
    kind = request.param
    tensors = published(kind)
    return kind, tensors, ws.open_model(write(tmp_path / "hf", tensors, "model.safetensors", config=CONFIGS[kind]))


@pytest.mark.parametrize("original", PARAMS, indirect=True)
@pytest.mark.parametrize("text", ["params", "config"])
def test_meta_and_mistral(original: tuple[str, dict[str, np.ndarray], ws.Model], text: str, tmp_path: Path) -> None:
    kind, tensors, ours = original
    stated = {text: PARAMS[kind] if text == "params" else CONFIGS[kind]}
    folder = write(tmp_path / "meta", to_meta(tensors, kind), "consolidated.safetensors", **stated)
    theirs = ws.open_model(folder)
    assert_same(theirs, ours)
    assert "rotary neighbours" in theirs.tensors["layer 1 k"].stored
    if text == "params":
        stored = dict(theirs.checkpoint.config)
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"):
            assert stored[key] == CONFIGS[kind][key], key
        for key in ("intermediate_size", "rms_norm_eps", "rope_theta", "model_type", "max_position_embeddings"):
            assert stored[key] == CONFIGS[kind][key], key


@pytest.mark.parametrize("original", ["llama", "mixtral", "qwen3", "nemotron"], indirect=True)
def test_megatron(original: tuple[str, dict[str, np.ndarray], ws.Model], tmp_path: Path) -> None:
    kind, tensors, ours = original
    folder = write(tmp_path / "mcore", to_mcore(tensors, kind), "model.safetensors", config=CONFIGS[kind])
    theirs = ws.open_model(folder)
    assert_same(theirs, ours)
    assert "part of a fused tensor" in theirs.tensors["layer 0 q"].stored


@pytest.mark.parametrize(("changes", "message"), [
    ({"use_scaled_rope": 8}, "'use_scaled_rope' is 8"),
    ({"rope_scaling_factor": 8}, "'rope_scaling_factor' is 8, which is not read of params.json"),
    ({"yarn": {"factor": 4}}, "'yarn' is {'factor': 4}, which is not read"),
    ({"vision_encoder": {}}, "'vision_encoder'"),
    ({"dim": 64}, "has shape (256, 32); params.json needs (256, 64)"),
    ({"multiple_of": 64}, "params.json needs (128, 32)"),
    ({"n_heads": 0}, "'n_heads' is 0; a whole number"),
    ({"n_heads": 3}, "do not divide"),
    ({"norm_eps": "small"}, "'norm_eps' is small; a number"),
    ({"ffn_dim_multiplier": float("nan")}, "'ffn_dim_multiplier' is nan"),
    ({"ffn_dim_multiplier": 1e12}, "'intermediate_size'"),
    ({"moe": [1]}, "'moe' is [1]; an object was expected"),
    ({"moe": {"num_experts": -1}}, "'num_experts' is -1"),
    ({"hidden_dim": 256, "rope_theta": None}, "has no 'rope_theta'"),
    ({"\x1b[2J": 1}, "'\\x1b[2J' is 1"),
])  # fmt: skip
def test_params_that_are_not_read_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    tensors, params = to_meta(published("llama"), "llama"), {**PARAMS["llama"], **changes}
    with pytest.raises(CheckpointError) as caught:
        ws.open_model(write(tmp_path / "meta", tensors, "consolidated.safetensors", params=params)).layer(0)
    assert message in str(caught.value) and str(caught.value).isprintable()


@pytest.mark.parametrize(("name", "shape"), [
    ("decoder.layers.0.self_attention.linear_qkv.weight", (63, 32)),
    ("decoder.layers.0.self_attention.linear_qkv.weight", ()),
    ("decoder.layers.0.mlp.linear_fc1.weight", (511, 32)),
])  # fmt: skip
def test_fused_tensors_of_other_shapes_are_refused(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = to_mcore(published("llama"), "llama") | {name: np.zeros(shape, np.float32)}
    with pytest.raises(CheckpointError, match="4 heads of 2 keys and values do not divide"):
        ws.open_model(write(tmp_path / "mcore", tensors, "model.safetensors", config=CONFIGS["llama"]))


@pytest.mark.parametrize("rename", [to_meta, to_mcore])
def test_names_without_numbers_are_refused(rename: Callable[..., dict[str, np.ndarray]], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json with a model_type"):
        ws.open_model(write(tmp_path / "bare", rename(published("llama"), "llama"), "model.safetensors"))


@pytest.mark.parametrize("rename", [to_meta, to_mcore])
@pytest.mark.parametrize("kind", ["gemma", "gpt2", "\x1b[2J", None, 3, ["llama"]])
def test_other_models_under_such_names_are_refused(
    kind: object, rename: Callable[..., dict[str, np.ndarray]], tmp_path: Path
) -> None:
    """Nothing says how their queries and keys rotate, and from where their gains count: the names stay, unread."""
    config = {**CONFIGS["llama"], "model_type": kind}
    with pytest.raises(CheckpointError, match=r"model_type|config\.json|has no|is missing") as caught:
        ws.open_model(
            write(tmp_path / "m", rename(published("llama"), "llama"), "model.safetensors", config=config)
        ).layer(0)
    assert str(caught.value).isprintable()

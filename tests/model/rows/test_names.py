"""The role of every tensor, and its array in one convention, whatever layout and container it is stored in."""

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.commands import run
from tests.support.tiny_models import FIXTURES, NAMES, fixture
from tests.support.two_layers import TWO_LAYERS
from weightscope.core.errors import CheckpointError
from weightscope.model.layers.layouts import StoredHeads
from weightscope.model.layers.maps import Affine
from weightscope.model.rows.names import UNNAMED, modules_of
from weightscope.model.rows.table import FAMILIES

# Tensors of the fixtures that no row names: state-space layers, heads of pretraining, adapters after a tower.
UNNAMED_TENSORS = 50


def matrix(projection: Affine) -> np.ndarray:
    """(heads, d, r) as (heads r, d)."""
    stored = np.asarray(projection.stored)
    return stored.transpose(0, 2, 1).reshape(-1, stored.shape[1])


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_has_a_role_or_says_that_it_has_none(name: str) -> None:
    model = fixture(name).model
    tensors = list(model.tensors)
    assert sorted(tensor.name for tensor in tensors) == sorted(model.checkpoint)
    unnamed = [tensor.role == tensor.name for tensor in tensors]
    assert unnamed == sorted(unnamed), "tensors without a role are last"
    assert all((UNNAMED in tensor.stored) == without for tensor, without in zip(tensors, unnamed, strict=True))
    for key in model.tensors.labels:
        tensor = model.tensors[key]
        if tensor.role != tensor.name:
            assert tensor.array().shape == tensor.shape, key


def test_number_of_tensors_without_a_role() -> None:
    roles = [tensor.role == tensor.name for name in NAMES for tensor in fixture(name).model.tensors]
    assert (len(roles), sum(roles)) == (2606, UNNAMED_TENSORS)


@pytest.mark.parametrize("name", NAMES)
def test_projections_are_what_the_layout_reads(name: str) -> None:
    """Read before norms are folded; a latent's queries and keys are no matrices of the file."""
    tiny = fixture(name)
    model, family = tiny.model, tiny.model.family
    for index in tiny.layers:
        row = family.in_layer(model.config.layer_types[index])
        if row.heads.layout.__name__.startswith(("latent", "scaled_by", "grouped_conv")):
            continue
        if family.keys_of(model.config, index) != index or family.config.sizes(model.config, index):
            continue
        under = model.under(family.stored_name(model.config, index))
        layer = row.heads.layout(StoredHeads(under, row, model.config))
        for role, projection in (("q", layer.q), ("k", layer.k), ("v", layer.v)):
            key = f"layer {index} {role}"
            if key in model.tensors:  # a layer that others share has the first one's index
                np.testing.assert_array_equal(model.tensors[key].array(), matrix(projection), key)
        w_o = np.asarray(layer.w_o)
        if f"layer {index} o" in model.tensors:
            expected = w_o.reshape(-1, w_o.shape[-1]).T
            np.testing.assert_array_equal(model.tensors[f"layer {index} o"].array(), expected)


def test_fused_and_separate_projections_are_the_same_roles(tmp_path: Path) -> None:
    """Phi-3 is a Llama with one tensor for queries, keys and values, and one for gate and up."""
    config = json.loads((FIXTURES / "phi3" / "config.json").read_text())
    fused = ws.open_model(FIXTURES / "phi3")
    stored = load_file(FIXTURES / "phi3" / "model.safetensors")
    d, wide = fused.config.d_model, config["intermediate_size"]
    stored |= {
        f"model.layers.{i}.mlp.{name}.weight": np.random.default_rng(i).standard_normal(shape).astype(np.float32)
        for i in range(fused.config.n_layers)
        for name, shape in (("gate_up_proj", (2 * wide, d)), ("down_proj", (d, wide)))
    }
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = ws.open_model(tmp_path).tensors
    for i in range(fused.config.n_layers):
        gate_up = stored[f"model.layers.{i}.mlp.gate_up_proj.weight"]
        np.testing.assert_array_equal(tensors[f"layer {i} gate"].array(), gate_up[:wide])
        np.testing.assert_array_equal(tensors[f"layer {i} up"].array(), gate_up[wide:])
        qkv = stored[f"model.layers.{i}.self_attn.qkv_proj.weight"]
        parts = [tensors[f"layer {i} {role}"].array() for role in "qkv"]
        np.testing.assert_array_equal(np.concatenate(parts), qkv)
        assert tensors[f"layer {i} up"].stored == "fused gate+up"


def test_gains_are_counted_from_one() -> None:
    model = fixture("gemma").model
    norm = model.tensors["layer 0 norm.before"]
    stored = model.checkpoint["model.layers.0.input_layernorm.weight"].read()
    np.testing.assert_array_equal(norm.array(), 1 + stored)
    assert norm.stored == "gain counted from 0"


def test_tied_head_is_named_by_the_tokens() -> None:
    assert ws.open_model(TWO_LAYERS).tensors["tokens"].stored == "also the unembedding (tied)"
    untied = fixture("llama").model.tensors
    assert untied["tokens"].stored == "" and not fixture("llama").model.ends.tied


def test_norms_of_single_heads_have_their_numbers() -> None:
    model = fixture("stablelm_qk_norm").model
    heads = {"q_norm": model.config.n_heads, "k_norm": model.config.n_kv_heads}
    for norm, count in heads.items():
        roles = [tensor.role for tensor in model.tensors if tensor.layer == 0 and tensor.role.startswith(norm)]
        assert roles == [f"{norm}.{head}" for head in range(count)]
    gain = model.tensors["layer 0 k_norm.1"]
    np.testing.assert_array_equal(gain.array(), model.checkpoint[gain.name].read())


def test_norms_of_a_network_are_not_named_where_the_config_moves_them() -> None:
    """Chameleon with Swin's norms has them after attention and after the network."""
    row = next(row for row in FAMILIES if row.name == "chameleon")
    assert "norm.mlp" in {module.role for module in modules_of(row)[0].values()}
    moved = {module.role for module in modules_of(row.configured({"swin_norm": True}))[0].values()}
    assert "norm.mlp" not in moved and "up" in moved


def test_one_matrix_may_serve_as_keys_and_values() -> None:
    model = fixture("gemma4").model
    both = next(tensor for tensor in model.tensors if tensor.role == "k+v")
    assert both.stored.startswith("one matrix as k and v")
    layer = both.layer
    np.testing.assert_array_equal(model.tensors[f"layer {layer} k"].array(), both.array())
    np.testing.assert_array_equal(model.tensors[f"layer {layer} v"].array(), both.array())


def test_all_stacks_are_named() -> None:
    tensors = fixture("clip_text").model.tensors
    assert {tensor.stack for tensor in tensors if tensor.role != tensor.name} == {"text", "vision"}
    assert tensors["layer 1 q"].name == "text_model.encoder.layers.1.self_attn.q_proj.weight"
    assert tensors["vision layer 1 q"].name == "vision_model.encoder.layers.1.self_attn.q_proj.weight"
    assert fixture("t5_encoder").model.tensors["cross layer 1 k"].name.endswith("1.EncDecAttention.k.weight")


def test_unknown_role_names_near_ones() -> None:
    with pytest.raises(CheckpointError, match=r"has no tensor 'layer 1 upp'; near are layer 1 up"):
        ws.open_model(TWO_LAYERS).tensors["layer 1 upp"]
    tensors = fixture("llama").model.tensors
    assert "layer 1 up" not in tensors and "layer 9 q" not in tensors and "layer 1 q" in tensors
    assert tensors["model.embed_tokens.weight"].role == "tokens"


HOSTILE = [
    ("model.layers.0.self_attn.q_proj.weight", (16, 15), "layer 0 q"),
    ("model.layers.0.self_attn.k_proj.weight", (7, 16), "layer 0 k"),
    ("model.layers.0.self_attn.v_proj.weight", (), "layer 0 v"),
    ("model.layers.0.self_attn.o_proj.weight", (2, 16, 16), "layer 0 o"),
    ("model.layers.0.mlp.up_proj.weight", (8,), "layer 0 up"),
    ("model.layers.0.mlp.down_proj.weight", (8, 16), "layer 0 down"),
    ("model.layers.0.input_layernorm.weight", (3, 16), "layer 0 norm.before"),
]


@pytest.mark.parametrize(("name", "shape", "key"), HOSTILE)
def test_shape_that_a_role_cannot_have_is_refused(
    name: str, shape: tuple[int, ...], key: str, tmp_path: Path
) -> None:  # fmt: skip
    stored = load_file(FIXTURES / "llama" / "model.safetensors")
    save_file(stored | {name: np.ones(shape, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((FIXTURES / "llama" / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"has (shape|no tensor)"):
        ws.open_model(tmp_path).tensors[key].array()


EXPERTS = ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj")


@pytest.mark.parametrize("name", ["gpt_oss", "phi3", "gpt2", "bloom", "deberta", "codegen"])
def test_any_shape_is_read_as_listed_or_refused(name: str, tmp_path: Path) -> None:
    stored = load_file(FIXTURES / name / "model.safetensors")
    (tmp_path / "config.json").write_bytes((FIXTURES / name / "config.json").read_bytes())
    of_layer = [each for each in stored if "0." in each] + [*EXPERTS] * (name == "gpt_oss")
    for hostile in of_layer:
        for shape in ((), (3,), (16, 15), (2, 3, 5), (0,), (16, 0)):
            save_file(stored | {hostile: np.ones(shape, np.float32)}, tmp_path / "model.safetensors")
            with suppress(CheckpointError):  # an empty tensor is refused at once
                tensors = ws.open_model(tmp_path).tensors
                for label in [label for label in tensors.labels if tensors[label].name == hostile]:
                    with suppress(CheckpointError):
                        assert tensors[label].array().shape == tensors[label].shape, (label, shape)


def test_opening_a_model_names_nothing() -> None:
    model = ws.open_model(TWO_LAYERS)
    assert "tensors" not in vars(model) and "rows" not in vars(model.tensors)


def test_tensors_are_listed_by_the_command() -> None:
    done = run("inspect", TWO_LAYERS, "--tensors", "--json")
    listed = json.loads(done.stdout)
    assert listed["lead"] == "28 tensors, 28 with a role."
    assert listed["tensors"] == ws.open_model(TWO_LAYERS).tensors.as_json()
    text = run("inspect", TWO_LAYERS, "--tensors").stdout
    assert "transformer.h.1.mlp.c_fc.weight" in text and "transposed (in, out)" in text
    bare = json.loads(run("inspect", TWO_LAYERS, "--json").stdout)
    assert bare["tensors"] == listed["tensors"]
    assert run("inspect", TWO_LAYERS, "--check", "--json").exit_code == 2
    assert run("inspect", TWO_LAYERS, "--check", "--tensors").exit_code == 2


def test_tensors_of_an_unknown_family_keep_their_names(tmp_path: Path) -> None:
    save_file({"novel.weight": np.ones((2, 3), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "novel"}')
    listed = json.loads(run("inspect", tmp_path, "--tensors", "--json").stdout)
    assert "unknown model_type 'novel'" in listed["lead"]
    assert [(tensor["role"], tensor["stored"]) for tensor in listed["tensors"]] == [("novel.weight", UNNAMED)]


MIXTURES = {
    "mixtral": {"num_local_experts": 2}, "qwen2_moe": {}, "qwen3_moe": {}, "qwen3_next": {}, "gpt_oss": {},
    "deepseek_v2": {"first_k_dense_replace": 1}, "deepseek_v3": {"first_k_dense_replace": 1}, "llama4": {},
    "glm4_moe": {"first_k_dense_replace": 1}, "afmoe": {}, "laguna": {},
}  # fmt: skip


@pytest.mark.check
@pytest.mark.parametrize("name", [*MIXTURES, "llama", "phi3", "gemma2", "gpt2", "gpt_neox", "falcon_grouped", "bloom"])
def test_arrays_equal_the_weights_of_the_eager_model(name: str, tmp_path: Path) -> None:
    """Experts and networks by transformers' own modules, of a model that transformers itself saves."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(FIXTURES / name, **MIXTURES.get(name, {}))
    eager = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter.normal_()
    eager.save_pretrained(tmp_path)
    model = ws.open_model(tmp_path)
    tensors = model.tensors
    ours = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "c_fc": "up", "dense_h_to_4h": "up"}
    ours |= {"dense_4h_to_h": "down", "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"}
    compared = 0
    for path, parameter in eager.named_parameters():
        weight, parts = parameter.detach().numpy(), path.split(".")
        layer = next((int(part) for part in parts if part.isdigit()), None)
        module = parts[-2] if parts[-1] == "weight" else parts[-1]
        kind = "shared_expert." if "shared_expert" in path else ""
        if layer is None or parts[-1] == "bias" or "linear_attn" in path or "self_attn.gate_proj" in path:
            continue
        if ".experts." in path and module in ("gate_up_proj", "down_proj"):
            wide = -1 if name == "gpt_oss" or name == "llama4" else -2
            if wide == -1:  # (experts, in, out)
                weight = weight.swapaxes(-1, -2)
            if module == "down_proj":
                expected = {"down": weight}
            elif name == "gpt_oss":
                expected = {"gate": weight[:, ::2], "up": weight[:, 1::2]}
            else:
                expected = dict(zip(("gate", "up"), np.split(weight, 2, axis=1), strict=True))
            for role, stacked in expected.items():
                for expert, w in enumerate(stacked):
                    np.testing.assert_array_equal(tensors[f"layer {layer} expert {expert} {role}"].array(), w, path)
                    compared += 1
        elif module == "gate_up_proj":
            gate, up = np.split(weight, 2)
            np.testing.assert_array_equal(tensors[f"layer {layer} gate"].array(), gate)
            np.testing.assert_array_equal(tensors[f"layer {layer} up"].array(), up)
            compared += 2
        elif module in ours and not (name.startswith("deepseek") and module == "q_proj") and weight.ndim == 2:
            if name == "gpt2":
                weight = weight.T
            if name == "qwen3_next" and module == "q_proj":
                continue  # with the output's gate, which the layout splits
            np.testing.assert_array_equal(tensors[f"layer {layer} {kind}{ours[module]}"].array(), weight, path)
            compared += 1
        elif "router" in path or path.endswith("mlp.gate.weight"):
            np.testing.assert_array_equal(tensors[f"layer {layer} router"].array(), weight, path)
            compared += 1
    assert compared >= model.config.n_layers
    unnamed = [tensor.name for tensor in tensors if tensor.role == tensor.name]
    assert not [each for each in unnamed if "linear_attn" not in each]

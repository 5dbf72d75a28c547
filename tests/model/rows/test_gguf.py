"""GGUF files written by the gguf package, against the weights that went into them."""

import json
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightscope as ws
from tests.support.commands import run
from tests.support.files import write
from weightscope.checkpoint import ggml_blocks
from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.checkpoint.config import Config
from weightscope.checkpoint.gguf import GRIDS
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.core.errors import CheckpointError
from weightscope.model.config.computed import differences, stated
from weightscope.model.config.effects import NONE
from weightscope.model.config.reading import as_published, decide
from weightscope.model.model import Model
from weightscope.model.rows import gguf as gguf_rows
from weightscope.model.rows.gguf import (
    RestoredTensor,
    Undo,
    _llama3_scaling,
    _of_stack,
    _scalars,
    flat,
    logarithm,
    one_channel,
)
from weightscope.model.rows.table import FAMILIES

gguf = pytest.importorskip("gguf")


def opened(path: Path) -> Checkpoint:
    """The file as the checkpoint that it was made of."""
    return as_published(open_checkpoint(path))


RANDOM = np.random.default_rng(0)
D, HEADS, KV_HEADS, VOCABULARY, LAYERS = 64, 4, 2, 96, 2


def permuted(weights: np.ndarray, n_heads: int) -> np.ndarray:
    """What llama.cpp's convert_hf_to_gguf.py does to Q and K (LlamaModel.permute)."""
    return (
        weights.reshape(n_heads, 2, weights.shape[0] // n_heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def hugging_face_weights(biases: bool = False) -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, D), "model.norm.weight": (D,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", D), ("k", D * KV_HEADS // HEADS), ("v", D * KV_HEADS // HEADS), ("o", D)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, D)
            if biases and name != "o":
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
        shapes[prefix + "input_layernorm.weight"] = shapes[prefix + "post_attention_layernorm.weight"] = (D,)
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (2 * D, D) for name in ("gate", "up")}
        shapes[prefix + "mlp.down_proj.weight"] = (D, 2 * D)
    return {name: RANDOM.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


GGUF_NAMES = [
    ("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("model.layers", "blk"),
    ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"), ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"),
    ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"), ("lm_head", "output"),
]  # fmt: skip


def write_gguf(
    path: Path,
    weights: dict[str, np.ndarray],
    architecture: str = "llama",
    kind: str = "F32",
    factors: np.ndarray | None = None,
    least_dimensions: int = 2,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(D)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_feed_forward_length(2 * D)
    writer.add_context_length(128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_bos_token_id(1)
    writer.add_token_list([f"token {i}" for i in range(VOCABULARY)])
    for name, w in weights.items():
        if architecture == "llama" and "q_proj" in name:
            w = permuted(w, HEADS)
        if architecture == "llama" and "k_proj" in name:
            w = permuted(w, KV_HEADS)
        for theirs, ggml in GGUF_NAMES:
            name = name.replace(theirs, ggml)
        quantised = gguf.GGMLQuantizationType[kind if w.ndim >= least_dimensions else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(w, quantised), raw_dtype=quantised)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_parts_of_gguf_weights_equal_the_originals(tmp_path: Path) -> None:
    weights = hugging_face_weights(biases=True)
    checkpoint = opened(write_gguf(tmp_path / "model.gguf", weights))
    assert set(checkpoint) == set(weights)
    for name, w in weights.items():
        np.testing.assert_array_equal(checkpoint[name].rows(3, 9), w[3:9])
        np.testing.assert_array_equal(np.concatenate([block for _, block in checkpoint[name].blocks(7)]), w)
    assert checkpoint.nbytes == sum(w.nbytes for w in weights.values())


@pytest.mark.parametrize(("architecture", "biases"), [("llama", True), ("qwen3", False)])
def test_packed_gguf_tensors_have_the_roles_of_their_originals(architecture: str, biases: bool, tmp_path: Path) -> None:
    weights = hugging_face_weights(biases)
    converted = ws.open_model(write_gguf(tmp_path / "model.gguf", weights, architecture, kind="Q8_0"))
    (tmp_path / "original").mkdir()
    save_file(weights, tmp_path / "original" / "model.safetensors")
    (tmp_path / "original" / "config.json").write_text(json.dumps({**converted.checkpoint.config}))
    original = ws.open_model(tmp_path / "original")
    assert sorted(converted.tensors.labels) == sorted(original.tensors.labels)
    for label in original.tensors.labels:
        ours, theirs = (model.tensors[label] for model in (converted, original))
        assert (ours.role, ours.layer, ours.shape) == (theirs.role, theirs.layer, theirs.shape)
        np.testing.assert_allclose(ours.array(), theirs.array(), atol=np.abs(theirs.array()).max() / 100, rtol=0)
    assert original.tensors["layer 0 q"].stored == "rotary halves"
    pairs = "neighbours" if architecture == "llama" else "halves"
    assert converted.tensors["layer 0 q"].stored == f"packed Q8_0 (GGUF), rotary {pairs}"


MLX = Path(__file__).parents[2] / "fixtures" / "mlx" / "mixed"  # a Llama of these sizes
PARTS = ("q", "k", "v", "gate", "up")


def fuse(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A Llama's weights as Phi-3 stores them."""
    replaced = tuple(f"{part}_proj.weight" for part in PARTS)
    fused = {name: w for name, w in weights.items() if not name.endswith(replaced)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for module, parts in (("self_attn.qkv_proj", PARTS[:3]), ("mlp.gate_up_proj", PARTS[3:])):
            stem = prefix + module.partition(".")[0]
            fused[f"{prefix}{module}.weight"] = np.concatenate([weights[f"{stem}.{x}_proj.weight"] for x in parts])
    return fused


def test_one_model_in_four_containers_has_the_same_roles(tmp_path: Path) -> None:
    """MLX, as mlx-lm wrote it; its values as separate and as fused safetensors, and as GGUF."""
    packed = ws.open_model(MLX)
    weights = {name: tensor.read() for name, tensor in packed.checkpoint.items()}
    config = {key: value for key, value in packed.checkpoint.config.items() if not key.startswith("quantization")}
    sources = [write_gguf(tmp_path / "model.gguf", weights)]
    for kind, written in (("llama", weights), ("phi3", fuse(weights))):
        (tmp_path / kind).mkdir()
        save_file(written, tmp_path / kind / "model.safetensors")
        (tmp_path / kind / "config.json").write_text(json.dumps({**config, "model_type": kind}))
        sources.append(tmp_path / kind)
    for source in sources:
        tensors = ws.open_model(source).tensors
        assert {label for label in tensors.labels if "+" not in label} == {*packed.tensors.labels}
        for label in packed.tensors.labels:
            ours, theirs = packed.tensors[label], tensors[label]
            assert (ours.role, ours.layer, ours.shape) == (theirs.role, theirs.layer, theirs.shape)
            np.testing.assert_array_equal(ours.array(), theirs.array(), label)


def test_the_config_is_what_config_json_would_say(tmp_path: Path) -> None:
    config = opened(write_gguf(tmp_path / "model.gguf", hugging_face_weights())).config
    assert config == {
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "hidden_size": D,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": 2 * D,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "bos_token_id": 1,
        "vocab_size": VOCABULARY,
        "attention_bias": False,
        "tie_word_embeddings": True,
    }


def test_unconverted_checkpoint_keeps_ggml_names_and_keys(tmp_path: Path) -> None:
    weights = hugging_face_weights()
    file = open_checkpoint(write_gguf(tmp_path / "model.gguf", weights))
    assert file.config["general.architecture"] == "llama" and file.config["llama.block_count"] == LAYERS
    w = weights["model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(file["blk.1.attn_q.weight"].read(), permuted(w, HEADS))


def test_impossible_metadata_error_names_the_gguf_file(tmp_path: Path) -> None:
    """There is no config.json that an error could mean."""
    path = write_gguf(tmp_path / "model.gguf", hugging_face_weights())
    checkpoint = opened(path)
    values = dict(checkpoint.config) | {"rope_theta": -1.0}
    with pytest.raises(CheckpointError, match=r"^model\.gguf: 'rope_theta' is -1\.0; a number from 1"):
        Model.of_row(checkpoint.with_config(values), decide(checkpoint).row)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_types_are_read_as_the_package_reads_them(kind: str, tmp_path: Path) -> None:
    weights = hugging_face_weights()
    path = write_gguf(tmp_path / "model.gguf", weights, kind=kind)
    checkpoint, reader = opened(path), gguf.GGUFReader(path)
    theirs = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    np.testing.assert_array_equal(checkpoint["model.embed_tokens.weight"].read(), theirs["token_embd.weight"])
    np.testing.assert_array_equal(checkpoint["model.embed_tokens.weight"].rows(5, 8), theirs["token_embd.weight"][5:8])
    for name, n_heads in (("q", HEADS), ("k", KV_HEADS)):
        tensor = checkpoint[f"model.layers.1.self_attn.{name}_proj.weight"]
        np.testing.assert_array_equal(permuted(tensor.read(), n_heads), theirs[f"blk.1.attn_{name}.weight"])
        assert tensor.dtype == kind


def test_rows_of_a_vector_in_blocks_are_its_elements(tmp_path: Path) -> None:
    weights = {"model.norm.weight": RANDOM.standard_normal(D).astype(np.float32)}
    path = write_gguf(tmp_path / "model.gguf", weights, kind="Q8_0", least_dimensions=1)
    tensor = opened(path)["model.norm.weight"]
    assert tensor.dtype == "Q8_0"
    np.testing.assert_array_equal(np.concatenate([block for _, block in tensor.blocks(7)]), tensor.read())


def test_an_unchecked_projection_is_read_as_it_is(tmp_path: Path) -> None:
    weights = hugging_face_weights()
    name = "model.layers.0.self_attn.q_proj.weight"
    weights[name][3, 4] = np.nan
    tensor = opened(write_gguf(tmp_path / "model.gguf", weights))[name]
    np.testing.assert_array_equal(tensor.unchecked(set()).read(), weights[name])
    with pytest.raises(CheckpointError, match="holds 1 value that is not finite"):
        tensor.read()


def llama3_factors(factor: float, theta: float = 500000.0, n: int = D // HEADS // 2) -> np.ndarray:
    """llama.cpp's convert_hf_to_gguf.py, one frequency at a time."""
    factors = []
    for i in range(n):
        wavelength = 2 * np.pi * theta ** (i / n)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_scaling_is_recognised_by_its_factors(factor: float, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", hugging_face_weights(), factors=llama3_factors(factor))
    scaling = opened(path).config["rope_scaling"]
    assert scaling == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in opened(path)


def test_factors_that_are_not_llama_3s_are_taken_as_they_are(tmp_path: Path) -> None:
    factors = llama3_factors(8.0)
    factors[2] *= 1.5
    scaling = opened(write_gguf(tmp_path / "model.gguf", hugging_face_weights(), factors=factors)).config[
        "rope_scaling"
    ]
    assert scaling["rope_type"] == "longrope" and scaling["attention_factor"] == 1
    np.testing.assert_array_equal(np.float32(scaling["short_factor"]), factors)
    assert scaling["long_factor"] == scaling["short_factor"]


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", hugging_face_weights())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cut short"):
        opened(path)


def test_codebooks_alone_need_the_gguf_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"model.norm.weight": RANDOM.standard_normal((2, 256)).astype(np.float32)}
    path = write_gguf(tmp_path / "model.gguf", weights, kind="Q8_0")
    text = path.read_bytes()
    entry = text.rindex(struct.pack("<I", gguf.GGMLQuantizationType.Q8_0))
    blocks = struct.pack("<I", gguf.GGMLQuantizationType.IQ2_XS)
    (tmp_path / "codebook.gguf").write_bytes(text[:entry] + blocks + text[entry + 4 :])
    monkeypatch.setitem(sys.modules, "gguf", None)
    ggml_blocks._entries.cache_clear()
    assert open_checkpoint(path)["output_norm.weight"].read().shape == (2, 256)
    with pytest.raises(CheckpointError, match=r"codebook\.gguf: tensor 'output_norm.weight' .*pip install gguf$"):
        open_checkpoint(tmp_path / "codebook.gguf")["output_norm.weight"].read()


def test_what_a_gguf_file_cannot_say_is_not_compared(tmp_path: Path) -> None:
    """Several model_types share its architecture; its keys tell which."""
    weights = hugging_face_weights()
    write_gguf(tmp_path / "a.gguf", weights)
    a = ws.open_model(tmp_path / "a.gguf")
    config = {key: value for key, value in a.checkpoint.config.items() if value is not None}
    folder = tmp_path / "b"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    for more, keys in (
        ({"model_type": "mistral", "hidden_act": "gelu"}, []),
        ({"rms_norm_eps": 0.5}, ["rms_norm_eps"]),
    ):
        (folder / "config.json").write_text(json.dumps(config | more))
        b = ws.open_model(folder)
        changes = differences(stated(b.checkpoint, b.row), stated(a.checkpoint, a.row))
        assert [change.key for change in changes if change.effect != NONE] == keys


@pytest.mark.parametrize("kind", sorted(kind for kind, stored in GRIDS.items() if isinstance(stored.levels, int)))
def test_values_of_a_block_lie_evenly_between_its_ends(kind, tmp_path):
    """Of random bits, too, each value is one of the levels that the block's own scales and minima span."""
    stored = gguf.GGMLQuantizationType[kind]
    rng, width = np.random.default_rng(3), gguf.GGML_QUANT_SIZES[stored][1]
    blocks = rng.integers(0, 256, (400, width), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("x", blocks, raw_dtype=stored)
    for write_part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write_part()
    writer.close()
    tensor = open_checkpoint(tmp_path / "model.gguf").unchecked()["x"]
    first, last, levels = tensor.ends()
    values = tensor.read().astype(np.float64)
    first, last = (
        np.repeat(each.read().astype(float), values.shape[1] // each.shape[1], axis=1) for each in (first, last)
    )
    spread = np.isfinite(values + first + last) & (np.abs(last - first) > 1e-3 * np.abs(first))
    place = ((values - first) * (levels - 1))[spread] / (last - first)[spread]
    levels_seen = set(np.rint(place))
    if kind == "TQ2_0":  # two bits hold a fourth code, which ggml does not write
        levels_seen.discard(3.0)
    assert np.abs(place - np.rint(place)).max() < 0.01
    assert levels_seen == set(range(levels))


def test_feed_forward_networks_of_gguf_are_paired(tmp_path: Path) -> None:
    """`compare --all` says so of the whole file."""
    weights = hugging_face_weights()
    converted = write_gguf(tmp_path / "model.gguf", weights)
    config = dict(ws.open_model(converted).checkpoint.config)
    (tmp_path / "original").mkdir()
    save_file(weights, tmp_path / "original" / "model.safetensors")
    (tmp_path / "original" / "config.json").write_text(json.dumps(config))
    shown = run("compare", converted, tmp_path / "original", "--all", "--out", tmp_path / "out")
    assert shown.exit_code == 0, shown.output
    assert f"Identical: all {len(weights)} compared tensors." in shown.output


@pytest.mark.parametrize(
    ("undo", "before", "after"),
    [
        (one_channel, (6, 4), (6, 1, 4)), (flat, (6, 1), (6,)), (flat, (2, 3), (6,)), (logarithm, (6, 1), (6,)),
        (logarithm, (6, 4), (6, 4)),
    ],
)  # fmt: skip
def test_what_converting_does_to_state_spaces_is_undone(
    undo: Undo, before: tuple[int, ...], after: tuple[int, ...], tmp_path: Path
) -> None:
    """The values have the shape that is claimed, whole and by rows."""
    values = -np.arange(1, 1 + np.prod(before), dtype=np.float32).reshape(before)
    stored = open_checkpoint(write(tmp_path / "a.safetensors", {"a": values}))["a"]
    restored = RestoredTensor(stored, undo, 1, 1)
    expected = np.log(-values.astype(np.float64)).astype(np.float32) if undo is logarithm else values
    np.testing.assert_array_equal(restored.read(), expected.reshape(after))
    np.testing.assert_array_equal(restored.rows(1, 2), expected.reshape(after)[1:2])
    assert restored.shape == after


@pytest.mark.parametrize("original", [8, 64, 8192])
def test_length_of_text_that_llama3s_rotations_are_for_is_read_from_their_factors(original: int) -> None:
    """A pair that is scaled in part tells it; transformers' formula makes the factors."""
    theta, factor, pairs = 10000.0, 8.0, 32
    wavelengths = 2 * np.pi * theta ** (np.arange(pairs) / pairs)
    smooth = np.clip((original / wavelengths - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    scaling = _llama3_scaling(factors, Config({"rope_theta": theta}, "a.gguf"))
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", factor)
    assert scaling["original_max_position_embeddings"] == original


APERTUS = FAMILIES.row("apertus")


@pytest.mark.parametrize("listed", [None, [0.5], [0.5, 1], ["a", "b"], 3, [0.5] * 3])
def test_list_of_scalars_that_does_not_fit_the_layers_is_refused(listed: object, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "a.safetensors", {"a": np.zeros(1, np.float32)}))
    keys = {key: [0.5, 0.25] for key in APERTUS.gguf.scalars} | {"xielu.beta": listed}
    with pytest.raises(CheckpointError, match=r"xielu.beta.*a list of 2 numbers"):
        _scalars(checkpoint.with_config(keys), APERTUS, APERTUS.gguf, 2)
    tensors = _scalars(checkpoint.with_config(keys | {"xielu.beta": 0.5}), APERTUS, APERTUS.gguf, 2)
    assert tensors["model.layers.1.mlp.act_fn.alpha_n"].read().tolist() == [0.25]
    assert tensors["model.layers.1.mlp.act_fn.beta"].read().shape == ()


def test_names_of_an_encoder_and_a_decoder_are_told_apart() -> None:
    """The names of the gguf package's own map."""
    row = FAMILIES.row("t5.decoder")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5, 12)
    for name in (
        "encoder.block.11.layer.0.SelfAttention.q", "encoder.block.3.layer.1.DenseReluDense.wi_0",
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias", "decoder.block.2.layer.1.EncDecAttention.o",
        "decoder.block.2.layer.1.layer_norm", "decoder.block.2.layer.2.layer_norm", "encoder.final_layer_norm",
    ):  # fmt: skip
        assert _of_stack(f"{names.get_name(name)}.weight", row, row.gguf.whole) == ("", f"{name}.weight")
    assert _of_stack("token_embd.weight", row, row.gguf.whole) is None


GEMMA_4 = {
    "attention.key_length": 8, "attention.key_length_swa": 4, "rope.dimension_count_swa": 4,
    "attention.sliding_window_pattern": [True, False], "attention.head_count_kv": [2, 1],
}  # fmt: skip
MINICPM = {"block_count": 2, "embedding_length": 8, "residual_scale": 1.0, "logit_scale": 2.0}
MINISTRAL = {"attention.temperature_scale": 0.1, "rope.scaling.type": "yarn"}


def read_by(function: Callable[..., dict[str, Any]], keys: Mapping[str, Any], names: Sequence[str] = ()) -> Any:
    """What a function makes of an architecture's own keys."""
    return function(Config({"own": keys}, "model.gguf"), names)


def test_sizes_and_scales_of_newer_headers() -> None:
    """Gemma 4's heads by type, a removed temperature is 0, MiniCPM's scales are its config's."""
    gemma = read_by(gguf_rows.gemma4_config, GEMMA_4, ["rope_freqs.weight", "blk.1.attn_k.weight"])
    assert gemma["head_dim"] == 4 and gemma["num_key_value_heads"] == 2 and gemma["attention_k_eq_v"]
    assert gemma["per_layer_config"] == {"1": {"head_dim": 8, "num_key_value_heads": 1}}
    assert read_by(gguf_rows.minicpm_config, MINICPM) == {"scale_depth": 1.4142135, "dim_model_base": 4.0}
    assert read_by(gguf_rows.ministral_config, MINISTRAL)["rope_weights"]["llama_4_scaling_beta"] == 0.1
    without = {key: value for key, value in MINISTRAL.items() if "temperature" not in key}
    assert read_by(gguf_rows.ministral_config, without)["rope_weights"]["llama_4_scaling_beta"] == 0.0


@pytest.mark.parametrize(
    ("function", "keys"),
    [
        (gguf_rows.gemma4_config, GEMMA_4),  # no factors of rotation
        (gguf_rows.gemma4_config, GEMMA_4 | {"attention.sliding_window_pattern": None}),
        (gguf_rows.gemma4_config, GEMMA_4 | {"rope.dimension_count_swa": 2}),
        (gguf_rows.minicpm_config, MINICPM | {"logit_scale": 0.0}),
        (gguf_rows.minicpm_config, {**MINICPM, "residual_scale": "1"}),
        (gguf_rows.ministral_config, MINISTRAL | {"rope.scaling.type": "linear"}),
        (gguf_rows.step_config, {"attention.key_length": 8}),
    ],
)
def test_odd_values_of_newer_headers_are_refused(function: Callable[..., Any], keys: Mapping[str, Any]) -> None:
    """Nothing is guessed in their stead."""
    names = [] if keys is GEMMA_4 else ["rope_freqs.weight"]
    with pytest.raises(CheckpointError):
        read_by(function, keys, names)

"""A Qwen3.5 of random numbers with a linear layer and an attention layer, and its copies as mlx-lm and llama.cpp write
them: the converters' own steps, one by one.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

KEYS, PER_KEY, KEY, VALUE, WIDTH, TAPS = 2, 3, 4, 8, 32, 4  # key heads, value heads of each, their widths
VALUES = KEYS * PER_KEY
FIRST = 2 * KEYS * KEY  # rows of queries and keys
Arrays = dict[str, np.ndarray]
CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": KEYS,
    "linear_num_value_heads": VALUES,
    "linear_key_head_dim": KEY,
    "linear_value_head_dim": VALUE,
    "linear_conv_kernel_dim": TAPS,
    "vocab_size": 40,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
}
LINEAR = "model.layers.0.linear_attn."


def qwen35() -> Arrays:
    """Tensors as transformers saves them."""
    rng = np.random.default_rng(5)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (40, WIDTH),
        "lm_head.weight": (40, WIDTH),
        "model.norm.weight": (WIDTH,),
        **{
            LINEAR + name: shape
            for name, shape in {
                "in_proj_qkv.weight": (FIRST + VALUES * VALUE, WIDTH),
                "in_proj_z.weight": (VALUES * VALUE, WIDTH),
                "in_proj_b.weight": (VALUES, WIDTH),
                "in_proj_a.weight": (VALUES, WIDTH),
                "conv1d.weight": (FIRST + VALUES * VALUE, 1, TAPS),
                "A_log": (VALUES,),
                "dt_bias": (VALUES,),
                "norm.weight": (VALUE,),
                "out_proj.weight": (WIDTH, VALUES * VALUE),
            }.items()
        },
        "model.layers.1.self_attn.q_proj.weight": (128, WIDTH),
        "model.layers.1.self_attn.k_proj.weight": (32, WIDTH),
        "model.layers.1.self_attn.v_proj.weight": (32, WIDTH),
        "model.layers.1.self_attn.o_proj.weight": (WIDTH, 64),
        "model.layers.1.self_attn.q_norm.weight": (16,),
        "model.layers.1.self_attn.k_norm.weight": (16,),
    }
    for layer in range(2):
        stem = f"model.layers.{layer}."
        shapes |= {f"{stem}{norm}_layernorm.weight": (WIDTH,) for norm in ("input", "post_attention")}
        shapes |= {f"{stem}mlp.{name}_proj.weight": (48, WIDTH) for name in ("gate", "up")}
        shapes[f"{stem}mlp.down_proj.weight"] = (WIDTH, 48)
    made = {name: rng.standard_normal(shape).astype(np.float32) / 4 for name, shape in shapes.items()}
    made[LINEAR + "A_log"] = np.log(rng.uniform(0.1, 16, VALUES)).astype(np.float32)
    return made


def saved(tensors: Mapping[str, np.ndarray], folder: Path, form: str = "pt") -> Path:
    """A folder of these tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(arrays, folder / "model.safetensors", metadata={"format": form})
    return folder


def by_mlx(tensors: Mapping[str, np.ndarray]) -> Arrays:
    """mlx_lm.models.qwen3_5, TextModel.sanitize: channels of convolutions last, norms with 1 more."""
    norms = (".input_layernorm.weight", ".post_attention_layernorm.weight", "model.norm.weight", ".q_norm.weight",
             ".k_norm.weight")  # fmt: skip
    made = dict(tensors)
    for name, array in tensors.items():
        if "conv1d.weight" in name and array.shape[-1] != 1:
            made[name] = np.moveaxis(array, 2, 1)
        if name.endswith(norms) and array.ndim == 1:
            made[name] = array + np.float32(1)
    return made


def tiled(array: np.ndarray, axis: int = 0, first: int = 0) -> np.ndarray:
    """_LinearAttentionVReorderBase._reorder_v_heads: grouped by key head to tiled, after `first` rows."""
    rows = np.moveaxis(array, axis, 0)
    heads = rows[first:].reshape(KEYS, PER_KEY, -1, *rows.shape[1:]).swapaxes(0, 1)
    return np.moveaxis(np.concatenate([rows[:first], heads.reshape(rows[first:].shape)]), 0, axis)


def by_llama_cpp(tensors: Mapping[str, np.ndarray]) -> Arrays:
    """conversion.qwen, _LinearAttentionVReorderBase and Qwen3NextModel.modify_tensors, without their names."""
    made = {}
    for name, array in tensors.items():
        if ".in_proj_qkv." in name:
            array = tiled(array, 0, FIRST)
        elif any(part in name for part in (".in_proj_z.", ".in_proj_b.", ".in_proj_a.", ".A_log", ".dt_bias")):
            array = tiled(array)
        elif ".conv1d" in name:
            array = tiled(array.squeeze(), 0, FIRST)
        elif ".out_proj." in name:
            array = tiled(array, 1)
        if name.endswith(".A_log"):
            array = -np.exp(array)
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            array = array + np.float32(1)
        made[name] = array
    return made


def gguf_file(tensors: Mapping[str, np.ndarray], path: Path) -> Path:
    """A GGUF file of tensors as llama.cpp changes them, under ggml's names."""
    import gguf

    writer, architecture = gguf.GGUFWriter(path, "qwen35"), "qwen35"
    numbers = {
        "block_count": 2, "embedding_length": WIDTH, "feed_forward_length": 48, "context_length": 64,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16,
        "attention.value_length": 16, "ssm.conv_kernel": TAPS, "ssm.state_size": KEY, "ssm.group_count": KEYS,
        "ssm.time_step_rank": VALUES, "ssm.inner_size": VALUES * VALUE, "full_attention_interval": 2,
        "rope.dimension_count": 4,
    }  # fmt: skip
    for key, value in numbers.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_array(f"{architecture}.attention.recurrent_layers", [True, False])
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{architecture}.rope.freq_base", 10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(40)])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35, 2)
    for name, array in tensors.items():
        ggml = names.get_name(name.replace(".dt_bias", ".dt_proj.bias"), try_suffixes=(".weight", ".bias"))
        assert ggml, name
        writer.add_tensor(ggml, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

"""A large model's files as a Hub serves them; no file ever exists as a whole."""

import json

import numpy as np

from tests.support.hub_server import Hole

GB = 10**9


def shape_of_70b() -> dict[str, bytes | Hole]:
    """The files of a Llama of 70 billion parameters in 30 shards: headers that are true, weights that are zeros."""
    d, kv, hidden, vocabulary, layers = 8192, 1024, 28672, 128256, 80
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, d)}
    for layer in range(layers):
        of_layer = {"input_layernorm": (d,), "mlp.down_proj": (d, hidden), "mlp.gate_proj": (hidden, d)}
        of_layer |= {"mlp.up_proj": (hidden, d), "post_attention_layernorm": (d,), "self_attn.k_proj": (kv, d)}
        of_layer |= {"self_attn.o_proj": (d, d), "self_attn.q_proj": (d, d), "self_attn.v_proj": (kv, d)}
        tensors |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    tensors |= {"model.norm.weight": (d,), "lm_head.weight": (vocabulary, d)}
    shards: list[dict[str, dict[str, object]]] = [{}]
    end = 0
    for name, shape in tensors.items():
        size = 2 * int(np.prod(shape))
        if end + size > 4.9 * GB:
            shards.append({})
            end = 0
        shards[-1][name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    files: dict[str, bytes | Hole] = {"config.json": json.dumps({"model_type": "llama", "hidden_size": d}).encode()}
    weight_map = {}
    for number, header in enumerate(shards, 1):
        text, file = json.dumps(header).encode(), f"model-{number:05}-of-{len(shards):05}.safetensors"
        size = max(entry["data_offsets"][1] for entry in header.values())  # type: ignore[index]
        files[file] = Hole(len(text).to_bytes(8, "little") + text, 8 + len(text) + size)
        weight_map |= dict.fromkeys(header, file)
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    return files

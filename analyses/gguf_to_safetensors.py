"""A llama-type GGUF file as a folder that weightscope opens: its attention, norm and embedding matrices, dequantised.

    python analyses/gguf_to_safetensors.py MODEL.gguf FOLDER [--whole]

llama.cpp stores the rows of q and k permuted, so that the pairs that turn together are neighbours; here they are put
back half a head apart, as Hugging Face has them. Needs the `gguf` package.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
}
MLP = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def halves_apart(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k with pairs (2j, 2j + 1) of a head moved to (j, j + d'/2).

    Parameters
    ----------
    rows : (heads d', d) array
    heads : int
    """
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def config_of(reader: GGUFReader) -> dict[str, Any]:
    """The file's metadata as a config.json of the llama family."""

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    if value("general.architecture") != "llama":
        raise SystemExit(f"this is a {value('general.architecture')} file; only llama ones are converted")
    return {
        "model_type": "llama",
        "hidden_size": value("llama.embedding_length"),
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": value("llama.attention.head_count"),
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "rms_norm_eps": value("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": value("llama.rope.freq_base"),
        "max_position_embeddings": value("llama.context_length"),
        "vocab_size": value("llama.vocab_size"),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
    }


def tensors_of(reader: GGUFReader, config: dict[str, Any], names: dict[str, str]) -> Iterator[tuple[str, np.ndarray]]:
    """Hugging Face's names and float32 matrices of the modules in `names` and of what stands outside the layers."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        block, _, rest = tensor.name.removeprefix("blk.").partition(".")
        module = rest.removesuffix(".weight")
        if tensor.name in OUTSIDE:
            yield OUTSIDE[tensor.name], dequantize(tensor.data, tensor.tensor_type)
        elif tensor.name.startswith("blk.") and module in names:
            rows = dequantize(tensor.data, tensor.tensor_type)
            rows = halves_apart(rows, heads[module]) if module in heads else rows
            yield f"model.layers.{block}.{names[module]}.weight", np.ascontiguousarray(rows)


def convert(gguf: Path, folder: Path, *, whole: bool = False) -> None:
    """Write config.json and model.safetensors of a GGUF file into a folder.

    Parameters
    ----------
    gguf, folder : Path
    whole : bool
        The MLPs too, so that transformers can run the model.
    """
    reader = GGUFReader(gguf)
    config = config_of(reader)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(tensors_of(reader, config, NAMES | MLP if whole else NAMES))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path, metavar="MODEL.gguf")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--whole", action="store_true", help="the MLPs too, so that transformers can run the model")
    convert(**vars(parser.parse_args()))

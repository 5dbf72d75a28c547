"""Weights of a few families under one set of names, so that what is done to a checkpoint is written once.

`read_weights` renames the tensors of a checkpoint to parts, whose matrices are (in, out); `write_weights` and
`write_gguf` name them back. Parts of a layer: norm_1, q, k, v, o, norm_2, gate, up and down, each with .w and perhaps
.b. Outside layers: tokens, positions, final_norm, unembedding.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import weightscope as ws
from weightscope.core.files import Folder

CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
Part = tuple[int | None, str]  # the layer, None outside layers, and the part
NORMS = ("norm_1", "norm_2", "norm_3", "norm_4")
READERS, WRITERS = ("q.w", "k.w", "v.w", "gate.w", "up.w"), ("o.w", "down.w")  # of the residual stream
STREAM_AXIS = {
    **dict.fromkeys((*READERS, "pooler.w"), 0), **dict.fromkeys(WRITERS, 1), "o.b": 0, "down.b": 0,
    **{f"{norm}.{kind}": 0 for norm in (*NORMS, "final_norm", "input_norm") for kind in "wb"},
    **dict.fromkeys(("tokens", "positions", "types", "unembedding"), 1),
}  # fmt: skip


@dataclass(frozen=True)
class Dialect:
    """How a family names its parts, and the keys of its config."""

    layer: str
    modules: dict[str, str]  # parts of a layer without .w or .b
    outside: dict[str, str]
    keys: dict[str, str]
    prefixes: tuple[str, ...] = ("",)
    transposed: bool = True  # matrices are stored as (out, in)
    fused: str = ""  # module of queries, keys and values in one
    norms_before: bool = True
    rms: bool = False
    rope: bool = False
    offset: float = 0.0  # of the norms' weights
    kept: tuple[str, ...] = ()  # parts outside layers that have no orientation


_LLAMA_KEYS = {
    "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "vocabulary": "vocab_size",
}  # fmt: skip
_LLAMA = Dialect(
    layer="layers.{i}.",
    modules={
        "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm",
        **{part: f"self_attn.{part}_proj" for part in "qkvo"},
        **{part: f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    },
    outside={"tokens": "embed_tokens.weight", "final_norm.w": "norm.weight", "unembedding": "lm_head.weight"},
    keys=_LLAMA_KEYS, prefixes=("model.",), rms=True, rope=True,
)  # fmt: skip
_BERT = Dialect(
    layer="encoder.layer.{i}.",
    modules={
        **{part: f"attention.self.{name}" for part, name in (("q", "query"), ("k", "key"), ("v", "value"))},
        "o": "attention.output.dense", "norm_1": "attention.output.LayerNorm", "norm_2": "output.LayerNorm",
        "up": "intermediate.dense", "down": "output.dense",
    },
    outside={
        "tokens": "embeddings.word_embeddings.weight", "positions": "embeddings.position_embeddings.weight",
        "types": "embeddings.token_type_embeddings.weight", "input_norm.w": "embeddings.LayerNorm.weight",
        "input_norm.b": "embeddings.LayerNorm.bias", "pooler.w": "pooler.dense.weight",
    },
    keys={**_LLAMA_KEYS, "kv_heads": "num_attention_heads"}, norms_before=False,
    kept=("pooler.dense.bias",),
)  # fmt: skip
DIALECTS = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "gemma3": replace(
        _LLAMA,
        modules=_LLAMA.modules | {
            "norm_2": "pre_feedforward_layernorm", "norm_3": "post_attention_layernorm",
            "norm_4": "post_feedforward_layernorm", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
        },
        offset=1.0,
    ),
    "gpt2": Dialect(
        layer="h.{i}.",
        modules={"norm_1": "ln_1", "norm_2": "ln_2", "o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"},
        outside={
            "tokens": "wte.weight", "positions": "wpe.weight", "final_norm.w": "ln_f.weight",
            "final_norm.b": "ln_f.bias", "unembedding": "lm_head.weight",
        },
        keys={"layers": "n_layer", "width": "n_embd", "heads": "n_head", "kv_heads": "n_head", "head_dim": "head_dim",
              "vocabulary": "vocab_size"},
        prefixes=("transformer.",), transposed=False, fused="attn.c_attn",
    ),
    "mixtral": _LLAMA,
    "qwen2_moe": _LLAMA,
    "bert": _BERT,
    "mpnet": replace(
        _BERT,
        modules=_BERT.modules | {
            **{part: f"attention.attn.{part}" for part in "qkvo"}, "norm_1": "attention.LayerNorm",
        },
        kept=(*_BERT.kept, "encoder.relative_attention_bias.weight"),
    ),
}  # fmt: skip
DIALECTS["gemma3_text"] = DIALECTS["gemma3"]


@dataclass(frozen=True)
class Weights:
    """A checkpoint in memory: its parts, and the base's layer that each layer came from."""

    config: dict[str, Any]
    parts: dict[Part, np.ndarray]
    dtype: str  # as stored: float32, float16, bfloat16
    came_from: tuple[int, ...]
    names: dict[Part, str] = field(default_factory=dict)  # where they differ from the dialect's
    shards: int = 1
    seed: tuple[int, ...] = ()  # further numbers that a derivation of it is drawn by

    @property
    def dialect(self) -> Dialect:
        """The names of its family."""
        return DIALECTS[self.config["model_type"]]

    def size(self, key: str) -> int:
        """One of layers, width, heads, kv_heads, head_dim, vocabulary."""
        value = self.config.get(self.dialect.keys[key])
        if value is None:
            value = self.size("width") // self.size("heads") if key == "head_dim" else self.size("heads")
        return int(value)

    def resized(self, **sizes: int) -> "Weights":
        """The same with other sizes in its config."""
        return replace(self, config=self.config | {self.dialect.keys[key]: size for key, size in sizes.items()})

    def but(self, changed: Mapping[Part, np.ndarray]) -> "Weights":
        """The same with some of its parts replaced."""
        return replace(self, parts=self.parts | {part: np.asarray(w, np.float32) for part, w in changed.items()})

    def layers(self) -> range:
        """Numbers of its layers."""
        return range(self.size("layers"))

    def within(self, *names: str) -> Iterable[tuple[Part, np.ndarray]]:
        """Those of the named parts that exist, in every layer."""
        return [((i, name), self.parts[i, name]) for i in self.layers() for name in names if (i, name) in self.parts]

    def matrices(self) -> Iterable[tuple[Part, np.ndarray]]:
        """The projections of every layer."""
        return self.within(*READERS, *WRITERS)

    def traits(self) -> set[str]:
        """What derivations may need."""
        dialect, groups = self.dialect, self.size("kv_heads")
        tests = {
            "tokens": (None, "tokens") in self.parts,
            "feed-forward": (0, "up.w") in self.parts,
            "norms before": dialect.norms_before,
            "stream": not any(part == "norm_3.w" for _, part in self.parts) and all(
                name in STREAM_AXIS or name.endswith(".b") or name in dialect.kept for _, name in self.parts
            ),
            "rms": dialect.rms and not dialect.offset,
            "free queries": (0, "q_norm.w") not in self.parts,
            "own heads": "encoder.relative_attention_bias.weight" not in {name for _, name in self.parts},
            "any head count": dialect.rope,
            "3 layers": self.size("layers") >= 3,
            "several groups": groups > 1,
            "even groups": groups >= 2 and groups % 2 == 0 and dialect.rope,
            "rows of 256": all(len(w) % 256 == 0 for _, w in self.matrices()),
            "not float16": self.dtype != "float16",
            "experts": self.config["model_type"] in ("llama", "qwen2"),
        }  # fmt: skip
        return {name for name, is_so in tests.items() if is_so}


# Reading and writing


def read_weights(source: str | Path) -> Weights:
    """Read a checkpoint of one of the DIALECTS; what is derived of it has its dtype, or float16 if it is quantised."""
    checkpoint = ws.open_model(source).checkpoint
    config = dict(checkpoint.config)
    dialect = DIALECTS[config["model_type"]]
    given = {_without(name, dialect.prefixes): tensor.read() for name, tensor in checkpoint.items()
             if not name.endswith("position_ids")}  # fmt: skip  # a buffer
    stored = next(tensor.dtype for tensor in checkpoint.values() if len(tensor.shape) > 1)
    dtype = next((dtype for dtype, code in CODES.items() if code == stored), "float16")
    depth = config[dialect.keys["layers"]]
    part_of = _parts(dialect, depth) | {name: (None, name) for name in dialect.kept}
    parts = {}
    for name, array in given.items():
        part = part_of.get(name)
        if part is None:
            raise ws.CheckpointError(f"{source}: no derivation knows the tensor {name}")
        parts[part] = array.T if _turned(part, dialect, array) else array
    weights = Weights(config, parts, dtype, tuple(range(depth)))
    return _split(weights) if dialect.fused else weights


def write_weights(weights: Weights, folder: Path) -> None:
    """Write config.json and model.safetensors, the weights in their dtype; in shards if it has several."""
    dialect = weights.dialect
    joined = _joined(weights) if dialect.fused else weights
    tensors = {}
    names = {part: name for name, part in _parts(dialect, joined.size("layers")).items()} | joined.names
    for part, array in joined.parts.items():
        stored = array.T if _turned(part, dialect, array) and part not in joined.names else array
        name = names.get(part, part[1])
        tensors[name if name.startswith("lm_head") else dialect.prefixes[0] + name] = stored
    files = Folder(folder)
    files.json("config.json", weights.config | {"dtype": weights.dtype})
    listed = sorted(tensors)
    if weights.shards == 1:
        files.bytes("model.safetensors", _bytes(tensors, listed, weights.dtype))
        return
    weight_map = {name: f"model-{1 + number % weights.shards}.safetensors" for number, name in enumerate(listed)}
    for file in sorted(set(weight_map.values())):
        files.bytes(file, _bytes(tensors, [name for name in listed if weight_map[name] == file], weights.dtype))
    files.text("model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": weight_map}))


def stored_as(array: np.ndarray, dtype: str) -> np.ndarray:
    """The bits of an array in a dtype: bfloat16 as uint16, rounded to nearest even."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(array, dtype)
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _bytes(tensors: Mapping[str, np.ndarray], names: Iterable[str], dtype: str) -> bytes:
    """The named tensors in the format of safetensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    contents, end = [], 0
    for name in names:
        array = tensors[name]
        contents.append(stored_as(array, dtype).tobytes())
        start, end = end, end + len(contents[-1])
        header[name] = {"dtype": CODES[dtype], "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *contents])


def _without(name: str, prefixes: Iterable[str]) -> str:
    return next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), name)


def _parts(dialect: Dialect, n_layers: int) -> dict[str, Part]:
    """Every name that the dialect has for a checkpoint of this depth, and its part."""
    modules = dialect.modules | ({"qkv": dialect.fused} if dialect.fused else {})
    parts: dict[str, Part] = {name: (None, part) for part, name in dialect.outside.items()}
    for i in range(n_layers):
        for part, module in modules.items():
            for end, suffix in (("w", "weight"), ("b", "bias")):
                parts[f"{dialect.layer.format(i=i)}{module}.{suffix}"] = (i, f"{part}.{end}")
    return parts


def _turned(part: Part, dialect: Dialect, array: np.ndarray) -> bool:
    """Whether the file has the transpose: matrices of linear layers, but no table of embeddings."""
    return dialect.transposed and array.ndim == 2 and part[1].endswith(".w") and "norm" not in part[1]


def _split(weights: Weights) -> Weights:
    """Queries, keys and values of one matrix, each in its own."""
    parts = dict(weights.parts)
    for i in weights.layers():
        for end in "wb":
            for part, array in zip("qkv", np.split(parts.pop((i, f"qkv.{end}")), 3, axis=-1), strict=True):
                parts[i, f"{part}.{end}"] = array
    return replace(weights, parts=parts)


def _joined(weights: Weights) -> Weights:
    parts = dict(weights.parts)
    for i in weights.layers():
        for end in "wb":
            parts[i, f"qkv.{end}"] = np.concatenate([parts.pop((i, f"{part}.{end}")) for part in "qkv"], axis=-1)
    return replace(weights, parts=parts)


def write_gguf(weights: Weights, path: Path, kind: str) -> None:
    """Write a Llama as a GGUF file, its matrices in one of the block formats (llama.cpp's convert_hf_to_gguf.py)."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(weights.size("layers"))
    writer.add_embedding_length(weights.size("width"))
    writer.add_head_count(weights.size("heads"))
    writer.add_head_count_kv(weights.size("kv_heads"))
    writer.add_feed_forward_length(weights.config["intermediate_size"])
    writer.add_context_length(weights.config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(weights.config["rms_norm_eps"])
    writer.add_token_list([f"token {i}" for i in range(weights.size("vocabulary"))])
    outside = {"tokens": "token_embd", "final_norm.w": "output_norm", "unembedding": "output"}
    inside = {"norm_1": "attn_norm", "norm_2": "ffn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v",
              "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}  # fmt: skip
    for (layer, part), w in weights.parts.items():
        name = outside[part] if layer is None else f"blk.{layer}.{inside[part.removesuffix('.w')]}"
        rows = w if layer is None else w.T
        if part in ("q.w", "k.w"):  # planes (i, i + r/2) become pairs of neighbours
            halves = rows.reshape(-1, 2, weights.size("head_dim") // 2, rows.shape[1])
            rows = halves.swapaxes(1, 2).reshape(rows.shape)
        stored = gguf.GGMLQuantizationType[kind if w.ndim == 2 else "F32"]
        quantised = gguf.quants.quantize(np.ascontiguousarray(rows, np.float32), stored)
        writer.add_tensor(f"{name}.weight", quantised, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

"""Checkpoints of any size that nobody trained: Llama's and Mixtral's tensors, random BF16, or holes of that size."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import ceil, prod
from pathlib import Path

import numpy as np

BLOCK = 1 << 20  # random values that are drawn once and written again and again


@dataclass(frozen=True)
class Sizes:
    """What the tensors' shapes follow from.

    Attributes
    ----------
    layers, width, heads, head_dim, kv_heads, vocabulary, inner, experts : int
        As in config.json; `inner` is the feed-forward network's width, 0 for none, and `experts` 0 for a dense one.
    """

    layers: int = 2
    width: int = 64
    heads: int = 4
    head_dim: int = 16
    kv_heads: int = 4
    vocabulary: int = 256
    inner: int = 0
    experts: int = 0

    @property
    def config(self) -> dict[str, object]:
        """config.json."""
        return {
            "model_type": "mixtral" if self.experts else "llama", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "num_hidden_layers": self.layers, "hidden_size": self.width, "num_attention_heads": self.heads,
            "head_dim": self.head_dim, "num_key_value_heads": self.kv_heads, "vocab_size": self.vocabulary,
            "intermediate_size": self.inner, "tie_word_embeddings": False,
        } | ({"num_local_experts": self.experts} if self.experts else {})  # fmt: skip

    @property
    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor's name and shape, in the order in which they are stored."""
        d, f = self.width, self.inner
        yield "model.embed_tokens.weight", (self.vocabulary, d)
        for i in range(self.layers):
            stem, own, shared = f"model.layers.{i}.", self.heads * self.head_dim, self.kv_heads * self.head_dim
            for letter, rows in (("q", own), ("k", shared), ("v", shared)):
                yield f"{stem}self_attn.{letter}_proj.weight", (rows, d)
            yield f"{stem}self_attn.o_proj.weight", (d, own)
            yield f"{stem}input_layernorm.weight", (d,)
            yield f"{stem}post_attention_layernorm.weight", (d,)
            if self.experts:
                yield f"{stem}block_sparse_moe.gate.weight", (self.experts, d)
            stems = [f"{stem}block_sparse_moe.experts.{e}." for e in range(self.experts)] or [f"{stem}mlp."]
            parts = (("w1", "w2", "w3") if self.experts else ("gate_proj", "down_proj", "up_proj")) if f else ()
            for network, part in product(stems, parts):
                yield f"{network}{part}.weight", (d, f) if part in ("w2", "down_proj") else (f, d)
        yield "model.norm.weight", (d,)
        yield "lm_head.weight", (self.vocabulary, d)


def write(folder: Path, sizes: Sizes, shards: int = 1, holes: bool = False) -> Path:
    """Write config.json and the tensors, as many in each shard; with `holes` they take no room on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sizes.config))
    tensors = list(sizes.shapes)
    if shards == 1:
        write_file(folder / "model.safetensors", dict(tensors), holes)
        return folder
    each, weight_map = ceil(len(tensors) / shards), {}
    for shard in range(ceil(len(tensors) / each)):
        own, name = dict(tensors[shard * each : (shard + 1) * each]), f"model-{shard + 1:05d}.safetensors"
        write_file(folder / name, own, holes, shard * each)
        weight_map |= dict.fromkeys(own, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_file(path: Path, shapes: Mapping[str, tuple[int, ...]], holes: bool = False, first: int = 0) -> None:
    """One .safetensors file of BF16 tensors, normal with standard deviation 0.02, or holes; `first` of all of them."""
    header, at = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + 2 * prod(shape)]}
        at += 2 * prod(shape)
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if holes:
            file.truncate(8 + len(text) + at)
            return
        values = np.random.default_rng(0).standard_normal(BLOCK + 1, np.float32) * np.float32(0.02)
        drawn = (values.view(np.uint32) >> 16).astype("<u2")
        for number, shape in enumerate(shapes.values(), first):
            left, start = prod(shape), 7919 * number % BLOCK  # each tensor begins elsewhere, so that none is another
            while left:
                piece = drawn[start : start + left]
                piece.tofile(file)
                left, start = left - len(piece), 0  # a long one repeats with an odd period, which its rows have not

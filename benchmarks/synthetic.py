"""Untrained checkpoints of any size: the tensors of Llama and Mixtral in random BF16, or sparse files of that size."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import ceil, prod
from pathlib import Path

import numpy as np

BLOCK = 1 << 20  # random values, drawn once and written repeatedly


@dataclass(frozen=True)
class Sizes:
    """The sizes of a checkpoint, from which the shapes of its tensors follow."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    head_dim: int = 16
    kv_heads: int = 4
    vocabulary: int = 256
    inner: int = 0  # width of the feed-forward network; 0 for none
    experts: int = 0  # 0 for a dense network

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
        """Name and shape of every tensor, in the order in which they are stored."""
        d, f = self.width, self.inner
        yield "model.embed_tokens.weight", (self.vocabulary, d)
        for i in range(self.layers):
            stem, full, shared = f"model.layers.{i}.", self.heads * self.head_dim, self.kv_heads * self.head_dim
            for letter, rows in (("q", full), ("k", shared), ("v", shared)):
                yield f"{stem}self_attn.{letter}_proj.weight", (rows, d)
            yield f"{stem}self_attn.o_proj.weight", (d, full)
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


SEVEN = Sizes(layers=32, width=4096, heads=32, head_dim=128, kv_heads=32, vocabulary=32_000, inner=11_008)  # Llama 2 7B


def write(folder: Path, sizes: Sizes, shards: int = 1, holes: bool = False, moved: float = 0.0) -> Path:
    """Write config.json and the tensors in equal shards; with `holes` as sparse files, which take no disk space.

    `moved` is how far the weights are from those without it, relative to their norm.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sizes.config))
    tensors = list(sizes.shapes)
    if shards == 1:
        write_file(folder / "model.safetensors", dict(tensors), holes, moved=moved)
        return folder
    each, weight_map = ceil(len(tensors) / shards), {}
    for shard in range(ceil(len(tensors) / each)):
        part, name = dict(tensors[shard * each : (shard + 1) * each]), f"model-{shard + 1:05d}.safetensors"
        write_file(folder / name, part, holes, shard * each)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_file(
    path: Path, shapes: Mapping[str, tuple[int, ...]], holes: bool = False, first: int = 0, moved: float = 0.0
) -> None:
    """Write a .safetensors file of BF16 tensors, normal with deviation 0.02, or holes; `first` numbers its tensors."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + 2 * prod(shape)]}
        offset += 2 * prod(shape)
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if holes:
            file.truncate(8 + len(text) + offset)
            return
        rng = np.random.default_rng(0)
        values = rng.standard_normal(BLOCK + 1, np.float32) * np.float32(0.02)
        values += rng.standard_normal(BLOCK + 1, np.float32) * np.float32(0.02 * moved)
        drawn = (values.view(np.uint32) >> 16).astype("<u2")
        for number, shape in enumerate(shapes.values(), first):
            left, start = prod(shape), 7919 * number % BLOCK  # each tensor starts elsewhere, so that no two are equal
            while left:
                piece = drawn[start : start + left]
                piece.tofile(file)
                left, start = left - len(piece), 0  # long tensors repeat with an odd period, so rows differ

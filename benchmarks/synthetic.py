"""Checkpoints of any size: the tensors of Llama and Mixtral in random BF16, or sparse files of that size.

With `Spectra` heads are as real ones: the singular values of W_QK and W_VO follow `PROFILES`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import ceil, prod
from pathlib import Path

import numpy as np

BLOCK = 1 << 20  # random values, drawn once and written repeatedly
DEVIATION = 0.02  # of a weight
BASES = 8  # orthonormal bases, drawn once and shifted for each head
ONE = 0x3F80  # in BF16

# Median singular values of the heads of GPT-2 and SmolLM2-135M, norms folded in, relative to the first of each head.
PLACES = (0, 1 / 63, 2 / 63, 4 / 63, 8 / 63, 16 / 63, 24 / 63, 32 / 63, 40 / 63, 48 / 63, 56 / 63, 60 / 63, 1)
PROFILES = {
    "qk": (1, 0.918, 0.847, 0.773, 0.681, 0.561, 0.474, 0.402, 0.338, 0.268, 0.192, 0.143, 0.078),
    "vo": (1, 0.911, 0.845, 0.777, 0.693, 0.596, 0.527, 0.470, 0.422, 0.373, 0.322, 0.287, 0.224),
}
EXPONENTS, SIZES = 0.1, 0.3  # deviations, so that no two heads have one spectrum


@dataclass(frozen=True)
class Sizes:
    """The sizes of a checkpoint, from which the shapes of its tensors follow."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    head_dim: int = 16
    kv_heads: int = 4
    vocabulary: int = 256  # 0 for no embeddings
    inner: int = 0  # width of the feed-forward network; 0 for none
    experts: int = 0  # 0 for a dense network

    @property
    def config(self) -> dict[str, object]:
        """config.json."""
        return {
            "model_type": "mixtral" if self.experts else "llama", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "num_hidden_layers": self.layers, "hidden_size": self.width, "num_attention_heads": self.heads,
            "head_dim": self.head_dim, "num_key_value_heads": self.kv_heads, "vocab_size": self.vocabulary or 32_000,
            "intermediate_size": self.inner, "tie_word_embeddings": False,
        } | ({"num_local_experts": self.experts} if self.experts else {})  # fmt: skip

    @property
    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor, in the order in which they are stored."""
        d, f = self.width, self.inner
        if self.vocabulary:
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
        if self.vocabulary:
            yield "lm_head.weight", (self.vocabulary, d)


SEVEN = Sizes(layers=32, width=4096, heads=32, head_dim=128, kv_heads=32, vocabulary=32_000, inner=11_008)  # Llama 2 7B
LARGEST = Sizes(  # Llama 3.1 405B
    layers=126, width=16_384, heads=128, head_dim=128, kv_heads=8, vocabulary=128_256, inner=53_248
)
SEVENTY = Sizes(layers=80, width=8192, heads=64, head_dim=128, kv_heads=8, vocabulary=32_000)


class Spectra:
    """Weights of heads whose maps have the singular values of real heads, in BF16 bit patterns.

    A factor's rows are an orthonormal basis, scaled by the square root of the profile. Eight bases are drawn; each head
    has one of them, shifted along the residual stream, which keeps it orthonormal. With norms of one, W_QK then has
    exactly the singular values chosen, but for rounding to BF16.
    """

    def __init__(self, sizes: Sizes, moved: float = 0.0) -> None:
        self.sizes, self.moved = sizes, moved
        r, d, rng = sizes.head_dim, sizes.width, np.random.default_rng(1)
        draws = rng.standard_normal((BASES, d, r))
        self.bases = np.array([np.linalg.qr(draw)[0].T for draw in draws], np.float32)  # (BASES, r, d)
        self.noise = rng.standard_normal((r, d)).astype(np.float32)
        self.profiles = {map_: np.interp(np.linspace(0, 1, r), PLACES, p) for map_, p in PROFILES.items()}

    def factor(self, profile: np.ndarray, index: int) -> np.ndarray:
        """The (r, d) factor of one head; no two numbers give one factor."""
        r, d = self.noise.shape
        rng = np.random.default_rng([2, index])
        scale = profile ** rng.normal(0.5, EXPONENTS / 2)
        scale *= DEVIATION * np.sqrt(r * d) / np.linalg.norm(scale) * np.exp(rng.normal(0, SIZES))
        w = np.roll(self.bases[index % BASES], index // BASES, axis=1)
        w *= scale.astype(np.float32)[:, None]
        if self.moved:
            step = self.moved * np.linalg.norm(scale) / np.sqrt(r * d)
            w += np.float32(step) * np.roll(self.noise, index, axis=1)
        return cut_to_bf16(w)

    def tensor(self, name: str, number: int) -> np.ndarray:
        """A whole tensor of attention: the factors of its heads, stacked; side by side for o."""
        letter = name.split(".")[-2][0]
        heads = self.sizes.heads if letter in "qo" else self.sizes.kv_heads
        profile = self.profiles["qk" if letter in "qk" else "vo"]
        rows = np.concatenate([self.factor(profile, number * self.sizes.heads + head) for head in range(heads)])
        return np.ascontiguousarray(rows.T) if letter == "o" else rows


def cut_to_bf16(w: np.ndarray) -> np.ndarray:
    """BF16 bit patterns of float32 numbers, rounded towards zero."""
    return (w.view(np.uint32) >> 16).astype("<u2")


def header_of(shapes: Mapping[str, tuple[int, ...]], dtype: str, size: int) -> tuple[bytes, int]:
    """The start of a .safetensors file of tensors with `size` bytes a value, and the number of bytes that follow."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        stop = offset + size * prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text, offset


def pieces(pool: np.ndarray, start: int, length: int) -> Iterator[np.ndarray]:
    """So many entries of a pool, from one place to its end and then all of it repeatedly."""
    while length:
        piece = pool[start : start + length]
        yield piece
        length, start = length - len(piece), 0


def write(
    folder: Path, sizes: Sizes, shards: int = 1, holes: bool = False, moved: float = 0.0, spectra: bool = False
) -> Path:
    """Write config.json and the tensors in equal shards; with `holes` as sparse files, which take no disk space.

    `moved` moves the weights by this share of their norm; with `spectra` heads have the spectra of real ones.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sizes.config))
    tensors, heads = list(sizes.shapes), Spectra(sizes, moved) if spectra else None
    each, weight_map = ceil(len(tensors) / shards), {}
    for first in range(0, len(tensors), each):
        part = dict(tensors[first : first + each])
        name = f"model-{first // each + 1:05d}.safetensors" if shards > 1 else "model.safetensors"
        write_file(folder / name, part, holes, first, moved, heads)
        weight_map |= dict.fromkeys(part, name)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_file(
    path: Path, shapes: Mapping[str, tuple[int, ...]], holes: bool, first: int, moved: float, heads: Spectra | None
) -> None:
    """Write a .safetensors file of BF16 tensors, or holes; `first` numbers its tensors.

    Weights are normal with deviation 0.02; with `heads` attention's come from there, and norms are ones.
    """
    header, size = header_of(shapes, "BF16", 2)
    with path.open("wb") as file:
        file.write(header)
        if holes:
            file.truncate(len(header) + size)
            return
        rng = np.random.default_rng(0)
        values = rng.standard_normal(BLOCK + 1, np.float32) * np.float32(DEVIATION)
        values += rng.standard_normal(BLOCK + 1, np.float32) * np.float32(DEVIATION * moved)
        drawn = cut_to_bf16(values)
        for number, (name, shape) in enumerate(shapes.items(), first):
            if heads is not None and (len(shape) == 1 or "self_attn" in name):
                whole = np.full(shape, ONE, "<u2") if len(shape) == 1 else heads.tensor(name, number)
                whole.tofile(file)
                continue
            # Each tensor starts elsewhere, so that no two are equal; with an odd period, so that rows differ.
            for piece in pieces(drawn, 7919 * number % BLOCK, prod(shape)):
                piece.tofile(file)

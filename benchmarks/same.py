"""Copies on which `same` is timed: in BF16, F16 and Q8_0, and in Q4_K_M by ggml's own quantiser."""

import ctypes
import json
from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks.synthetic import Sizes, header_of, pieces
from weightscope.pairs.deeds.rounding import CASTS

POOL = (1 << 20) - 256  # values, drawn once and written repeatedly; a whole number of ggml's largest blocks
RUN = """
import json, sys, time
from pathlib import Path
import weightscope as ws
ws.same
wall, cpu = time.perf_counter(), time.process_time()
verdict = str(ws.same(sys.argv[1], sys.argv[2]).verdict)
told = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "verdict": verdict}
Path(sys.argv[3]).write_text(json.dumps(told | {"process": time.process_time()}))
"""
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "q_proj": "attn_q",
    "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip
Made = Callable[[], Path]  # writes a checkpoint at the first call
Pack = Callable[[np.ndarray], np.ndarray]  # float32 (POOL,) -> bytes (POOL / values of a block, bytes of a block)
PACKED: dict[str, Pack] = {
    "F32": lambda x: x.view(np.uint8).reshape(-1, 4),
    "BF16": lambda x: np.ascontiguousarray(CASTS["BF16"](x).view(np.uint16)[1::2]).view(np.uint8).reshape(-1, 2),
    "F16": lambda x: x.astype(np.float16).view(np.uint8).reshape(-1, 2),
}


def blocks_of(packed: np.ndarray, shape: tuple[int, ...], number: int) -> Iterator[np.ndarray]:
    """The blocks of a tensor: the pool's, from another place for each tensor, repeatedly."""
    per_block = POOL // len(packed)
    return pieces(packed, 7919 * number * 256 % POOL // per_block, prod(shape) // per_block)


def write_safetensors(folder: Path, sizes: Sizes, packed: np.ndarray, dtype: str, changed: str = "") -> Path:
    """A checkpoint in one file; the tensor `changed` has the values of another place."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sizes.config))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header_of(dict(sizes.shapes), dtype, packed.shape[1])[0])
        for number, (name, shape) in enumerate(sizes.shapes):
            for piece in blocks_of(packed, shape, number + 1000 * (name == changed)):
                piece.tofile(file)
    return folder


def write_gguf(path: Path, sizes: Sizes, packs: dict[str, np.ndarray], kinds: Callable[[str, int], str]) -> Path:
    """The same values as llama.cpp's converter and quantiser write them; norms stay F32."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(sizes.layers)
    writer.add_embedding_length(sizes.width)
    writer.add_head_count(sizes.heads)
    writer.add_feed_forward_length(sizes.inner)
    writer.add_context_length(4096)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(sizes.vocabulary)
    for number, (name, shape) in enumerate(sizes.shapes):
        *stem, last, _ = name.split(".")
        layer = int(stem[2]) if len(stem) > 2 else 0
        new = f"blk.{layer}.{NAMES[last]}" if len(stem) > 2 else NAMES[".".join([*stem, last])]
        kind = "F32" if len(shape) == 1 else kinds(new, layer)
        rows = np.concatenate([*blocks_of(packs[kind], shape, number)]).reshape(shape[0], -1)
        if last in ("q_proj", "k_proj"):  # pairs that rotate together are neighbours
            rows = rows.reshape(sizes.heads, 2, sizes.head_dim // 2, -1).swapaxes(1, 2).reshape(shape[0], -1)
        array = rows.view(np.float32).reshape(shape) if kind == "F32" else rows
        writer.add_tensor(f"{new}.weight", np.ascontiguousarray(array), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def of_ggml(library: Any, kind: str) -> Pack:
    """ggml's own quantiser, without an importance matrix."""
    number = gguf.GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[number]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, integer, integer, integer, pointer]

    def pack(x: np.ndarray) -> np.ndarray:
        out = np.empty((len(x) // values, size), np.uint8)
        library.ggml_quantize_chunk(int(number), x.ctypes.data, out.ctypes.data, 0, len(x) // 256, 256, None)
        return out

    return pack


def q4_k_m(name: str, layer: int) -> str:
    """llama-quantize's mixture: values and down projections of half of the layers, and the head, are finer."""
    finer = name == "output" or (layer % 2 == 0 and name.endswith(("attn_v", "ffn_down")))
    return "Q6_K" if finer else "Q4_K"


def stored(path: Path) -> Path:
    """The file with the weights."""
    return path / "model.safetensors" if path.is_dir() else path


def sides(top: Path, sizes: Sizes, ggml: Path | None) -> list[tuple[str, Made, Made]]:
    """Name, original and copy of every row; Q4_K_M with a shared library that has ggml."""
    exact = (np.random.default_rng(0).standard_normal(POOL) * 0.02).astype(np.float32)
    half = CASTS["BF16"](exact)
    packs = {kind: pack(exact) for kind, pack in PACKED.items()}
    of_half = {"F16": PACKED["F16"](half), "F32": PACKED["F32"](half)}
    of_half["Q8_0"] = gguf.quants.quantize(half.reshape(-1, 256), gguf.GGMLQuantizationType.Q8_0).reshape(-1, 34)
    if ggml is not None:
        library = ctypes.CDLL(str(ggml))
        of_half |= {kind: of_ggml(library, kind)(half) for kind in ("Q4_K", "Q6_K")}
    changed = f"model.layers.{sizes.layers // 2}.mlp.up_proj.weight"

    def floats(name: str, dtype: str, packed: np.ndarray, changed: str = "") -> Made:
        return cache(lambda: write_safetensors(top / name, sizes, packed, dtype, changed))

    def blocks(name: str, kinds: Callable[[str, int], str]) -> Made:
        return cache(lambda: write_gguf(top / name, sizes, of_half, kinds))

    a, b = (floats(name, "BF16", packs["BF16"]) for name in ("a", "b"))
    rows = [
        ("a copy in BF16", a, b),
        ("one tensor of it changed", a, floats("c", "BF16", packs["BF16"], changed)),
        ("F32 and BF16", floats("a32", "F32", packs["F32"]), b),
        ("BF16 and the same in F32", a, floats("b32", "F32", of_half["F32"])),
        ("BF16 and F16", a, floats("b16", "F16", of_half["F16"])),
        ("BF16 and Q8_0", a, blocks("q8.gguf", lambda *_: "Q8_0")),
    ]
    return rows + ([("BF16 and Q4_K_M", a, blocks("q4.gguf", q4_k_m))] if ggml is not None else [])

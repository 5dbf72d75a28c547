"""Headers, indexes, configs and GGUF files: values in the JSON are replaced and the lengths around it repaired."""

import json
import random
import struct
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tests.attacks.attacks import CONFIGS, GGUFS, HEADERS, INDEXES, gguf_tensor, key, llama, text
from tests.fuzz.mutate import mutated_bytes, mutated_value
from tests.support.files import encode
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.checkpoint.storage import BITS
from weightscope.core.errors import CheckpointError
from weightscope.model.config.reading import as_published
from weightscope.model.model import open_model
from weightscope.model.rows.table import FAMILIES

LARGEST_SEED = 20_000  # of the attacks; the large ones are slow and their own test
GOLDEN = Path(__file__).parents[1] / "checkpoint" / "golden" / "bitsandbytes.safetensors"

GOOD: dict[str, Any] = {
    "a": np.ones((3, 4), np.float32),
    "b": ("BF16", (2, 2), b"\0" * 8),
    "c": np.ones(5),
    "q.weight": ("F8_E4M3", (8, 8), bytes(range(64))),
    "q.weight_scale_inv": np.ones((1, 1), np.float32),
    "p.qweight": np.ones((1, 8), np.int32),
    "p.qzeros": np.ones((1, 1), np.int32),
    "p.scales": np.ones((1, 8), np.float16),
    "p.g_idx": np.zeros(8, np.int32),
    "i.weight": np.ones((2, 2), np.int8),
    "i.SCB": np.ones(2, np.float32),
}
CONFIG = {
    "model_type": "gpt2",
    "n_layer": 2, "num_hidden_layers": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "layer_norm_eps": 1e-6,
    "rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "head_dim": 2, "text_config": {},
    "partial_rotary_factor": 0.5,
    "n_head": 4, "n_embd": 8, "layer_norm_epsilon": 1e-5, "n_positions": 16, "vocab_size": 10,
    "hidden_size": 8, "num_attention_heads": 4, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "quantization_config": {"quant_method": "gptq", "bits": 4, "weight_block_size": [4, 4], "version": "gemm"},
}  # fmt: skip
INDEX = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(GOOD, "model.safetensors")}
GOOD_GGUF = llama(
    gguf_tensor(),
    gguf_tensor(b"blk.0.attn_q.weight", (32, 8), 8, 128),
    gguf_tensor(b"blk.0.attn_k.bias", (8,), 1, 416),
    keys=key(b"llama.rope.freq_base", 6, struct.pack("<f", 1e4))
    + key(b"tokens", 9, struct.pack("<IQ", 8, 2) + text(b"a") * 2),
    n_keys=2,
    size=448,
)
# By file, a good one and the attacks on it.
SEEDS: dict[str, tuple[bytes, list[bytes]]] = {
    "model.safetensors": (encode(GOOD), [c for c, _ in HEADERS.values() if len(c) < LARGEST_SEED]),
    "model.safetensors.index.json": (
        json.dumps(INDEX).encode(),
        [c for c, _ in INDEXES.values() if len(c) < LARGEST_SEED],
    ),
    "config.json": (json.dumps(CONFIG).encode(), [c for c, _ in CONFIGS.values() if len(c) < LARGEST_SEED]),
    "model.gguf": (GOOD_GGUF, [c for c, _ in GGUFS.values() if len(c) < LARGEST_SEED]),
    "bitsandbytes.safetensors": (GOLDEN.read_bytes(), []),
}
MODEL_TYPES = sorted({model_type for family in FAMILIES for model_type in family.types})


def repaired(header: dict[str, Any], rng: random.Random) -> tuple[dict[str, Any], bytes]:
    """Other dtypes and shapes, with matching offsets and body: a legal file with unexpected contents."""
    body, out = b"", {}
    for name, entry in header.items():
        dtype, shape = entry["dtype"], list(entry["shape"])
        if rng.random() < 0.04:
            dtype = rng.choice(list(BITS))
        if rng.random() < 0.05:
            shape = [rng.choice((0, 1, 2, 3, 8, 16)) for _ in range(rng.randrange(4))]
        if rng.random() < 0.03:
            continue
        size = prod(shape) * BITS[dtype] // 8
        out[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + size]}
        body += rng.choice((bytes(size), rng.randbytes(size)))
    return out, body


def mutant(name: str, rng: random.Random) -> bytes:
    """A file's content, two times in three made from a good one."""
    good, attacks = SEEDS[name]
    content, donor = (good if rng.random() < 0.67 or not attacks else rng.choice(attacks)), rng.choice([good, *attacks])
    if name.endswith(".gguf") or rng.random() < 0.3:
        return mutated_bytes(content, rng, donor)
    head, text, body = b"", content, b""
    if name.endswith(".safetensors"):
        length = int.from_bytes(content[:8], "little")
        head, text, body = content[:8], content[8 : 8 + length], content[8 + length :]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return mutated_bytes(content, rng, donor)
    if name == "config.json" and content is good and isinstance(value, dict):
        value["model_type"] = rng.choice(MODEL_TYPES)
    if head and content is good and rng.random() < 0.5:
        value, body = repaired(value, rng)
    else:
        for _ in range(rng.choice((1, 1, 2, 4))):
            value = mutated_value(value, rng)
        if rng.random() < 0.3:
            body = rng.randbytes(len(body))
    text = json.dumps(value).encode()
    if rng.random() < 0.1:
        text = mutated_bytes(text, rng, donor)
    return (struct.pack("<Q", len(text)) if head else b"") + text + body


def meet(name: str, folder: Path, content: bytes) -> str:
    """What becomes of a file: "read" or "refused". Any other exception is the caller's to catch."""
    is_index = name == "model.safetensors.index.json"
    weights = "shard.safetensors" if is_index else "model.safetensors"  # next to a model.safetensors, no index is read
    (folder / weights).write_bytes(encode(GOOD))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / name).write_bytes(content.replace(b"model.safetensors", weights.encode()) if is_index else content)
    return read_all(folder if is_index or name in {"model.safetensors", "config.json"} else folder / name)


def read_all(source: Path) -> str:
    """Open a checkpoint as a model, and read every tensor whole and in blocks."""
    outcome = "read"
    try:
        checkpoint = as_published(open_checkpoint(source))
    except CheckpointError as error:
        assert str(error).isprintable()
        return "refused"
    try:
        open_model(source)
    except CheckpointError as error:
        assert str(error).isprintable()
        outcome = "config refused"
    for tensor in checkpoint.values():
        try:
            array = tensor.read()
            assert array.dtype == np.float32 and array.shape == tensor.shape and np.isfinite(array).all()
            if array.ndim:
                blocks = [block for _, block in tensor.blocks(2)] if len(array) < 1000 else []
                assert not blocks or np.array_equal(np.concatenate(blocks), array)
        except CheckpointError as error:
            assert str(error).isprintable()
            outcome = "a tensor refused"
    return outcome

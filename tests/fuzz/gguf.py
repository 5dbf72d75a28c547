"""GGUF files of other keys and tensors, their lengths and offsets right."""

import random
import struct
from pathlib import Path

from tests.attacks.attacks import gguf, gguf_tensor, key, text
from tests.fuzz import checkpoints
from tests.fuzz.mutate import mutated_bytes
from tests.fuzz.tokenizers import used
from weightscope.checkpoint.gguf import ARRAY, SCALARS, STRING

ARCHITECTURES = (b"llama", b"gemma", b"gemma2", b"gemma3", b"phi3", b"gpt2", b"gptneox", b"falcon", b"qwen2", b"bert")
WORDS = (b"", b"llama", b"gpt2", b"bert", b"yarn", b"a", "▁the".encode(), b"<0x41>", b"\xff", b"\x1b[2J", b"x" * 30_000)
NUMBERS = (0, 1, 2, 3, 4, 8, 32, 255, 2**15, 2**31, 2**32 - 1, 2**62)
OWN = (  # of an architecture's keys, what stands after its name
    b"block_count", b"embedding_length", b"attention.head_count", b"attention.head_count_kv", b"attention.key_length",
    b"attention.layer_norm_rms_epsilon", b"rope.freq_base", b"rope.dimension_count", b"rope.scaling.type",
    b"rope.scaling.factor", b"context_length", b"feed_forward_length", b"expert_count", b"vocab_size",
)  # fmt: skip
COMMON = (
    b"general.alignment", b"general.name", b"tokenizer.ggml.model", b"tokenizer.ggml.tokens", b"tokenizer.ggml.scores",
    b"tokenizer.ggml.token_type", b"tokenizer.ggml.merges", b"tokenizer.ggml.bos_token_id",
)  # fmt: skip
GOOD = {b"block_count": 1, b"embedding_length": 32, b"attention.head_count": 2, b"context_length": 16}
NAMES = (
    b"token_embd.weight", b"output_norm.weight", b"output.weight", b"rope_freqs.weight", b"blk.0.attn_q.weight",
    b"blk.0.attn_k.weight", b"blk.0.attn_v.weight", b"blk.0.attn_output.weight", b"blk.0.attn_qkv.weight",
    b"blk.0.attn_norm.weight", b"blk.0.attn_q.bias", b"blk.1.attn_q.weight", b"position_embd.weight", b"\x1b[2J",
)  # fmt: skip
BYTES = {0: (1, 4), 1: (1, 2), 2: (32, 18), 8: (32, 34), 12: (256, 144), 30: (1, 2)}  # values and bytes of a block


def mutant(rng: random.Random) -> bytes:
    """A file of some keys, some of them what is expected, and some tensors that lie one after the other."""
    architecture = rng.choice((b"llama", rng.choice(ARCHITECTURES)))
    keys = {b"general.architecture": (STRING, text(architecture))}
    for name, value in GOOD.items():
        keys[architecture + b"." + name] = 4, struct.pack("<I", value)
    for name in rng.sample([*(architecture + b"." + name for name in OWN), *COMMON], rng.randrange(6)):
        keys[name] = drawn_value(rng)
    if rng.random() < 0.5:
        keys[b"tokenizer.ggml.model"] = STRING, text(rng.choice((b"llama", b"gpt2", b"bert", b"t5", b"none")))
        words = rng.choices(WORDS[:-3], k=rng.choice((0, 1, 8, 40)))
        keys[b"tokenizer.ggml.tokens"] = ARRAY, struct.pack("<IQ", STRING, len(words)) + b"".join(map(text, words))
        if rng.random() < 0.2:
            keys[b"tokenizer.ggml.tokens"] = drawn_value(rng)
    for name in [name for name in keys if rng.random() < 0.03]:
        del keys[name]
    tensors, body = [], b""
    for name in rng.sample(NAMES, rng.randrange(8)):
        kind = rng.choice((*BYTES, 0, 0, 0, 999 if rng.random() < 0.05 else 1))
        sizes = (32,) if b"norm" in name or name.endswith(b"bias") else (256 if kind == 12 else 32, 32)
        if rng.random() < 0.2:
            sizes = rng.choice(((32, 64), (32, 16), (256, 2), (), (0, 4), (32, 2, 2)))
        tensors.append(gguf_tensor(name, sizes, kind, len(body)))
        values, size = BYTES.get(kind, (1, 4))
        n_values = 1
        for each in sizes:
            n_values *= each
        n_bytes = n_values // values * size
        body += rng.choice((bytes(n_bytes), rng.randbytes(n_bytes)))
        body += bytes(-len(body) % 32)
    header = b"".join(key(name, *value) for name, value in keys.items()) + b"".join(tensors)
    file = gguf(len(tensors), len(keys), header)
    file += bytes(-len(file) % 32) + body
    return mutated_bytes(file, rng, file) if rng.random() < 0.2 else file


def meet(folder: Path, content: bytes) -> str:
    """Open it, read its tensors, and name its tokens."""
    outcome = checkpoints.meet("model.gguf", folder, content)
    return f"{outcome}, tokens {used(folder / 'model.gguf')}"


def drawn_value(rng: random.Random) -> tuple[int, bytes]:
    """A number, a string, or a list of either."""
    kind = rng.choice((*SCALARS, STRING, STRING, ARRAY, ARRAY))
    if kind != ARRAY:
        return kind, _plain(kind, rng)
    kind, length = rng.choice((*SCALARS, STRING, STRING)), rng.choice((0, 1, 2, 3, 8, 40))
    return ARRAY, struct.pack("<IQ", kind, length) + b"".join(_plain(kind, rng) for _ in range(length))


def _plain(kind: int, rng: random.Random) -> bytes:
    if kind == STRING:
        return text(rng.choice(WORDS[:-3] if rng.random() < 0.95 else WORDS))
    return struct.pack("<Q", rng.choice(NUMBERS))[: struct.calcsize("<" + SCALARS[kind])]

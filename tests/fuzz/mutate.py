"""Other bytes and other JSON than what was given."""

import random
import struct
from collections.abc import Sequence
from typing import Any

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 4, 8, 16, 127, 128, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63),
    10**30, 0.0, 0.5, -0.0, 1e308, float("inf"), float("nan"), "", "F32", "BF16", "F16", "F64", "U8", "I32", "F4",
    "F8_E4M3", "I8", "../x", "/etc/passwd", "model.safetensors", "\0", "\ud800", "\x1b[2J", "x" * 300, [], {}, [0, 0],
    [0, 8], [[]], {"a": {}}, [2**62, 4], [0], "awq", "gptq", "fp8", "bitsandbytes", "mxfp4", "gptq_v2", "gpt2", "llama",
]  # fmt: skip
NAMES = ("a", "b", "q.weight", "q.weight_scale", "p.qweight", "__metadata__", "\x1b", "", "p.weight")


def mutated_bytes(content: bytes, rng: random.Random, donor: bytes) -> bytes:
    """Some cuts, flips, repeats and splices."""
    text = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        place = rng.randrange(len(text) + 1)
        to = min(len(text), place + rng.choice((1, 1, 2, 4, 8, 32)))
        match rng.randrange(7):
            case 0:
                del text[place:to]
            case 1:
                text[place:place] = rng.randbytes(rng.choice((1, 2, 8)))
            case 2:
                text[place:to] = rng.randbytes(to - place)
            case 3:
                text[place:place] = text[place:to] * rng.choice((1, 2, 20))
            case 4 if place < len(text):
                text[place] ^= 1 << rng.randrange(8)
            case 5:
                text[place:to] = struct.pack("<Q", rng.choice((0, 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)))[
                    : to - place
                ]
            case 6:
                start = rng.randrange(len(donor) + 1)
                text[place:to] = donor[start : start + 32]
    return bytes(text)


def mutated_value(value: Any, rng: random.Random, names: Sequence[str] = NAMES, depth: int = 0) -> Any:
    """The same JSON with something in it replaced, dropped, doubled, or renamed to one of `names`."""
    if depth > 6 or not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return rng.choice(VALUES)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key, copy = rng.choice(keys), value.copy()
    match rng.randrange(8):
        case 0:
            del copy[key]
        case 1 if isinstance(copy, dict):
            copy[rng.choice(names)] = copy.pop(key)
        case 2 if isinstance(copy, list):
            copy.append(copy[key])
        case _:
            copy[key] = mutated_value(value[key], rng, names, depth + 1)
    return copy

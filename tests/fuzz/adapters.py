"""LoRA adapters: settings and factors of other values, names and shapes, over the base that they were made for."""

import json
import random
import struct
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.checkpoints import repaired
from tests.fuzz.mutate import mutated_bytes, mutated_value
from weightscope.checkpoint.adapters.lora import PREFIX
from weightscope.checkpoint.formats import ADAPTER, ADAPTER_WEIGHTS
from weightscope.core.errors import CheckpointError
from weightscope.model.model import open_model

GOLDEN = Path(__file__).parents[1] / "checkpoint" / "golden" / "adapters"
KINDS = ("gpt2", "llama", "qwen2", "embeddings")
SETTINGS: dict[str, tuple[Any, ...]] = {
    "r": (0, 1, 2, 3, 4, -1, 2**63, 1e308, True), "lora_alpha": (0, 1, 16, 1e-12, 1e6, 1e30, "16"),
    "rank_pattern": ({"c_attn": 2}, {"(a+)+b": 2}, {"(": 1}, {".*": 3}, {"a" * 400: 1}, {"c_attn": "x"}, []),
    "alpha_pattern": ({"q_proj": 4}, {"[": 4}, {"": 4}), "bias": ("none", "all", "lora_only", "some"),
    "modules_to_save": (["lm_head"], ["lora_A"], [""], [None], "lm_head"), "use_rslora": (True, False, "yes"),
    "peft_type": ("LORA", "IA3", None), "use_dora": (True,), "init_lora_weights": ("pissa", "gaussian", [], {}),
    "base_model_name_or_path": ("", "x", "../x", 3, None, "\x1b[2J"), "fan_in_fan_out": (True, False),
}  # fmt: skip
PLACES = ("lora_A.weight", "lora_B.weight", "lora_embedding_A", "bias", "base_layer.weight", "lora_magnitude_vector")


@cache
def _good(kind: str) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Settings, header and body."""
    content = (GOLDEN / kind / "adapter" / ADAPTER_WEIGHTS).read_bytes()
    length = int.from_bytes(content[:8], "little")
    settings = json.loads((GOLDEN / kind / "adapter" / ADAPTER).read_text())
    return settings, json.loads(content[8 : 8 + length]), content[8 + length :]


def mutant(rng: random.Random) -> bytes:
    """Which base, then the length of the settings, the settings, and the weights."""
    number = rng.randrange(len(KINDS))
    settings, header, body = _good(KINDS[number])
    settings, header = dict(settings), {name: entry for name, entry in header.items() if name != "__metadata__"}
    for _ in range(rng.choice((0, 0, 1, 2))):
        name = rng.choice(list(SETTINGS))
        settings[name] = rng.choice(SETTINGS[name])
    if rng.random() < 0.15:
        settings = mutated_value(settings, rng, tuple(SETTINGS))
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        name = rng.choice(list(header))
        module, _, _ = name.partition(".lora_")
        header[rng.choice((f"{module}.{rng.choice(PLACES)}", f"{PREFIX}x.lora_A.weight", "x", PREFIX))] = header.pop(
            name
        )
    match rng.randrange(6):
        case 0:
            header, body = repaired(header, rng)
        case 1:
            header = mutated_value(header, rng, tuple(header))
        case 2:
            body = rng.randbytes(len(body))
    text, settings_text = json.dumps(header).encode(), json.dumps(settings).encode()
    weights = struct.pack("<Q", len(text)) + text + body
    if rng.random() < 0.1:
        weights = mutated_bytes(weights, rng, weights)
    return struct.pack("<BI", number, len(settings_text)) + settings_text + weights


def meet(folder: Path, content: bytes) -> str:
    """Open it over its base, and read every weight of both."""
    number, length = struct.unpack_from("<BI", content)
    (folder / ADAPTER).write_bytes(content[5 : 5 + length])
    (folder / ADAPTER_WEIGHTS).write_bytes(content[5 + length :])
    try:
        model = open_model(folder, base=GOLDEN / KINDS[number] / "base")
    except CheckpointError as error:
        assert str(error).isprintable()
        return "refused"
    outcome = "read"
    for tensor in model.checkpoint.values():
        try:
            values = tensor.read()
            assert values.dtype == np.float32 and values.shape == tensor.shape and np.isfinite(values).all()
            blocks = np.concatenate([block for _, block in tensor.blocks(7)])
            assert np.allclose(values, blocks, rtol=1e-6, atol=0, equal_nan=True)
        except CheckpointError as error:
            assert str(error).isprintable()
            outcome = "a tensor refused"
    return outcome

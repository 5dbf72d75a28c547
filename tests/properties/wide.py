"""Models with every part of a layer, wide enough for `lineage` to judge, and their gauges as float32 stores them."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.support.plants.derivations import DERIVATIONS
from tests.support.plants.named_parts import Weights, read_weights, write_weights
from tests.support.tiny_models import FIXTURES

NAMES = ("llama", "qwen2", "gemma3", "gpt2", "bert", "mpnet")
LAYERS, WIDTH, HEADS, GROUPS, HEAD_DIM, INNER, VOCABULARY, POSITIONS = 3, 64, 4, 2, 16, 96, 128, 64
GAUGES = (
    "heads permuted", "basis of queries and keys", "basis of values", "norms folded", "stream rotated",
    "stream permuted", "neurons permuted",
)  # fmt: skip
OF_HEADS = {"heads permuted", "basis of queries and keys", "basis of values", "norms folded"}  # keep heads' maps


@lru_cache(None)
def wide(name: str) -> Weights:
    """A random model of a fixture's family, with networks."""
    small = _small(name)
    groups = GROUPS if "num_key_value_heads" in small.config else HEADS
    keys = small.dialect.keys
    sizes = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "vocabulary": VOCABULARY}
    config = {key: value for key, value in small.config.items() if key != "layer_types"}
    config |= {keys[size]: number for size, number in sizes.items()}
    more = {"head_dim": HEAD_DIM, "num_key_value_heads": groups, "n_positions": POSITIONS, "intermediate_size": INNER,
            "max_position_embeddings": POSITIONS, "n_inner": INNER}  # fmt: skip
    config |= {key: size for key, size in more.items() if key in config}
    if (None, "final_norm.w") in small.parts:  # no file has a head of its own
        config["tie_word_embeddings"] = True
    shapes: dict[str, tuple[int, ...]] = {
        "q.w": (WIDTH, HEADS * HEAD_DIM), "o.w": (HEADS * HEAD_DIM, WIDTH), "gate.w": (WIDTH, INNER),
        **dict.fromkeys(("k.w", "v.w"), (WIDTH, groups * HEAD_DIM)), "up.w": (WIDTH, INNER), "down.w": (INNER, WIDTH),
        "q_norm.w": (HEAD_DIM,), "k_norm.w": (HEAD_DIM,), "positions": (POSITIONS, WIDTH), "types": (2, WIDTH),
        "tokens": (VOCABULARY, WIDTH), "unembedding": (VOCABULARY, WIDTH),
    }  # fmt: skip
    modules = small.dialect.modules
    inside = {part[1] for part in small.parts if part[0] == 0}
    inside |= {f"{part}.w" for part in ("gate", "up", "down", "norm_2") if part in modules}
    if not small.dialect.rms:
        inside |= {"up.b", "down.b", "norm_2.b"}
    names = [part for part in small.parts if part[0] is None]
    names += [(i, part) for i in range(LAYERS) for part in sorted(inside)]
    rng, parts = np.random.default_rng(len(name)), {}
    for part in names:
        matrix = shapes.get(part[1].replace(".b", ".w"), (WIDTH,))
        shape = matrix[-1:] if part[1].endswith(".b") else matrix
        draw = rng.standard_normal(shape)
        if part[1] in small.dialect.kept:
            parts[part] = small.parts[part]
        elif len(shape) == 2:
            parts[part] = 0.15 * np.exp(0.4 * rng.standard_normal((len(draw), 1))) * draw
        else:
            gain = 1 - small.dialect.offset if part[1].endswith("norm.w") or "norm_" in part[1] else 0
            parts[part] = gain * part[1].endswith(".w") + 0.2 * draw
    came_from = tuple(range(LAYERS))
    return replace(small, config=config, dtype="float32", came_from=came_from, parts={}).but(parts)


def _small(name: str) -> Weights:
    """A fixture; BERT and MPNet without their prefix, as their bare models are saved."""
    with TemporaryDirectory() as folder:
        tensors = load_file(FIXTURES / name / "model.safetensors")
        save_file({key.removeprefix(f"{name}."): w for key, w in tensors.items()}, Path(folder, "model.safetensors"))
        shutil.copy(FIXTURES / name / "config.json", folder)
        return read_weights(folder)


def as_file(weights: Weights) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Config and tensors as they are in a folder."""
    with TemporaryDirectory() as temporary:
        write_weights(weights, Path(temporary) / "made")
        folder = Path(temporary) / "made"
        return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@lru_cache(None)
def gauges_of(name: str) -> Sequence[tuple[str, ...]]:
    """The gauges that a model allows, alone and two, one after the other."""
    traits = wide(name).traits()
    allowed = [gauge for gauge in GAUGES if DERIVATIONS[gauge].needs <= traits]
    head = (None, "unembedding") in wide(name).parts or wide(name).config.get("tie_word_embeddings", False)
    if not head or (None, "final_norm.w") not in wide(name).parts:  # its outputs are the stream
        allowed = [gauge for gauge in allowed if not gauge.startswith("stream")]
    return [*((gauge,) for gauge in allowed), *permutations(allowed, 2)]


def in_another_gauge(name: str, gauges: Sequence[str], seed: float) -> tuple[Mapping[str, Any], dict[str, np.ndarray]]:
    """Config and tensors of a model after some gauges."""
    weights = replace(wide(name), seed=(int(seed),))
    for gauge in gauges:
        weights = DERIVATIONS[gauge].change(weights)
    return as_file(weights)

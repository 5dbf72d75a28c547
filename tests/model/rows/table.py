"""The table in README.md of the rows that have tiny models, from what the fixtures give.

python -m tests.model.rows.table        # rewrites the table between the page's markers
"""

import re
from collections.abc import Iterator
from math import ceil, log10
from pathlib import Path

import numpy as np

from tests.support.tiny_models import NAMES, Fixture, fixture, softmax
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.positions import Buckets, Slopes, WindowBias
from weightscope.model.layers.rotation import GridRotation
from weightscope.model.rows.cells import StoredNorm
from weightscope.model.rows.family import Family
from weightscope.model.rows.table import FAMILIES

BIASES = {Slopes: "ALiBi", Buckets: "relative buckets", WindowBias: "biases by offset in a window"}
PAGE = Path(__file__).with_name("README.md")
MARKED = re.compile(r"(<!-- families -->\n)(.*?)(<!-- /families -->)", re.DOTALL)
HEADER = ("family", "model_type", "scores", "values", "rotation or position terms", "norms", "tiny models")


def fixtures_of(row: Family) -> list[Fixture]:
    """The fixtures that a row reads."""
    opened = (fixture(name) for name in NAMES)
    return [tiny for tiny in opened if (tiny.model.family.name, tiny.model.family.tower) == (row.name, row.tower)]


def layers_of(tinies: list[Fixture]) -> Iterator[tuple[Fixture, Layer]]:
    """Every attention layer of some fixtures."""
    for tiny in tinies:
        for index in tiny.layers:
            yield tiny, tiny.model.layer(index)


def error_of_scores(tiny: Fixture, layer: Layer) -> float:
    """Largest difference from the eager model's attention."""
    scores, expected = layer.scores(tiny.arrays[f"x{layer.index}"]), tiny.arrays[f"scores{layer.index}"]
    attention = softmax(np.where(np.isfinite(expected), scores, -np.inf), layer.sinks)
    return float(np.abs(attention - tiny.arrays[f"attention{layer.index}"]).max())


def error_of_values(tiny: Fixture, layer: Layer) -> float:
    """Largest difference from the eager model's output, relative to its largest number."""
    output, attention = tiny.arrays[f"output{layer.index}"], tiny.arrays[f"attention{layer.index}"]
    return float(np.abs(layer.output(attention, tiny.arrays[f"x{layer.index}"]) - output).max() / np.abs(output).max())


def bound(error: float) -> str:
    """The power of ten above an error, which does not change with the machine's last bits."""
    return f"< 1e{ceil(log10(max(error, 1e-7)))}"


def rotation_of(tinies: list[Fixture]) -> str:
    """How positions enter attention."""
    words: list[str] = []
    for tiny, layer in layers_of(tinies):
        rotation, kinds = layer.rotation, tiny.model.config.rope
        if isinstance(rotation, GridRotation):
            words.append("RoPE by row and column")
            words += ["class and registers unrotated"] if rotation.prefix or rotation.suffix else []
        elif rotation is not None:
            words.append("interleaved RoPE" if rotation.interleaved else "RoPE")
            if 2 * len(rotation.frequencies) < tiny.model.config.head_dim:
                words.append("partial")
            kind = kinds[tiny.model.config.layer_types[layer.index]]["rope_type"]
            words += [kind] if kind != "default" else []
        elif kinds:
            words.append("none in some layers")
        if layer.additive is not None:
            words.append(BIASES[type(layer.additive)])
        thetas = {given["rope_theta"] for given in kinds.values() if given.has("rope_theta")}
        words += ["a base for each layer type"] if len(thetas) > 1 else []
    learned = any(tiny.model.positions is not None for tiny in tinies)
    return ", ".join(dict.fromkeys(words + ["learned positions"] * learned)) or "none"


def norm_in_words(norm: StoredNorm | None) -> str:
    if norm is None:
        return "none before attention"
    kind = "LayerNorm" if norm.centred else "RMSNorm"
    kind += " (1 + w)" if norm.offset else ""
    kind += " without parameters" if not norm.module else " without bias" if norm.centred and not norm.bias else ""
    return kind + (f", none in layer {', '.join(map(str, norm.without))}" if norm.without else "")


def norms_of(tinies: list[Fixture]) -> str:
    """Norms before and inside attention."""
    words: list[str] = []
    for tiny, layer in layers_of(tinies):
        row = tiny.model.family
        if row.norms.before is None and row.inputs.norm is not None:
            words.append("post-norm")
        else:
            words.append(norm_in_words(row.norms.before))
        if row.scores.qk_norm is not None:
            kind = "LayerNorm" if row.scores.qk_norm.centred else "RMSNorm"
            kind += " (1 + w)" if row.scores.qk_norm.offset else ""
            words.append(f"q/k {kind}" + (" over all heads" if row.scores.qk_norm.scope == "joint" else " per head"))
        if layer.v_norm is not None:
            words.append("RMSNorm of latents")
    return ", ".join(dict.fromkeys(words))


def row_of(family: Family) -> tuple[str, ...]:
    """One line of the table."""
    tinies = fixtures_of(family)
    tower = f" ({family.tower})" if family.tower else ""
    types = ", ".join(f"`{kind}`" for kind in family.types)
    scores = bound(max(error_of_scores(tiny, layer) for tiny, layer in layers_of(tinies)))
    values = bound(max(error_of_values(tiny, layer) for tiny, layer in layers_of(tinies)))
    return f"{family.name}{tower}", types, scores, values, rotation_of(tinies), norms_of(tinies), str(len(tinies))


def table() -> str:
    """The whole table in Markdown."""
    rows = [HEADER, ("---",) * len(HEADER), *(row_of(row) for row in FAMILIES if fixtures_of(row))]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    text = PAGE.read_text()
    if not MARKED.search(text):
        raise SystemExit(f"{PAGE} has no <!-- families --> ... <!-- /families --> to put the table between")
    PAGE.write_text(MARKED.sub(lambda match: match[1] + table() + "\n" + match[3], text))

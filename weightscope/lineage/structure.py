"""What the match of layers and heads shows: layers and heads removed, repeated or reordered; changed sizes."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from weightscope.errors import counted
from weightscope.findings import indexed
from weightscope.lineage.matching import Match
from weightscope.lineage.sketches import Sketches

MOSTLY = 0.5  # share of the suspect's layers that need a counterpart before the base's others are called removed


@dataclass(frozen=True)
class Kind:
    """One thing that differs.

    Attributes
    ----------
    kind : str
        In words; docs/lineage.md lists them all.
    layers : list of int
        The suspect's layers that show it; empty if it concerns no layer.
    evidence : str
        What was observed: a sentence with its numbers.
    strength : float
        From 0 to 1: the share of the compared layers, heads or tensors that show it.
    """

    kind: str
    layers: list[int]
    evidence: str
    strength: float = 1.0


def structure_kinds(suspect: Sketches, base: Sketches, match: Match) -> Iterator[Kind]:
    """Layers removed, repeated, reordered; heads removed, added, permuted, grouped; a changed vocabulary or width."""
    yield from _layer_kinds(suspect, base, match)
    yield from _head_kinds(suspect, base, match)
    a, b = base.about, suspect.about
    if a["vocabulary"] and b["vocabulary"] and a["vocabulary"] != b["vocabulary"]:
        what = "extended" if b["vocabulary"] > a["vocabulary"] else "cut"
        yield Kind(f"vocabulary {what}", [], f"{a['vocabulary']:,} tokens in the base, {b['vocabulary']:,} here.")
    if a["d_model"] != b["d_model"]:
        what = "cut" if b["d_model"] < a["d_model"] else "extended"
        sizes = f"{a['d_model']} dimensions in the base, {b['d_model']} here"
        yield Kind(f"width {what}", [], f"The residual stream has {sizes}.")


def _layer_kinds(suspect: Sketches, base: Sketches, match: Match) -> Iterator[Kind]:
    places = [(i, j) for i, j in zip(suspect.layers, match.layers, strict=True) if j is not None]
    taken = Counter(base.layers[j] for _, j in places)
    gone = [layer for layer in base.layers if layer not in taken]
    if gone and len(places) > len(suspect.layers) * MOSTLY:
        text = f"Nothing in the suspect matches {indexed('layer', gone)} of the base."
        yield Kind("layers removed", [], text, len(gone) / len(base.layers))
    twice = sorted(layer for layer, times in taken.items() if times > 1)
    if twice:
        here = [i for i, j in places if taken[base.layers[j]] > 1]
        yield Kind("layers repeated", here, f"The suspect repeats {indexed('layer', twice)} of the base.",
                   len(here) / len(suspect.layers))  # fmt: skip
    order = [j for _, j in places]
    back = [k for k in range(1, len(order)) if order[k] < order[k - 1]]
    if back and not _is_repeat(order):
        moved = [i for (i, j), usual in zip(places, sorted(order), strict=True) if j != usual]
        pairs = ", ".join(f"{i} was {base.layers[j]}" for i, j in places if i in moved)
        yield Kind("layers reordered", moved, f"Layers are not in the base's order: {pairs}.", len(moved) / len(places))
    new = [i for i, j in zip(suspect.layers, match.layers, strict=True) if j is None]
    if new:
        text = f"Nothing in the base matches {indexed('layer', new)}."
        yield Kind("layers replaced or added", new, text, len(new) / len(suspect.layers))


def _is_repeat(order: Sequence[int]) -> bool:
    """Whether every step back leads to a run of layers that occurred before, as in depth upscaling."""
    seen: set[int] = set()
    for k, j in enumerate(order):
        if k and j < order[k - 1] and j not in seen:
            return False
        seen.add(j)
    return True


def _head_kinds(suspect: Sketches, base: Sketches, match: Match) -> Iterator[Kind]:
    permuted, fewer, more, grouped, divided = [], [], [], [], []
    for i, j, order in zip(suspect.layers, match.layers, match.heads, strict=True):
        if j is None:
            continue
        here, there = suspect.of_layer(i), base.of_layer(base.layers[j])
        silent = (suspect.norms[here, 1] == 0).sum() - (base.norms[there, 1] == 0).sum()
        if len(here) < len(there) or silent > 0:
            fewer.append(i)
        if len(here) > len(there) or silent < 0:
            more.append(i)
        matched = order[order >= 0]
        if match.route != "spectra" and (np.diff(matched) < 0).any():
            permuted.append(i)
        kv_here, kv_there = (len(set(s.kv_head[heads])) for s, heads in ((suspect, here), (base, there)))
        if kv_here < kv_there and len(here) / kv_here > len(there) / kv_there:
            grouped.append(i)
        if kv_there < kv_here and len(there) / kv_there > len(here) / kv_here:
            divided.append(i)
    n = sum(j is not None for j in match.layers)
    if fewer:
        kept = [int((suspect.norms[suspect.of_layer(i), 1] > 0).sum()) for i in fewer]
        left = f"{min(kept)}" if min(kept) == max(kept) else f"{min(kept)} to {max(kept)}"
        sizes = f"{base.about['heads']} heads in a layer of the base; here, {left} of a layer write anything"
        yield Kind("heads removed", fewer, f"{sizes}.", len(fewer) / n)
    if more:
        sizes = f"{base.about['heads']} heads in the base, of which fewer write anything than of the suspect's"
        yield Kind("heads added", more, f"{sizes}.", len(more) / n)
    if permuted:
        yield Kind("heads permuted", permuted, f"In {counted(len(permuted), 'layer')}, heads are in another order.",
                   len(permuted) / n)  # fmt: skip
    sizes = f"{base.about['kv_heads']} key-value heads in the base, {suspect.about['kv_heads']} here"
    if grouped:
        yield Kind("heads grouped", grouped, f"{sizes}: several heads now share keys and values.", len(grouped) / n)
    if divided:
        text = f"{sizes}: several heads of the base share keys and values."
        yield Kind("heads grouped: the base", divided, text, len(divided) / n)

"""Findings about weights that no number comes of: NaN, infinity, and what overflows, by the tensors they stand in."""

from collections.abc import Iterable, Iterator

import numpy as np

from weightscope.audits.findings import Finding, Member, indexed
from weightscope.audits.measures import MAPS, MeasuredHeads
from weightscope.checkpoint import Tensor
from weightscope.model import Model
from weightscope.overflow import BLOCK_VALUES, largest_weight

SQUARE_OVERFLOWS = 1.8e19  # in float32; larger weights are never meant


def broken_layers(model: Model, heads: MeasuredHeads) -> Iterator[Finding]:
    """Where NaN or infinity stands in what was read of each layer, and which heads it reaches."""
    for i, layer in enumerate(heads.layers.tolist()):
        counts = {name: count_not_finite(model.checkpoint[name]) for name in heads.broken[layer]}
        if not counts:
            continue
        reached = {name: heads_without_numbers(heads, i, name) for name in MAPS}
        for name, those in reached.items():
            if those:
                text = f"NaN or infinite weights ({_where(counts)}) reach {indexed('head', those)}."
                yield _finding(layer, name, counts, text, those)
        if not any(reached.values()):
            text = f"NaN or infinite weights ({_where(counts)}) reach no number here, but the layer's attention."
            yield _finding(layer, None, counts, text)


def broken_elsewhere(model: Model, heads: MeasuredHeads, told: Iterable[str]) -> Iterator[Finding]:
    """Where NaN or infinity stands in what else was read of the model, but for tensors that are told of already."""
    of_layers = {name for names in heads.broken.values() for name in names}
    for name in sorted((model.checkpoint.noted or set()) - of_layers - set(told)):
        counts = {name: count_not_finite(model.checkpoint[name])}
        yield _finding(None, None, counts, f"NaN or infinite weights ({_where(counts)}) stand outside the layers.")


def _finding(
    layer: int | None, map_name: str | None, counts: dict[str, int], text: str, reached: list[int] | None = None
) -> Finding:
    members = [Member("head", head) for head in reached or ()]
    members += [Member("tensor", None, name=name, number=count) for name, count in counts.items()]
    one = members[0].index if len(reached or ()) == 1 else None
    total = float(sum(counts.values()))
    return Finding("not_finite", layer, one, map_name, "values_not_finite", total, 0.0, text, tuple(members))


def overflowing_layers(model: Model, heads: MeasuredHeads) -> Iterator[Finding]:
    """Layers with heads that have no numbers because finite weights are too large to compute with."""
    for i, layer in enumerate(heads.layers.tolist()):
        without = {name: heads_without_numbers(heads, i, name) for name in MAPS}
        if not any(without.values()):
            continue
        tensors = model.attention_tensors(layer)
        largest, tensor = largest_weight(tensors)
        broken = {*heads.broken[layer], *(model.checkpoint.noted or ())}.intersection(own.name for own in tensors)
        if broken and largest < SQUARE_OVERFLOWS:
            continue  # NaN and infinity are the reason, and told of
        for name, those in without.items():
            if those:
                reached = indexed("head", those)
                text = f"Weights as large as {largest:.3g}, in {tensor}, overflow: {reached} cannot be measured."
                members = (*(Member("head", head) for head in those), Member("tensor", None, name=tensor))
                one = those[0] if len(those) == 1 else None
                yield Finding("overflow", layer, one, name, "largest_weight", largest, None, text, members)


def heads_without_numbers(heads: MeasuredHeads, i: int, map_name: str) -> list[int]:
    """Heads of the i-th layer of which a map or its bias is not finite."""
    measures = (heads.grid(f"{map_name}_{measure}")[i] for measure in ("frobenius", "bias_norm"))
    return np.flatnonzero(~np.all([np.isfinite(values) for values in measures], axis=0)).tolist()


def count_not_finite(tensor: Tensor) -> int:
    """How many values of a tensor are NaN or infinite."""
    unchecked = tensor.unchecked(set())
    if not tensor.shape:
        return int(not np.isfinite(unchecked.read()))
    rows = max(1, BLOCK_VALUES // max(1, int(np.prod(tensor.shape[1:]))))
    return sum(int(np.count_nonzero(~np.isfinite(block))) for _, block in unchecked.blocks(rows))


def _where(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} in {name}" for name, count in counts.items())

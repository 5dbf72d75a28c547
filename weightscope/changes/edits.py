"""What was done to whole layers between two checkpoints: copied, put in another order, edited along one direction."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import numpy as np

from weightscope.attention.layer import Layer
from weightscope.changes.heads import SAME
from weightscope.changes.tensors import Pair
from weightscope.checkpoint import Tensor
from weightscope.checkpoint.blocks import Block
from weightscope.errors import counted
from weightscope.findings import Finding, Member, indexed, spans
from weightscope.metrics.weight_changes import NEARLY_ALL, Along, first_directions, one_direction
from weightscope.model import Model
from weightscope.tensors.findings import changes_along_one_direction

SAMPLE = 4096  # values of a tensor that are compared first
ROUNDED = 0.01  # |B - A| / |A| of a copy: a cast to bfloat16 makes 0.002


def written_direction(a: Layer, b: Layer) -> Along | None:
    """The direction along which a layer's outputs W_O changed; None where they did not, or along several."""
    before, after = (np.asarray(layer.w_o).reshape(-1, layer.w_o.shape[-1]) for layer in (a, b))
    size = float(np.linalg.norm(before))
    if not np.isfinite(after).all() or not float(np.linalg.norm(after - before)) > SAME * size:
        return None
    share, _, along = first_directions(lambda: [(before, after)])
    return along if share >= NEARLY_ALL else None


def along_one_direction(written: Mapping[int, Along | None]) -> Iterator[Finding]:
    """Layers whose outputs changed along the same direction."""
    shared, cosine = one_direction([(layer, along) for layer, along in written.items() if along is not None])
    if shared:
        members = {Member("layer", layer): along for layer, along in shared.items()}
        yield changes_along_one_direction(members, cosine, f"The outputs W_O of {indexed('layer', list(shared))}")


def moved_layers(a: Model, b: Model, moved: Sequence[int]) -> Iterator[Finding]:
    """Layers of b that are other layers of a: in another order, or copies. `moved` are those that are not their own.

    Projections are compared as they are stored: the norms before them, which are folded into heads, may differ.
    """
    source = _sources(a, b, moved)
    while source:
        chain = [next(iter(source))]
        while (following := source.get(chain[-1], chain[0])) not in chain:
            chain.append(following)
        circle = source.get(chain[-1]) == chain[0]  # every layer of it is there once, at another's place
        for layer in chain if circle else chain[:1]:
            origin = source.pop(layer)
            if not circle:
                text = f"Layer {layer} is now a copy of layer {origin}: all of its projections are the same."
                yield _finding("copied_layer", layer, text, [origin])
        if circle:
            now = [chain[(i + 1) % len(chain)] for i in range(len(chain))]
            pairs = ", ".join(f"{layer} was {origin}" for layer, origin in sorted(zip(chain, now, strict=True)))
            text = f"{counted(len(chain), 'layer')}, {spans(chain)}, are in another order: {pairs}."
            yield _finding("swapped_layers", min(chain), text, sorted(chain))


def _finding(kind: str, layer: int, text: str, origins: Sequence[int]) -> Finding:
    members = tuple(Member("layer", origin) for origin in origins)
    return Finding(kind=kind, layer=layer, measure="layers", number=len(origins), usual=0.0, text=text, members=members)


def _sources(a: Model, b: Model, moved: Sequence[int]) -> dict[int, int]:
    """Which layer of a each of these layers of b is, where it is one."""
    layers_of_a = {layer: _projections(a, layer) for layer in a.attention_layers} if moved else {}
    samples = {layer: [_sample(tensor) for tensor in tensors] for layer, tensors in layers_of_a.items()}
    source = {}
    for layer in moved:
        tensors = _projections(b, layer)
        sampled = [_sample(tensor) for tensor in tensors]
        if _alike(samples[layer], sampled):
            continue
        for origin in (layer_a for layer_a, sample in samples.items() if _alike(sample, sampled)):
            if all(_is_copy(*pair) for pair in zip(layers_of_a[origin], tensors, strict=True)):
                source[layer] = origin
                break
    return source


def _projections(model: Model, layer: int) -> list[Tensor]:
    return [tensor for tensor in model.attention_tensors(layer) if len(tensor.shape) > 1]


def _sample(tensor: Tensor) -> np.ndarray:
    """The values of the first whole rows."""
    width = prod(tensor.shape[1:]) or 1
    return Block(tensor, 0, min(prod(tensor.shape), max(1, SAMPLE // width) * width)).values().astype(np.float64)


def _alike(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    """Whether all samples are the same up to rounding."""
    if [len(x) for x in a] != [len(x) for x in b] or not a:
        return False
    return all(float(np.linalg.norm(y - x)) <= ROUNDED * float(np.linalg.norm(x)) for x, y in zip(a, b, strict=True))


def _is_copy(a: Tensor, b: Tensor) -> bool:
    """Whether two whole tensors are the same up to rounding."""
    if a.shape != b.shape:
        return False
    moved = size = 0.0
    for x, y in Pair(a, b).pairs():
        moved, size = moved + float(((y.astype(np.float64) - x) ** 2).sum()), size + float((x**2).sum(dtype=np.float64))
    return size > 0 and moved <= ROUNDED**2 * size

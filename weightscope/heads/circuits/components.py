"""Composition by singular component: which directions of what one head writes another head reads.

W_VO(a) is a sum of components sigma_i u_i v_i'. The composition score of one of them with what head
b reads by, W = W_QK, W_QK' or W_VO, is |v_i W| / |W|_F, whatever its size (Merullo, Eickhoff and
Pavlick 2024, arXiv 2406.09519, "Talking Heads"). A whole head's score averages over components, and
can hide the one that carries a signal. Components with near-equal singular values are one space:
any rotation of them serves the matrix as well.
"""

import re
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from weightscope.core.compute.cores import in_threads
from weightscope.core.errors import CheckpointError
from weightscope.core.progress import bar
from weightscope.core.tables import Column, Table
from weightscope.model.layers.factored import Factored, inner
from weightscope.model.layers.layer import Layer
from weightscope.model.metrics.spaces import leading_blocks
from weightscope.model.model import Model

PLACE = re.compile(r"(\d{1,6})\.(\d{1,6})", re.ASCII)


class Component(NamedTuple):
    """A component of what a head writes, or several with near-equal singular values."""

    first: int  # counted from 1
    last: int
    cs: float  # its composition score
    energy: float  # the sum of its squared singular values

    @property
    def named(self) -> str:
        """`2`, or `3-4` for near-equal ones."""
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def components(vo: Factored, read: Factored) -> list[Component]:
    """Components of W_VO (d, d) with their composition score with W (d, d), largest sigma first."""
    _, s, vt = vo.svd()
    passed = vt @ read.left  # (r, r')
    # |v_i W|^2
    squares = np.einsum("ir,rs,is->i", passed, inner(read.right), passed, optimize=True)
    size = read.frobenius() ** 2
    parts = []
    for block in leading_blocks(s, vo.shape[0], len(s)):
        within = slice(block.start, block.stop)
        passing = float((s**2 * squares)[within].sum())
        energy = float((s[within] ** 2).sum())
        score = (max(passing, 0.0) / (energy * size)) ** 0.5 if size > 0 else float("nan")
        parts.append(Component(block.start + 1, block.stop, score, energy))
    return parts


def strongest_component(parts: Sequence[Component]) -> Component | None:
    """The component that is read most; None if the head writes nothing."""
    return max(parts, key=lambda part: part.cs, default=None)


def read_maps(layer: Layer, head: int) -> dict[str, Factored]:
    """The maps a head reads by: W_QK for its queries, W_QK' for its keys, W_VO for its values."""
    qk, vo = layer.head(head).qk, layer.head(head).vo
    return {"q": qk, "k": qk.T, "v": vo}


def read_by(model: Model, reader: str) -> Table:
    """Strongest component of every earlier head for one head's (`9.9`) queries, keys and values.

    The strongest comes first. Norms are folded into what reads.

    Raises
    ------
    CheckpointError
        There is no such head, or the model is cross-attention.
    """
    place = PLACE.fullmatch(reader)
    if place is None:
        raise CheckpointError(
            f"reader is '{reader[:100]}'; a head is written as layer and number, such as 9.9"
        )
    if model.family.memory is not None:
        raise CheckpointError(
            "cross-attention reads an encoder's output, not what earlier heads write"
        )
    index, number = map(int, place.groups())
    head = model.layer(index).head(number)
    d = model.config.d_model
    maps = {}
    for kind, w in read_maps(head.layer, number).items():
        maps[kind] = Factored(w.left.copy(), w.right.copy())
    rows = []
    for earlier in bar([i for i in model.own_layers if i < index], "components", "layer"):
        layer = model.layer(earlier)

        def of_head(a: int, layer: Layer = layer) -> list[tuple[str, int, list[Component]]]:
            return [(kind, a, components(layer.head(a).vo, w)) for kind, w in maps.items()]

        for kind, a, parts in chain.from_iterable(in_threads(of_head, range(layer.n_heads))):
            best = strongest_component(parts)
            if best is None:
                continue
            passing = [part.cs**2 * part.energy for part in parts]
            cs = (sum(passing) / sum(part.energy for part in parts)) ** 0.5
            share = best.cs**2 * best.energy / sum(passing) if sum(passing) else float("nan")
            usual = float(np.median([part.cs for part in parts]))
            rows.append((kind, earlier, a, best.named, best.cs, usual, share, cs))
    table = Table.of_rows(
        [
            Column("kind", meaning="what reads: q, k or v"),
            "from_layer",
            "from_head",
            Column("component", meaning="of W_VO, from 1 on; near-equal ones are one space"),
            Column("component_cs", symbol="CS of it", format=".3f", meaning="|v W| / |W|_F"),
            Column("usual_cs", symbol="median of the head's", format=".3f"),
            Column("share", format=".2f", meaning="of what the head writes and this one reads"),
            Column("cs", symbol="CS of the head", format=".3f", meaning=f"random: {d**-0.5:.3f}"),
        ],
        rows,
        f"Components of earlier heads that {reader} reads most.",
    )
    return table.sorted_by("component_cs", descending=True) if rows else table

"""What passes between two heads: edges.csv, with the directions that carry each edge."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from weightscope.attention.factored import Factored
from weightscope.circuitry.edges import MEASURES, Edge, strongest
from weightscope.circuitry.names import HeadRoles
from weightscope.circuitry.wiring import KINDS, Wiring
from weightscope.metrics.spectra import participation_ratio
from weightscope.model import Model
from weightscope.tables import Column, Table


def edges_table(model: Model, wired: Wiring, found: HeadRoles, top: int) -> Table:
    """edges.csv: the `top` strongest pairs of each kind by PK and by CS."""
    edges = [edge for kind in KINDS for measure in MEASURES for edge in strongest(wired, kind, measure, top)]
    ranks = channel_ranks(model, wired, edges)
    random = {kind: np.broadcast_to(wired.random_pk(kind).mean, wired.pk[kind].shape) for kind in KINDS}
    z = {
        (measure, kind): (wired.pk_z if measure == "pk" else wired.cs_z)(kind) for measure in MEASURES for kind in KINDS
    }
    shared = wired.n_heads // wired.n_kv_heads

    def of(values: Callable[[Edge], Any]) -> list[Any]:
        return [values(edge) for edge in edges]

    return Table(
        [
            Column("kind", of(lambda e: e.kind), meaning="what reads: q, k or v"),
            Column("ranked_by", of(lambda e: e.ranked_by), symbol="by"),
            Column("rank", of(lambda e: e.rank)),
            Column("from_layer", of(lambda e: int(wired.layers[e.i]))),
            Column("from_head", of(lambda e: e.a)),
            Column("to_layer", of(lambda e: int(wired.layers[e.j]))),
            Column("to_head", of(lambda e: e.b)),
            Column(
                "shared_by", of(lambda e: 1 if e.kind == "q" else shared),
                meaning="query heads of which the reading key-value head is one and PK is the same",
            ),
            Column("pk", of(lambda e: float(wired.pk[e.kind][e.pair])), symbol="PK", meaning="projection kernel"),
            Column("pk_random", of(lambda e: float(random[e.kind][e.pair])), meaning="of two random spaces"),
            Column("pk_z", of(lambda e: float(z["pk", e.kind][e.pair])), symbol="z of PK"),
            Column("cs", of(lambda e: float(wired.cs[e.kind][e.pair])), symbol="CS", meaning="composition score"),
            Column(
                "cs_above_random", of(lambda e: float(wired.cs[e.kind][e.pair]) - wired.random_cs),
                meaning="CS less 1/√d, the root mean square of matrices turned at random",
            ),
            Column("cs_z", of(lambda e: float(z["cs", e.kind][e.pair])), symbol="z of CS²"),
            Column(
                "channel_rank", ranks, symbol="rank of channel", format=".1f",
                meaning="participation ratio of the singular values of W_VO(a) W(b): how many directions carry it",
            ),
            Column("from_role", of(lambda e: found.names[e.i, e.a])),
            Column("to_role", of(lambda e: found.names[e.j, e.b])),
        ]
    )  # fmt: skip


def channel_ranks(model: Model, wired: Wiring, edges: Sequence[Edge]) -> np.ndarray:
    """How many directions carry each edge: the participation ratio of the singular values of W_VO(a) W(b)."""
    found = np.full(len(edges), np.nan)
    for i in sorted({edge.i for edge in edges}):
        first = model.layer(int(wired.layers[i]))
        written = {edge.a: first.head(edge.a).vo for edge in edges if edge.i == i}
        for j in sorted({edge.j for edge in edges if edge.i == i}):
            second = model.layer(int(wired.layers[j]))
            for at, edge in enumerate(edges):
                if (edge.i, edge.j) == (i, j):
                    head, vo = second.head(edge.b), written[edge.a]
                    read = {"q": head.qk, "k": Factored(head.qk.right, head.qk.left), "v": head.vo}[edge.kind]
                    channel = Factored(vo.left @ (vo.right.T @ read.left), read.right)
                    if not np.isfinite(channel.left).all():  # it overflows float32
                        wide = vo.right.T.astype(np.float64) @ read.left
                        channel = Factored(vo.left.astype(np.float64) @ wide, read.right)
                    found[at] = participation_ratio(channel.svdvals())
    return found

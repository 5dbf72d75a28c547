"""Changes of the roles of heads and of the edges between them, where these take seconds."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weightscope.core.errors import counted
from weightscope.core.files import Files
from weightscope.core.tables import Column, Table
from weightscope.heads.circuits.names import affordable_wiring
from weightscope.heads.circuits.wiring import PROJECTIONS, Wiring, strongest
from weightscope.model.model import Model
from weightscope.pairs.deeds.thresholds import EDGE_MOVED

TOP = 20  # edges of each kind, the strongest of either checkpoint


@dataclass(frozen=True, eq=False)
class CircuitChanges:
    """Heads whose role changed, and edges that grew or shrank."""

    roles: Table  # one row per head with another role
    # One row per edge, among the strongest of either checkpoint, whose projection kernel moved; the
    # largest move first.
    edges: Table

    @property
    def lead(self) -> str:
        """The number of changed roles and of moved edges, in a sentence."""
        heads, edges = counted(len(self.roles), "head"), counted(len(self.edges), "edge")
        return f"{heads} with another role, {edges} of the strongest moved."

    def write(self, files: Files) -> None:
        """Write roles.csv and edges.csv."""
        files.table("roles.csv", self.roles)
        files.table("edges.csv", self.edges)


def circuit_changes(a: Model, b: Model, order: np.ndarray) -> CircuitChanges | None:
    """Changed roles and edges; `order` (L, H) matches b's heads. None where unknown."""
    first = affordable_wiring(a)
    last = affordable_wiring(b) if first else None
    if first is None or last is None:
        return None
    (wiring_a, before), (wiring_b, after) = first, last
    after = np.take_along_axis(after, order, axis=1)
    layer, head = np.nonzero(before != after)
    columns = [
        Column("layer", wiring_a.layers[layer]),
        Column("head", head),
        Column(
            "role_a", before[layer, head], "role before", meaning="Empty for a head without one."
        ),
        Column("role_b", after[layer, head], "role after"),
    ]
    return CircuitChanges(Table(columns), _edges(wiring_a, wiring_b, order))


class MovedEdgeRow(NamedTuple):
    """An edge between heads before and after, as a row of edges.csv."""

    kind: str
    from_layer: int
    from_head: int
    to_layer: int
    to_head: int
    pk_a: float
    pk_b: float
    pk_change: float
    cs_a: float
    cs_b: float


def _edges(a: Wiring, b: Wiring, order: np.ndarray) -> Table:
    rows: list[MovedEdgeRow] = []
    back = np.argsort(order, axis=1)
    layer = np.arange(len(order))[:, None]
    for kind in PROJECTIONS:
        # b's heads in the order of a's, those that write and those that read
        pk, cs = (
            (scores_a[kind], scores_b[kind][layer, order][:, :, layer, order])
            for scores_a, scores_b in ((a.pk, b.pk), (a.cs, b.cs))
        )
        pairs = {edge.pair for edge in strongest(a, kind, "pk", TOP)}
        pairs |= {
            (e.i, int(back[e.i, e.a]), e.j, int(back[e.j, e.b]))
            for e in strongest(b, kind, "pk", TOP)
        }
        for pair in pairs:
            change = float(pk[1][pair] - pk[0][pair])
            if abs(change) > EDGE_MOVED * max(1, a.rank["o"][pair[:2]]):
                i, writer, j, reader = pair
                pk_a, pk_b, cs_a, cs_b = (float(scores[pair]) for scores in (*pk, *cs))
                row = MovedEdgeRow(
                    kind=kind,
                    from_layer=int(a.layers[i]),
                    from_head=writer,
                    to_layer=int(a.layers[j]),
                    to_head=reader,
                    pk_a=pk_a,
                    pk_b=pk_b,
                    pk_change=change,
                    cs_a=cs_a,
                    cs_b=cs_b,
                )
                rows.append(row)
    rows.sort(key=lambda row: -abs(row.pk_change))
    return Table.of(MovedEdgeRow, rows)

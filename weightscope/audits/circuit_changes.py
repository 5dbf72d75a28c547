"""Which roles and which edges of the wiring moved between two checkpoints, where finding that takes seconds."""

from dataclasses import dataclass

import numpy as np

from weightscope.audits.roles import named_wiring
from weightscope.circuitry.edges import strongest
from weightscope.circuitry.wiring import KINDS, Wiring
from weightscope.errors import counted
from weightscope.folder import Files
from weightscope.model import Model
from weightscope.tables import Column, Table

TOP = 20  # edges of each kind, the strongest of either checkpoint
MOVED = 0.02  # of the dimensions that a head writes: a smaller change of PK is no move


@dataclass(frozen=True, eq=False)
class CircuitChanges:
    """Heads that are called otherwise, and edges that grew or shrank.

    Attributes
    ----------
    roles : Table
        A row a head whose role is another.
    edges : Table
        A row an edge among the strongest of either checkpoint whose projection kernel moved, the farthest first.
    """

    roles: Table
    edges: Table

    @property
    def lead(self) -> str:
        """How many, in a sentence."""
        heads, edges = counted(len(self.roles), "head"), counted(len(self.edges), "edge")
        return f"{heads} of another role, {edges} of the strongest moved."

    def write(self, files: Files) -> None:
        """roles.csv and edges.csv."""
        files.table("roles.csv", self.roles)
        files.table("edges.csv", self.edges)


def circuit_changes(a: Model, b: Model, order: np.ndarray) -> CircuitChanges | None:
    """Roles and edges of two checkpoints beside each other; None for larger ones, or where something is not finite.

    Parameters
    ----------
    a, b : Model
    order : (L, H) int array
        Which head of b is compared with each head of a.
    """
    first = named_wiring(a)
    last = named_wiring(b) if first else None
    if first is None or last is None:
        return None
    (wired_a, before), (wired_b, after) = first, last
    after = np.take_along_axis(after, order, axis=1)
    layers = wired_a.layers
    moved = np.argwhere(before != after)
    roles = Table(
        [
            Column("layer", layers[moved[:, 0]]),
            Column("head", moved[:, 1]),
            Column("role_a", before[before != after], "role before", meaning="empty for a head without one"),
            Column("role_b", after[before != after], "role after"),
        ]
    )
    return CircuitChanges(roles, _edges(wired_a, wired_b, order))


def _edges(a: Wiring, b: Wiring, order: np.ndarray) -> Table:
    rows, back = [], np.argsort(order, axis=1)
    at = np.arange(len(order))[:, None], order
    for kind in KINDS:
        # b's heads in a's order, those that write and those that read
        pk, cs = ((own[kind], other[kind][at][:, :, at[0], at[1]]) for own, other in ((a.pk, b.pk), (a.cs, b.cs)))
        pairs = {edge.pair for edge in strongest(a, kind, "pk", TOP)}
        pairs |= {(e.i, int(back[e.i, e.a]), e.j, int(back[e.j, e.b])) for e in strongest(b, kind, "pk", TOP)}
        for pair in pairs:
            change = float(pk[1][pair] - pk[0][pair])
            if abs(change) > MOVED * max(1, a.rank["o"][pair[:2]]):
                i, head, j, other = pair
                numbers = [float(values[pair]) for both in (pk, cs) for values in both]
                rows.append([kind, int(a.layers[i]), head, int(a.layers[j]), other, *numbers[:2], change, *numbers[2:]])
    header = ["kind", "from_layer", "from_head", "to_layer", "to_head", "pk_a", "pk_b", "pk_change", "cs_a", "cs_b"]
    return Table.of_rows(header, sorted(rows, key=lambda row: -abs(row[7])))

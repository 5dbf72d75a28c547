"""What each head is, and which heads talk to each other: wiring, names and edges of one checkpoint."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weightscope.attention.factored import Factored
from weightscope.circuitry.names import HeadRoles, head_roles, roles_table
from weightscope.circuitry.wiring import KINDS, Wiring, wiring
from weightscope.device import open_device
from weightscope.errors import CheckpointError
from weightscope.folder import Files, OutputFolder
from weightscope.metrics.spectra import participation_ratio
from weightscope.model import Model
from weightscope.tables import Column, Table

if TYPE_CHECKING:
    from weightscope.circuitry.measured import Accuracy

TOP = 20
READS = {"q": "queries", "k": "keys", "v": "values"}
POST_NORM = (
    "the norms between two layers: what a head writes is centred and scaled by them on its way; spaces are compared as "
    "they are"
)
PARALLEL = (
    "attention and feed-forward network of a layer read the same stream: what a head writes passes no network before "
    "the next layer's heads"
)
PARALLEL_FAMILIES = ("gptj", "gpt_neox", "falcon", "phi", "cohere", "cohere2")


@dataclass(frozen=True, eq=False)
class Circuits:
    """The answer for one checkpoint.

    Attributes
    ----------
    name : str
        Of the checkpoint.
    wiring : Wiring
    roles : HeadRoles
    heads : Table
        A row a head: its name and every score.
    edges : Table
        The strongest pairs of each kind by either measure, ranked.
    caveats : tuple of str
    accuracy : Accuracy or None
        How the names hold when the model is run, if that was asked for.
    """

    name: str
    wiring: Wiring
    roles: HeadRoles
    heads: Table
    edges: Table
    caveats: tuple[str, ...]
    accuracy: "Accuracy | None" = None

    def write(self, out: str | Path | Files) -> None:
        """Write wiring.npz, edges.csv, roles.csv, circuits.png and .svg, and report.html into a folder."""
        from weightscope.circuitry.page import write_report

        if not isinstance(out, Files):
            with OutputFolder(Path(out)) as folder:
                self.write(folder)
            return
        self.wiring.write(out)
        out.table("edges.csv", self.edges)
        out.table("roles.csv", self.heads)
        if self.accuracy is not None:
            out.table("measured.csv", self.accuracy.heads)
            out.table("accuracy.csv", self.accuracy.table)
        write_report(self, out)

    def plot(self) -> Any:
        """The wiring diagram as a matplotlib figure."""
        from weightscope.circuitry.figures import diagram

        return diagram(self)

    @cached_property
    def named(self) -> dict[str, list[str]]:
        """Heads as layer.head under each name."""
        found: dict[str, list[str]] = {}
        for layer, head, role in zip(self.heads["layer"], self.heads["head"], self.heads["role"], strict=True):
            if role:
                found.setdefault(role, []).append(f"{layer}.{head}")
        return found

    def __repr__(self) -> str:
        return f"Circuits({self.name}: {len(self.heads)} heads, {sum(map(len, self.named.values()))} named)"

    def _repr_html_(self) -> str:
        return self.heads._repr_html_() + self.edges._repr_html_()


def circuits(
    model: Model,
    layers: Sequence[int] | None = None,
    top: int = TOP,
    device: str = "cpu",
) -> Circuits:
    """Name every head and find which heads talk to each other, from the weights alone.

    Parameters
    ----------
    model : Model
    layers : sequence of int, optional
        Heads of these layers only; all that are attention by default.
    top : int
        Edges of each kind, by each of the two measures.
    device : {"cpu", "cuda"}
        Where the products are computed.

    Raises
    ------
    CheckpointError
        A layer is no attention layer, or tensors are missing or broken.

    Examples
    --------
    >>> import weightscope as ws
    >>> found = ws.circuits(ws.open_model("embedded"))
    >>> found
    Circuits(embedded: 16 heads, 1 named)
    >>> found.wiring.pk["k"].shape
    (2, 8, 2, 8)
    """
    for layer in layers or ():
        if layer not in model.attention_layers:
            model.layer(layer)  # says why not
            raise CheckpointError(f"no attention layer {layer}", file=model.name)
    wired = wiring(model, layers, open_device(device))
    found = head_roles(model, wired)
    caveats = list(model.layer(model.attention_layers[-1]).caveats)
    caveats += [POST_NORM] * (model.family.closing is not None) + [PARALLEL] * (model.family.name in PARALLEL_FAMILIES)
    if found.lacking:
        caveats.append(f"tokens: {found.lacking}. Heads are named by their wiring alone")
    return Circuits(
        model.name, wired, found, roles_table(wired, found), edges_table(model, wired, found, top), tuple(caveats)
    )


@dataclass(frozen=True)
class Edge:
    """Head a of layer i writes what head b of layer j reads by its queries, keys or values; indices into the wiring."""

    kind: str
    ranked_by: str
    rank: int
    i: int
    a: int
    j: int
    b: int

    @property
    def pair(self) -> tuple[int, int, int, int]:
        return self.i, self.a, self.j, self.b


def strongest(wired: Wiring, kind: str, measure: str, top: int) -> list[Edge]:
    """The pairs that stand out most from random ones, by "pk" or "cs", first the most.

    Query heads that share a key-value head have one PK for their keys or values: of these the pair with the largest CS
    stands for all.
    """
    z = (wired.pk_z if measure == "pk" else wired.cs_z)(kind)
    n, h = wired.rank["o"].shape
    shared = 1 if kind == "q" or measure == "cs" else h // wired.n_kv_heads
    if shared > 1:
        grouped = np.nan_to_num(wired.cs[kind], nan=-1).reshape(n, h, n, -1, shared)
        kept = np.arange(shared) == grouped.argmax(axis=-1)[..., None]
        z = np.where(kept.reshape(z.shape), z, np.nan)
    flat = np.nan_to_num(z, nan=-np.inf).ravel()
    chosen = np.argpartition(-flat, min(top, len(flat) - 1))[:top] if len(flat) > top else np.arange(len(flat))
    order = chosen[np.argsort(-flat[chosen], kind="stable")]
    pairs = [np.unravel_index(at, z.shape) for at in order if np.isfinite(flat[at])]
    return [Edge(kind, measure, rank, *map(int, pair)) for rank, pair in enumerate(pairs, start=1)]


def edges_table(model: Model, wired: Wiring, found: HeadRoles, top: int) -> Table:
    """edges.csv: the `top` strongest pairs of each kind by PK and by CS."""
    edges = [edge for kind in KINDS for measure in ("pk", "cs") for edge in strongest(wired, kind, measure, top)]
    ranks = channel_ranks(model, wired, edges)
    random = {kind: np.broadcast_to(wired.random_pk(kind).mean, wired.pk[kind].shape) for kind in KINDS}
    z = {
        (measure, kind): (wired.pk_z if measure == "pk" else wired.cs_z)(kind)
        for measure in ("pk", "cs")
        for kind in KINDS
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

"""The circuits of one checkpoint: wiring, names of heads, and the strongest edges."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from weightscope.checkpoint.provenance import Provenance
from weightscope.core.compute.cores import in_threads
from weightscope.core.engine import Engine
from weightscope.core.errors import CheckpointError, counted, printable, wholes
from weightscope.core.files import Files
from weightscope.core.progress import bar
from weightscope.core.results import Result, ShowsShapes
from weightscope.core.tables import Column, Table
from weightscope.heads.circuits.components import (
    Component,
    components,
    read_maps,
    strongest_component,
)
from weightscope.heads.circuits.names import GIVEN, HeadRoles, head_roles, roles_table
from weightscope.heads.circuits.passes import GetModel, wiring
from weightscope.heads.circuits.wiring import Edge, Wiring, all_strongest, strongest
from weightscope.model.layers.factored import Factored
from weightscope.model.layers.layer import Layer
from weightscope.model.metrics.spaces import Nearest, leading_blocks, nearest_rows, shown
from weightscope.model.metrics.spectra import participation_ratio
from weightscope.model.model import Model, as_model
from weightscope.model.text.tokenizer import Tokenizer, token_names

TOKENS = 5  # tokens named at each end of a channel's first direction
AFFORDABLE = 4e11  # multiply-adds of reading the directions through the tokens: a few seconds


def edges_table(model: Model, wired: Wiring, roles: HeadRoles, top: int) -> Table:
    """edges.csv: the `top` strongest pairs of each kind by PK and by CS."""
    edges = all_strongest(wired, top)
    through = channels(model, wired, edges)
    tokens = channel_tokens(model, [channel.space for channel in through])

    def of(values: Callable[[Edge], Any]) -> list[Any]:
        return [values(edge) for edge in edges]

    def writer(edge: Edge) -> slice:
        return slice(edge.i, edge.i + 1)

    def z(measure: str) -> list[float]:
        return of(lambda e: float(wired.z_of(measure, e.kind, writer(e))[(0, *e.pair[1:])]))

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
                "shared_by",
                of(lambda e: 1 if e.kind == "q" else wired.shared),
                meaning="query heads that share the reading key-value head, and so this PK",
            ),
            Column(
                "pk",
                of(lambda e: float(wired.pk[e.kind][e.pair])),
                symbol="PK",
                meaning="projection kernel",
            ),
            Column(
                "pk_random",
                of(lambda e: float(wired.random_pk(e.kind, writer(e)).mean[(0, *e.pair[1:])])),
                meaning="of two random spaces",
            ),
            Column("pk_z", z("pk"), symbol="z of PK"),
            Column(
                "cs",
                of(lambda e: float(wired.cs[e.kind][e.pair])),
                symbol="CS",
                meaning="composition score",
            ),
            Column(
                "cs_above_random",
                of(lambda e: float(wired.cs[e.kind][e.pair]) - wired.random_cs),
                meaning="CS minus 1/√d, the root mean square for randomly rotated matrices",
            ),
            Column("cs_z", z("cs"), symbol="z of $CS²$"),
            Column(
                "component",
                [channel.component.named if channel.component else "" for channel in through],
                symbol="component",
                meaning="the one of W_VO(a) that is read most; near-equal ones are one space",
            ),
            Column(
                "component_cs",
                [channel.component.cs if channel.component else np.nan for channel in through],
                symbol="CS of it",
                meaning="composition score of that component alone",
            ),
            Column(
                "channel_rank",
                [channel.rank for channel in through],
                symbol="rank of channel",
                format=".1f",
                meaning="participation ratio of the singular values of W_VO(a) W(b): how many "
                "directions carry it",
            ),
            Column(
                "channel_share",
                [channel.share for channel in through],
                symbol="first direction",
                format=".2f",
                meaning="share in the sum of their squares of the first, or of the first few that "
                "are near-equal",
            ),
            Column(
                "channel_tokens",
                list(map(printable, tokens)),
                symbol="tokens of the first direction",
                meaning="tokens whose logits it raises most | lowers most, its sign being "
                "arbitrary; of near-equal directions those that lie most in their space",
            ),
            Column("from_role", of(lambda e: roles.names[e.i, e.a])),
            Column("to_role", of(lambda e: roles.names[e.j, e.b])),
        ]
    )


@dataclass(frozen=True, eq=False, repr=False)
class Channel(ShowsShapes):
    """What carries an edge: the singular directions of W_VO(a) W(b)."""

    rank: float  # Participation ratio of the singular values: how many directions carry it
    # Share of the first direction, or of all that are near-equal with it, in the sum of their
    # squares
    share: float
    # (d, k): What a writes along the first direction, or an orthonormal basis of what it writes
    # along all that are near-equal with it; k = 0 where these are too many to name tokens, or
    # nothing passes.
    space: np.ndarray
    component: Component | None  # of W_VO(a), the one that b reads most


def channels(model: Model, wired: Wiring, edges: Sequence[Edge]) -> list[Channel]:
    """The channel of every edge; each layer is read once, and the writing heads of earlier layers
    are kept.
    """
    written: dict[tuple[int, int], Factored] = {}
    channels: dict[int, Channel] = {}
    for m in bar(
        sorted({place for edge in edges for place in (edge.i, edge.j)}), "channels", "layer"
    ):
        layer = model.layer(int(wired.layers[m]))
        reading = [index for index, edge in enumerate(edges) if edge.j == m]
        pairs = [
            (written[edge.i, edge.a], _read(layer, edge))
            for edge in map(edges.__getitem__, reading)
        ]
        channels |= zip(reading, in_threads(lambda pair: _channel(*pair), pairs), strict=True)
        for a in {edge.a for edge in edges if edge.i == m}:
            vo = layer.head(a).vo
            # views would hold the whole layer
            written[m, a] = Factored(vo.left.copy(), vo.right.copy())
    return [channels[index] for index in range(len(edges))]


def _read(layer: Layer, edge: Edge) -> Factored:
    return read_maps(layer, edge.b)[edge.kind]


def _channel(vo: Factored, read: Factored) -> Channel:
    middle = vo.right.T @ read.left
    channel = Factored(vo.left @ middle, read.right)
    if not np.isfinite(channel.left).all():  # it overflows float32
        channel = Factored(
            vo.left.astype(np.float64) @ (vo.right.T.astype(np.float64) @ read.left), read.right
        )
    d = vo.shape[0]
    left, s, _ = channel.leading(lambda s: shown(leading_blocks(s, d, 1)))  # (d, k), (r,)
    space = np.linalg.qr(vo.right @ (vo.left.T @ left))[0]  # (d, k)
    first, total = leading_blocks(s, d, 1), (s**2).sum()
    share = float((first[0].values ** 2).sum() / total) if total > 0 else float("nan")
    if space.shape[1] == 1:  # QR may turn it round
        space *= np.sign(space[:, 0] @ (vo.right @ (vo.left.T @ left))[:, 0])
    read_most = strongest_component(components(vo, read))
    return Channel(float(participation_ratio(s)), share, space.astype(np.float32), read_most)


def channel_tokens(model: Model, spaces: Sequence[np.ndarray]) -> list[str]:
    """The tokens whose logits a single direction raises, and those it lowers, or that lie in a
    space; (d, k) each.

    Empty where a space is, and without an unembedding.
    """
    try:
        unembedding = model.unembedding
    except CheckpointError:
        return [""] * len(spaces)
    given = [space for space in spaces if space.shape[1]]
    if (
        not given
        or unembedding.n_tokens * model.config.d_model * sum(x.shape[1] for x in given) > AFFORDABLE
    ):
        return [""] * len(spaces)
    nearest = iter(nearest_rows(unembedding.blocks(), given, TOKENS, by_cosine=False))
    name = token_names(Tokenizer.at_hand(model))

    def text(sides: Iterable[Nearest]) -> str:
        return " | ".join(
            " ".join(repr(name(int(row))) for row in side.rows) for side in sides if len(side.rows)
        )

    return [text(next(nearest)) if space.shape[1] else "" for space in spaces]


TOP = 20
READS = {"q": "queries", "k": "keys", "v": "values"}
POST_NORM = (
    "the norms between two layers: what a head writes is centred and scaled by them on its way; "
    "spaces are compared as they are"
)
PARALLEL = (
    "attention and feed-forward network of a layer read the same stream: what a head writes passes "
    "no network before the next layer's heads"
)
ESTIMATED = (
    "exact values of pairs that cannot be among the strongest: in a model of this size theirs are "
    "estimates from sketches, off by some 10 %, and so are the roles that rest on wiring (exact_o* "
    "in wiring.npz says which)"
)


@dataclass(frozen=True)
class Accuracy:
    """What the heads did in a run, and how well the names agree."""

    heads: Table  # measured.csv: one row per head, its behaviour
    table: Table  # accuracy.csv: one row per score
    text: str  # What it was measured on


@dataclass(frozen=True, eq=False, repr=False)
class Circuits(Result):
    """The circuits of one checkpoint.

    Attributes
    ----------
    name : str
        Of the checkpoint.
    wiring : Wiring
    roles : HeadRoles
    heads : Table
        One row per head: its name and every score.
    edges : Table
        The strongest pairs of each kind by either measure, ranked.
    caveats : tuple of str
    accuracy : Accuracy or None
        How the names hold when the model is run, if that was asked for.
    provenance : Provenance
        What was read, by which command and version, and when.
    """

    FIGURE, PAGE = "heads.circuits.figures:diagram", "heads.circuits.page:write_report"

    name: str
    wiring: Wiring
    roles: HeadRoles
    heads: Table
    edges: Table
    caveats: tuple[str, ...]
    accuracy: Accuracy | None = None
    provenance: Provenance = field(default_factory=Provenance, repr=False)

    def write_tables(self, files: Files) -> None:
        """Write wiring.npz, edges.csv and roles.csv; measured.csv and accuracy.csv if the model was
        run.
        """
        self.wiring.write(files)
        files.table("edges.csv", self.edges)
        files.table("roles.csv", self.heads)
        if self.accuracy is not None:
            files.table("measured.csv", self.accuracy.heads)
            files.table("accuracy.csv", self.accuracy.table)

    @cached_property
    def named(self) -> dict[str, list[str]]:
        """Heads as layer.head under each name."""
        heads_by_role: dict[str, list[str]] = {}
        for layer, head, role in zip(
            self.heads["layer"], self.heads["head"], self.heads["role"], strict=True
        ):
            if role:
                heads_by_role.setdefault(role, []).append(f"{layer}.{head}")
        return heads_by_role

    @property
    def n_named(self) -> int:
        """How many heads have a name."""
        return sum(map(len, self.named.values()))

    def scores_of(self, role: str) -> list[str]:
        """The score of each head with this name, in the order of `named`, as text."""
        heads = self.heads.where(self.heads["role"] == role)
        return [f"{score:.2f}" for score in heads[GIVEN[role].score]]

    @property
    def named_heads(self) -> Table:
        """The named heads, with the scores that this checkpoint allows; `heads` has their intervals
        too.
        """
        kept = [
            column
            for column in self.heads.columns
            if column.values.dtype.kind != "f" or np.isfinite(column.values).any()
            if not column.name.endswith(("_low", "_high"))
            if column.name != "kv_head" or self.wiring.shared > 1
        ]
        return Table(kept).where(self.heads["role"] != "")

    @property
    def strongest_edges(self) -> Table:
        """The strongest pairs of all kinds by PK, in the columns to read first; `edges` has the
        rest.
        """
        edges = self.edges.where(self.edges["ranked_by"] == "pk").sorted_by("pk_z", descending=True)
        edges = edges.take(range(min(len(edges), TOP)))
        place = {int(layer): i for i, layer in enumerate(self.wiring.layers)}
        writers = zip(edges["from_layer"], edges["from_head"], strict=True)
        readers = zip(edges["kind"], _called(edges, "to"), strict=True)
        written = [
            int(self.wiring.rank["o"][place[int(layer)], int(head)]) for layer, head in writers
        ]
        return Table(
            [
                Column("from", _called(edges, "from"), symbol="what this head writes"),
                Column(
                    "to",
                    [f"{READS[kind]} of {head}" for kind, head in readers],
                    symbol="is read by",
                ),
                replace(edges.column("pk"), symbol="dimensions shared", format=".1f"),
                Column("of", written, symbol="of"),
                replace(edges.column("pk_random"), symbol="random spaces share", format=".1f"),
                replace(
                    edges.column("pk_z"), symbol="standard deviations above them", format=".1f"
                ),
            ]
        )

    @property
    def lead(self) -> str:
        """How many heads have a name, and the strongest link by keys, in a sentence or two."""
        layers = self.wiring.layers
        counts = f"{counted(len(self.heads), 'head')} in {counted(len(layers), 'layer')}"
        sentence = f"{counts}, {self.n_named} of them named from the weights alone."
        best = strongest(self.wiring, "k", "pk", 1)
        if not best:
            return sentence
        edge = best[0]
        a, b = f"{layers[edge.i]}.{edge.a}", f"{layers[edge.j]}.{edge.b}"
        pk, r = self.wiring.pk["k"][edge.pair], self.wiring.rank["o"][edge.i, edge.a]
        random = self.wiring.random_pk("k").mean[edge.pair]
        return (
            f"{sentence} Strongest link by keys: those of {b} overlap {pk:.1f} of the {r} "
            f"dimensions that {a} writes (random spaces: {random:.1f})."
        )

    @property
    def about(self) -> str:
        return f"{self.name}: {len(self.heads)} heads, {self.n_named} named"

    def shown(self) -> list[Table]:
        """Heads with a name, and the strongest edges."""
        return [self.named_heads, self.strongest_edges]

    def _repr_png_(self) -> bytes:
        return bytes(self.plot()._repr_png_())


def _called(edges: Table, side: str) -> list[str]:
    """Layer, head and name of the heads on one side of the edges, "from" or "to"."""
    parts = (edges[f"{side}_{part}"] for part in ("layer", "head", "role"))
    return [
        f"{layer}.{head}" + f", {role}" * bool(role)
        for layer, head, role in zip(*parts, strict=True)
    ]


def circuits(
    model: Model | str | Path,
    layers: Sequence[int] | None = None,
    top: int = TOP,
    device: str = "cpu",
    counts: str | Path | None = None,
    engine: Engine | None = None,
    on_worker: GetModel | None = None,
) -> Circuits:
    """Name every head and find which heads talk to each other, from the weights alone.

    Parameters
    ----------
    model : Model, str or Path
        A model, or what `open_model` opens.
    layers : sequence of int, optional
        Heads of these layers only; all that are attention by default.
    top : int
        Edges of each kind, by each of the two measures.
    device : {"cpu", "cuda"}
        Where the products are computed.
    counts : str or Path, optional
        Bigram counts (`weightscope bigrams`), by which heads of the first layer can be named
        detokenization heads.
    engine : Engine, optional
        Where tasks run; in this process if not given.
    on_worker : function returning the model, optional
        For an engine outside this process.

    Raises
    ------
    CheckpointError
        A layer is no attention layer, or tensors are missing or broken.

    Examples
    --------
    >>> import weightscope as ws
    >>> found = ws.circuits(ws.open_model("embedded"))
    >>> found
    Circuits(embedded: 16 heads, 0 named)
    >>> found.wiring.pk["k"].shape
    (2, 8, 2, 8)
    """
    model, layers = as_model(model), None if layers is None else wholes(layers, "layers")
    for layer in layers or ():
        if layer not in model.attention_layers:
            model.layer(layer)  # says why not
            raise CheckpointError(f"no attention layer {layer}", file=model.name)
    wired = wiring(model, layers, device, top, engine, on_worker)
    roles = head_roles(model, wired, counts)
    caveats = list(model.layer(model.attention_layers[-1]).caveats)
    if model.sharing:
        caveats.append(f"links between places of one layer ({model.sharing[:-1].lower()})")
    caveats += [POST_NORM] * (model.family.norms.after is not None) + [
        PARALLEL
    ] * model.family.parallel
    if roles.lacking:
        caveats.append(f"scores by tokens ({roles.lacking}); heads are named by their wiring alone")
    if not all(wired.exact[kind][np.isfinite(wired.pk[kind])].all() for kind in wired.pk):
        caveats.append(ESTIMATED)
    if wired.left:
        caveats.append(
            f"exact values of {wired.left:,} more pairs that may be among the strongest: too many "
            "are alike"
        )
    return Circuits(
        model.title,
        wired,
        roles,
        roles_table(wired, roles),
        edges_table(model, wired, roles, top),
        tuple(caveats),
        provenance=Provenance.of(model.checkpoint),
    )

"""The circuits of one checkpoint: wiring, names of heads, and the strongest edges."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from weightscope.checkpoint.provenance import Provenance
from weightscope.core.compute.cores import in_threads
from weightscope.core.engine import Engine
from weightscope.core.errors import CheckpointError, counted, printable, wholes
from weightscope.core.progress import bar
from weightscope.core.results import Result, ShowsShapes, holds_arrays
from weightscope.core.tables import Column, Table, column
from weightscope.heads.circuits.names import GIVEN, HeadRoles, head_roles, roles_table
from weightscope.heads.circuits.passes import GetModel, wiring
from weightscope.heads.circuits.wiring import Edge, Wiring, all_strongest, strongest
from weightscope.model.layers.factored import Factored, inner
from weightscope.model.layers.layer import Layer
from weightscope.model.metrics.spaces import Nearest, leading_blocks, nearest_rows, shown
from weightscope.model.metrics.spectra import participation_ratio
from weightscope.model.model import Model, as_model
from weightscope.model.text.tokenizer import Tokenizer, token_names
from weightscope.report.findings import indexed

# Composition by singular component: which directions of what one head writes another head reads
#
# W_VO(a) is a sum of components sigma_i u_i v_i'. The composition score of one of them with what
# head b reads by, W = W_QK, W_QK' or W_VO, is |v_i W| / |W|_F, whatever its size (Merullo, Eickhoff
# and Pavlick 2024, arXiv 2406.09519, "Talking Heads"). A whole head's score averages over
# components, and can hide the one that carries a signal. Components with near-equal singular values
# are one space: any rotation of them serves the matrix as well.

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
    d, looped = model.config.d_model, model.config.loops > 1
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
        f"Components of earlier heads that {reader} reads most{', in one pass' * looped}.",
    )
    return table.sort("component_cs", descending=True) if rows else table


TOKENS = 5  # tokens named at each end of a channel's first direction
AFFORDABLE = 4e11  # multiply-adds to find the tokens of all directions: a few seconds


class EdgeRow(NamedTuple):
    """A link between two heads, as a row of edges.csv."""

    kind: str = column("what reads: q, k or v")
    ranked_by: str = column(symbol="by")
    rank: int = column()
    from_layer: int = column()
    from_head: int = column()
    to_layer: int = column()
    to_head: int = column()
    shared_by: int = column("query heads that share the reading key-value head, and so this PK")
    pk: float = column("projection kernel", symbol="PK")
    pk_random: float = column("of two random spaces")
    pk_z: float = column(symbol="z of PK")
    cs: float = column("composition score", symbol="CS")
    cs_above_random: float = column(
        "CS minus 1/√d, the root mean square for randomly rotated matrices"
    )
    cs_z: float = column(symbol="z of $CS²$")
    component: int | str = column(
        "the one of W_VO(a) that is read most; near-equal ones are one space", symbol="component"
    )
    component_cs: float = column("composition score of that component alone", symbol="CS of it")
    channel_rank: float = column(
        "participation ratio of the singular values of W_VO(a) W(b): how many directions carry it",
        symbol="rank of channel",
        format=".1f",
    )
    channel_share: float = column(
        "share in the sum of their squares of the first, or of the first few that are near-equal",
        symbol="first direction",
        format=".2f",
    )
    channel_tokens: str = column(
        "tokens whose logits it raises most | lowers most, its sign being arbitrary; of near-equal "
        "directions those that lie most in their space",
        symbol="tokens of the first direction",
    )
    from_role: str = column()
    to_role: str = column()


def edges_table(model: Model, wired: Wiring, roles: HeadRoles, top: int) -> Table:
    """edges.csv: the `top` strongest pairs of each kind by PK and by CS."""
    edges = all_strongest(wired, top)
    through = channels(model, wired, edges)
    tokens = channel_tokens(model, [channel.space for channel in through])

    rows = []
    for edge, channel, named in zip(edges, through, tokens, strict=True):
        writer = slice(edge.i, edge.i + 1)  # arrays of its layer alone are (1, H, L, H)
        at_pair = (0, *edge.pair[1:])
        cs = float(wired.cs[edge.kind][edge.pair])
        component = channel.component
        row = EdgeRow(
            kind=edge.kind,
            ranked_by=edge.ranked_by,
            rank=edge.rank,
            from_layer=int(wired.layers[edge.i]),
            from_head=edge.a,
            to_layer=int(wired.layers[edge.j]),
            to_head=edge.b,
            shared_by=1 if edge.kind == "q" else wired.shared,
            pk=float(wired.pk[edge.kind][edge.pair]),
            pk_random=float(wired.random_pk(edge.kind, writer).mean[at_pair]),
            pk_z=float(wired.z_of("pk", edge.kind, writer)[at_pair]),
            cs=cs,
            cs_above_random=cs - wired.random_cs,
            cs_z=float(wired.z_of("cs", edge.kind, writer)[at_pair]),
            component=component.named if component else "",
            component_cs=component.cs if component else np.nan,
            channel_rank=channel.rank,
            channel_share=channel.share,
            channel_tokens=printable(named),
            from_role=roles.names[edge.i, edge.a],
            to_role=roles.names[edge.j, edge.b],
        )
        rows.append(row)
    return Table.of(EdgeRow, rows)


@holds_arrays
class Channel(ShowsShapes):
    """The singular directions of W_VO(a) W(b), which carry an edge."""

    rank: float  # participation ratio of the singular values
    # Energy of the first direction, or of all that are near-equal with it, as a share of all energy
    share: float
    # (d, k) orthonormal basis of what a writes along the first direction, or along all that are
    # near-equal with it; k = 0 if these are too many to name tokens, or nothing passes.
    space: np.ndarray
    component: Component | None  # the component of W_VO(a) that b reads most


def channels(model: Model, wired: Wiring, edges: Sequence[Edge]) -> list[Channel]:
    """The channel of every edge; reads each layer once and keeps the heads that later ones read."""
    written: dict[tuple[int, int], Factored] = {}
    channels: dict[int, Channel] = {}
    places = sorted({place for edge in edges for place in (edge.i, edge.j)})
    for m in bar(places, "channels", "layer"):
        layer = model.layer(int(wired.layers[m]))
        reading = [index for index, edge in enumerate(edges) if edge.j == m]
        pairs = []
        for index in reading:
            edge = edges[index]
            pairs.append((written[edge.i, edge.a], read_maps(layer, edge.b)[edge.kind]))
        channels |= zip(reading, in_threads(lambda pair: _channel(*pair), pairs), strict=True)
        for a in {edge.a for edge in edges if edge.i == m}:
            vo = layer.head(a).vo
            # Copies, because views would hold the whole layer
            written[m, a] = Factored(vo.left.copy(), vo.right.copy())
    return [channels[index] for index in range(len(edges))]


def _channel(vo: Factored, read: Factored) -> Channel:
    middle = vo.right.T @ read.left
    channel = Factored(vo.left @ middle, read.right)
    if not np.isfinite(channel.left).all():  # it overflows float32
        middle = vo.right.T.astype(np.float64) @ read.left
        channel = Factored(vo.left.astype(np.float64) @ middle, read.right)
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
    """Tokens that each space (d, k) raises | lowers most, or that lie in it if k > 1, as text.

    Empty where a space is, and without an unembedding.
    """
    try:
        unembedding = model.unembedding
    except CheckpointError:
        return [""] * len(spaces)
    given = [space for space in spaces if space.shape[1]]
    directions = sum(space.shape[1] for space in given)
    if not given or unembedding.n_tokens * model.config.d_model * directions > AFFORDABLE:
        return [""] * len(spaces)
    nearest = iter(nearest_rows(unembedding.blocks(), given, TOKENS, by_cosine=False))
    name = token_names(Tokenizer.at_hand(model))

    def text(sides: Iterable[Nearest]) -> str:
        named = [[repr(name(int(row))) for row in side.rows] for side in sides]
        return " | ".join(" ".join(names) for names in named if names)

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
BESIDE = "it reads the stream and writes to it as well, and none of its heads is compared"
ESTIMATED = (
    "exact values of pairs that cannot be among the strongest: in a model of this size theirs are "
    "estimates from sketches, off by some 10 %, and so are the roles that rest on wiring (exact_o* "
    "in wiring.npz says which)"
)


@dataclass(frozen=True)
class Accuracy:
    """Behaviour of the heads in a run, and how well the names agree with it."""

    heads: Table  # measured.csv: one row per head, its behaviour
    table: Table  # accuracy.csv: one row per score
    text: str  # the text and the tokens it was measured on


@holds_arrays
class Circuits(Result):
    """The circuits of one checkpoint.

    Attributes
    ----------
    name : str
        The checkpoint's.
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

    FIGURE, PAGE = "figures:diagram", "page:write_report"
    TABLES: ClassVar[dict[str, Callable[["Circuits"], Any]]] = {
        "wiring.npz": lambda circuits: circuits.wiring.arrays(),
        "edges.csv": attrgetter("edges"),
        "roles.csv": attrgetter("heads"),
        "measured.csv": lambda circuits: circuits.accuracy and circuits.accuracy.heads,
        "accuracy.csv": lambda circuits: circuits.accuracy and circuits.accuracy.table,
    }

    name: str
    wiring: Wiring
    roles: HeadRoles
    heads: Table
    edges: Table
    caveats: tuple[str, ...]
    accuracy: Accuracy | None = None
    provenance: Provenance = field(default_factory=Provenance, repr=False)

    @cached_property
    def named(self) -> dict[str, list[str]]:
        """Heads as layer.head under each name."""
        heads_by_role: dict[str, list[str]] = {}
        columns = (self.heads[name] for name in ("layer", "head", "role"))
        for layer, head, role in zip(*columns, strict=True):
            if role:
                heads_by_role.setdefault(role, []).append(f"{layer}.{head}")
        return heads_by_role

    @property
    def n_named(self) -> int:
        """Number of heads with a name."""
        return sum(map(len, self.named.values()))

    def scores_of(self, role: str) -> list[str]:
        """The score of each head with this name, in the order of `named`, as text."""
        heads = self.heads.where(self.heads["role"] == role)
        return [f"{score:.2f}" for score in heads[GIVEN[role].score]]

    @property
    def named_heads(self) -> Table:
        """The named heads and every score they have; `heads` has the intervals too."""

        def is_shown(column: Column) -> bool:
            if column.name.endswith(("_low", "_high")):
                return False
            if column.name == "kv_head" and self.wiring.shared == 1:
                return False
            return column.values.dtype.kind != "f" or bool(np.isfinite(column.values).any())

        shown = [column for column in self.heads.columns if is_shown(column)]
        return Table(shown).where(self.heads["role"] != "")

    @property
    def strongest_edges(self) -> Table:
        """The strongest pairs of all kinds by PK, in the main columns; `edges` has the rest."""
        edges = self.edges.where(self.edges["ranked_by"] == "pk").sort("pk_z", descending=True)
        edges = edges.take(range(min(len(edges), TOP)))
        place = {int(layer): i for i, layer in enumerate(self.wiring.layers)}
        writers = [place[int(layer)] for layer in edges["from_layer"]]
        written = self.wiring.rank["o"][writers, edges["from_head"].astype(int)]
        readers = zip(edges["kind"], _called(edges, "to"), strict=True)
        reading = [f"{READS[kind]} of {head}" for kind, head in readers]
        above_random = "standard deviations above them"
        return Table(
            [
                Column("from", _called(edges, "from"), symbol="what this head writes"),
                Column("to", reading, symbol="is read by"),
                replace(edges.column("pk"), symbol="dimensions shared", format=".1f"),
                Column("of", written.tolist(), symbol="of"),
                replace(edges.column("pk_random"), symbol="random spaces share", format=".1f"),
                replace(edges.column("pk_z"), symbol=above_random, format=".1f"),
            ]
        )

    @property
    def lead(self) -> str:
        """The number of named heads and the strongest link by keys, in a sentence or two."""
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
            f"{sentence} Strongest link by keys: head {b}'s keys overlap {pk:.1f} of the {r} "
            f"dimensions that head {a} writes (random spaces: {random:.1f})."
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
    columns = (edges[f"{side}_{part}"] for part in ("layer", "head", "role"))
    heads = zip(*columns, strict=True)
    return [f"{layer}.{head}, {role}" if role else f"{layer}.{head}" for layer, head, role in heads]


def circuits(
    model: Model | str | Path,
    layers: Sequence[int] | None = None,
    top: int = TOP,
    device: str = "cpu",
    counts: str | Path | None = None,
    engine: Engine | None = None,
    on_worker: GetModel | None = None,
) -> Circuits:
    """Name every head and find which heads read what others write, from the weights alone.

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
    Circuits(embedded: 24 heads, 0 named)
    >>> found.wiring.pk["k"].shape
    (4, 6, 4, 6)
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
    if model.family.norms.after is not None:
        caveats.append(POST_NORM)
    if model.family.parallel:
        caveats.append(PARALLEL)
    if model.mixer_layers:
        caveats.append(f"what has no softmax in {indexed('layer', model.mixer_layers)}: {BESIDE}")
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

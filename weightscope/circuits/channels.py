"""edges.csv: what passes between two heads, and along which directions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightscope.attention.factored import Factored
from weightscope.attention.layer import Layer
from weightscope.circuits.names import HeadRoles
from weightscope.circuits.wiring import Edge, Wiring, all_strongest
from weightscope.compute.cores import in_threads
from weightscope.errors import CheckpointError, printable
from weightscope.metrics.spaces import nearest_rows
from weightscope.metrics.spectra import participation_ratio
from weightscope.model import Model
from weightscope.progress import bar
from weightscope.results import ShowsShapes
from weightscope.tables import Column, Table
from weightscope.text.tokenizer import Tokenizer, token_names

TOKENS = 5  # tokens named at each end of a channel's first direction
AFFORDABLE = 4e11  # multiply-adds of reading the directions through the tokens: a few seconds


def edges_table(model: Model, wired: Wiring, found: HeadRoles, top: int) -> Table:
    """edges.csv: the `top` strongest pairs of each kind by PK and by CS."""
    edges = all_strongest(wired, top)
    through = channels(model, wired, edges)
    tokens = channel_tokens(model, [channel.direction for channel in through])

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
                "shared_by", of(lambda e: 1 if e.kind == "q" else wired.shared),
                meaning="query heads that share the reading key-value head, and so this PK",
            ),
            Column("pk", of(lambda e: float(wired.pk[e.kind][e.pair])), symbol="PK", meaning="projection kernel"),
            Column(
                "pk_random", of(lambda e: float(wired.random_pk(e.kind, writer(e)).mean[(0, *e.pair[1:])])),
                meaning="of two random spaces",
            ),
            Column("pk_z", z("pk"), symbol="z of PK"),
            Column("cs", of(lambda e: float(wired.cs[e.kind][e.pair])), symbol="CS", meaning="composition score"),
            Column(
                "cs_above_random", of(lambda e: float(wired.cs[e.kind][e.pair]) - wired.random_cs),
                meaning="CS minus 1/√d, the root mean square for randomly rotated matrices",
            ),
            Column("cs_z", z("cs"), symbol="z of $CS²$"),
            Column(
                "channel_rank", [channel.rank for channel in through], symbol="rank of channel", format=".1f",
                meaning="participation ratio of the singular values of W_VO(a) W(b): how many directions carry it",
            ),
            Column(
                "channel_share", [channel.share for channel in through], symbol="first direction", format=".2f",
                meaning="the first one's share in the sum of their squares",
            ),
            Column(
                "channel_tokens", list(map(printable, tokens)), symbol="tokens of the first direction",
                meaning="tokens whose logits it raises most | lowers most; the sign of a direction is arbitrary",
            ),
            Column("from_role", of(lambda e: found.names[e.i, e.a])),
            Column("to_role", of(lambda e: found.names[e.j, e.b])),
        ]
    )  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class Channel(ShowsShapes):
    """What carries an edge: the singular directions of W_VO(a) W(b)."""

    rank: float  # Participation ratio of the singular values: how many directions carry it
    share: float  # Share of the first direction in the sum of their squares
    direction: np.ndarray  # (d,): What a writes along the first, a unit vector of the stream


def channels(model: Model, wired: Wiring, edges: Sequence[Edge]) -> list[Channel]:
    """The channel of every edge; each layer is read once, and the writing heads of earlier layers are kept."""
    written: dict[tuple[int, int], Factored] = {}
    channels: dict[int, Channel] = {}
    for m in bar(sorted({place for edge in edges for place in (edge.i, edge.j)}), "channels", "layer"):
        layer = model.layer(int(wired.layers[m]))
        reading = [index for index, edge in enumerate(edges) if edge.j == m]
        pairs = [(written[edge.i, edge.a], _read(layer, edge)) for edge in map(edges.__getitem__, reading)]
        channels |= zip(reading, in_threads(lambda pair: _channel(*pair), pairs), strict=True)
        for a in {edge.a for edge in edges if edge.i == m}:
            vo = layer.head(a).vo
            written[m, a] = Factored(vo.left.copy(), vo.right.copy())  # views would hold the whole layer
    return [channels[index] for index in range(len(edges))]


def _read(layer: Layer, edge: Edge) -> Factored:
    head = layer.head(edge.b)
    return {"q": head.qk, "k": head.qk.T, "v": head.vo}[edge.kind]


def _channel(vo: Factored, read: Factored) -> Channel:
    middle = vo.right.T @ read.left
    channel = Factored(vo.left @ middle, read.right)
    if not np.isfinite(channel.left).all():  # it overflows float32
        channel = Factored(vo.left.astype(np.float64) @ (vo.right.T.astype(np.float64) @ read.left), read.right)
    left, s, _ = channel.leading(1)  # (d, 1), (r,)
    passed = (left[:, 0] @ vo.left) @ vo.right.T
    length, total = np.linalg.norm(passed), (s**2).sum()
    direction = passed / length if length > 0 else np.zeros_like(passed)
    share = float(s[0] ** 2 / total) if total > 0 else float("nan")
    return Channel(float(participation_ratio(s)), share, direction.astype(np.float32))


def channel_tokens(model: Model, directions: Sequence[np.ndarray]) -> list[str]:
    """The tokens whose logits each direction raises, and those it lowers; empty without an unembedding."""
    try:
        unembedding = model.unembedding
    except CheckpointError:
        return [""] * len(directions)
    if not directions or unembedding.n_tokens * model.config.d_model * len(directions) > AFFORDABLE:
        return [""] * len(directions)
    nearest = nearest_rows(unembedding.blocks(), [x[:, None] for x in directions], TOKENS, by_cosine=False)
    name = token_names(Tokenizer.at_hand(model))
    return [" | ".join(" ".join(repr(name(int(row))) for row in side.rows) for side in both) for both in nearest]

"""The pairs of heads that stand out: which head writes what another reads."""

from dataclasses import dataclass

import numpy as np

from weightscope.circuitry.wiring import KINDS, Wiring

MEASURES = ("pk", "cs")


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


def strongest(wired: Wiring, kind: str, measure: str, top: int, among: np.ndarray | None = None) -> list[Edge]:
    """The pairs that stand out most from random ones, by "pk" or "cs", first the most; among some if these are given.

    Query heads that share a key-value head have one PK for their keys or values: of these the pair with the largest CS
    stands for all.
    """
    z = wired.z(measure, kind)
    n, h = wired.rank["o"].shape
    shared = 1 if kind == "q" or measure == "cs" else wired.shared
    if shared > 1:
        grouped = np.nan_to_num(wired.cs[kind], nan=-1).reshape(n, h, n, -1, shared)
        kept = np.arange(shared) == grouped.argmax(axis=-1)[..., None]
        z[~kept.reshape(z.shape)] = np.nan
    if among is not None:
        z[~among] = np.nan
    below = np.negative(np.nan_to_num(z, copy=False, nan=-np.inf), out=z).ravel()  # the strongest are the least
    chosen = np.argpartition(below, min(top, len(below) - 1))[:top] if len(below) > top else np.arange(len(below))
    order = chosen[np.argsort(below[chosen], kind="stable")]
    pairs = [np.unravel_index(at, z.shape) for at in order if np.isfinite(below[at])]
    return [Edge(kind, measure, rank, *map(int, pair)) for rank, pair in enumerate(pairs, start=1)]


def all_strongest(wired: Wiring, top: int) -> list[Edge]:
    """The `top` pairs of every kind by each measure."""
    return [edge for kind in KINDS for measure in MEASURES for edge in strongest(wired, kind, measure, top)]

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
        z = np.where(kept.reshape(z.shape), z, np.nan)
    z = z if among is None else np.where(among, z, np.nan)
    flat = np.nan_to_num(z, nan=-np.inf).ravel()
    chosen = np.argpartition(-flat, min(top, len(flat) - 1))[:top] if len(flat) > top else np.arange(len(flat))
    order = chosen[np.argsort(-flat[chosen], kind="stable")]
    pairs = [np.unravel_index(at, z.shape) for at in order if np.isfinite(flat[at])]
    return [Edge(kind, measure, rank, *map(int, pair)) for rank, pair in enumerate(pairs, start=1)]


def all_strongest(wired: Wiring, top: int) -> list[Edge]:
    """The `top` pairs of every kind by each measure."""
    return [edge for kind in KINDS for measure in MEASURES for edge in strongest(wired, kind, measure, top)]

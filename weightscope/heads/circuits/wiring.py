"""Which heads read what other heads write: projection kernel and composition score of all pairs,
and chance levels.

Head a writes in the space of W_O(a), an earlier layer's; head b reads by X, one of Q, K and V, in
the space of W_X(b). The projection kernel PK is the sum of the squared cosines of the angles
between the two spaces, from 0 to r (Yamagiwa, Takase and Shimodaira 2026, arXiv 2601.10266). The
composition score CS is |W_VO(a) W(b)|_F / (|W_VO(a)|_F |W(b)|_F) for W = W_QK, W_QK' and W_VO
(Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits").
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from weightscope.core.files import Files
from weightscope.core.results import ShowsShapes

PROJECTIONS = ("q", "k", "v")
ALL = slice(None)


@dataclass(frozen=True, eq=False, repr=False)
class Overlap(ShowsShapes):
    """Mean and spread of the overlap of two randomly oriented spaces.

    For symmetric A and B and a rotation R drawn at random, tr(A R B R') has mean tr A tr B / d and
    variance 2 (d tr A^2 - tr^2 A) (d tr B^2 - tr^2 B) / (d^2 (d - 1) (d + 2)). With projections
    this is PK, with shares of directions CS^2.
    """

    mean: np.ndarray
    spread: np.ndarray


def random_overlap(trace_a: Any, square_a: Any, trace_b: Any, square_b: Any, d: int) -> Overlap:
    """Mean and standard deviation of tr(A R B R') over rotations R of R^d."""
    varied = (d * np.asarray(square_a) - np.asarray(trace_a) ** 2) * (
        d * np.asarray(square_b) - np.asarray(trace_b) ** 2
    )
    variance = 2 * np.maximum(varied, 0) / (d**2 * max(d - 1, 1) * (d + 2))
    return Overlap(np.asarray(trace_a) * np.asarray(trace_b) / d, np.sqrt(variance))


@dataclass(frozen=True, eq=False, repr=False)
class Wiring(ShowsShapes):
    """Both measures of all pairs, and their values for random matrices of the same kind."""

    layers: np.ndarray  # (L,): Indices of the attention layers
    # pk, cs: (L, H, L, H): By the letter of what reads; [l, a, m, b] for head a of layers[l] and
    # head b of layers[m]. NaN where b is not in a later layer.
    pk: dict[str, np.ndarray]
    cs: dict[str, np.ndarray]
    # (L, H): Dimensions of what a head writes ("o") and reads ("q", "k", "v")
    rank: dict[str, np.ndarray]
    # (L, H): Sum of the squared shares of the directions, 1/r where all are used alike and 1 where
    # one alone is.
    concentration: dict[str, np.ndarray]
    n_kv_heads: int  # Heads that share one have the same PK for keys and values
    width: int  # Dimensions that spaces can differ in, d or d - 1
    # (L, H, L, H): Whether a pair's measures are exact; estimates from sketches where not, in large
    # models.
    exact: dict[str, np.ndarray]
    # Pairs that are estimates and may yet be among the strongest; 0 unless there were too many to
    # be computed.
    left: int = 0

    @property
    def n_heads(self) -> int:
        """Query heads of a layer."""
        return self.rank["o"].shape[1]

    @property
    def shared(self) -> int:
        """Query heads that share a key-value head."""
        return self.n_heads // self.n_kv_heads

    def random_pk(self, kind: str, layers: slice = ALL) -> Overlap:
        """Mean and spread of PK of two random spaces of the same dimensions, (L, H, L, H); of some
        layers' writers.
        """
        a, b = self.rank["o"][layers, :, None, None], self.rank[kind]
        return random_overlap(a, a, b, b, self.width)

    def random_cs_squared(self, kind: str, layers: slice = ALL) -> Overlap:
        """Mean and spread of CS^2 of matrices turned at random, (L, H, L, H); of some layers'
        writers.
        """
        written = self.concentration["o"][layers, :, None, None]
        return random_overlap(1.0, written, 1.0, self.concentration[kind], self.width)

    @property
    def random_cs(self) -> float:
        """Root of the mean squared CS over random orientations: 1/sqrt(d), whatever the singular
        values.
        """
        return float(self.width**-0.5)

    def z(self, measure: str, kind: str) -> np.ndarray:
        """How many standard deviations "pk" or "cs" lies above random spaces or matrices, (L, H, L,
        H).

        For CS it is the square's.
        """
        z = np.empty(self.pk[kind].shape)
        for facts in self.by_layer:
            z[facts] = self.z_of(measure, kind, facts)
        return z

    @property
    def by_layer(self) -> list[slice]:
        """Each layer of writers by itself: what is computed of all pairs is held for one layer's at
        a time.
        """
        return [slice(i, i + 1) for i in range(len(self.layers))]

    def z_of(self, measure: str, kind: str, layers: slice) -> np.ndarray:
        """`z` of what some layers write."""
        measures = {
            "pk": (self.pk[kind][layers], self.random_pk),
            "cs": (self.cs[kind][layers] ** 2, self.random_cs_squared),
        }
        values, random = measures[measure][0], measures[measure][1](kind, layers)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(random.spread > 0, (values - random.mean) / random.spread, np.nan)

    def write(self, files: Files) -> None:
        """wiring.npz: both measures, what of them is exact, the layers' indices, what random
        baselines are made of.
        """
        files.npz(
            "wiring.npz",
            layers=self.layers,
            width=np.array(self.width),
            **{f"pk_o{kind}": self.pk[kind] for kind in PROJECTIONS},
            **{f"cs_o{kind}": self.cs[kind] for kind in PROJECTIONS},
            **{f"exact_o{kind}": self.exact[kind] for kind in PROJECTIONS},
            **{f"rank_{kind}": rank for kind, rank in self.rank.items()},
            **{f"concentration_{kind}": each for kind, each in self.concentration.items()},
        )


# The strongest pairs

MEASURES = ("pk", "cs")


@dataclass(frozen=True)
class Edge:
    """Head a of layer i writes what head b of layer j reads by its queries, keys or values; indices
    into the wiring.
    """

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


def strongest(
    wired: Wiring, kind: str, measure: str, top: int, among: np.ndarray | None = None
) -> list[Edge]:
    """The pairs that stand out most from random ones, by "pk" or "cs", strongest first; only pairs
    in `among` if given.

    Query heads that share a key-value head have one PK for their keys or values: only the pair with
    the largest CS is kept.
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
    # the strongest are the least
    below = np.negative(np.nan_to_num(z, copy=False, nan=-np.inf), out=z).ravel()
    chosen = (
        np.argpartition(below, min(top, len(below) - 1))[:top]
        if len(below) > top
        else np.arange(len(below))
    )
    order = chosen[np.argsort(below[chosen], kind="stable")]
    pairs = [np.unravel_index(place, z.shape) for place in order if np.isfinite(below[place])]
    return [Edge(kind, measure, rank, *map(int, pair)) for rank, pair in enumerate(pairs, start=1)]


def all_strongest(wired: Wiring, top: int) -> list[Edge]:
    """The `top` pairs of every kind by each measure."""
    return [
        edge
        for kind in PROJECTIONS
        for measure in MEASURES
        for edge in strongest(wired, kind, measure, top)
    ]

"""Projection kernel and composition score of all pairs of heads, and their chance levels.

Head a writes in the space of W_O(a), an earlier layer's; head b reads by X, one of Q, K and V, in
the space of W_X(b). The projection kernel PK is the sum of the squared cosines of the angles
between the two spaces, from 0 to r (Yamagiwa, Takase and Shimodaira 2026, arXiv 2601.10266). The
composition score CS is |W_VO(a) W(b)|_F / (|W_VO(a)|_F |W(b)|_F) for W = W_QK, W_QK' and W_VO
(Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits").
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from weightscope.core.results import ShowsShapes, holds_arrays

PROJECTIONS = ("q", "k", "v")
ALL = slice(None)


@holds_arrays
class RandomOverlap(ShowsShapes):
    """Mean and spread of the overlap of two randomly oriented spaces.

    For symmetric A and B and a rotation R drawn at random, tr(A R B R') has mean tr A tr B / d and
    variance 2 (d tr A^2 - tr^2 A) (d tr B^2 - tr^2 B) / (d^2 (d - 1) (d + 2)). With projections
    this is PK, with shares of directions CS^2.
    """

    mean: np.ndarray
    spread: np.ndarray


def random_overlap(
    trace_a: Any, square_a: Any, trace_b: Any, square_b: Any, d: int
) -> RandomOverlap:
    """Mean and standard deviation of tr(A R B R') over rotations R of R^d."""
    trace_a, trace_b = np.asarray(trace_a), np.asarray(trace_b)
    varied_a = d * np.asarray(square_a) - trace_a**2
    varied_b = d * np.asarray(square_b) - trace_b**2
    variance = 2 * np.maximum(varied_a * varied_b, 0) / (d**2 * max(d - 1, 1) * (d + 2))
    return RandomOverlap(trace_a * trace_b / d, np.sqrt(variance))


@holds_arrays
class Wiring(ShowsShapes):
    """Both measures of all pairs, and their values for random matrices of the same kind."""

    layers: np.ndarray  # (L,) indices of the attention layers
    # (L, H, L, H), by the letter of what reads: [l, a, m, b] for head a of layers[l] and head b of
    # layers[m]; NaN where b is not in a later layer
    pk: dict[str, np.ndarray]
    cs: dict[str, np.ndarray]
    rank: dict[str, np.ndarray]  # (L, H) dimensions that a head writes ("o"), reads ("q", "k", "v")
    # (L, H) sum of the directions' squared shares, 1/r if all are used alike, 1 if one alone is
    concentration: dict[str, np.ndarray]
    n_kv_heads: int  # heads that share one have the same PK for keys and values
    width: int  # dimensions that spaces can differ in, d or d - 1
    exact: dict[str, np.ndarray]  # (L, H, L, H) bool; sketches estimate the rest in large models
    left: int = 0  # estimates too many to compute that may yet be among the strongest

    @property
    def n_heads(self) -> int:
        """Query heads of a layer."""
        return self.rank["o"].shape[1]

    @property
    def shared(self) -> int:
        """Query heads that share a key-value head."""
        return self.n_heads // self.n_kv_heads

    def random_pk(self, kind: str, layers: slice = ALL) -> RandomOverlap:
        """PK of random spaces of the same dimensions, (L, H, L, H), for some layers' writers."""
        a, b = self.rank["o"][layers, :, None, None], self.rank[kind]
        return random_overlap(a, a, b, b, self.width)

    def random_cs_squared(self, kind: str, layers: slice = ALL) -> RandomOverlap:
        """CS^2 of matrices turned at random, (L, H, L, H), for some layers' writers."""
        written = self.concentration["o"][layers, :, None, None]
        return random_overlap(1.0, written, 1.0, self.concentration[kind], self.width)

    @property
    def random_cs(self) -> float:
        """Root mean square of CS over random orientations: 1/sqrt(d) for any singular values."""
        return float(self.width**-0.5)

    def z(self, measure: str, kind: str) -> np.ndarray:
        """Standard deviations of PK or CS^2 above random ones, for "pk" or "cs", (L, H, L, H)."""
        z = np.empty(self.pk[kind].shape)
        for facts in self.by_layer:
            z[facts] = self.z_of(measure, kind, facts)
        return z

    @property
    def by_layer(self) -> list[slice]:
        """Slices of one layer of writers each, to compute all pairs in little memory."""
        return [slice(i, i + 1) for i in range(len(self.layers))]

    def z_of(self, measure: str, kind: str, layers: slice) -> np.ndarray:
        """`z` of what some layers write."""
        if measure == "pk":
            values, random = self.pk[kind][layers], self.random_pk(kind, layers)
        else:
            values, random = self.cs[kind][layers] ** 2, self.random_cs_squared(kind, layers)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(random.spread > 0, (values - random.mean) / random.spread, np.nan)

    def arrays(self) -> dict[str, np.ndarray]:
        """Arrays of wiring.npz: both measures, where they are exact, and what baselines need."""
        return {
            "layers": self.layers,
            "width": np.array(self.width),
            **{f"pk_o{kind}": self.pk[kind] for kind in PROJECTIONS},
            **{f"cs_o{kind}": self.cs[kind] for kind in PROJECTIONS},
            **{f"exact_o{kind}": self.exact[kind] for kind in PROJECTIONS},
            **{f"rank_{kind}": rank for kind, rank in self.rank.items()},
            **{f"concentration_{kind}": values for kind, values in self.concentration.items()},
        }


# The strongest pairs

MEASURES = ("pk", "cs")


@dataclass(frozen=True)
class Edge:
    """A link from what head a of layer i writes to what head b of layer j reads."""

    kind: str  # "q", "k" or "v": what reads
    ranked_by: str  # "pk" or "cs"
    rank: int
    i: int  # index into the wiring's layers
    a: int
    j: int
    b: int

    @property
    def pair(self) -> tuple[int, int, int, int]:
        return self.i, self.a, self.j, self.b


def strongest(
    wired: Wiring, kind: str, measure: str, top: int, among: np.ndarray | None = None
) -> list[Edge]:
    """Pairs that stand out most by "pk" or "cs", strongest first; from the mask `among` if given.

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
    # Negated, so that the strongest come first
    below = np.negative(np.nan_to_num(z, copy=False, nan=-np.inf), out=z).ravel()
    if len(below) > top:
        chosen = np.argpartition(below, min(top, len(below) - 1))[:top]
    else:
        chosen = np.arange(len(below))
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

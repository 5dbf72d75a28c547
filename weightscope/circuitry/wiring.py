"""Which heads read what other heads write: projection kernel and composition score of all pairs, in one pass.

Head a writes in the space of W_O(a), an earlier layer's; head b reads by X, one of Q, K and V, in the space of W_X(b).
The projection kernel PK is the sum of the squared cosines of the angles between the two spaces, from 0 to r (Yamagiwa,
Takase and Shimodaira 2026, arXiv 2601.10266). The composition score CS is |W_VO(a) W(b)|_F / (|W_VO(a)|_F |W(b)|_F) for
W = W_QK, W_QK' and W_VO (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"). The products of
whole layers serve both (`products`), and nothing of size d x d is made.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightscope.circuitry.products import Written, pair_scores
from weightscope.circuitry.spaces import layer_spaces
from weightscope.device import CPU, Device
from weightscope.errors import TooLargeError
from weightscope.folder import Files
from weightscope.model import Model
from weightscope.overflow import overflow
from weightscope.parallel import in_threads
from weightscope.progress import bar
from weightscope.shapes import ShowsShapes

KINDS = ("q", "k", "v")
WRITTEN_BYTES = 384 << 20  # bases of what is written that are held at a time; layers that read them pass by


@dataclass(frozen=True, eq=False, repr=False)
class Overlap(ShowsShapes):
    """What two spaces that lie anyhow towards each other have in common, on average, and how much that varies.

    For symmetric A and B and a rotation R drawn at random, tr(A R B R') has mean tr A tr B / d and variance
    2 (d tr A^2 - tr^2 A) (d tr B^2 - tr^2 B) / (d^2 (d - 1) (d + 2)). With projections this is PK, with shares of
    directions CS^2.

    Attributes
    ----------
    mean, spread : arrays
    """

    mean: np.ndarray
    spread: np.ndarray


def random_overlap(trace_a: Any, square_a: Any, trace_b: Any, square_b: Any, d: int) -> Overlap:
    """Mean and standard deviation of tr(A R B R') over rotations R of R^d.

    Parameters
    ----------
    trace_a, square_a, trace_b, square_b : arrays that broadcast
        tr A, tr A^2, tr B, tr B^2; both are r for the projection onto a space of r dimensions.
    d : int
    """
    varied = (d * np.asarray(square_a) - np.asarray(trace_a) ** 2) * (
        d * np.asarray(square_b) - np.asarray(trace_b) ** 2
    )
    variance = 2 * np.maximum(varied, 0) / (d**2 * max(d - 1, 1) * (d + 2))
    return Overlap(np.asarray(trace_a) * np.asarray(trace_b) / d, np.sqrt(variance))


@dataclass(frozen=True, eq=False, repr=False)
class Wiring(ShowsShapes):
    """Both measures of all pairs, with what random matrices of the same kind would give.

    Attributes
    ----------
    layers : (L,) int array
        Indices of the attention layers.
    pk, cs : dict of (L, H, L, H) float32 arrays
        By the letter of what reads; [l, a, m, b] for head a of layers[l] and head b of layers[m]. NaN where b is not
        in a later layer.
    rank : dict of (L, H) arrays
        Dimensions of what a head writes ("o") and reads ("q", "k", "v").
    concentration : dict of (L, H) arrays
        Sum of the squared shares of the directions, 1/r where all are used alike and 1 where one alone is.
    n_kv_heads : int
        Heads that share one have the same PK for keys and values.
    width : int
        Dimensions that spaces can differ in, d or d - 1.
    """

    layers: np.ndarray
    pk: dict[str, np.ndarray]
    cs: dict[str, np.ndarray]
    rank: dict[str, np.ndarray]
    concentration: dict[str, np.ndarray]
    n_kv_heads: int
    width: int

    @property
    def n_heads(self) -> int:
        """Query heads of a layer."""
        return self.rank["o"].shape[1]

    def random_pk(self, kind: str) -> Overlap:
        """Mean and spread of PK of two random spaces of the same dimensions, (L, H, L, H)."""
        a, b = self.rank["o"][:, :, None, None], self.rank[kind]
        return random_overlap(a, a, b, b, self.width)

    def pk_z(self, kind: str) -> np.ndarray:
        """How many standard deviations PK lies above that of random spaces, (L, H, L, H)."""
        random = self.random_pk(kind)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(random.spread > 0, (self.pk[kind] - random.mean) / random.spread, np.nan)

    @property
    def random_cs(self) -> float:
        """Root of the mean squared CS over random orientations: 1/sqrt(d), whatever the singular values."""
        return float(self.width**-0.5)

    def cs_z(self, kind: str) -> np.ndarray:
        """How many standard deviations CS^2 lies above that of matrices turned at random, (L, H, L, H)."""
        random = random_overlap(
            1.0, self.concentration["o"][:, :, None, None], 1.0, self.concentration[kind], self.width
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(random.spread > 0, (self.cs[kind] ** 2 - random.mean) / random.spread, np.nan)

    def write(self, files: Files) -> None:
        """wiring.npz: both measures, the layers' indices, and what random baselines are made of."""
        files.npz(
            "wiring.npz",
            layers=self.layers,
            width=np.array(self.width),
            **{f"pk_o{kind}": self.pk[kind] for kind in KINDS},
            **{f"cs_o{kind}": self.cs[kind] for kind in KINDS},
            **{f"rank_{kind}": rank for kind, rank in self.rank.items()},
            **{f"concentration_{kind}": each for kind, each in self.concentration.items()},
        )


def wiring(
    model: Model,
    layers: Sequence[int] | None = None,
    device: Device = CPU,
) -> Wiring:
    """Projection kernel and composition score of every pair of heads in different layers.

    What layers write is held for as many of them as fit `WRITTEN_BYTES`, while the later layers pass by one at a time;
    then the next ones. A checkpoint within that limit is gone through once, a larger one as often as it takes.

    Parameters
    ----------
    model : Model
    layers : sequence of int, optional
        Only these; all that are attention by default.
    device : Device, optional
        Where the products are computed.
    """
    indices = sorted(set(model.attention_layers if layers is None else layers))
    n, h = len(indices), model.config.n_heads
    pk, cs = ({kind: np.full((n, h, n, h), np.nan, np.float32) for kind in KINDS} for _ in range(2))
    rank = {kind: np.zeros((n, h), int) for kind in ("o", *KINDS)}
    concentration = {kind: np.zeros((n, h)) for kind in ("o", *KINDS)}
    centred = model.family.norm is not None and model.family.norm.centred
    shown = bar(what="wiring", unit="pair of layers", total=n * (n - 1) // 2)
    for group in _groups(n, h * model.config.head_dim * model.config.d_model * 4):
        written: list[tuple[int, Written]] = []
        for m in range(group.start, n):
            try:
                spaces = layer_spaces(model.layer(indices[m]), centred=centred)
            except TooLargeError as error:
                raise overflow(model, f"{error} of layer {indices[m]}", indices[m]) from None
            for kind, own in {"o": spaces.written, **spaces.read}.items():
                rank[kind][m] = own.of_heads(own.rank)
                concentration[kind][m] = (own.use**2).sum(axis=-1).ravel()
            there = {kind: device.put(read.directions) for kind, read in spaces.read.items()} if written else {}
            tasks = [
                (earlier, kind, (rows, spaces.read[kind], device, there[kind]))
                for earlier, rows in written
                for kind in there
            ]
            found = in_threads(lambda task: pair_scores(*task[2]), tasks)
            for (earlier, kind, _), (pk_of_pair, squared) in zip(tasks, found, strict=True):
                pk[kind][earlier, :, m], cs[kind][earlier, :, m] = pk_of_pair, np.sqrt(np.maximum(squared, 0))
            shown.update(len(written))
            if m in group:
                written.append((m, Written.whole(spaces.written, device)))
    shown.close()
    width = model.config.d_model - centred
    return Wiring(np.array(indices), pk, cs, rank, concentration, model.config.n_kv_heads, width)


def _groups(n_layers: int, bytes_a_layer: int) -> Iterator[range]:
    """Runs of layers whose written bases fit `WRITTEN_BYTES`; the last layer writes for nobody here."""
    size = max(1, WRITTEN_BYTES // bytes_a_layer)
    for start in range(0, max(1, n_layers - 1), size):
        yield range(start, min(start + size, n_layers))

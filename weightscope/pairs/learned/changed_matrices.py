"""The change of one matrix: its leading directions, and where these lie among the base's."""

from dataclasses import dataclass
from math import nan, sqrt

import numpy as np

from weightscope.core.results import ShowsShapes
from weightscope.heads.tensors.measure import BITS
from weightscope.model.rows.names import TRANSPOSED, NamedTensor
from weightscope.pairs.changes.counterparts import Counterparts
from weightscope.pairs.deeds.change import Change

DIRECTIONS = 16  # leading ones of each change that are kept
SPARE, POWERS = 8, 4  # further columns of the sketch, and its power iterations
ABOVE_NOISE = 1.5  # times the spectral norm of rounding errors; a direction is above
# PEFT's defaults: leading dimensions looked at, and the cosine below which one is an intruder
TOP, INTRUDER = 10, 0.5
EXACT_SIDE = 2048  # largest smaller side for an unasked SVD, which takes a few seconds
PRINCIPAL = 0.1  # share of the base's left singular vectors that are called principal
FAINT = 1e-7  # times the first singular value: the resolution of a float64 Gram matrix
SPREADS = 4.0  # spreads of noise's largest singular value, above its mean
LEFT = 1.5  # times rounding's energy: the largest remainder of a low-rank change
FINEST = 23  # bits of float32's fraction
# roles whose input is the stream, in the norm's basis
READS = {"q", "k", "v", "gate", "up", "router", "q_a", "kv_a"}
WRITES = {"o", "down"}  # roles whose output joins the stream


@dataclass(frozen=True, eq=False, repr=False)
class Intruders(ShowsShapes):
    """Position of a tuned matrix's leading left vectors, and of its change, among the base's."""

    cosines: np.ndarray  # (<= TOP,) largest of each vector with any of the base's
    # share of the change's energy in the base's principal left vectors, over what chance gives
    principal: float
    drift: float  # |s_tuned - s_base| / |s_base| of the leading singular values

    @property
    def count(self) -> int:
        """The number of intruder dimensions."""
        return int((self.cosines < INTRUDER).sum())


@dataclass(frozen=True, eq=False, repr=False)
class Update(ShowsShapes):
    """The change of a matrix, which maps inputs to outputs: y = W x."""

    label: str  # role and place
    name: str  # in the base's file
    role: str
    layer: int | None
    shape: tuple[int, ...]  # (out, in)
    change: float  # |B - A| / |A|
    rank: int | None  # None where it is the smaller side
    size: float  # |B - A|
    noise: float  # spectral norm that rounding to the stored dtype leaves
    s: np.ndarray  # (k,) leading singular values
    written: np.ndarray  # (k, out) left singular vectors
    read: np.ndarray  # (k, in) right singular vectors
    intruders: Intruders | None  # None where they were not looked for

    @property
    def reads_stream(self) -> bool:
        """True if its input is the residual stream."""
        return bool(_parts(self.role) & READS)

    @property
    def writes_stream(self) -> bool:
        """True if its output joins the residual stream."""
        return bool(_parts(self.role) & WRITES)

    @property
    def is_noise(self) -> bool:
        """True if no direction exceeds independent noise of this size (Johnstone 2001)."""
        rows, columns = sqrt(self.shape[0] - 1), sqrt(self.shape[1])
        edge, spread = (rows + columns) ** 2, (rows + columns) * (1 / rows + 1 / columns) ** (1 / 3)
        return bool(
            self.s[0] ** 2 * self.shape[0] * self.shape[1]
            <= self.size**2 * (edge + SPREADS * spread)
        )

    @property
    def n_directions(self) -> int:
        """The number of kept directions that are more than rounding."""
        return int((self.s > ABOVE_NOISE * self.noise).sum())

    @property
    def first_share(self) -> float:
        """Share of the change's energy along its first direction."""
        return float(self.s[0] ** 2 / self.size**2) if self.size else nan

    @property
    def stable_rank(self) -> float:
        """|dW|_F^2 / |dW|_2^2."""
        return 1 / self.first_share if self.first_share else nan

    @property
    def along_stream(self) -> dict[str, np.ndarray]:
        """Its directions in the stream by side, `reads` or `writes`: (n, d) each."""
        sides = {
            "reads": self.read * self.reads_stream,
            "writes": self.written * self.writes_stream,
        }
        return {side: rows[: self.n_directions] for side, rows in sides.items() if rows.any()}


def _parts(role: str) -> set[str]:
    """`expert.gate+up` -> gate, up."""
    return {*role.rpartition("expert.")[2].split("+")}


def updates_of(entry: Counterparts, change: Change, *, exact: bool = False) -> list[Update]:
    """The change of a matrix, or of each expert of a stack; memory: a few such matrices."""
    a, b = entry.a, entry.b
    assert a is not None
    assert b is not None
    if a.shape != b.shape or len(a.shape) not in (2, 3) or min(a.shape) < 2:
        return []
    if len(a.shape) == 3:
        pairs = zip(a.experts, b.experts, strict=True)
        return [
            _update(f"{entry.label} {i}", x, y, change, exact=exact)
            for i, (x, y) in enumerate(pairs)
        ]
    return [_update(entry.label, a, b, change, exact=exact)]


def _update(label: str, a: NamedTensor, b: NamedTensor, change: Change, *, exact: bool) -> Update:
    d = a.array().astype(np.float64)  # (out, in)
    before = float(np.linalg.norm(d))
    np.subtract(b.array(), d, out=d)  # in place: a 7B's largest matrix takes 360 MB
    size = float(np.linalg.norm(d))
    far = size / before if before else np.inf
    s, written, read = (vectors.astype(np.float32) for vectors in leading(d, DIRECTIONS))
    bits = min(BITS.get(dtype, FINEST) for dtype in change.dtypes)
    noise = 2.0**-bits * max(before, size) / sqrt(12 * d.size) * sum(map(sqrt, d.shape))
    shape, rank = d.shape, change.rank
    if rank is None and size and min(shape) > 1 and (exact or min(shape) <= EXACT_SIDE):
        rank = rank_of(d, noise)
    del d
    intruders = None
    if size and (exact or min(shape) <= EXACT_SIDE):
        x, y = (each.array().T if TRANSPOSED in a.stored else each.array() for each in (a, b))
        intruders = intruders_of(x, y)
    return Update(
        label, a.name, a.role, a.layer, shape, far, rank, size, noise, s, written, read, intruders
    )


def rank_of(d: np.ndarray, noise: float) -> int | None:
    """Rank of a change above rounding errors of this spectral norm; None where it is full."""
    gram = d.T @ d if d.shape[0] > d.shape[1] else d @ d.T
    s = np.sqrt(np.maximum(np.linalg.eigvalsh(gram)[::-1], 0))
    rank = int((s > ABOVE_NOISE * noise).sum())
    each = noise / sum(map(sqrt, d.shape))  # standard deviation of an error
    left = float((s[rank:] ** 2).sum())
    return rank if 0 < rank < len(s) and left <= LEFT * d.size * each**2 else None


def leading(d: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The leading singular values and vectors of a matrix (m, n): (k,), (k, m), (k, n).

    A random sketch with power iterations (Halko, Martinsson and Tropp 2011, algorithm 4.4); exact
    for ranks up to k + SPARE.

    Examples
    --------
    >>> s, left, right = leading(np.diag([3.0, 2.0, 1.0]), 2)
    >>> np.round(s, 12).tolist()
    [3.0, 2.0]
    """
    width = min(k + SPARE, *d.shape)
    basis = np.linalg.qr(
        d @ np.random.default_rng(d.shape[1]).standard_normal((d.shape[1], width))
    )[0]
    for _ in range(POWERS):
        basis = np.linalg.qr(d @ np.linalg.qr(d.T @ basis)[0])[0]  # (m, width)
    left, s, right = np.linalg.svd(basis.T @ d, full_matrices=False)
    k = min(k, width)
    return s[:k], (basis @ left[:, :k]).T, right[:k]


def intruders_of(before: np.ndarray, after: np.ndarray) -> Intruders:
    """Intruder dimensions as PEFT defines them (`peft.tuners.lora.intruders`, arXiv 2410.21228).

    Of the first TOP left singular vectors of W + dW, each whose |cosine| with every left singular
    vector of W is below INTRUDER. Both are (m, n) as PyTorch stores them, which for a Conv1D is
    (in, out).
    """
    w, after = before.astype(np.float64), after.astype(np.float64)
    (base, s), (merged, values) = _left(w), _left(after)  # (m, r), (r,)
    cosines = np.abs(merged[:, :TOP].T @ base).max(axis=1)
    d = after - w
    few = max(1, int(PRINCIPAL * len(s)))
    inside = float(np.linalg.norm(base[:, :few].T @ d) ** 2 / np.linalg.norm(d) ** 2)
    drift = (
        float(np.linalg.norm(values[:few] - s[:few]) / np.linalg.norm(s[:few])) if s.any() else nan
    )
    return Intruders(cosines, inside * len(base) / few, drift)


def _left(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All left singular vectors and the values of a matrix (m, n), the largest first: (m, r), (r,).

    From the smaller Gram matrix, a third of an SVD's time; singular values below FAINT of the first
    are not resolved.
    """
    tall = w.shape[0] > w.shape[1]
    energies, vectors = np.linalg.eigh(w.T @ w if tall else w @ w.T)
    s, vectors = np.sqrt(np.maximum(energies[::-1], 0)), vectors[:, ::-1]
    return (w @ vectors / np.maximum(s, FAINT * s[0] or 1) if tall else vectors), s

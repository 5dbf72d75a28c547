"""Which tensors of a checkpoint changed from another, by how much, and what kind of change it is."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod, sqrt

import numpy as np

from weightscope.audits.tensors import row_squares, why_unread
from weightscope.checkpoint import Tensor
from weightscope.checkpoint.blocks import Block, blocks_of, row_width
from weightscope.metrics.low_rank import low_rank
from weightscope.metrics.rounding import CASTS, casts_between, grid_between

BITS = {"F64": 52, "F32": 23, "F16": 10, "BF16": 7}  # of fraction
FEW_ROWS = 0.1  # of a tensor's rows: fewer that changed are told as rows
GRID_ROWS = 32  # rows on which a grid is looked for
QUANTISED = 0.5  # |B - A| / |A| up to which a quantised copy of A is one

# In the order in which the lead tells them.
KINDS = {
    "identical": "identical",
    "rounded": "the same after rounding",
    "quantised": "quantised",
    "low rank": "changed by a matrix of low rank, as by a merged LoRA",
    "few rows": "changed in a few rows alone",
    "resized": "with other rows added or taken away",
    "changed": "changed otherwise",
    "not finite": "changed by nobody knows what: NaN or infinity",
    "reshaped": "of another shape",
    "missing": "missing in the last",
    "new": "new in the last",
    "unread": "that cannot be read",
}


@dataclass(frozen=True)
class TensorChange:
    """How one tensor changed.

    Attributes
    ----------
    name, name_b : str
        In the first checkpoint and in the last; empty where there is none.
    dtypes : (str, str)
    shapes : (tuple, tuple)
    kind : str
        A key of `KINDS`.
    detail : str
        What kind of rounding, how many rows.
    values_changed, rows_changed : int
    squares, moved : float
        Sums of squares of the tensor before and of its change.
    largest : float
        The largest change of a value.
    casts : frozenset of (str, str)
        Roundings, and of which checkpoint ("A", "B"), that make the other.
    rank : int or None
        Of the change, where it is low.
    """

    name: str
    name_b: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    kind: str = "identical"
    detail: str = ""
    values_changed: int = 0
    rows_changed: int = 0
    squares: float = 0.0
    moved: float = 0.0
    largest: float = 0.0
    casts: frozenset[tuple[str, str]] = frozenset((cast, of) for cast in CASTS for of in "AB")
    rank: int | None = None

    @property
    def change(self) -> float:
        """|B - A| / |A| in the Frobenius norm."""
        if self.kind in ("missing", "new", "reshaped", "unread"):
            return float("nan")
        if not self.squares:
            return float("inf") if self.moved else 0.0
        return sqrt(self.moved / self.squares)

    @property
    def called(self) -> str:
        """Its name, in whichever has it."""
        return self.name or self.name_b

    def and_then(self, more: "TensorChange") -> "TensorChange":
        """With another block's change."""
        return replace(
            self,
            values_changed=self.values_changed + more.values_changed,
            rows_changed=self.rows_changed + more.rows_changed,
            squares=self.squares + more.squares,
            moved=self.moved + more.moved,
            largest=float(np.maximum(self.largest, more.largest)),
            casts=self.casts & more.casts,
        )


@dataclass(frozen=True)
class Pair:
    """One tensor in two checkpoints; of a resized one the rows that both have."""

    a: Tensor
    b: Tensor

    @property
    def unchanged(self) -> TensorChange:
        """The pair before anything is known of it."""
        return TensorChange(self.a.name, self.b.name, (self.a.dtype, self.b.dtype), (self.a.shape, self.b.shape))

    @property
    def problem(self) -> str:
        """Why they cannot be compared, as a kind of change; empty where they have one shape, or other rows alone."""
        a, b = self.a.shape, self.b.shape
        resized = len(a) == len(b) > 1 and a[1:] == b[1:] and 0 not in a + b
        if a != b and not resized:
            return "reshaped"
        return "unread" if why_unread(self.a) or why_unread(self.b) else ""

    def blocks(self) -> "Iterator[tuple[Pair, int, int]]":
        """Values [start, stop) of both, as in the one that comes in fewer blocks."""
        common = min(prod(self.a.shape), prod(self.b.shape))
        for block in min(blocks_of(self.a), blocks_of(self.b), key=len):
            if block.start < common or not common:
                yield self, block.start, min(block.stop, common)

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Values [start, stop) of both, of one kind of float or integer."""
        x, y = (Block(of, start, stop).values() for of in (self.a, self.b))
        common = np.result_type(x, y)
        return x.astype(common, copy=False), y.astype(common, copy=False)

    def rows(self) -> Iterator[np.ndarray]:
        """The change, B - A, in blocks of rows, in float64."""
        for _, start, stop in self.blocks():
            x, y = self.read(start, stop)
            yield (y.astype(np.float64) - x).reshape(-1, self.a.shape[-1])


def change_of(part: tuple[Pair, int, int]) -> TensorChange:
    """What one block says of a pair."""
    pair, start, stop = part
    x, y = pair.read(start, stop)
    with np.errstate(all="ignore"):
        width = row_width(pair.a.shape) or len(x)
        squares = float(row_squares(x.reshape(-1, width))[0].sum()) if len(x) else 0.0
        casts = frozenset[tuple[str, str]]()
        if x.dtype == np.float32:
            casts = frozenset((cast, of) for of, own in (("A", (x, y)), ("B", (y, x))) for cast in casts_between(*own))
        unequal = (x != y) & ~((x != x) & (y != y))
        if not unequal.any():
            return replace(pair.unchanged, squares=squares, casts=casts)
        d = y.astype(np.float64) - x
        return replace(
            pair.unchanged,
            values_changed=int(np.count_nonzero(unequal)),
            rows_changed=int(np.count_nonzero(unequal.reshape(-1, width).any(axis=1))),
            squares=squares,
            moved=float(np.vecdot(d, d)),
            largest=float(np.abs(d).max()),
            casts=casts,
        )


def judged(pair: Pair, change: TensorChange) -> TensorChange:
    """The change with its kind; the pair is read again where the first look does not settle it."""
    kind, detail, rank = _kind(pair, change)
    a, b = pair.a.shape, pair.b.shape
    if a != b:
        kind, detail = "resized", f"{a[0]:,} rows to {b[0]:,}; those that both have: {detail or KINDS[kind]}"
    return replace(change, kind=kind, detail=detail, rank=rank)


def _kind(pair: Pair, change: TensorChange) -> tuple[str, str, int | None]:
    """Kind, detail and rank of the rows that both have."""
    width = row_width(pair.a.shape)
    n_rows = min(prod(pair.a.shape), prod(pair.b.shape)) // width if width else 1
    if not change.values_changed:
        return "identical", "", None
    if not np.isfinite(change.moved):
        return "not finite", "", None
    if change.casts:
        cast, of = min(change.casts, key=lambda each: (list(CASTS).index(each[0]), each[1]))
        return "rounded", f"{of} to {cast}", None
    if change.rows_changed <= FEW_ROWS * n_rows:
        return "few rows", f"{change.rows_changed:,} of {n_rows:,} rows", None
    if grid := _grid(pair, change):
        return "quantised", grid, None
    return _ranked(pair, change)


def _grid(pair: Pair, change: TensorChange) -> str:
    """What grid the values of one lie on, those of the other not; empty where neither does."""
    if change.change > QUANTISED or not row_width(pair.a.shape):
        return ""
    for source, target, which in ((pair.a, pair.b, "B"), (pair.b, pair.a, "A")):
        if target.dtype not in BITS and source.dtype in BITS:
            return f"{which} to {target.dtype}"
    width = row_width(pair.a.shape)
    _, start, stop = next(pair.blocks())
    x, y = (of.reshape(-1, width)[:: max(1, (stop - start) // width // GRID_ROWS)] for of in pair.read(start, stop))
    for before, after, which in ((x, y, "B"), (y, x, "A")):
        if found := grid_between(before, after):
            group, levels, nearest = found
            of = "a row" if group == width else f"{group} neighbours"
            return f"{which} to {levels} values or so in {of}" + ("" if nearest else ", not always the nearest")
    return ""


def _ranked(pair: Pair, change: TensorChange) -> tuple[str, str, int | None]:
    """Low rank, up to the rounding of one of the dtypes that were at work, the finest first; or changed otherwise."""
    shape = pair.a.shape
    if len(shape) != 2 or min(shape) < 4 or any(dtype not in BITS for dtype in change.dtypes) or shape != pair.b.shape:
        return "changed", "", None
    rms = sqrt(change.squares / prod(shape))
    for bits in sorted({*(BITS[dtype] for dtype in change.dtypes), 23}, reverse=True):
        noise = 2.0**-bits * rms / sqrt(12)  # rounding errors are even within a step, a step at most 2^-bits of a value
        rank = low_rank(pair.rows, (shape[0], shape[1]), noise)
        if rank is not None:
            known = next(dtype for dtype, own in BITS.items() if own == bits)
            return "low rank", f"up to the rounding of {known}", rank
        if bits <= min(BITS[dtype] for dtype in change.dtypes):
            break
    return "changed", "", None

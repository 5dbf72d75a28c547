"""How one tensor changed between two checkpoints, by how much, and what kind of change it is.

`Change` is what `compare` and `lineage` know of a tensor and its counterpart. Both files are read once; what that does
not settle, as a rank, a grid or a direction that several changes share, is read again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod, sqrt

import numpy as np

from weightscope.changes.directions import Along, first_directions
from weightscope.changes.pair import SAMPLED_ROWS, Pair, Part, blocks_of_pairs, few_rows_each, first_rows
from weightscope.changes.rounding import CASTS, Grid, casts_between, grid_of, precision, shows_rounding
from weightscope.changes.thresholds import FEW_ROWS, NEARLY_ONE_DIRECTION, QUANTISED, STORED, TUNED
from weightscope.checkpoint import Checkpoint, Tensor
from weightscope.checkpoint.blocks import Block, row_width
from weightscope.compute.cores import in_threads
from weightscope.metrics.spectra import evenly_spread, low_rank
from weightscope.progress import bar
from weightscope.tensors.measure import BITS, row_squares

EVERY_CAST = frozenset((cast, rounded) for cast in CASTS for rounded in "AB")
IN_A_SAMPLE = 0.8  # of a change's energy, in one direction of a sample, for the whole to be looked at: it may have 0.9
TELLING = 1 << 12  # values that nearly always show whether they were rounded
NEARLY_ONE = 4  # rank of a change that may be of rank one: its other singular values may be rounding

# How the lead calls each kind of change, in its order.
CALLED = {
    "identical": "identical",
    "rounded": "the same after rounding",
    "quantised": "quantised",
    "one direction": "changed along one direction",
    "low rank": "changed by a matrix of low rank, as by a merged LoRA",
    "few rows": "changed in a few rows only",
    "resized": "with rows added or removed",
    "changed": "fine-tuned",
    "not finite": "with an unknown change: NaN or infinity",
    "reshaped": "of another shape",
    "missing": "only in the first",
    "new": "only in the last",
    "unread": "that cannot be read",
}
UNLIKE = "with other weights"  # how it calls the changed matrices that are not tuned
UNKNOWN_SIZE = ("missing", "new", "reshaped", "unread")  # kinds whose size of change is unknown


@dataclass(frozen=True)
class Change:
    """How a tensor changed from the first checkpoint (A) to the last (B)."""

    name_a: str  # empty where that checkpoint lacks it
    name_b: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    kind: str = "identical"  # a key of `CALLED`
    detail: str = ""  # the kind of rounding, the number of rows
    role: str = ""  # in `Model.tensors`, where it was looked up there; a name without numbers if no row names it
    paired_by: str = ""  # "role" or "name"; empty where one checkpoint lacks it
    part: str = ""  # its role and place, where a file has it as a part of another tensor
    pair: Pair | None = field(default=None, compare=False, repr=False)  # what was compared
    values_changed: int = 0
    rows_changed: int = 0
    squares: float = 0.0  # sum of squares of the tensor before
    squares_b: float = 0.0  # and after
    moved: float = 0.0  # sum of squares of its change
    largest: float = 0.0  # the largest change of a value
    # Roundings that turn one into the other: the dtype, and the checkpoint that gives the other when it is rounded.
    casts: frozenset[tuple[str, str]] = EVERY_CAST
    rank: int | None = None  # of the change, where it is low
    along: tuple[Along, ...] = field(
        default=(), compare=False, repr=False
    )  # both directions, where they are nearly all of the change

    @property
    def name(self) -> str:
        """Its name in the first checkpoint, or in the last where only that has it."""
        return self.name_a or self.name_b

    @property
    def shown_name(self) -> str:
        """Its name in the file, or its role and place where it is a part of a tensor."""
        return self.part or self.name

    @property
    def change(self) -> float:
        """|B - A| / |A| in the Frobenius norm; NaN where it is unknown."""
        if self.kind in UNKNOWN_SIZE:
            return float("nan")
        if not self.squares:
            return float("inf") if self.moved else 0.0
        return sqrt(self.moved / self.squares)

    @property
    def is_matrix(self) -> bool:
        """Whether it has two axes or more."""
        return min(map(len, self.shapes)) > 1

    @property
    def cosine(self) -> float:
        """Of the angle between the tensor before and after; NaN where one of them is zero or unknown."""
        size = sqrt(self.squares) * sqrt(self.squares_b)
        return (self.squares + self.squares_b - self.moved) / (2 * size) if size else float("nan")

    @property
    def is_tuned(self) -> bool:
        """Whether a matrix still resembles its former values; a vector may change wholly when it is tuned."""
        return not (self.is_matrix and self.cosine < TUNED)

    @property
    def shown_kind(self) -> str:
        """Its kind in a table for people."""
        if self.kind == "changed":
            return CALLED[self.kind] if self.is_tuned else UNLIKE
        return CALLED[self.kind] if self.kind in UNKNOWN_SIZE else self.kind

    def and_then(self, more: "Change") -> "Change":
        """With another block's change added."""
        return replace(
            self,
            values_changed=self.values_changed + more.values_changed,
            rows_changed=self.rows_changed + more.rows_changed,
            squares=self.squares + more.squares,
            squares_b=self.squares_b + more.squares_b,
            moved=self.moved + more.moved,
            largest=float(np.maximum(self.largest, more.largest)),
            casts=self.casts & more.casts,
        )


def unchanged(a: Tensor | None, b: Tensor | None, kind: str = "identical") -> Change:
    """A tensor before anything is known of its values; None where a checkpoint lacks it."""
    (name_a, dtype_a, shape_a), (name_b, dtype_b, shape_b) = (
        ("", "", ()) if tensor is None else (tensor.name, tensor.dtype, tensor.shape) for tensor in (a, b)
    )
    return Change(name_a, name_b, (dtype_a, dtype_b), (shape_a, shape_b), kind)


def first_pass(a: Checkpoint, b: Checkpoint, pairs: Sequence[Pair]) -> list[Change]:
    """How each pair changed, from reading both once, in blocks; its kind is only its problem, if it has one."""
    changes = {id(pair): _before_reading(pair) for pair in pairs}
    comparable = [pair for pair in pairs if changes[id(pair)].kind == "identical"]
    total = sum(prod(pair.a.shape) for pair in comparable)
    with bar(what="tensors", unit=" values", total=total, unit_scale=True) as progress:
        for many, are_converted in ((in_threads, False), (map, True)):  # of these one after another, each read whole
            parts = blocks_of_pairs(a, b, [pair for pair in comparable if pair.is_converted == are_converted])
            for pair, change, values in many(lambda part: (part[0], change_of(part), part[2] - part[1]), parts):
                changes[id(pair)] = changes[id(pair)].and_then(change)
                progress.update(values)
    return list(changes.values())


def _before_reading(pair: Pair) -> Change:
    change = unchanged(pair.a, pair.b, pair.problem or "identical")
    return replace(change, role=pair.role, paired_by=pair.paired_by, part=pair.part, pair=pair)


def differs(part: Part) -> bool:
    """Whether a value of a block of a pair changed; NaN is as NaN was."""
    pair, start, stop = part
    x, y = pair.read(start, stop)
    bits = f"u{x.dtype.itemsize}"
    if np.array_equal(x.view(bits), y.view(bits)):
        return False
    with np.errstate(all="ignore"):
        return bool(((x != y) & ~((x != x) & (y != y))).any())


def change_of(part: Part, likely: frozenset[tuple[str, str]] = EVERY_CAST) -> Change:
    """How one block of a pair changed; only roundings that are `likely`, as other blocks have them, are tried."""
    pair, start, stop = part
    x, y = pair.read(start, stop)
    width, change = row_width(pair.a.shape) or len(x), replace(unchanged(pair.a, pair.b), casts=likely)
    with np.errstate(all="ignore"):
        for rows in few_rows_each(len(x), width):
            change = change.and_then(_change_of_rows(pair, x[rows], y[rows], width, change.casts))
    return change


def _change_of_rows(pair: Pair, x: np.ndarray, y: np.ndarray, width: int, likely: frozenset[tuple[str, str]]) -> Change:
    """How a few rows changed: x, y (rows width,)."""
    squares = float(row_squares(x.reshape(-1, width))[0].sum())
    casts = frozenset[tuple[str, str]]()
    if x.dtype == np.float32:
        for letter, order in (("A", (x, y)), ("B", (y, x))):
            tried = [cast for cast, rounded in likely if rounded == letter]
            casts |= {(cast, letter) for cast in casts_between(*order, tried)}
    unequal = x != y
    d = y.astype(np.float64) - x if unequal.any() else np.zeros(1)
    moved = float(np.vecdot(d, d))
    if not np.isfinite(moved):  # NaN is as NaN was
        unequal &= ~((x != x) & (y != y))
    if not unequal.any():
        return replace(unchanged(pair.a, pair.b), squares=squares, squares_b=squares, casts=casts)
    return replace(
        unchanged(pair.a, pair.b),
        values_changed=int(np.count_nonzero(unequal)),
        rows_changed=int(np.count_nonzero(unequal.reshape(-1, width).any(axis=1))),
        squares=squares,
        squares_b=float(row_squares(y.reshape(-1, width))[0].sum()),
        moved=moved,
        largest=float(np.abs(d).max()),
        casts=casts,
    )


def change_of_all(pair: Pair) -> Change:
    """How a pair changed, from reading both once; its kind is not looked for."""
    change = unchanged(pair.a, pair.b)
    for part in pair.blocks():
        change = change.and_then(change_of(part))
    return change


def compare_pairs(a: Checkpoint, b: Checkpoint, pairs: Sequence[Pair]) -> list[Change]:
    """How each pair changed, with its kind."""
    changes = with_shown_casts(pairs, first_pass(a, b, pairs))
    converted = {i: classify(pair, changes[i]) for i, pair in enumerate(pairs) if pair.is_converted}
    stored = [i for i in range(len(pairs)) if i not in converted]
    converted |= zip(stored, in_threads(lambda i: classify(pairs[i], changes[i]), stored), strict=True)
    return [converted[i] for i in range(len(pairs))]


def with_shown_casts(pairs: Sequence[Pair], changes: Sequence[Change]) -> list[Change]:
    """The changes; of a tensor of few different values only those roundings that another tensor shows."""
    rounded = [i for i, change in enumerate(changes) if change.casts and change.values_changed]
    shown = {i: frozenset(cast for cast in changes[i].casts if shows_cast(pairs[i], cast)) for i in rounded}
    ways = frozenset[tuple[str, str]]().union(*shown.values())
    return [
        replace(change, casts=shown[i] or change.casts & ways) if i in shown else change
        for i, change in enumerate(changes)
    ]


def shows_cast(pair: Pair, cast: tuple[str, str]) -> bool:
    """Whether a tensor shows that the other was rounded to it: by its dtype, or by values that differ enough."""
    name, rounded = cast
    tensor = pair.a if rounded == "B" else pair.b
    if tensor.dtype == name.removesuffix(", cut off"):
        return True
    size = prod(tensor.shape)
    return any(shows_rounding(Block(tensor, 0, min(size, most)).values()) for most in (TELLING, size))


def classify(pair: Pair, change: Change) -> Change:
    """The change with its kind; the pair is read again where the first pass does not settle it."""
    if pair.problem:
        return change
    kind, detail, rank = _kind(pair, change)
    a, b = pair.a.shape, pair.b.shape
    if a != b:
        kind, detail = "resized", f"{a[0]:,} rows to {b[0]:,}; those that both have: {detail or CALLED[kind]}"
    is_likely = _may_be_along(pair) if kind == "changed" and a == b else rank is not None and rank <= NEARLY_ONE
    along = _along(pair, rank) if is_likely else ()
    return replace(change, kind=kind, detail=detail, rank=rank, along=along)


def _may_be_along(pair: Pair) -> bool:
    """Whether a sample of a matrix's change is nearly of rank one, as where values were cut off after an edit."""
    if len(pair.a.shape) != 2 or min(pair.a.shape) < 4:
        return False
    rows = next(pair.rows())
    sample = rows[np.ix_(*(evenly_spread(n, SAMPLED_ROWS) for n in rows.shape))]
    energies = np.linalg.svd(sample, compute_uv=False) ** 2
    return bool(energies[0] >= IN_A_SAMPLE * energies.sum())


def _along(pair: Pair, rank: int | None) -> tuple[Along, ...]:
    """Both directions of a change of rank one, or of nearly that; of a stack, the one that its matrices share."""
    sides = [first_directions(partial(pair.pairs, turned)) for turned in pair.sides]
    share, *along = max(sides, key=lambda side: side[0])
    is_all = rank == 1 or share >= NEARLY_ONE_DIRECTION  # what is left of a change of rank one is rounding
    return tuple(along[-1:] if pair.is_stack else along) * is_all


def _kind(pair: Pair, change: Change) -> tuple[str, str, int | None]:
    """Kind, detail and rank of the change of the rows that both have."""
    width = row_width(pair.a.shape)
    n_rows = min(prod(pair.a.shape), prod(pair.b.shape)) // width if width else 1
    if not change.values_changed:
        return "identical", "", None
    if not np.isfinite(change.moved):
        return "not finite", "", None
    if change.casts:
        cast, rounded = min(change.casts, key=lambda each: (list(CASTS).index(each[0]), each[1]))
        return "rounded", f"{rounded} to {cast}", None
    if change.rows_changed <= FEW_ROWS * n_rows:
        return "few rows", f"{change.rows_changed:,} of {n_rows:,} rows", None
    ranked = _ranked(pair, change)  # first: an edit of low rank of dequantised weights leaves their grid too
    if ranked[0] != "low rank" and (grid := _grid(pair, change)):
        return "quantised", grid, None
    return ranked


def _grid(pair: Pair, change: Change) -> str:
    """The grid on which only one checkpoint's values lie, in words; empty where there is none."""
    width = row_width(pair.a.shape)
    if change.change > QUANTISED or not width:
        return ""
    _, start, stop = next(pair.blocks())
    step = max(1, (stop - start) // width // SAMPLED_ROWS)
    x, y = ([values.reshape(-1, width)[::step]] for values in pair.read(start, stop))
    for grid, which in ((new_grid(pair.a, pair.b, x, y), "B"), (new_grid(pair.b, pair.a, y, x), "A")):
        if grid:
            return f"{which} to {grid.words}"
    return ""


def new_grid(before: Tensor, after: Tensor, xs: Sequence[np.ndarray], ys: Sequence[np.ndarray]) -> Grid | None:
    """The grid of a matrix that was on none, or on one of more than twice as many values.

    xs, ys: rows of both, and columns where these may share a grid; of several the one with the least error.
    """
    grids = [grid for x, y in zip(xs, ys, strict=False)
             if (grid := grid_of(y)) and ((was := grid_of(x)) is None or was.values > 2 * grid.values)]  # fmt: skip
    if after.dtype not in BITS and before.dtype in BITS:
        return Grid(after.dtype, min((grid.error for grid in grids), default=STORED), stored=True)
    return min(grids, key=lambda grid: grid.error, default=None)


def _ranked(pair: Pair, change: Change) -> tuple[str, str, int | None]:
    """Low rank, up to the rounding of one of the dtypes involved, the finest first; or changed otherwise.

    A stack of matrices is judged as one, with its matrices below each other or side by side.
    """
    shape = pair.a.shape
    too_small = len(shape) not in (2, 3) or min(shape[-2:]) < 4
    if too_small or any(dtype not in BITS for dtype in change.dtypes) or shape != pair.b.shape:
        return "changed", "", None
    rms = sqrt(max(change.squares, change.moved) / prod(shape))
    held = (precision(first_rows(tensor, SAMPLED_ROWS).astype(np.float32)) for tensor in (pair.a, pair.b))
    floats = {*change.dtypes, *(name for name in held if name in BITS)}  # values may be coarser than what stores them
    for bits in sorted({*(BITS[name] for name in floats), 23}, reverse=True):
        noise = 2.0**-bits * rms / sqrt(12)  # rounding errors are even within a step, a step at most 2^-bits of a value
        ranks = (low_rank(partial(pair.rows, turned), pair.flat(turned), noise) for turned in pair.sides)
        rank = min((rank for rank in ranks if rank is not None), default=None)
        if rank is not None:
            rounding = next(dtype for dtype, fraction in BITS.items() if fraction == bits)
            return "low rank", f"up to the rounding of {rounding}", rank
        if bits <= min(BITS[name] for name in floats):
            break
    return "changed", "", None

"""How one tensor changed between two checkpoints, by how much, and what kind of change it is.

`Change` is what `compare` and `lineage` know of a tensor and its counterpart. Both files are read
once; what that does not settle, as a rank, a grid or a direction that several changes share, is
read again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod, sqrt
from typing import NamedTuple

import numpy as np

from weightscope.checkpoint.blocks import Block, row_width
from weightscope.checkpoint.checkpoint import Checkpoint, Tensor
from weightscope.core.compute.cores import in_threads
from weightscope.core.progress import bar
from weightscope.heads.tensors.measure import BITS, row_squares
from weightscope.model.metrics.spectra import evenly_spread, low_rank
from weightscope.pairs.deeds.directions import Along, first_directions
from weightscope.pairs.deeds.pair import (
    AT_ONCE,
    SAMPLED_ROWS,
    Pair,
    Part,
    blocks_of_pairs,
    few_rows_each,
    first_rows,
)
from weightscope.pairs.deeds.rounding import (
    CASTS,
    FRACTION,
    LEAST_WIDTH,
    SMALLEST,
    Grid,
    casts_between,
    grid_of,
    precision,
    shows_rounding,
)
from weightscope.pairs.deeds.thresholds import (
    FEW_ROWS,
    KEPT,
    NEARLY_ONE_DIRECTION,
    QUANTISED,
    SAME_SIZE,
    STORED,
    TUNED,
    UNMOVED,
)

EVERY_CAST = frozenset((cast, rounded) for cast in CASTS for rounded in "AB")
# of a change's energy, in one direction of a sample, for the whole to be looked at: it may have 0.9
IN_A_SAMPLE = 0.8
TELLING = 1 << 12  # values that nearly always show whether they were rounded
LEAST_CHANGED = 8  # values: fewer are multiplied by one factor by chance
TAIL = 10.0  # times the usual change of a value: the largest of many that were rounded
LEAST_FACTOR = 1e-4  # from one: a nearer factor is not told from noise that a conversion leaves
# rank of a change that may be of rank one: its other singular values may be rounding
NEARLY_ONE = 4

# How the lead calls each kind of change, in its order.
CALLED = {
    "identical": "identical",
    "rounded": "the same after rounding",
    "zeroed": "with values set to zero",
    "constant": "set to one value",
    "scaled": "multiplied by one factor",
    "factors": "with rows or columns multiplied by factors",
    "reordered": "with rows or columns in another order",
    "quantised": "quantised",
    "quantised in part": "quantised, with other values in some places",
    "one direction": "changed along one direction",
    "low rank": "changed by a matrix of low rank",
    "few rows": "changed in some rows or columns only",
    "resized": "with rows added or removed",
    "changed": "fine-tuned",
    "not finite": "with an unknown change: NaN or infinity",
    "reshaped": "of another shape",
    "missing": "only in the first",
    "new": "only in the last",
    "unread": "that cannot be read",
}
UNLIKE = "with other weights"  # how it calls the changed matrices that are not tuned
# and those that a conversion's own arithmetic moves
SAME_SO_FAR = "the same up to float32's rounding"
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
    # in `Model.tensors`, where it was looked up there; a name without numbers if no row names it
    role: str = ""
    paired_by: str = ""  # "role" or "name"; empty where one checkpoint lacks it
    part: str = ""  # its role and place, where a file has it as a part of another tensor
    pair: Pair | None = field(default=None, compare=False, repr=False)  # what was compared
    values_changed: int = 0
    rows_changed: int = 0
    squares: float = 0.0  # sum of squares of the tensor before
    squares_b: float = 0.0  # and after
    moved: float = 0.0  # sum of squares of its change
    largest: float = 0.0  # the largest change of a value
    # Roundings that turn one into the other: the dtype, and the checkpoint that gives the other
    # when it is rounded.
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
    def rows_lacking(self) -> int:
        """How many rows fewer it has afterwards, or more, below zero."""
        (a, b), resized = self.shapes, self.kind not in UNKNOWN_SIZE
        return a[0] - b[0] if resized and a and b else 0

    @property
    def cosine(self) -> float:
        """Of the angle between the tensor before and after; NaN where one of them is zero or
        unknown.
        """
        size = sqrt(self.squares) * sqrt(self.squares_b)
        return (self.squares + self.squares_b - self.moved) / (2 * size) if size else float("nan")

    @property
    def is_tuned(self) -> bool:
        """Whether a matrix still resembles its former values; a vector may change wholly when it is
        tuned.
        """
        return not (self.is_matrix and self.cosine < TUNED)

    @property
    def is_rounding(self) -> bool:
        """Whether it is as near as heads that are called unmoved, on every value."""
        usual = sqrt(self.squares / max(1, prod(self.shapes[0])))
        return (
            self.kind == "changed"
            and self.change <= UNMOVED
            and self.largest <= TAIL * UNMOVED * usual
        )

    @property
    def called(self) -> str:
        """Its kind in words."""
        if self.kind != "changed":
            return CALLED[self.kind]
        return SAME_SO_FAR if self.is_rounding else CALLED[self.kind] if self.is_tuned else UNLIKE

    @property
    def shown_kind(self) -> str:
        """Its kind in a table for people."""
        if self.kind == "changed":
            return self.called
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
        ("", "", ()) if tensor is None else (tensor.name, tensor.dtype, tensor.shape)
        for tensor in (a, b)
    )
    return Change(name_a, name_b, (dtype_a, dtype_b), (shape_a, shape_b), kind)


def first_pass(a: Checkpoint, b: Checkpoint, pairs: Sequence[Pair]) -> list[Change]:
    """How each pair changed, from reading both once, in blocks; its kind is only its problem, if it
    has one.
    """
    changes = {id(pair): _before_reading(pair) for pair in pairs}
    comparable = [pair for pair in pairs if changes[id(pair)].kind == "identical"]
    total = sum(prod(pair.a.shape) for pair in comparable)
    with bar(what="tensors", unit=" values", total=total, unit_scale=True) as progress:
        # of these one after another, each read whole
        for many, are_converted in ((in_threads, False), (map, True)):
            parts = blocks_of_pairs(
                a, b, [pair for pair in comparable if pair.is_converted == are_converted]
            )
            for pair, change, values in many(
                lambda part: (part[0], change_of(part), part[2] - part[1]), parts
            ):
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
    """How one block of a pair changed; only roundings that are `likely`, as other blocks have them,
    are tried.
    """
    pair, start, stop = part
    x, y = pair.read(start, stop)
    width, change = (
        row_width(pair.a.shape) or len(x),
        replace(unchanged(pair.a, pair.b), casts=likely),
    )
    with np.errstate(all="ignore"):
        for rows in few_rows_each(len(x), width):
            change = change.and_then(_change_of_rows(pair, x[rows], y[rows], width, change.casts))
    return change


def _change_of_rows(
    pair: Pair, x: np.ndarray, y: np.ndarray, width: int, likely: frozenset[tuple[str, str]]
) -> Change:
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
    converted |= zip(
        stored, in_threads(lambda i: classify(pairs[i], changes[i]), stored), strict=True
    )
    return [converted[i] for i in range(len(pairs))]


def with_shown_casts(pairs: Sequence[Pair], changes: Sequence[Change]) -> list[Change]:
    """The changes; of a tensor of few different values only those roundings that another tensor
    shows.
    """
    rounded = [i for i, change in enumerate(changes) if change.casts and change.values_changed]
    shown = {
        i: frozenset(cast for cast in changes[i].casts if shows_cast(pairs[i], cast))
        for i in rounded
    }
    ways = frozenset[tuple[str, str]]().union(*shown.values())
    return [
        replace(change, casts=shown[i] or change.casts & ways) if i in shown else change
        for i, change in enumerate(changes)
    ]


def shows_cast(pair: Pair, cast: tuple[str, str]) -> bool:
    """Whether a tensor shows that the other was rounded to it: by its dtype, or by values that
    differ enough.
    """
    name, rounded = cast
    tensor = pair.a if rounded == "B" else pair.b
    if tensor.dtype == name.removesuffix(", cut off"):
        return True
    size = prod(tensor.shape)
    return any(
        shows_rounding(Block(tensor, 0, min(size, most)).values()) for most in (TELLING, size)
    )


def classify(pair: Pair, change: Change) -> Change:
    """The change with its kind; the pair is read again where the first pass does not settle it."""
    if pair.problem:
        return change
    kind, detail, rank = _kind(pair, change)
    a, b = pair.a.shape, pair.b.shape
    if a != b:
        kind, detail = (
            "resized",
            f"{a[0]:,} rows to {b[0]:,}; those that both have: {detail or CALLED[kind]}",
        )
    is_open = kind in ("changed", "zeroed") and a == b
    is_likely = _may_be_along(pair) if is_open else rank is not None and rank <= NEARLY_ONE
    along = _along(pair, rank) if is_likely else ()
    return replace(change, kind=kind, detail=detail, rank=rank, along=along)


def _may_be_along(pair: Pair) -> bool:
    """Whether a sample of a matrix's change is nearly of rank one, as where values were cut off
    after an edit.
    """
    if len(pair.a.shape) != 2 or min(pair.a.shape) < 4:
        return False
    rows = next(pair.rows())
    sample = rows[np.ix_(*(evenly_spread(n, SAMPLED_ROWS) for n in rows.shape))]
    energies = np.linalg.svd(sample, compute_uv=False) ** 2
    return bool(energies[0] >= IN_A_SAMPLE * energies.sum())


def _along(pair: Pair, rank: int | None) -> tuple[Along, ...]:
    """Both directions of a change of rank one, or of nearly that; of a stack, the one that its
    matrices share.
    """
    sides = [first_directions(partial(pair.pairs, turned)) for turned in pair.sides]
    share, *along = max(sides, key=lambda side: side[0])
    # what is left of a change of rank one is rounding
    is_all = rank == 1 or share >= NEARLY_ONE_DIRECTION
    return tuple(along[-1:] if pair.is_stack else along) * is_all


def _kind(pair: Pair, change: Change) -> tuple[str, str, int | None]:
    """Kind, detail and rank of the change of the rows that both have."""
    n_rows = _rows_of(pair)
    if not change.values_changed:
        return "identical", "", None
    if not np.isfinite(change.moved):
        return "not finite", "", None
    if simple := plain_kind(change):
        return *simple, None
    if change.rows_changed <= FEW_ROWS * n_rows:
        return "few rows", f"{change.rows_changed:,} of {n_rows:,} rows", None
    if order := _in_another_order(pair, change):
        return "reordered", order, None
    # first: an edit of low rank of dequantised weights leaves their grid too
    ranked = _ranked(pair, change)
    if ranked[0] != "low rank" and (grid := _grid(pair, change)):
        return "quantised in part" if _has_other_values(pair, grid) else "quantised", grid, None
    return ranked


def plain_kind(change: Change) -> tuple[str, str] | None:
    """Kind and detail of a change that one rounding, zeros, one value or one factor explain on
    every value.
    """
    if change.pair is None or not change.values_changed or not np.isfinite(change.moved):
        return None
    if change.casts:
        cast, rounded = min(change.casts, key=lambda each: (list(CASTS).index(each[0]), each[1]))
        return "rounded", f"{rounded} to {cast}"
    return (
        _one_value(change.pair, change)
        or _one_factor(change.pair, change)
        or _factors(change.pair, change)
    )


def _one_value(pair: Pair, change: Change) -> tuple[str, str] | None:
    """Zero, or another value, where every changed value has it in B; another one only where all of
    B does.
    """
    value: float | None = None if change.squares_b else 0.0
    everywhere = True
    for part in pair.blocks():
        x, y = pair.read(*part[1:])
        after = y[x != y]
        if not len(after):
            everywhere &= value is None or bool((y == value).all())
            continue
        value = float(after[0]) if value is None else value
        if not (after == value).all():
            return None
        everywhere &= bool((y == value).all())
    if value == 0:
        share = change.values_changed / max(1, prod(pair.a.shape))
        values = "all values" if share == 1 else f"{share:.2g} of the values"
        return "zeroed", f"{values}{_where(pair, change)}"
    return ("constant", f"to {value:.3g}") if everywhere and value is not None else None


def _one_factor(pair: Pair, change: Change) -> tuple[str, str] | None:
    """The factor that makes every changed value of B from A's, up to the stored rounding."""
    factor, step = 0.0, Step(0.0, 0.0)
    for part in pair.blocks():
        x, y = (values.astype(np.float64) for values in pair.read(*part[1:]))
        x, y = x[x != y], y[x != y]
        if not len(x):
            continue
        if not factor:
            factor, step = float(x @ y) / (float(x @ x) or 1.0), Step.of(y, change)
        if (
            not step.is_factor(factor)
            or not step.holds(y, factor * x)
            or change.values_changed < LEAST_CHANGED
        ):
            return None
    return "scaled", f"by {factor:.4g}{_where(pair, change)}"


def _factors(pair: Pair, change: Change) -> tuple[str, str] | None:
    """The factors of the rows, or of the columns, that make all of B from A, up to the stored
    rounding.
    """
    if (
        pair.is_stack
        or not change.is_matrix
        or min(pair.a.shape) < LEAST_CHANGED
        or len(pair.a.shape) != 2
    ):
        return None
    for axis, which in ((0, "columns"), (1, "rows")):
        ends, columns = [], None
        for x, y in pair.pairs():
            x, y = x.astype(np.float64), y.astype(np.float64)
            factors = _fitted(x, y, axis) if axis or columns is None else columns
            columns, step = factors, Step.of(y, change)
            if not step.holds(y, factors * x):
                break
            moved = factors[step.is_factor(factors)]
            ends += [float(moved.min()), float(moved.max())] if len(moved) else []
        else:
            if ends:
                return "factors", f"{which} by {min(ends):.3g} to {max(ends):.3g}"
    return None


def _in_another_order(pair: Pair, change: Change) -> str:
    """`rows` or `columns` where B's are A's, bit for bit, in another order; empty where they are
    not.
    """
    if (
        pair.a.shape != pair.b.shape
        or abs(change.squares - change.squares_b) > SAME_SIZE * change.squares
    ):
        return ""
    draw = partial(np.random.default_rng(0).integers, 1, 1 << 63, dtype=np.uint64)
    width = pair.a.shape[-1]
    of_columns = draw(width)
    rows: tuple[list[np.ndarray], ...] = ([], [])
    # of each row and column, a sum of its bits times random numbers
    columns = np.zeros((2, width), np.uint64)
    for values in pair.pairs():
        of_rows = draw((len(values[0]), 1))
        for side, x in enumerate(values):
            bits = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").astype(np.uint64)
            rows[side].append((bits * of_columns).sum(axis=1))
            columns[side] += (bits * of_rows).sum(axis=0)
    of_a, of_b = (np.sort(np.concatenate(each)) for each in rows)
    if np.array_equal(of_a, of_b):
        return "rows"
    return "columns" if np.array_equal(np.sort(columns[0]), np.sort(columns[1])) else ""


def _fitted(x: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
    """Least-squares factors along an axis, which keeps its place."""
    squares = (x * x).sum(axis, keepdims=True)
    return np.where(
        squares == 0, 1.0, (x * y).sum(axis, keepdims=True) / np.where(squares == 0, 1.0, squares)
    )


class Step(NamedTuple):
    """What storing values rounds: relative to each, and at least."""

    relative: float
    least: float

    @classmethod
    def of(cls, values: np.ndarray, change: Change) -> "Step":
        """Of the coarsest float that holds some of the values or stores them."""
        sample = values.ravel()[:AT_ONCE].astype(np.float32)
        held = [precision(sample), *(dtype for dtype in change.dtypes if dtype in BITS)]
        bits = {dtype: min(23, FRACTION[dtype]) for dtype in held}
        coarsest = min(bits, key=bits.__getitem__)
        return cls(2.0 ** -bits[coarsest], 2.0 ** (SMALLEST.get(coarsest, -126) - bits[coarsest]))

    def holds(self, stored: np.ndarray, exact: np.ndarray) -> bool:
        """Whether every stored value is an exact one rounded."""
        return bool((np.abs(stored - exact) <= self.relative * np.abs(stored) + self.least).all())

    def is_factor(self, factor: np.ndarray | float) -> np.ndarray:
        """Whether a factor moves values by more than their rounding."""
        return np.abs(np.asarray(factor) - 1) > max(4 * self.relative, LEAST_FACTOR)


def _where(pair: Pair, change: Change) -> str:
    """The share of a matrix's rows that changed; empty where all did."""
    rows = _rows_of(pair)
    return (
        f" in {change.rows_changed:,} of {rows:,} rows"
        if change.is_matrix and change.rows_changed < rows
        else ""
    )


def _rows_of(pair: Pair) -> int:
    """Rows that both have."""
    width = row_width(pair.a.shape)
    return min(prod(pair.a.shape), prod(pair.b.shape)) // width if width else 1


def _grid(pair: Pair, change: Change) -> str:
    """The grid on which only one checkpoint's values lie, in words; empty where there is none."""
    width = row_width(pair.a.shape)
    if change.change > QUANTISED or not width:
        return ""
    _, start, stop = next(pair.blocks())
    step = max(1, (stop - start) // width // SAMPLED_ROWS)
    x, y = ([values.reshape(-1, width)[::step]] for values in pair.read(start, stop))
    for grid, which in (
        (new_grid(pair.a, pair.b, x, y), "B"),
        (new_grid(pair.b, pair.a, y, x), "A"),
    ):
        if grid:
            return f"{which} to {grid.words}"
    return ""


def _has_other_values(pair: Pair, grid: str) -> bool:
    """Whether neighbours in a row differ as much as strangers and by more than a step of the row's
    grid, as if erased.

    A code of zero stands for values below one step, which the least other values show: of several
    grids the coarsest.
    """
    # the largest change in rows of zeros, and the coarsest step of any row
    without, coarsest = 0.0, 0.0
    for values in pair.pairs():
        x, y = values if grid.startswith("B") else values[::-1]
        width = x.shape[1] if x.shape[1] % LEAST_WIDTH else LEAST_WIDTH
        before, after = (v.astype(np.float64).reshape(len(v), -1, width) for v in (x, y))
        moved = after - before
        sizes = np.maximum(np.linalg.norm(before, axis=2), np.linalg.norm(after, axis=2))
        strange = np.linalg.norm(moved, axis=2) > KEPT * sizes  # (rows, groups)
        farthest = np.where(strange, np.abs(moved).max(axis=2), 0.0).max(axis=1)
        least = np.where(after == 0, np.inf, np.abs(after)).min(axis=2)
        steps = np.where(np.isinf(least), 0.0, least).max(axis=1)
        if (farthest > steps)[steps > 0].any():
            return True
        without = max(without, farthest[steps == 0].max(initial=0.0))
        coarsest = max(coarsest, steps.max(initial=0.0))
    return without > coarsest


def new_grid(
    before: Tensor, after: Tensor, xs: Sequence[np.ndarray], ys: Sequence[np.ndarray]
) -> Grid | None:
    """The grid of a matrix that was on none, or on one of more than twice as many values.

    xs, ys: rows of both, and columns where these may share a grid; of several the one with the
    least error.
    """
    grids = [
        grid
        for x, y in zip(xs, ys, strict=False)
        if (grid := grid_of(y)) and ((was := grid_of(x)) is None or was.values > 2 * grid.values)
    ]
    if after.dtype not in BITS and before.dtype in BITS:
        return Grid(after.dtype, min((grid.error for grid in grids), default=STORED), stored=True)
    return min(grids, key=lambda grid: grid.error, default=None)


def _ranked(pair: Pair, change: Change) -> tuple[str, str, int | None]:
    """Low rank, up to the rounding of one of the dtypes involved, the finest first; or changed
    otherwise.

    A stack of matrices is judged as one, with its matrices below each other or side by side.
    """
    shape = pair.a.shape
    too_small = len(shape) not in (2, 3) or min(shape[-2:]) < 4
    if too_small or any(dtype not in BITS for dtype in change.dtypes) or shape != pair.b.shape:
        return "changed", "", None
    rms = sqrt(max(change.squares, change.moved) / prod(shape))
    held = (
        precision(first_rows(tensor, SAMPLED_ROWS).astype(np.float32))
        for tensor in (pair.a, pair.b)
    )
    # values may be coarser than what stores them
    floats = {*change.dtypes, *(name for name in held if name in BITS)}
    for bits in sorted({*(BITS[name] for name in floats), 23}, reverse=True):
        # rounding errors are even within a step, a step at most 2^-bits of a value
        noise = 2.0**-bits * rms / sqrt(12)
        ranks = (
            low_rank(partial(pair.rows, turned), pair.flat(turned), noise) for turned in pair.sides
        )
        rank = min((rank for rank in ranks if rank is not None), default=None)
        if rank is not None and (where := _confined(pair, change, rank)):
            return "few rows", where, None
        if rank is not None:
            rounding = next(dtype for dtype, fraction in BITS.items() if fraction == bits)
            return "low rank", f"up to the rounding of {rounding}", rank
        if bits <= min(BITS[name] for name in floats):
            break
    return "changed", "", None


def _confined(pair: Pair, change: Change, rank: int) -> str:
    """The rows or columns that hold a change, where these are so few that any change of them has
    its rank.
    """
    if pair.is_stack:
        return ""
    if change.rows_changed <= rank:
        return f"{change.rows_changed:,} of {_rows_of(pair):,} rows"
    columns = np.zeros(pair.a.shape[1], bool)
    for x, y in pair.pairs():
        columns |= (x != y).any(axis=0)
    return f"{columns.sum():,} of {len(columns):,} columns" if columns.sum() <= rank else ""

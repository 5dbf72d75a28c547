"""The change of one tensor between two checkpoints, measured by reading both once, in blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod, sqrt

import numpy as np

from weightscope.checkpoint.blocks import Block, row_width
from weightscope.checkpoint.checkpoint import Checkpoint, Tensor
from weightscope.core.compute.cores import in_threads
from weightscope.core.progress import bar
from weightscope.heads.tensors.measure import row_squares
from weightscope.pairs.deeds.deed import UNTOUCHED, Deed, What, brief, called
from weightscope.pairs.deeds.directions import Along
from weightscope.pairs.deeds.pair import Pair, Part, blocks_of_pairs, few_rows_each
from weightscope.pairs.deeds.rounding import CASTS, casts_between, shows_rounding
from weightscope.pairs.deeds.thresholds import TAIL, TUNED, UNMOVED

EVERY_CAST = frozenset((cast, rounded) for cast in CASTS for rounded in "AB")
TELLING = 1 << 12  # values that nearly always show whether they were rounded
SAME_SO_FAR = "the same up to float32's rounding"  # the words for what a conversion's sums move
# Kinds whose size of change is unknown.
UNKNOWN_SIZE = frozenset({What.MISSING, What.NEW, What.RESHAPED, What.UNREAD})


@dataclass(frozen=True)
class Change:
    """The change of a tensor from the first checkpoint (A) to the last (B)."""

    name_a: str  # empty where that checkpoint lacks it
    name_b: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    deed: Deed = UNTOUCHED
    # in `Model.tensors`, where it was looked up there; a name without numbers if no row names it
    role: str = ""
    paired_by: str = ""  # "role" or "name"; empty where one checkpoint lacks it
    part: str = ""  # its role and place, where a file has it as a part of another tensor
    pair: Pair | None = field(default=None, compare=False, repr=False)  # the tensors compared
    values_changed: int = 0
    rows_changed: int = 0
    squares: float = 0.0  # sum of squares of the tensor before
    squares_b: float = 0.0  # and after
    moved: float = 0.0  # sum of squares of its change
    largest: float = 0.0  # the largest change of a value
    # Roundings that turn one into the other: the dtype, and the checkpoint that gives the other
    # when it is rounded.
    casts: frozenset[tuple[str, str]] = EVERY_CAST
    # both directions, where they are nearly all of the change
    along: tuple[Along, ...] = field(default=(), compare=False, repr=False)

    @property
    def kind(self) -> What:
        """The deed."""
        return self.deed.what

    @property
    def detail(self) -> str:
        """More on it: the kind of rounding, the number of rows."""
        return brief(self.deed)

    @property
    def rank(self) -> int | None:
        """The rank of the change, where it is low."""
        return self.deed.rank

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
        """True if it has two axes or more."""
        return min(map(len, self.shapes)) > 1

    @property
    def rows_lacking(self) -> int:
        """Number of rows that only the first has, below zero those that only the last has."""
        (a, b), is_resized = self.shapes, self.kind not in UNKNOWN_SIZE
        return a[0] - b[0] if is_resized and a and b else 0

    @property
    def cosine(self) -> float:
        """Cosine of the tensor before and after; NaN where one is zero or unknown."""
        size = sqrt(self.squares) * sqrt(self.squares_b)
        return (self.squares + self.squares_b - self.moved) / (2 * size) if size else float("nan")

    @property
    def is_tuned(self) -> bool:
        """True if a matrix still resembles its former values; a tuned vector may not."""
        return not (self.is_matrix and self.cosine < TUNED)

    @property
    def is_unlike(self) -> bool:
        """True if nothing explains its values, and a matrix no longer resembles its former ones."""
        return self.kind is What.TUNED and not self.is_tuned

    @property
    def is_rounding(self) -> bool:
        """True if every value is as near as in heads that are called unmoved."""
        if self.kind is not What.TUNED or self.change > UNMOVED:
            return False
        usual = sqrt(self.squares / max(1, prod(self.shapes[0])))
        return self.largest <= TAIL * UNMOVED * usual

    @property
    def called(self) -> str:
        """Its kind in words."""
        if self.is_rounding:
            return SAME_SO_FAR
        return called(What.UNRELATED if self.is_unlike else self.kind)

    @property
    def shown_kind(self) -> str:
        """Its kind in a table for people."""
        in_words = self.kind is What.TUNED or self.kind in UNKNOWN_SIZE
        return self.called if in_words else self.kind.value

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


def unchanged(a: Tensor | None, b: Tensor | None, kind: What = What.IDENTICAL) -> Change:
    """A tensor before anything is known of its values; None where a checkpoint lacks it."""
    (name_a, dtype_a, shape_a), (name_b, dtype_b, shape_b) = (
        ("", "", ()) if tensor is None else (tensor.name, tensor.dtype, tensor.shape)
        for tensor in (a, b)
    )
    return Change(name_a, name_b, (dtype_a, dtype_b), (shape_a, shape_b), Deed(kind))


def first_pass(a: Checkpoint, b: Checkpoint, pairs: Sequence[Pair]) -> list[Change]:
    """Each pair's change, read once in blocks; its kind is only its problem, if it has one."""
    changes = {id(pair): _before_reading(pair) for pair in pairs}
    comparable = [pair for pair in pairs if changes[id(pair)].kind is What.IDENTICAL]
    total = sum(prod(pair.a.shape) for pair in comparable)
    with bar(what="tensors", unit=" values", total=total, unit_scale=True) as progress:
        # converted ones one after another: each is read whole
        for many, are_converted in ((in_threads, False), (map, True)):
            alike = [pair for pair in comparable if pair.is_converted == are_converted]
            parts = blocks_of_pairs(a, b, alike)
            for pair, change, values in many(
                lambda part: (part[0], change_of(part), part[2] - part[1]), parts
            ):
                changes[id(pair)] = changes[id(pair)].and_then(change)
                progress.update(values)
    return list(changes.values())


def _before_reading(pair: Pair) -> Change:
    change = unchanged(pair.a, pair.b, pair.problem or What.IDENTICAL)
    return replace(change, role=pair.role, paired_by=pair.paired_by, part=pair.part, pair=pair)


def differs(part: Part) -> bool:
    """Detect a changed value in a block of a pair; NaN is as NaN was."""
    pair, start, stop = part
    x, y = pair.read(start, stop)
    bits = f"u{x.dtype.itemsize}"
    if np.array_equal(x.view(bits), y.view(bits)):
        return False
    with np.errstate(all="ignore"):
        return bool(((x != y) & ~((x != x) & (y != y))).any())


def change_of(part: Part, likely: frozenset[tuple[str, str]] = EVERY_CAST) -> Change:
    """The change of one block; only the `likely` roundings of other blocks are tried."""
    pair, start, stop = part
    x, y = pair.read(start, stop)
    width = row_width(pair.a.shape) or len(x)
    change = replace(unchanged(pair.a, pair.b), casts=likely)
    with np.errstate(all="ignore"):
        for rows in few_rows_each(len(x), width):
            change = change.and_then(_change_of_rows(pair, x[rows], y[rows], width, change.casts))
    return change


def _change_of_rows(
    pair: Pair, x: np.ndarray, y: np.ndarray, width: int, likely: frozenset[tuple[str, str]]
) -> Change:
    """The change of a few rows: x, y (rows width,)."""
    squares = float(row_squares(x.reshape(-1, width))[0].sum())
    casts = frozenset[tuple[str, str]]()
    if x.dtype in (np.float32, np.float64):
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
    """A pair's change, from reading both once; its kind is not looked for."""
    change = unchanged(pair.a, pair.b)
    for part in pair.blocks():
        change = change.and_then(change_of(part))
    return change


def with_shown_casts(pairs: Sequence[Pair], changes: Sequence[Change]) -> list[Change]:
    """The changes; tensors of few values keep only the roundings that another tensor shows."""
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
    """True if the rounded tensor's dtype, or enough different values, show the rounding."""
    name, rounded = cast
    tensor = pair.a if rounded == "B" else pair.b
    if tensor.dtype == name.removesuffix(", cut off"):
        return True
    size = prod(tensor.shape)
    return any(
        shows_rounding(Block(tensor, 0, min(size, most)).values()) for most in (TELLING, size)
    )

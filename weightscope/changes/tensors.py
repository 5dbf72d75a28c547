"""All tensors of two checkpoints: which changed, by how much, and what kind of change it is."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod, sqrt

import numpy as np

from weightscope.checkpoint import Tensor
from weightscope.checkpoint.blocks import Block, batches, blocks_of, row_width
from weightscope.compute.cores import in_threads
from weightscope.errors import counted
from weightscope.files import Files
from weightscope.findings import Finding, Member, listed, spans
from weightscope.metrics.grids import own_grid
from weightscope.metrics.weight_changes import (
    CASTS,
    NEARLY_ALL,
    Along,
    casts_between,
    first_directions,
    grid_between,
    low_rank,
    one_direction,
)
from weightscope.model import Model
from weightscope.progress import bar
from weightscope.tables import Column, Table
from weightscope.tensors.findings import changes_along_one_direction, described
from weightscope.tensors.measure import BITS, role_of, row_squares, shown_shape, why_unread

FEW_ROWS = 0.1  # of a tensor's rows: where no more changed, the change is described by its rows
NAMED = 4  # tensors in a sentence
NEARLY_ONE = 4  # rank of a change that may be of rank one: its other singular values may be rounding
GRID_ROWS = 32  # rows in which a quantisation grid is looked for
QUANTISED = 0.5  # |B - A| / |A| up to which B may be a quantised copy of A

# How the lead calls each kind of change, in its order.
KINDS = {
    "identical": "identical",
    "rounded": "the same after rounding",
    "quantised": "quantised",
    "one direction": "changed along one direction that they share",
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
TUNED = 0.5  # cosine of a matrix with what it was: weights that were trained apart have about 0
UNKNOWN_SIZE = ("missing", "new", "reshaped", "unread")  # kinds whose size of change is unknown


@dataclass(frozen=True)
class TensorChange:
    """How one tensor changed from the first checkpoint (A) to the last (B)."""

    name_a: str  # empty where that checkpoint lacks it
    name_b: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    kind: str = "identical"  # a key of `KINDS`
    detail: str = ""  # the kind of rounding, the number of rows
    values_changed: int = 0
    rows_changed: int = 0
    squares: float = 0.0  # sum of squares of the tensor before
    squares_b: float = 0.0  # and after
    moved: float = 0.0  # sum of squares of its change
    largest: float = 0.0  # the largest change of a value
    # Roundings that turn one into the other: the dtype, and the checkpoint that gives the other when it is rounded.
    casts: frozenset[tuple[str, str]] = frozenset((cast, rounded) for cast in CASTS for rounded in "AB")
    rank: int | None = None  # of the change, where it is low
    along: tuple[Along, ...] = field(
        default=(), compare=False, repr=False
    )  # both directions, where they are nearly all of the change

    @property
    def name(self) -> str:
        """Its name in the first checkpoint, or in the last where only that has it."""
        return self.name_a or self.name_b

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
        """Whether a matrix is still what it was, for the most part; a vector may change wholly when it is tuned."""
        return not (self.is_matrix and self.cosine < TUNED)

    @property
    def said(self) -> str:
        """Its kind in a table for people."""
        if self.kind == "changed":
            return KINDS[self.kind] if self.is_tuned else UNLIKE
        return KINDS[self.kind] if self.kind in UNKNOWN_SIZE else self.kind

    def and_then(self, more: "TensorChange") -> "TensorChange":
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


@dataclass(frozen=True)
class TensorChanges:
    """All tensors of two checkpoints, and how each changed."""

    changes: Sequence[TensorChange]  # in the order of the first checkpoint, then those that only the last has

    @cached_property
    def kinds(self) -> Counter[str]:
        """How many tensors changed in each way."""
        return Counter(change.kind for change in self.changes)

    @cached_property
    def shared(self) -> tuple[dict[int, Along], float]:
        """The tensors, by number, whose changes share a direction, and the least cosine of two."""
        return one_direction([(i, along) for i, change in enumerate(self.changes) for along in change.along])

    @property
    def lead(self) -> str:
        """How many tensors changed, in what way and where, in a sentence or two."""
        same, total = self.kinds["identical"], len(self.changes)
        if same == total:
            return f"Every tensor is identical, {counted(total, 'tensor')} in all."
        parts = []
        for kind, words in KINDS.items():
            changes = [change for change in self.changes if change.kind == kind]
            tuned = [change for change in changes if kind != "changed" or change.is_tuned]
            if tuned:
                parts.append(f"{len(tuned)} {words}{_in_common(tuned)}")
            if unlike := [change for change in changes if change not in tuned]:
                parts.append(f"{len(unlike)} {UNLIKE} ({spread(unlike)})")
        return f"Of {counted(total, 'tensor')}: {', '.join(parts)}.{self._where()}"

    def _where(self) -> str:
        """The layers that changed, as a sentence."""
        layers: dict[int, bool] = {}
        outside = 0
        for change in self.changes:
            numbers, changed = role_of(change.name)[1], change.kind != "identical"
            if numbers:
                layers[numbers[0]] = layers.get(numbers[0], False) or changed
            else:
                outside += changed
        moved = [layer for layer, changed in layers.items() if changed]
        parts = [f"{counted(outside, 'tensor')} outside the layers"] if outside and layers else []
        if moved and len(moved) < len(layers):
            parts.insert(0, f"{len(moved)} of {counted(len(layers), 'layer')}, {spans(moved)}")
        elif moved:
            parts.insert(0, "every layer")
        return f" They changed in {' and in '.join(parts)}." if parts else ""

    @cached_property
    def table(self) -> Table:
        """One row per tensor; its csv() is tensors.csv."""
        rows = [
            (c.name, role_of(c.name)[0], c.kind, c.detail, c.change, c.largest, c.values_changed, c.rows_changed,
             np.nan if c.rank is None else float(c.rank), *c.dtypes, *map(shown_shape, c.shapes))
            for c in self.changes
        ]  # fmt: skip
        return Table.of_rows(COLUMNS, rows)

    def moved_most(self, n: int) -> Table:
        """The tensors that changed most, for people."""
        order = sorted(range(len(self.changes)), key=lambda i: -np.nan_to_num(self.changes[i].change, nan=np.inf))
        shown = [i for i in order if self.changes[i].kind != "identical"][:n]
        table = self.table.select("tensor", "kind", "detail", "change", "rank").take(shown)
        kinds = Column("kind", [self.changes[i].said for i in shown])
        columns = [kinds if column.name == "kind" else column for column in table.columns]
        filled = [column for column in columns if any(map(column.shown, column.values))]
        return Table(filled, "All are in tensors.csv.")

    @property
    def along_one_direction(self) -> Iterator[Finding]:
        """The tensors whose changes share a direction, as a finding, where there are any."""
        shared, cosine = self.shared
        if shared:
            members = {Member("tensor", None, name=self.changes[i].name): along for i, along in shared.items()}
            names = listed([member.name for member in members], NAMED)
            yield changes_along_one_direction(members, cosine, names)

    def write(self, files: Files) -> None:
        """Write tensors.csv."""
        files.table("tensors.csv", self.table)


COLUMNS = (
    Column("tensor"), Column("role", meaning="The name without the numbers of layers and experts."),
    Column("kind", meaning="What kind of change it is."), Column("detail", meaning="The same in more detail."),
    Column("change", symbol="$‖ΔW‖/‖W‖$", meaning="Frobenius norm of the change, relative to the tensor before."),
    Column("largest", meaning="The largest change of a value."),
    Column("values_changed", symbol="values changed"), Column("rows_changed", symbol="rows changed"),
    Column("rank", meaning="Of the change, where it is low.", format=".0f"),
    Column("dtype_a", symbol="dtype before"), Column("dtype_b", symbol="dtype after"),
    Column("shape_a", symbol="shape before"), Column("shape_b", symbol="shape after"),
)  # fmt: skip


def _in_common(changes: Sequence[TensorChange]) -> str:
    """What the changes of one kind have in common, in brackets, or which tensors they are."""
    if changes[0].kind in ("missing", "new"):
        return f": {described([change.name for change in changes])}"
    if changes[0].kind == "changed":
        return f" ({spread(changes)})"
    ranks = sorted({change.rank for change in changes if change.rank is not None})
    if ranks:
        return f" (rank {spans(ranks)})"
    details = Counter(change.detail for change in changes if change.detail)
    few = len(details) == 1 or changes[0].kind in ("rounded", "quantised")
    return f" ({details.most_common(1)[0][0]})" if details and few else ""


def spread(changes: Sequence[TensorChange]) -> str:
    """`relative change 0.26 to 0.48`, of those whose size before is known."""
    sizes = [change.change for change in changes if np.isfinite(change.change)]
    zero = len(changes) - len(sizes)
    parts = [f"relative change {between(sizes)}"] if sizes else []
    return ", ".join([*parts, *([f"{zero} from zero"] if zero else [])])


def between(values: Sequence[float]) -> str:
    """`0.26 to 0.48`, or one number where both are written alike."""
    return " to ".join(dict.fromkeys(f"{value:.2g}" for value in (min(values), max(values))))


def compare_tensors(a: Model, b: Model) -> TensorChanges:
    """Read every tensor of two checkpoints once, and those again whose kind of change is not clear from that.

    Memory is a few blocks of a million values per core and, where a rank is looked for, two matrices of 144 columns.
    """
    pairs, unmatched = matched(a, b)
    return TensorChanges([*changes_of(a, b, pairs), *unmatched])


def changes_of(a: Model, b: Model, pairs: Sequence["Pair"]) -> list[TensorChange]:
    """How each pair changed, with its kind."""
    changes = first_pass(a, b, pairs)
    clear = {i: changes[i] for i, pair in enumerate(pairs) if pair.problem}
    rest = in_threads(lambda i: judged(pairs[i], changes[i]), [i for i in range(len(pairs)) if i not in clear])
    compared = TensorChanges([clear[i] if i in clear else next(rest) for i in range(len(pairs))])
    shared = {compared.changes[i].name for i in compared.shared[0]}  # what is more than one of their rank is rounding
    return [replace(c, kind="one direction", rank=1) if c.name in shared else c for c in compared.changes]


def first_pass(a: Model, b: Model, pairs: Sequence["Pair"]) -> list[TensorChange]:
    """How each pair changed, from reading both once, in blocks; its kind is only its problem, if it has one."""
    changes = {pair.names: replace(pair.unchanged, kind=pair.problem or "identical") for pair in pairs}
    comparable = [pair for pair in pairs if not pair.problem]
    total = sum(prod(pair.a.shape) for pair in comparable)
    with bar(what="tensors", unit=" values", total=total, unit_scale=True) as progress:
        parts = _parts(a, b, comparable)
        for change, values in in_threads(lambda part: (change_of(part), part[2] - part[1]), parts):
            names = change.name_a, change.name_b
            changes[names] = changes[names].and_then(change)
            progress.update(values)
    return list(changes.values())


def matched(a: Model, b: Model) -> tuple[list["Pair"], list[TensorChange]]:
    """The tensors that two models share, apart from their prefixes, and those that only one of them has."""
    names_a, names_b = ({name.removeprefix(model.prefix): name for name in model.checkpoint} for model in (a, b))
    pairs = [Pair(a.checkpoint[name], b.checkpoint[names_b[key]]) for key, name in names_a.items() if key in names_b]
    missing = [a.checkpoint[name] for key, name in names_a.items() if key not in names_b]
    new = [b.checkpoint[name] for key, name in names_b.items() if key not in names_a]
    return pairs, unpaired(missing, new)


def unpaired(missing: Iterable[Tensor], new: Iterable[Tensor]) -> list[TensorChange]:
    """The tensors that only the first or only the last of two models has."""
    lost = [TensorChange(t.name, "", (t.dtype, ""), (t.shape, ()), "missing") for t in missing]
    return [*lost, *(TensorChange("", t.name, ("", t.dtype), ((), t.shape), "new") for t in new)]


def _parts(a: Model, b: Model, pairs: Sequence["Pair"]) -> Iterator["Part"]:
    """The blocks of all pairs; those of files on a server come in few, large requests."""
    for batch in batches(pairs, lambda pair: pair.a.nbytes + pair.b.nbytes):
        a.checkpoint.prefetch(pair.a.name for pair in batch)
        b.checkpoint.prefetch(pair.b.name for pair in batch)
        for pair in batch:
            yield from pair.blocks()


@dataclass(frozen=True)
class Pair:
    """One tensor in two checkpoints; of a resized one, the rows that both have."""

    a: Tensor
    b: Tensor

    @property
    def names(self) -> tuple[str, str]:
        """Its names in both."""
        return self.a.name, self.b.name

    @property
    def unchanged(self) -> TensorChange:
        """The pair before anything is known of its values."""
        return TensorChange(self.a.name, self.b.name, (self.a.dtype, self.b.dtype), (self.a.shape, self.b.shape))

    @property
    def problem(self) -> str:
        """Why they cannot be compared, as a kind of change; empty where at most the number of rows differs."""
        a, b = self.a.shape, self.b.shape
        resized = len(a) == len(b) > 1 and a[1:] == b[1:] and 0 not in a + b
        if a != b and not resized:
            return "reshaped"
        return "unread" if why_unread(self.a) or why_unread(self.b) else ""

    def blocks(self) -> Iterator["Part"]:
        """Values [start, stop) of both, in the blocks of the one that has fewer."""
        common = min(prod(self.a.shape), prod(self.b.shape))
        for block in min(blocks_of(self.a), blocks_of(self.b), key=len):
            if block.start < common or not common:
                yield self, block.start, min(block.stop, common)

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Values [start, stop) of both, in their common dtype."""
        x, y = (Block(tensor, start, stop).values() for tensor in (self.a, self.b))
        common = np.result_type(x, y)
        return x.astype(common, copy=False), y.astype(common, copy=False)

    def pairs(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Blocks of rows of both."""
        for _, start, stop in self.blocks():
            x, y = (values.reshape(-1, self.a.shape[-1]) for values in self.read(start, stop))
            yield x, y

    def rows(self) -> Iterator[np.ndarray]:
        """The change, B - A, in blocks of rows, in float64."""
        for x, y in self.pairs():
            yield y.astype(np.float64) - x


Part = tuple[Pair, int, int]  # values [start, stop) of a pair


def change_of(part: Part) -> TensorChange:
    """How one block of a pair changed."""
    pair, start, stop = part
    x, y = pair.read(start, stop)
    with np.errstate(all="ignore"):
        width = row_width(pair.a.shape) or len(x)
        squares = float(row_squares(x.reshape(-1, width))[0].sum()) if len(x) else 0.0
        casts = frozenset[tuple[str, str]]()
        if x.dtype == np.float32:
            orders = (("A", (x, y)), ("B", (y, x)))
            casts = frozenset((cast, rounded) for rounded, order in orders for cast in casts_between(*order))
        unequal = (x != y) & ~((x != x) & (y != y))
        if not unequal.any():
            return replace(pair.unchanged, squares=squares, squares_b=squares, casts=casts)
        d = y.astype(np.float64) - x
        return replace(
            pair.unchanged,
            values_changed=int(np.count_nonzero(unequal)),
            rows_changed=int(np.count_nonzero(unequal.reshape(-1, width).any(axis=1))),
            squares=squares,
            squares_b=float(row_squares(y.reshape(-1, width))[0].sum()),
            moved=float(np.vecdot(d, d)),
            largest=float(np.abs(d).max()),
            casts=casts,
        )


def judged(pair: Pair, change: TensorChange) -> TensorChange:
    """The change with its kind; the pair is read again where the first pass does not settle it."""
    kind, detail, rank = _kind(pair, change)
    a, b = pair.a.shape, pair.b.shape
    if a != b:
        kind, detail = "resized", f"{a[0]:,} rows to {b[0]:,}; those that both have: {detail or KINDS[kind]}"
    share, *along = first_directions(pair.pairs) if rank is not None and rank <= NEARLY_ONE else (0.0,)
    return replace(change, kind=kind, detail=detail, rank=rank, along=tuple(along) if share >= NEARLY_ALL else ())


def _kind(pair: Pair, change: TensorChange) -> tuple[str, str, int | None]:
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


def _grid(pair: Pair, change: TensorChange) -> str:
    """The grid on which only one checkpoint's values lie, in words; empty where there is none."""
    width = row_width(pair.a.shape)
    if change.change > QUANTISED or not width:
        return ""
    for source, target, which in ((pair.a, pair.b, "B"), (pair.b, pair.a, "A")):
        if target.dtype not in BITS and source.dtype in BITS:
            return f"{which} to {target.dtype}"
    _, start, stop = next(pair.blocks())
    step = max(1, (stop - start) // width // GRID_ROWS)
    x, y = (values.reshape(-1, width)[::step] for values in pair.read(start, stop))
    for before, after, which in ((x, y, "B"), (y, x, "A")):
        if grid := grid_between(before, after):
            group, levels, nearest = grid
            block = "a row" if group == width else f"{group} neighbours"
            return f"{which} to {levels} values or so in {block}" + ("" if nearest else ", not always the nearest")
    for before, after, which in ((x, y, "B"), (y, x, "A")):  # of more values than a group has, which seldom repeat
        if (even := own_grid(after)) and not own_grid(before):
            return f"{which} to {even[0]}"
    return ""


def _ranked(pair: Pair, change: TensorChange) -> tuple[str, str, int | None]:
    """Low rank, up to the rounding of one of the dtypes involved, the finest first; or changed otherwise."""
    shape = pair.a.shape
    if len(shape) != 2 or min(shape) < 4 or any(dtype not in BITS for dtype in change.dtypes) or shape != pair.b.shape:
        return "changed", "", None
    rms = sqrt(max(change.squares, change.moved) / prod(shape))
    for bits in sorted({*(BITS[dtype] for dtype in change.dtypes), 23}, reverse=True):
        noise = 2.0**-bits * rms / sqrt(12)  # rounding errors are even within a step, a step at most 2^-bits of a value
        rank = low_rank(pair.rows, (shape[0], shape[1]), noise)
        if rank is not None:
            rounding = next(dtype for dtype, fraction in BITS.items() if fraction == bits)
            return "low rank", f"up to the rounding of {rounding}", rank
        if bits <= min(BITS[dtype] for dtype in change.dtypes):
            break
    return "changed", "", None

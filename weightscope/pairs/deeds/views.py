"""What was done to a tensor: a catalogue of transformations T, tried until T(A) = B up to the
stored rounding.

A deed acts along the first axis of an array: rows of a matrix, entries of a vector. Columns are the
rows of the transpose, so each is written once. `find_deed` tries them on a few rows and columns,
then on all values that it has: a deed is named only if it gives every value that changed, and
leaves the others as they are.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import NamedTuple

import numpy as np

from weightscope.core.errors import counted
from weightscope.core.results import ShowsShapes
from weightscope.model.metrics.spectra import evenly_spread

MOST_SHIFTED = 16  # rows by which a vocabulary is looked for in another place
OF_VOCABULARY = ("tokens", "unembedding")  # roles with a row for each token
# roles that are looked up by row
TABLES = (*OF_VOCABULARY, "positions", "relative_positions", "types")
SPREAD = 64  # rows or columns that a deed is tried on first
AT_ONCE = 1 << 20  # values compared at a time
# |T(A) - B| / |B| up to which float32 arrays are called equal: one rounding of each value
EXACT = 2e-6
# half-steps that a value may be from where a deed puts it: quantisers that search reach that
FARTHEST = 3.0
MARGIN = 2.0  # times the error that rounding to the nearest leaves in a row
CLEARER = 0.5  # times the error without a deed, at most, for one to be named
BLOCKS = (256, 128, 64, 32, 16)  # neighbours that share a scale in quantised formats
MOSTLY = 0.5  # of factors, which are one where a few rows or blocks were scaled
WITH_ONE_FACTOR = 8  # values that share a factor, at least
FAR = 2.0  # a factor from which a scale may be missing or applied twice
# difference of logarithms of factors that are one, up to the rounding of eight bits
ONE_FACTOR = 0.1
PROBED = 8  # rows whose place is looked for first
LARGEST_CODE = 255  # of integers that may be codes without their scales


class Sizes(NamedTuple):
    """What a deed needs to know about the row that a tensor belongs to."""

    role: str
    n_heads: int = 1
    n_kv_heads: int = 1
    head_dim: int = 1
    turned: int = 0  # dimensions of a head that a rotation turns; 0 without one
    stacked: int = 0  # experts of one tensor

    @property
    def heads(self) -> int:
        """Heads along the axis that this role divides into heads."""
        return (
            self.n_kv_heads
            if self.role.removesuffix(".bias") in ("k", "v", "k_norm")
            else self.n_heads
        )


class Deed(NamedTuple):
    """A transformation that was found."""

    name: str
    detail: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class Side(ShowsShapes):
    """Values of one tensor, (n, c), and what rounding to their dtype or to a stored grid may have
    cost each.
    """

    values: np.ndarray
    unit: float = 2.0**-24  # half a step of a float, relative
    least: float = 2.0**-126  # its smallest normal number
    half: np.ndarray | None = None  # half-steps of stored grids, (n, c); None of floats

    @property
    def room(self) -> np.ndarray:
        """Half a step at each value, (n, c)."""
        return (
            self.unit * np.maximum(np.abs(self.values), self.least)
            if self.half is None
            else self.half
        )

    @property
    def turned(self) -> "Side":
        """The transpose."""
        return replace(self, values=self.values.T, half=None if self.half is None else self.half.T)

    def at(self, *places: np.ndarray | slice) -> "Side":
        """These rows, and of these the columns that come second."""
        values, half = self.values, self.half
        for axis, each in enumerate(places):
            index = (slice(None),) * axis + (each,)
            values, half = values[index], None if half is None else half[index]
        return replace(self, values=values, half=half)

    def times(self, factors: np.ndarray | float) -> "Side":
        """Multiplied, in float64."""
        half = None if self.half is None else self.half * np.abs(factors)
        return replace(self, values=self.values.astype(np.float64) * factors, half=half)


def explained(x: Side, y: Side, *, computed: bool = False) -> np.ndarray:
    """Which rows of y are those of x up to rounding, every value and all together: (n,).

    computed: x was calculated; values that were only moved, between floats of one kind, have to be
    equal.
    """
    copied = not computed and x.half is None and y.half is None and x.unit == y.unit
    rows = max(1, AT_ONCE // max(1, y.values.shape[1]))
    places = [slice(start, start + rows) for start in range(0, len(y.values), rows)]
    parts = [_explained(x.at(each), y.at(each), copied) for each in places]
    return np.concatenate(parts) if parts else np.ones(0, bool)


def _explained(x: Side, y: Side, copied: bool) -> np.ndarray:
    p, q = x.values, y.values
    equal = (p == q) | ((p != p) & (q != q))
    if copied or equal.all():
        return np.asarray(equal.all(axis=1))
    with np.errstate(all="ignore"):
        off = np.where(equal, 0.0, np.abs(np.subtract(p, q, dtype=np.float64)))
        of_x, of_y = (np.nan_to_num(side.room.astype(np.float64), posinf=0.0) for side in (x, y))
        each = (off <= FARTHEST * (of_x + of_y)).all(axis=1)
        usual = (np.vecdot(of_x, of_x) + np.vecdot(of_y, of_y)) / 3
        return np.asarray(each & (np.vecdot(off, off) <= MARGIN**2 * usual))


Tried = Iterator[tuple[str, np.ndarray]]  # names of deeds, and T(x) for x (n, c)


# Orders of rows.


def neighbours(x: np.ndarray, heads: int, turned: int = 0) -> np.ndarray:
    """Rows 0, r/2, 1, r/2 + 1 ... of each head, so that pairs that rotate together are neighbours:
    (n, c).
    """
    y = x.reshape(heads, -1, x.shape[-1])  # (H, r, c)
    r = turned or y.shape[1]
    pairs = y[:, :r].reshape(heads, 2, r // 2, -1).swapaxes(1, 2).reshape(heads, r, -1)
    return np.concatenate([pairs, y[:, r:]], axis=1).reshape(x.shape)


def halves(x: np.ndarray, heads: int, turned: int = 0) -> np.ndarray:
    """The reverse of `neighbours`."""
    y = x.reshape(heads, -1, x.shape[-1])
    r = turned or y.shape[1]
    pairs = y[:, :r].reshape(heads, r // 2, 2, -1).swapaxes(1, 2).reshape(heads, r, -1)
    return np.concatenate([pairs, y[:, r:]], axis=1).reshape(x.shape)


def other_rotary_layout(x: np.ndarray, sizes: Sizes) -> Tried:
    """Queries or keys in the order of another rotation, by the right number of heads or a wrong
    one.
    """
    if not {*sizes.role.removesuffix(".bias").split("+")} & {
        "q",
        "k",
        "q_norm",
        "k_norm",
        "q_b",
        "kv_a",
    }:
        return
    right = 1 if sizes.role in ("q_norm", "k_norm") and len(x) == sizes.head_dim else sizes.heads
    for count in dict.fromkeys((right, sizes.n_heads, sizes.n_kv_heads, *(2**i for i in range(9)))):
        if count < 1 or len(x) % (2 * count):
            continue
        wrong = "" if count == right else f", by {counted(count, 'head')} instead of {right}"
        turned = {0, sizes.turned} if count == right and sizes.turned < len(x) // count else {0}
        for part in sorted(turned, reverse=True):
            if part % 2:
                continue
            yield f"rotary layout: halves to neighbours{wrong}", neighbours(x, count, part)
            yield f"rotary layout: neighbours to halves{wrong}", halves(x, count, part)
        # turned once by each number: undone as it was not done
        if wrong and right > 0 and len(x) % (2 * right) == 0:
            yield (
                f"rotary layout: to neighbours{wrong}, and back",
                halves(neighbours(x, count), right),
            )
            yield f"rotary layout: back from neighbours{wrong}", halves(neighbours(x, right), count)


def other_fused_order(x: np.ndarray, sizes: Sizes) -> Tried:
    """The parts of a fused tensor in another order, by group or in blocks."""
    role = sizes.role.removesuffix(".bias").removeprefix("expert.").removeprefix("shared_expert.")
    if role == "gate+up" and len(x) % 2 == 0:
        yield "gate and up exchanged", np.roll(x, len(x) // 2, axis=0)
        yield "gate and up interleaved", neighbours(x, 1)
        yield "gate and up taken apart", halves(x, 1)
    n, h, g = len(x), sizes.n_heads, sizes.n_kv_heads
    if role != "q+k+v" or n % (h + 2 * g) or h % g:
        return
    r = n // (h + 2 * g)
    q, k, v = np.split(x, [h * r, (h + g) * r])
    blocks = dict(zip("qkv", (q, k, v), strict=True))
    for order in ("kqv", "qvk", "vqk", "vkq", "kvq"):
        yield (
            f"q+k+v in the order {'+'.join(order)}",
            np.concatenate([blocks[letter] for letter in order]),
        )
    # (G, (h/g + 2) r, c)
    grouped = np.concatenate([part.reshape(g, -1, x.shape[-1]) for part in (q, k, v)], axis=1)
    yield "q+k+v: from blocks to groups", grouped.reshape(x.shape)
    groups = x.reshape(g, h // g + 2, r, -1)
    parts = (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])
    yield (
        "q+k+v: from groups to blocks",
        np.concatenate([part.reshape(-1, x.shape[-1]) for part in parts]),
    )
    if h == g:
        heads = x.reshape(3, h, r, -1).swapaxes(0, 1).reshape(x.shape)
        yield "q+k+v: heads by head instead of by part", heads
        yield (
            "q+k+v: by part instead of by head",
            x.reshape(h, 3, r, -1).swapaxes(0, 1).reshape(x.shape),
        )


def swapped_places(x: np.ndarray, sizes: Sizes) -> Tried:
    """Neighbours exchanged, as nibbles of a byte are; halves of blocks, as ggml's are, unless these
    are heads.
    """
    of_heads = sizes.head_dim > 1 and {*sizes.role.removesuffix(".bias").split("+")} <= {*"qkvo"}
    if len(x) % 2 == 0:
        yield (
            "nibbles swapped: neighbours exchanged",
            x.reshape(-1, 2, x.shape[-1])[:, ::-1].reshape(x.shape),
        )
    for block in (*BLOCKS, 8):
        if len(x) % block == 0 and not (of_heads and block // 2 % sizes.head_dim == 0):
            parts = x.reshape(-1, 2, block // 2, x.shape[-1])
            yield (
                f"nibbles swapped: halves of each {block} exchanged",
                parts[:, ::-1].reshape(x.shape),
            )
        if len(x) % block == 0 and block <= 16:
            turned = x.reshape(-1, block, x.shape[-1])[:, ::-1].reshape(x.shape)
            yield f"each {block} reversed: another order of bytes", turned
    yield "reversed", x[::-1]


def moved_rows(x: np.ndarray, sizes: Sizes) -> Tried:
    """Rows shifted by a few places, with zeros or around the end."""
    if sizes.role.removesuffix(".bias") not in TABLES:
        return
    for by in (by for most in range(1, MOST_SHIFTED + 1) for by in (most, -most) if most < len(x)):
        rows = (
            "rows of the vocabulary"
            if sizes.role.removesuffix(".bias") in OF_VOCABULARY
            else "rows"
        )
        name = f"{rows} shifted by {by}"
        yield name, np.roll(x, by, axis=0)


def turned_heads(x: np.ndarray, sizes: Sizes) -> Tried:
    """Every head moved to the next place or to the one before."""
    if {*sizes.role.removesuffix(".bias").split("+")} <= {*"qkvo"} and len(x) > sizes.head_dim > 0:
        for by in (sizes.head_dim, -sizes.head_dim):
            yield "heads in another order", np.roll(x, by, axis=0)


ORDERS: tuple[Callable[[np.ndarray, Sizes], Tried], ...] = (
    other_rotary_layout,
    other_fused_order,
    moved_rows,
    turned_heads,
    swapped_places,
)


def error_of(x: np.ndarray, y: np.ndarray) -> float:
    """|x - y| / |y| in the Frobenius norm; infinite where one is not finite or y is zero and x is
    not.
    """
    with np.errstate(all="ignore"):
        size, apart = (
            float(np.linalg.norm(y)),
            float(np.linalg.norm(np.subtract(x, y, dtype=np.float64))),
        )
    return (
        (apart / size if size else (0.0 if apart == 0 else np.inf))
        if np.isfinite(apart + size)
        else np.inf
    )


def places_of(x: np.ndarray, y: np.ndarray, block: int, tolerance: float) -> np.ndarray | None:
    """The block of x that each block of y is, (n / block,), where each is another one: x, y (n,
    c).
    """
    if (
        len(x) != len(y)
        or len(x) % block
        or len(x) // block < 2
        or not np.isfinite(x).all() & np.isfinite(y).all()
    ):
        return None
    rng = np.random.default_rng(0)
    turn = rng.standard_normal((block * x.shape[1], min(8, block * x.shape[1]))).astype(np.float32)
    with np.errstate(all="ignore"):
        sides = (side.reshape(len(side) // block, -1).astype(np.float32) @ turn for side in (x, y))
        of_x, of_y = (side.astype(np.float64) for side in sides)
    if not (np.isfinite(of_x).all() and np.isfinite(of_y).all()):
        return None  # their sums overflow
    if any(len(np.unique(side, axis=0)) < len(side) for side in (of_x, of_y)):
        return None  # equal blocks have no order, and a tree is slow where many points are one
    few = of_y[evenly_spread(len(of_y), PROBED)]
    nearest = np.array([np.linalg.norm(of_x - row, axis=1).min() for row in few])
    size = float(np.linalg.norm(of_y)) / sqrt(len(of_y))
    # most changes end here
    if np.linalg.norm(nearest) > FARTHEST * max(tolerance, EXACT) * size * sqrt(len(few)):
        return None
    from scipy.spatial import cKDTree  # SciPy takes a while to import

    _, places = cKDTree(of_x).query(of_y)
    ordered = x.reshape(-1, block, x.shape[1])[places].reshape(x.shape)
    return (
        places
        if len({*places.tolist()}) == len(places) and error_of(ordered, y) <= tolerance
        else None
    )


# A pair of tensors seen along one axis


class View:
    """Both tensors with the axis that deeds act along first, and which of its rows changed."""

    def __init__(self, x: Side, y: Side, along: str, is_whole: bool = True) -> None:
        self.x, self.y, self.along, self.is_whole = x, y, along, is_whole
        self.changed = ~explained(x, y)  # (n,)
        rows = _spread_among(self.changed)
        # and columns: tried first
        self.few = rows, _spread_among(~explained(x.at(rows).turned, y.at(rows).turned))

    @property
    def where(self) -> str:
        """How many rows changed, and which is the first."""
        return f"{np.count_nonzero(self.changed)} of {len(self.changed)}, from {np.argmax(self.changed)}"

    def moves(self, places: np.ndarray) -> bool:
        """Whether y is x with its rows in these places."""
        rows, columns = self.few
        if (places == np.arange(len(places))).all():
            return False
        is_near = explained(self.x.at(places[rows], columns), self.y.at(rows, columns)).all()
        return bool(is_near) and self.gives(self.x.at(places), computed=False)

    def gives(self, made: Side, *, computed: bool = True) -> bool:
        """Whether y is T(x) up to rounding, and clearly nearer to it than to x."""
        if not explained(made.at(*self.few), self.y.at(*self.few), computed=computed).all():
            return False  # of most deeds
        sides = (
            [(made, self.y), (made.turned, self.y.turned)] if self.is_whole else [(made, self.y)]
        )
        if not self.changed.any() or not all(
            explained(*side, computed=computed).all() for side in sides
        ):
            return False
        before, after, now = (side.values[self.changed] for side in (self.x, self.y, made))
        return error_of(now, after) <= CLEARER * error_of(before, after)

    @property
    def tolerance(self) -> float:
        """|error| / |y| that rounding both may cause."""
        with np.errstate(all="ignore"):
            room, size = (
                float(np.linalg.norm(each)) for each in (self.x.room + self.y.room, self.y.values)
            )
        return max(MARGIN * room / sqrt(3) / size, EXACT) if 0 < size < np.inf else EXACT


def _spread_among(changed: np.ndarray) -> np.ndarray:
    """A few of all places, evenly spread, half of them among those that changed."""
    places = np.flatnonzero(changed)
    few = places[evenly_spread(len(places), SPREAD // 2)] if len(places) else places
    return np.union1d(few, evenly_spread(len(changed), SPREAD // 2)).astype(int)


def other_order(view: View, sizes: Sizes) -> Deed | None:
    """Heads, experts or rows in another order, found by the rows themselves."""
    x, y, role = view.x.values, view.y.values, sizes.role.removesuffix(".bias")
    names = {
        1: "experts in another order" if role.startswith("router") else "rows in another order"
    }
    if {*role.split("+")} <= {*"qkvo"}:
        names[sizes.head_dim] = "heads in another order"
    if sizes.stacked:
        names[len(x) // sizes.stacked] = "experts in another order"
    for block, name in sorted(names.items(), reverse=True):
        places = (
            places_of(x, y, block, view.tolerance) if block == 1 or 1 < block < len(x) else None
        )
        if places is not None:
            order = (places[:, None] * block + np.arange(block)).reshape(-1)
            moved = int((places != np.arange(len(places))).sum())
            if view.gives(view.x.at(order), computed=False):
                return Deed(name, f"{moved} of {len(places)} moved")
    return None


# Values.


def offset_of_norm(view: View, sizes: Sizes) -> Deed | None:
    """One number added to the gains of a norm, once or twice."""
    if "norm" in sizes.role and not sizes.role.endswith(".bias"):
        for number in (1, -1, 2, -2):
            made = view.x.values.astype(np.float64) + number
            # gains may be stored with 1 more than they are read with
            stored = max(view.x.least, 1.0 + abs(number))
            if view.gives(replace(view.x, values=made, least=stored)):
                return Deed(
                    f"norm: 1 {'added' if number > 0 else 'subtracted'}{' twice' * (abs(number) == 2)}"
                )
    return None


def off_by_steps(view: View) -> Deed | None:
    """Whole steps of a stored grid added, the same number to all values or to some blocks of
    neighbours.
    """
    for half, sign, where in ((view.y.half, 1, ""), (view.x.half, -1, " in A")):
        width = view.y.values.shape[1]
        block = next((each for each in reversed(BLOCKS) if width % each == 0), width)
        if half is None or block < WITH_ONE_FACTOR:
            continue
        with np.errstate(all="ignore"):
            steps = np.nan_to_num(
                (view.y.values.astype(np.float64) - view.x.values) / (2 * half), posinf=0, neginf=0
            )
            counts = np.rint(steps.reshape(len(steps), -1, block).mean(axis=-1)).repeat(
                block, axis=1
            )
            made = replace(view.x, values=view.x.values + 2 * half * counts)
        kinds = np.unique(counts)
        if not (kinds.any() and view.gives(made)):
            continue
        if len(kinds) > 1:
            share = f"{np.count_nonzero(counts) / counts.size:.0%} of values, {kinds.min():+.0f} to {kinds.max():+.0f}"
            return Deed(
                f"some values off by whole steps of their grid, as of zero points{where}", share
            )
        size, direction = abs(int(kinds[0])), "high" if kinds[0] * sign < 0 else "low"
        number = ("one", "two", "three")[size - 1] if size < 4 else str(size)
        steps_of = "one step" if size == 1 else f"{number} steps"
        return Deed(
            f"each value off by {steps_of} of its grid, as of zero points {number} too {direction}{where}"
        )
    return None


def rescaled(views: Sequence[View]) -> Deed | None:
    """A factor for all values, each row or column, both, or blocks of neighbours: the first that
    fits.
    """
    view = views[0]
    with np.errstate(all="ignore"):
        p, q = (side.at(*view.few).values.astype(np.float64) for side in (view.x, view.y))
        factor = float(np.vdot(p, q) / np.vdot(p, p))
        if view.gives(replace(view.x, values=-view.x.values), computed=False):
            return Deed("negated")
        if np.isfinite(factor) and factor != 0 and view.gives(view.x.times(factor)):
            slip = (
                ""
                if 1 / FAR < abs(factor) < FAR
                else ": a scale missing, inverted or applied twice"
            )
            return Deed(f"scaled by one number{slip}", f"{factor:.6g}")
        if len(views) == 1:
            return None
        tries = [_by_row(each) for each in views]
        tries += [_by_row_and_column(view) if deed is None else None for deed in tries[:1]]
        # blocks lie along the inputs: columns, or rows where inputs are these
        for offset in (False, True):
            tries += [_by_block(each, offset) for each in views] if not any(tries) else []
    return next(filter(None, tries), None)


def _factors(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The factor of each group along the last axis, (..., 1), by least squares; one for zeros that
    stayed.
    """
    x, y = x.astype(np.float64), y.astype(np.float64)
    factors = np.vecdot(x, y) / np.vecdot(x, x)
    return np.where((x == y).all(axis=-1), 1.0, factors)[..., None]


def _stand_out(made: np.ndarray, x: np.ndarray, room: np.ndarray) -> bool:
    """Whether groups along the last axis that were scaled are more than rounding leaves; if not,
    any x would do.
    """
    sizes, least = (np.square(each, dtype=np.float64).sum(axis=-1) for each in (made, room))
    return bool(
        (sizes > MARGIN**2 * least)[(made != x).any(axis=-1)].all() and np.isfinite(sizes).all()
    )


def _by_row(view: View) -> Deed | None:
    """A factor for each row."""
    if view.y.values.shape[1] < WITH_ONE_FACTOR:
        return None
    columns = view.few[1]
    factors = _factors(*(side.at(slice(None), columns).values for side in (view.x, view.y)))
    made = view.x.times(factors)
    if not _stand_out(made.values, view.x.values, view.y.room) or not view.gives(made):
        return None
    return _named_scale("row", view, view.x.values, factors)


def _by_row_and_column(view: View) -> Deed | None:
    """Factors of rows times factors of columns, by medians."""
    if min(view.y.values.shape) < WITH_ONE_FACTOR:
        return None
    rows, columns = view.few
    logs = [
        np.log(np.abs(view.y.at(*few).values.astype(np.float64) / view.x.at(*few).values))
        for few in ((slice(None), columns), (rows, slice(None)))
    ]
    if any(np.isnan(each).all(axis=axis).any() for each, axis in zip(logs, (1, 0), strict=True)):
        return None
    of_rows = np.nanmedian(logs[0], axis=1, keepdims=True)
    if not np.isfinite(of_rows).all():
        return None
    factors = np.exp(of_rows + np.nanmedian(logs[1] - of_rows[rows], axis=0))  # (n, c)
    made, x, room = view.x.times(factors), view.x.values, view.y.room
    if not (
        _stand_out(made.values, x, room)
        and _stand_out(made.values.T, x.T, room.T)
        and view.gives(made)
    ):
        return None
    return _named_scale("row and by column", view, view.x.values, factors)


def _by_block(view: View, offset: bool) -> Deed | None:
    """A factor for each block of neighbours in a row, the widest first; with `offset`, something
    added to each too.
    """
    width = view.y.values.shape[1]
    for block in BLOCKS:
        if width % block or width == block:
            continue
        rows = view.few[0]
        if _in_blocks(View(view.x.at(rows), view.y.at(rows), ""), block, offset) is None:
            continue
        factors = _in_blocks(view, block, offset)
        if factors is not None:
            where = f"blocks of {block} with an offset each" if offset else f"blocks of {block}"
            return _named_scale(
                "block", view, view.x.values.reshape(*factors.shape[:2], block), factors, where
            )
    return None


def _in_blocks(view: View, block: int, offset: bool) -> np.ndarray | None:
    """The factor of each block, (n, blocks, 1), if they explain y."""
    x, y = (
        side.values.reshape(len(side.values), -1, block).astype(np.float64)
        for side in (view.x, view.y)
    )
    means = [each.mean(axis=-1, keepdims=True) if offset else np.zeros(1) for each in (x, y)]
    factors = _factors(x - means[0], y - means[1])
    made = (x - means[0]) * factors
    if not _stand_out(made, x - means[0], view.y.room.reshape(x.shape)):
        return None
    made = (made + means[1]).reshape(view.x.values.shape)
    return factors if view.gives(replace(view.x, values=made)) else None


def _named_scale(
    along: str, view: View, x: np.ndarray, factors: np.ndarray, where: str = ""
) -> Deed | None:
    """What factors that values share along the last axis show; where most of them are one, which
    these are.
    """
    is_one = np.abs(factors - 1) <= view.tolerance
    others = factors[~is_one]
    if not len(others):
        return None
    named = [f"{each:.3g}" for each in (others.min(), others.max())]
    spread = (
        f"factors {' to '.join(dict.fromkeys(named))}"
        if len({*named}) > 1
        else f"factor {named[0]}"
    )
    named_along = view.along if along == "row" else ""
    if is_one.mean() >= MOSTLY:
        count = view.where if along == "row" else f"{len(others)} of {factors.size}"
        some = along.replace("row and by column", "rows and column")
        return Deed(
            f"scaled in some {some}s{named_along}", ", ".join(filter(None, (where, count, spread)))
        )
    name = f"scaled by {along}: scales {slip_of(x, factors)}{named_along}"
    return Deed(name, ", ".join(filter(None, (where, spread))))


def slip_of(x: np.ndarray, factors: np.ndarray) -> str:
    """What was done with scales, where y = factors x and each was made for the largest value that
    it multiplies.

    Scales of weights are below one. Without its scale s, x = s codes becomes x / s, and divided by
    it x / s^2, both larger; multiplied once more it is s x, smaller. Another group's scale gives
    factors around one.
    """
    sizes = np.abs(x).max(axis=-1, keepdims=True) * np.ones_like(factors)
    with np.errstate(all="ignore"):
        # (n, groups of a row)
        f, a = (np.log(np.abs(each.reshape(len(x), -1))) for each in (factors, sizes))
    is_known = np.isfinite(f) & np.isfinite(a)
    if not is_known.any() or abs(f[is_known].mean()) <= f[is_known].std():
        return "of the wrong axis or in another order"
    if f[is_known].mean() < 0:
        return "applied twice"
    points = []
    # rows that share a factor have one scale: the largest value of all counts
    for column in range(f.shape[1]):
        starts = np.flatnonzero(np.append(True, np.abs(np.diff(f[:, column])) > ONE_FACTOR))
        points += [*zip(f[starts, column], np.maximum.reduceat(a[:, column], starts), strict=True)]
    known = np.array([point for point in points if np.isfinite(point).all()])
    spread = known[:, 1].var()
    slope = float(np.cov(known.T, bias=True)[0, 1] / spread) if spread else -1.0
    return "inverted" if slope < -1.5 else "missing"


def reinterpreted(view: View) -> Deed | None:
    """A dtype read as another one, or bytes in the other order."""
    if view.x.half is not None:
        return None
    single = np.ascontiguousarray(view.x.values, dtype=np.float32)
    few, y = _readings(np.ascontiguousarray(single[np.ix_(*view.few)])), view.y.at(*view.few)
    tries = [name for name, made in few.items() if explained(Side(made), y, computed=True).all()]
    readings = _readings(single) if tries else {}
    names = [name for name in tries if explained(Side(readings[name]), view.y, computed=True).all()]
    return Deed(f"dtype reinterpreted: {names[0].partition(', ')[0]}") if names else None


def _readings(single: np.ndarray) -> dict[str, np.ndarray]:
    """Float32 values as a reader sees them that takes their dtype for another."""
    bits = single.view("<u4")
    cut, nearest = (
        (bits + more >> 16).astype("<u2") for more in (np.uint32(0), 0x7FFF + (bits >> 16 & 1))
    )
    with np.errstate(all="ignore"):
        half = single.astype(np.float16)
        readings = {
            "F16 read as BF16": _from_upper(half.view("<u2")),
            "F32 with bytes in the other order": single.byteswap(),
            "F16 with bytes in the other order": half.byteswap().astype(np.float32),
        }
        for how, upper in (("cut off", cut), ("to the nearest", nearest)):
            readings[f"BF16 read as F16, {how}"] = upper.view("<f2").astype(np.float32)
            readings[f"BF16 with bytes in the other order, {how}"] = _from_upper(upper.byteswap())
    return readings


def _from_upper(bits: np.ndarray) -> np.ndarray:
    """float32 of its upper 16 bits."""
    return (bits.astype("<u4") << 16).view("<f4")


def erased_rows(view: View, sizes: Sizes) -> Deed | None:
    """What happened to some rows, in B or else in A, where the others are as they were: NaN, zeros,
    a tail.
    """
    for x, y, where in ((view.x, view.y, ""), (view.y, view.x, " in A")):
        if deed := _erased(x, y, view.changed, sizes):
            return Deed(f"{deed}{where}{view.along}", view.where)
    return None


def _erased(before: Side, after: Side, changed: np.ndarray, sizes: Sizes) -> str:
    """How rows that changed were erased; empty where they were not."""
    y = after.values
    if not np.isfinite(y[changed]).all():
        return "NaN or infinity" if np.isfinite(before.values[changed]).all() else ""
    places = np.flatnonzero(changed)
    first, is_tail = places[0], len(places) > 1 and len(places) == len(y) - places[0]
    here = after.at(slice(first, first + 1))
    # of the first row: a write may end within it
    kept = np.flatnonzero(np.abs(here.values) > here.room)
    written = slice(first, first + 1), slice(0, kept[-1] + 1 if len(kept) else 0)
    is_tail = is_tail and len(places) < len(y) and not y[first + 1 :].any()
    if is_tail and explained(before.at(*written), after.at(*written)).all():
        return "zeros at the end: a truncated write"
    if y[changed].any():
        return ""
    rows = "rows of the vocabulary" if sizes.role.removesuffix(".bias") in OF_VOCABULARY else "rows"
    return "zeroed" if len(places) == len(y) else f"{rows} zeroed"


def some_zeroed(view: View) -> Deed | None:
    """Some values zeros in B, or else in A, and the others as they were."""
    x, y = view.x.values, view.y.values
    if view.x.half is not None or view.y.half is not None:  # rounding leaves zeros
        return None
    for before, after, where in ((x, y, ""), (y, x, " in A")):
        gone = (after == 0) & (np.abs(before) > FARTHEST * (view.x.room + view.y.room))
        if gone.any() and view.gives(replace(view.x, values=np.where(gone, y, x)), computed=False):
            return Deed(
                f"some values zeroed{where}", f"{np.count_nonzero(gone):,} of {gone.size:,}"
            )
    return None


def find_deed(views: Sequence[View], sizes: Sizes) -> Deed | None:
    """The deed that makes B of A: views of all rows, and of a matrix of all columns too."""
    if not any(view.changed.any() for view in views):
        return None
    view, *rest = views
    if deed := reinterpreted(view):
        return deed
    if (
        rest
        and view.x.values.shape == rest[0].x.values.shape
        and view.gives(rest[0].x, computed=False)
    ):
        return Deed("transposed")
    for each in views:
        if each.changed.any() and (deed := erased_rows(each, sizes)):
            return deed
    for each in views:
        for catalogue in ORDERS:
            for name, made in catalogue(np.arange(len(each.changed))[:, None], sizes):
                if each.moves(made[:, 0]):
                    return Deed(name + each.along)
    if deed := offset_of_norm(view, sizes) or off_by_steps(view) or rescaled(views):
        return deed
    for each in views:
        if deed := other_order(each, sizes):
            return deed._replace(name=deed.name + each.along)
    if deed := some_zeroed(view):
        return deed
    fewest = min(views, key=lambda each: each.changed.mean())
    if fewest.changed.all():
        return None
    return Deed(f"other values in some {'columns' if fewest.along else 'rows'}", fewest.where)

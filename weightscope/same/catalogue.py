"""What was done to a tensor: a catalogue of transformations T, tried until T(A) = B up to the stored precision.

A deed acts along the first axis of an array: rows of a matrix, entries of a vector. Columns are the rows of the
transpose, so each is written once. `find_deed` tries them on a few columns of all rows, or a few rows of all columns.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from weightscope.errors import counted
from weightscope.metrics.spectra import evenly_spread

MOST_SHIFTED = 16  # rows by which a vocabulary is looked for in another place
OF_VOCABULARY = ("tokens", "unembedding")  # roles with a row for each token
SPREAD = 64  # rows or columns that a deed is tried on
EXACT = 2e-6  # |T(A) - B| / |B| up to which float32 arrays are called equal: one rounding of each value
CLEARER = 0.5  # times the error without a deed, at most, for one to be named
BLOCKS = (256, 128, 64, 32, 16)  # neighbours that share a scale in quantised formats
FEW = 0.5  # of the rows: where no more changed, these rows are described
AS_GOOD = 1.25  # times the error of the best way of scaling, at most, for a simpler one
ONE_ROW = 2.0  # times the error of a whole matrix: what one row may have
ONE_FACTOR = 0.1  # difference of logarithms of factors that are one, up to the rounding of eight bits


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
        return self.n_kv_heads if self.role.removesuffix(".bias") in ("k", "v", "k_norm") else self.n_heads


class Deed(NamedTuple):
    """A transformation that was found, and how far T(A) is from B."""

    name: str
    error: float
    detail: str = ""


Tried = Iterator[tuple[str, np.ndarray]]  # names of deeds, and T(x) for x (n, c)


# Orders of rows.


def neighbours(x: np.ndarray, heads: int, turned: int = 0) -> np.ndarray:
    """Rows 0, r/2, 1, r/2 + 1 ... of each head, so that pairs that rotate together are neighbours: (n, c)."""
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
    """Queries or keys in the order of another rotation, by the right number of heads or a wrong one."""
    if not {*sizes.role.removesuffix(".bias").split("+")} & {"q", "k", "q_norm", "k_norm", "q_b", "kv_a"}:
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
        if wrong and right > 0 and len(x) % (2 * right) == 0:  # turned once by each number: undone as it was not done
            yield f"rotary layout: to neighbours{wrong}, and back", halves(neighbours(x, count), right)
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
        yield f"q+k+v in the order {'+'.join(order)}", np.concatenate([blocks[letter] for letter in order])
    grouped = np.concatenate([part.reshape(g, -1, x.shape[-1]) for part in (q, k, v)], axis=1)  # (G, (h/g + 2) r, c)
    yield "q+k+v: from blocks to groups", grouped.reshape(x.shape)
    groups = x.reshape(g, h // g + 2, r, -1)
    parts = (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])
    yield "q+k+v: from groups to blocks", np.concatenate([part.reshape(-1, x.shape[-1]) for part in parts])
    if h == g:
        heads = x.reshape(3, h, r, -1).swapaxes(0, 1).reshape(x.shape)
        yield "q+k+v: heads by head instead of by part", heads
        yield "q+k+v: by part instead of by head", x.reshape(h, 3, r, -1).swapaxes(0, 1).reshape(x.shape)


def swapped_places(x: np.ndarray, sizes: Sizes) -> Tried:
    """Neighbours exchanged, as nibbles of a byte are; halves of blocks, as ggml's nibbles are."""
    if len(x) % 2 == 0:
        yield "nibbles swapped: neighbours exchanged", x.reshape(-1, 2, x.shape[-1])[:, ::-1].reshape(x.shape)
    for block in (*BLOCKS, 8):
        if len(x) % block == 0:
            parts = x.reshape(-1, 2, block // 2, x.shape[-1])
            yield f"nibbles swapped: halves of each {block} exchanged", parts[:, ::-1].reshape(x.shape)
        if len(x) % block == 0 and block <= 16:
            turned = x.reshape(-1, block, x.shape[-1])[:, ::-1].reshape(x.shape)
            yield f"each {block} reversed: another order of bytes", turned
    yield "reversed", x[::-1]


def other_sign(x: np.ndarray, sizes: Sizes) -> Tried:
    """All values negated."""
    yield "negated", -x


def moved_rows(x: np.ndarray, sizes: Sizes) -> Tried:
    """Rows shifted by a few places, with zeros or around the end."""
    if sizes.role.removesuffix(".bias") not in (*OF_VOCABULARY, "positions"):
        return
    for by in (by for most in range(1, MOST_SHIFTED + 1) for by in (most, -most) if most < len(x)):
        name = f"rows of the vocabulary shifted by {by}"
        yield name, np.roll(x, by, axis=0)


def turned_heads(x: np.ndarray, sizes: Sizes) -> Tried:
    """Every head moved to the next place or to the one before."""
    if {*sizes.role.removesuffix(".bias").split("+")} <= {*"qkvo"} and len(x) > sizes.head_dim > 0:
        for by in (sizes.head_dim, -sizes.head_dim):
            yield "heads in another order", np.roll(x, by, axis=0)


ORDERS: tuple[Callable[[np.ndarray, Sizes], Tried], ...] = (
    other_rotary_layout, other_fused_order, other_sign, moved_rows, turned_heads, swapped_places,
)  # fmt: skip


def error_of(x: np.ndarray, y: np.ndarray) -> float:
    """|x - y| / |y| in the Frobenius norm; infinite where one is not finite or y is zero and x is not."""
    with np.errstate(all="ignore"):
        size, apart = float(np.linalg.norm(y)), float(np.linalg.norm(np.subtract(x, y, dtype=np.float64)))
    return (apart / size if size else (0.0 if apart == 0 else np.inf)) if np.isfinite(apart + size) else np.inf


def places_of(x: np.ndarray, y: np.ndarray, block: int, tolerance: float) -> np.ndarray | None:
    """The block of x that each block of y is, (n / block,), where each is another one: x, y (n, c)."""
    if len(x) != len(y) or len(x) % block or len(x) // block < 2 or not np.isfinite(x).all() & np.isfinite(y).all():
        return None
    from scipy.spatial import cKDTree

    rng = np.random.default_rng(0)
    turn = rng.standard_normal((block * x.shape[1], min(8, block * x.shape[1]))).astype(np.float32)
    with np.errstate(all="ignore"):
        of_x, of_y = (side.reshape(len(side) // block, -1).astype(np.float32) @ turn for side in (x, y))
    if not np.isfinite(of_x).all() & np.isfinite(of_y).all():  # their sums overflow
        return None
    _, places = cKDTree(of_x).query(of_y)
    ordered = x.reshape(-1, block, x.shape[1])[places].reshape(x.shape)
    return places if len({*places.tolist()}) == len(places) and error_of(ordered, y) <= tolerance else None


def other_order(x: np.ndarray, y: np.ndarray, sizes: Sizes, tolerance: float) -> Deed | None:
    """Heads, experts or rows in another order, found by the rows themselves."""
    role = sizes.role.removesuffix(".bias")
    names = {1: "experts in another order" if role.startswith("router") else "rows in another order"}
    if {*role.split("+")} <= {*"qkvo"}:
        names[sizes.head_dim] = "heads in another order"
    if sizes.stacked:
        names[len(x) // sizes.stacked] = "experts in another order"
    for block, name in sorted(names.items(), reverse=True):
        places = places_of(x, y, block, tolerance) if block == 1 or 1 < block < len(x) else None
        if places is not None:
            moved = int((places != np.arange(len(places))).sum())
            ordered = x.reshape(-1, block, x.shape[1])[places].reshape(x.shape)
            return Deed(name, error_of(ordered, y), f"{moved} of {len(places)} moved")
    return None


# Values.


def offset_of_norm(x: np.ndarray, y: np.ndarray, sizes: Sizes, tolerance: float) -> Deed | None:
    """One number added to the gains of a norm, once or twice."""
    if "norm" in sizes.role and not sizes.role.endswith(".bias"):
        offset = float(np.median(y.astype(np.float64) - x))
        for number in (1.0, -1.0, 2.0, -2.0):
            if abs(offset - number) < 0.1 and error_of(x + np.float32(number), y) <= tolerance:
                how = "added" if number > 0 else "subtracted"
                twice = " twice" if abs(number) == 2 else ""
                return Deed(f"norm: 1 {how}{twice}", error_of(x + np.float32(number), y))
    return None


def rescaled_views(views: Sequence[tuple[np.ndarray, np.ndarray, str]], tolerance: float) -> Deed | None:
    """A factor for all values, each row or column, both, or blocks of neighbours: the simplest that fits as well.

    views: x, y (n, c) and how deeds along their rows are called.
    """
    deeds: list[Deed] = []
    with np.errstate(all="ignore"):
        x, y, _ = views[0]
        factor = np.float32(np.vdot(x, y) / np.vdot(x, x))
        if factor != 0:
            name = "scaled by one number: a scale missing, inverted or applied twice"
            deeds = [Deed(name, error_of(x * factor, y), f"{factor:.6g}")]
        if len(views) > 1:
            for p, q, along in views:
                deeds += _scaled("row", p, q, (np.vecdot(p, q) / np.vecdot(p, p))[:, None], along)
            deeds += _scaled("row and by column", x, y, _outer(x, y), "")
            for offset in (False, True):
                for p, q, _ in reversed(views):  # blocks lie along the inputs: columns, or rows where inputs are these
                    deeds += scaled_in_blocks(p.T, q.T, offset=offset)
    best = max(min((deed.error for deed in deeds), default=np.inf), EXACT)
    return next((deed for deed in deeds if deed.error <= min(tolerance, AS_GOOD * best)), None)


def _outer(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Factors of rows times factors of columns, (n, c), by medians; NaN where a row or column is zero."""
    ratios = np.log(np.abs(y.astype(np.float64) / x))
    if np.isnan(ratios).all(axis=0).any() or np.isnan(ratios).all(axis=1).any():
        return np.full(x.shape, np.nan)
    rows = np.nanmedian(ratios, axis=1, keepdims=True)
    return np.exp(rows + np.nanmedian(ratios - rows, axis=0))


def scaled_in_blocks(x: np.ndarray, y: np.ndarray, *, offset: bool = False) -> list[Deed]:
    """A factor for each block of neighbours along the last axis, the widest first: x, y (n, width).

    offset: something is added to each block as well, as where its least value is stored with its scale.
    """
    deeds: list[Deed] = []
    for block in BLOCKS:
        if x.shape[1] % block == 0 and x.shape[1] != block:
            p, q = (side.reshape(len(side), -1, block).astype(np.float64) for side in (x, y))
            more, where = 0.0, f"blocks of {block}, "
            if offset:
                more, where = q.mean(axis=-1, keepdims=True), f"blocks of {block} with an offset each, "
                p, q = p - p.mean(axis=-1, keepdims=True), q - more
            factors = (np.vecdot(p, q) / np.vecdot(p, p))[..., None]
            deeds += [deed._replace(error=error_of(p * factors + more, q + more))
                      for deed in _scaled("block", p, q, factors, "", where)]  # fmt: skip
    return deeds


def _scaled(along: str, x: np.ndarray, y: np.ndarray, factors: np.ndarray, view: str, where: str = "") -> list[Deed]:
    """Values times the factors that they share along the last axis, and what these show; a row of zeros shows none."""
    least, most = np.abs(factors).min(), np.abs(factors).max()
    if not (least > 0 and np.isfinite(most)):
        return []
    detail = f"{where}factors {least:.3g} to {most:.3g}"
    return [Deed(f"scaled by {along}: scales {slip_of(x, factors)}{view}", error_of(x * factors, y), detail)]


def slip_of(x: np.ndarray, factors: np.ndarray) -> str:
    """What was done with scales, where y = factors x and each was made for the largest value that it multiplies.

    Without its scale s, x = s codes becomes x / s, divided by it x / s^2, multiplied once more s x; another group's
    scale gives factors around one.
    """
    sizes = np.abs(x).max(axis=-1, keepdims=True) * np.ones_like(factors)
    with np.errstate(all="ignore"):
        f, a = (np.log(np.abs(each.reshape(len(x), -1))) for each in (factors, sizes))  # (n, groups of a row)
    is_known = np.isfinite(f) & np.isfinite(a)
    if abs(f[is_known].mean()) <= f[is_known].std():
        return "of the wrong axis or in another order"
    points = []
    for column in range(f.shape[1]):  # rows that share a factor have one scale: the largest value of all counts
        starts = np.flatnonzero(np.append(True, np.abs(np.diff(f[:, column])) > ONE_FACTOR))
        points += [*zip(f[starts, column], np.maximum.reduceat(a[:, column], starts), strict=True)]
    known = np.array([point for point in points if np.isfinite(point).all()])
    spread = known[:, 1].var()
    slope = float(np.cov(known.T, bias=True)[0, 1] / spread) if spread else -1.0
    return "inverted" if slope < -1.5 else "missing" if slope < 0 else "applied twice"


def reinterpreted(x: np.ndarray, y: np.ndarray, tolerance: float) -> Deed | None:
    """A dtype read as another one, or bytes in the other order."""
    single = np.ascontiguousarray(x, dtype=np.float32)
    bits = single.view("<u4")
    cut, nearest = ((bits + more >> 16).astype("<u2") for more in (np.uint32(0), 0x7FFF + (bits >> 16 & 1)))
    with np.errstate(all="ignore"):
        half = single.astype(np.float16)
        readings = [("F16 read as BF16", _from_upper(half.view("<u2"))),
                    ("F32 with bytes in the other order", single.byteswap()),
                    ("F16 with bytes in the other order", half.byteswap().astype(np.float32))]  # fmt: skip
        for upper in (cut, nearest):
            readings += [("BF16 read as F16", upper.view("<f2").astype(np.float32)),
                         ("BF16 with bytes in the other order", _from_upper(upper.byteswap()))]  # fmt: skip
        for name, reading in readings:
            finite = np.isfinite(reading) & np.isfinite(y)
            agree = (finite | ((reading == y) | np.isnan(reading) & np.isnan(y))).all()
            if agree and finite.any() and error_of(reading[finite], y[finite]) <= tolerance:
                return Deed(f"dtype reinterpreted: {name}", 0.0)
    return None


def _from_upper(bits: np.ndarray) -> np.ndarray:
    """float32 of its upper 16 bits."""
    return (bits.astype("<u4") << 16).view("<f4")


def few_rows(x: np.ndarray, y: np.ndarray, sizes: Sizes, tolerance: float) -> Deed | None:
    """What happened to some rows, in B or else in A, where the others are as they were: zeros, other values ..."""
    deed = _few_rows(x, y, sizes, tolerance)
    if deed is None or deed.name.startswith("other values"):
        in_a = _few_rows(y, x, sizes, tolerance)
        if in_a is not None and not in_a.name.startswith("other values"):
            return in_a._replace(name=f"{in_a.name} in A")
    return deed


def _few_rows(x: np.ndarray, y: np.ndarray, sizes: Sizes, tolerance: float) -> Deed | None:
    """What happened to some rows of y: NaN, zeros, a tail, other values."""
    with np.errstate(all="ignore"):
        apart = np.linalg.norm(np.subtract(x, y, dtype=np.float64), axis=1)
        norms = [np.linalg.norm(side.astype(np.float64), axis=1) for side in (x, y)]
        same = np.isfinite(apart) & (apart <= min(ONE_ROW * tolerance, FEW) * np.maximum(*norms))
    changed = np.flatnonzero(~same)
    if not len(changed):
        return None
    where = f"{len(changed)} of {len(y)}, from {changed[0]}"
    if not np.isfinite(y[changed]).all():
        return Deed("NaN or infinity", np.inf, where)
    is_tail = changed[-1] == len(y) - 1 and len(changed) == len(y) - changed[0]
    if is_tail and len(changed) > 1 and len(changed) < len(y) and not y[changed[1:]].any() and not y[-1].any():
        return Deed("zeros at the end: a truncated write", 1.0, where)
    if not y[changed].any():
        kind = "zeros at the end: a truncated write" if is_tail and len(changed) < len(y) else "rows zeroed"
        rows = "rows of the vocabulary zeroed" if sizes.role.removesuffix(".bias") in OF_VOCABULARY else kind
        return Deed("zeroed" if len(changed) == len(y) else kind if is_tail else rows, 1.0, where)
    if len(changed) > FEW * len(y):
        return None
    return Deed("other values in some rows", error_of(x, y), where)


def find_deed(
    rows: tuple[np.ndarray, np.ndarray], columns: tuple[np.ndarray, np.ndarray] | None, sizes: Sizes, tolerance: float
) -> Deed | None:
    """The deed that makes B of A: rows are a few columns of all rows (n, c), columns are all columns of a few rows.

    columns: the transposes, (m, r) of A and B; None of a vector.
    """
    x, y = rows
    views = [(x, y, "")] + ([(*columns, " (columns)")] if columns is not None else [])
    if x.shape == y.shape:
        limit = min(tolerance, CLEARER * error_of(x, y))
        if deed := reinterpreted(x, y, limit):
            return deed
        if columns is not None and x.shape == columns[0].shape and error_of(columns[0], y) <= limit:
            return Deed("transposed", error_of(columns[0], y))
        for before, after, along in views:
            if (deed := few_rows(before, after, sizes, tolerance)) and not deed.name.startswith("other values"):
                return deed._replace(name=deed.name + along)
        for before, after, along in views:
            for catalogue in ORDERS:
                for name, made in catalogue(before, sizes):
                    if (error := error_of(made, after)) <= limit:
                        return Deed(name + along, error)
            if deed := offset_of_norm(before, after, sizes, limit):
                return deed._replace(name=deed.name + along)
        if deed := rescaled_views(views, limit):
            return deed
        for before, after, along in views:
            if deed := other_order(before, after, sizes, limit):
                return deed._replace(name=deed.name + along)
        for before, after, along in views:
            if deed := few_rows(before, after, sizes, tolerance):
                return deed._replace(name=deed.name + along)
    return None


def sampled(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A few columns of all rows (n, c), and all columns of a few rows, transposed: (m, r)."""
    return (
        matrix[:, evenly_spread(matrix.shape[1], SPREAD)],
        matrix[evenly_spread(len(matrix), SPREAD)].T,
    )

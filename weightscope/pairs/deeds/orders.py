"""Rows, heads, experts or places in another order."""

from collections.abc import Callable, Iterator, Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np

from weightscope.core.errors import counted
from weightscope.model.metrics.spectra import evenly_spread
from weightscope.pairs.deeds.deed import Deed, Proof, What, deed, search
from weightscope.pairs.deeds.thresholds import EXACT, FARTHEST
from weightscope.pairs.deeds.views import AT_ONCE, TABLES, Sizes, View, error_of

MOST_SHIFTED = 16  # rows by which a vocabulary is looked for in another place
BLOCKS = (256, 128, 64, 32, 16)  # neighbours that share a scale in quantised formats
ANY_ORDER = 180  # place of the search whose time grows with a tensor
PROBED = 8  # rows whose place is looked for first
ROTATED = {"q", "k", "q_norm", "k_norm", "q_b", "kv_a"}  # roles whose rows turn with positions


class TriedOrder(NamedTuple):
    """An order to try."""

    what: What
    way: str
    rows: np.ndarray  # T(x) for x (n, c)
    by: int | None = None

    @property
    def deed(self) -> Deed:
        """The deed, if the rows are in this order."""
        return Deed(self.what, self.way, place=self.by, proof=Proof.VALUES)


def neighbours(x: np.ndarray, heads: int, turned: int = 0) -> np.ndarray:
    """Rows 0, r/2, 1, r/2 + 1 ... of each head: pairs that rotate together side by side, (n, c)."""
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


deed(What.ROTARY, "rotary layout: {way}{columns}", called="in another rotary layout")
deed(What.FUSED, "{way}{columns}", called="with fused parts in another order")
deed(What.SHIFTED, "{way} shifted by {place}{columns}", called="with rows shifted")
deed(What.SWAPPED, "{way}{columns}", called="with neighbours in another order")
deed(What.HEADS, "heads in another order{columns}", called="with heads in another order")
deed(
    What.EXPERTS,
    "experts in another order{way}{columns}",
    called="with experts in another order",
)


def other_rotary_layout(x: np.ndarray, sizes: Sizes) -> Iterator[TriedOrder]:
    """Queries or keys as another rotation has them, by the right number of heads or a wrong one."""
    if not {*sizes.plain_role.split("+")} & ROTATED:
        return
    is_of_one_head = sizes.role in ("q_norm", "k_norm") and len(x) == sizes.head_dim
    right = 1 if is_of_one_head else sizes.heads
    powers = (2**i for i in range(9))
    for count in dict.fromkeys((right, sizes.n_heads, sizes.n_kv_heads, *powers)):
        if count < 1 or len(x) % (2 * count):
            continue
        wrong = "" if count == right else f", by {counted(count, 'head')} instead of {right}"
        turned = {0, sizes.turned} if count == right and sizes.turned < len(x) // count else {0}
        for part in sorted(turned, reverse=True):
            if part % 2:
                continue
            there, back = neighbours(x, count, part), halves(x, count, part)
            yield TriedOrder(What.ROTARY, f"halves to neighbours{wrong}", there)
            yield TriedOrder(What.ROTARY, f"neighbours to halves{wrong}", back)
        # turned once by each number: undone as it was not done
        if wrong and right > 0 and len(x) % (2 * right) == 0:
            there, back = halves(neighbours(x, count), right), halves(neighbours(x, right), count)
            yield TriedOrder(What.ROTARY, f"to neighbours{wrong}, and back", there)
            yield TriedOrder(What.ROTARY, f"back from neighbours{wrong}", back)


def other_fused_order(x: np.ndarray, sizes: Sizes) -> Iterator[TriedOrder]:
    """The parts of a fused tensor in another order, by group or in blocks."""
    role = sizes.plain_role.removeprefix("expert.").removeprefix("shared_expert.")
    if role == "gate+up" and len(x) % 2 == 0:
        exchanged = np.roll(x, len(x) // 2, axis=0)
        yield TriedOrder(What.FUSED, "gate and up exchanged", exchanged)
        yield TriedOrder(What.FUSED, "gate and up interleaved", neighbours(x, 1))
        yield TriedOrder(What.FUSED, "gate and up taken apart", halves(x, 1))
    n, h, g = len(x), sizes.n_heads, sizes.n_kv_heads
    if role != "q+k+v" or n % (h + 2 * g) or h % g:
        return
    r = n // (h + 2 * g)
    q, k, v = np.split(x, [h * r, (h + g) * r])
    blocks = {"q": q, "k": k, "v": v}
    for order in ("kqv", "qvk", "vqk", "vkq", "kvq"):
        rows = np.concatenate([blocks[letter] for letter in order])
        yield TriedOrder(What.FUSED, f"q+k+v in the order {'+'.join(order)}", rows)
    # (G, (h/g + 2) r, c)
    grouped = np.concatenate([part.reshape(g, -1, x.shape[-1]) for part in (q, k, v)], axis=1)
    yield TriedOrder(What.FUSED, "q+k+v: from blocks to groups", grouped.reshape(x.shape))
    groups = x.reshape(g, h // g + 2, r, -1)
    parts = (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])
    rows = np.concatenate([part.reshape(-1, x.shape[-1]) for part in parts])
    yield TriedOrder(What.FUSED, "q+k+v: from groups to blocks", rows)
    if h == g:
        by_head = x.reshape(3, h, r, -1).swapaxes(0, 1).reshape(x.shape)
        yield TriedOrder(What.FUSED, "q+k+v: heads by head instead of by part", by_head)
        by_part = x.reshape(h, 3, r, -1).swapaxes(0, 1).reshape(x.shape)
        yield TriedOrder(What.FUSED, "q+k+v: by part instead of by head", by_part)


def moved_rows(x: np.ndarray, sizes: Sizes) -> Iterator[TriedOrder]:
    """Rows shifted by a few places, around the end."""
    if sizes.plain_role not in TABLES:
        return
    for most in range(1, min(MOST_SHIFTED + 1, len(x))):
        for by in (most, -most):
            yield TriedOrder(What.SHIFTED, sizes.rows, np.roll(x, by, axis=0), by)


def turned_heads(x: np.ndarray, sizes: Sizes) -> Iterator[TriedOrder]:
    """Every head moved to the next place or to the one before."""
    if sizes.of_attention and len(x) > sizes.head_dim > 0:
        for by in (sizes.head_dim, -sizes.head_dim):
            yield TriedOrder(What.HEADS, "", np.roll(x, by, axis=0))


def swapped_places(x: np.ndarray, sizes: Sizes) -> Iterator[TriedOrder]:
    """Neighbours exchanged, as nibbles of a byte are; halves of blocks, unless these are heads."""
    of_heads = sizes.head_dim > 1 and sizes.of_attention
    if len(x) % 2 == 0:
        pairs = x.reshape(-1, 2, x.shape[-1])[:, ::-1]
        yield TriedOrder(
            What.SWAPPED, "nibbles swapped: neighbours exchanged", pairs.reshape(x.shape)
        )
    for block in (*BLOCKS, 8):
        if len(x) % block:
            continue
        if not (of_heads and block // 2 % sizes.head_dim == 0):
            parts = x.reshape(-1, 2, block // 2, x.shape[-1])[:, ::-1]
            way = f"nibbles swapped: halves of each {block} exchanged"
            yield TriedOrder(What.SWAPPED, way, parts.reshape(x.shape))
        if block <= 16:
            turned = x.reshape(-1, block, x.shape[-1])[:, ::-1]
            way = f"each {block} reversed: another order of bytes"
            yield TriedOrder(What.SWAPPED, way, turned.reshape(x.shape))
    yield TriedOrder(What.SWAPPED, "reversed", x[::-1])


ORDERS: tuple[Callable[[np.ndarray, Sizes], Iterator[TriedOrder]], ...] = (
    other_rotary_layout,
    other_fused_order,
    moved_rows,
    turned_heads,
    swapped_places,
)


@search(order=140)
def in_a_known_order(views: Sequence[View], sizes: Sizes) -> Deed | None:
    """The orders that converters and writers are known to make."""
    for view in views:
        places = np.arange(len(view.changed))[:, None]
        for orders in ORDERS:
            for tried in orders(places, sizes):
                if view.moves(tried.rows[:, 0]):
                    return view.named(tried.deed)
    return None


@search(order=ANY_ORDER)
def in_any_order(views: Sequence[View], sizes: Sizes) -> Deed | None:
    """Heads, experts or rows in another order, found by the rows themselves."""
    for view in views:
        whats = {1: What.EXPERTS if sizes.plain_role.startswith("router") else What.REORDERED}
        if sizes.of_attention:
            whats[sizes.head_dim] = What.HEADS
        if sizes.stacked:
            whats[len(view.changed) // sizes.stacked] = What.EXPERTS
        for block, what in sorted(whats.items(), key=lambda each: -each[0]):
            if done := _in_order_of_blocks(view, block, what):
                return view.named(done)
    return None


def _in_order_of_blocks(view: View, block: int, what: What) -> Deed | None:
    """Blocks of rows in another order."""
    x, y = view.x.values, view.y.values
    if (block != 1 and not 1 < block < len(x)) or not _is_elsewhere(view, block):
        return None
    places = places_of(x, y, block, view.tolerance)
    if places is None:
        return None
    order = (places[:, None] * block + np.arange(block)).reshape(-1)
    if not view.gives(view.x.at(order), computed=False):
        return None
    moved = int((places != np.arange(len(places))).sum())
    return Deed(what, detail=f"{moved} of {len(places)} moved", proof=Proof.VALUES)


@np.errstate(all="ignore")
def _is_elsewhere(view: View, block: int) -> bool:
    """False if no row of x may be the first changed row of y, by a few columns of theirs."""
    first, columns = np.argmax(view.changed), view.few[1]
    x = view.x.at(slice(first % block, None, block), columns)
    y = view.y.at(slice(first, first + 1), columns)
    is_far = np.abs(x.values - y.values) > 2 * FARTHEST * (x.room + y.room)  # a looser bound
    return not is_far.any(axis=1).all()


def places_of(x: np.ndarray, y: np.ndarray, block: int, tolerance: float) -> np.ndarray | None:
    """The block of x that each block of y is, (n / block,); None unless each is another one.

    x, y: (n, c).
    """
    if len(x) != len(y) or len(x) % block or len(x) // block < 2:
        return None
    if not np.isfinite(x).all() & np.isfinite(y).all():
        return None
    blocks = [side.reshape(-1, block, side.shape[1]) for side in (x, y)]  # views, (n / block, ...)
    with np.errstate(all="ignore"):
        of_x, of_y = map(_sketch, blocks)
    if not (np.isfinite(of_x).all() and np.isfinite(of_y).all()):
        return None  # their sums overflow
    few = of_y[evenly_spread(len(of_y), PROBED)]
    nearest = np.array([np.linalg.norm(of_x - row, axis=1).min() for row in few])
    size = float(np.linalg.norm(of_y)) / sqrt(len(of_y))
    # most changes end here
    if np.linalg.norm(nearest) > FARTHEST * max(tolerance, EXACT) * size * sqrt(len(few)):
        return None
    if any(len({hash(each.tobytes()) for each in side}) < len(side) for side in blocks):
        return None  # equal blocks have no order
    # nor do blocks that differ by less than sums show; and a tree is slow where many points are one
    if any(len({hash(each.tobytes()) for each in side + 0.0}) < len(side) for side in (of_x, of_y)):
        return None
    from scipy.spatial import cKDTree  # SciPy takes a while to import

    _, places = cKDTree(of_x).query(of_y)
    if len({*places.tolist()}) < len(places):
        return None
    ordered = blocks[0][places].reshape(x.shape)
    return places if error_of(ordered, y) <= tolerance else None


def _sketch(blocks: np.ndarray) -> np.ndarray:
    """Each block along a few random directions, (n, m); float32 sums would hide what is equal."""
    width, step = blocks[0].size, max(1, AT_ONCE // blocks[0].size)
    turn = np.random.default_rng(0).standard_normal((width, min(8, width)))
    parts = (blocks[i : i + step].astype(np.float64) for i in range(0, len(blocks), step))
    return np.concatenate([part.reshape(len(part), width) @ turn for part in parts])

"""Faults of layers without a softmax: value heads, parts, convolutions and decay rates."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from math import prod

import numpy as np

from weightscope.checkpoint.blocks import Block
from weightscope.model.rows.mixers import OF_MIXER
from weightscope.pairs.deeds.deed import Deed, Proof, What, deed, search
from weightscope.pairs.deeds.orders import ANY_ORDER, TriedOrder
from weightscope.pairs.deeds.pair import Pair
from weightscope.pairs.deeds.views import LARGEST_WHOLE, Sizes, View

OF_EXP = 4  # half-units of float32 that an exponential function may be off by
RATES = f"{OF_MIXER}A_log"
CONVOLUTIONS = ("conv", "q_conv", "k_conv", "v_conv")
OF_VALUES = ("gate", "alpha", "beta", "A_log", "dt_bias", "out")  # a row for each value head
BEFORE_VALUES = ("qkv", "conv")  # queries and keys come first

deed(What.VALUE_HEADS, "value heads: {way}{columns}", called="with value heads in another order")
deed(What.CONVOLUTION, "convolution: {way}", called="with convolutions laid out otherwise")
deed(What.DECAY, "{way} in place of A_log", called="with decay rates in place of A_log")


@search(order=135)
def in_an_order_of_mixers(views: Sequence[View], sizes: Sizes) -> Deed | None:
    """Orders of value heads and of fused parts that readers of linear layers differ in."""
    if not sizes.role.startswith(OF_MIXER):
        return None
    are_rates = sizes.role == RATES
    for view in views:
        places = np.arange(len(view.changed))
        for tried in _orders(places, sizes, columns=view.columns):
            if view.moves(tried.rows) or (are_rates and _moves_rates(view, tried.rows)):
                return view.named(tried.deed)
    return None


@search(order=ANY_ORDER + 1)
def rates_in_any_order(views: Sequence[View], sizes: Sizes) -> Deed | None:
    """Rates in another order, which their sizes show."""
    view = views[0]
    if sizes.role != RATES or not view.is_whole:
        return None
    of_x, of_y = (np.argsort(side.values[:, 0], kind="stable") for side in (view.x, view.y))
    places = np.empty_like(of_x)
    places[of_y] = of_x
    if not _moves_rates(view, places):
        return None
    moved = np.count_nonzero(places != np.arange(len(places)))
    detail = f"{moved} of {len(places)} moved"
    return view.named(Deed(What.REORDERED, detail=detail, proof=Proof.VALUES))


def _moves_rates(view: View, places: np.ndarray) -> bool:
    """True if y is x in these places, but for what -exp in float32 and its logarithm cost."""
    x = view.x.at(places)
    return view.gives(replace(x, half=None, unit=OF_EXP * x.unit, least=1.0))


def _orders(x: np.ndarray, sizes: Sizes, *, columns: bool) -> Iterator[TriedOrder]:
    role = sizes.plain_role.removeprefix(OF_MIXER)
    if role in CONVOLUTIONS and columns:
        yield TriedOrder(What.CONVOLUTION, "taps reversed", x[::-1])
        return
    n_keys, n_values = sizes.n_kv_heads, sizes.n_heads
    values = n_values * sizes.head_dim
    first = len(x) - values if role in BEFORE_VALUES else 0
    is_divided = 1 < n_keys < n_values and n_values % n_keys == 0
    if is_divided and role in (*OF_VALUES, *BEFORE_VALUES) and first >= 0:
        heads, rest = x[first:], x[:first]
        if len(heads) % n_values == 0:
            grouped = heads.reshape(n_keys, n_values // n_keys, -1).swapaxes(0, 1).reshape(-1)
            tiled = heads.reshape(n_values // n_keys, n_keys, -1).swapaxes(0, 1).reshape(-1)
            way = "from grouped by key head to tiled"
            yield TriedOrder(What.VALUE_HEADS, way, np.concatenate([rest, grouped]))
            way = "from tiled to grouped by key head"
            yield TriedOrder(What.VALUE_HEADS, way, np.concatenate([rest, tiled]))
    yield from _parts(x, role, n_keys, values, first)


def _parts(x: np.ndarray, role: str, n_keys: int, values: int, first: int) -> Iterator[TriedOrder]:
    """Fused parts in another order, or by part instead of by key head."""
    of_keys = (len(x) - 2 * values) // 2
    widths = {"qkvz": (of_keys, of_keys, values, values), "ba": (len(x) // 2,) * 2}.get(role)
    if widths and n_keys > 0 and sum(widths) == len(x) and not any(w % n_keys for w in widths):
        each = [width // n_keys for width in widths]
        by_head = np.split(x.reshape(n_keys, -1), np.cumsum(each)[:-1], axis=1)
        rows = np.concatenate([part.reshape(-1) for part in by_head])
        yield TriedOrder(What.FUSED, f"{role}: from key heads to parts", rows)
        parts = np.split(x, np.cumsum(widths)[:-1])
        rows = np.concatenate([part.reshape(n_keys, -1) for part in parts], axis=1).reshape(-1)
        yield TriedOrder(What.FUSED, f"{role}: from parts to key heads", rows)
    named: dict[str, np.ndarray] = {}
    if role == "qkv" and first > 0 and first % 2 == 0:
        named = dict(zip("qkv", np.split(x, [first // 2, first]), strict=True))
    elif role == "in" and 1 < values < len(x) // 2:  # Mamba 2: gate, x, B, C, steps
        both, rest = np.split(x, [2 * values])
        exchanged = np.roll(both, values)
        yield TriedOrder(What.FUSED, "gate and input exchanged", np.concatenate([exchanged, rest]))
    elif role == "in" and len(x) % 3 == 0:  # short convolutions: B, C, x
        named = dict(zip("BCx", np.split(x, 3), strict=True))
    if role == "in" and len(x) % 2 == 0:  # Mamba
        yield TriedOrder(What.FUSED, "input and gate exchanged", np.roll(x, len(x) // 2))
    for letters in permutations(named):
        if letters != (*named,):
            rows = np.concatenate([named[letter] for letter in letters])
            way = f"{'+'.join(named)} in the order {'+'.join(letters)}"
            yield TriedOrder(What.FUSED, way, rows)


@search(order=115)
def rates_for_logarithms(views: Sequence[View], sizes: Sizes) -> Deed | None:
    """A = -exp(A_log), or its size, stored as A_log."""
    if sizes.role != RATES:
        return None
    view = views[0]
    for made, x, y in (("B", view.x, view.y), ("A", view.y, view.x)):
        with np.errstate(all="ignore"):
            rates = np.exp(x.values.astype(np.float64))
        for way, values in (("-exp(A_log)", -rates), ("exp(A_log)", rates)):
            seen = View(x, y)
            if seen.gives(replace(x, values=values, half=None, unit=OF_EXP * x.unit)):
                return Deed(What.DECAY, way, made=made, proof=Proof.VALUES, left=seen.left)
    return None


@search(order=116)
def taps_first(views: Sequence[View], sizes: Sizes) -> Deed | None:
    """A convolution's values with taps before channels, under its former shape."""
    view = views[0]
    if sizes.role.removeprefix(OF_MIXER) not in CONVOLUTIONS or not view.is_whole:
        return None
    x = view.x.values
    for way, values in (
        ("taps before channels", x.T.reshape(x.shape)),
        ("channels before taps, read as the reverse", x.reshape(x.shape[::-1]).T),
    ):
        if view.gives(replace(view.x, values=values), computed=False):
            return view.named(Deed(What.CONVOLUTION, way, proof=Proof.VALUES))
    return None


def laid_out_otherwise(pair: Pair, role: str) -> Deed | None:
    """A convolution with the values of the other under another order of axes."""
    a, b = pair.a.shape, pair.b.shape
    if role.removeprefix(OF_MIXER) not in CONVOLUTIONS or prod(a) != prod(b):
        return None
    if prod(a) > LARGEST_WHOLE:
        return None
    shapes = f"{' x '.join(map(str, a))} in A, {' x '.join(map(str, b))} in B"
    x, y = (Block(tensor, 0, prod(a)).values() for tensor in (pair.a, pair.b))
    taps = min(a[-1], prod(a) // a[0]) if len(a) > 1 else 1
    for values in (x, x.reshape(-1, max(taps, 1)).T.reshape(-1)):
        if np.array_equal(values, y):
            return Deed(What.CONVOLUTION, "laid out with other axes", shapes, proof=Proof.VALUES)
    return None

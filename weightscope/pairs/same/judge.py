"""One tensor of A and its counterpart in B: the strongest verdict that can be proved, or what was
done to it.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod, sqrt
from typing import NamedTuple

import numpy as np

from weightscope.checkpoint.blocks import Block, row_width
from weightscope.checkpoint.checkpoint import StoredTensor, Tensor, WholeTensor
from weightscope.checkpoint.packings.packed import DequantisedTensor
from weightscope.heads.tensors.measure import BITS, why_unread
from weightscope.model.metrics.spectra import evenly_spread, low_rank
from weightscope.model.rows.names import NamedTensor
from weightscope.pairs.deeds.change import (
    Change,
    change_of,
    change_of_all,
    classify,
    differs,
    shows_cast,
    unchanged,
)
from weightscope.pairs.deeds.coarser import (
    COMPENSATED,
    exponentiated,
    in_cells,
    merged_otherwise,
    quantised,
    rounded_twice,
    too_wide,
)
from weightscope.pairs.deeds.pair import Pair, Part, few_rows_each, first_rows_of
from weightscope.pairs.deeds.recomputed import stored_cells
from weightscope.pairs.deeds.rounding import CASTS, FRACTION, SMALLEST, precision
from weightscope.pairs.deeds.thresholds import QUANTISED as QUANTISED_ERROR
from weightscope.pairs.deeds.views import (
    EXACT,
    LARGEST_CODE,
    OF_VOCABULARY,
    SPREAD,
    TABLES,
    Deed,
    Side,
    Sizes,
    View,
    error_of,
    find_deed,
)
from weightscope.pairs.same import DIFFERENT, QUANTISED, ROUNDED, SAME_VALUES, UNDECIDED
from weightscope.pairs.same.stored import equal_bytes, is_copy

# of the coarser tensor: that the other was rounded to it is a guess
FEW_VALUES = "too few values to show it alone"
# of the same values: in another dtype or packing, or with another sign of zero
STORED_OTHERWISE = "stored otherwise"
# Values of a tensor that a deed is looked for in as a whole; of larger ones in rows and columns.
LARGEST_WHOLE = 1 << 24
PACKED = 0.2  # |error| / |x| of a packing whose grid is not known
UNEXPLAINED = "other values"  # how a deed begins that says only which rows changed
LOW_RANK = "low-rank update, as of a LoRA merged or unmerged"
LOWEST = 1 / 8  # of a matrix's full rank: what stands out of a quantised one's errors for sure
# times a quantised matrix's mean error: what rows of the largest scale may add to a singular value
UNEVEN = 2.0
MARGIN = 2.0  # times the error that rounding makes: tolerance of a deed
OF_TOUCHED = 1 / 2  # of the rows or columns that changed: the rank of a change that is low
COLUMNS = " (columns)"  # how deeds along them end
SMALLEST_CODES = 7  # the largest of four bits: integers up to here and beyond may be codes


@dataclass(frozen=True)
class Judged:
    """A tensor of B, or one that only A has, with its verdict."""

    role: str
    layer: int | None
    expert: int | None
    name_a: str  # in A's file; empty where it lacks it
    name_b: str
    verdict: str  # of VERDICTS
    deed: str = ""  # what was done, or how it is proved
    size: float = 0.0  # |B - A| / |A|
    detail: str = ""
    stack: str | None = None
    label: str = ""

    @property
    def name(self) -> str:
        """Its name in B's file, or in A's."""
        return self.name_b or self.name_a

    def as_json(self) -> dict[str, object]:
        """As same.json lists it."""
        return {
            "tensor": self.name_b,
            "name_a": self.name_a,
            "role": self.role,
            "stack": self.stack,
            "layer": self.layer,
            "expert": self.expert,
            "verdict": self.verdict,
            "deed": self.deed,
            "size": self.size,
            "detail": self.detail,
        }


class Compared(NamedTuple):
    """The same role in two files, and the tensors to compare."""

    label: str
    a: NamedTensor
    b: NamedTensor
    tensors: Pair
    sizes: Sizes
    share: float = 1.0  # of the blocks that are compared


@np.errstate(all="ignore")  # of values that are not finite, or overflow where they are squared
def judge(
    parts: Compared,
    *,
    may_compensate: bool = True,
    may_quantise: bool = True,
    ways: Collection[str] | None = None,
) -> Judged:
    """Compare one tensor: values, roundings, cells of a quantisation, and then the catalogue of
    deeds.

    ways: the roundings that too few different values, stored in more bits, pass for; None: any.
    """
    pair = parts.tensors
    if why := why_unread(pair.a) or why_unread(pair.b):
        return _judged(parts, UNDECIDED, "cannot be read", detail=why)
    if pair.a.shape != pair.b.shape:
        return _other_shape(parts)
    if _same_bytes(parts):
        return _judged(parts, SAME_VALUES)
    blocks, change = _sampled_blocks(parts), unchanged(pair.a, pair.b)
    look = change_of(first_rows_of(blocks[0]))
    if (
        look.values_changed
        and not look.casts
        and may_quantise
        and parts.share == 1
        and (quick := in_cells(pair))
    ):
        return _judged(parts, QUANTISED, quick[0].deed, quick[1], quick[0].detail)
    if not look.values_changed and not any(map(differs, blocks)):
        is_copy = parts.share == 1 and equal_bytes(pair.a, pair.b)  # of a packed tensor
        return _judged(parts, SAME_VALUES, "" if is_copy else STORED_OTHERWISE)
    # those before the first that differs are read again: most differ in the first
    for part in blocks:
        change = change.and_then(change_of(part, change.casts))
    if change.casts:
        casts = sorted(change.casts, key=lambda each: (list(CASTS).index(each[0]), each[1]))
        shown = [_rounded(cast) for cast in casts if shows_cast(pair, cast)]
        passing = shown or [deed for deed in map(_rounded, casts) if ways is None or deed in ways]
        if passing:
            return _judged(parts, ROUNDED, passing[0], change.change, "" if shown else FEW_VALUES)
    if parts.share < 1:
        return _judged(parts, UNDECIDED, "differs in the sample", change.change)
    return (may_quantise and _coarser(parts, change, may_compensate)) or _done(parts, change)


def few_compensated(judged: Sequence[Judged]) -> list[int]:
    """The tensors that only pass for quantised with compensated errors, where most are quantised
    without.

    A writer that compensates does so in nearly all matrices: a few that look so were changed.
    """
    packed = [i for i, each in enumerate(judged) if each.verdict == QUANTISED]
    compensated = [i for i in packed if COMPENSATED.how in judged[i].deed]
    return compensated if 2 * len(compensated) < len(packed) else []


def few_quantised(judged: Sequence[Judged], parts: Sequence[Compared]) -> list[int]:
    """The tensors that pass for quantised where floats have the very values of most tensors that
    are packed alike.

    Who unpacked these had nothing left to round: the others were changed.
    """
    kinds: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, each in enumerate(parts):
        kind = each.tensors.a.dtype, each.tensors.b.dtype
        if len({*kind} & {*BITS}) == len({*kind} - {*BITS}) == 1:
            kinds[kind].append(i)
    result = []
    for places in kinds.values():
        few = [i for i in places if judged[i].verdict == QUANTISED]
        equal = sum(judged[i].verdict == SAME_VALUES for i in places)
        result += few if 2 * equal > len(places) else []
    return result


def shown_ways(judged: Sequence[Judged]) -> set[str]:
    """The roundings that a tensor shows by itself."""
    return {each.deed for each in judged if each.verdict == ROUNDED and each.detail != FEW_VALUES}


def rounded_alone(judged: Sequence[Judged]) -> list[int]:
    """The tensors of few values that pass for others rounded, in a way that no other tensor
    shows.
    """
    ways = shown_ways(judged)
    return [
        i for i, each in enumerate(judged) if each.detail == FEW_VALUES and each.deed not in ways
    ]


def _rounded(cast: tuple[str, str]) -> str:
    """A cast and which file it made, with its way of rounding."""
    name, letter = cast
    way = (
        f"{name.removesuffix(', cut off')} (cut off)"
        if name.endswith("cut off")
        else f"{name} (to nearest even)"
    )
    return f"{letter} to {way}"


def _judged(
    parts: Compared, verdict: str, deed: str = "", size: float = 0.0, detail: str = ""
) -> Judged:
    b = parts.b
    return Judged(
        b.role,
        b.layer,
        b.expert,
        parts.a.name,
        b.name,
        verdict,
        deed,
        size,
        detail,
        b.stack,
        parts.label,
    )


def _same_bytes(parts: Compared) -> bool:
    """Whether both are stored alike and hold the same bytes; packed ones are not read for it."""
    x, y = parts.tensors.a, parts.tensors.b
    if type(x) is not type(y) or not isinstance(x, StoredTensor | DequantisedTensor):
        return False
    if (
        isinstance(x, DequantisedTensor)
        and isinstance(y, DequantisedTensor)
        and x.settings != y.settings
    ):
        return False
    if len(x.parts) == len(y.parts) and all(map(is_copy, x.parts, y.parts)):
        return True
    return parts.share == 1 and isinstance(x, StoredTensor) and equal_bytes(x, y)


def _sampled_blocks(parts: Compared) -> list[Part]:
    """All blocks, or evenly spread ones."""
    return [*parts.tensors.blocks()][:: max(1, round(1 / parts.share))]


# Rounded twice, or quantised


def _coarser(parts: Compared, change: Change, may_compensate: bool) -> Judged | None:
    """Whether one is the other with less in it."""
    if (
        proof := rounded_twice(parts.tensors)
        or merged_otherwise(parts.tensors)
        or exponentiated(parts.tensors)
    ):
        return _judged(parts, ROUNDED, proof.deed, change.change, proof.detail)
    if proof := quantised(parts.tensors, change, may_compensate=may_compensate):
        return _judged(parts, QUANTISED, proof.deed, change.change, proof.detail)
    if reason := too_wide(parts.tensors):
        return _judged(parts, DIFFERENT, reason.deed, change.change, reason.detail)
    return None


# Deeds


def _done(parts: Compared, change: Change) -> Judged:
    """What was done to a tensor that is neither rounded nor quantised."""
    deed, touched = catalogued(parts)
    if deed is None or deed.name.startswith(UNEXPLAINED):
        deed = _as_deed(parts, change, deed, touched)
    return _judged(parts, DIFFERENT, deed.name, change.change, deed.detail)


def catalogued(parts: Compared) -> tuple[Deed | None, int]:
    """The deed of the catalogue that was done to a tensor, and how many of its rows or columns
    changed.
    """
    pair = parts.tensors
    views = _views(pair)
    is_stacked = (
        parts.b.role.startswith("expert.") and parts.b.expert is None and len(pair.b.shape) > 1
    )
    sizes = parts.sizes._replace(stacked=pair.b.shape[0] if is_stacked else 0)
    deed = find_deed(views, sizes)
    if is_stacked and (deed is None or deed.name.startswith(UNEXPLAINED)):
        deed = _transposed_experts(pair, tolerance_of(pair)) or deed
    return deed, min(int(each.changed.sum()) for each in views)


def _only_value(tensor: Tensor) -> float | None:
    """The value that all of a tensor has; None of several."""
    value = None
    for _, start, stop in Pair(tensor, tensor).blocks():
        block = Block(tensor, start, stop).values()
        if np.ptp(block) or value not in (None, float(block[0])):
            return None
        value = float(block[0])
    return value


def _transposed_experts(pair: Pair, tolerance: float) -> Deed | None:
    """Whether the first of several square experts is transposed."""
    *_, rows, width = pair.a.shape
    if len(pair.a.shape) != 3 or rows != width:
        return None
    stop = (
        prod(pair.a.shape)
        if isinstance(pair.a, WholeTensor) or isinstance(pair.b, WholeTensor)
        else rows * width
    )
    x, y = (
        Block(each, 0, stop).values()[: rows * width].reshape(rows, width)
        for each in (pair.a, pair.b)
    )
    return Deed("transposed, within each expert") if error_of(x.T, y) <= tolerance else None


def _rank(pair: Pair, change: Change, tolerance: float) -> int | None:
    """The rank of a change that was quantised afterwards; None where it is not low, or neither side
    is quantised.
    """
    shape = pair.a.shape
    if (
        len(shape) != 2
        or not {pair.a.dtype, pair.b.dtype} - {*BITS}
        or not np.isfinite(change.moved)
    ):
        return None
    noise = UNEVEN * tolerance / MARGIN * sqrt(change.squares_b / prod(shape))
    rank = low_rank(pair.rows, (shape[0], shape[1]), noise)
    return rank if rank is not None and rank <= LOWEST * min(shape) else None


def _as_deed(parts: Compared, change: Change, deed: Deed | None, touched: int) -> Deed:
    """A change that no transformation explains, as `compare` calls it; touched: how many rows or
    columns changed.

    What changed few rows, or a table of rows, has no more rank than these: a low one says nothing
    of a LoRA.
    """
    pair = parts.tensors
    if np.isfinite(change.moved) and parts.b.role.removesuffix(".bias") not in TABLES:
        change = classify(pair, change)
        if change.kind == "low rank":
            rank, detail = change.rank, f"rank {change.rank}"
        else:
            rank = _rank(pair, change, tolerance_of(pair))
            detail = f"rank {rank}, up to the rounding of {pair.b.dtype}"
        if rank is not None and rank <= OF_TOUCHED * touched:
            return Deed(LOW_RANK, detail)
    if deed is not None:
        return deed
    if not np.isfinite(change.moved):
        return Deed("NaN or infinity")
    for tensor, where in ((pair.b, ""), (pair.a, " in A")):
        if (value := _only_value(tensor)) is not None:
            return Deed(f"erased: one value throughout{where}", f"{value:.3g}")
    alike = "" if not change.is_matrix else f"cosine {change.cosine:.3f}"
    return Deed("other values" if change.is_tuned else "unrelated values", alike)


def tolerance_of(pair: Pair) -> float:
    """|error| / |x| that storing both may cause."""
    errors = [EXACT]
    for tensor in (pair.a, pair.b):
        if tensor.ends() is not None:
            with np.errstate(all="ignore"):
                _, start, stop = next(Pair(tensor, tensor).blocks())
                pieces = len([*few_rows_each(stop - start, row_width(tensor.shape))])
                cells = islice(stored_cells(tensor, tensor), pieces)
                half = np.concatenate(
                    [np.broadcast_to(each.grids.half, each.off.shape).ravel() for each in cells]
                )
                values = Block(tensor, start, stop).values().astype(np.float64)
                finite = np.isfinite(half) & np.isfinite(values)
                sizes = [float(np.linalg.norm(each[finite])) for each in (half, values)]
            errors.append(sizes[0] / sqrt(3) / (sizes[1] or 1.0))
        elif tensor.dtype in FRACTION or tensor.dtype in ("F32", "F64"):
            held = precision(_first_values(tensor))
            errors.append(
                2.0 ** -min(FRACTION.get(held, 23), FRACTION.get(tensor.dtype, 23)) / sqrt(12)
            )
        else:
            errors.append(PACKED)
    return MARGIN * min(max(errors), QUANTISED_ERROR)


def _first_values(tensor: Tensor) -> np.ndarray:
    stop = min(prod(tensor.shape), 1 << 16)
    values = Block(
        tensor, 0, prod(tensor.shape) if isinstance(tensor, WholeTensor) else stop
    ).values()
    return values[:stop].astype(np.float32)


def _views(pair: Pair) -> list[View]:
    """Both along their rows and, of a matrix, along their columns: all values, or of a large one
    some of each.
    """
    shape, is_matrix = pair.a.shape, len(pair.a.shape) > 1
    width = shape[-1] if is_matrix else 1
    if prod(shape) <= LARGEST_WHOLE:
        x, y = (_side(tensor, [*_read(tensor)], width) for tensor in (pair.a, pair.b))
        return [View(x, y, ""), *([View(x.turned, y.turned, COLUMNS)] if is_matrix else [])]
    rows, columns = (evenly_spread(n, SPREAD) for n in (prod(shape) // width, width))
    sides = []
    for tensor in (pair.a, pair.b):
        across, along, row = [], [], 0
        for block in _read(tensor):
            arrays = [each.reshape(-1, width) for each in block]
            here = rows[(row <= rows) & (rows < row + len(arrays[0]))] - row
            across.append([each[:, columns] for each in arrays])
            along.append([each[here] for each in arrays])
            row += len(arrays[0])
        sides.append((_side(tensor, across, len(columns)), _side(tensor, along, width).turned))
    (x, p), (y, q) = sides
    return [
        View(x, y, "", is_whole=False),
        *([View(p, q, COLUMNS, is_whole=False)] if is_matrix else []),
    ]


def _read(tensor: Tensor) -> Iterator[list[np.ndarray]]:
    """Blocks of values; and of half-steps where a grid is stored."""
    cells = stored_cells(tensor, tensor) if tensor.ends() is not None else None
    for _, start, stop in Pair(tensor, tensor).blocks():
        arrays = [Block(tensor, start, stop).values().astype(np.float32, copy=False)]
        if cells is not None:
            pieces = len([*few_rows_each(stop - start, row_width(tensor.shape))])
            half = [
                np.broadcast_to(each.grids.half, each.off.shape) for each in islice(cells, pieces)
            ]
            arrays.append(np.concatenate([each.ravel() for each in half]).astype(np.float32))
        yield arrays


def _side(tensor: Tensor, blocks: Sequence[Sequence[np.ndarray]], width: int) -> Side:
    """Values as deeds see them, (n, width): what rounding may have cost each follows from how they
    are stored.
    """
    values, *halves = (
        np.concatenate(each).reshape(-1, width) for each in zip(*blocks, strict=True)
    )
    if halves:
        return Side(values, half=halves[0])
    few = np.ascontiguousarray(values.reshape(-1)[: 1 << 16])
    if tensor.dtype not in FRACTION and tensor.dtype not in ("F32", "F64"):
        with np.errstate(all="ignore"):
            size = sqrt(float(np.nan_to_num(np.mean(np.square(few, dtype=np.float64)))))
        return Side(values, half=np.full(values.shape, sqrt(3) * PACKED * size, np.float32))
    if (
        width > 1
        and SMALLEST_CODES <= np.abs(few).max(initial=0.0) <= LARGEST_CODE
        and (few == np.rint(few)).all()
    ):
        # codes without their scales
        return Side(values, half=np.full(values.shape, 0.5, np.float32))
    held = precision(few)
    coarser = min(held, tensor.dtype, key=lambda dtype: FRACTION.get(dtype, 23))
    # zeros alone are held by any
    smallest = SMALLEST.get("F16" if held == "F16" else tensor.dtype, -126)
    return Side(values, 2.0 ** -(FRACTION.get(coarser, 23) + 1), 2.0**smallest)


# Tensors of other shapes, and of one file alone


def _other_shape(parts: Compared) -> Judged:
    """Rows added or cut, a transpose, or another shape."""
    pair = parts.tensors
    a, b = pair.a.shape, pair.b.shape
    shapes = f"{' x '.join(map(str, a))} in A, {' x '.join(map(str, b))} in B"
    if len(a) == len(b) == 2 and a == b[::-1] and prod(a) <= LARGEST_WHOLE:
        x, y = (Block(tensor, 0, prod(a)).values() for tensor in (pair.a, pair.b))
        if error_of(x.reshape(a).T, y.reshape(b)) <= tolerance_of(pair):
            return _judged(parts, DIFFERENT, "transposed", float("nan"), shapes)
    if len(a) == len(b) == 1:
        name = f"rows {'cut' if b < a else 'added'}: {abs(a[0] - b[0])}"
        return _judged(parts, DIFFERENT, name, float("nan"), shapes)
    if pair.problem:
        return _judged(parts, DIFFERENT, "another shape", float("nan"), shapes)
    change = change_of_all(pair)
    rows = "rows of the vocabulary" if parts.sizes.role in OF_VOCABULARY else "rows"
    what = f"{rows} {'cut' if b[0] < a[0] else 'added'}"
    rest = (
        ""
        if not change.values_changed or change.casts
        else f"; the others differ ({change.change:.2g})"
    )
    return _judged(parts, DIFFERENT, f"{what}: {abs(a[0] - b[0])}", float("nan"), shapes + rest)


def alone(tensor: NamedTensor, label: str, *, in_a: bool) -> Judged:
    """A tensor that only one file has."""
    names = (tensor.name, "") if in_a else ("", tensor.name)
    about = (tensor.role, tensor.layer, tensor.expert, *names)
    rest = {"stack": tensor.stack, "label": label}
    which = "A" if in_a else "B"
    if tensor.role.endswith(".bias") and prod(tensor.shape) <= LARGEST_WHOLE:
        with np.errstate(all="ignore"):
            if not tensor.array().any():
                return Judged(*about, SAME_VALUES, f"a bias of zeros, only in {which}", **rest)  # type: ignore[arg-type]
    kind = {"bias": "bias", "unembedding": "head"}.get(tensor.role.rpartition(".")[2], "tensor")
    deed = f"{kind} {'dropped' if in_a else 'added'}"
    return Judged(*about, DIFFERENT, deed, float("nan"), f"only in {which}", **rest)  # type: ignore[arg-type]

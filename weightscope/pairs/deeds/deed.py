"""Deeds that can be done to a tensor: a closed list, and the functions that find each.

A deed is registered where it is found, with its place in the one order of search and its sentence:

    @deed(What.NEGATED, order=60, says="negated", sees=Sees.VIEWS)
    def negated(views, sizes): ...

Code branches on `What`; `sentence` makes the words, at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple


class What(Enum):
    """A kind of deed; the values are the kinds in the tables of `compare`."""

    IDENTICAL = "identical"
    ROUNDED = "rounded"
    ZEROED = "zeroed"
    CONSTANT = "constant"
    SCALED = "scaled"
    FACTORS = "factors"
    REORDERED = "reordered"
    QUANTISED = "quantised"
    QUANTISED_IN_PART = "quantised in part"
    ONE_DIRECTION = "one direction"
    LOW_RANK = "low rank"
    FEW_ROWS = "few rows"
    ALL_BUT_SOME = "all but some values"
    RESIZED = "resized"
    TUNED = "changed"
    NOT_FINITE = "not finite"
    RESHAPED = "reshaped"
    MISSING = "missing"
    NEW = "new"
    UNREAD = "unread"
    UNNAMED = "unnamed"
    UNRELATED = "unrelated"
    STORED_OTHERWISE = "stored otherwise"
    ROUNDED_TWICE = "rounded twice"
    ROUNDED_OTHERWISE = "rounded otherwise"
    MERGED = "merged"
    EXPONENTIATED = "exponentiated"
    SEARCHED = "quantised by search"
    PERHAPS_SEARCHED = "perhaps quantised by search"
    COMPENSATED = "quantised with compensated errors"
    TOO_WIDE = "scales too large"
    REINTERPRETED = "dtype reinterpreted"
    TRANSPOSED = "transposed"
    TRUNCATED = "truncated"
    PRUNED = "some values zeroed"
    RANK_CUT = "cut to a lower rank"
    ROTARY = "rotary layout"
    FUSED = "fused order"
    SHIFTED = "shifted"
    HEADS = "heads reordered"
    EXPERTS = "experts reordered"
    NEURONS = "neurons reordered"
    SWAPPED = "neighbours reordered"
    NORM_OFFSET = "norm offset"
    OFF_BY_STEPS = "off by steps"
    VALUE_HEADS = "value heads reordered"
    CONVOLUTION = "convolution layout"
    DECAY = "decay rates"
    BLOCK_FACTORS = "block factors"
    NEGATED = "negated"
    ANOTHER_TENSOR = "another tensor"
    SHARD = "shard of another step"
    NOT_INDEXED = "file that is not read"
    TIED_HEAD = "tied head"
    ZERO_BIAS = "bias of zeros"
    SAMPLED = "differs in the sample"
    NORMS_FOLDED = "norms folded"
    SIGNS_MOVED = "signs moved"
    SCALES_MOVED = "scales moved"
    HEAD_BASIS = "heads in another basis"
    STREAM_BASIS = "stream in another basis"
    OTHER_DIGEST = "another digest"
    CONSISTENT = "perhaps quantised"
    NEARLY_A_GAUGE = "another order or basis but for some values"


class Proof(Enum):
    """The ground on which a deed is named."""

    VALUES = "T(A) = B on every value, up to its stored rounding"
    GRID = "every value in the cell of its original"
    BOUND = "errors within what the writer makes"
    MOST = "T(A) = B on most values that changed, up to their stored rounding"
    NONE = "likeness only"


class Sees(Enum):
    """The arguments of a search."""

    ORIGINALS = "a pair and its change: what its formats store of the values of the other"
    BLOCKS = "a pair and its change, read in blocks: tensors of any size"
    VIEWS = "all values along rows and along columns, or some of a large tensor"


@dataclass(frozen=True)
class Deed:
    """A deed done to one tensor, with the parameters of its sentence."""

    what: What
    way: str = ""  # words of the sentence
    detail: str = ""  # numbers that follow the sentence
    made: str = "B"  # the checkpoint whose tensor was made from the other's
    columns: bool = False  # along columns instead of rows
    rank: int | None = None  # low rank of the change
    place: int | None = None  # layer, expert or row that it comes from
    dtype: str = ""  # the packing that it was quantised to
    first: str = ""  # the float that it was rounded to before
    parts: tuple[tuple["Deed", str], ...] = ()  # deeds of a fused tensor's parts, with their roles
    proof: Proof = Proof.NONE
    left: float = float("nan")  # |B - T(A)| / |B|

    @property
    def original(self) -> str:
        """The checkpoint that it was made from."""
        return "A" if self.made == "B" else "B"

    @property
    def cast(self) -> tuple[What, str, str]:
        """The way of a rounding, by which tensors are compared."""
        return self.what, self.way, self.made


UNTOUCHED = Deed(What.IDENTICAL, proof=Proof.VALUES)

Finder = Callable[..., Deed | None]
Say = str | Callable[[Deed], str]


class DeedWords(NamedTuple):
    """Words for a deed: templates of its fields."""

    says: Say  # in `same`
    was: Say  # after "was"
    brief: Say  # next to the kind, in the tables of `compare`
    called: str  # after a number of tensors


class DeedSearch(NamedTuple):
    """A function that looks for deeds, and its place in the order."""

    order: int
    sees: Sees
    find: Finder


WORDS: dict[What, DeedWords] = {}
_searches: list[DeedSearch] = []


def deed(
    what: What,
    says: Say,
    *,
    was: Say = "",
    brief: Say = "{detail}",
    called: str = "",
    order: int | None = None,
    sees: Sees = Sees.VIEWS,
) -> Callable[[Finder], Finder]:
    """Register the words of a deed; as a decorator with `order`, the function that finds it too."""
    WORDS[what] = DeedWords(says, was or says, brief, called or what.value)
    return (lambda function: function) if order is None else search(order, sees)


def search(order: int, sees: Sees = Sees.VIEWS) -> Callable[[Finder], Finder]:
    """Register a function that finds deeds, at its place in the one order."""

    def register(function: Finder) -> Finder:
        _searches.append(DeedSearch(order, sees, function))
        _searches.sort(key=lambda each: each.order)
        return function

    return register


def find(sees: Sees, *seen: Any, before: int | None = None) -> Deed | None:
    """The first deed in the order, as far as `before`."""
    for each in _searches:
        is_asked = each.sees is sees and (before is None or each.order < before)
        if is_asked and (done := each.find(*seen)):
            return done
    return None


def sentence(done: Deed) -> str:
    """A deed in words, as `same` shows it."""
    if done.parts:
        return "; ".join(f"{sentence(part)}, of {role}" for part, role in done.parts)
    return _said(WORDS[done.what].says, done)


def was(done: Deed) -> str:
    """A deed in words that follow "was": `rounded to BF16 (to nearest even)`."""
    return _said(WORDS[done.what].was, done)


def brief(done: Deed) -> str:
    """A deed in words next to its kind, in the tables of `compare`."""
    return _said(WORDS[done.what].brief, done)


def called(what: What) -> str:
    """A kind after a number of tensors: `3 multiplied by one factor`."""
    return WORDS[what].called


def _said(say: Say, done: Deed) -> str:
    if not isinstance(say, str):
        return say(done)
    return say.format(
        way=done.way,
        detail=done.detail,
        made=done.made,
        original=done.original,
        where=" in A" if done.made == "A" else "",
        columns=" (columns)" if done.columns else "",
        place=done.place,
        dtype=f" ({done.dtype})" if done.dtype else "",
        first=f"to {done.first} and " if done.first else "",
        was_first=f"rounded to {done.first} and " if done.first else "",
    )


# Kinds that are no transformation


deed(What.IDENTICAL, "")
deed(What.STORED_OTHERWISE, "stored otherwise")
deed(What.TUNED, "other values", called="fine-tuned")
deed(What.UNRELATED, "unrelated values", called="with other weights")
deed(What.ONE_DIRECTION, "along one direction", called="changed along one direction")
deed(What.RESIZED, "{way}", called="with rows added or removed")
deed(What.RESHAPED, "another shape", called="of another shape")
deed(
    What.NOT_FINITE,
    "NaN or infinity{where}{columns}",
    called="with an unknown change: NaN or infinity",
)
deed(What.MISSING, "{way} dropped", called="only in the first")
deed(What.NEW, "{way} added", called="only in the last")
deed(What.UNREAD, "cannot be read", called="that cannot be read")
deed(What.UNNAMED, "of unknown meaning")


def in_digits(factor: float, digits: int = 3) -> str:
    """A factor in as many digits, or in as many more as tell it from one.

    Examples
    --------
    >>> in_digits(1.2345), in_digits(0.99991), in_digits(1.0)
    ('1.23', '0.9999', '1')
    """
    text = f"{factor:.{digits}g}"
    return in_digits(factor, digits + 1) if float(text) == 1 != factor else text

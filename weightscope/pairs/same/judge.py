"""One tensor of A and its counterpart in B: the strongest verdict that can be proved."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np

from weightscope.checkpoint.blocks import Block
from weightscope.checkpoint.checkpoint import StoredTensor
from weightscope.checkpoint.packings.packed import DequantisedTensor
from weightscope.heads.tensors.measure import why_unread
from weightscope.model.rows.names import NamedTensor
from weightscope.pairs.deeds.blocks import casts_in_order, deed_of_cast
from weightscope.pairs.deeds.catalogue import UNEXPLAINED, deed_of, last_words
from weightscope.pairs.deeds.change import (
    Change,
    change_of,
    change_of_all,
    differs,
    shows_cast,
    unchanged,
)
from weightscope.pairs.deeds.deed import UNTOUCHED, Deed, Proof, Sees, What, deed, find, sentence
from weightscope.pairs.deeds.mixers import laid_out_otherwise
from weightscope.pairs.deeds.pair import Pair, Part, first_rows_of
from weightscope.pairs.deeds.quantised import in_cells, mostly_unpacked
from weightscope.pairs.deeds.views import LARGEST_WHOLE, Sizes, error_of, tolerance_of
from weightscope.pairs.same import DIFFERENT, QUANTISED, ROUNDED, SAME_VALUES, UNDECIDED
from weightscope.pairs.same.stored import equal_bytes, is_copy

# detail where a rounding to the coarser tensor is a guess
FEW_VALUES = "too few values to show it alone"
# Deeds that leave the same model, with fewer bits.
VERDICT_OF = {
    What.ROUNDED_TWICE: ROUNDED,
    What.MERGED: ROUNDED,
    What.EXPONENTIATED: ROUNDED,
    What.QUANTISED: QUANTISED,
    What.SEARCHED: QUANTISED,
    What.PERHAPS_SEARCHED: UNDECIDED,
    What.COMPENSATED: QUANTISED,
}

deed(What.SAMPLED, "differs in the sample")
deed(What.ZERO_BIAS, "a bias of zeros, only in {way}")


@dataclass(frozen=True)
class Judged:
    """A tensor of B, or one that only A has, with its verdict."""

    role: str
    layer: int | None
    expert: int | None
    name_a: str  # in A's file; empty where it lacks it
    name_b: str
    verdict: str  # one of VERDICTS
    done: Deed = UNTOUCHED  # the deed, with its proof
    size: float = 0.0  # |B - A| / |A|
    stack: str | None = None
    label: str = ""

    @property
    def what(self) -> What:
        """The kind of deed."""
        return self.done.what

    @property
    def deed(self) -> str:
        """The deed in words."""
        return sentence(self.done)

    @property
    def detail(self) -> str:
        """Numbers of it."""
        return self.done.detail

    @property
    def name(self) -> str:
        """Its name in B's file, or in A's."""
        return self.name_b or self.name_a

    @property
    def is_unexplained(self) -> bool:
        """True if it differs, and only how much is known."""
        return self.verdict == DIFFERENT and self.what in UNEXPLAINED

    def as_json(self) -> dict[str, object]:
        """The entry in same.json."""
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
    """A role in two files, and the tensors to compare."""

    label: str
    a: NamedTensor
    b: NamedTensor
    tensors: Pair
    sizes: Sizes
    share: float = 1.0  # blocks that are compared

    @property
    def is_stacked(self) -> bool:
        """True if it holds several experts."""
        return (
            self.b.role.startswith("expert.")
            and self.b.expert is None
            and len(self.tensors.b.shape) > 1
        )


@np.errstate(all="ignore")  # values may be infinite, or overflow where they are squared
def judge(
    parts: Compared,
    *,
    may_compensate: bool = True,
    may_quantise: bool = True,
    ways: Collection[tuple[What, str, str]] | None = None,
) -> Judged:
    """Compare one tensor: values, roundings, cells of a quantisation, then all other deeds.

    ways: the roundings that too few different values, stored in more bits, pass for; None: any.
    """
    pair = parts.tensors
    if why := why_unread(pair.a) or why_unread(pair.b):
        return _judged(parts, UNDECIDED, Deed(What.UNREAD, detail=why))
    if pair.a.shape != pair.b.shape:
        return _judged(parts, DIFFERENT, _of_other_shape(parts), float("nan"))
    if _same_bytes(parts):
        return _judged(parts, SAME_VALUES)
    blocks, change = _sampled_blocks(parts), unchanged(pair.a, pair.b)
    look = change_of(first_rows_of(blocks[0]))
    may_be_quantised = may_quantise and parts.share == 1
    if may_be_quantised and look.values_changed and not look.casts and (quick := in_cells(pair)):
        return _judged(parts, QUANTISED, *quick)
    if not look.values_changed and not any(map(differs, blocks)):
        is_copy = parts.share == 1 and equal_bytes(pair.a, pair.b)  # packed tensors too
        return _judged(parts, SAME_VALUES, UNTOUCHED if is_copy else Deed(What.STORED_OTHERWISE))
    # blocks before the first that differs are read again: most differ in the first
    for part in blocks:
        change = change.and_then(change_of(part, change.casts))
    casts = casts_in_order(change.casts)
    if shown := [deed_of_cast(cast) for cast in casts if shows_cast(pair, cast)]:
        return _judged(parts, ROUNDED, shown[0], change.change)
    for guess in map(deed_of_cast, casts):
        if ways is None or guess.cast in ways:
            guess = replace(guess, detail=FEW_VALUES, proof=Proof.NONE)
            return _judged(parts, ROUNDED, guess, change.change)
    if parts.share < 1:
        return _judged(parts, UNDECIDED, Deed(What.SAMPLED), change.change)
    done = find(Sees.ORIGINALS, pair, change, may_compensate) if may_quantise else None
    if done is None or done.proof is Proof.NONE:
        explained = what_was_done(parts, change)
        if done is None or explained.proof is not Proof.NONE:
            done = explained
    return _judged(parts, VERDICT_OF.get(done.what, DIFFERENT), done, change.change)


def what_was_done(parts: Compared, change: Change) -> Deed:
    """The deed of a tensor that is neither rounded nor quantised."""
    done, touched = explained_deed(parts)
    if done is not None and done.what not in UNEXPLAINED:
        return done
    return last_words(parts.tensors, change, parts.b.role, done, touched)


def explained_deed(parts: Compared) -> tuple[Deed | None, int]:
    """The deed that explains a tensor, and how many of its rows or columns changed."""
    return deed_of(parts.tensors, parts.sizes, is_stacked=parts.is_stacked)


def few_compensated(judged: Sequence[Judged]) -> list[int]:
    """Tensors that pass only with compensated errors, where most are quantised without.

    A writer that compensates does so in nearly all matrices: a few that look so were changed.
    """
    packed = [i for i, each in enumerate(judged) if each.verdict == QUANTISED]
    compensated = [i for i in packed if judged[i].what is What.COMPENSATED]
    return compensated if 2 * len(compensated) < len(packed) else []


def few_quantised(judged: Sequence[Judged], parts: Sequence[Compared]) -> list[int]:
    """Tensors that pass for quantised where most that are packed alike hold the floats' values."""
    dtypes = [(each.tensors.a.dtype, each.tensors.b.dtype) for each in parts]
    equal = [each.verdict == SAME_VALUES for each in judged]
    unpacked = mostly_unpacked(dtypes, equal)
    return [i for i in unpacked if judged[i].verdict == QUANTISED]


def shown_ways(judged: Sequence[Judged]) -> set[tuple[What, str, str]]:
    """The roundings that a tensor shows by itself."""
    rounded = [each.done for each in judged if each.verdict == ROUNDED]
    return {done.cast for done in rounded if done.proof is not Proof.NONE}


def rounded_alone(judged: Sequence[Judged]) -> list[int]:
    """Tensors of few values that pass for rounded, in a way that no other tensor shows."""
    ways = shown_ways(judged)
    guessed = [
        i
        for i, each in enumerate(judged)
        if each.verdict == ROUNDED and each.done.proof is Proof.NONE
    ]
    return [i for i in guessed if judged[i].done.cast not in ways]


def _judged(parts: Compared, verdict: str, done: Deed = UNTOUCHED, size: float = 0.0) -> Judged:
    a, b = parts.a, parts.b
    about = (b.role, b.layer, b.expert, a.name, b.name)
    return Judged(*about, verdict, done, size, b.stack, parts.label)


def _same_bytes(parts: Compared) -> bool:
    """True if both are stored alike and hold the same bytes; packed ones are not read for it."""
    x, y = parts.tensors.a, parts.tensors.b
    if type(x) is not type(y) or not isinstance(x, StoredTensor | DequantisedTensor):
        return False
    settings = [each.settings for each in (x, y) if isinstance(each, DequantisedTensor)]
    if settings and settings[0] != settings[-1]:
        return False
    if len(x.parts) == len(y.parts) and all(map(is_copy, x.parts, y.parts)):
        return True
    return parts.share == 1 and isinstance(x, StoredTensor) and equal_bytes(x, y)


def _sampled_blocks(parts: Compared) -> list[Part]:
    """All blocks, or evenly spread ones."""
    return [*parts.tensors.blocks()][:: max(1, round(1 / parts.share))]


# Tensors of other shapes, and of one file alone


def _of_other_shape(parts: Compared) -> Deed:
    """Rows added or cut, a transpose, or another shape."""
    pair = parts.tensors
    a, b = pair.a.shape, pair.b.shape
    if done := laid_out_otherwise(pair, parts.sizes.role):
        return done
    shapes = f"{' x '.join(map(str, a))} in A, {' x '.join(map(str, b))} in B"
    if len(a) == len(b) == 2 and a == b[::-1] and prod(a) <= LARGEST_WHOLE:
        x, y = (Block(tensor, 0, prod(a)).values() for tensor in (pair.a, pair.b))
        if error_of(x.reshape(a).T, y.reshape(b)) <= tolerance_of(pair):
            return Deed(What.TRANSPOSED, detail=shapes)
    is_vector = len(a) == len(b) == 1
    if pair.problem and not is_vector:
        return Deed(What.RESHAPED, detail=shapes)
    rows = "rows" if is_vector else parts.sizes.rows
    way = f"{rows} {'cut' if b[0] < a[0] else 'added'}: {abs(a[0] - b[0])}"
    if not is_vector:
        change = change_of_all(pair)
        if change.values_changed and not change.casts:
            shapes += f"; the others differ ({change.change:.2g})"
    return Deed(What.RESIZED, way, shapes)


def alone(tensor: NamedTensor, label: str, *, in_a: bool) -> Judged:
    """A tensor that only one file has."""
    which, names = ("A", (tensor.name, "")) if in_a else ("B", ("", tensor.name))
    about = (tensor.role, tensor.layer, tensor.expert, *names)
    is_bias = tensor.role.endswith(".bias")
    if is_bias and prod(tensor.shape) <= LARGEST_WHOLE:
        with np.errstate(all="ignore"):
            if not tensor.array().any():
                done = Deed(What.ZERO_BIAS, which, proof=Proof.VALUES)
                return Judged(*about, SAME_VALUES, done, stack=tensor.stack, label=label)
    kind = {"bias": "bias", "unembedding": "head"}.get(tensor.role.rpartition(".")[2], "tensor")
    done = Deed(What.MISSING if in_a else What.NEW, kind, f"only in {which}")
    return Judged(*about, DIFFERENT, done, float("nan"), tensor.stack, label)

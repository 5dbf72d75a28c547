"""Tensors of two models by their identities: what digests prove, and what sketches suggest."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

from weightscope.checkpoint.opening import MODULES
from weightscope.core.errors import counted
from weightscope.model.model import Model, TensorsOnly
from weightscope.pairs.deeds.blocks import deed_of_cast
from weightscope.pairs.deeds.deed import UNTOUCHED, Deed, Proof, What, deed
from weightscope.pairs.identity.identity import (
    HALF,
    Identity,
    Stored,
    identity,
    is_identity,
    read_identity,
)
from weightscope.pairs.identity.wsid import DERIVED, ROUNDINGS, TIED, ZERO_BIAS, Digest
from weightscope.pairs.same import DIFFERENT, ROUNDED, SAME_VALUES, UNDECIDED
from weightscope.pairs.same.companions import TEMPLATE, Companions, FileDifference
from weightscope.pairs.same.judge import Judged

SHOWS = 64  # values of a tensor that shows a rounding by itself
# Distance by rounding to b bits over 1 / (2^b - 1) where 4,096 normal values share one scale: their
# largest is 3.7 standard deviations, and a step's error is its 2 sqrt(3)-th part.
WORST = 2.14
OF_SCALES = 0.5  # bits a value that ggml's blocks have for scales, at least
OF_FLOATS = 0.045  # distance by rounding to a float of 8 bits
MARGIN = 2.5  # times these distances: an estimate from 16 sums varies
TWICE = 0.01  # share of the norm; rounding to bf16 gives 0.002
FARTHEST = 0.9  # share of the norm; unrelated weights are at 1.4, zeros at 1

deed(What.OTHER_DIGEST, "other values")
deed(What.CONSISTENT, "perhaps {way}")


def identified(source: Model | TensorsOnly | str | Path) -> Identity:
    """The identity in a file, or a checkpoint's."""
    if isinstance(source, str | Path) and is_identity(source):
        return read_identity(source)
    return identity(source)


def judge_by_identity(a: Identity, b: Identity) -> list[Judged]:
    """Every tensor of both with its verdict, in the order of their labels."""
    judged = [*_in_both(a, b), *_in_one(a, b, in_a=True), *_in_one(b, a, in_a=False)]
    shown = {each.done.cast for each in judged if each.verdict == ROUNDED and _shows(a, b, each)}
    return [_unless_alone(each, shown) for each in judged]


def _unless_alone(judged: Judged, shown: set[tuple[What, str, str]]) -> Judged:
    """A tensor of few values passes for rounded only in a way that another tensor shows."""
    if judged.verdict != ROUNDED or judged.done.cast in shown:
        return judged
    return replace(judged, verdict=DIFFERENT, done=Deed(What.OTHER_DIGEST))


def _shows(a: Identity, b: Identity, judged: Judged) -> bool:
    """True if the rounded tensor's dtype, or enough different values, show the rounding."""
    side, label = a if judged.done.made == "A" else b, judged.label
    if place := side.stored.get(label):
        return place.shows
    sketch = side.sketches[label]
    return prod(side.tensors[label].shape) >= SHOWS and sketch is not None and sketch.norm > 0


def _in_both(a: Identity, b: Identity) -> Iterator[Judged]:
    labels = {digest.values: label for label, digest in a.tensors.items()}
    for label, x in a.tensors.items():
        if (y := b.tensors.get(label)) is None:
            continue
        if x.shape != y.shape:
            yield _judged(a, b, label, DIFFERENT, Deed(What.RESHAPED))
        elif x.values == y.values:
            yield _judged(a, b, label, SAME_VALUES, UNTOUCHED)
        elif cast := _cast(x, y):
            yield _judged(a, b, label, ROUNDED, deed_of_cast(cast))
        elif a.container != b.container and a.left_out.get(label) == DERIVED:
            unknown = Deed(What.STORED_OTHERWISE, detail=DERIVED)
            yield _judged(a, b, label, UNDECIDED, unknown)
        elif y.values in labels:
            detail = f"A's {labels[y.values]}"
            moved = Deed(What.ANOTHER_TENSOR, "another tensor", detail, proof=Proof.VALUES)
            yield _judged(a, b, label, DIFFERENT, moved)
        else:
            yield _by_sketch(a, b, label)


def _cast(x: Digest, y: Digest) -> tuple[str, str] | None:
    """The float that one is rounded to, and which one was finer: the digests prove it."""
    for kind in ROUNDINGS:
        if x.sha256[kind] == y.sha256[kind] and kind in (*x.exact, *y.exact):
            return kind.upper(), "A" if kind in y.exact else "B"
    return None


def _by_sketch(a: Identity, b: Identity, label: str) -> Judged:
    """Too far for a quantised copy, or perhaps one: nothing here proves it."""
    x, y = a.sketches[label], b.sketches[label]
    if x is None or y is None:
        done = Deed(What.OTHER_DIGEST, detail="values that are not finite")
        return _judged(a, b, label, DIFFERENT, done, float("nan"))
    finest = {side.tensors[label].exact[0] for side in (a, b)}
    same_digests = all(a.tensors[label].sha256[k] == b.tensors[label].sha256[k] for k in ROUNDINGS)
    fine, coarse = ({*side.tensors[label].exact} & {*ROUNDINGS} for side in (a, b))
    places = (side.stored.get(label) for side in (a, b))
    bits = min((place.bits for place in places if place), default=HALF)
    distance = x.distance(y)
    away = f"about {distance:.2g} of the norm away"
    codes = int(bits - OF_SCALES * ("gguf" in (a.container, b.container)))
    step = max(OF_FLOATS, WORST / (2 ** max(1, codes) - 1))
    nearest = min(FARTHEST, MARGIN * step)
    if bits < HALF and distance <= nearest:
        done = Deed(What.CONSISTENT, "quantised", f"{away}, at {bits:.3g} bits a value")
        return _judged(a, b, label, UNDECIDED, done, distance)
    # float64 is rounded to float16 at once, or by way of float32, which digests show
    at_once = finest == {"f64", "f16"} and distance <= TWICE
    if at_once or (finest == {"f64", "f32"} and same_digests):
        done = Deed(What.CONSISTENT, f"rounded to {min(finest).upper()}", away)
        return _judged(a, b, label, UNDECIDED, done, distance)
    # gains that count from one lose other digits as they are read than as they are rounded
    may_be_rounded = coarse == {*ROUNDINGS} or ("norm" in label and bits <= HALF)
    if not fine and may_be_rounded and distance <= TWICE:
        done = Deed(What.CONSISTENT, "rounded twice", away)
        return _judged(a, b, label, UNDECIDED, done, distance)
    return _judged(a, b, label, DIFFERENT, Deed(What.OTHER_DIGEST, detail=away), distance)


def _in_one(side: Identity, opposite: Identity, *, in_a: bool) -> Iterator[Judged]:
    """Tensors that only one of them has, but for biases of zeros and heads that the other ties."""
    which, what = ("A", What.MISSING) if in_a else ("B", What.NEW)
    without = {ZERO_BIAS} | ({TIED} if opposite.ties is not False else set())
    for label in side.tensors:
        if label not in opposite.tensors and side.left_out.get(label) not in without:
            done = Deed(what, "tensor", f"only in {which}")
            pair = (side, opposite) if in_a else (opposite, side)
            yield _judged(*pair, label, DIFFERENT, done, float("nan"))


def _judged(
    a: Identity, b: Identity, label: str, verdict: str, done: Deed, size: float = 0.0
) -> Judged:
    places = [side.stored.get(label) for side in (a, b)]
    known = next(filter(None, places), Stored(label, label, None, None, HALF))
    names = [
        place.name if place else label if label in side.tensors else ""
        for place, side in zip(places, (a, b), strict=True)
    ]
    about = (known.role, known.layer, known.expert, names[0], names[1])
    return Judged(*about, verdict, done, size, label=label)


def compare_files(a: Identity, b: Identity) -> Companions:
    """Code and modules decide what is computed, a chat template does not.

    A GGUF file has no modules around the model.
    """
    stands_alone = "gguf" in (a.container, b.container)
    differing = [
        FileDifference(name, "differs" if {name} <= {*a.files} & {*b.files} else "is in one only")
        for name in sorted({*a.files, *b.files})
        if a.files.get(name) != b.files.get(name)
        if not (stands_alone and (name == MODULES or "/" in name))
    ]
    code = tuple(each for each in differing if each.file != TEMPLATE)
    return Companions(code, tuple(each for each in differing if each.file == TEMPLATE))


def consistent_part(judged: Iterable[Judged]) -> str:
    """Tensors that may be quantised, in words; empty without any."""
    guessed = [each for each in judged if each.what is What.CONSISTENT]
    sizes = sorted(each.size for each in guessed)
    if not sizes:
        return ""
    ways = " or ".join(dict.fromkeys(each.done.way for each in guessed))
    tensors = counted(len(sizes), "tensor")
    are = "is" if len(sizes) == 1 else "are"
    span = " to ".join(dict.fromkeys(f"{size:.2g}" for size in (sizes[0], sizes[-1])))
    away = f"about {span} of the norm away"
    return f"{tensors} {are} perhaps {ways} ({away}), which digests cannot prove"

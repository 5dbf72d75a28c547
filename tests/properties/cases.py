"""A case: what is done to a checkpoint. Everything in it is drawn by Hypothesis and printed as Python."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from hypothesis import HealthCheck, Phase, assume, settings
from hypothesis import strategies as st

from tests.properties.originals import PLAIN, SOURCES, WIDE, Writing, between, original, roles, rounded
from tests.properties.wide import gauges_of, in_another_gauge
from tests.support.config_edits import edited, edits, leaves
from tests.support.plants.destroyed import DESTROYED

KEPT, ALIKE, BROKEN, CONFIG = "values kept", "computes the same", "tensor changed", "config changed"
GROUPS = (KEPT, ALIKE, BROKEN, CONFIG)
LINEAGE, CLAIM, CARD, AUDIT = ASKS = ("lineage", "claim", "card", "audit")  # commands that take long


class Case(NamedTuple):
    """What is done to which tensors, layer or key of a checkpoint, and how the copy is written."""

    source: str
    group: str
    change: str = ""
    places: tuple[str, ...] = ()
    number: float = 0.0
    writing: Writing = PLAIN
    asks: str = ""  # the one of ASKS that is asked besides the others; all if empty


# Tensors changed


def _one_value(w: np.ndarray) -> np.ndarray:
    new = w.copy()
    new.reshape(-1)[w.size // 2] = 1.5 * new.reshape(-1)[w.size // 2] + 0.125
    return new


def _not_a_number(w: np.ndarray) -> np.ndarray:
    new = w.copy()
    new.reshape(-1)[w.size // 3] = np.nan
    return new


def _first_rows_exchanged(w: np.ndarray) -> np.ndarray:
    new = w.copy()
    new[:2] = w[:2][::-1]
    return new


BREAKS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    **DESTROYED,
    "negated": np.negative,
    "one added": lambda w: w + 1,
    "scaled": lambda w: w * np.float32(1.5),
    "rows shifted": lambda w: np.roll(w, 1, axis=0),
    "columns shifted": lambda w: np.roll(w, 1, axis=-1),
    "two rows exchanged": _first_rows_exchanged,
    "one value": _one_value,
    "not a number": _not_a_number,
}
OF_SCALARS = {"negated", "one added", "scaled", "one value"}  # changes that need no rows
EXCHANGED = "exchanged"


# Gauges: factors are powers of two, so that every product is exact


class Factors(NamedTuple):
    """Roles that are multiplied by a factor and those that are divided by it; all others that a layer may have."""

    times: tuple[str, ...]
    divided: tuple[str, ...]
    needs: tuple[str, ...]


FACTORS = {
    "queries and keys": Factors(("q", "q.bias"), ("k", "k.bias"), ("q", "k")),
    "values and outputs": Factors(("v", "v.bias"), ("o",), ("v", "o")),
    "up and down": Factors(("up", "up.bias"), ("down",), ("gate", "up", "down")),
}
NEURONS = "neurons in another order"
DERIVED = "derivations"
GAUGES = (*FACTORS, NEURONS, DERIVED)
NETWORK = ("gate", "up", "down", "gate.bias", "up.bias", "down.bias")
PLAIN_ROLES = {*NETWORK, *(f"{role}{end}" for role in "qkvo" for end in ("", ".bias"))}


def _is_plain(present: Mapping[str, str]) -> bool:
    """A layer of projections, a network and the norms of the stream, with nothing between them."""
    return all(role in PLAIN_ROLES or role.startswith("norm.") for role in present) and "norm.mlp_inner" not in present


def _rescaled(tensors: dict[str, np.ndarray], present: Mapping[str, str], factors: Factors, by: float) -> None:
    for role in factors.times:
        if role in present:
            tensors[present[role]] = tensors[present[role]] * np.float32(by)
    for role in factors.divided:
        if role in present:
            tensors[present[role]] = tensors[present[role]] * np.float32(1 / by)


def _reordered(tensors: dict[str, np.ndarray], present: Mapping[str, str], seed: float) -> None:
    """Neurons in another order; their axis is the one that is not as long as the stream is wide."""
    shape = tensors[present["down"]].shape
    width = len(tensors[present["norm.mlp"]])
    n = next((size for size in shape if size != width), width)
    order = np.random.default_rng(int(seed)).permutation(n)
    for role in NETWORK:
        if role in present and role != "down.bias":
            w = tensors[present[role]]
            tensors[present[role]] = w.take(order, w.shape.index(n))


# What can be done where


@lru_cache(None)
def places_of(source: str, group: str, change: str) -> Sequence[tuple[str, ...]]:
    """Tensors, layers or keys that a change can be done to."""
    sound = original(source)
    if group == KEPT:
        return [()]
    if change == DERIVED:
        return gauges_of(source.removeprefix("wide/")) if source in WIDE else []
    if group == CONFIG:
        return [(".".join(path),) for path, _ in leaves(sound.config)]
    if group == BROKEN:
        floats = [name for name, w in sound.tensors.items() if w.dtype.kind == "f" and w.size]
        if change != EXCHANGED:
            return [(name,) for name in floats if sound.tensors[name].ndim or change in OF_SCALARS]
        shapes = {name: sound.tensors[name].shape for name in floats}
        return [(x, y) for x in floats for y in floats if x < y and shapes[x] == shapes[y]]
    needs = FACTORS[change].needs if change in FACTORS else ("up", "down", "norm.mlp")
    return [
        (stack or "", str(layer))
        for (stack, layer), present in roles(source).items()
        if layer is not None and {*needs} <= {*present} and _is_plain(present)
        if {"q", "v"}.isdisjoint(needs) or not between(source, layer)
    ]


CHANGES = {KEPT: ("",), ALIKE: GAUGES, BROKEN: (*BREAKS, EXCHANGED), CONFIG: ("",)}
NAMED_LIKE_A_PREFIX = {"pixtral"}  # `transformer.` is no prefix of its names, but its module
WRITINGS = st.builds(
    Writing,
    shards=st.sampled_from([1, 1, 2, 3]),
    order=st.integers(0, 3),
    prefix=st.sampled_from(["", "", "", "module.", "_orig_mod.", "bare"]),
)


@st.composite
def cases(draw: Any, sources: Sequence[str] = SOURCES, groups: Sequence[str] = GROUPS) -> Case:
    """A case of one of these sources and groups."""
    source, group = draw(st.sampled_from(sources)), draw(st.sampled_from(groups))
    change = draw(st.sampled_from(CHANGES[group]))
    places = places_of(source, group, change)
    assume(places)
    place = draw(st.sampled_from(places))
    number = 0.0
    if group == ALIKE:
        number = draw(st.sampled_from([-1.0, 2.0, -0.5] if change in FACTORS else [1.0, 2.0, 3.0]))
    if group == CONFIG:
        number = float(draw(st.integers(0, 4)))
    writing = draw(WRITINGS)._replace(dtype=draw(st.sampled_from(original(source).dtypes)))
    if source in NAMED_LIKE_A_PREFIX and writing.prefix == "bare":
        writing = writing._replace(prefix="")
    return Case(source, group, change, place, number, writing, draw(st.sampled_from(ASKS)))


def drawn(n: int, **options: Any) -> settings:
    """Settings for n cases, however long each takes; a case is small already, and is not shrunk."""
    checks = list(HealthCheck)
    return settings(
        max_examples=n, phases=[Phase.generate], database=None, deadline=None, suppress_health_check=checks, **options
    )


def changed(case: Case) -> tuple[Mapping[str, Any], Mapping[str, np.ndarray]] | None:
    """Config and tensors of the copy; None where the change changes nothing."""
    sound = original(case.source)
    tensors = dict(sound.tensors)
    if case.group == CONFIG:
        path = tuple(case.places[0].split("."))
        usual = dict(leaves(sound.config))[path]
        others = [value for value in edits(usual) if value != usual]
        config = edited(sound.config, path, others[int(case.number) % len(others)])
        return (config, tensors) if config != sound.config else None
    if case.change == DERIVED:
        return in_another_gauge(case.source.removeprefix("wide/"), case.places, case.number)
    if case.group == ALIKE:
        stack, layer = case.places
        present = roles(case.source)[stack or None, int(layer)]
        if case.change in FACTORS:
            _rescaled(tensors, present, FACTORS[case.change], case.number)
        else:
            _reordered(tensors, present, case.number)
    if case.group == BROKEN:
        names = case.places
        if case.change == EXCHANGED:
            tensors |= {x: sound.tensors[y] for x, y in zip(names, names[::-1], strict=True)}
        else:
            tensors[names[0]] = BREAKS[case.change](sound.tensors[names[0]]).astype(np.float32)
        if "BF16" in sound.dtypes:
            tensors |= {name: rounded(tensors[name]) for name in names}
    if case.group != KEPT and all(np.array_equal(tensors[name], w) for name, w in sound.tensors.items()):
        return None
    return sound.config, tensors

"""Compare each part of two checkpoints: attention, feed-forward networks, embeddings, norms.

Heads say nothing of the rest of a file, so every part has a verdict of its own. Feed-forward
networks are compared tensor by tensor and then neuron by neuron, embeddings row by row, norms by
their gains.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weightscope.core.errors import CheckpointError, counted, printable
from weightscope.model.metrics.spectra import evenly_spread
from weightscope.model.model import Model
from weightscope.model.text.tokenizer import Tokenizer
from weightscope.pairs.changes.head import Basis
from weightscope.pairs.deeds.thresholds import (
    MAYBE_SHARED,
    SAME_SIZE,
    SAME_SIZES,
    SHARED_GAINS,
    SHARED_ROWS,
)
from weightscope.pairs.lineage.neurons import (
    Counterpart,
    alike_rows,
    counterparts_of,
    networks_of,
    order_of_rows,
)
from weightscope.pairs.lineage.shared_tensors import (
    ATTENTION,
    FEED_FORWARD,
    NORMS,
    OTHERS,
    TOKENS,
    Facts,
    facts_of_both,
    nearest,
)

CALLED = {
    ATTENTION: "attention",
    FEED_FORWARD: "feed-forward networks",
    TOKENS: "token embeddings",
    NORMS: "norms",
    OTHERS: "other tensors",
}
NAMED = 4  # moved layers that a sentence names
ROWS = 1024  # token embeddings that are compared
NOTHING = "nothing is shared"
UNKNOWN_BASIS = "not compared, since the change of the stream's basis is not known"
SAME, SIMILAR, REORDERED = "same values", "alike", "the same neurons in another order"
SHARED = ("derived", "related")
Both = tuple[list[Facts], list[Facts]]  # a part's tensors in the suspect, and in the base


@dataclass(frozen=True)
class PartVerdict:
    """The verdict on one part."""

    verdict: str  # "derived", "related", "unrelated", "undecided"; "absent" where not both have it
    lead: str  # in words, without a full stop
    share: float = 0.0  # share of the suspect's values of this part that the base has, or nearly
    is_moved: bool = False  # neurons or rows are in another order

    @property
    def is_shared(self) -> bool:
        """True if both have an origin in common."""
        return self.verdict in SHARED


class NetworkOrigin(NamedTuple):
    """The origin of a layer's network."""

    state: str  # SAME, SIMILAR or REORDERED
    base_layer: int | None
    likeness: float


def compare_parts(
    suspect: Model, base: Model, attention: PartVerdict, basis: Basis | None = None
) -> dict[str, PartVerdict]:
    """Compare every part, with the base's stream brought to the suspect's by `basis`.

    Attention is as its heads show it. If heads do not match, its matrices are compared as stored:
    other norms make other heads.
    """
    basis = basis or Basis()
    here, there = facts_of_both(suspect, base, heads=not attention.is_shared)
    by_part = {part: (_facts_of(here, part), _facts_of(there, part)) for part in CALLED}
    if not attention.is_shared:
        stored = _stored(by_part[ATTENTION], basis)
        attention = stored if stored.is_shared else attention
    parts = {
        ATTENTION: attention,
        FEED_FORWARD: _feed_forward(suspect, base, by_part[FEED_FORWARD], basis),
        TOKENS: _tokens(suspect, base, by_part[TOKENS], basis),
        NORMS: _norms(by_part[NORMS], basis),
    }
    others = _stored(by_part[OTHERS], basis)
    if others.is_shared:
        parts[OTHERS] = others
    return parts


def _facts_of(facts: Sequence[Facts], part: str) -> list[Facts]:
    return [fact for fact in facts if fact.part == part]


def unread_parts(attention: PartVerdict, why: str) -> dict[str, PartVerdict]:
    """The parts if only heads were compared."""
    unread = {name: PartVerdict("undecided", why) for name in (FEED_FORWARD, TOKENS, NORMS)}
    return {ATTENTION: attention, **unread}


# Feed-forward networks


def _feed_forward(suspect: Model, base: Model, both: Both, basis: Basis) -> PartVerdict:
    """Compare tensor by tensor, then neuron by neuron in the layers that share none."""
    ours, theirs = ([fact for fact in side if fact.is_matrix] for side in both)
    if not ours or not theirs:
        return _without_facts(suspect, base, ours, theirs)
    near = nearest(ours, theirs) if basis.same else {}
    by_layer: dict[int | None, list[Facts]] = defaultdict(list)
    for fact in ours:
        by_layer[fact.layer].append(fact)
    shared = _by_tensors(by_layer, theirs, near)
    matched: dict[int, Counterpart] = {}
    if len(shared) < len(by_layer) and basis.known:
        networks = [network for network in networks_of(suspect) if network.place[0] not in shared]
        for (layer, _), each in counterparts_of(networks, networks_of(base), basis).items():
            if layer not in matched or each.likeness.mean > matched[layer].likeness.mean:
                matched[layer] = each
    for layer, each in matched.items():
        if each.likeness.is_sure:
            state = SIMILAR if each.in_place else REORDERED
            shared[layer] = NetworkOrigin(state, each.place[0], each.likeness.mean)
    if shared:
        is_moved = any(origin.state == REORDERED for origin in shared.values())
        lead = _layers_found(shared, len(by_layer))
        return PartVerdict("related", lead, len(shared) / len(by_layer), is_moved)
    equal, alike = _equal_and_alike(ours, theirs, near, SHARED_ROWS)
    if equal or alike:
        total = counted(len(ours), "tensor")
        lead = f"{len(alike)} of {total} are alike"
        if equal:
            lead = f"{len(equal)} of {total} have the same values"
        return PartVerdict("related", lead, max(len(equal), len(alike)) / len(ours))
    if not basis.known:
        return PartVerdict("undecided", UNKNOWN_BASIS)
    widths = {fact.shape[-1] for fact in theirs}
    if not matched and not any(fact.shape[-1] in widths for fact in ours):
        return PartVerdict("undecided", "not compared, since their sizes differ")
    is_doubtful = any(each.likeness.is_doubtful for each in matched.values())
    cosines = [cosine for cosine, _ in near.values()]
    return _unless_doubtful(ours, theirs, cosines, is_doubtful)


def _without_facts(
    suspect: Model, base: Model, ours: Sequence[Facts], theirs: Sequence[Facts]
) -> PartVerdict:
    """Judge networks if one side has none, or only values that are no evidence."""
    if not networks_of(suspect) or not networks_of(base):
        return PartVerdict("absent", "not in both checkpoints")
    sides = (suspect, ours), (base, theirs)
    empty = " and ".join(printable(model.name) for model, facts in sides if not facts)
    why = f"those of {empty} hold too few values, or hardly any but one"
    return PartVerdict("undecided", f"not compared: {why}")


def _by_tensors(
    by_layer: Mapping[int | None, Sequence[Facts]],
    theirs: Sequence[Facts],
    near: Mapping[str, tuple[float, Facts]],
) -> dict[int | None, NetworkOrigin]:
    """Origins of the layers whose matrices all equal the base's, or are all alike."""
    contents = {fact.content: fact for fact in theirs}
    shared: dict[int | None, NetworkOrigin] = {}
    for layer, facts in by_layer.items():
        copies = [contents[fact.content] for fact in facts if fact.content in contents]
        alike = [near[fact.name] for fact in facts if fact.name in near]
        lowest = min((cosine for cosine, _ in alike), default=0.0)
        if len(copies) == len(facts):
            shared[layer] = NetworkOrigin(SAME, copies[0].layer, 1.0)
        elif len(alike) == len(facts) and lowest >= SHARED_ROWS:
            shared[layer] = NetworkOrigin(SIMILAR, alike[0][1].layer, lowest)
    return shared


def _layers_found(origins: Mapping[int | None, NetworkOrigin], total: int) -> str:
    """Origins of networks, in words."""
    parts = []
    for state, times in Counter(origin.state for origin in origins.values()).items():
        likeness = [origin.likeness for origin in origins.values() if origin.state == state]
        text = f"{state} in {times} of {counted(total, 'layer')}"
        if state != SAME:
            text += f" (likeness {min(likeness):.2f} to {max(likeness):.2f})"
        parts.append(text)
    moved = [
        f"{layer} was {origin.base_layer}"
        for layer, origin in origins.items()
        if origin.base_layer != layer
    ]
    if 0 < len(moved) <= NAMED:
        parts.append(f"layer {', '.join(moved)} in the base")
    elif moved:
        parts.append(f"{len(moved)} of them from another layer of the base")
    return "; ".join(parts)


def _unless_doubtful(
    ours: Sequence[Facts], theirs: Sequence[Facts], cosines: Sequence[float], doubtful: bool
) -> PartVerdict:
    """Unrelated, unless something speaks against it."""
    if doubtful or max(cosines, default=0.0) >= MAYBE_SHARED:
        return PartVerdict("undecided", "more alike than strangers', but less than what is shared")
    sizes: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for fact in theirs:
        sizes[fact.shape].append(fact.rms)
    by_shape = {shape: np.array(values) for shape, values in sizes.items()}
    same = [
        fact for fact in ours if fact.shape in by_shape and _is_near(by_shape[fact.shape], fact.rms)
    ]
    if ours and len(same) > SAME_SIZES * len(ours):
        return PartVerdict(
            "undecided", "matrices have equal norms, as they have after a change of basis"
        )
    return PartVerdict("unrelated", NOTHING)


def _is_near(sizes: np.ndarray, size: float) -> bool:
    return bool((np.abs(sizes / (size or 1) - 1) < SAME_SIZE).any())


# Token embeddings


def _tokens(suspect: Model, base: Model, both: Both, basis: Basis) -> PartVerdict:
    """Compare whole tables, then rows by place, by token, and in any order."""
    here, there = both
    digests = {fact.digest for fact in there}
    equal = [fact for fact in here if fact.digest in digests]
    if here and len(equal) == len(here):
        return PartVerdict("related", SAME, 1.0)
    try:
        x, y = suspect.embeddings, base.embeddings
    except CheckpointError:
        return PartVerdict("absent", "not in both checkpoints")
    if not basis.known:
        return PartVerdict("undecided", UNKNOWN_BASIS)
    if suspect.ends.width != base.ends.width:
        return PartVerdict("undecided", "not compared, since their widths differ")
    is_doubtful = False
    for how, (ids_x, ids_y) in _pairings(suspect, base, x.n_tokens, y.n_tokens):
        ours, theirs = x.rows(ids_x), y.rows(ids_y)
        if basis.rotation is not None:
            theirs = theirs @ basis.rotation
        match = alike_rows(ours, theirs)
        if match.is_sure:
            same = float((ours == theirs).all(axis=1).mean())
            lead = f"rows are alike (likeness {match.mean:.2f})"
            if same:
                lead = f"same values in {same:.0%} of the rows"
            return PartVerdict("related", f"{lead}{how}", match.mean, is_moved=bool(how))
        is_doubtful |= match.is_doubtful
    order = order_of_rows(x, y, basis)
    if order.is_sure:
        lead = f"the same rows in another order (likeness {order.mean:.2f})"
        return PartVerdict("related", lead, order.mean, is_moved=True)
    if equal:
        lead = f"{len(equal)} of {counted(len(here), 'table')} have the same values"
        return PartVerdict("related", lead, 0.5)
    return _unless_doubtful(here, there, [], is_doubtful or order.is_doubtful)


def _pairings(
    suspect: Model, base: Model, n_here: int, n_there: int
) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    """Pairs of row ids that may be one token: by number, then by both tokenizers' texts."""
    ids = evenly_spread(min(n_here, n_there), ROWS)
    yield "", (ids, ids)
    tokenizers = []
    for model in (suspect, base):
        try:
            tokenizers.append(Tokenizer.at_hand(model))
        except CheckpointError:
            return
    a, b = tokenizers
    if a is None or b is None or a.hash == b.hash:
        return
    common = []
    for token, i in a.ids.items():
        j = b.ids.get(token, n_there)
        if i < n_here and j < n_there:
            common.append((i, j))
    if len(common) >= ROWS // 8:
        taken = np.array(common)[evenly_spread(len(common), ROWS)]
        yield ", matched by token", (taken[:, 0], taken[:, 1])


# Norms and the rest


def _norms(both: Both, basis: Basis) -> PartVerdict:
    """Compare gains: equal ones may be chance if few, and alike ones have to be most."""
    here, there = both
    if not here or not there:
        return PartVerdict("absent", "gains are constant, or not in both checkpoints")
    if not basis.same:
        return PartVerdict("undecided", "not compared, since the stream is in another basis")
    near = nearest(here, there)
    equal, alike = _equal_and_alike(here, there, near, SHARED_GAINS)
    of_all = f"of {counted(len(here), 'vector')}"
    if 2 * len(equal) > len(here):
        return PartVerdict(
            "related", f"same values in {len(equal)} {of_all}", len(equal) / len(here)
        )
    if 2 * len(alike) > len(here):
        cosines = [near[fact.name][0] for fact in alike]
        likeness = f"(likeness {min(cosines):.2f} to {max(cosines):.2f})"
        lead = f"alike in {len(alike)} {of_all} {likeness}"
        return PartVerdict("related", lead, len(alike) / len(here))
    if not {fact.shape for fact in here} & {fact.shape for fact in there}:
        return PartVerdict("undecided", "not compared, since their sizes differ")
    if equal:
        return PartVerdict(
            "undecided", f"same values in {len(equal)} {of_all}, which may be initial ones"
        )
    return PartVerdict("unrelated", NOTHING)


def _equal_and_alike(
    ours: Sequence[Facts],
    theirs: Sequence[Facts],
    near: Mapping[str, tuple[float, Facts]],
    least: float,
) -> tuple[list[Facts], list[Facts]]:
    """The suspect's tensors that the base has too, and those near one of the base's."""
    contents = {fact.content for fact in theirs}
    return (
        [fact for fact in ours if fact.content in contents],
        [fact for fact in ours if fact.name in near and near[fact.name][0] >= least],
    )


def _stored(both: Both, basis: Basis) -> PartVerdict:
    """Compare matrices as stored: their values, then their samples."""
    here, there = both
    ours = [fact for fact in here if fact.is_matrix]
    near = nearest(ours, there) if basis.same else {}
    equal, alike = _equal_and_alike(ours, there, near, SHARED_ROWS)
    shared = equal or alike
    if not shared:
        return PartVerdict("unrelated", NOTHING)
    what = "same values" if equal else "alike"
    lead = f"{what} in {len(shared)} of {counted(len(ours), 'tensor')}"
    return PartVerdict("related", lead, len(shared) / len(ours))

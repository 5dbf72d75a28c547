"""What each part of a checkpoint shares with a base: attention, feed-forward networks, token
embeddings, norms.

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
ROWS = 1024  # of token embeddings that are compared
NOTHING = "nothing is shared"
SAME, SIMILAR, REORDERED = "same values", "alike", "the same neurons in another order"
SHARED = ("derived", "related")
Both = tuple[list[Facts], list[Facts]]  # a part's tensors in the suspect, and in the base


@dataclass(frozen=True)
class Part:
    """What one part shows."""

    verdict: str  # "derived", "related", "unrelated", "undecided"; "absent" where not both have it
    lead: str  # in words, without a full stop
    share: float = 0.0  # of the suspect's values of this part that are the base's, or alike
    is_moved: bool = False  # neurons or rows are in another order

    @property
    def is_shared(self) -> bool:
        """Whether both have an origin in common."""
        return self.verdict in SHARED


class Found(NamedTuple):
    """Where a layer's network comes from."""

    state: str  # SAME, SIMILAR or REORDERED
    base_layer: int | None
    likeness: float


def compare_parts(
    suspect: Model, base: Model, attention: Part, basis: Basis | None = None
) -> dict[str, Part]:
    """Every part, attention as its heads show it; the base's stream is brought to the suspect's by
    `basis`.

    Where heads do not match, attention's matrices are compared as they are stored: other norms make
    other heads.
    """
    basis = basis or Basis()
    here, there = facts_of_both(suspect, base, heads=not attention.is_shared)
    by_part = {
        part: (
            [fact for fact in here if fact.part == part],
            [fact for fact in there if fact.part == part],
        )
        for part in CALLED
    }
    stored = attention if attention.is_shared else _stored(by_part[ATTENTION], basis)
    rest = _stored(by_part[OTHERS], basis)
    return {
        ATTENTION: stored if stored.is_shared else attention,
        FEED_FORWARD: _feed_forward(suspect, base, by_part[FEED_FORWARD], basis),
        TOKENS: _tokens(suspect, base, by_part[TOKENS], basis),
        NORMS: _norms(by_part[NORMS], basis),
    } | ({OTHERS: rest} if rest.is_shared else {})


def unread_parts(attention: Part, why: str) -> dict[str, Part]:
    """The parts where only heads were compared."""
    return {ATTENTION: attention} | {
        name: Part("undecided", why) for name in (FEED_FORWARD, TOKENS, NORMS)
    }


# Feed-forward networks


def _feed_forward(suspect: Model, base: Model, both: Both, basis: Basis) -> Part:
    """Tensor by tensor, then, of layers that share none so, neuron by neuron."""
    ours, theirs = ([fact for fact in side if fact.is_matrix] for side in both)
    if not ours or not theirs:
        empty = [
            printable(model.name) for model, facts in ((suspect, ours), (base, theirs)) if not facts
        ]
        if networks_of(suspect) and networks_of(base):
            why = f"those of {' and '.join(empty)} hold too few values, or hardly any but one"
            return Part("undecided", f"not compared: {why}")
        return Part("absent", "not in both checkpoints")
    by_layer: dict[int | None, list[Facts]] = defaultdict(list)
    for fact in ours:
        by_layer[fact.layer].append(fact)
    contents = {fact.content: fact for fact in theirs}
    near = nearest(ours, theirs) if basis.same else {}
    shared: dict[int | None, Found] = {}
    for layer, facts in by_layer.items():
        copies = [contents[fact.content] for fact in facts if fact.content in contents]
        cosines = [near[fact.name][0] for fact in facts if fact.name in near]
        if len(copies) == len(facts):
            shared[layer] = Found(SAME, copies[0].layer, 1.0)
        elif len(cosines) == len(facts) and min(cosines) >= SHARED_ROWS:
            shared[layer] = Found(SIMILAR, near[facts[0].name][1].layer, min(cosines))
    matched: dict[int, Counterpart] = {}
    if len(shared) < len(by_layer) and basis.known:
        networks = [network for network in networks_of(suspect) if network.place[0] not in shared]
        for (layer, _), each in counterparts_of(networks, networks_of(base), basis).items():
            if layer not in matched or each.likeness.mean > matched[layer].likeness.mean:
                matched[layer] = each
        shared |= {
            layer: Found(SIMILAR if each.in_place else REORDERED, each.place[0], each.likeness.mean)
            for layer, each in matched.items()
            if each.likeness.is_sure
        }
    if shared:
        moved = any(each.state == REORDERED for each in shared.values())
        return Part(
            "related", _layers_found(shared, len(by_layer)), len(shared) / len(by_layer), moved
        )
    equal, alike = _equal_and_alike(ours, theirs, near, SHARED_ROWS)
    if equal or alike:
        what = f"{len(equal)} of {counted(len(ours), 'tensor')} have the same values"
        more = f"{len(alike)} of {counted(len(ours), 'tensor')} are alike"
        return Part("related", what if equal else more, max(len(equal), len(alike)) / len(ours))
    widths = {fact.shape[-1] for fact in theirs}
    if not basis.known:
        return Part(
            "undecided", "not compared, since the change of the stream's basis is not known"
        )
    if not matched and not any(fact.shape[-1] in widths for fact in ours):
        return Part("undecided", "not compared, since their sizes differ")
    return _unless_doubtful(
        ours,
        theirs,
        [cosine for cosine, _ in near.values()],
        any(each.likeness.is_doubtful for each in matched.values()),
    )


def _layers_found(states: dict[int | None, Found], total: int) -> str:
    """Where networks come from, in words."""
    parts = []
    for state, times in Counter(each.state for each in states.values()).items():
        likeness = [each.likeness for each in states.values() if each.state == state]
        size = "" if state == SAME else f" (likeness {min(likeness):.2f} to {max(likeness):.2f})"
        parts.append(f"{state} in {times} of {counted(total, 'layer')}{size}")
    moved = [
        f"{layer} was {each.base_layer}"
        for layer, each in states.items()
        if each.base_layer != layer
    ]
    if 0 < len(moved) <= NAMED:
        parts.append(f"layer {', '.join(moved)} in the base")
    elif moved:
        parts.append(f"{len(moved)} of them from another layer of the base")
    return "; ".join(parts)


def _unless_doubtful(
    ours: Sequence[Facts], theirs: Sequence[Facts], cosines: Sequence[float], doubtful: bool
) -> Part:
    """Unrelated, unless something speaks against it."""
    if doubtful or max(cosines, default=0.0) >= MAYBE_SHARED:
        return Part("undecided", "more alike than strangers', but less than what is shared")
    sizes = {
        shape: np.array([f.rms for f in theirs if f.shape == shape])
        for shape in {f.shape for f in theirs}
    }
    same = [
        f
        for f in ours
        if f.shape in sizes and (np.abs(sizes[f.shape] / (f.rms or 1) - 1) < SAME_SIZE).any()
    ]
    if ours and len(same) > SAME_SIZES * len(ours):
        return Part("undecided", "matrices have equal norms, as they have after a change of basis")
    return Part("unrelated", NOTHING)


# Token embeddings


def _tokens(suspect: Model, base: Model, both: Both, basis: Basis) -> Part:
    """Equal tables, then rows of the same place, of the same token, and in any order."""
    here, there = both
    digests = {fact.digest for fact in there}
    equal = [fact for fact in here if fact.digest in digests]
    if here and len(equal) == len(here):
        return Part("related", SAME, 1.0)
    try:
        of_both = suspect.embeddings, base.embeddings
    except CheckpointError:
        return Part("absent", "not in both checkpoints")
    x, y = of_both
    if not basis.known:
        return Part(
            "undecided", "not compared, since the change of the stream's basis is not known"
        )
    if suspect.embedding_width != base.embedding_width:
        return Part("undecided", "not compared, since their widths differ")
    doubtful = False
    for how, (ids_x, ids_y) in _pairings(suspect, base, x.n_tokens, y.n_tokens):
        rows = x.rows(ids_x), y.rows(ids_y)
        if basis.rotation is not None:
            rows = rows[0], rows[1] @ basis.rotation
        match = alike_rows(*rows)
        if match.is_sure:
            same = float((rows[0] == rows[1]).all(axis=1).mean())
            what = (
                f"same values in {same:.0%} of the rows"
                if same
                else f"rows are alike (likeness {match.mean:.2f})"
            )
            return Part("related", f"{what}{how}", match.mean, bool(how))
        doubtful |= match.is_doubtful
    order = order_of_rows(x, y, basis)
    if order.is_sure:
        return Part(
            "related",
            f"the same rows in another order (likeness {order.mean:.2f})",
            order.mean,
            is_moved=True,
        )
    if equal:
        return Part(
            "related", f"{len(equal)} of {counted(len(here), 'table')} have the same values", 0.5
        )
    return _unless_doubtful(here, there, [], doubtful or order.is_doubtful)


def _pairings(
    suspect: Model, base: Model, n_here: int, n_there: int
) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    """Ids of rows that may be of one token: by their number, then by what two tokenizers call
    them.
    """
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
    common = [
        (i, b.ids[token])
        for token, i in a.ids.items()
        if i < n_here and b.ids.get(token, n_there) < n_there
    ]
    if len(common) >= ROWS // 8:
        taken = np.array(common)[evenly_spread(len(common), ROWS)]
        yield ", matched by token", (taken[:, 0], taken[:, 1])


# Norms and the rest


def _norms(both: Both, basis: Basis) -> Part:
    """By their gains: equal ones are not chance, and most of them have to be alike otherwise."""
    here, there = both
    if not here or not there:
        return Part("absent", "gains are constant, or not in both checkpoints")
    if not basis.same:
        return Part("undecided", "not compared, since the stream is in another basis")
    near = nearest(here, there)
    equal, alike = _equal_and_alike(here, there, near, SHARED_GAINS)
    of_all = f"of {counted(len(here), 'vector')}"
    if 2 * len(equal) > len(here):
        return Part("related", f"same values in {len(equal)} {of_all}", len(equal) / len(here))
    if 2 * len(alike) > len(here):
        cosines = [near[fact.name][0] for fact in alike]
        return Part(
            "related",
            f"alike in {len(alike)} {of_all} (likeness {min(cosines):.2f} to {max(cosines):.2f})",
            len(alike) / len(here),
        )
    if not {fact.shape for fact in here} & {fact.shape for fact in there}:
        return Part("undecided", "not compared, since their sizes differ")
    if equal:
        return Part("undecided", f"same values in {len(equal)} {of_all}, which may be initial ones")
    return Part("unrelated", NOTHING)


def _equal_and_alike(
    ours: Sequence[Facts],
    theirs: Sequence[Facts],
    near: Mapping[str, tuple[float, Facts]],
    least: float,
) -> tuple[list[Facts], list[Facts]]:
    """The suspect's tensors that the base has too, and those that are near enough to one of the
    base's.
    """
    contents = {fact.content for fact in theirs}
    return (
        [fact for fact in ours if fact.content in contents],
        [fact for fact in ours if fact.name in near and near[fact.name][0] >= least],
    )


def _stored(both: Both, basis: Basis) -> Part:
    """Matrices by their values as stored, and their samples."""
    here, there = both
    ours = [fact for fact in here if fact.is_matrix]
    equal, alike = _equal_and_alike(
        ours, there, nearest(ours, there) if basis.same else {}, SHARED_ROWS
    )
    shared = equal or alike
    if not shared:
        return Part("unrelated", NOTHING)
    what = "same values" if equal else "alike"
    return Part(
        "related",
        f"{what} in {len(shared)} of {counted(len(ours), 'tensor')}",
        len(shared) / len(ours),
    )

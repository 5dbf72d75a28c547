"""What has to hold of the verdicts on a pair, and between them."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from tests.properties.cases import (
    ALIKE,
    AUDIT,
    BROKEN,
    CARD,
    CLAIM,
    CONFIG,
    DERIVED,
    GROUPS,
    KEPT,
    LINEAGE,
    Case,
    changed,
)
from tests.properties.pair import NoAnswerError, Pair
from tests.properties.wide import OF_HEADS as MAPS_KEPT
from weightscope.pairs.changes.head import LIMITED
from weightscope.pairs.changes.settings import first_sentence
from weightscope.pairs.deeds.thresholds import UNMOVED
from weightscope.pairs.lineage.differences import SAME as SAME_KINDS

VALUES = {"same bytes", "same values"}
COPIES = {*VALUES, "rounded", "quantised"}
ACCEPTED = {*COPIES, "same function"}
NOTHING_LEARNED = {"none", "conversion"}
SEVERITIES = ("note", "warning", "error")
OF_HEADS = ("queries and keys", "values and outputs")


class Relation(NamedTuple):
    """Something that has to hold of a pair: true, false, or None where it says nothing of it."""

    name: str
    groups: tuple[str, ...]
    holds: Callable[[Pair], bool | None]
    asks: str = ""  # a command that takes long


def ids_equal(pair: Pair) -> bool:
    a, b = pair.ids
    return a.wsid == b.wsid


def same_labels(pair: Pair) -> bool:
    """Both configs give tensors the same roles; a tensor without one counts by its name."""
    a, b = pair.ids
    return pair.is_read and a.tensors.keys() == b.tensors.keys()


def only_values(pair: Pair) -> bool:
    """Nothing but tensors decides: configs, tokenizers and other files do not differ."""
    return not (pair.same.settings.deciding or pair.same.settings.unknown or pair.same.companions.deciding)


def kinds(pair: Pair) -> set[str]:
    return {each.kind for each in pair.lineage.kinds}


def _is_same_kind(pair: Pair) -> bool:
    return bool(kinds(pair)) and kinds(pair) <= SAME_KINDS


def _of_heads(case: Case) -> bool:
    """Only factors of heads, or their order, change, and no map of theirs."""
    return case.change in OF_HEADS or (case.change == DERIVED and {*case.places} <= MAPS_KEPT)


def _unmoved_heads(pair: Pair) -> bool | None:
    """Scores and outputs of heads do not move where only their factors do."""
    if not _of_heads(pair.case):
        return None
    changes = [values for name, values in pair.compare.from_first.items() if name in LIMITED]
    return all(float(np.max(each)) <= UNMOVED for each in changes)


def _heads_as_before(pair: Pair) -> bool | None:
    """Findings do not depend on the factors of heads."""
    return pair.findings == pair.findings_of_a if pair.case.change in OF_HEADS else None


def _card_says(pair: Pair) -> bool:
    """The card's item `original` is what `same` says."""
    expected = {"different": "failed", "undecided": "not checked"}
    return pair.items["original"] == expected.get(pair.same.verdict, "verified")


def _card_is_as_before(pair: Pair) -> bool | None:
    if pair.case.writing.prefix:
        return None  # names are looked at, too
    left_out = {"original", "lineage"} | ({"readers"} if pair.a.suffix == ".gguf" else set())  # of other containers
    mine = {item: state for item, state in pair.items.items() if item not in left_out}
    return all(pair.items_of_a[item] == state for item, state in mine.items())


def _broken_values_fail(pair: Pair) -> bool | None:
    """A matrix that is not finite, or all zero, fails the card."""
    if pair.case.change != "not a number":
        return None
    return pair.items["values"] == "failed" and any(each[1] == "error" for each in pair.findings)


def _by_identity_agrees(pair: Pair) -> bool | None:
    """Digests prove equal values, rounding and difference, and nothing that both files contradict."""
    both, one = pair.same.verdict, pair.by_identity.verdict
    allowed = {
        "same bytes": {"same values"}, "same values": {"same values"}, "rounded": {"rounded", "undecided"},
        "quantised": {"undecided"}, "same function": {"different", "undecided"},
        "different": {"different", "undecided"}, "undecided": {"undecided", "different"},
    }  # fmt: skip
    return one in allowed[both]


RELATIONS = (
    # Nothing but the container, dtype, shards, order or prefix
    Relation("same: same values", (KEPT,), lambda p: p.same.verdict in VALUES),
    Relation("id: equal", (KEPT, CONFIG), lambda p: ids_equal(p) if same_labels(p) else None),
    Relation("compare: no change", (KEPT,), lambda p: p.compare.largest_change() == 0),
    Relation("compare: config as before", (KEPT,), lambda p: not first_sentence(p.compare.settings)),
    Relation("lineage: same values", (KEPT,), _is_same_kind, LINEAGE),
    Relation("lineage: as of itself", (KEPT, ALIKE), lambda p: p.lineage.verdict == p.lineage_of_itself, LINEAGE),
    Relation("learned: nothing", (KEPT,), lambda p: p.learned in NOTHING_LEARNED),
    Relation("card: as before", (KEPT,), _card_is_as_before, CARD),
    Relation("audit: the same findings", (KEPT,), lambda p: p.findings == p.findings_of_a, AUDIT),
    # Another gauge
    Relation("same: neither different nor a copy", (ALIKE,),
             lambda p: p.same.verdict in ("same function", "undecided")),
    Relation("id: another", (ALIKE, BROKEN), lambda p: not ids_equal(p)),
    Relation("compare: heads unmoved", (ALIKE,), _unmoved_heads),
    Relation("compare: tensors changed", (BROKEN,), lambda p: p.compare.largest_change() != 0),
    Relation("audit: heads as before", (ALIKE,), _heads_as_before, AUDIT),
    # A tensor changed
    Relation("same: not accepted", (BROKEN,), lambda p: p.same.verdict not in ACCEPTED),
    Relation("lineage: not the same values", (ALIKE, BROKEN), lambda p: not _is_same_kind(p), LINEAGE),
    Relation("learned: something", (ALIKE, BROKEN), lambda p: p.learned not in NOTHING_LEARNED),
    Relation("card: broken values fail", (BROKEN,), _broken_values_fail, CARD),
    # Between commands, whatever was done
    Relation("same: both ways round", GROUPS, lambda p: p.same.verdict == p.back.verdict),
    Relation("same and id", GROUPS, lambda p: (p.same.verdict in VALUES) == ids_equal(p) if only_values(p) else None),
    Relation("same and same by identity", GROUPS, _by_identity_agrees),
    Relation("same and card", GROUPS, _card_says, CARD),
    Relation("same and compare: config", GROUPS, lambda p: bool(first_sentence(p.compare.settings))
             if p.same.settings.deciding else None),
    Relation("same and lineage", GROUPS, lambda p: p.lineage.verdict != "unrelated"
             if p.same.verdict in ACCEPTED else None, LINEAGE),
    Relation("lineage: not derived both ways", GROUPS,
             lambda p: not p.lineage.verdict == p.lineage_back.verdict == "derived", LINEAGE),
    Relation("lineage: an honest claim holds", GROUPS, lambda p: p.claim.holds, CLAIM),
    Relation("card and lineage", GROUPS, lambda p: (p.items["lineage"] == "failed")
             == (p.lineage.verdict == "unrelated" or p.lineage.came_first == "suspect"), CARD),
)  # fmt: skip


class Verdict(NamedTuple):
    """An answer that is counted."""

    name: str
    of: Callable[[Pair], str]
    asks: str = ""


VERDICTS = (
    Verdict("same", lambda p: p.same.verdict),
    Verdict("same by identity", lambda p: p.by_identity.verdict),
    Verdict("id", lambda p: "equal" if ids_equal(p) else "another"),
    Verdict("compare", lambda p: "no change" if p.compare.largest_change() == 0 else "changed"),
    Verdict("learned", lambda p: p.learned),
    Verdict("lineage", lambda p: p.lineage.verdict, LINEAGE),
    Verdict("claim", lambda p: "holds" if p.claim.holds else "does not hold", CLAIM),
    Verdict("card: original", lambda p: p.items["original"], CARD),
    Verdict("card: values", lambda p: p.items["values"], CARD),
    Verdict("card: config", lambda p: p.items["config"], CARD),
    Verdict("audit", lambda p: max((each[1] for each in p.findings), key=SEVERITIES.index, default="nothing"), AUDIT),
)


class Outcome(NamedTuple):
    """A row of the table of outcomes; a failure is one of a relation that does not hold."""

    kind: str  # "verdict" or "relation"
    name: str
    said: str


FAILS = "does not hold"


def outcomes(case: Case, relations: Iterable[Relation] = RELATIONS) -> Iterator[Outcome]:
    """What every command says of a case, and which relations hold; nothing where nothing was changed."""
    with np.errstate(all="ignore"), TemporaryDirectory() as folder:
        copy = changed(case)
        if copy is None:
            return
        pair = Pair(case, copy, Path(folder))
        for relation in relations:
            if case.group in relation.groups and _is_asked(case, relation.asks):
                yield Outcome("relation", relation.name, _held(relation, pair))
        for verdict in VERDICTS:
            if _is_asked(case, verdict.asks):
                try:
                    yield Outcome("verdict", verdict.name, verdict.of(pair))
                except NoAnswerError:
                    yield Outcome("verdict", verdict.name, "refused")
                except Exception:
                    yield Outcome("verdict", verdict.name, "raised")


def _is_asked(case: Case, command: str) -> bool:
    return not (case.asks and command) or case.asks == command


def _held(relation: Relation, pair: Pair) -> str:
    try:
        held = relation.holds(pair)
    except NoAnswerError as refused:
        return f"{FAILS}: {refused}" if pair.case.group == KEPT and pair.has_heads else "refused"
    except Exception as error:  # a traceback is a fault, and does not stop the run
        return f"{FAILS}: {type(error).__name__}: {error}"
    return {True: "holds", False: FAILS, None: "says nothing"}[held]


def failures(case: Case) -> list[str]:
    """The relations that do not hold."""
    return [each.name for each in outcomes(case) if each.kind == "relation" and each.said.startswith(FAILS)]


def counted(found: Iterable[tuple[Case, Outcome]]) -> Counter[tuple[str, ...]]:
    """Outcomes by group."""
    return Counter((each.kind, each.name, case.group, each.said.partition(":")[0]) for case, each in found)

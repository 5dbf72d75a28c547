"""Sentences of a comparison: names of the checkpoints, and what was done to tensors."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.core.errors import counted, printable
from weightscope.model.model import Model, TensorsOnly
from weightscope.pairs.deeds.deed import was
from weightscope.pairs.same import QUANTISED, ROUNDED
from weightscope.pairs.same.judge import Judged

Readable = Model | TensorsOnly
NAMED = 3  # tensors, keys or kinds that a sentence names
DIGEST = 12  # hexadecimal digits of a digest that are shown


def short_names(a: Readable, b: Readable) -> tuple[str, str]:
    """Names for two checkpoints: Hub ids, or ends of paths just long enough to differ."""
    names, places = (a.name, b.name), [_place(each) for each in (a, b)]
    if all(each is None for each in places):
        return names
    parts = [
        place.parts[1:] if place else (name,) for name, place in zip(names, places, strict=True)
    ]
    lengths = range(1, 1 + max(map(len, parts)))
    pairs = (("/".join(parts[0][-length:]), "/".join(parts[1][-length:])) for length in lengths)
    return next(
        (pair for pair in pairs if pair[0] != pair[1]), (Path(a.name).name, Path(b.name).name)
    )


def _place(model: Readable) -> Path | None:
    """The path of a checkpoint on this machine; None of one with a name of its own."""
    called, given = "", model.checkpoint.given
    if isinstance(model, Model):
        called, given = model.called, model.source
    path = Path(given).expanduser() if given else None
    return path.resolve() if path is not None and not called and path.exists() else None


def is_one(a: str, b: str) -> str:
    """The beginning of a sentence that B is A: `b is a`, or a name for both."""
    return f"{printable(b)} is {printable(a)}" if a != b else f"A and B are both {printable(a)}"


def joined(parts: Sequence[str], shown: int = NAMED) -> str:
    """`a`, `a and b`, `a, b and c`, `a, b, c and 3 more`."""
    named = list(parts[:shown])
    last = ""
    if len(parts) > shown:
        last = f"{len(parts) - shown:,} more"
    elif len(named) > 1:
        last = named.pop()
    return f"{', '.join(named)} and {last}" if last else ", ".join(named)


def _by_letter(a: str, b: str) -> dict[str, str]:
    return {"A": printable(a), "B": printable(b)} if a != b else {"A": "A", "B": "B"}


def coarser(a: str, b: str, verdict: str, tensors: Sequence[Judged]) -> str:
    """The beginning of a sentence on what was rounded or quantised: `b is a, rounded`."""
    made = {each.done.made for each in tensors if each.verdict in (ROUNDED, QUANTISED)}
    names = _by_letter(a, b)
    if len(made) > 1:
        return f"{names['B']} is {names['A']}, {verdict} in part"
    newer, older = ("A", "B") if made == {"A"} else ("B", "A")
    return f"{names[newer]} is {names[older]}, {verdict}"


def coarser_lead(a: str, b: str, verdict: str, tensors: Sequence[Judged], same: int) -> str:
    """The first sentence on what was rounded or quantised, and in which of two checkpoints."""
    rewritten = (each.done for each in tensors if each.verdict in (ROUNDED, QUANTISED))
    deeds = Counter((done.made, was(done)) for done in rewritten)
    first = coarser(a, b, verdict, tensors)
    both_made = len({made for made, _ in deeds}) > 1
    names = _by_letter(a, b)
    whose = {letter: f" of {names[letter]}" if both_made else "" for letter in "AB"}
    total = len(tensors)
    if len(deeds) == 1 and deeds.total() == total:
        ((_, words),) = deeds
        every = "The one tensor was" if total == 1 else f"All {total:,} tensors were"
        return f"{first}. {every} {words}."
    parts = [
        f"{number:,}{whose[made]} {'was' if number == 1 else 'were'} {words}"
        for (made, words), number in deeds.most_common()
    ]
    rest = [f"{same:,} {'has' if same == 1 else 'have'} the same values"] if same else []
    return f"{first}. Of {counted(total, 'tensor')}, {joined(parts + rest, NAMED + len(rest))}."


def function_lead(
    a: str, b: str, tensors: Sequence[Judged], changed: Sequence[str], where: str
) -> str:
    """A sentence on changes without effect: the deeds of tensors that make up for each other."""
    what = joined([*dict.fromkeys(changed)])
    begins = (
        f"{printable(b)} computes what {printable(a)} does" if a != b else "B computes what A does"
    )
    return (
        f"{begins}, with {what} in {len(changed):,} of {counted(len(tensors), 'tensor')}: {where}."
    )


def differing_part(differing: Sequence[Judged], total: int) -> str:
    """A sentence on the number of tensors that differ, their deeds and the worst."""
    worst, kinds = differing[0], Counter(each.deed for each in differing)
    if len(differing) == 1:
        detail = f" ({worst.detail})" if worst.detail else ""
        return f"1 of {counted(total, 'tensor')} differs: {worst.name} by '{worst.deed}'{detail}"
    count = f"{len(differing):,} of {counted(total, 'tensor')} differ"
    if len(kinds) == 1:
        return f"{count}, all by '{worst.deed}'; the worst is {worst.name}"
    named = joined([f"{number:,} by '{deed}'" for deed, number in kinds.most_common()])
    return f"{count}, {named}; the worst is {worst.name}, by '{worst.deed}'"


def digests_of(checkpoint: Checkpoint, letter: str) -> str:
    """The known digests of a checkpoint's weight files, as a line; empty if there are none."""
    known = [f"{file.path.name} {file.sha256[:DIGEST]}" for file in checkpoint.files if file.sha256]
    return f"SHA-256 of {letter}: {joined([*map(printable, known)])}." if known else ""

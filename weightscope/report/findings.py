"""Findings: their kinds with a severity, one `Finding`, and a list of findings."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from itertools import groupby
from math import inf, log
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np

from weightscope.core.errors import CheckpointError, counted, nearest, printable
from weightscope.core.results import notebook, questions
from weightscope.core.tables import Table, as_json, column, templates

SEVERITIES = ("error", "warning", "note")  # the most severe first
SHOWN = 12  # findings on a terminal
MOST_OPEN = 12  # findings of a kind that a page shows without a click


class Tried(NamedTuple):
    """Record of a kind of finding: in real checkpoints, with the fault planted and as they are."""

    planted: int  # checkpoints
    found: int  # checkpoints among these
    healthy: int  # checkpoints without the fault; it was found in none

    def __str__(self) -> str:
        planted = f"Planted in {self.planted} real checkpoints it was found in {self.found}"
        return f"{planted}; in {self.healthy} healthy ones never."


Reporter = TypeVar("Reporter", bound=Callable[..., Any])


@dataclass(frozen=True)
class FindingKind:
    """A kind of finding, as `finding` registers it; called, it makes a finding of this kind."""

    name: str
    title: str
    look_next: str
    severity: str
    rank: int

    @property
    def place(self) -> tuple[int, int, str]:
        """Sort key of kinds, the most severe first."""
        return SEVERITIES.index(self.severity), self.rank, self.name

    @overload
    def __call__(self, reporter: Reporter, /) -> Reporter: ...

    @overload
    def __call__(self, /, **about: Any) -> "Finding": ...

    def __call__(self, reporter: Any = None, /, **about: Any) -> Any:
        """A finding of this kind with these fields; as a decorator, `reporter` itself."""
        return Finding(kind=self.name, **about) if reporter is None else reporter

    def of_head(self, layer: int, head: int, *, number: float, **about: Any) -> "Finding":
        """A finding of this kind about one head of a layer."""
        return of_head(layer, head, number=number, kind=self.name, **about)


LAST = 1000  # rank of a kind that has none of its own
_registered: dict[str, FindingKind] = {}


def finding(
    name: str,
    title: str,
    *,
    look_next: str,
    severity: str = "note",
    rank: int = LAST,
    tried: Tried | None = None,
) -> FindingKind:
    """Register a kind of finding above the function that reports it, as a name or as a decorator.

    Parameters
    ----------
    name : str
        Its name in findings.csv.
    title : str
        Its name for people.
    look_next : str
        Advice on what to look at next.
    severity : {"note", "warning", "error"}
        An error is broken, a warning is rarely intended, a note is worth knowing and common in
        trained models.
    rank : int
        Place among the kinds of its severity: the lowest first; kinds of one rank by name.
    tried : Tried, optional
        How often it was right, which follows what to look at next.

    Returns
    -------
    FindingKind
        Called with the fields of a `Finding`, it makes one of this kind.

    Examples
    --------
    >>> zero_head = kind_of("zero_head")
    >>> zero_head.title, zero_head.severity
    ('zero head', 'warning')
    >>> zero_head(layer=0, measure="frobenius", number=0.0, usual=1.0, text="It is zero.").kind
    'zero_head'
    """
    kind = FindingKind(name, title, f"{look_next} {tried or ''}".rstrip(), severity, rank)
    if severity not in SEVERITIES or _registered.setdefault(name, kind) != kind:
        raise ValueError(f"{kind} is registered already, or has an unknown severity")
    return kind


def finding_kinds() -> dict[str, FindingKind]:
    """Import and return every kind of finding by its name, the most severe first."""
    for question in questions():
        for module in getattr(question, "FINDINGS", ()):
            import_module(f"{question.__name__}.{module}")
    return {kind.name: kind for kind in sorted(_registered.values(), key=lambda kind: kind.place)}


def kind_of(name: str) -> FindingKind:
    """The kind of this name; other rooms are imported only where it is not registered yet."""
    return _registered.get(name) or finding_kinds()[name]


@dataclass(frozen=True)
class Member:
    """One of the heads, layers, rows, dimensions or tensors that a finding is about."""

    what: str  # "head", "layer", "dimension", "token", "position", "row", "tensor"
    index: int | None  # index of the head, layer, dimension or row; None for a tensor
    layer: int | None = None  # where it differs from the finding's
    name: str = ""  # a token's text, a head's role, a tensor's name
    number: float | None = None  # its own value of the finding's measure


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something in a checkpoint that a person should look at."""

    kind: str  # the name that `finding` registers
    layer: int | None = None  # None where it concerns several layers or the whole model
    head: int | None = None  # None where it concerns several heads or a whole layer
    map: str | None = None  # "qk" or "vo"
    measure: str  # the measure that `number` is of
    number: float  # the value that made it a finding; of several members, the most extreme
    usual: float | None = None  # the same measure in the rest of the checkpoint
    text: str  # the finding in a sentence
    members: tuple[Member, ...] = ()  # everything that it is about
    known: str = ""  # why it fails no gate: it is in a baseline, or somebody has accepted it

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, np.generic):  # a number of Python's compares, pickles and prints
                object.__setattr__(self, name, value.item())

    @property
    def title(self) -> str:
        """The title of its kind."""
        return kind_of(self.kind).title

    @property
    def look_next(self) -> str:
        """Advice on what to look at next."""
        return kind_of(self.kind).look_next

    @property
    def severity(self) -> str:
        """Severity of its kind, one of `SEVERITIES`."""
        return kind_of(self.kind).severity

    @property
    def items(self) -> tuple[int, ...]:
        """The indices of its members that have one."""
        return tuple(member.index for member in self.members if member.index is not None)

    @property
    def heads(self) -> list[int]:
        """Heads of its layer that it is about; empty for a whole layer or something else."""
        of_layer = [m for m in self.members if m.what == "head" and m.layer is None]
        return [member.index for member in of_layer if member.index is not None]

    @property
    def whole_layers(self) -> dict[int, float]:
        """Its number in each layer that it is about as a whole; empty of heads and tensors."""
        if any(member.what in ("head", "tensor") for member in self.members):
            return {}
        numbers = {m.layer: m.number for m in self.members if m.layer is not None}
        if not numbers and self.layer is not None:
            return {self.layer: self.number}
        return {layer: number for layer, number in numbers.items() if number is not None}

    @property
    def where(self) -> str:
        """`layer 3 head 7 (induction) qk`, or as much of it as is known."""
        parts = [] if self.layer is None else [f"layer {self.layer}"]
        heads = self.heads if self.head is None else [self.head]
        if heads:
            of_layer = [m for m in self.members if m.what == "head" and m.layer is None]
            named = [member for member in of_layer if member.name and member.index in heads]
            roles = [f"{member.index}: {member.name}" for member in named]
            if len(heads) == 1:
                roles = [member.name for member in named]
            parts.append(indexed("head", heads) + (f" ({', '.join(roles)})" if roles else ""))
        return " ".join(filter(None, [*parts, self.map])) or "model"

    def __str__(self) -> str:
        known = f" [{self.known}]" if self.known else ""
        place = f"{self.severity:7s}  {self.title:30s} {self.where:22s}"
        return printable(f"{place} {self.text}{known}")

    def as_json(self) -> dict[str, Any]:
        """Its entry in findings.json; NaN as null, infinities as text."""
        derived = ("severity", "title", "look_next", "items")
        about = asdict(self) | {name: getattr(self, name) for name in derived}
        plain: dict[str, Any] = as_json(about)
        return plain


class MemberRow(NamedTuple):
    """A member of a finding, as a row of findings.csv."""

    finding: int = column("Number of the finding; it has one row per member.")
    severity: str = column()
    kind: str = column()
    layer: int | None = column()
    head: int | None = column()
    map: str | None = column("qk or vo.")
    item: str = column(
        "What this row is about: a head, a dimension, a token, a position, a tensor."
    )
    index: int | None = column("Of the head, the dimension or the row.")  # type: ignore[assignment]
    name: str = column("The token, the role or the tensor.")
    measure: str = column("What the number is.")
    number: float = column()
    usual: float | None = column("What it is in the rest of the checkpoint.")
    text: str = column("The finding in a sentence.")
    known: str = column(
        "Why it fails no gate: it is in the baseline, or accepted. Empty for any other."
    )


class Findings(list[Finding]):
    """Findings, the most severe kind first, then by layer and head.

    Parameters
    ----------
    findings : iterable of Finding
        In any order.
    """

    def __init__(self, findings: Iterable[Finding] = ()) -> None:
        def place(finding: Finding) -> tuple[Any, ...]:
            layer = inf if finding.layer is None else finding.layer
            head = inf if finding.head is None else finding.head
            return kind_of(finding.kind).place, layer, head

        super().__init__(sorted(findings, key=place))

    def __repr__(self) -> str:
        more = [f"and {len(self) - SHOWN} more"] if len(self) > SHOWN else []
        return "\n".join([*map(str, self[:SHOWN]), *more]) or "no findings"

    def _repr_html_(self) -> str:
        if not self:
            return notebook("no findings")
        rows = [(finding.severity, finding.title, finding.where, finding.text) for finding in self]
        return Table.of_rows(("severity", "finding", "where", "what"), rows)._repr_html_()

    def html(
        self, buttons: bool = False, percentile: Callable[[Finding], str] = lambda finding: ""
    ) -> str:
        """Findings by kind, for a page; `buttons` if it has a panel for heads."""
        kinds = [list(findings) for _, findings in groupby(self, key=lambda finding: finding.kind)]
        template = templates().get_template("findings.html")
        options = {"most_open": MOST_OPEN, "buttons": buttons, "percentile": percentile}
        return template.render(kinds=kinds, **options)

    @property
    def kinds(self) -> Counter[str]:
        """Number of findings of each kind."""
        return Counter(finding.kind for finding in self)

    @property
    def severities(self) -> dict[str, int]:
        """Number of findings of each severity, zeros included."""
        counts = Counter(finding.severity for finding in self)
        return {severity: counts[severity] for severity in SEVERITIES}

    @property
    def verdict(self) -> str:
        """Number of findings of each severity: `No errors or warnings; 2 notes`."""
        if not self:
            return "No findings"
        *severe, notes = ((n, counted(n, name)) for name, n in self.severities.items())
        parts = [" and ".join(words for n, words in severe if n) or "No errors or warnings"]
        parts += [notes[1]] if notes[0] else []
        known = sum(bool(finding.known) for finding in self)
        return "; ".join(parts + [f"{known} of them known"] * bool(known))

    @property
    def headline(self) -> str:
        """The verdict, and the number of findings of each kind, in a sentence."""
        kinds = ", ".join(f"{n} × {kind_of(name).title}" for name, n in self.kinds.items())
        return f"{self.verdict} ({kinds})." if kinds else f"{self.verdict}."

    @property
    def table(self) -> Table:
        """One row per member of each finding; its csv() is findings.csv."""
        rows = []
        for number, f in enumerate(self, 1):
            for member in f.members or (Member("", None),):
                layer = f.layer if member.layer is None else member.layer
                head = member.index if member.what == "head" else f.head
                value = f.number if member.number is None else member.number
                row = MemberRow(
                    finding=number,
                    severity=f.severity,
                    kind=f.kind,
                    layer=layer,
                    head=head,
                    map=f.map,
                    item=member.what,
                    index=member.index,
                    name=member.name,
                    measure=f.measure,
                    number=value,
                    usual=f.usual,
                    text=f.text,
                    known=f.known,
                )
                rows.append(MemberRow._make("" if cell is None else cell for cell in row))
        return Table.of(MemberRow, rows)

    def as_json(self) -> list[dict[str, Any]]:
        """The content of findings.json."""
        return [finding.as_json() for finding in self]

    def that_fail(self, limits: Collection[str]) -> "Findings":
        """Unknown findings of a kind in `limits`, or as severe as a severity in it."""
        new = (finding for finding in self if not finding.known)
        return Findings(finding for finding in new if fails(finding.kind, limits))


def fails(kind: str, limits: Collection[str]) -> bool:
    """True if `limits` name this kind, its severity or a milder one: warning includes errors."""
    milder = SEVERITIES[SEVERITIES.index(kind_of(kind).severity) :]
    return kind in limits or any(limit in milder for limit in limits)


def checked_limits(limits: Iterable[str]) -> tuple[str, ...]:
    """The limits that findings fail on; an error where one is neither a severity nor a kind."""
    limits, kinds = tuple(limits), finding_kinds()
    for limit in limits:
        if limit not in {*SEVERITIES, *kinds}:
            known = f"{', '.join(SEVERITIES)}, or a kind of finding: {', '.join(kinds)}"
            near = nearest(limit, (*SEVERITIES, *kinds))
            raise CheckpointError(f"`fail_on` is {limit!r}; it is {known}{near}")
    return limits


def of_head(layer: int, head: int, *, number: float, **about: Any) -> Finding:
    """A finding about one head of a layer."""
    members = (Member("head", head, number=float(number)),)
    return Finding(layer=layer, head=head, number=number, members=members, **about)


def heads_and_tensors(heads: Collection[int], tensors: Iterable[str] = ()) -> dict[str, Any]:
    """The `head` and `members` of a finding about some heads of its layer and some tensors."""
    members = [Member("head", head) for head in heads]
    members += [Member("tensor", None, name=name) for name in tensors]
    only_head = next(iter(heads)) if len(heads) == 1 else None
    return {"head": only_head, "members": tuple(members)}


def aggregated(findings: Iterable[Finding], n_heads: int) -> Iterator[Finding]:
    """Findings of single heads, joined where heads of one layer have the same fault."""
    faults: dict[tuple[Any, ...], list[Finding]] = {}
    for finding in findings:
        fault = (finding.kind, finding.layer, finding.map, finding.measure)
        faults.setdefault(fault, []).append(finding)
    for same_fault in faults.values():
        farthest = max(same_fault, key=lambda finding: (_distance(finding), finding.number))
        if len(same_fault) > 1:
            members = tuple(member for finding in same_fault for member in finding.members)
            heads = spans(member.index for member in members if member.index is not None)
            which = f"{len(same_fault)} of {n_heads} heads ({heads})"
            text = f"{which}, the farthest head {farthest.head}: {farthest.text}"
            farthest = replace(farthest, head=None, text=text, members=members)
        yield farthest


def _distance(finding: Finding) -> float:
    """Ratio of a number to the usual one, or of that to it, as a logarithm."""
    ratio = finding.number / finding.usual if finding.usual else 0.0
    return abs(log(ratio)) if ratio > 0 else inf  # NaN is farthest too


def indexed(noun: str, indices: Collection[int]) -> str:
    """`head 7`, `heads 0-3, 7`."""
    return f"{noun}{'' if len(indices) == 1 else 's'} {spans(indices)}"


def spans(indices: Iterable[int]) -> str:
    """`0-3, 7` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for index in sorted(set(indices)):
        if runs and index == runs[-1][-1] + 1:
            runs[-1][1:] = [index]
        else:
            runs.append([index])
    return ", ".join("-".join(map(str, run)) for run in runs)


def listed(names: Sequence[str], shown: int) -> str:
    """The first few names, for a sentence: `a, b and 3 more`."""
    more = f" and {len(names) - shown:,} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more

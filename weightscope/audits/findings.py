"""What stands out in a checkpoint: the kinds of findings, how grave each is, and their list."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from math import inf, log
from typing import Any

from weightscope.audits.kinds import KINDS, SEVERITIES
from weightscope.errors import CheckpointError, counted, nearest, printable
from weightscope.notebook import notebook
from weightscope.tables import Column, Table, as_json, templates

SHOWN = 12  # findings on a terminal
MOST_OPEN = 12  # findings of a kind that a page shows without a click


@dataclass(frozen=True)
class Member:
    """One of the things that a finding is of.

    Attributes
    ----------
    what : str
        "head", "layer", "dimension", "token", "position", "tensor".
    index : int or None
        Of the head, the layer, the dimension or the row; None for a tensor.
    layer : int or None
        None where that of the finding holds, or none does.
    name : str
        What people call it, where it has a name: a token's text, a head's role, a tensor's name.
    number : float or None
        Its own value of the finding's measure.
    """

    what: str
    index: int | None
    layer: int | None = None
    name: str = ""
    number: float | None = None


@dataclass(frozen=True)
class Finding:
    """Something in a checkpoint that a person should look at.

    Attributes
    ----------
    kind : str
        A key of `KINDS`.
    layer, head : int or None
        Where; None where it concerns several, a whole layer or the model.
    map : str or None
        "qk" or "vo".
    measure : str
        What `number` is.
    number : float
        The value that made it a finding; of several members the farthest one's.
    usual : float or None
        What it is in the rest of the checkpoint.
    text : str
        The finding in a sentence.
    members : tuple of Member
        All the heads, dimensions, rows or tensors that it is of.
    """

    kind: str
    layer: int | None
    head: int | None
    map: str | None
    measure: str
    number: float
    usual: float | None
    text: str
    members: tuple[Member, ...] = ()

    @property
    def title(self) -> str:
        """What its kind is called."""
        return KINDS[self.kind].title

    @property
    def look_next(self) -> str:
        """What to look at next."""
        return KINDS[self.kind].look_next

    @property
    def severity(self) -> str:
        """How grave its kind is, one of `SEVERITIES`."""
        return KINDS[self.kind].severity

    @property
    def items(self) -> tuple[int, ...]:
        """The indices of its members that have one."""
        return tuple(member.index for member in self.members if member.index is not None)

    @property
    def heads(self) -> list[int]:
        """The heads of its layer that it is of; none where it is of the whole layer or of something else."""
        return [one.index for one in self.members if one.what == "head" and one.index is not None and one.layer is None]

    @property
    def where(self) -> str:
        """`layer 3 head 7 (induction) qk`, as far as it is known."""
        parts = [] if self.layer is None else [f"layer {self.layer}"]
        heads = self.heads if self.head is None else [self.head]
        if heads:
            own = [one for one in self.members if one.what == "head" and one.name]
            roles = [one.name if len(heads) == 1 else f"{one.index}: {one.name}" for one in own]
            parts.append(indexed("head", heads) + (f" ({', '.join(roles)})" if roles else ""))
        return " ".join([*parts, *([self.map] if self.map else [])]) or "model"

    def __str__(self) -> str:
        return printable(f"{self.severity:7s}  {self.title:30s} {self.where:22s} {self.text}")

    def as_json(self) -> dict[str, Any]:
        """As findings.json has it; NaN as null, infinities as text."""
        more = ("severity", "title", "look_next", "items")
        plain: dict[str, Any] = as_json(asdict(self) | {name: getattr(self, name) for name in more})
        return plain


class Findings(list[Finding]):
    """Findings, the gravest kind first, then by layer and head.

    Parameters
    ----------
    findings : iterable of Finding
        In any order.
    """

    def __init__(self, findings: Iterable[Finding] = ()) -> None:
        ranks, last = list(KINDS), float("inf")

        def place(finding: Finding) -> tuple[float, ...]:
            layer, head = (last if index is None else index for index in (finding.layer, finding.head))
            return SEVERITIES.index(finding.severity), ranks.index(finding.kind), layer, head

        super().__init__(sorted(findings, key=place))

    def __repr__(self) -> str:
        more = [f"and {len(self) - SHOWN} more"] if len(self) > SHOWN else []
        return "\n".join([*map(str, self[:SHOWN]), *more]) or "no findings"

    def _repr_html_(self) -> str:
        if not self:
            return notebook("no findings")
        rows = [(finding.severity, finding.title, finding.where, finding.text) for finding in self]
        return Table.of_rows(("severity", "finding", "where", "what"), rows)._repr_html_()

    def html(self, buttons: bool = False, stands: Callable[[Finding], str] = lambda finding: "") -> str:
        """The findings by kind, as a page shows them.

        With buttons where it has a panel for heads, and with what `stands` says of a finding's number beside others.
        """
        kinds = [list(own) for _, own in groupby(self, key=lambda finding: finding.kind)]
        template = templates().get_template("findings.html")
        return template.render(kinds=kinds, most_open=MOST_OPEN, buttons=buttons, stands=stands)

    @property
    def kinds(self) -> Counter[str]:
        """How many findings there are of each kind."""
        return Counter(finding.kind for finding in self)

    @property
    def severities(self) -> dict[str, int]:
        """How many findings there are of each severity, zeros included."""
        counts = Counter(finding.severity for finding in self)
        return {severity: counts[severity] for severity in SEVERITIES}

    @property
    def headline(self) -> str:
        """How many there are of each severity and kind, in a sentence."""
        if not self:
            return "No findings."
        parts = []
        for severity, count in self.severities.items():
            kinds = [f"{n} × {KINDS[kind].title}" for kind, n in self.kinds.items() if KINDS[kind].severity == severity]
            if kinds:
                parts.append(f"{counted(count, severity)} ({', '.join(kinds)})")
        return f"Findings: {', '.join(parts)}."

    @property
    def table(self) -> Table:
        """A row for everything that a finding is of, which is findings.csv; `finding` numbers the findings."""
        rows = [
            (number, one.severity, one.kind, one.layer if of.layer is None else of.layer,
             of.index if of.what == "head" else one.head, one.map, of.what, of.index, of.name, one.measure,
             one.number if of.number is None else of.number, one.usual, one.text)
            for number, one in enumerate(self, 1)
            for of in one.members or (Member("", None),)
        ]  # fmt: skip
        return Table.of_rows(COLUMNS, [["" if cell is None else cell for cell in row] for row in rows])

    def as_json(self) -> list[dict[str, Any]]:
        """What findings.json holds."""
        return [finding.as_json() for finding in self]

    def that_fail(self, limits: Collection[str]) -> "Findings":
        """Those of the kinds in `limits`, and those as grave as a severity in it or graver."""
        return Findings(finding for finding in self if fails(finding.kind, limits))


COLUMNS = (
    Column("finding", meaning="Its number: rows with the same one are one finding."),
    Column("severity"),
    Column("kind"),
    Column("layer"),
    Column("head"),
    Column("map", meaning="qk or vo."),
    Column("item", meaning="What this row is of: a head, a dimension, a token, a position, a tensor."),
    Column("index", meaning="Of the head, the dimension or the row."),
    Column("name", meaning="The token, the role or the tensor."),
    Column("measure", meaning="What the number is."),
    Column("number"),
    Column("usual", meaning="What it is in the rest of the checkpoint."),
    Column("text", meaning="The finding in a sentence."),
)


def fails(kind: str, limits: Collection[str]) -> bool:
    """A finding of this kind is among `limits`, by its kind or by its severity: a limit of warning includes errors."""
    severity = KINDS[kind].severity
    return kind in limits or any(limit in SEVERITIES[SEVERITIES.index(severity) :] for limit in limits)


def checked_limits(limits: Iterable[str]) -> tuple[str, ...]:
    """What findings fail on, once it is known that each is a severity or a kind.

    Raises
    ------
    CheckpointError
        One is neither.
    """
    limits = tuple(limits)
    for limit in limits:
        if limit not in {*SEVERITIES, *KINDS}:
            known = f"{', '.join(SEVERITIES)}, or a kind of finding: {', '.join(KINDS)}"
            near = nearest(limit, (*SEVERITIES, *KINDS))
            raise CheckpointError(f"`fail_on` is {limit!r}; it is {known}{near}")
    return limits


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


def aggregated(findings: Iterable[Finding], n_heads: int) -> Iterator[Finding]:
    """Findings of single heads, those of one layer for one reason as one with the list of its heads."""
    reasons: dict[tuple[Any, ...], list[Finding]] = {}
    for finding in findings:
        reasons.setdefault((finding.kind, finding.layer, finding.map, finding.measure), []).append(finding)
    for (kind, layer, name, measure), own in reasons.items():
        farthest = max(own, key=_distance)
        if len(own) == 1:
            yield farthest
            continue
        members = tuple(member for one in own for member in one.members)
        heads = spans(member.index for member in members if member.index is not None)
        text = f"{len(own)} of {n_heads} heads ({heads}), the farthest head {farthest.head}: {farthest.text}"
        yield Finding(kind, layer, None, name, measure, farthest.number, farthest.usual, text, members)


def _distance(finding: Finding) -> float:
    """How far a number is from what is usual, as a factor."""
    if finding.number <= 0 or not finding.usual:
        return inf
    return abs(log(finding.number / finding.usual))

"""What stands out in a checkpoint: the kinds of findings with their severity, one `Finding`, and the list of them."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from math import inf, log
from typing import Any, NamedTuple

from weightscope.errors import CheckpointError, counted, nearest, printable
from weightscope.results import notebook
from weightscope.tables import Column, Table, as_json, templates

SEVERITIES = ("error", "warning", "note")  # the most severe first
SHOWN = 12  # findings on a terminal
MOST_OPEN = 12  # findings of a kind that a page shows without a click


class Kind(NamedTuple):
    """A kind of finding."""

    title: str
    look_next: str  # what to look at next
    # An error is broken, a warning is rarely intended, a note is worth knowing and common in trained models.
    severity: str = "note"


# The most severe first.
KINDS: dict[str, Kind] = {
    "not_finite": Kind(
        "weights that are not finite",
        "Read the tensor again from its source; if it is the same there, the training run or the conversion broke it.",
        "error",
    ),
    "overflow": Kind(
        "weights that overflow",
        "Read the tensor again from its source; if it is the same there, the run diverged or a scale is wrong.",
        "error",
    ),
    "zero_head": Kind(
        "zero head",
        "Check whether the head was pruned on purpose; if not, compare with the checkpoint before it.",
        "warning",
    ),
    "near_dead_head": Kind(
        "near-dead head",
        "Zero the head and measure the loss: it may be pruned, or its learning rate was too small.",
        "warning",
    ),
    "rank_collapsed": Kind(
        "rank-collapsed head",
        "Look at its spectrum in the report and at the singular values of its two factors: which one collapsed?",
        "warning",
    ),
    "transposed_factors": Kind(
        "factor transposed",
        "Check the conversion: transpose the tensor, and measure the loss of both.",
        "warning",
    ),
    "swapped_factors": Kind(
        "two factors swapped",
        "Check the conversion: swap the two tensors back, and measure the loss of both.",
        "warning",
    ),
    "mixed_factors": Kind(
        "factors that do not belong together",
        "Check the conversion: some of its tensors may be those of another layer, or of another checkpoint.",
        "warning",
    ),
    "untrained_layer": Kind(
        "layer as initialised",
        "Check whether the layer was added or reset on purpose, and whether it was trained since.",
        "warning",
    ),
    "unbalanced_factors": Kind(
        "factor off its partner's scale",
        "Compare both tensors with an earlier checkpoint: a scale may have been applied to one alone.",
        "warning",
    ),
    "large_bias": Kind(
        "bias out of proportion",
        "Read the tensor again from its source; compare it with the same bias of other layers.",
        "warning",
    ),
    "noise_floor": Kind(
        "layer with a noise floor",
        "Compare the layer with an earlier checkpoint, and check how it was quantised or merged.",
        "warning",
    ),
    "zero_tensor": Kind(
        "tensor of zeros",
        "Check whether this is intended: a conversion that skipped the tensor leaves zeros too.",
        "warning",
    ),
    "out_of_scale": Kind(
        "tensor out of scale",
        "Read the tensor again from its source, and compare it with an earlier checkpoint: an exponent may be wrong.",
        "warning",
    ),
    "duplicate_layers": Kind(
        "layers with the same tensors",
        "Check whether the layers were copied on purpose, to make a model deeper; if so, expect them to do the same.",
        "warning",
    ),
    "tensor_missing": Kind(
        "tensors that one checkpoint lacks",
        "Check that both were saved completely: tied weights may be left out, others may have been lost.",
        "warning",
    ),
    "odd_dtype": Kind(
        "unexpected dtype",
        "Check how the checkpoint was saved: one tensor kept in another precision is often a slip.",
        "warning",
    ),
    "duplicate_heads": Kind(
        "duplicate heads",
        "Compare the two heads' attention on text; copied layers and unbroken symmetry look like this.",
        "warning",
    ),
    "copied_layer": Kind(
        "layer that became a copy of another",
        "Check whether the layers were repeated on purpose; if not, the export or the merge wrote one twice.",
        "warning",
    ),
    "swapped_layers": Kind(
        "layers in another order",
        "Check the export: put the layers back in order, and measure the loss of both.",
        "warning",
    ),
    "removed_direction": Kind(
        "one direction removed",
        "See which tokens lie along the direction: removing one is how refusals or a style are edited out of a model.",
        "warning",
    ),
    "shared_direction": Kind(
        "changes along one direction",
        "See which tokens lie along the direction: one edit was made in several places.",
        "warning",
    ),
    "other_weights": Kind(
        "transformers loads other weights",
        "Move the files that are not meant to another folder, or name the file that is meant.",
        "warning",
    ),
    "other_computation": Kind(
        "config that computes something else",
        "Check each key: with the same weights, another value gives other attention or other logits.",
        "warning",
    ),
    "different_families": Kind(
        "checkpoints of different families",
        "Check that comparing these heads makes sense: norms, positions and biases may enter them differently.",
        "warning",
    ),
    "weights_beside": Kind(
        "weight files that were not read",
        "Name one of them to read it; move those that are not meant to another folder.",
    ),
    "alike_heads": Kind(
        "heads with nearly the same spaces",
        "Compare the two heads' attention on text: their spaces are alike, their maps are not.",
    ),
    "low_rank_heads": Kind(
        "heads of low rank",
        "Usual in the first layer of decoders; compare with another checkpoint of the same architecture.",
    ),
    "other_head": Kind(
        "another head on top",
        "Usual where a language model was tuned for another task; if the head was to stay, it was lost on the way.",
    ),
    "permuted_heads": Kind(
        "permuted heads",
        "The layer computes the same; undo the permutation before you average, merge or subtract weights.",
    ),
    "moved_most": Kind(
        "head that moved beyond the others",
        "Compare its spectra before and after, and the tokens along its first directions in the two audits.",
    ),
    "unmoved_layers": Kind(
        "layers that did not move",
        "Check that they were frozen on purpose.",
    ),
    "spectral_spike": Kind(
        "spectral spike",
        "A sink candidate: see which tokens lie along its first direction, then measure its attention on text.",
    ),
    "outlier_head": Kind(
        "head outside the distribution",
        "Compare its spectrum with its layer's other heads, and with the same head at another training step.",
    ),
    "layer_off_trend": Kind(
        "layer off the trend",
        "Compare the layer with its neighbours: another scale here means another norm gain, learning rate or merge.",
    ),
    "norm_off_role": Kind(
        "tensor off its role's norms",
        "Compare it with the same tensor of neighbouring layers, and with an earlier checkpoint.",
    ),
    "duplicate_tensors": Kind(
        "tensors with the same values",
        "Tied weights are meant to be equal, and buffers often are; other copies waste memory.",
    ),
    "constant_rows": Kind(
        "rows of one value",
        "See what the rows are for: padding, tokens that training never saw and pruned neurons are common.",
    ),
    "outlier_dimension": Kind(
        "outlier dimension",
        "Expect massive activations in this dimension; keep it in higher precision when the model is quantised.",
    ),
    "undertrained_rows": Kind(
        "undertrained embedding rows",
        "Prompt with these tokens: rows that training rarely saw give erratic output; padding rows may be removed.",
    ),
    "oversized_rows": Kind(
        "oversized embedding rows",
        "See which tokens or positions these are: the first position and special tokens often carry a sink's norm.",
    ),
}


@dataclass(frozen=True)
class Member:
    """One of the heads, layers, rows, dimensions or tensors that a finding is about."""

    what: str  # "head", "layer", "dimension", "token", "position", "row", "tensor"
    index: int | None  # of the head, layer, dimension or row; None for a tensor
    layer: int | None = None  # where it differs from the finding's
    name: str = ""  # what people call it: a token's text, a head's role, a tensor's name
    number: float | None = None  # its own value of the finding's measure


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something in a checkpoint that a person should look at."""

    kind: str  # a key of `KINDS`
    layer: int | None = None  # None where it concerns several layers or the whole model
    head: int | None = None  # None where it concerns several heads or a whole layer
    map: str | None = None  # "qk" or "vo"
    measure: str  # what `number` is
    number: float  # the value that made it a finding; of several members, the most extreme
    usual: float | None = None  # the same measure in the rest of the checkpoint
    text: str  # the finding in a sentence
    members: tuple[Member, ...] = ()  # everything that it is about
    known: str = ""  # why it fails no gate: it is in a baseline, or somebody has accepted it

    @property
    def title(self) -> str:
        """The title of its kind."""
        return KINDS[self.kind].title

    @property
    def look_next(self) -> str:
        """What to look at next."""
        return KINDS[self.kind].look_next

    @property
    def severity(self) -> str:
        """How severe its kind is, one of `SEVERITIES`."""
        return KINDS[self.kind].severity

    @property
    def items(self) -> tuple[int, ...]:
        """The indices of its members that have one."""
        return tuple(member.index for member in self.members if member.index is not None)

    @property
    def heads(self) -> list[int]:
        """The heads of its layer that it is about; empty for findings about a whole layer or something else."""
        return [m.index for m in self.members if m.what == "head" and m.index is not None and m.layer is None]

    @property
    def where(self) -> str:
        """`layer 3 head 7 (induction) qk`, or as much of it as is known."""
        parts = [] if self.layer is None else [f"layer {self.layer}"]
        heads = self.heads if self.head is None else [self.head]
        if heads:
            listed = [member for member in self.members if member.what == "head" and member.layer is None]
            named = [member for member in listed if member.name and member.index in heads]
            roles = [member.name if len(heads) == 1 else f"{member.index}: {member.name}" for member in named]
            parts.append(indexed("head", heads) + (f" ({', '.join(roles)})" if roles else ""))
        return " ".join([*parts, *([self.map] if self.map else [])]) or "model"

    def __str__(self) -> str:
        known = f" [{self.known}]" if self.known else ""
        return printable(f"{self.severity:7s}  {self.title:30s} {self.where:22s} {self.text}{known}")

    def as_json(self) -> dict[str, Any]:
        """Its entry in findings.json; NaN as null, infinities as text."""
        derived = ("severity", "title", "look_next", "items")
        plain: dict[str, Any] = as_json(asdict(self) | {name: getattr(self, name) for name in derived})
        return plain


class Findings(list[Finding]):
    """Findings, the most severe kind first, then by layer and head.

    Parameters
    ----------
    findings : iterable of Finding
        In any order.
    """

    def __init__(self, findings: Iterable[Finding] = ()) -> None:
        ranks = list(KINDS)

        def place(finding: Finding) -> tuple[float, ...]:
            layer, head = (inf if index is None else index for index in (finding.layer, finding.head))
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

    def html(self, buttons: bool = False, percentile: Callable[[Finding], str] = lambda finding: "") -> str:
        """The findings by kind, for a page; `buttons` where it has a panel for heads, `percentile` of their numbers."""
        kinds = [list(findings) for _, findings in groupby(self, key=lambda finding: finding.kind)]
        template = templates().get_template("findings.html")
        return template.render(kinds=kinds, most_open=MOST_OPEN, buttons=buttons, percentile=percentile)

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
        known = sum(bool(finding.known) for finding in self)
        return f"Findings: {', '.join(parts)}{f'; {known} of them known' * bool(known)}."

    @property
    def table(self) -> Table:
        """One row per member of each finding; its csv() is findings.csv."""
        rows = []
        for number, f in enumerate(self, 1):
            for member in f.members or (Member("", None),):
                layer = f.layer if member.layer is None else member.layer
                head = member.index if member.what == "head" else f.head
                value = f.number if member.number is None else member.number
                cells = (number, f.severity, f.kind, layer, head, f.map, member.what, member.index, member.name,
                         f.measure, value, f.usual, f.text, f.known)  # fmt: skip
                rows.append(["" if cell is None else cell for cell in cells])
        return Table.of_rows(COLUMNS, rows)

    def as_json(self) -> list[dict[str, Any]]:
        """The content of findings.json."""
        return [finding.as_json() for finding in self]

    def that_fail(self, limits: Collection[str]) -> "Findings":
        """The findings of a kind in `limits`, or at least as severe as a severity in it; known ones do not count."""
        return Findings(finding for finding in self if not finding.known and fails(finding.kind, limits))


COLUMNS = (
    Column("finding", meaning="Number of the finding; it has one row per member."),
    Column("severity"),
    Column("kind"),
    Column("layer"),
    Column("head"),
    Column("map", meaning="qk or vo."),
    Column("item", meaning="What this row is about: a head, a dimension, a token, a position, a tensor."),
    Column("index", meaning="Of the head, the dimension or the row."),
    Column("name", meaning="The token, the role or the tensor."),
    Column("measure", meaning="What the number is."),
    Column("number"),
    Column("usual", meaning="What it is in the rest of the checkpoint."),
    Column("text", meaning="The finding in a sentence."),
    Column("known", meaning="Why it fails no gate: it is in the baseline, or accepted. Empty for any other."),
)


def fails(kind: str, limits: Collection[str]) -> bool:
    """Whether `limits` name this kind, its severity or a milder one: a limit of warning includes errors."""
    severity = KINDS[kind].severity
    return kind in limits or any(limit in SEVERITIES[SEVERITIES.index(severity) :] for limit in limits)


def checked_limits(limits: Iterable[str]) -> tuple[str, ...]:
    """The limits that findings fail on; an error where one is neither a severity nor a kind."""
    limits = tuple(limits)
    for limit in limits:
        if limit not in {*SEVERITIES, *KINDS}:
            known = f"{', '.join(SEVERITIES)}, or a kind of finding: {', '.join(KINDS)}"
            near = nearest(limit, (*SEVERITIES, *KINDS))
            raise CheckpointError(f"`fail_on` is {limit!r}; it is {known}{near}")
    return limits


def of_head(layer: int, head: int, *, number: float, **about: Any) -> Finding:
    """A finding about one head of a layer."""
    return Finding(layer=layer, head=head, number=number, members=(Member("head", head, number=number),), **about)


def heads_and_tensors(heads: Collection[int], tensors: Iterable[str] = ()) -> dict[str, Any]:
    """The `head` and `members` of a finding about some heads of its layer and some tensors."""
    members = (*(Member("head", head) for head in heads), *(Member("tensor", None, name=name) for name in tensors))
    return {"head": next(iter(heads)) if len(heads) == 1 else None, "members": members}


def aggregated(findings: Iterable[Finding], n_heads: int) -> Iterator[Finding]:
    """Findings of single heads; heads of one layer with the same fault become one finding that lists them."""
    faults: dict[tuple[Any, ...], list[Finding]] = {}
    for finding in findings:
        faults.setdefault((finding.kind, finding.layer, finding.map, finding.measure), []).append(finding)
    for same_fault in faults.values():
        farthest = max(same_fault, key=lambda finding: (_distance(finding), finding.number))
        if len(same_fault) > 1:
            members = tuple(member for finding in same_fault for member in finding.members)
            heads = spans(member.index for member in members if member.index is not None)
            which = f"{len(same_fault)} of {n_heads} heads ({heads}), the farthest head {farthest.head}"
            farthest = replace(farthest, head=None, text=f"{which}: {farthest.text}", members=members)
        yield farthest


def _distance(finding: Finding) -> float:
    """How far a number is from what is usual, as a factor."""
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

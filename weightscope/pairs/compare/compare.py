"""Changes of every head between checkpoints of one architecture, and what stands out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from weightscope.checkpoint.provenance import Provenance
from weightscope.core.errors import CheckpointError, counted, printable, sized
from weightscope.core.files import REPORT, Files
from weightscope.core.progress import bar, progress_shown
from weightscope.core.results import Result, ShowsShapes
from weightscope.core.tables import Column, Table, as_json
from weightscope.heads.audit.audit import AuditOptions, logit_bounds, measured_forms, measured_layer
from weightscope.heads.audit.findings import (
    HEAD_FACTOR,
    HEAD_Z,
    heads_without_numbers,
    overflowing_layers,
)
from weightscope.heads.audit.measure import MAPS, Arrays, MeasuredHeads
from weightscope.heads.tensors.findings import beside_findings, incomparable_tensors
from weightscope.heads.tensors.measure import role_of
from weightscope.model.metrics.outliers import known_median, log_measure, robust_z
from weightscope.model.model import Model, as_model, distinct
from weightscope.pairs.changes.all_tensors import (
    OtherChanges,
    TensorChanges,
    compare_tensors,
    find_rescaled,
    limited_changes,
    only_in_one,
    other_changes,
)
from weightscope.pairs.changes.head import LIMITED, LayerStage, added_to, follow_heads, unmoved
from weightscope.pairs.changes.settings import SettingsChange, first_sentence, settings_change
from weightscope.pairs.changes.wiring import CircuitChanges, circuit_changes
from weightscope.pairs.compare.deeds import IDENTICAL, attention_changes, deed, moved_layers
from weightscope.pairs.deeds.deed import What
from weightscope.pairs.deeds.thresholds import UNMOVED
from weightscope.report.findings import (
    Finding,
    Findings,
    Member,
    aggregated,
    finding,
    heads_and_tensors,
    indexed,
    listed,
    of_head,
)

SHAPE = {  # sizes that checkpoints must have in common
    "n_layers": "layers",
    "n_heads": "heads",
    "n_kv_heads": "key-value heads",
    "head_dim": "dimensions in a head",
    "d_model": "dimensions in the stream",
}
SHOWN = ("qk_sigma1", "vo_sigma1")  # measures that pages show next to the changes
PRINTED = 10  # heads on a terminal
FEW = 0.1  # share of all heads; if no more moved, each that did is a finding
ROLES = 3  # roles of tensors that the lead names
NAMED = 8  # heads or tensors that a sentence names
# Figures that a comparison writes, by the function of figures.py that draws each.
FIGURES = {
    "changes": "changes",
    "spectra": "spectra_before_and_after",
    "trajectories": "trajectories",
}
TABLES: dict[str, Callable[["Comparison"], Any]] = {
    "heads.csv": lambda comparison: comparison.heads,
    "trajectory.csv": lambda comparison: comparison.trajectory,
    "findings.csv": lambda comparison: comparison.findings.table,
    "findings.json": lambda comparison: comparison.findings.as_json(),
    "spectra.npz": lambda comparison: _spectra(comparison.measured),
    "directions.csv": lambda comparison: comparison.along.directions,
    "directions.npz": lambda comparison: comparison.along.direction_vectors,
}
RESULTS = (
    *TABLES,
    *REPORT,
    *(f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg", "figure.csv")),
)


def compare(
    *checkpoints: Model | str | Path | Sequence[Model | str | Path],
    labels: Sequence[str] | None = None,
    across_families: bool = False,
    all_tensors: bool = False,
    progress: bool | None = None,
) -> "Comparison":
    """Measure every head of every checkpoint, and how far it moved.

    Where a layer holds the same heads in another order, each is compared with itself. Memory grows
    with three layers: the first checkpoint's, the previous one's and the current one's.

    Parameters
    ----------
    *checkpoints : Model, str or Path
        Two models or more, or what `open_model` opens, or a list of them: with the same layers,
        heads and width, in the order of training.
    labels : sequence of str, optional
        What to call them; their names by default.
    across_families : bool
        Allow checkpoints of different families.
    all_tensors : bool
        Also compare every tensor of the first and the last checkpoint, attention or not; see
        `compare_tensors`.
    progress : bool, optional
        Show a bar; by default in a notebook only.

    Raises
    ------
    CheckpointError
        They differ in family, layers, heads or widths, or a tensor cannot be read.

    Examples
    --------
    >>> import weightscope as ws
    >>> model = ws.open_model("embedded")
    >>> comparison = ws.compare(model, model)
    >>> comparison.heads["qk_change"].max(), comparison.lead.split(". ")[1]
    (np.float64(0.0), 'No head moved')
    """
    listed = checkpoints[0] if len(checkpoints) == 1 else checkpoints
    models = tuple(map(as_model, listed if isinstance(listed, list | tuple) else checkpoints))
    if len(models) < 2:
        raise TypeError(f"compare takes two models or more; {len(models)} given")
    a = models[0]
    labels = [model.name for model in models] if labels is None else list(labels)
    for model, label in zip(models[1:], labels[1:], strict=True):
        _check_comparable(a, labels[0], model, label, across_families)
    steps = [
        Followed(model, model.unchecked(), label)
        for model, label in zip(models, labels, strict=True)
    ]
    first, last, options = steps[0], steps[-1], AuditOptions()
    forms = list(dict.fromkeys(form for model in models for form in measured_forms(model, options)))
    with progress_shown(progress):
        for index in bar(distinct(a.attention_layers, *models), "layers", "layer"):
            _follow(steps, index, forms, options)
    heads = [MeasuredHeads(step.measured, a.config.d_model) for step in steps]
    from_first = [step.from_first for step in steps[1:]]
    # without a rotation every distance is alike
    left_out = set() if forms else {"qk_change_delta1", "qk_change_far"}
    if not any(
        np.isfinite(layer["qk_change_rank"]).any() for layers in from_first for layer in layers
    ):
        left_out |= {f"{name}_change_rank" for name in MAPS}
    order = np.array([step.orders for step in steps[1:]])
    with progress_shown(progress):
        outside = [other_changes(first.unchecked, step.unchecked) for step in steps[1:]]
        everything = compare_tensors(a, last.model) if all_tensors else None
    not_compared = _not_compared(a, outside[-1] if everything is None else everything)
    if everything:
        changes = everything.changes
    else:
        changes = [*outside[-1].changes, *attention_changes(first.unchecked, last.unchecked)]
    # biases are among both
    changes = list({(change.name, change.part): change for change in changes}.values())
    along = TensorChanges(changes)
    moved = [
        index
        for index, layer in zip(first.measured, last.from_first, strict=True)
        if not unmoved(layer).all()
    ]
    edits = [*moved_layers(a, last.model, moved), *along.along_directions]
    done = deed(
        first.unchecked,
        last.unchecked,
        changes,
        (heads[0], heads[-1]),
        last.from_first,
        order[-1],
        edits,
    )
    return Comparison(
        labels=labels,
        architectures=[_architecture(model) for model in models],
        families=[model.family.name for model in models],
        measured=heads,
        from_first=_stacked(from_first, left_out),
        from_previous=_stacked([step.from_previous for step in steps[1:]], left_out),
        order=order,
        broken=[sorted(step.unchecked.checkpoint.noted or ()) for step in steps],
        overflowing=[
            list(overflowing_layers(step.unchecked, measured))
            for step, measured in zip(steps, heads, strict=True)
        ],
        coverage=_coverage(models, everything, not_compared, done),
        not_compared=not_compared,
        others=outside,
        edits=edits,
        everything=everything,
        limited={} if everything is None else limited_changes(a, everything.changes),
        settings=[
            settings_change(a, step.model, step.label) for step in steps[1:] if step.model is not a
        ],
        unread_files=[
            finding
            for model, label in dict(zip(models, labels, strict=True)).items()
            for finding in beside_findings(model.checkpoint.weight_files, label)
        ],
        find_circuits=partial(circuit_changes, a, last.model, order[-1]),
        deed=done,
        equal=[
            [x.label, y.label] for x, y in pairwise(steps) if len(steps) > 2 and _are_equal(x, y)
        ],
        along=along,
        provenance=Provenance.of(*(model.checkpoint for model in models)),
    )


@dataclass(eq=False, repr=False)
class Followed(ShowsShapes):
    """One of the checkpoints, with its heads as far as its layers were read."""

    model: Model
    unchecked: Model  # reads NaN and infinity too
    label: str
    measured: dict[int, Arrays] = field(default_factory=dict)  # by layer, as the next three are
    from_first: list[Arrays] = field(default_factory=list)  # changes; none of the first checkpoint
    from_previous: list[Arrays] = field(default_factory=list)
    orders: list[np.ndarray] = field(default_factory=list)


def _follow(steps: Sequence[Followed], index: int, forms: list[str], options: AuditOptions) -> None:
    """Measure the heads of a layer in each checkpoint, and how far they moved."""
    first: LayerStage | None = None
    previous: LayerStage | None = None
    for step in steps:
        layer, bounds = step.unchecked.layer(index), logit_bounds(step.unchecked, index)
        measures = measured_layer(layer, forms, options, bounds=bounds)
        stage = LayerStage(layer, measures, np.arange(layer.n_heads))
        if first is None or previous is None:
            first = previous = stage
            step.measured[index] = stage.measured
            continue
        added = added_to(steps[0].model, step.model, index)
        stage = replace(stage, base=first.layer, added=added)
        previous, since_first, since_previous = follow_heads(first, previous, stage)
        step.measured[index] = previous.in_order()
        step.from_first.append(since_first)
        step.from_previous.append(since_previous)
        step.orders.append(previous.order)


def _are_equal(a: Followed, b: Followed) -> bool:
    """True if all compared tensors of two neighbours are equal; reads them if no head moved."""
    since = [layer[name] for layer in b.from_previous for name in LIMITED if name in layer]
    if not all((change == 0).all() for change in since):
        return False
    pair = a.unchecked, b.unchecked
    changes = [*other_changes(*pair).changes, *attention_changes(*pair)]
    return all(change.kind is What.IDENTICAL and not change.rows_lacking for change in changes)


def _architecture(model: Model) -> str:
    """The class that the config says the checkpoint is for; empty where it says none."""
    named = model.checkpoint.config.get("architectures")
    return str(named[0])[:100] if isinstance(named, list) and named else ""


def _check_comparable(
    a: Model, label_a: str, b: Model, label_b: str, across_families: bool
) -> None:
    differ = [
        f"{sizes[0]:,} and {sizes[1]:,} {words}"
        for size, words in SHAPE.items()
        if len(set(sizes := [getattr(model.config, size) for model in (a, b)])) > 1
    ]
    if differ:
        problem = f"{label_a} and {label_b} have {', '.join(differ)}; heads are compared one by one"
        answer = (
            f"`weightscope lineage {quote(label_b)} {quote(label_a)}` says what they have in common"
        )
        raise CheckpointError(f"{problem}, which needs the same sizes. {answer}")
    if a.family.name != b.family.name and not across_families:
        families = f"{label_a} is of the family {a.family.name}, {label_b} of {b.family.name}"
        raise CheckpointError(f"{families}; `across_families` compares them anyway")


def _stacked(changes: list[list[Arrays]], left_out: set[str]) -> dict[str, np.ndarray]:
    """Lists by checkpoint and layer as (n - 1, L, H) arrays by name."""
    names = [name for name in changes[0][0] if name not in left_out]
    return {
        name: np.array([[layer[name] for layer in layers] for layers in changes]) for name in names
    }


def _coverage(
    models: Sequence[Model],
    everything: TensorChanges | None,
    not_compared: Sequence[str],
    done: str,
) -> str:
    """Sentences on how checkpoints were read, changes of all tensors, and tensors left out."""
    rows = dict.fromkeys(model.family.called for model in models if model.family.origin)
    checkpoint = models[0].checkpoint
    notes = [f"Read by the row {row}." for row in rows]
    notes += [model.checkpoint.note for model in models]
    notes += [
        f"{printable(model.name)}: {model.names_note}" for model in models if model.names_note
    ]
    left_out = ""
    if everything is None and not_compared:
        roles = list(dict.fromkeys(role_of(name)[0] for name in not_compared))
        share = f"{sized(checkpoint.bytes_to_read(not_compared))} of {sized(checkpoint.nbytes)}"
        left_out = (
            f"Not compared: {len(not_compared)} of {counted(len(checkpoint), 'tensor')} ({share}): "
            f"{listed(roles, ROLES)}; `weightscope compare --all` compares every tensor."
        )
    all_tensors_lead = everything.lead if everything and not done.startswith(IDENTICAL) else ""
    return " ".join(filter(None, [*notes, all_tensors_lead, left_out]))


def _not_compared(a: Model, compared: TensorChanges) -> list[str]:
    """Names of the first checkpoint's tensors that no number or finding depends on."""
    seen = {tensor.name for i in a.attention_layers for tensor in a.attention_tensors(i)}
    seen |= {change.name for change in compared.changes if change.kind is not What.UNREAD}
    return [name for name in a.checkpoint if name not in seen]


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Result):
    """The heads of several checkpoints, in order."""

    FIGURE, PAGE = "figures:changes", "page:write_comparison_page"
    TABLES, FILES = TABLES, RESULTS

    labels: list[str]  # one per checkpoint, as are families and architectures
    families: list[str]
    architectures: list[str]  # the class that the config names, or empty
    measured: list[MeasuredHeads]  # heads in the order of the first checkpoint's
    # (n - 1, L, H) each: |B - A|_F / |A|_F of maps and biases, angles of spaces in radians; NaN if
    # not finite.
    from_first: dict[str, np.ndarray]
    from_previous: dict[str, np.ndarray]  # the same, from the checkpoint before
    # (n - 1, L, H) index of the later checkpoint's head that each head was compared with
    order: np.ndarray
    broken: list[list[str]]  # tensors of each checkpoint that contain NaN or infinity
    # heads of each checkpoint without numbers because finite weights are too large.
    overflowing: list[list[Finding]]
    coverage: str = ""  # a sentence on what was read
    not_compared: list[str] = field(default_factory=list)  # tensors of the first checkpoint
    # Tensors outside heads' matrices, from the first to each later one
    others: list[OtherChanges] = field(default_factory=list)
    edits: Sequence[Finding] = ()  # changes of whole layers, from first to last
    # with `all_tensors`, from the first checkpoint to the last
    everything: TensorChanges | None = None
    # change of each tensor of `everything` that a limit applies to
    limited: dict[str, float] = field(default_factory=dict)
    settings: Sequence[SettingsChange] = ()  # changes of config and tokenizer since the first
    unread_files: Sequence[Finding] = ()  # weight files next to those that were read
    # computes `circuits` on first use
    find_circuits: Callable[[], CircuitChanges | None] | None = None
    deed: str = ""  # a sentence on the one change from first to last; else empty
    # labels of neighbours with equal compared tensors, if there are several checkpoints
    equal: Sequence[Sequence[str]] = ()
    # the last one's, for shared directions
    along: TensorChanges = field(default_factory=lambda: TensorChanges([]))
    provenance: Provenance = field(default_factory=Provenance, repr=False)

    @property
    def about(self) -> str:
        sizes = (
            f"{counted(len(self.measured[0].layers), 'layer')} of "
            f"{counted(self.measured[0].n_heads, 'head')}"
        )
        return f"{' -> '.join(map(printable, self.labels))}: {sizes}"

    def printed(self) -> list[str | Table]:
        """Lines and tables for a terminal, from top to bottom."""
        moved = self.moved_most(PRINTED)
        parts: list[str | Table] = [
            printable(self.lead),
            *([repr(self.findings)] if self.findings else []),
        ]
        if len(moved):
            shown = ("layer", "head", "qk_change", "vo_change", "qk_change_rank", "vo_change_rank")
            parts.append(moved.select(*(name for name in shown if name in moved)))
        if self.everything is not None and set(self.everything.kinds) - {What.IDENTICAL}:
            parts.append(self.everything.moved_most(PRINTED))
        return [*parts, *(f"not in these numbers: {caveat}" for caveat in self.caveats)]

    def shown(self) -> list[Any]:
        """Findings, and the heads that moved most."""
        return [self.findings, self.moved_most(PRINTED)]

    def write_tables(self, files: Files) -> None:
        """Write tables, findings and spectra.npz (an audit's arrays, checkpoints first)."""
        super().write_tables(files)
        if self.circuits is not None:
            self.circuits.write(files)
        if self.everything is not None:
            self.everything.write(files)

    @property
    def caveats(self) -> tuple[str, ...]:
        """Parts of the heads' scores that the numbers leave out, in any of the checkpoints."""
        return tuple(dict.fromkeys(caveat for heads in self.measured for caveat in heads.caveats))

    @cached_property
    def circuits(self) -> CircuitChanges | None:
        """Roles and edges that changed from first to last; None where that would take long."""
        return self.find_circuits() if self.find_circuits else None

    @cached_property
    def findings(self) -> Findings:
        """Findings: broken, zeroed and permuted heads, those that moved most, unmoved layers."""
        return comparison_findings(self)

    @cached_property
    def unmoved(self) -> np.ndarray:
        """True for heads that are the same in the last checkpoint, apart from rounding: (L, H)."""
        return unmoved({name: values[-1] for name, values in self.from_first.items()})

    @property
    def lead(self) -> str:
        """Sentences on changes of the config and the weights, and on what was not compared."""
        asides = dict.fromkeys(aside for change in self.settings for aside in change.asides)
        lacking = only_in_one((self.everything or self.others[-1]).changes)
        # the coverage reports all tensors
        others = "" if self.everything else self.others[-1].headline
        equal = [
            f"{printable(x)} and {printable(y)} are equal in every compared tensor."
            for x, y in self.equal
        ]
        weights = [self.deed, *equal, lacking, self._of_heads, others, self.coverage]
        return " ".join(filter(None, [first_sentence(self.settings), *weights, *asides]))

    @property
    def headline(self) -> str:
        """`lead`, by its former name."""
        return self.lead

    @property
    def _of_heads(self) -> str:
        n_unmoved, n_heads = int(self.unmoved.sum()), self.unmoved.size
        if n_unmoved == n_heads:
            return "No head moved."
        sentences = (
            [f"{n_unmoved} of {counted(n_heads, 'head')} did not move."] if n_unmoved else []
        )
        for name, w in MAPS.items():
            change = self.from_first[f"{name}_change"][-1]  # (L, H)
            n_unknown = int(np.isnan(change).sum())
            if n_unknown:
                sentences.append(
                    f"{w} is not finite in {counted(n_unknown, 'head')}: how far that moved "
                    "is unknown."
                )
            if n_unknown == change.size:
                continue
            if not (change > UNMOVED).any():
                which = f"{w} of the others" if n_unknown else w
                sentences.append(f"{which} {self._of_the_rest(name)}.")
                continue
            i, h = np.unravel_index(int(np.nanargmax(change)), change.shape)
            most = f"most in layer {self.measured[0].layers[i]} head {h}: {change[i, h]:.3g}"
            sentences.append(
                f"{w} changed by {known_median(change):.3g} in the median head, {most}."
            )
        return " ".join(sentences)

    def _of_the_rest(self, name: str) -> str:
        """A phrase on other distances and on the bias, for a map unmoved at distance 0."""
        parts = (f"{name}_change_delta1", f"{name}_change_far", f"{name}_bias_effect")
        changes = [self.from_first.get(part, np.zeros((1, 1)))[-1] for part in parts]  # (L, H)
        near, far, bias = (float(np.nanmax(each)) for each in changes)
        if near > UNMOVED:
            return f"moved between tokens that are apart, by up to {max(near, far):.3g}"
        if far > UNMOVED:
            return f"moved at long distances alone, by up to {far:.3g}"
        if bias > UNMOVED:
            return f"did not move, but its bias did, by up to {bias:.3g}"
        is_known = np.isfinite(self.from_first[f"{name}_change"][-1])
        if n_unknown := int(np.isnan(changes[2][is_known]).sum()):
            return f"did not move, but its bias is not finite in {counted(n_unknown, 'head')}"
        return "did not move"

    @cached_property
    def by_change(self) -> np.ndarray:
        """Rows of the tables: unknown changes first, then by the larger change of both maps."""
        largest = np.maximum(
            self.from_first["qk_change"][-1], self.from_first["vo_change"][-1]
        ).ravel()
        return np.lexsort((-largest, ~np.isnan(largest)))

    def largest_change(self) -> float:
        """The largest change of a head or tensor since the first checkpoint; see `farthest`.

        NaN where it is unknown, because a tensor contains NaN or infinity.
        """
        return self.farthest[1]

    @cached_property
    def farthest(self) -> tuple[str, float]:
        """Name and size of the largest change from the first checkpoint to a later one.

        Of heads W_QK and W_VO count, and biases relative to the larger of their norm and the
        matrix's; and all tensors that heads are not made of; with `all_tensors`, all tensors of the
        file.
        """
        if any(self.broken):
            return "a tensor", float("nan")
        changes = [
            ("a head", float(np.max([self.from_first[n] for n in LIMITED if n in self.from_first])))
        ]
        changes += [pair for tensors in self.others for pair in tensors.limited.items()]
        changes += self.limited.items()
        return max(changes, key=lambda pair: (np.isnan(pair[1]), pair[1]))

    @cached_property
    def heads(self) -> Table:
        """One row per head, the most moved first: changes from first to last, measures of both.

        Its csv() is heads.csv. Columns of the first checkpoint end in _a, of the last in _b, where
        the head has the index head_b; angles are in radians.
        """
        first, last = self.measured[0].table, self.measured[-1].table
        changes = [
            change_column(name, values[-1].ravel()) for name, values in self.from_first.items()
        ]
        measures = [
            replace(column, name=f"{column.name}_{which}", symbol=f"{column.symbol} {when}")
            for name in self._measures
            for column, which, when in (
                (first.column(name), "a", "before"),
                (last.column(name), "b", "after"),
            )
        ]
        head_b = Column(
            "head_b", self.order[-1].ravel(), meaning="Its index in the last checkpoint."
        )
        return Table(
            [first.column("layer"), first.column("head"), head_b, *changes, *measures]
        ).take(self.by_change)

    @cached_property
    def trajectory(self) -> Table:
        """One row per checkpoint and head: measures, changes from the first and the previous one.

        Its csv() is trajectory.csv.
        """
        tables = [heads.table for heads in self.measured]
        labels = [Column("checkpoint", np.repeat(np.array(self.labels, object), len(tables[0])))]
        labels += [
            Column(name, np.tile(tables[0][name], len(tables))) for name in ("layer", "head")
        ]
        unmoved = np.zeros(len(tables[0]))  # the first checkpoint has not moved
        changes = [
            change_column(name, np.append(unmoved, since[name].ravel()), f"_from_{which}")
            for name in self.from_first
            for which, since in (("first", self.from_first), ("previous", self.from_previous))
        ]
        measures = [
            replace(
                tables[0].column(name), values=np.concatenate([table[name] for table in tables])
            )
            for name in self._measures
        ]
        bounds = np.stack([table["qk_logit_bound"] for table in tables])  # (checkpoints, heads)
        with np.errstate(divide="ignore", invalid="ignore"):
            growth = np.concatenate((np.ones_like(bounds[:1]), bounds[1:] / bounds[:-1]))
        meaning = "The bound on the head's logits over the bound at the checkpoint before."
        grown = Column(
            "qk_logit_bound_growth", growth.ravel(), "growth of max |score|", meaning=meaning
        )
        return Table([*labels, *changes, *measures, grown])

    @property
    def _measures(self) -> list[str]:
        """The measures that are real numbers, not counts or text."""
        first = self.measured[0]
        return [
            measure.name
            for measure in first.measures
            if first.table[measure.name].dtype.kind == "f"
        ]

    def moved_most(self, n: int, unmoved: int = 0) -> Table:
        """Heads that moved most, then some that did not: angles in degrees, a few measures."""
        shown = ("change", "change_rank", "left_angle", "right_angle")
        changes = [
            f"{name}_{change}"
            for name in MAPS
            for change in shown
            if f"{name}_{change}" in self.heads
        ]
        names = [f"{name}_{which}" for name in SHOWN for which in ("a", "b")]
        still = self.unmoved.ravel()[self.by_change]
        rows = [*np.flatnonzero(~still)[:n], *np.flatnonzero(still)[:unmoved]]
        table = self.heads.select("layer", "head", *changes, *names).take(rows)
        columns = list(table.columns)
        for place, column in enumerate(columns):
            if column.unit == "rad":
                degrees = np.degrees(column.values)
                columns[place] = replace(column, values=degrees, unit="°", format=".1f")
        return Table(columns, "Heads that moved most; all heads and measures are in heads.csv.")

    def as_json(self) -> dict[str, Any]:
        """The whole result as `weightscope compare --json` prints it; NaN as null."""
        texts = {
            name: getattr(self, name) for name in ("labels", "families", "coverage", "caveats")
        }
        findings = {"largest_change": self.largest_change(), "findings": self.findings.as_json()}
        tensors = {} if self.everything is None else {"tensors": self.everything.table.records()}
        texts |= {"config": [record for change in self.settings for record in change.records()]}
        texts |= {"files": [line for change in self.settings for line in change.files]}
        tables = {
            "other_tensors": self.others[-1].table.records(),
            "not_compared": self.not_compared,
            "heads": self.heads.records(),
        }
        about = self.provenance.envelope(self.lead)
        return dict(as_json(about | texts | findings | tensors | tables))


def _spectra(measured: Sequence[MeasuredHeads]) -> dict[str, np.ndarray]:
    """The arrays of spectra.npz: an audit's, with checkpoints as the first axis."""
    spectra = [heads.spectra() for heads in measured]
    stacked = {name: np.stack([arrays[name] for arrays in spectra]) for name in spectra[0]}
    return stacked | {"layers": measured[0].layers}


def change_column(name: str, values: np.ndarray, since: str = "") -> Column:
    """A column of changes or angles, described from its name (`vo_left_angle_mean`) and `since`."""
    map_name, what, *more = name.split("_")
    w = MAPS[map_name]
    if "rank" in more:
        meaning = "Of the change by a LoRA, from its factors; empty for other changes."
        return Column(name + since, values, f"rank Δ{w}", meaning=meaning, format=".0f")
    if "effect" in more:
        meaning = (
            "Norm of the largest change of a bias term, relative to the larger of its norm and "
            "the matrix's."
        )
        return Column(name + since, values, f"‖Δb_{map_name.upper()}‖/‖{w}‖", meaning=meaning)
    if "change" in name:
        vector = "bias" in name
        subject = f"b_{map_name.upper()}" if vector else f"{w}(1)" if more else w
        subject = "W_Q b_K" if what == "key" else subject
        norm = "Euclidean" if vector else "Frobenius"
        where = (
            " At distance 1, where queries are rotated against keys." if more and not vector else ""
        )
        meaning = f"{norm} norm of the change, relative to that before.{where}"
        return Column(name + since, values, f"‖Δ{subject}‖/‖{subject}‖", meaning=meaning)
    symbol = f"{'mean' if 'mean' in more else 'largest'} {what} angle of {w}"
    return Column(
        name + since, values, symbol, "rad", f"Between the {what} spaces of {w} before and after."
    )


# Findings between checkpoints


def comparison_findings(comparison: Comparison) -> Findings:
    """Everything between checkpoints that a person should look at."""
    single = [*_zeroed(comparison), *_moved_most(comparison)]
    return Findings(
        [
            *_not_finite(comparison),
            *_overflowing(comparison),
            *_families(comparison),
            *aggregated(single, comparison.measured[0].n_heads),
            *_permuted(comparison),
            *comparison.edits,
            *(finding for change in comparison.settings for finding in change.findings()),
            *comparison.unread_files,
            *_unmoved_layers(comparison),
            *_of_tensors(comparison),
        ]
    )


def _of_tensors(comparison: Comparison) -> Iterator[Finding]:
    """Tensors that became zero, took another scale, or cannot be compared."""
    compared: list[TensorChanges] = [*comparison.others]
    if comparison.everything is not None:
        compared[-1] = comparison.everything
    later = (comparison.labels[1:], comparison.architectures[1:], comparison.broken[1:])
    for tensors, label, architecture, broken in zip(compared, *later, strict=True):
        yield from find_rescaled(tensors.changes, label)
        kinds = {c.shown_name: c.kind.value for c in tensors.changes if c.name not in broken}
        yield from incomparable_tensors(kinds, architecture)


def _not_finite(comparison: Comparison) -> Iterator[Finding]:
    """Heads with NaN or infinity in some checkpoint, and the tensors in which these were read.

    Heads that overflow have findings of their own.
    """
    labels, first = comparison.labels, comparison.measured[0]
    overflowing = {
        (finding.layer, finding.map, label)
        for label, findings in zip(labels, comparison.overflowing, strict=True)
        for finding in findings
    }
    for name, w in MAPS.items():
        for i, layer in enumerate(first.layers.tolist()):
            broken = {
                k: heads_without_numbers(heads, i, name)
                for k, heads in enumerate(comparison.measured)
                if (layer, name, labels[k]) not in overflowing
            }
            reached = sorted(set().union(*broken.values()))
            if reached:
                where = "; ".join(
                    f"{indexed('head', heads)} of {labels[k]}"
                    for k, heads in broken.items()
                    if heads
                )
                text = (
                    f"{w} or its bias is NaN or infinite in {where}: how far that moved is unknown."
                )
                yield Finding(
                    kind="not_finite",
                    layer=layer,
                    map=name,
                    measure="heads_not_finite",
                    number=len(reached),
                    usual=0.0,
                    text=text,
                    **heads_and_tensors(reached),
                )
    for label, tensors in zip(labels, comparison.broken, strict=True):
        if tensors:
            names = ", ".join(tensors[:NAMED]) + " ..." * (len(tensors) > NAMED)
            members = tuple(Member("tensor", None, name=tensor) for tensor in tensors)
            yield Finding(
                kind="not_finite",
                text=f"NaN or infinity in {names} of {label}.",
                members=members,
                measure="tensors_not_finite",
                number=len(tensors),
                usual=0.0,
            )


def _overflowing(comparison: Comparison) -> Iterator[Finding]:
    """Heads without numbers because finite weights of some checkpoint are too large."""
    for label, findings in zip(comparison.labels, comparison.overflowing, strict=True):
        yield from (replace(finding, text=f"In {label}: {finding.text}") for finding in findings)


@finding(
    "different_families",
    "checkpoints of different families",
    severity="warning",
    rank=230,
    look_next="Check that comparing these heads makes sense: norms, positions and biases may enter "
    "them differently.",
)
def _families(comparison: Comparison) -> Iterator[Finding]:
    families = list(dict.fromkeys(comparison.families))
    if len(families) > 1:
        text = f"The checkpoints are {', '.join(families[:-1])} and {families[-1]}."
        yield Finding(
            kind="different_families",
            measure="families",
            number=len(families),
            usual=1.0,
            text=text,
        )


def _zeroed(comparison: Comparison) -> Iterator[Finding]:
    """Heads that are zero in the last checkpoint, and were not in the first."""
    first, last = comparison.measured[0], comparison.measured[-1]
    for name, w in MAPS.items():
        measure = f"{name}_frobenius"
        before, after = first.grid(measure), last.grid(measure)
        for i, h in np.argwhere((before > 0) & (after == 0)).tolist():
            usual, layer = float(before[i, h]), int(first.layers[i])
            text = f"{w} is exactly zero, and was {usual:.3g} in the Frobenius norm."
            yield of_head(
                layer,
                h,
                kind="zero_head",
                map=name,
                measure=measure,
                number=0.0,
                usual=usual,
                text=text,
            )


@finding(
    "moved_most",
    "head that moved beyond the others",
    rank=60,
    look_next="Compare its spectra before and after, and the tokens along its first directions in "
    "the two audits.",
)
def _moved_most(comparison: Comparison) -> Iterator[Finding]:
    """Heads that moved far beyond the others that moved; where only few moved, those."""
    for name, w in MAPS.items():
        measure = f"{name}_change"
        change = comparison.from_first[measure][-1]  # (L, H)
        moved = change > UNMOVED
        known = int(np.count_nonzero(~np.isnan(change)))
        if 0 < moved.sum() <= max(1, FEW * known):
            usual, beyond = 0.0, moved
            rest = f"{counted(known - int(moved.sum()), 'head')} did not move"
        else:
            logs = log_measure(np.where(moved & np.isfinite(change), change, np.nan))
            if not np.isfinite(logs).any():
                continue
            usual = float(np.exp(known_median(logs)))
            far = (robust_z(logs) >= HEAD_Z) & (change >= HEAD_FACTOR * usual)
            beyond = far | np.isposinf(change)
            rest = f"the median of those that moved is {usual:.3g}"
        for i, h in np.argwhere(beyond).tolist():
            number, layer = float(change[i, h]), int(comparison.measured[0].layers[i])
            text = f"{w} changed by {number:.3g}; {rest}."
            yield of_head(
                layer,
                h,
                kind="moved_most",
                map=name,
                measure=measure,
                number=number,
                usual=usual,
                text=text,
            )


@finding(
    "permuted_heads",
    "permuted heads",
    rank=50,
    look_next="The layer computes the same; undo the permutation before you average, merge or "
    "subtract weights.",
)
def _permuted(comparison: Comparison) -> Iterator[Finding]:
    """Layers whose heads are the same functions in another order in the last checkpoint."""
    same = comparison.unmoved  # (L, H)
    for i, layer in enumerate(comparison.measured[0].layers.tolist()):
        order = comparison.order[-1, i]
        places = np.flatnonzero(same[i] & (order != np.arange(len(order)))).tolist()
        if places:
            pairs = listed([f"{h} is now {order[h]}" for h in places], NAMED)
            text = (
                f"{counted(len(places), 'head')} of {len(order)} are the same in another order: "
                f"{pairs}."
            )
            # the text says where it is now
            members = tuple(Member("head", h, number=float(order[h])) for h in places)
            yield Finding(
                kind="permuted_heads",
                layer=layer,
                members=members,
                measure="heads_permuted",
                number=len(places),
                usual=0.0,
                text=text,
            )


@finding(
    "unmoved_layers",
    "layers that did not move",
    rank=70,
    look_next="Check that they were frozen on purpose.",
)
def _unmoved_layers(comparison: Comparison) -> Iterator[Finding]:
    """Layers in which no head moved, while heads of other layers did."""
    same = comparison.unmoved
    still = np.flatnonzero(same.all(axis=1))
    if not len(still) or len(still) == len(same):
        return
    layers = comparison.measured[0].layers[still].tolist()
    moved = np.delete(~same, still, axis=0)
    rest = f"of the others {int(moved.sum())} of {moved.size} heads did"
    text = f"No head of {indexed('layer', layers)} moved; {rest}."
    yield Finding(
        kind="unmoved_layers",
        text=text,
        members=tuple(Member("layer", i) for i in layers),
        measure="layers_unmoved",
        number=len(layers),
        usual=0.0,
    )

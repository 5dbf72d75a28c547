"""How every head moves between checkpoints of one architecture."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from weightscope.audits.all_tensors import TensorChanges, compare_tensors
from weightscope.audits.audit import AuditOptions, measured_forms, measured_layer
from weightscope.audits.broken import overflowing_layers
from weightscope.audits.changes import SAME, change_column, followed, stage, unmoved
from weightscope.audits.circuit_changes import CircuitChanges, circuit_changes
from weightscope.audits.comparison_findings import comparison_findings
from weightscope.audits.coverage import attention_only
from weightscope.audits.findings import Finding, Findings
from weightscope.audits.lora import added_to
from weightscope.audits.measure import Arrays
from weightscope.audits.measures import MAPS, MeasuredHeads
from weightscope.errors import CheckpointError, counted, printable
from weightscope.folder import Files, OutputFolder
from weightscope.metrics.medians import known_median
from weightscope.model import Model
from weightscope.notebook import notebook
from weightscope.progress import bar, progress_shown
from weightscope.tables import Column, Table, as_json

SHAPE = ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim")  # what checkpoints must have in common
SHOWN = ("qk_sigma1", "vo_sigma1")  # measures beside the changes on pages
RESULTS = (
    "heads.csv", "trajectory.csv", "findings.csv", "findings.json", "spectra.npz", "report.html",
    *(f"{figure}.{kind}" for figure in ("changes", "spectra", "trajectories") for kind in ("png", "svg", "figure.csv")),
)  # fmt: skip
PRINTED = 10  # heads on a terminal


def compare(
    a: Model,
    b: Model,
    *more: Model,
    labels: Sequence[str] | None = None,
    across_families: bool = False,
    all_tensors: bool = False,
    progress: bool = False,
) -> "Comparison":
    """Measure every head of every checkpoint, and how far it moved.

    Where a layer holds the same heads in another order, each is compared with itself. Memory grows with three layers:
    the first checkpoint's, the previous one's and the current one's.

    Parameters
    ----------
    a, b, *more : Model
        Of one shape, in the order of training.
    labels : sequence of str, optional
        What to call them; their names by default.
    across_families : bool
        Compare heads of different families too.
    all_tensors : bool
        Compare every tensor of the first checkpoint with the last one's too, attention or not; see `compare_tensors`.
    progress : bool
        Show a bar.

    Raises
    ------
    CheckpointError
        They differ in family, layers, heads or widths, or a tensor cannot be read.

    Examples
    --------
    >>> import weightscope as ws
    >>> model = ws.open_model("embedded")
    >>> comparison = ws.compare(model, model)
    >>> comparison.heads["qk_change"].max(), comparison.headline
    (np.float64(0.0), 'No head moved.')
    """
    models = (a, b, *more)
    named = [model.name for model in models] if labels is None else list(labels)
    for model, label in zip(models[1:], named[1:], strict=True):
        _check_comparable(a, named[0], model, label, across_families)
    unchecked, options = [model.unchecked() for model in models], AuditOptions()
    forms = list(dict.fromkeys(form for model in models for form in measured_forms(model, options)))
    measured: list[dict[int, Arrays]] = [{} for _ in models]
    from_first: list[list[Arrays]] = [[] for _ in models[1:]]
    from_previous: list[list[Arrays]] = [[] for _ in models[1:]]
    orders: list[list[np.ndarray]] = [[] for _ in models[1:]]
    with progress_shown(progress):
        indices = bar(a.attention_layers, "layers", "layer")
    for index in indices:
        one = unchecked[0].layer(index)
        first = previous = stage(one, measured_layer(one, forms, options))
        measured[0][index] = first.measured
        for k, model in enumerate(unchecked[1:]):
            other = model.layer(index)
            current = stage(other, measured_layer(other, forms, options), one, added_to(a, models[k + 1], index))
            current, since_first, since_previous = followed(first, previous, current)
            measured[k + 1][index] = current.in_order()
            from_first[k].append(since_first)
            from_previous[k].append(since_previous)
            orders[k].append(current.order)
            previous = current
    heads = [MeasuredHeads(layers, a.config.d_model) for layers in measured]
    left_out = set() if forms else {"qk_change_delta1"}  # without a rotation every distance is alike
    if not any(np.isfinite(layer["qk_change_rank"]).any() for own in from_first for layer in own):
        left_out |= {f"{name}_change_rank" for name in MAPS}
    families = [model.family.name for model in models]
    changes = _stacked(from_first, left_out), _stacked(from_previous, left_out)
    broken = [sorted(model.checkpoint.noted or ()) for model in unchecked]
    overflowing = [list(overflowing_layers(*pair)) for pair in zip(unchecked, heads, strict=True)]
    with progress_shown(progress):
        everything = compare_tensors(a, models[-1]) if all_tensors else None
    read = list(dict.fromkeys(tensor.name for i in a.attention_layers for tensor in a.attention_tensors(i)))
    coverage = attention_only(a.checkpoint, read) if everything is None else everything.lead
    rows = dict.fromkeys(model.family.called for model in models if model.family.origin)
    notes = [f"Read by the row {row}." for row in rows] + [model.checkpoint.note for model in models]
    coverage = " ".join(filter(None, [*notes, coverage]))
    circuits = partial(circuit_changes, a, models[-1], np.array(orders)[-1])
    results = named, families, heads, *changes, np.array(orders), broken, overflowing
    return Comparison(*results, coverage, everything, circuits)


def _stacked(changes: list[list[Arrays]], left_out: set[str]) -> dict[str, np.ndarray]:
    """Lists by checkpoint and layer as (n - 1, L, H) arrays by name."""
    names = [name for name in changes[0][0] if name not in left_out]
    return {name: np.array([[layer[name] for layer in own] for own in changes]) for name in names}


def _check_comparable(one: Model, one_label: str, other: Model, other_label: str, across_families: bool) -> None:
    for size in SHAPE:
        a, b = getattr(one.config, size), getattr(other.config, size)
        if a != b:
            problem = f"{one_label} has {size} {a}, {other_label} has {b}; checkpoints of one shape compare"
            raise CheckpointError(problem)
    a, b = one.family.name, other.family.name
    if a != b and not across_families:
        problem = (
            f"{one_label} is of the family {a}, {other_label} of {b}; `across_families` compares them all the same"
        )
        raise CheckpointError(problem)


def _unknown() -> None:
    """Of a comparison that knows no models."""


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """The heads of several checkpoints, in order.

    Attributes
    ----------
    labels, families : list of str
        One a checkpoint.
    measured : list of MeasuredHeads
        In the order of the first checkpoint's heads.
    from_first, from_previous : dicts of (n - 1, L, H) arrays
        qk_change and vo_change, |B - A|_F / |A|_F, those of their biases, and the principal angles of their spaces in
        radians, from the first and from the previous checkpoint to each later one; NaN where a head is not finite.
    order : (n - 1, L, H) int array
        Which head of each later checkpoint was compared with each head of the first.
    broken : list of lists of str
        Tensors of each checkpoint that hold NaN or infinity.
    overflowing : list of lists of Finding
        Heads of each checkpoint that finite weights, too large to compute with, leave without numbers.
    coverage : str
        What was read, in a sentence.
    everything : TensorChanges or None
        All tensors of the first and the last checkpoint, where that was asked for.
    find_circuits : function
        Gives `circuits` when they are asked for.
    """

    labels: list[str]
    families: list[str]
    measured: list[MeasuredHeads]
    from_first: dict[str, np.ndarray]
    from_previous: dict[str, np.ndarray]
    order: np.ndarray
    broken: list[list[str]]
    overflowing: list[list[Finding]]
    coverage: str = ""
    everything: TensorChanges | None = None
    find_circuits: Callable[[], CircuitChanges | None] = _unknown

    def __repr__(self) -> str:
        sizes = f"{counted(len(self.measured[0].layers), 'layer')} of {counted(self.measured[0].n_heads, 'head')}"
        return f"Comparison({' -> '.join(map(printable, self.labels))}: {sizes})"

    def __str__(self) -> str:
        return "\n".join(part if isinstance(part, str) else part.text() for part in self.printed())

    def printed(self) -> list[str | Table]:
        """What a terminal shows, from above to below."""
        moved = self.moved_most(PRINTED)
        parts: list[str | Table] = [printable(self.lead), *([repr(self.findings)] if self.findings else [])]
        if len(moved):
            shown = ("layer", "head", "qk_change", "vo_change", "qk_change_rank", "vo_change_rank")
            parts.append(moved.select(*(name for name in shown if name in moved)))
        if self.everything is not None and any(one.kind != "identical" for one in self.everything.changes):
            parts.append(self.everything.moved_most(PRINTED))
        return [*parts, *(f"not in these numbers: {caveat}" for caveat in self.caveats)]

    def _repr_html_(self) -> str:
        return notebook(self.lead, self.findings, self.moved_most(PRINTED))

    @property
    def caveats(self) -> tuple[str, ...]:
        """What the numbers leave out of the heads' scores, in any of the checkpoints."""
        return tuple(dict.fromkeys(caveat for heads in self.measured for caveat in heads.caveats))

    @cached_property
    def circuits(self) -> CircuitChanges | None:
        """Roles and edges that moved from the first checkpoint to the last; None where that would take long."""
        return self.find_circuits()

    @cached_property
    def findings(self) -> Findings:
        """What a person should look at: broken, vanished and permuted heads, those that moved most, still layers."""
        return comparison_findings(self)

    @cached_property
    def unmoved(self) -> np.ndarray:
        """Heads that are in the last checkpoint what they were in the first, but for rounding, (L, H)."""
        return unmoved({name: values[-1] for name, values in self.from_first.items()})

    @property
    def lead(self) -> str:
        """How heads moved, and what was read for it."""
        return f"{self.headline} {self.coverage}".strip()

    @property
    def headline(self) -> str:
        """How many heads moved, the typical and the largest change, in a sentence for each map."""
        n_unmoved, n_heads = int(self.unmoved.sum()), self.unmoved.size
        if n_unmoved == n_heads:
            return "No head moved."
        sentences = [f"{n_unmoved} of {counted(n_heads, 'head')} did not move."] if n_unmoved else []
        for name, w in MAPS.items():
            change = self.from_first[f"{name}_change"][-1]  # (L, H)
            n_unknown = int(np.isnan(change).sum())
            if n_unknown:
                sentences.append(f"{w} is not finite in {counted(n_unknown, 'head')}: how far that moved is unknown.")
            if n_unknown == change.size:
                continue
            if not (change > SAME).any():
                sentences.append(f"{w} did not move.")
                continue
            i, h = np.unravel_index(int(np.nanargmax(change)), change.shape)
            most = f"most in layer {self.measured[0].layers[i]} head {h}: {change[i, h]:.3g}"
            sentences.append(f"{w} changed by {known_median(change):.3g} in the median head, {most}.")
        return " ".join(sentences)

    @cached_property
    def by_change(self) -> np.ndarray:
        """Rows of the tables: unknown changes first, then the head with the largest change of either map."""
        largest = np.maximum(self.from_first["qk_change"][-1], self.from_first["vo_change"][-1]).ravel()
        return np.lexsort((-largest, ~np.isnan(largest)))

    def largest_change(self) -> float:
        """The farthest that W_QK or W_VO of a head is from the first checkpoint in any later one.

        NaN where that is unknown: where a tensor of a checkpoint holds NaN or infinity.
        """
        if any(self.broken):
            return float("nan")
        return float(np.max([self.from_first[f"{name}_change"] for name in MAPS]))

    @cached_property
    def heads(self) -> Table:
        """A row a head, those that moved most first: changes from the first checkpoint to the last, measures of both.

        Its csv() is heads.csv. Measures of the first checkpoint end in _a, of the last in _b, where the head is head_b;
        angles are in radians.
        """
        first, last = self.measured[0].table, self.measured[-1].table
        changes = [change_column(name, values[-1].ravel()) for name, values in self.from_first.items()]
        measures = [
            replace(column, name=f"{column.name}_{which}", symbol=f"{column.symbol} {when}")
            for name in self._measures
            for column, which, when in ((first.column(name), "a", "before"), (last.column(name), "b", "after"))
        ]
        there = Column("head_b", self.order[-1].ravel(), meaning="Which head of the last checkpoint it is.")
        return Table([first.column("layer"), first.column("head"), there, *changes, *measures]).take(self.by_change)

    @cached_property
    def trajectory(self) -> Table:
        """A row a checkpoint and head: the changes from the first and from the previous checkpoint, every measure.

        Its csv() is trajectory.csv.
        """
        tables = [heads.table for heads in self.measured]
        unmoved = np.zeros(len(tables[0]))  # the first checkpoint has not moved
        since = {"first": self.from_first, "previous": self.from_previous}
        return Table(
            [
                Column("checkpoint", np.repeat(np.array(self.labels, object), len(tables[0]))),
                *(Column(name, np.tile(tables[0][name], len(tables))) for name in ("layer", "head")),
                *(
                    change_column(name, np.append(unmoved, changes[name].ravel()), f"_from_{which}")
                    for name in self.from_first
                    for which, changes in since.items()
                ),
                *(
                    replace(tables[0].column(name), values=np.concatenate([table[name] for table in tables]))
                    for name in self._measures
                ),
            ]
        )

    @property
    def _measures(self) -> list[str]:
        """The measures that are numbers and not counts."""
        first = self.measured[0]
        return [measure.name for measure in first.measures if first.table[measure.name].dtype.kind == "f"]

    def moved_most(self, n: int) -> Table:
        """The heads that moved most, for people, those alone that moved: angles in degrees, a few of the measures."""
        known = ("change", "change_rank", "left_angle", "right_angle")
        changes = [f"{name}_{what}" for name in MAPS for what in known if f"{name}_{what}" in self.heads]
        names = [f"{name}_{which}" for name in SHOWN for which in ("a", "b")]
        moved = np.flatnonzero(~self.unmoved.ravel()[self.by_change])
        table = self.heads.select("layer", "head", *changes, *names).take(moved[:n])
        columns = [
            replace(column, values=np.degrees(column.values), unit="°", format=".1f")
            if column.unit == "rad"
            else column
            for column in table.columns
        ]
        return Table(columns, "Heads that moved; all of them, and all that was measured, are in heads.csv.")

    def as_json(self) -> dict[str, Any]:
        """The whole result as `weightscope compare --json` prints it; NaN as null."""
        said = {name: getattr(self, name) for name in ("labels", "families", "headline", "coverage", "caveats")}
        every = {} if self.everything is None else {"tensors": self.everything.table.records()}
        found = {"largest_change": self.largest_change(), "findings": self.findings.as_json()}
        return dict(as_json(said | found | every | {"heads": self.heads.records()}))

    def write(self, out: str | Path) -> None:
        """Write tables, findings, spectra.npz, figures and report.html into a folder, as the command does.

        spectra.npz has the arrays of an audit's, checkpoints first.

        Raises
        ------
        CheckpointError
            It cannot be written to, or another run is writing into it.
        """
        with OutputFolder(Path(out), names=RESULTS) as folder:
            self.write_files(folder)

    def write_files(self, files: Files) -> None:
        """Write the same into a folder that is at hand, or into memory."""
        from weightscope.audits.page import write_comparison_page

        write_comparison_page(files, self)  # a picture is there no later than the numbers
        files.table("heads.csv", self.heads)
        files.table("trajectory.csv", self.trajectory)
        files.table("findings.csv", self.findings.table)
        files.json("findings.json", self.findings.as_json())
        spectra = [heads.spectra() for heads in self.measured]
        stacked = {name: np.stack([one[name] for one in spectra]) for name in spectra[0]}
        files.npz("spectra.npz", **stacked | {"layers": self.measured[0].layers})
        if self.circuits is not None:
            self.circuits.write(files)
        if self.everything is not None:
            self.everything.write(files)

    def plot(self) -> Any:
        """Layers against heads, how far each moved: a matplotlib Figure."""
        from weightscope.audits.figures import changes

        return changes(self)

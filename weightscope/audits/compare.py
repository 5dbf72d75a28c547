"""How every head moves between checkpoints of one architecture."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from weightscope.attention.layer import Layer
from weightscope.audits.audit import AuditOptions, measured_forms, measured_layer
from weightscope.audits.measure import Arrays
from weightscope.audits.measures import MAPS, MeasuredHeads
from weightscope.errors import CheckpointError, counted, printable
from weightscope.folder import OutputFolder
from weightscope.metrics.spaces import relative_change, space_angles
from weightscope.model import Model
from weightscope.parallel import in_threads
from weightscope.progress import bar, progress_shown
from weightscope.tables import Column, Table, notebook

SHAPE = ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim")  # what checkpoints must have in common
SHOWN = ("qk_sigma1", "qk_effective_rank", "vo_sigma1", "vo_effective_rank")  # measures beside the changes on pages
PRINTED = 10  # heads on a terminal


def compare(
    a: Model, b: Model, *more: Model, labels: Sequence[str] | None = None, progress: bool = False
) -> "Comparison":
    """Measure every head of every checkpoint, and how far it moved.

    Memory grows with three layers: the first checkpoint's, the previous one's and the current one's.

    Parameters
    ----------
    a, b, *more : Model
        Of one shape, in the order of training.
    labels : sequence of str, optional
        What to call them; their names by default.
    progress : bool
        Show a bar.

    Raises
    ------
    CheckpointError
        They differ in layers, heads or widths, or a tensor cannot be read.

    Examples
    --------
    >>> import weightscope as ws
    >>> model = ws.open_model("embedded")
    >>> comparison = ws.compare(model, model)
    >>> comparison.heads["qk_change"].max()
    np.float64(0.0)
    """
    models = (a, b, *more)
    named = [model.name for model in models] if labels is None else list(labels)
    for model, label in zip(models[1:], named[1:], strict=True):
        _check_same_shape(a, named[0], model, label)
    unchecked, options = [model.unchecked() for model in models], AuditOptions()
    forms = list(dict.fromkeys(form for model in models for form in measured_forms(model, options)))
    measured: list[dict[int, Arrays]] = [{} for _ in models]
    from_first: list[list[Arrays]] = [[] for _ in models[1:]]
    from_previous: list[list[Arrays]] = [[] for _ in models[1:]]
    with progress_shown(progress):
        indices = bar(a.attention_layers, "layers", "layer")
    for index in indices:
        first = previous = unchecked[0].layer(index)
        measured[0][index] = measured_layer(first, forms, options)
        for k, model in enumerate(unchecked[1:]):
            current = model.layer(index)
            measured[k + 1][index] = measured_layer(current, forms, options)
            change = layer_changes(first, current)
            from_first[k].append(change)
            from_previous[k].append(change if previous is first else layer_changes(previous, current))
            previous = current
    heads = [MeasuredHeads(layers, a.config.d_model) for layers in measured]
    return Comparison(named, heads, _stacked(from_first), _stacked(from_previous))


def layer_changes(a: Layer, b: Layer) -> dict[str, np.ndarray]:
    """How far every head of a layer moved: (H,) arrays, qk_change, qk_left_angle ... vo_right_angle_mean."""

    def head_change(h: int) -> dict[str, float]:
        changes: dict[str, float] = {}
        for name in MAPS:
            before, after = (getattr(layer.head(h), name) for layer in (a, b))
            changes[f"{name}_change"] = relative_change(before, after)
            changes |= {f"{name}_{angle}": value for angle, value in space_angles(before, after).items()}
        return changes

    with np.errstate(invalid="ignore"):
        heads = list(in_threads(head_change, range(a.n_heads)))
    return {name: np.array([head[name] for head in heads]) for name in heads[0]}


def _stacked(changes: list[list[Arrays]]) -> dict[str, np.ndarray]:
    """Lists by checkpoint and layer as (n - 1, L, H) arrays by name."""
    return {name: np.array([[layer[name] for layer in own] for own in changes]) for name in changes[0][0]}


def _check_same_shape(one: Model, one_label: str, other: Model, other_label: str) -> None:
    for size in SHAPE:
        a, b = getattr(one.config, size), getattr(other.config, size)
        if a != b:
            problem = f"{one_label} has {size} {a}, {other_label} has {b}; checkpoints of one shape compare"
            raise CheckpointError(problem)


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """The heads of several checkpoints, in order.

    Attributes
    ----------
    labels : list of str
        One a checkpoint.
    measured : list of MeasuredHeads
    from_first, from_previous : dicts of (n - 1, L, H) arrays
        qk_change and vo_change, |B - A|_F / |A|_F, and the principal angles of their spaces in radians, from the first
        and from the previous checkpoint to each later one.
    """

    labels: list[str]
    measured: list[MeasuredHeads]
    from_first: dict[str, np.ndarray]
    from_previous: dict[str, np.ndarray]

    def __repr__(self) -> str:
        sizes = f"{counted(len(self.measured[0].layers), 'layer')} of {counted(self.measured[0].n_heads, 'head')}"
        return f"Comparison({' -> '.join(map(printable, self.labels))}: {sizes})"

    def __str__(self) -> str:
        moved = self.moved_most(PRINTED).select("layer", "head", "qk_change", "vo_change")
        caveats = [f"not in these numbers: {caveat}" for caveat in self.measured[0].caveats]
        return "\n".join([printable(self.headline), moved.text(), *caveats])

    def _repr_html_(self) -> str:
        return notebook(self.headline, self.moved_most(PRINTED))

    @property
    def headline(self) -> str:
        """The typical and the largest change, in a sentence for each map."""
        sentences = []
        for name, w in MAPS.items():
            change = self.from_first[f"{name}_change"][-1]  # (L, H)
            i, h = np.unravel_index(int(np.where(np.isfinite(change), change, -1.0).argmax()), change.shape)
            most = f"most in layer {self.measured[0].layers[i]} head {h}: {change[i, h]:.3g}"
            sentences.append(f"{w} changed by {np.nanmedian(change):.3g} in the median head, {most}.")
        return " ".join(sentences)

    @cached_property
    def by_change(self) -> np.ndarray:
        """Rows of the checkpoints' tables: the head with the largest change of either map first, unknown ones last."""
        largest = np.fmax(self.from_first["qk_change"][-1], self.from_first["vo_change"][-1]).ravel()
        return np.argsort(-np.nan_to_num(largest, nan=-1.0, posinf=1e308), kind="stable")

    @cached_property
    def heads(self) -> Table:
        """A row a head, those that moved most first: changes from the first checkpoint to the last, measures of both.

        Its csv() is heads.csv. Measures of the first checkpoint end in _a, of the last in _b; angles are in radians.
        """
        first, last = self.measured[0].table, self.measured[-1].table
        changes = [_change(name, values[-1].ravel()) for name, values in self.from_first.items()]
        measures = [
            replace(column, name=f"{column.name}_{which}", symbol=f"{column.heading} {when}")
            for name in self._measures
            for column, which, when in ((first.column(name), "a", "before"), (last.column(name), "b", "after"))
        ]
        return Table([first.column("layer"), first.column("head"), *changes, *measures]).take(self.by_change)

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
                    _change(name, np.append(unmoved, changes[name].ravel()), f"_from_{which}")
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
        """The heads that moved most, for people: angles in degrees, a few of the measures."""
        names = [f"{name}_{which}" for name in SHOWN for which in ("a", "b")]
        table = self.heads.select("layer", "head", *self.from_first, *names).take(range(min(n, len(self.heads))))
        columns = [
            replace(column, values=np.degrees(column.values), unit="°") if column.unit == "rad" else column
            for column in table.columns
        ]
        return Table(columns, "The rest are in heads.csv.")

    def write(self, out: str | Path) -> None:
        """Write heads.csv, trajectory.csv, spectra.npz, figures and report.html into a folder, as the command does.

        spectra.npz has the arrays of an audit's, checkpoints first.

        Raises
        ------
        CheckpointError
            It cannot be written to, or another run is writing into it.
        """
        from weightscope.audits.page import write_comparison_page

        spectra = [heads.spectra() for heads in self.measured]
        with OutputFolder(Path(out)) as folder:
            folder.table("heads.csv", self.heads)
            folder.table("trajectory.csv", self.trajectory)
            stacked = {name: np.stack([one[name] for one in spectra]) for name in spectra[0]}
            folder.npz("spectra.npz", **stacked | {"layers": self.measured[0].layers})
            write_comparison_page(folder, self)

    def plot(self) -> Any:
        """Layers against heads, how far each moved: a matplotlib Figure."""
        from weightscope.audits.figures import changes

        return changes(self)


def _change(name: str, values: np.ndarray, since: str = "") -> Column:
    """A column of changes or of angles, by its name: qk_change, vo_left_angle_mean."""
    map_name, what, *angle = name.split("_")
    w = MAPS[map_name]
    if what == "change":
        return Column(
            name + since, values, f"‖Δ{w}‖/‖{w}‖", meaning="Frobenius norm of the change, over that before it."
        )
    symbol = f"{'mean' if 'mean' in angle else 'largest'} {what} angle of {w}"
    return Column(name + since, values, symbol, "rad", f"Between the {what} spaces of {w} before and after.")

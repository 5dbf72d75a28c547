"""All tensors of two checkpoints: how many changed, in what way, where and by how much."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from weightscope.changes.directions import Along, changes_along_one_direction, one_direction
from weightscope.changes.pair import Pair, pair_up
from weightscope.changes.tensor import KINDS, UNLIKE, Change, compare_pairs, unchanged
from weightscope.checkpoint import Tensor
from weightscope.errors import counted
from weightscope.files import Files
from weightscope.findings import Finding, Member, listed, spans
from weightscope.model import Model
from weightscope.tables import Column, Table
from weightscope.tensors.findings import described
from weightscope.tensors.measure import role_of, shown_shape

NAMED = 4  # tensors in a sentence


@dataclass(frozen=True)
class TensorChanges:
    """All tensors of two checkpoints, and how each changed."""

    changes: Sequence[Change]  # in the order of the first checkpoint, then those that only the last has

    @cached_property
    def kinds(self) -> Counter[str]:
        """How many tensors changed in each way."""
        return Counter(change.kind for change in self.changes)

    @cached_property
    def shared(self) -> tuple[dict[int, Along], float]:
        """The tensors, by number, whose changes share a direction, and the least cosine of two."""
        return one_direction([(i, along) for i, change in enumerate(self.changes) for along in change.along])

    @property
    def lead(self) -> str:
        """How many tensors changed, in what way and where, in a sentence or two."""
        same, total = self.kinds["identical"], len(self.changes)
        if same == total:
            return f"Every tensor is identical, {counted(total, 'tensor')} in all."
        parts = []
        for kind, words in KINDS.items():
            changes = [change for change in self.changes if change.kind == kind]
            tuned = [change for change in changes if kind != "changed" or change.is_tuned]
            if tuned:
                parts.append(f"{len(tuned)} {words}{_in_common(tuned)}")
            if unlike := [change for change in changes if change not in tuned]:
                parts.append(f"{len(unlike)} {UNLIKE} ({spread(unlike)})")
        return f"Of {counted(total, 'tensor')}: {', '.join(parts)}.{self._where()}"

    def _where(self) -> str:
        """The layers that changed, as a sentence."""
        layers: dict[int, bool] = {}
        outside = 0
        for change in self.changes:
            numbers, changed = role_of(change.name)[1], change.kind != "identical"
            if numbers:
                layers[numbers[0]] = layers.get(numbers[0], False) or changed
            else:
                outside += changed
        moved = [layer for layer, changed in layers.items() if changed]
        parts = [f"{counted(outside, 'tensor')} outside the layers"] if outside and layers else []
        if moved and len(moved) < len(layers):
            parts.insert(0, f"{len(moved)} of {counted(len(layers), 'layer')}, {spans(moved)}")
        elif moved:
            parts.insert(0, "every layer")
        return f" They changed in {' and in '.join(parts)}." if parts else ""

    @cached_property
    def table(self) -> Table:
        """One row per tensor; its csv() is tensors.csv."""
        rows = [
            (c.name, role_of(c.name)[0], c.kind, c.detail, c.change, c.largest, c.values_changed, c.rows_changed,
             np.nan if c.rank is None else float(c.rank), *c.dtypes, *map(shown_shape, c.shapes))
            for c in self.changes
        ]  # fmt: skip
        return Table.of_rows(COLUMNS, rows)

    def moved_most(self, n: int) -> Table:
        """The tensors that changed most, for people."""
        order = sorted(range(len(self.changes)), key=lambda i: -np.nan_to_num(self.changes[i].change, nan=np.inf))
        shown = [i for i in order if self.changes[i].kind != "identical"][:n]
        table = self.table.select("tensor", "kind", "detail", "change", "rank").take(shown)
        kinds = Column("kind", [self.changes[i].shown_kind for i in shown])
        columns = [kinds if column.name == "kind" else column for column in table.columns]
        filled = [column for column in columns if any(map(column.shown, column.values))]
        return Table(filled, "All are in tensors.csv.")

    @property
    def along_one_direction(self) -> Iterator[Finding]:
        """The tensors whose changes share a direction, as a finding, where there are any."""
        shared, cosine = self.shared
        if shared:
            members = {Member("tensor", None, name=self.changes[i].name): along for i, along in shared.items()}
            names = listed([member.name for member in members], NAMED)
            yield changes_along_one_direction(members, cosine, names)

    def write(self, files: Files) -> None:
        """Write tensors.csv."""
        files.table("tensors.csv", self.table)


COLUMNS = (
    Column("tensor"), Column("role", meaning="The name without the numbers of layers and experts."),
    Column("kind", meaning="What kind of change it is."), Column("detail", meaning="The same in more detail."),
    Column("change", symbol="$‖ΔW‖/‖W‖$", meaning="Frobenius norm of the change, relative to the tensor before."),
    Column("largest", meaning="The largest change of a value."),
    Column("values_changed", symbol="values changed"), Column("rows_changed", symbol="rows changed"),
    Column("rank", meaning="Of the change, where it is low.", format=".0f"),
    Column("dtype_a", symbol="dtype before"), Column("dtype_b", symbol="dtype after"),
    Column("shape_a", symbol="shape before"), Column("shape_b", symbol="shape after"),
)  # fmt: skip


def _in_common(changes: Sequence[Change]) -> str:
    """What the changes of one kind have in common, in brackets, or which tensors they are."""
    if changes[0].kind in ("missing", "new"):
        return f": {described([change.name for change in changes])}"
    if changes[0].kind == "changed":
        return f" ({spread(changes)})"
    ranks = sorted({change.rank for change in changes if change.rank is not None})
    if ranks:
        return f" (rank {spans(ranks)})"
    details = Counter(change.detail for change in changes if change.detail)
    few = len(details) == 1 or changes[0].kind in ("rounded", "quantised")
    return f" ({details.most_common(1)[0][0]})" if details and few else ""


def spread(changes: Sequence[Change]) -> str:
    """`relative change 0.26 to 0.48`, of those whose size before is known."""
    sizes = [change.change for change in changes if np.isfinite(change.change)]
    zero = len(changes) - len(sizes)
    parts = [f"relative change {between(sizes)}"] if sizes else []
    return ", ".join([*parts, *([f"{zero} from zero"] if zero else [])])


def between(values: Sequence[float]) -> str:
    """`0.26 to 0.48`, or one number where both are written alike."""
    return " to ".join(dict.fromkeys(f"{value:.2g}" for value in (min(values), max(values))))


def compare_tensors(a: Model, b: Model) -> TensorChanges:
    """Read every tensor of two checkpoints once, and those again whose kind of change is not clear from that.

    Memory is a few blocks of a million values per core and, where a rank is looked for, two matrices of 144 columns.
    """
    tensors = ({name.removeprefix(m.prefix): tensor for name, tensor in m.checkpoint.items()} for m in (a, b))
    pairs, only_a, only_b = pair_up(*tensors)
    return TensorChanges([*changes_with_directions(a, b, pairs), *unpaired(only_a, only_b)])


def changes_with_directions(a: Model, b: Model, pairs: Sequence[Pair]) -> list[Change]:
    """How each pair changed; those along a direction that several share are of a kind of their own."""
    compared = TensorChanges(compare_pairs(a.checkpoint, b.checkpoint, pairs))
    shared = {compared.changes[i].name for i in compared.shared[0]}  # what is more than one of their rank is rounding
    return [replace(c, kind="one direction", rank=1) if c.name in shared else c for c in compared.changes]


def unpaired(only_a: Sequence[Tensor], only_b: Sequence[Tensor]) -> list[Change]:
    """The tensors that only the first or only the last of two checkpoints has."""
    return [*(unchanged(t, None, "missing") for t in only_a), *(unchanged(None, t, "new") for t in only_b)]

"""All tensors of two checkpoints: which changed, how, and where, in a sentence and a table."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from weightscope.audits.findings import Finding, Member, spans
from weightscope.audits.tensor_changes import KINDS, Pair, TensorChange, change_of, judged
from weightscope.audits.tensors import role_of, shown_shape
from weightscope.checkpoint import Tensor
from weightscope.checkpoint.blocks import batches
from weightscope.errors import counted
from weightscope.folder import Files
from weightscope.model import Model
from weightscope.parallel import in_threads
from weightscope.progress import bar
from weightscope.tables import Column, Table

NAMED = 4  # tensors in a sentence


@dataclass(frozen=True)
class TensorChanges:
    """All tensors of two checkpoints, and how each changed.

    Attributes
    ----------
    changes : list of TensorChange
        In the order of the first checkpoint, those that the last alone has behind them.
    """

    changes: Sequence[TensorChange]

    @cached_property
    def kinds(self) -> Counter[str]:
        """How many tensors changed in each way."""
        return Counter(one.kind for one in self.changes)

    @property
    def lead(self) -> str:
        """How many tensors changed, in what way and where, in a sentence or two."""
        same, total = self.kinds["identical"], len(self.changes)
        if same == total:
            return f"Every tensor is identical, {counted(total, 'tensor')} in all."
        said = []
        for kind, words in KINDS.items():
            own = [one for one in self.changes if one.kind == kind]
            if own:
                said.append(f"{len(own)} {words}{_of(own)}")
        return f"Of {counted(total, 'tensor')} {', '.join(said)}.{self._where()}"

    def _where(self) -> str:
        """Which layers the change is in."""
        layers: dict[int, bool] = {}
        outside = 0
        for one in self.changes:
            numbers, changed = role_of(one.called)[1], one.kind != "identical"
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
        """A row a tensor; its csv() is tensors.csv."""
        rows = [
            (one.called, role_of(one.called)[0], one.kind, one.detail, one.change, one.largest, one.values_changed,
             one.rows_changed, np.nan if one.rank is None else float(one.rank), *one.dtypes,
             *map(shown_shape, one.shapes))
            for one in self.changes
        ]  # fmt: skip
        return Table.of_rows(COLUMNS, rows)

    def moved_most(self, n: int) -> Table:
        """The tensors that changed most, for people."""
        order = sorted(range(len(self.changes)), key=lambda i: -np.nan_to_num(self.changes[i].change, nan=np.inf))
        shown = [i for i in order if self.changes[i].kind != "identical"][:n]
        caption = "All are in tensors.csv."
        return Table(self.table.select("tensor", "kind", "detail", "change", "rank").take(shown).columns, caption)

    @property
    def findings(self) -> Iterator[Finding]:
        """What a person should look at."""
        for kind, own in (("not_finite", ["not finite"]), ("tensor_missing", ["missing", "new", "reshaped"])):
            found = [one for one in self.changes if one.kind in own]
            if found:
                names = ", ".join(f"{one.called} ({one.kind})" for one in found[:NAMED])
                more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
                members = tuple(Member("tensor", None, name=one.called) for one in found)
                text = f"Cannot be compared: {names}{more}."
                yield Finding(kind, None, None, None, "tensors", float(len(found)), 0.0, text, members)

    def write(self, files: Files) -> None:
        """Write tensors.csv."""
        files.table("tensors.csv", self.table)


COLUMNS = (
    Column("tensor"), Column("role", meaning="The name without the numbers of layers and experts."),
    Column("kind", meaning="What kind of change it is."), Column("detail", meaning="What it is more exactly."),
    Column("change", symbol="$‖ΔW‖/‖W‖$", meaning="Frobenius norm of the change, over that before it."),
    Column("largest", meaning="The largest change of a value."),
    Column("values_changed", symbol="values changed"), Column("rows_changed", symbol="rows changed"),
    Column("rank", meaning="Of the change, where it is low.", format=".0f"),
    Column("dtype_a", symbol="dtype before"), Column("dtype_b", symbol="dtype after"),
    Column("shape_a", symbol="shape before"), Column("shape_b", symbol="shape after"),
)  # fmt: skip


def _of(own: Sequence[TensorChange]) -> str:
    """What the changes of one kind have in common, in brackets."""
    ranks = sorted({one.rank for one in own if one.rank is not None})
    if ranks:
        return f" (rank {spans(ranks)})"
    details = Counter(one.detail for one in own if one.detail)
    few = len(details) == 1 or own[0].kind in ("rounded", "quantised")
    return f" ({details.most_common(1)[0][0]})" if details and few else ""


def matched(a: Model, b: Model) -> tuple[list[Pair], list[TensorChange]]:
    """The tensors that two models share, their prefixes aside, and those that one of them alone has."""
    names = [{name.removeprefix(model.prefix): name for name in model.checkpoint} for model in (a, b)]
    pairs = [Pair(a.checkpoint[name], b.checkpoint[names[1][key]]) for key, name in names[0].items() if key in names[1]]
    lone = [_lone(a.checkpoint[name], "missing") for key, name in names[0].items() if key not in names[1]]
    lone += [_lone(b.checkpoint[name], "new") for key, name in names[1].items() if key not in names[0]]
    return pairs, lone


def _lone(tensor: Tensor, kind: str) -> TensorChange:
    if kind == "missing":
        return TensorChange(tensor.name, "", (tensor.dtype, ""), (tensor.shape, ()), kind)
    return TensorChange("", tensor.name, ("", tensor.dtype), ((), tensor.shape), kind)


def compare_tensors(a: Model, b: Model) -> TensorChanges:
    """Read every tensor of two checkpoints once, and those again whose kind of change has still to be found.

    Memory is a few blocks of a million values a core and, where a rank is looked for, two matrices of 144 columns.

    Raises
    ------
    CheckpointError
        A file cannot be read.
    """
    pairs, lone = matched(a, b)
    found = {pair.a.name: replace(pair.unchanged, kind=pair.problem or "identical") for pair in pairs}
    alike = [pair for pair in pairs if not pair.problem]
    total = sum(prod(pair.a.shape) for pair in alike)
    with bar(what="tensors", unit=" values", total=total, unit_scale=True) as moved:
        for change, values in in_threads(lambda part: (change_of(part), part[2] - part[1]), _parts(a, b, alike)):
            found[change.name] = found[change.name].and_then(change)
            moved.update(values)
    for pair, change in zip(alike, in_threads(lambda pair: judged(pair, found[pair.a.name]), alike), strict=True):
        found[pair.a.name] = change
    return TensorChanges([*found.values(), *lone])


def _parts(a: Model, b: Model, pairs: Sequence[Pair]) -> "Iterator[tuple[Pair, int, int]]":
    """The blocks of all pairs; those of files on a server come in few, large requests."""
    for batch in batches(pairs, lambda pair: pair.a.nbytes + pair.b.nbytes):
        a.checkpoint.prefetch(pair.a.name for pair in batch)
        b.checkpoint.prefetch(pair.b.name for pair in batch)
        for pair in batch:
            yield from pair.blocks()

"""Pair the tensors of two checkpoints, however their containers name and fuse them."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

from weightscope.model.model import Model, TensorsOnly
from weightscope.model.rows.names import NamedTensor, Tensors
from weightscope.pairs.deeds.pair import Pair


class Counterparts(NamedTuple):
    """A tensor of two checkpoints, or a part of one that fuses several; None where one lacks it."""

    label: str  # its role and place, a key of `Model.tensors`; or its name
    a: NamedTensor | None
    b: NamedTensor | None
    by: str = ""  # "role", or "name" where no row knows it; empty where one checkpoint lacks it

    def pair(self) -> Pair | None:
        """The pair, in one convention where both are stored differently; None where one lacks it.

        Converted tensors are read whole, and the last fused one is kept for its other parts: read
        pairs in order.
        """
        a, b = self.a, self.b
        if a is None or b is None:
            return None
        is_part = a.undone is None or b.undone is None
        alike = self.by == "name" or (not is_part and a.undone == b.undone)
        tensors = (a.tensor, b.tensor) if alike else (a.in_convention(), b.in_convention())
        role = next((tensor.role for tensor in (a, b) if tensor.has_role), "")
        return Pair(*tensors, role, self.by, self.label * is_part)


def counterparts(a: Model | TensorsOnly, b: Model | TensorsOnly) -> Iterator[Counterparts]:
    """Pair all tensors of two checkpoints, in the order of A; then those only in A, only in B.

    Tensors of one role and place are counterparts, and so are a part of a fused tensor, or an
    expert of a stacked one, and the tensor that holds it alone. What no row names is paired by its
    name.
    """
    return counterparts_among(a, b, a.checkpoint, b.checkpoint)


def counterparts_among(
    a: Model | TensorsOnly,
    b: Model | TensorsOnly,
    in_a: Iterable[str],
    in_b: Iterable[str],
    *,
    of_any_layer: bool = False,
) -> Iterator[Counterparts]:
    """Pair some tensors by name; `of_any_layer`: one layer of each, with any number."""
    sides = [_Side(model, {*names}, of_any_layer) for model, names in ((a, in_a), (b, in_b))]
    pairs = [*_by_role(*sides)]
    for left, right in (sides, reversed(sides)):
        left.split(right)
    pairs += [*_by_role(*sides), *_by_name(_Side.inner, *sides), *_by_name(_Side.in_stack, *sides)]
    places = {name: place for place, name in enumerate(a.checkpoint)}
    yield from sorted(pairs, key=lambda pair: places[pair.a.name] if pair.a else 0)
    side_a, side_b = sides
    for tensor in side_a.left.values():
        yield Counterparts(side_a.tensors.label(tensor), tensor, None)
    for tensor in side_b.left.values():
        yield Counterparts(side_b.tensors.label(tensor), None, tensor)


# roles are looked up once for a model
_unchecked: WeakKeyDictionary[Model | TensorsOnly, Tensors] = WeakKeyDictionary()


def unchecked_tensors(model: Model | TensorsOnly) -> Tensors:
    """A model's tensors, read with NaN and infinity."""
    if model not in _unchecked:
        _unchecked[model] = model.unchecked().tensors
    return _unchecked[model]


class _Side:
    """The tensors of one checkpoint that have no counterpart yet."""

    def __init__(
        self, model: Model | TensorsOnly, names: Collection[str], of_any_layer: bool
    ) -> None:
        self.tensors, self.prefix = unchecked_tensors(model), model.prefix
        self.of_any_layer = of_any_layer
        self.left: dict[str, NamedTensor] = {}
        self.add(*(tensor for tensor in self.tensors if tensor.name in names))

    def label(self, tensor: NamedTensor) -> str:
        """The key under which a tensor is looked up."""
        return self.tensors.label(replace(tensor, layer=None) if self.of_any_layer else tensor)

    def add(self, *tensors: NamedTensor) -> None:
        """Add tensors by label, and by name too where several have the same role and place."""
        labels = Counter(map(self.label, tensors))
        for tensor in tensors:
            label = self.label(tensor)
            self.left[label if labels[label] == 1 else f"{label} {self.inner(tensor)}"] = tensor

    def inner(self, tensor: NamedTensor) -> str:
        """The tensor's name without the model's prefix."""
        return tensor.name.removeprefix(self.prefix)

    def in_stack(self, tensor: NamedTensor) -> str:
        """The name with the prefix replaced by its stack's name: MLX names towers differently."""
        readers = [
            reader
            for reader in self.tensors.readers
            if reader.prefix and tensor.name.startswith(reader.prefix)
        ]
        reader = max(readers, key=lambda reader: len(reader.prefix), default=None)
        if reader is None:
            return tensor.name
        return f"{reader.stack} {tensor.name.removeprefix(reader.prefix)}"

    def split(self, opposite: "_Side") -> None:
        """Replace tensors by their parts where the other side has the parts."""
        wanted = {label for tensor in opposite.left.values() for label in opposite.labels(tensor)}
        for label, tensor in [*self.left.items()]:
            if label not in opposite.left and len(parts := self.cover(tensor, wanted)) > 1:
                del self.left[label]
                self.add(*parts)

    def labels(self, tensor: NamedTensor) -> Iterator[str]:
        """The labels of a tensor and of everything that is part of it."""
        yield self.label(tensor)
        for parts in self.divisions(tensor):
            for part in parts:
                yield from self.labels(part)

    def divisions(self, tensor: NamedTensor) -> tuple[tuple[NamedTensor, ...], ...]:
        """The ways to divide a tensor: into experts, or into the tensors that it fuses."""
        return tensor.experts, self.tensors.parts(tensor)

    def cover(self, tensor: NamedTensor, wanted: Collection[str]) -> list[NamedTensor]:
        """The fewest parts of a tensor, most with wanted labels; itself where none is wanted."""
        if self.label(tensor) in wanted:
            return [tensor]
        covers = [
            [each for part in parts for each in self.cover(part, wanted)]
            for parts in self.divisions(tensor)
        ]
        cost = {
            i: sum(self.label(part) not in wanted for part in cover)
            for i, cover in enumerate(covers)
        }
        best = min(
            (i for i in cost if cost[i] < len(covers[i])),
            key=lambda i: (cost[i], len(covers[i])),
            default=None,
        )
        return [tensor] if best is None else covers[best]


def _by_role(a: _Side, b: _Side) -> Iterator[Counterparts]:
    """Take the tensors that both have under one label."""
    named = [label for label, tensor in a.left.items() if tensor.has_role and label in b.left]
    for label in (each for each in named if b.left[each].has_role):
        tensor = a.left.pop(label)
        yield Counterparts(a.tensors.label(tensor), tensor, b.left.pop(label), "role")


def _by_name(
    named: Callable[[_Side, NamedTensor], str], a: _Side, b: _Side
) -> Iterator[Counterparts]:
    """Take the tensors of one name, unless rows say that they have different roles."""
    labels = {named(b, tensor): label for label, tensor in b.left.items()}
    for label_a, tensor in [*a.left.items()]:
        name = named(a, tensor)
        label_b = labels.get(name)
        if label_b in b.left and not (tensor.has_role and b.left[label_b].has_role):
            yield Counterparts(name, a.left.pop(label_a), b.left.pop(label_b), "name")

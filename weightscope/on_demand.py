"""A sequence whose items are made when they are asked for, and not kept: layers of a model, heads of a layer."""

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar, overload

Item = TypeVar("Item")


class OnDemand(Sequence[Item], Generic[Item]):
    """What `make` gives for each of some indices.

    Parameters
    ----------
    indices : sequence of int
    make : function of an index
    what : str
        The items in plural, for repr.
    """

    def __init__(self, indices: Sequence[int], make: Callable[[int], Item], what: str) -> None:
        self._indices, self._make, self._what = indices, make, what

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, place: int) -> Item: ...
    @overload
    def __getitem__(self, place: slice) -> "OnDemand[Item]": ...
    def __getitem__(self, place: int | slice) -> "Item | OnDemand[Item]":
        if isinstance(place, slice):
            return OnDemand(self._indices[place], self._make, self._what)
        return self._make(self._indices[place])

    def __iter__(self) -> Iterator[Item]:
        return map(self._make, self._indices)

    def __repr__(self) -> str:
        shown = [*map(str, self._indices[:6]), "..."] if len(self) > 7 else [*map(str, self._indices)]
        return f"<{len(self)} {self._what}: {', '.join(shown)}>"

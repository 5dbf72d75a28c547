"""A plant: something done to a checkpoint, and what commands have to say of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.plants.named_parts import Weights, write_weights


class Made(NamedTuple):
    """A suspect, the checkpoints that it is compared with, and what a judge needs besides."""

    suspect: str | Path
    bases: Sequence[str | Path] = ()
    more: Any = None


@dataclass(frozen=True)
class Plant:
    """Something done to a checkpoint, and what commands have to say of it.

    Attributes
    ----------
    name : str
    make : function
        Writes the suspect, and bases that are not there yet, into a folder that it is given.
    expects : dict
        By command ("same", "lineage", "audit"): words, kinds or a verdict.
    cells : dict
        Cells of its row that are known before it is judged.
    """

    name: str
    make: Callable[[Path], Made]
    expects: Mapping[str, Any] = field(default_factory=dict)
    cells: Mapping[str, Any] = field(default_factory=dict)


def written(make: Callable[[], Weights], *bases: str | Path, name: str = "suspect") -> Callable[[Path], Made]:
    """The `make` of a plant whose suspect is weights; `more` has the base's layer that each layer came from."""

    def make_in(folder: Path) -> Made:
        weights = make()
        write_weights(weights, folder / name)
        return Made(folder / name, bases, weights.came_from)

    return make_in

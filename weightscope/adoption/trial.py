"""A row on trial: tiny models of one architecture at work, and how near a row comes to what they were seen to do."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightscope.adoption.census import TRIALS, at_work
from weightscope.adoption.comparing import Errors, measured
from weightscope.adoption.judge import Stored, judge, pairs, stacks
from weightscope.adoption.observed import Observed
from weightscope.adoption.tiny import first_line
from weightscope.checkpoint import Checkpoint, open_checkpoint
from weightscope.errors import CheckpointError
from weightscope.families import Family
from weightscope.model import Model
from weightscope.writing import scratch_folder

EXACT = 1e-5  # of probabilities, and of outputs relative to the largest


@dataclass(frozen=True)
class Tiny:
    """A tiny model of an architecture, as it was saved and as it was seen at work, by the stacks that it has."""

    model: Any
    checkpoint: Checkpoint
    stored: Stored
    stacks: Mapping[str, Sequence[Observed]]


@dataclass(frozen=True, order=True)
class Nearness:
    """How near a row comes, the more the nearer; compared from the first field on.

    Attributes
    ----------
    opened : bool
        It opens the model, and reads all that attention stores.
    exact, values, here : int
        Layers that are exact; whose output is right given the model's own attention; and of which a token's score with
        itself is right.
    said : str
        What is wrong with the first layer that is not exact; nothing where all are.
    """

    opened: bool
    exact: int
    values: int
    here: int
    said: str = ""

    @property
    def rank(self) -> tuple[bool, int, int, int]:
        """What is compared: all but the words."""
        return self.opened, self.exact, self.values, self.here


NOWHERE = Nearness(False, 0, 0, 0)


@contextmanager
def tiny_models(config: Any, name: object) -> Iterator[tuple[Tiny, ...]]:
    """Two tiny models of a config, of two sizes and seeds, near and far; they are gone after the block.

    Raises
    ------
    CheckpointError
        transformers builds none so small, or it does not run.
    """
    with ExitStack() as folders:
        made: list[Tiny] = []
        for trial in TRIALS:
            folder = folders.enter_context(scratch_folder())
            try:
                model, observed = at_work(config, *trial)
                model.save_pretrained(folder)
            except Exception as error:  # whatever transformers raises of a config that does not fit together
                problem = f"transformers builds no tiny model of it: {first_line(error)}"
                raise CheckpointError(problem, file=name) from None
            made.append(Tiny(model, open_checkpoint(folder), Stored(model, folder), stacks(observed)))
        yield tuple(made)


def nearness(row: Family, tiny: Tiny, stack: str) -> Nearness:
    """How near a row comes to one stack of a tiny model."""
    members = tiny.stacks[stack]
    try:
        model = Model(tiny.checkpoint, row)
        for index in model.attention_layers:
            model.attention_tensors(index)
        found = [_best(layer, one) for layer, one in pairs(model, members, tiny.stored)]
    except CheckpointError as error:
        return Nearness(False, 0, 0, 0, str(error).splitlines()[0])
    except (ValueError, TypeError, IndexError, KeyError) as error:  # cells that do not go together
        return Nearness(False, 0, 0, 0, first_line(error))
    if not found:
        return Nearness(False, 0, 0, 0, "its tensors are none of a layer's")
    said = [one if isinstance(one, str) else one.words(EXACT) for one in found]
    numbers = [one for one in found if isinstance(one, Errors)]
    return Nearness(
        bool(numbers), said.count(""), sum(one.output <= EXACT for one in numbers),
        sum(one.here <= EXACT for one in numbers), next(filter(None, said), ""),
    )  # fmt: skip


def _best(layer: Any, one: Observed) -> Errors | str:
    """The errors under whichever of the streams that may have entered gives the smallest."""
    tried = list(measured(layer, one))
    numbers = [found for found in tried if isinstance(found, Errors)]
    if numbers:
        return min(numbers, key=lambda found: (found.output > EXACT, found.attention, np.nan_to_num(found.output)))
    return next(iter(tried), "nothing was seen to enter it")


def proved(row: Family, tinies: Sequence[Tiny], stack: str) -> str:
    """What is wrong with a row of one stack in any of the models; nothing where it is exact in all."""
    for tiny in tinies:
        try:
            verdicts = judge(tiny.stacks[stack], tiny.stored, [Model(tiny.checkpoint, row)], tolerance=EXACT)
        except CheckpointError as error:
            return str(error).splitlines()[0]
        for one in verdicts:
            if one.verdict != "exact":
                return one.reason
    return ""

"""A row on trial: tiny models of one architecture at work, and how near a row comes to what they were seen to do."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightscope.adopting.census import TRIALS, at_work
from weightscope.adopting.hooks import Observed
from weightscope.adopting.judge import Errors, Stored, judge, measured, pairs, stacks
from weightscope.adopting.tiny_models import first_line
from weightscope.architectures import Family
from weightscope.checkpoint import Checkpoint, open_checkpoint
from weightscope.errors import CheckpointError
from weightscope.files import scratch_folder
from weightscope.model import Model

EXACT = 1e-5  # of probabilities, and of outputs relative to the largest


@dataclass(frozen=True)
class Tiny:
    """A tiny model, its saved checkpoint, and the recorded calls of each of its stacks."""

    model: Any
    checkpoint: Checkpoint
    stored: Stored
    stacks: Mapping[str, Sequence[Observed]]


@dataclass(frozen=True, order=True)
class Nearness:
    """How close a row is to a tiny model; larger is closer, earlier fields count first."""

    opened: bool  # It opens the model, and reads all that attention stores
    # Numbers of layers: exact; with the right output given the model's own attention; with the right score of a token
    # with itself.
    exact: int
    values: int
    here: int
    problem: str = ""  # What is wrong with the first layer that is not exact; empty if all are

    @property
    def rank(self) -> tuple[bool, int, int, int]:
        """What is compared: all but the words."""
        return self.opened, self.exact, self.values, self.here


NOWHERE = Nearness(False, 0, 0, 0)


@contextmanager
def tiny_models(config: Any, name: object) -> Iterator[tuple[Tiny, ...]]:
    """Two tiny models of a config, of two sizes and seeds, near and far; they are gone after the block."""
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
        model = Model.of_row(tiny.checkpoint, row)
        for index in model.attention_layers:
            model.attention_tensors(index)
        results = [_best(layer, call) for layer, call in pairs(model, members, tiny.stored)]
    except CheckpointError as error:
        return Nearness(False, 0, 0, 0, str(error).splitlines()[0])
    except (ValueError, TypeError, IndexError, KeyError) as error:  # cells that do not go together
        return Nearness(False, 0, 0, 0, first_line(error))
    if not results:
        return Nearness(False, 0, 0, 0, "its tensors are none of a layer's")
    problems = [result if isinstance(result, str) else result.words(EXACT) for result in results]
    numbers = [errors for errors in results if isinstance(errors, Errors)]
    return Nearness(
        bool(numbers), problems.count(""), sum(errors.output <= EXACT for errors in numbers),
        sum(errors.here <= EXACT for errors in numbers), next(filter(None, problems), ""),
    )  # fmt: skip


def slopes_seen(row: Family, tiny: Tiny, stack: str) -> tuple[int, float, float] | None:
    """Number of heads, and rise and start of -log2 of their slopes; None where what the row lacks is no such bias.

    The bias is what the first layer's scores have that the row's lack: linear in the key's position in every head.
    """
    try:
        layer, call = next(pairs(Model.of_row(tiny.checkpoint, row), tiny.stacks[stack], tiny.stored))
        x = next(stream for stream in call.streams if stream.shape[1] == layer.d_model)
        lacking = call.scores.astype(np.float64) - layer.scores(x)
    except (CheckpointError, ValueError, TypeError, IndexError, StopIteration):  # cells that do not go together
        return None
    last = lacking[:, -1]  # (H, n): of the last query, which sees every key as a rule
    slopes = (last[:, -1] - last[:, -2]).clip(1e-9)
    if np.abs(np.diff(last[:, last.shape[1] // 2 :]) - slopes[:, None]).max() > 1e-3 or len(slopes) < 3:
        return None
    heads = np.arange(1, len(slopes) + 1)
    rise, start = np.polyfit(heads, -np.log2(slopes), 1)
    return len(slopes), float(rise), float(start)


def _best(layer: Any, one: Observed) -> Errors | str:
    """The errors under whichever of the streams that may have entered gives the smallest."""
    tried = list(measured(layer, one))
    numbers = [errors for errors in tried if isinstance(errors, Errors)]
    if numbers:
        return min(numbers, key=lambda found: (found.output > EXACT, found.attention, np.nan_to_num(found.output)))
    return next(iter(tried), "nothing was seen to enter it")


def proved(row: Family, tinies: Sequence[Tiny], stack: str) -> str:
    """What is wrong with a row of one stack in any of the models; nothing where it is exact in all."""
    for tiny in tinies:
        try:
            verdicts = judge(tiny.stacks[stack], tiny.stored, [Model.of_row(tiny.checkpoint, row)], tolerance=EXACT)
        except CheckpointError as error:
            return str(error).splitlines()[0]
        for verdict in verdicts:
            if verdict.verdict != "exact":
                return verdict.reason
    return ""

"""Rows on trial: tiny models of one architecture at work, and a row's nearness to them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from weightscope.adopting.comparison import (
    REFUSED,
    Errors,
    Stored,
    matched,
    measured,
    names_at_work,
    pairs,
    problem_of_stack,
    stacks,
)
from weightscope.adopting.config_keys import tiny_config, varied
from weightscope.adopting.hooks import Observed, observe
from weightscope.adopting.tiny_models import PLANS, SIZES, Size, build, class_and_line, classes_of
from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.core.errors import CheckpointError, first_line
from weightscope.core.files import scratch_folder
from weightscope.model.model import Model
from weightscope.model.rows.family import Family

EXACT = 1e-5  # error of probabilities, and of outputs relative to the largest
MOST_CLASSES = 3  # built in the search for one that attends
MOST_PLANS = 3  # tried after one that runs, for the sake of parts that do not
FAR = 37  # where the second text begins
# Sizes, seed and first position of the two models of a type; True for other numbers in its config.
TRIALS = ((SIZES[:1], 1, 0, False), (SIZES[1:], 2, FAR, True))


@dataclass(frozen=True)
class Tiny:
    """A tiny model, its saved checkpoint, and the recorded calls of each of its stacks."""

    model: Any
    checkpoint: Checkpoint
    stored: Stored
    stacks: Mapping[str, Sequence[Observed]]


@dataclass(frozen=True, order=True)
class Nearness:
    """The nearness of a row to a tiny model; larger is nearer, earlier fields count first."""

    opened: bool = False  # it opens the model, and reads all that attention stores
    exact: int = 0  # exact layers
    values: int = 0  # layers whose output is right by the model's own attention
    here: int = 0  # layers whose scores of a token with itself are right
    # the problem of the first layer that is not exact; empty if all are
    problem: str = field(default="", compare=False)


# errors of cells that do not go together
UNFIT = (CheckpointError, ValueError, TypeError, IndexError, StopIteration)


def at_work(
    config: Any, sizes: Sequence[Size], seed: int, start: int, other: bool = False
) -> tuple[Any, list[Observed]]:
    """A tiny model of a config at work, with the first and boldest sizes that it runs with.

    With `other` numbers in its config, if it runs with them.
    """
    if other:
        with suppress(Exception):  # whatever transformers raises of numbers that do not go together
            return at_work(type(config).from_dict(varied(config.to_dict())), sizes, seed, start)
    problems: list[str] = []
    best: tuple[Any, list[Observed]] | None = None
    left = MOST_PLANS * len(sizes)
    for plan, size in product(PLANS, sizes):
        if not left:
            break
        left -= best is not None
        try:
            model, observed, unseen = _attending(tiny_config(config, size, plan), size, seed, start)
        except Exception as error:  # whatever a config raises that does not fit together
            problems.append(class_and_line(error))
            continue
        if observed and (best is None or len(stacks(observed)) > len(stacks(best[1]))):
            best = model, observed
        if best and not unseen:
            break
        problems += unseen
    if best is None:
        problem = problems[0] if problems else "no attention is computed"
        raise ValueError(problem.removeprefix("ValueError: "))
    return best


def _attending(
    config: Any, size: Size, seed: int, start: int
) -> tuple[Any, list[Observed], list[str]]:
    """A model of the first class that attends (else the first), its layers and what did not run."""
    first: tuple[Any, list[Observed], list[str]] | None = None
    for kind in classes_of(config)[:MOST_CLASSES]:
        with suppress(ValueError):  # this class cannot be built
            model = build(config, seed, [kind])
            seen = model, *observe(model, size, seed, start)
            if seen[1]:
                return seen
            first = first or seen
    if first is None:  # a later class can be built, or the error says why none can
        model = build(config, seed)
        first = model, *observe(model, size, seed, start)
    return first


@contextmanager
def tiny_models(config: Any, name: object) -> Iterator[tuple[Tiny, ...]]:
    """Two tiny models of a config, of two sizes and seeds, near and far; gone after the block."""
    with ExitStack() as folders:
        made: list[Tiny] = []
        for trial in TRIALS:
            folder = folders.enter_context(scratch_folder())
            try:
                model, observed = at_work(config, *trial)
                model.save_pretrained(folder)
            except Exception as error:  # whatever transformers raises of an inconsistent config
                problem = f"transformers builds no tiny model of it: {class_and_line(error)}"
                raise CheckpointError(problem, file=name) from None
            checkpoint, stored = open_checkpoint(folder), Stored(model, folder)
            made.append(Tiny(model, checkpoint, stored, stacks(observed)))
        yield tuple(made)


def nearness(row: Family, tiny: Tiny, stack: str) -> Nearness:
    """The nearness of a row to one stack of a tiny model."""
    members = tiny.stacks[stack]
    try:
        model = Model.of_row(tiny.checkpoint, row)
        for index in model.attention_layers:
            model.attention_tensors(index)
        results = [_best(layer, call) for layer, call in pairs(model, members, tiny.stored)]
    except CheckpointError as error:
        return Nearness(problem=first_line(error))
    except (ValueError, TypeError, IndexError, KeyError) as error:  # cells that do not go together
        return Nearness(problem=class_and_line(error))
    if not results:
        return Nearness(problem="its tensors are none of a layer's")
    problems = [result if isinstance(result, str) else result.words(EXACT) for result in results]
    numbers = [errors for errors in results if isinstance(errors, Errors)]
    return Nearness(
        bool(numbers),
        problems.count(""),
        sum(errors.output <= EXACT for errors in numbers),
        sum(errors.here <= EXACT for errors in numbers),
        next(filter(None, problems), ""),
    )


def slopes_seen(row: Family, tiny: Tiny, stack: str) -> tuple[int, float, float] | None:
    """Number of heads, and rise and start of -log2 of their slopes; None if scores lack no such
    bias.

    The bias is what the first layer's scores have that the row's lack: linear in the key's position
    in every head.
    """
    try:
        model = Model.of_row(tiny.checkpoint, row)
        layer, call = next(pairs(model, tiny.stacks[stack], tiny.stored))
        x = next(stream for stream in call.streams if stream.shape[1] == layer.d_model)
        lacking = call.scores.astype(np.float64) - layer.scores(x)
    except UNFIT:
        return None
    last = lacking[:, -1]  # (H, n): the last query, which sees every key as a rule
    slopes = (last[:, -1] - last[:, -2]).clip(1e-9)
    unevenness = np.abs(np.diff(last[:, last.shape[1] // 2 :]) - slopes[:, None]).max()
    if unevenness > 1e-3 or len(slopes) < 3:
        return None
    heads = np.arange(1, len(slopes) + 1)
    rise, start = np.polyfit(heads, -np.log2(slopes), 1)
    return len(slopes), float(rise), float(start)


def _best(layer: Any, call: Observed) -> Errors | str:
    """The errors under the stream that gives the smallest, of those that may have entered."""
    tried = list(measured(layer, call))
    numbers = [errors for errors in tried if isinstance(errors, Errors)]

    def size(errors: Errors) -> tuple[bool, float, float]:
        return errors.output > EXACT, errors.attention, float(np.nan_to_num(errors.output))

    if numbers:
        return min(numbers, key=size)
    return next(iter(tried), "nothing was seen to enter it")


def proved(row: Family, tinies: Sequence[Tiny], stack: str) -> str:
    """The problem of a row of one stack in any of the models; empty if it is exact in all."""
    for tiny in tinies:
        try:
            problem, unread = problem_of(Model.of_row(tiny.checkpoint, row), tiny, stack, EXACT)
        except CheckpointError as error:
            return first_line(error)
        if problem or unread:
            return problem.removeprefix(REFUSED) or unread
    return ""


def problem_of(model: Model, tiny: Tiny, stack: str, tolerance: float) -> tuple[str, str]:
    """The problem of one stack as a model reads it, and its unread part; both empty if exact."""
    calls = tiny.stacks[stack]
    by_module = matched([model], names_at_work(calls, tiny.stored))
    problem, read = problem_of_stack(by_module, calls, calls, tolerance)
    layers = len({call.module for call in calls})
    if read == layers:
        return problem, ""
    return problem, f"{read} of {layers} layers are read" if read else "no row reads this stack"

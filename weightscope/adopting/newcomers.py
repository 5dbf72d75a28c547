"""Types of transformers that the census does not know, and how their attention stacks are read."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import weightscope as ws
from weightscope.adopting.comparison import REFUSED, TOLERANCE, line_of
from weightscope.adopting.tiny_models import mappings_of_heads
from weightscope.adopting.trial import Tiny, problem_of, tiny_models
from weightscope.core.errors import CheckpointError
from weightscope.model.config.reading import stacks_of
from weightscope.model.rows import table
from weightscope.model.rows.table import FAMILIES

SECONDS = 100  # processor time for a type


class OutOfTime(BaseException):
    """A type took longer than `SECONDS`; handlers of transformers' errors let it pass."""


@contextmanager
def limited_time() -> Iterator[None]:
    """Raise `OutOfTime` if the block takes longer than `SECONDS`."""

    def too_long(*_: Any) -> None:
        raise OutOfTime(f"takes longer than {SECONDS} s")

    before = signal.signal(signal.SIGPROF, too_long)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def model_types() -> list[str]:
    """Every model_type that some auto class builds a model of, or that a row reads."""
    kinds, mappings = [], mappings_of_heads()
    read_types = {kind for row in FAMILIES for kind in row.types}
    for kind in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[kind]
        except (AttributeError, ImportError):  # named, but not there without other packages
            continue
        if kind in read_types or any(config in mapping for mapping in mappings):
            kinds.append(kind)
    return sorted(kinds)


def newcomers() -> list[str]:
    """The model_types that the installed transformers builds and the census does not know."""
    return sorted({*model_types()} - table.census().keys())


def verdicts(kind: str) -> Iterator[str]:
    """One line for every attention stack of a type, as read on two tiny random models."""
    try:
        with limited_time(), tiny_models(CONFIG_MAPPING[kind](), kind) as tinies:
            for stack, calls in tinies[0].stacks.items():
                kinds, attends = {call.kind for call in calls}, "self"
                if "cross" in kinds:
                    attends = "cross"
                elif kinds == {"causal"}:
                    attends = "causal"
                verdict, reason = _verdict(tinies, stack)
                yield " ".join(filter(None, (f"{kind}:", verdict, attends, stack, reason)))
    except (CheckpointError, OutOfTime) as error:
        yield f"{kind}: not built {error}"


def _verdict(tinies: tuple[Tiny, ...], stack: str) -> tuple[str, str]:
    """ "exact", "refused" or "WRONG" for a stack in both models, and the reason."""
    for tiny in tinies:
        if stack not in tiny.stacks:
            return "refused", "seen at one size only"
        models, refusal = _opened(tiny)
        outcomes = [problem_of(model, tiny, stack, TOLERANCE) for model in models]
        problems = [problem for problem, _ in outcomes if problem]
        if wrong := next((problem for problem in problems if not problem.startswith(REFUSED)), ""):
            return "WRONG", wrong
        if problems or not any(unread == "" for _, unread in outcomes):
            unread = next((unread for _, unread in outcomes), refusal)
            return "refused", next(iter(problems), unread).removeprefix(REFUSED)
    return "exact", ""


def _opened(tiny: Tiny) -> tuple[list[ws.Model], str]:
    """Every model that weightscope opens in a tiny one's file, and the reason that it opens no
    more.
    """
    models, refusal, folder = [], "", tiny.checkpoint.folder
    for tower in (None, *stacks_of(tiny.checkpoint)):
        try:
            model = ws.open_model(folder, tower=tower)
            model.prefix  # noqa: B018 (raises where the file has no layer of it)
            models.append(model)
        except CheckpointError as error:
            refusal = refusal or line_of(error, folder)
    return models, refusal

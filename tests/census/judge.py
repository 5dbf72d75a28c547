"""One verdict per attention stack of a model, on all that weightscope opens in its checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import weightscope as ws
from weightscope.adopting.comparison import (
    REFUSED,
    TOLERANCE,
    Stored,
    line_of,
    matched,
    names_at_work,
    problem_of_stack,
    stacks,
)
from weightscope.adopting.hooks import Observed
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.core.errors import CheckpointError
from weightscope.model.config.reading import stacks_of
from weightscope.model.rows.table import title


@dataclass(frozen=True)
class Verdict:
    """The verdict on one attention stack."""

    stack: str  # Where its attention modules are, `{}` for every index
    kind: str  # self, causal or cross
    layers: int
    verdict: str  # exact, refused or WRONG; unseen where weightscope reads a stack that did not run
    reason: str = ""
    row: str = ""  # What read it: a row of the table, or several, as the census calls them


def readings(folder: Path) -> tuple[list[ws.Model], str, dict[str, str]]:
    """Every model that weightscope opens in a checkpoint, the message if there is none, and the message for every
    refused stack, by the prefix of the stack's tensor names.
    """
    models: list[ws.Model] = []
    problem, refused = "", dict[str, str]()
    for name, stack in ({"": None} | dict(stacks_of(open_checkpoint(folder)))).items():
        try:
            model = ws.open_model(folder, tower=name or None)
            model.prefix  # noqa: B018 (raises where the file has no layer of it)
            models.append(model)
        except CheckpointError as error:
            line = line_of(error, folder)
            if stack and "tower" in line:  # refused by name; why it is not read was said before
                line = problem or stack.refusal or line
            if stack and (start := stack.prefix + (stack.family.layer.split("{i}")[0] if stack.family else "")):
                refused[start] = line
            if stack is None or "tower" not in str(error):
                problem = problem or line
    return models, problem, refused


def judge(
    observed: Sequence[Observed],
    stored: Stored,
    models: Sequence[ws.Model],
    problem: str = "",
    refusals: Mapping[str, str] | None = None,
) -> list[Verdict]:
    """One verdict per attention stack that ran, and per stack that weightscope reads and that did not run."""
    by_module = matched(models, names_at_work(observed, stored))
    verdicts = []
    for stack, calls in stacks(observed).items():
        modules = dict.fromkeys(call.module for call in calls)
        wrong, met = problem_of_stack(by_module, calls, observed, TOLERANCE)
        if wrong and not wrong.startswith(REFUSED):
            verdict, reason = "WRONG", wrong
        elif met == len(modules) and not wrong:
            verdict, reason = "exact", ""
        else:
            refusal = "" if met else _refusal(refusals or {}, stored.under(next(iter(modules))))
            rest = refusal or (problem if not models else "no row reads this stack" if not met else "")
            reason = wrong.removeprefix(REFUSED) or rest or f"{met} of {len(modules)} layers are read"
            verdict = "refused"
        readers = [model for module in modules for model, _ in by_module.get(module, ())]
        kinds = {call.kind for call in calls}
        crosses = "cross" in kinds or any(model.family.memory for model in readers)
        kind = "cross" if crosses else "causal" if kinds == {"causal"} else "self"
        rows = " ".join(sorted({title(model.family) for model in readers}))
        verdicts.append(Verdict(stack, kind, len(modules), verdict, reason, rows))
    ran = {id(model) for module_readings in by_module.values() for model, _ in module_readings}
    return verdicts + [_unseen(model) for model in models if id(model) not in ran]


def _unseen(model: ws.Model) -> Verdict:
    """A stack that weightscope opens, but whose attention never ran."""
    stack = (model.prefix + model.family.layer).format(i="{}").rstrip(".")
    return Verdict(stack, "", len(model.attention_layers), "unseen", "it did not run", title(model.family))


def _refusal(refusals: Mapping[str, str], names: set[str]) -> str:
    """The refusal of the stack with tensors of these names, or else of one in the same part of the model."""
    for beginning in (str, lambda start: start.partition(".")[0] + "."):
        for start, line in refusals.items():
            if any(name.startswith(beginning(start)) for name in names):
                return line
    return ""

"""Is a model read the same, whichever of transformers' public classes saved it? Each names its tensors otherwise.

A class holds the same attention under other names (`model.layers`, `bert.encoder`), and saving may rename again. A
model of each class gets the weights of one that was judged at work; what weightscope reads of both must be equal.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch

import weightscope as ws
from tests.census.judge import readings
from weightscope.adopting.comparison import Stored, line_of, matched, stack_of
from weightscope.adopting.tiny_models import build, classes_of
from weightscope.core.errors import CheckpointError
from weightscope.core.files import scratch_folder


@dataclass(frozen=True)
class Difference:
    """What a stack of a class is read as, where it is not read as in the class that was judged."""

    verdict: str  # refused, or WRONG where it is read otherwise
    reason: str


def layers_read(models: Sequence[ws.Model], names: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """What is read of each module, whose tensors' names are given: layers as text, or messages that refuse them."""
    read: dict[str, set[str]] = {module: set() for module in names}
    for module, module_readings in matched(models, names).items():
        for model, index in module_readings:
            try:
                read[module].add(contents(model.layer(index)))
            except CheckpointError as error:
                read[module].add("refused: " + line_of(error, model.checkpoint.folder))
    return read


def contents(value: Any) -> str:
    """Everything in a layer as text, equal for equal numbers."""
    if isinstance(value, np.ndarray):
        return f"{value.shape} {value.dtype} {hash(np.ascontiguousarray(value).tobytes())}"
    if is_dataclass(value):
        return f"{type(value).__name__}({', '.join(contents(getattr(value, cell.name)) for cell in fields(value))})"
    if callable(value):  # of distances or positions
        try:
            return contents(value(np.arange(4)))
        except Exception:  # takes something else
            return str(getattr(value, "__qualname__", value))
    if isinstance(value, Mapping):
        return str({key: contents(inner) for key, inner in value.items()})
    if isinstance(value, list | tuple):
        return str([contents(inner) for inner in value])
    return str(value)


def through_other_classes(
    model: Any, read: Mapping[str, set[str]], seed: int
) -> Iterator[dict[str, Difference | None]]:  # fmt: skip
    """For every other public class that can be built, its stacks: None where they are read alike, or the difference."""
    for kind in classes_of(model.config):
        if kind is type(model):
            continue
        try:
            sibling = build(model.config, seed, [kind])
        except Exception:
            continue
        with scratch_folder() as folder:
            places = give_weights(model, sibling)
            sibling.save_pretrained(folder)
            stored = Stored(sibling, folder)
            names = {
                module: {name for here, there in places.items() if there.startswith(module + ".")
                         for name in stored.names[here] or (here,)}
                for module in read
            }  # fmt: skip
            models, problem, _ = readings(folder)
            again = layers_read(models, {module: held for module, held in names.items() if held})
        by_stack: dict[str, Difference | None] = {}
        for module, layers in again.items():
            stack = stack_of(module)
            by_stack[stack] = by_stack.get(stack) or _difference(kind.__name__, read[module], layers, problem)
        yield by_stack


def _difference(kind: str, before: set[str], after: set[str], problem: str) -> Difference | None:
    """How a module is read otherwise as a class saves it; None where it is read alike."""
    refusals = [text.removeprefix("refused: ") for text in after if text.startswith("refused: ")]
    was_refused = all(text.startswith("refused: ") for text in before)
    if before == after or (was_refused and (refusals or not after)):
        return None
    if was_refused:
        return Difference("refused", f"read only as {kind} saves it, which was not compared")
    if not after or refusals:
        return Difference("refused", f"as {kind} saves it: {(refusals or [problem])[0] or 'no row reads this stack'}")
    return Difference("WRONG", f"as {kind} saves it, other tensors are read")


def give_weights(model: Any, other: Any) -> dict[str, str]:
    """Copy a model's parameters to another class of it; names there by names here, for all that both have."""
    ours, theirs = (dict(each.named_parameters(remove_duplicate=False)) for each in (model, other))
    places = _places(ours, theirs)
    with torch.no_grad():
        for here, there in places.items():
            theirs[here].copy_(ours[there])
    return places


def _places(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, str]:
    """Their names by ours: either may have a longer beginning."""
    heads = {name[: -len(end)] for end in theirs for name in ours if name.endswith("." + end)} | {""}
    places: dict[str, str] = {}
    for head in heads:
        here = {}
        for name, parameter in theirs.items():
            parts = name.split(".")
            tails = (head + ".".join(parts[start:]) for start in range(len(parts)))
            if (tail := next((tail for tail in tails if tail in ours), "")) and ours[tail].shape == parameter.shape:
                here[name] = tail
        places = max(places, here, key=len)
    return places

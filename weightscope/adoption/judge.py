"""What weightscope reads from a checkpoint against what the model itself was seen to do: exact, refused or wrong."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import weightscope as ws
from weightscope.adoption.comparing import TOLERANCE, compare
from weightscope.adoption.observed import Observed
from weightscope.attention.layer import Layer
from weightscope.checkpoint import open_checkpoint
from weightscope.errors import CheckpointError
from weightscope.families import stacks_of


@dataclass(frozen=True)
class Verdict:
    """What is to be said of one stack of a model.

    Attributes
    ----------
    stack : str
        Where its attention modules are, `{}` for every index.
    kind : str
        self, causal or cross.
    layers : int
    verdict : str
        exact, refused or WRONG.
    reason : str
    """

    stack: str
    kind: str
    layers: int
    verdict: str
    reason: str = ""


def stack_of(path: str) -> str:
    """A module's path without its indices: what all layers of a stack have in common."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "{}", path)


def stacks(observed: Sequence[Observed]) -> dict[str, list[Observed]]:
    """Attention layers by the stack that they are in."""
    found: dict[str, list[Observed]] = defaultdict(list)
    for one in observed:
        found[stack_of(one.module)].append(one)
    return dict(found)


def readings(folder: Path, family: str | None = None) -> tuple[list[ws.Model], str, dict[str, str]]:
    """Every model that weightscope opens in a checkpoint, what it says if there is none, and what of each stack that it
    knows and refuses, by the beginning of its tensors' names.
    """
    refused: dict[str, str] = {}
    try:
        first = ws.open_model(folder, family=family)
        problem = ""
    except CheckpointError as error:
        first, problem = None, _line(error, folder)
    found = [] if first is None else [first]
    for name, stack in stacks_of(open_checkpoint(folder)).items():
        try:
            found.append(ws.open_model(folder, family=family, tower=name))
        except CheckpointError as error:
            start = stack.prefix + (stack.family.layer.split("{i}")[0] if stack.family else "")
            if start and family is None:
                refused[start] = _line(error, folder)
            if "tower" not in str(error) and not problem:
                problem = _line(error, folder)
    return found, problem, refused


def _line(error: Exception, folder: Path) -> str:
    """An error in its first line, without where the checkpoint lies."""
    return str(error).splitlines()[0].replace(str(folder), folder.name)


class Stored:
    """Which tensors of a saved checkpoint are a module's parameters: told by their values, whatever their names became.

    Parameters
    ----------
    model : torch.nn.Module
    folder : Path
    """

    def __init__(self, model: Any, folder: Path) -> None:
        checkpoint = open_checkpoint(folder)
        by_value: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for name in checkpoint:
            try:
                values = np.asarray(checkpoint[name].read(), np.float32)
            except CheckpointError:  # counters, and tables of integers
                continue
            by_value[_print_of(values)].append(name)
        self.names = {
            own: by_value.get(_print_of(parameter.detach().float().numpy()), [])
            for own, parameter in model.named_parameters(remove_duplicate=False)
        }

    def under(self, module: str) -> set[str]:
        """The stored names of a module's parameters; their names in memory where the file holds them otherwise."""
        own = {name: stored for name, stored in self.names.items() if name.startswith(module + ".")}
        return {one for name, stored in own.items() for one in stored or (name,)}


def _print_of(values: np.ndarray) -> tuple[str, ...]:
    """The same for a tensor, its transpose and its reshapes: its numbers sorted."""
    flat = np.sort(values.ravel())
    return str(values.size), flat[:64].tobytes().hex(), flat[-64:].tobytes().hex()


def judge(
    observed: Sequence[Observed],
    stored: Stored,
    models: Sequence[ws.Model],
    problem: str = "",
    refusals: Mapping[str, str] | None = None,
    tolerance: float = TOLERANCE,
) -> list[Verdict]:
    """A verdict of every stack that was seen.

    Parameters
    ----------
    observed : sequence of Observed
    stored : Stored
    models : sequence of Model
        What weightscope reads of the same model as `save_pretrained` writes it; see `readings`.
    problem : str
        What it said where it opened nothing.
    refusals : mapping of str, optional
        What it said of stacks that it knows and refuses, by the beginning of their tensors' names.
    tolerance : float
    """
    matched = _matched(models, observed, stored)
    at_work = _at_work(matched, observed)
    found = []
    for name, members in stacks(observed).items():
        modules = list(dict.fromkeys(one.module for one in members))
        reasons, refused, met = [], "", 0
        for module in modules:
            own_calls = [one for one in members if one.module == module]
            said = _of_module(matched.get(module, []), own_calls, at_work, tolerance)
            if said is None:
                continue
            met += 1
            if said.startswith("refused: "):
                refused = refused or said.removeprefix("refused: ")
            elif said:
                reasons.append(said)
        if _disordered([matched[module] for module in modules if module in matched]):
            reasons.append("its layers are read in another order")
        if reasons:
            verdict, reason = "WRONG", reasons[0]
        elif met == len(modules) and not refused:
            verdict, reason = "exact", ""
        else:
            own = "" if met else _refusal(refusals or {}, stored.under(modules[0]))
            rest = own or (problem if not models else "no row reads this stack" if not met else "")
            verdict, reason = "refused", refused or rest or f"{met} of {len(modules)} layers are read"
        kinds = {one.kind for one in members}
        crosses = any(model.family.memory for module in modules for model, _ in matched.get(module, ()))
        kind = "cross" if crosses or "cross" in kinds else "causal" if kinds == {"causal"} else "self"
        found.append(Verdict(name, kind, len(modules), verdict, reason))
    return found


def _refusal(refusals: Mapping[str, str], names: set[str]) -> str:
    """What was said of the stack that has tensors of these names, or else of one in the same part of the model."""
    for beginning in (str, lambda start: start.partition(".")[0] + "."):
        for start, line in refusals.items():
            if any(name.startswith(beginning(start)) for name in names):
                return line
    return ""


Reading = tuple[ws.Model, int]


def _matched(models: Sequence[ws.Model], observed: Sequence[Observed], stored: Stored) -> Mapping[str, list[Reading]]:
    """Of every module seen the layers of weightscope's models that read its tensors; by layers, in their order."""
    found: dict[str, list[Reading]] = defaultdict(list)
    modules = list(dict.fromkeys(one.module for one in observed))
    names = {module: stored.under(module) for module in modules}
    for model in models:
        for index in (*model.attention_layers, *model.borrowing_layers):
            read = _projections(model, index)
            shares = {module: len(read & names[module]) for module in modules}
            best = max(shares, key=lambda module: shares[module], default=None)
            if best is not None and shares[best]:
                found[best].append((model, index))
    return found


def _projections(model: ws.Model, index: int) -> set[str]:
    """The names of the tensors that make a layer's queries, keys, values and output."""
    row, stem = model.family.in_layer(model.config.layer_types[index]), _layer_name(model, index)
    modules = {row.query, row.key, row.value, row.output, *row.others}
    return {name for module in modules if module for name in model.checkpoint.names_under(f"{stem}{module}.")} | {
        stem + name for name in row.loose
    }


def _layer_name(model: ws.Model, index: int) -> str:
    """What stands before the modules of a layer in the file."""
    return model.prefix + model.family.stored_name(model.config, index)


def _disordered(readings: Sequence[Sequence[Reading]]) -> bool:
    """Whether a model has layers in another order than that in which their modules are at work."""
    orders: dict[int, list[int]] = defaultdict(list)
    for own in readings:
        for model in {id(one) for one, _ in own}:
            indices = [index for one, index in own if id(one) == model]
            if len(indices) == 1:  # a module that several layers share has no place of its own
                orders[model] += indices
    return any(order != sorted(order) for order in orders.values())


AtWork = Mapping[tuple[int, int], Sequence[Observed]]


def _at_work(matched: Mapping[str, Sequence[Reading]], observed: Sequence[Observed]) -> AtWork:
    """What was seen of every layer of every model."""
    return {
        (id(model), index): [one for one in observed if one.module == module]
        for module, own in matched.items()
        for model, index in own
    }


def _of_module(
    readings: Sequence[Reading], members: Sequence[Observed], at_work: AtWork, tolerance: float
) -> str | None:  # fmt: skip
    """What is wrong with what is read of one module: nothing, "refused: ..." or what; None where nothing reads it.

    A module that several layers share is called once by each, in their order. Where more than one model reads it (the
    whole and a tower), each must. Models that make other values of it read another softmax of each call: every softmax
    must be one model's, and every model have one.
    """
    if not readings:
        return None
    if len({_layer_name(*reading) + reading[0].family.value for reading in readings}) > 1:
        return _of_softmaxes(readings, members, tolerance)
    said = ""
    for model, index, which, one in _in_turn(readings, members):
        try:
            layer = model.layer(index)
        except CheckpointError as error:
            said = said or "refused: " + _line(error, model.checkpoint.folder)
            continue
        problem = compare(layer, _with_memories(layer, model, which, one, at_work), tolerance)
        if problem and not problem.startswith("refused: "):
            return f"{model.family.name}, layer {index}: {problem}"
        said = said or problem
    return said


def _of_softmaxes(readings: Sequence[Reading], members: Sequence[Observed], tolerance: float) -> str:
    """What is wrong with what models read of a module, each a softmax of its own."""
    try:
        layers = [(model.family.name, index, model.layer(index)) for model, index in readings]
    except CheckpointError as error:
        return f"refused: {_line(error, readings[0][0].checkpoint.folder)}"
    said = [[compare(layer, one, tolerance) for _, _, layer in layers] for one in members]
    for (name, index, _), own in zip(layers, zip(*said, strict=True), strict=True):
        if all(own):
            return f"{name}, layer {index}: {min(own, key=len)}"
    return next((f"{layers[0][0]}: {own[0]}" for own in said if all(own)), "")


def _in_turn(
    readings: Sequence[Reading], members: Sequence[Observed]
) -> Iterator[tuple[ws.Model, int, int, Observed]]:  # fmt: skip
    """Every call of one module, the layer that each model reads it as, and which call it is."""
    by_model: dict[int, list[Reading]] = defaultdict(list)
    for reading in readings:
        by_model[id(reading[0])].append(reading)
    for own in by_model.values():
        for which, one in enumerate(members):
            model, index = own[min(which, len(own) - 1) if len(own) < len(members) else which % len(own)]
            yield model, index, which, one


def _with_memories(layer: Layer, model: ws.Model, which: int, one: Observed, at_work: AtWork) -> Observed:
    """What a layer with keys of another attends to entered that one."""
    if layer.keys_of is None:
        return one
    return replace(one, memories=at_work[id(model), layer.keys_of][which].streams)


def pairs(model: ws.Model, observed: Sequence[Observed], stored: Stored) -> Iterator[tuple[Layer, Observed]]:
    """Every layer of a model that was seen at work, and what was seen of it."""
    matched = _matched([model], observed, stored)
    at_work = _at_work(matched, observed)
    for module, readings in matched.items():
        for _, index, which, one in _in_turn(readings, [member for member in observed if member.module == module]):
            layer = model.layer(index)
            yield layer, _with_memories(layer, model, which, one, at_work)

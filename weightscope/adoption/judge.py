"""What weightscope reads from a checkpoint against what the model itself was seen to do: exact, refused or wrong."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, permutations, product
from pathlib import Path
from typing import Any

import numpy as np

import weightscope as ws
from weightscope.adoption.observed import NO_SCORE, Observed
from weightscope.attention.layer import Layer
from weightscope.attention.maps import Affine
from weightscope.checkpoint import open_checkpoint
from weightscope.errors import CheckpointError
from weightscope.families import stacks_of

TOLERANCE = 1e-4  # of probabilities, and of outputs relative to the largest
ROUNDING = 2.0**-21  # of float32 scores relative to the largest, and so of probabilities where scores are hundreds


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
            if stack.family is not None and family is None:
                refused[stack.prefix + stack.family.layer.split("{i}")[0]] = _line(error, folder)
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
    """
    matched = _matched(models, observed, stored)
    at_work = {
        (id(model), index): [one for one in observed if one.module == module]
        for module, own in matched.items()
        for model, index in own
    }
    found = []
    for name, members in stacks(observed).items():
        modules = list(dict.fromkeys(one.module for one in members))
        reasons, refused, met = [], "", 0
        for module in modules:
            said = _of_module(matched.get(module, []), [one for one in members if one.module == module], at_work)
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
            rest = own or (problem if not models and not refusals else "no row reads this stack" if not met else "")
            verdict, reason = "refused", refused or rest or f"{met} of {len(modules)} layers are read"
        kinds = {one.kind for one in members}
        crosses = any(model.family.memory for module in modules for model, _ in matched.get(module, ()))
        kind = "cross" if crosses or "cross" in kinds else "causal" if kinds == {"causal"} else "self"
        found.append(Verdict(name, kind, len(modules), verdict, reason))
    return found


def _refusal(refusals: Mapping[str, str], names: set[str]) -> str:
    """What was said of the stack that has tensors of these names."""
    return next((line for start, line in refusals.items() if any(name.startswith(start) for name in names)), "")


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
    row, stem = model.family, model.prefix + model.family.stored_name(model.config, index)
    modules = {row.query, row.key, row.value, row.output, *row.others}
    return {name for module in modules if module for name in model.checkpoint.names_under(f"{stem}{module}.")} | {
        stem + name for name in row.loose
    }


def _disordered(readings: Sequence[Sequence[Reading]]) -> bool:
    """Whether a model has layers in another order than that in which their modules are at work."""
    orders: dict[int, list[int]] = defaultdict(list)
    for own in readings:
        for model in {id(one) for one, _ in own}:
            indices = [index for one, index in own if id(one) == model]
            if len(indices) == 1:  # a module that several layers share has no place of its own
                orders[model] += indices
    return any(order != sorted(order) for order in orders.values())


def _of_module(
    readings: Sequence[Reading], members: Sequence[Observed], at_work: Mapping[tuple[int, int], Sequence[Observed]]
) -> str | None:
    """What is wrong with what is read of one module: nothing, "refused: ..." or what; None where nothing reads it.

    A module that several layers share is called once by each, in their order. Where more than one model reads it (the
    whole and a tower), each must. What a layer with keys of another attends to entered that one, `at_work`.
    """
    if not readings:
        return None
    by_model: dict[int, list[Reading]] = defaultdict(list)
    for reading in readings:
        by_model[id(reading[0])].append(reading)
    said = ""
    for own in by_model.values():
        for which, one in enumerate(members):
            model, index = own[min(which, len(own) - 1) if len(own) < len(members) else which % len(own)]
            try:
                layer = model.layer(index)
            except CheckpointError as error:
                said = said or "refused: " + _line(error, model.checkpoint.folder)
                continue
            if layer.keys_of is not None:
                one = replace(one, memories=at_work[id(model), layer.keys_of][which].streams)
            problem = compare(layer, one)
            if problem and not problem.startswith("refused: "):
                return f"{model.family.name}, layer {index}: {problem}"
            said = said or problem
    return said


def compare(layer: Layer, one: Observed) -> str:
    """What is wrong with a layer, in words; nothing where it does what was seen.

    Parameters
    ----------
    layer : Layer
    one : Observed
    """
    problems = []
    for x, positions, more in _given(layer, one):
        try:
            problem = _compare(layer, one, x, positions, more)
        except CheckpointError as error:
            return f"refused: {error}"
        except (ValueError, TypeError, IndexError) as error:
            problem = f"does not run on what entered: {type(error).__name__}: {error}".splitlines()[0]
        if not problem:
            return ""
        problems.append(problem)
    return min(problems, key=len, default="nothing was seen to enter it")


Given = tuple[np.ndarray, np.ndarray | None, dict[str, np.ndarray]]


def _given(layer: Layer, one: Observed) -> Iterator[Given]:
    """What may have entered: streams, positions, and by name what else the layer takes.

    Some models count the tokens of a run, whatever the positions that they are given.
    """
    positions = (None,) if one.positions is None else (one.positions, None)
    takes = [name for name, taken in layer.added.taken(cross=layer.cross).items() if taken]
    n, m = one.attention.shape[1:]
    streams = (*one.streams, *_of(one, n, layer.d_model)) if takes or (layer.cross and n == m) else one.streams
    found: Iterable[tuple[np.ndarray, dict[str, np.ndarray]]] = ((x, {}) for x in streams)
    if layer.cross:
        memories = one.memories if one.memories and not takes else _of(one, m, layer.k.shape[1])
        found = ((x, {"memory": memory}) for memory in memories for x in streams)
    if takes:
        found = (given for given in found if _output_off(layer, one, *given) <= TOLERANCE)
        found = chain.from_iterable(_with_positions(layer, one, *given) for given in found)
    for x, more in found:
        yield from ((x, where, more) for where in positions)


def _of(one: Observed, rows: int, width: int) -> list[np.ndarray]:
    return [given for given in one.entered if given.shape == (rows, width)]


def _with_positions(
    layer: Layer, one: Observed, x: np.ndarray, more: dict[str, np.ndarray]
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """The same, and what may have been added before queries and keys: it was given, or it is a difference."""
    taken, memory = layer.added.taken(cross=layer.cross), more.get("memory")
    choices: list[list[dict[str, np.ndarray]]] = [[more]]
    if taken["added"]:
        z = x if layer.norm is None else layer.norm(x)
        choices.append([{"added": p} for p in _positions(one, z, layer.added.of_queries or layer.added.of_keys)])
    if taken["added_to_memory"] and memory is not None:
        y = memory if layer.memory_norm is None else layer.memory_norm(memory)
        choices.append([{"added_to_memory": p} for p in _positions(one, y, layer.added.of_keys)])
    for chosen in product(*choices):
        yield x, {name: array for part in chosen for name, array in part.items()}


def _positions(one: Observed, z: np.ndarray, of: Affine | None) -> list[np.ndarray]:
    """What may have been added to z: all that entered, side by side where that is as wide; or what is more than z."""
    width = z.shape[1] if of is None else of.shape[1]
    given = [array for array in one.entered if len(array) == len(z)]
    found = [array for array in given if array.shape[1] == width]
    found += [np.hstack(pair) for pair in permutations(given, 2) if sum(array.shape[1] for array in pair) == width]
    return found + [array - z for array in given if array.shape == z.shape and z.shape[1] == width]


def _output_off(layer: Layer, one: Observed, x: np.ndarray, more: Mapping[str, np.ndarray]) -> float:
    """How far the layer's output is off, by the attention that was seen: values know of no added positions."""
    if x.shape[-1] != layer.d_model or len(more.get("memory", x)) != one.attention.shape[2]:
        return np.inf
    gathered = layer.output(np.nan_to_num(one.attention), x, **more)
    return min((_off(gathered, out) for out in one.outputs if out.shape == gathered.shape), default=np.inf)


def _compare(
    layer: Layer, one: Observed, x: np.ndarray, positions: np.ndarray | None, more: dict[str, np.ndarray]
) -> str:  # fmt: skip
    if x.shape[-1] != layer.d_model:
        return f"reads a stream of width {layer.d_model}, and {x.shape[-1]} enter"
    scores = layer.scores(x, positions, **more)
    expected = one.attention
    keys = scores.shape[-1]
    if expected.shape[-1] == keys + 1 and layer.sinks is not None:
        expected = expected[..., :keys]
    if expected.shape != scores.shape:
        return f"scores are {scores.shape}, attention {expected.shape}"
    seen = expected > NO_SCORE
    rows = one.scores.max(-1) > -1e4  # a query that sees nothing has no attention that means anything
    read = rows.all(axis=0)
    if not read.any():
        return "refused: no query sees anything, so that nothing is compared"
    expected = np.nan_to_num(expected)
    masked = scores if one.mask is None else scores + one.mask[:, :keys]
    found = softmax(np.where(seen, masked, -np.inf), layer.sinks)
    error = np.abs(found - expected)[rows].max(initial=0.0)
    memory = {name: array for name, array in more.items() if name == "memory"}
    gathered = layer.output(expected, x, **memory)
    outputs = [out for out in one.outputs if out.shape == gathered.shape]
    off = min((_off(gathered[read], out[read]) for out in outputs), default=np.inf)
    right = error <= max(TOLERANCE, ROUNDING * np.abs(scores).max(initial=0.0)), off <= TOLERANCE
    if right == (True, True):
        return ""
    if right == (True, False):
        return f"attention is right, the output is off by {off:.2g} of its largest"
    where = _where(found, expected, seen & rows[..., None])
    return f"{'values are right' if right[1] else 'the output is wrong too'}; attention is off by {error:.2g}{where}"


def _off(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest error, relative to the largest number expected."""
    return float(np.abs(found - expected).max(initial=0.0) / max(1.0, np.abs(expected).max(initial=0.0)))


def _where(found: np.ndarray, expected: np.ndarray, seen: np.ndarray) -> str:
    """In how many heads the attention is off, where it is not in all."""
    wrong = (np.abs(found - expected) > TOLERANCE) & seen
    heads = wrong.any(axis=(1, 2))
    return "" if heads.all() else f" in {heads.sum()} of {len(heads)} heads"


def softmax(scores: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    """Probabilities of scores (H, n, m), with a learned sink (H,) as one more key that takes mass and gives nothing."""
    if sinks is not None:
        more = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        return softmax(np.concatenate((scores, more), axis=-1), None)[..., :-1]
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    return np.asarray(weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-30))

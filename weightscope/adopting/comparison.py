"""Compare what weightscope reads from a saved model with what its eager attention computed."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, permutations, product
from pathlib import Path
from typing import Any

import numpy as np

import weightscope as ws
from weightscope.adopting.hooks import NO_SCORE, Observed
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.core.errors import CheckpointError, first_line
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.maps import Affine

TOLERANCE = 1e-4  # error of probabilities, and of outputs relative to the largest
REFUSED = "refused: "  # begins a problem that weightscope names itself
ROUNDING = 2.0**-21  # float32's error of scores relative to the largest, and so of probabilities


@dataclass(frozen=True)
class Errors:
    """Differences between a layer and the recorded attention."""

    attention: float  # the largest error of a probability
    output: float  # error of the output by the model's own attention, relative to the largest
    here: float  # relative error of tokens' scores with themselves, which no rotation changes
    rounding: float = 0.0  # error of a probability by float32, where scores are hundreds
    where: str = ""  # heads in which attention is off, in words, if not in all

    def words(self, tolerance: float) -> str:
        """The problem; empty if there is none."""
        output_is_right = self.output <= tolerance
        if self.attention <= max(tolerance, self.rounding):
            problem = f"attention is right, the output is off by {self.output:.2g} of its largest"
            return "" if output_is_right else problem
        values = "values are right" if output_is_right else "the output is wrong too"
        problem = f"{values}; attention is off by {self.attention:.2g}{self.where}"
        if self.here <= tolerance:
            problem += "; scores are right at distance 0 only: what is wrong is position"
        return problem


def compare(layer: Layer, call: Observed, tolerance: float = TOLERANCE) -> str:
    """The problem of a layer, in words; empty if it matches the recorded call."""
    problems = []
    for errors in measured(layer, call):
        problem = errors if isinstance(errors, str) else errors.words(tolerance)
        if not problem or problem.startswith(REFUSED):
            return problem
        problems.append(problem)
    return min(problems, key=len, default="nothing was seen to enter it")


def measured(layer: Layer, call: Observed) -> Iterator[Errors | str]:
    """The errors for each candidate input of the layer, or the reason that there are none."""
    for given in _given(layer, call):
        try:
            yield _measure(layer, call, *given)
        except CheckpointError as error:
            yield f"{REFUSED}{error}"
        except (ValueError, TypeError, IndexError) as error:
            yield f"does not run on what entered: {type(error).__name__}: {first_line(error)}"


Given = tuple[np.ndarray, np.ndarray | None, dict[str, np.ndarray]]


def _given(layer: Layer, call: Observed) -> Iterator[Given]:
    """Candidates for the layer's input: stream, positions, and by name the others that it takes.

    Some models count the tokens of a run, whatever the positions that they are given.
    """
    positions = (None,) if call.positions is None else (call.positions, None)
    takes = [name for name, taken in layer.added.taken(cross=layer.cross).items() if taken]
    n, m = call.attention.shape[1:]
    streams = call.streams
    if takes or (layer.cross and n == m):
        streams = (*streams, *_of(call, n, layer.d_model))
    inputs: Iterable[tuple[np.ndarray, dict[str, np.ndarray]]] = ((x, {}) for x in streams)
    if layer.cross:
        memories = call.memories if call.memories and not takes else _of(call, m, layer.k.shape[1])
        inputs = ((x, {"memory": memory}) for memory in memories for x in streams)
    if takes:
        inputs = (given for given in inputs if _output_off(layer, call, *given) <= TOLERANCE)
        inputs = chain.from_iterable(_with_positions(layer, call, *given) for given in inputs)
    for x, more in inputs:
        yield from ((x, where, more) for where in positions)


def _of(call: Observed, rows: int, width: int) -> list[np.ndarray]:
    return [given for given in call.entered if given.shape == (rows, width)]


def _with_positions(
    layer: Layer, call: Observed, x: np.ndarray, more: dict[str, np.ndarray]
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """The input, and again with candidates for positions added before queries and keys."""
    taken, memory = layer.added.taken(cross=layer.cross), more.get("memory")
    choices: list[list[dict[str, np.ndarray]]] = [[more]]
    if taken["added"]:
        z = x if layer.norm is None else layer.norm(x)
        first = layer.added.of_queries or layer.added.of_keys
        choices.append([{"added": p} for p in _positions(call, z, first)])
    if taken["added_to_memory"] and memory is not None:
        y = memory if layer.memory_norm is None else layer.memory_norm(memory)
        choices.append([{"added_to_memory": p} for p in _positions(call, y, layer.added.of_keys)])
    for chosen in product(*choices):
        yield x, {name: array for part in chosen for name, array in part.items()}


def _positions(call: Observed, z: np.ndarray, of: Affine | None) -> list[np.ndarray]:
    """Candidates for positions added to z: arrays that entered, alone or as pairs, or minus z."""
    width = z.shape[1] if of is None else of.shape[1]
    given = [array for array in call.entered if len(array) == len(z)]
    candidates = [array for array in given if array.shape[1] == width]
    for left, right in permutations(given, 2):
        if left.shape[1] + right.shape[1] == width:
            candidates.append(np.hstack((left, right)))
    if z.shape[1] == width:
        candidates += [array - z for array in given if array.shape == z.shape]
    return candidates


def _output_off(
    layer: Layer, call: Observed, x: np.ndarray, more: Mapping[str, np.ndarray]
) -> float:
    """The error of the layer's output under the recorded attention (values have no positions)."""
    if x.shape[-1] != layer.d_model or len(more.get("memory", x)) != call.attention.shape[2]:
        return np.inf
    gathered = layer.output(np.nan_to_num(call.attention), x, **more)
    outputs = [out for out in call.outputs if out.shape == gathered.shape]
    return min((_off(gathered, out) for out in outputs), default=np.inf)


def _measure(
    layer: Layer,
    call: Observed,
    x: np.ndarray,
    positions: np.ndarray | None,
    more: dict[str, np.ndarray],
) -> Errors | str:
    if x.shape[-1] != layer.d_model:
        return f"reads a stream of width {layer.d_model}, and {x.shape[-1]} enter"
    scores = layer.scores(x, positions, **more)
    expected = call.attention
    keys = scores.shape[-1]
    if expected.shape[-1] == keys + 1 and layer.sinks is not None:
        expected = expected[..., :keys]
    if expected.shape != scores.shape:
        return f"scores are {scores.shape}, attention {expected.shape}"
    seen = expected > NO_SCORE
    rows = call.scores.max(-1) > -1e4  # the attention of a query that sees nothing has no meaning
    read = rows.all(axis=0)
    if not read.any():
        return f"{REFUSED}no query sees anything, so that nothing is compared"
    expected = np.nan_to_num(expected)
    attention = softmax(np.where(seen, scores, -np.inf), layer.sinks)
    error = np.abs(attention - expected)[rows].max(initial=0.0)
    memory = {name: array for name, array in more.items() if name == "memory"}
    gathered = layer.output(expected, x, **memory)
    outputs = [out for out in call.outputs if out.shape == gathered.shape]
    off = min((_off(gathered[read], out[read]) for out in outputs), default=np.inf)
    wrong = (np.abs(attention - expected) > TOLERANCE) & seen & rows[..., None]
    heads = wrong.any(axis=(1, 2))
    where = "" if heads.all() else f" in {heads.sum()} of {len(heads)} heads"
    rounding = ROUNDING * float(np.abs(scores).max(initial=0.0))
    return Errors(float(error), float(off), _here(scores, call.scores, seen), rounding, where)


def compared_scores(call: Observed) -> bool:
    """True if a query saw two keys: the attention on a single key is 1, whatever the score."""
    return bool(((np.nan_to_num(call.attention) > NO_SCORE).sum(-1) > 1).any())


def _here(scores: np.ndarray, expected: np.ndarray, seen: np.ndarray) -> float:
    """The largest relative error of tokens' scores with themselves; infinite in cross-attention."""
    if scores.shape[1] != scores.shape[2]:
        return np.inf

    def diagonal(array: np.ndarray) -> np.ndarray:
        return np.diagonal(array[..., : scores.shape[1]], axis1=1, axis2=2)

    here = diagonal(seen)
    if not here.any():
        return np.inf
    return _off(diagonal(scores)[here], diagonal(expected)[here])


def _off(computed: np.ndarray, expected: np.ndarray) -> float:
    """The largest error, relative to the largest number expected."""
    largest = max(1.0, np.abs(expected).max(initial=0.0))
    return float(np.abs(computed - expected).max(initial=0.0) / largest)


def softmax(scores: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    """Probabilities of scores (H, n, m), with a sink (H,) as one more key that gives nothing."""
    if sinks is not None:
        more = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        return softmax(np.concatenate((scores, more), axis=-1), None)[..., :-1]
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    return np.asarray(weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-30))


def stack_of(path: str) -> str:
    """A module's path with `{}` for every index: the name of its stack."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "{}", path)


def stacks(observed: Sequence[Observed]) -> dict[str, list[Observed]]:
    """Recorded calls grouped by stack."""
    by_stack: dict[str, list[Observed]] = defaultdict(list)
    for call in observed:
        by_stack[stack_of(call.module)].append(call)
    return dict(by_stack)


def line_of(error: Exception, folder: Path) -> str:
    """An error's first line, without the checkpoint's folder."""
    return first_line(error).replace(str(folder), folder.name)


class Stored:
    """Stored tensors of each module's parameters, matched by value: saving may rename them."""

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
            parameter_name: by_value.get(_print_of(parameter.detach().float().numpy()), [])
            for parameter_name, parameter in model.named_parameters(remove_duplicate=False)
        }

    def under(self, module: str) -> set[str]:
        """The stored names of a module's parameters; names in memory if stored in another form."""
        names: set[str] = set()
        for name, stored_names in self.names.items():
            if name.startswith(module + "."):
                names.update(stored_names or (name,))
        return names


def _print_of(values: np.ndarray) -> tuple[str, ...]:
    """A key of a tensor's numbers that its transpose and reshapes share."""
    flat = np.sort(values.ravel())
    return str(values.size), flat[:64].tobytes().hex(), flat[-64:].tobytes().hex()


Reading = tuple[ws.Model, int]


def names_at_work(observed: Sequence[Observed], stored: Stored) -> dict[str, set[str]]:
    """The stored names of every module that was seen at work."""
    return {
        module: stored.under(module) for module in dict.fromkeys(call.module for call in observed)
    }


def matched(
    models: Sequence[ws.Model], names: Mapping[str, set[str]]
) -> Mapping[str, list[Reading]]:
    """Layers of models that read each module, whose stored names are given, in their order."""
    by_module: dict[str, list[Reading]] = defaultdict(list)
    for model in models:
        for index in (*model.attention_layers, *model.borrowing_layers):
            read = _projections(model, index)
            shares = {module: len(read & held) for module, held in names.items()}
            best = max(shares, key=lambda module: shares[module], default=None)
            if best is not None and shares[best]:
                by_module[best].append((model, index))
    return by_module


def _projections(model: ws.Model, index: int) -> set[str]:
    """The names of the tensors that make a layer's queries, keys, values and output."""
    row, stem = model.family.in_layer(model.config.layer_types[index]), model.stem(index)
    heads = row.heads
    names = {stem + name for name in row.lone}
    for module in (heads.q, heads.k, heads.v, heads.out, *heads.others, *row.reads.modules):
        if module:
            names.update(model.checkpoint.names_under(f"{stem}{module}."))
    return names


def _disordered(readings: Sequence[Sequence[Reading]]) -> bool:
    """True if a model has layers in another order than their modules run in."""
    orders: dict[int, list[int]] = defaultdict(list)
    for module_readings in readings:
        for of_model in _by_model(module_readings):
            if len(of_model) == 1:  # a module that several layers share has no place of its own
                ((model, index),) = of_model
                orders[id(model)].append(index)
    return any(order != sorted(order) for order in orders.values())


def _by_model(readings: Sequence[Reading]) -> Iterable[list[Reading]]:
    by_model: dict[int, list[Reading]] = defaultdict(list)
    for reading in readings:
        by_model[id(reading[0])].append(reading)
    return by_model.values()


CallsOfLayers = Mapping[tuple[int, int], Sequence[Observed]]


def _calls_of_layers(
    by_module: Mapping[str, Sequence[Reading]], observed: Sequence[Observed]
) -> CallsOfLayers:
    """Recorded calls by (model id, layer index)."""
    return {
        (id(model), index): [call for call in observed if call.module == module]
        for module, module_readings in by_module.items()
        for model, index in module_readings
    }


def problem_of_stack(
    by_module: Mapping[str, Sequence[Reading]],
    calls: Sequence[Observed],
    all_calls: Sequence[Observed],
    tolerance: float,
) -> tuple[str, int]:
    """The gravest problem of one stack as it is read, and the number of its read modules.

    A problem that weightscope names itself begins with `REFUSED`. `all_calls` includes other
    stacks.
    """
    of_modules: dict[str, list[Observed]] = defaultdict(list)
    for call in calls:
        if call.module in by_module:
            of_modules[call.module].append(call)
    calls_of_layers = _calls_of_layers(by_module, all_calls)
    problems = []
    for module, of_module in of_modules.items():
        problem = _problem_of_module(by_module[module], of_module, calls_of_layers, tolerance)
        if not problem and not any(compared_scores(call) for call in of_module):
            problem = f"{REFUSED}every query sees one key only, so that no score is compared"
        problems.append(problem)
    if _disordered([by_module[module] for module in of_modules]):
        problems.append("its layers are read in another order")
    problems = [problem for problem in problems if problem]
    gravest = min(problems, key=lambda problem: problem.startswith(REFUSED), default="")
    return gravest, len(of_modules)


def _problem_of_module(
    readings: Sequence[Reading],
    calls: Sequence[Observed],
    calls_of_layers: CallsOfLayers,
    tolerance: float,
) -> str:
    """The problem of one module as it is read; empty if there is none.

    A module that several layers share is called once by each, in their order. Where more than one
    model reads it (the whole and a tower), each must. Models that make other values of it read
    another softmax of each call: every softmax must be one model's, and every model have one.
    """
    if len({model.stem(index) + model.family.heads.v for model, index in readings}) > 1:
        return _problem_of_softmaxes(readings, calls, tolerance)
    first_problem = ""
    for model, index, which, call in _in_turn(readings, calls):
        try:
            layer = model.layer(index)
        except CheckpointError as error:
            first_problem = first_problem or REFUSED + line_of(error, model.checkpoint.folder)
            continue
        call = _with_memories(layer, model, which, call, calls_of_layers)
        problem = compare(layer, call, tolerance)
        if problem and not problem.startswith(REFUSED):
            return f"{model.family.name}, layer {index}: {problem}"
        first_problem = first_problem or problem
    return first_problem


def _problem_of_softmaxes(
    readings: Sequence[Reading], calls: Sequence[Observed], tolerance: float
) -> str:
    """The problem of a module that models read as several softmaxes, one each."""
    try:
        layers = [(model.family.name, index, model.layer(index)) for model, index in readings]
    except CheckpointError as error:
        return f"{REFUSED}{line_of(error, readings[0][0].checkpoint.folder)}"
    by_call = [[compare(layer, call, tolerance) for _, _, layer in layers] for call in calls]
    for (name, index, _), problems in zip(layers, zip(*by_call, strict=True), strict=True):
        if all(problems):
            return f"{name}, layer {index}: {min(problems, key=len)}"
    return next((f"{layers[0][0]}: {problems[0]}" for problems in by_call if all(problems)), "")


def _in_turn(
    readings: Sequence[Reading], calls: Sequence[Observed]
) -> Iterator[tuple[ws.Model, int, int, Observed]]:
    """Every call of one module, with the model and layer that read it and the call's number."""
    for model_readings in _by_model(readings):
        for which, call in enumerate(calls):
            n = len(model_readings)
            model, index = model_readings[min(which, n - 1) if n < len(calls) else which % n]
            yield model, index, which, call


def _with_memories(
    layer: Layer, model: ws.Model, which: int, call: Observed, calls_of_layers: CallsOfLayers
) -> Observed:
    """The call, for a layer that borrows keys with their layer's stream as memory."""
    if layer.keys_of is None:
        return call
    return replace(call, memories=calls_of_layers[id(model), layer.keys_of][which].streams)


def pairs(
    model: ws.Model, observed: Sequence[Observed], stored: Stored
) -> Iterator[tuple[Layer, Observed]]:
    """Every layer of a model with each recorded call of it."""
    by_module = matched([model], names_at_work(observed, stored))
    calls_of_layers = _calls_of_layers(by_module, observed)
    for readings in by_module.values():
        calls = calls_of_layers[id(model), readings[0][1]]
        for _, index, which, call in _in_turn(readings, calls):
            layer = model.layer(index)
            yield layer, _with_memories(layer, model, which, call, calls_of_layers)

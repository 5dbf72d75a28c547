"""Run a tiny model and record what its eager attention layers take in, compute and put out."""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import PreTrainedModel

from weightscope.adopting.inputs import Inputs
from weightscope.adopting.tiny_models import Size, class_and_line
from weightscope.core.results import ShowsShapes


@dataclass
class Event:
    """One call of one module."""

    name: str
    module: torch.nn.Module
    start: int
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor] = field(default_factory=list)
    end: int = 0


def rows_of(tensor: torch.Tensor, b: int, n: int) -> np.ndarray | None:
    """A tensor as (sequences, tokens, width), if it has this many tokens, on any of its axes."""
    if tensor.dtype == torch.bool or (tensor.ndim == 4 and tensor.shape[1] == 1):  # masks
        return None
    if tensor.ndim < 2 or tensor.numel() != b * n * tensor.shape[-1] or tensor.shape[-1] < 2:
        return None
    if b > 1 and tensor.shape[:2] == (n, b) != (b, n):
        tensor = tensor.transpose(0, 1)
    return tensor.reshape(b, n, -1).float().numpy()


def _entering(
    layer: Event, attends: Event, before: list[Event], read: list[torch.Tensor], *sizes: int
) -> tuple[list[np.ndarray], list[np.ndarray], str]:
    """Candidates for the streams of queries and of keys, and the norm that the queries' stream
    enters.
    """
    b, n, m = sizes
    arrive = _first_of(attends.inputs, b, n)
    if arrive is None:
        return [], [], ""
    streams, norm = _before_norm(arrive, before, attends)
    streams.append(arrive)
    layer_input = _first_of(layer.inputs, b, n)
    if layer_input is not None:
        known = any(np.array_equal(layer_input, stream) for stream in streams)
        streams = [layer_input] if known else [*streams, layer_input]
    second = _first_of(read + attends.inputs, b, m) if m != n else _second(read, arrive, b, n)
    if second is None:
        return streams, [], norm
    return streams, [second, *_before_norm(second, before, attends)[0]], norm


def _second(read: list[torch.Tensor], arrive: np.ndarray, b: int, n: int) -> np.ndarray | None:
    """The stream of keys and values where it is not the queries', though as long."""
    rows = _all_rows(read, b, n)
    if len(rows) < 3 or len(rows) < len(read) or not np.array_equal(rows[0], arrive):
        return None
    same_input = all(np.array_equal(memory_rows, rows[1]) for memory_rows in rows[2:])
    return None if not same_input or np.array_equal(rows[1], arrive) else rows[1]


def _all_rows(tensors: list[torch.Tensor], b: int, *counts: int) -> list[np.ndarray]:
    """Tensors that have one of these numbers of tokens."""
    made = (rows_of(tensor, b, n) for tensor in tensors for n in {*counts})
    return [rows for rows in made if rows is not None]


def _first_of(tensors: list[torch.Tensor], b: int, n: int) -> np.ndarray | None:
    return next(iter(_all_rows(tensors, b, n)), None)


def is_norm(module: torch.nn.Module) -> bool:
    """True if a module's class is called a norm."""
    return "norm" in type(module).__name__.lower()


def _before_norm(
    arrive: np.ndarray, before: list[Event], attends: Event
) -> tuple[list[np.ndarray], str]:
    """The input of the layer's norm that made these rows, in their order, and the norm; or none."""
    wanted = arrive.reshape(-1, arrive.shape[-1])
    for event in reversed(before):
        if not is_norm(event.module) or event is attends or not (event.inputs and event.outputs):
            continue
        made, entered = event.outputs[0], event.inputs[0]
        if made.shape != entered.shape or made.shape[-1] != wanted.shape[-1]:
            continue
        made_rows = made.reshape(-1, made.shape[-1]).float().numpy()
        rows = {row.tobytes(): i for i, row in enumerate(made_rows)}
        places = [rows.get(row.tobytes()) for row in wanted.astype(np.float32)]
        if None not in places:
            sources = entered.reshape(-1, entered.shape[-1]).float().numpy()[np.array(places)]
            return [sources.reshape(arrive.shape)], event.name
    return [], ""


NO_SCORE = 1e-30  # a probability below it is a mask's
BATCH = 6  # windows of an image that are looked at


@dataclass(frozen=True, eq=False, repr=False)
class Observed(ShowsShapes):
    """One attention layer at work on one sequence."""

    layer: str  # path of the layer
    module: str  # path of the module in it that attends
    # (n, d): candidates for the residual stream: the layer's input where attention or a norm before
    # it takes that, or else the inputs of the norm and of attention
    streams: tuple[np.ndarray, ...]
    # (m, e): candidates for keys and values where there are more or fewer of them than queries
    memories: tuple[np.ndarray, ...]
    # (n or m, e): other inputs with this many rows to the layer, the module and its projections,
    # and outputs of norms before it
    entered: tuple[np.ndarray, ...]
    positions: np.ndarray | None  # (n,)
    scores: np.ndarray  # (H, n, m)
    attention: np.ndarray  # (H, n, m)
    # (n, d): outputs of attention, of its out projection and of later modules in the layer
    outputs: tuple[np.ndarray, ...]
    norm: str = ""  # norm that the first stream enters and attention reads; empty without one
    # modules with parameters of their own, and norms without, that ran before its softmax and after
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    sequence: int = 0  # its number in the batch

    @property
    def kind(self) -> str:
        """cross, causal or self."""
        if self.memories:
            return "cross"
        n, m = self.attention.shape[1:]
        later = np.triu(np.ones((n, m), bool), 1 + m - n)
        return "causal" if n > 1 and not self.attention[:, later].any() else "self"


@dataclass
class _Softmax:
    time: int
    scores: torch.Tensor
    attention: torch.Tensor


class _Log:
    """Every call of every module of a model, and of every softmax over scores, in order."""

    def __init__(self, model: torch.nn.Module) -> None:
        # a pattern for the attending modules of a user's class; "*" where softmaxes show them
        self.attention: str = getattr(model, "attention_modules", "")
        self.time = 0
        self.open: list[Event] = []
        self.events: list[Event] = []
        self.softmaxes: list[_Softmax] = []
        self.hooks: list[Any] = []
        for name, module in model.named_modules():
            self.hooks += self._watch(name, module)

    def _watch(self, name: str, module: torch.nn.Module) -> Iterator[Any]:
        def before(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            self.time += 1
            self.open.append(Event(name, module, self.time, _tensors((args, kwargs))))

        def after(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.time += 1
            while self.open and self.open[-1].module is not module:
                self.open.pop()  # left by an exception
            event = self.open.pop()
            event.outputs, event.end = _tensors(output), self.time
            self.events.append(event)

        yield module.register_forward_pre_hook(before, with_kwargs=True)
        yield module.register_forward_hook(after, with_kwargs=True)

    def softmax(self, scores: torch.Tensor, attention: torch.Tensor) -> None:
        self.time += 1
        if scores.ndim >= 3 and self.open and (scores.ndim > 3 or scores.shape[0] > 1):
            copies = scores.detach().clone(), attention.detach().clone()
            self.softmaxes.append(_Softmax(self.time, *copies))

    def run(self, part: torch.nn.Module, inputs: dict[str, Any]) -> None:
        """Run one part of the model; then nothing is watched any more."""
        try:
            with torch.no_grad(), _softmaxes_seen(self):
                part(**inputs)
        finally:
            for hook in self.hooks:
                hook.remove()


def _tensors(values: Any) -> list[torch.Tensor]:
    """Copies of every floating tensor in a module's arguments or output; some are overwritten
    later.
    """
    if isinstance(values, torch.Tensor):
        numbers = values.is_floating_point() or values.dtype == torch.bool
        return [values.detach().clone()] if numbers else []
    if isinstance(values, dict):
        values = values.values()
    if isinstance(values, list | tuple) or (
        hasattr(values, "__iter__") and not isinstance(values, str)
    ):
        with suppress(Exception):
            return [tensor for value in values for tensor in _tensors(value)]
    return []


@contextmanager
def _softmaxes_seen(log: _Log) -> Iterator[None]:
    """Lead every way to a softmax through the log; fused attention is done in steps."""

    original = torch.Tensor.softmax

    def seen(
        input: torch.Tensor, dim: int | None = None, dtype: Any = None, **_: Any
    ) -> torch.Tensor:
        result = original(input, dim, dtype)
        if dim in (-1, input.ndim - 1):
            log.softmax(input, result)
        return result

    def functional(
        input: torch.Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
    ) -> torch.Tensor:
        return seen(input, dim, dtype)

    def fused(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if enable_gqa:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        scores = query @ key.transpose(-1, -2) * scale
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return seen(scores, -1) @ value

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            patch("torch.nn.functional.softmax", functional),
            patch("torch.softmax", seen),
            patch("torch.Tensor.softmax", seen),
            patch("torch.nn.functional.scaled_dot_product_attention", fused),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def watch(part: torch.nn.Module, model: torch.nn.Module, inputs: dict[str, Any]) -> _Log:
    """Run one part of a model under watch."""
    log = _Log(model)
    log.run(part, inputs)
    return log


def parts_left(
    model: torch.nn.Module, ran: Collection[str]
) -> Iterator[tuple[str, PreTrainedModel]]:
    """The model, then its parts without a layer in `ran`, to which the caller adds."""
    for name, part in list(model.named_modules()):
        has_run = name and any(layer.startswith(name + ".") for layer in ran)
        if isinstance(part, PreTrainedModel) and not has_run:
            yield name, part


def observe(
    model: PreTrainedModel, size: Size, seed: int = 0, start: int = 0
) -> tuple[list[Observed], list[str]]:
    """Every attention layer of a model at work: of the whole, or of parts that it does not run."""
    observed: list[Observed] = []
    problems: list[str] = []
    layers: set[str] = set()
    for name, part in parts_left(model, layers):
        problem, ran = "", False
        for given in Inputs(part, size, seed, start).attempts():
            try:
                log = watch(part, model, given)
            except Exception as error:  # whatever it raises of inputs that are not its own
                problem = problem or class_and_line(error)
                continue
            ran = True
            seen = [call for work in _at_work(log) for call in _observed(log, *work, given)]
            if seen:
                observed += seen
                layers |= {call.layer for call in seen}
                break
        else:
            if problem and not ran:
                problems.append(f"{name or 'model'} does not run: {problem}")
    return observed, problems


def _at_work(log: _Log) -> Iterator[tuple[Event, Event, _Softmax]]:
    """Every layer, the module of it that attends, and its softmax.

    A module that takes one sequence in pieces (the windows of an image) has a softmax a piece;
    together they are one softmax of the whole, in which no token sees another piece.
    """
    pieces: dict[int, tuple[Event, Event, list[_Softmax]]] = {}
    for softmax in log.softmaxes:
        around = [event for event in log.events if event.start < softmax.time < event.end]
        around.sort(key=lambda event: event.start)
        owners = [
            event
            for event in around
            if any(parameter.ndim > 1 for parameter in event.module.parameters())
        ]
        layers = [event for event in owners if re.search(r"\.\d+$|^\d+$", event.name)]
        if not layers:
            continue
        attends, layer = owners[-1], layers[-1]
        is_one_of_two = layer is attends and re.search(r"att\w*\.\d+$", attends.name)
        if is_one_of_two and len(layers) > 1:
            layer = layers[-2]
        if log.attention not in ("", "*"):
            matching = [event for event in owners if fnmatch(event.name, log.attention)]
            if not matching:
                continue
            attends = matching[-1]
        names = [type(event.module).__name__.lower() for event in around[around.index(layer) :]]
        named = log.attention or any("att" in name or "mla" in name for name in names)
        if any("deformableattention" in name for name in names) or not named:
            continue
        pieces.setdefault(attends.start, (layer, attends, []))[2].append(softmax)
    for layer, attends, softmaxes in pieces.values():
        shapes = [tuple(softmax.scores.shape) for softmax in softmaxes]
        n = sum(shape[-1] for shape in shapes)
        square = all(shape[0] == 1 and shape[2:] == shape[-1:] * 2 for shape in shapes)
        if len(shapes) > 1 and square and _first_of(attends.inputs, 1, n) is not None:
            scores = _block_diagonal([piece.scores for piece in softmaxes], -torch.inf)
            attention = _block_diagonal([piece.attention for piece in softmaxes], 0.0)
            yield layer, attends, _Softmax(softmaxes[0].time, scores, attention)
        else:
            for softmax in softmaxes:
                yield layer, attends, softmax


def _block_diagonal(blocks: list[torch.Tensor], fill: float) -> torch.Tensor:
    """Blocks (1, H, n, n) as one of (1, H, sum of n, sum of n), `fill` elsewhere."""
    n = sum(block.shape[-1] for block in blocks)
    joined, start = torch.full((1, blocks[0].shape[1], n, n), fill), 0
    for block in blocks:
        stop = start + block.shape[-1]
        joined[:, :, start:stop, start:stop] = block
        start = stop
    return joined


def _observed(
    log: _Log,
    layer: Event,
    attends: Event,
    softmax: _Softmax,
    given: dict[str, Any],
    sequences: int = 1,
) -> Iterator[Observed]:
    """Each sequence of the attention that a softmax was part of."""
    *outer, n, m = softmax.scores.shape
    b = int(np.prod(outer[:-1]))
    if len(outer) == 1:  # heads, sequence by sequence
        b = sequences if outer[0] % sequences == 0 else 1
    scores = softmax.scores.reshape(b, -1, n, m).float().numpy()
    attention = softmax.attention.reshape(b, -1, n, m).float().numpy()
    if scores.shape[1] == 0:
        return
    inside = [event for event in log.events if layer.start < event.start and event.end < layer.end]
    read, around = [], [*attends.inputs, *layer.inputs]
    ended = [event for event in inside if event.end < softmax.time]
    for event in ended:
        if event.start > attends.start and isinstance(event.module, torch.nn.Linear):
            read += event.inputs[:1]
            around += event.inputs[:1]
        elif is_norm(event.module):
            around += event.outputs[:1]
    streams, memories, norm = _entering(layer, attends, ended, read, b, n, m)
    entered = {(rows.shape, rows.tobytes()): rows for rows in _all_rows(around, b, n, m)}.values()
    ran = [event for event in sorted(inside, key=lambda event: event.start) if _holds(event.module)]
    before = tuple(event.name for event in ran if event.start < softmax.time)
    after = tuple(event.name for event in ran if event.start > softmax.time)
    later = [event for event in (*inside, layer) if event.end > softmax.time]
    firsts = [event.outputs[0] for event in later if event.outputs]
    outputs = _all_rows(firsts[:24], b, n)
    positions = given.get("position_ids")
    if positions is not None:
        positions = positions[0].numpy() if positions.shape[-1] == n else None
    for which in range(min(b, BATCH)):
        yield Observed(
            layer.name,
            attends.name,
            tuple(rows[which] for rows in streams),
            tuple(rows[which] for rows in memories),
            tuple(rows[which] for rows in entered),
            positions,
            scores[which],
            attention[which],
            tuple(rows[which] for rows in outputs),
            norm,
            before,
            after,
            which * sequences // b,
        )


def _holds(module: torch.nn.Module) -> bool:
    """True if a module has parameters of its own, or is a norm."""
    norm = is_norm(module) and not list(module.children())
    return norm or next(module.parameters(recurse=False), None) is not None


Seen = Callable[[str, list[Observed], Callable[[], list[Observed]]], None]


def watch_layers(
    part: torch.nn.Module,
    model: torch.nn.Module,
    inputs: dict[str, Any],
    layers: Collection[str],
    before: Callable[[str], None],
    after: Seen,
    sequences: int = 1,
) -> None:
    """Run one part of a model, keeping a layer's records until the next one runs.

    `before` takes the name of a layer; `after` takes it too, with what was recorded and a function
    that runs the layer again on the same input.
    """
    log, busy = _Log(model), False

    def recorded() -> list[Observed]:
        calls: list[Observed] = []
        for work in _at_work(log):
            calls += _observed(log, *work, inputs, sequences)
        log.events.clear()
        log.softmaxes.clear()
        return calls

    def enter(name: str) -> None:
        if not busy:
            before(name)

    def leave(name: str, layer: torch.nn.Module, args: Any, kwargs: Any, _: Any) -> None:
        def again() -> list[Observed]:
            layer(*args, **kwargs)
            return recorded()

        nonlocal busy
        if not busy:
            busy = True
            after(name, recorded(), again)
            busy = False

    for name in layers:
        layer, left = model.get_submodule(name), partial(leave, name)
        log.hooks.append(layer.register_forward_pre_hook(lambda *_, name=name: enter(name)))
        log.hooks.append(layer.register_forward_hook(left, with_kwargs=True))
    log.run(part, inputs)

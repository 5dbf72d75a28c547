"""What a model's eager attention does, layer by layer: its modules watched by hooks while it runs."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import PreTrainedModel

from weightscope.adoption.entering import Event, around, entering, first_of, rows_of
from weightscope.adoption.inputs import Inputs
from weightscope.adoption.sizes import Size
from weightscope.adoption.tiny import first_line
from weightscope.shapes import ShowsShapes

NO_SCORE = 1e-30  # a probability below it is a mask's
BATCH = 6  # windows of an image that are looked at


@dataclass(frozen=True, eq=False, repr=False)
class Observed(ShowsShapes):
    """One attention layer at work on one sequence.

    Attributes
    ----------
    layer, module : str
        Paths of the layer and of the module in it that attends.
    streams : tuple of (n, d) arrays
        What may be called the residual stream that enters: the layer's input where attention or a norm before it takes
        that, or else what enters the norm and what enters attention.
    memories : tuple of (m, e) arrays
        The same for keys and values where there are more or fewer of them than queries.
    entered : tuple of (n or m, e) arrays
        Whatever else of so many rows the layer, the module and its projections were given, and norms before it gave.
    positions : (n,) int array or None
    scores : (H, n, m) array
    attention : (H, n, m) array
    mask : (n, m) array or None
        What was added to scores, where the module was given it.
    outputs : tuple of (n, d) arrays
        What attention, its out projection and whatever follows within the layer gave, in that order.
    norm : str
        The norm that the first of the streams enters and attention reads; empty where that reads the stream itself.
    before, after : tuple of str
        Modules with parameters of their own, and norms without, that the layer ran before its softmax and after.
    """

    layer: str
    module: str
    streams: tuple[np.ndarray, ...]
    memories: tuple[np.ndarray, ...]
    entered: tuple[np.ndarray, ...]
    positions: np.ndarray | None
    scores: np.ndarray
    attention: np.ndarray
    mask: np.ndarray | None
    outputs: tuple[np.ndarray, ...]
    norm: str = ""
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

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
    at: int
    scores: torch.Tensor
    attention: torch.Tensor


class _Log:
    """Every call of every module of a model, and of every softmax over scores, in order."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.time, self.open, self.events, self.softmaxes = 0, [], [], []  # type: int, list[Event], list[Event], list[_Softmax]
        self.hooks = [hook for name, module in model.named_modules() for hook in self._watch(name, module)]

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
            self.softmaxes.append(_Softmax(self.time, scores.detach().clone(), attention.detach().clone()))

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()


def _tensors(values: Any) -> list[torch.Tensor]:
    """Every floating tensor among what a module was given or gave, copied: some are written into later."""
    if isinstance(values, torch.Tensor):
        numbers = values.is_floating_point() or values.dtype == torch.bool
        return [values.detach().clone()] if numbers else []
    if isinstance(values, dict):
        values = values.values()
    if isinstance(values, list | tuple) or (hasattr(values, "__iter__") and not isinstance(values, str)):
        with suppress(Exception):
            return [one for value in values for one in _tensors(value)]
    return []


@contextmanager
def _softmaxes_seen(log: _Log) -> Iterator[None]:
    """Every way to a softmax leads through the log; fused attention is done in steps."""

    def seen(scores: torch.Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("_stacklevel", None)
        result = original(scores, dim, *args, **kwargs)
        if dim in (-1, scores.ndim - 1):
            log.softmax(scores, result)
        return result

    original = torch.Tensor.softmax

    def functional(
        input: torch.Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
    ) -> torch.Tensor:
        return seen(input, dim, dtype=dtype)

    def top(input: torch.Tensor, dim: int, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
        return seen(input, dim, dtype=dtype)

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
            key, value = (one.repeat_interleave(query.shape[-3] // one.shape[-3], -3) for one in (key, value))
        scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        return seen(scores, -1) @ value

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            patch("torch.nn.functional.softmax", functional), patch("torch.softmax", top),
            patch("torch.Tensor.softmax", seen), patch("torch.nn.functional.scaled_dot_product_attention", fused),
        ):  # fmt: skip
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def watch(part: torch.nn.Module, model: torch.nn.Module, inputs: dict[str, Any]) -> _Log:
    """Run one part of a model under watch."""
    log = _Log(model)
    try:
        with torch.no_grad(), _softmaxes_seen(log):
            part(**inputs)
    finally:
        log.close()
    return log


def observe(model: PreTrainedModel, size: Size, seed: int = 0, start: int = 0) -> tuple[list[Observed], list[str]]:
    """Every attention layer of a model at work: of the whole, or of its parts where the whole does not run them all.

    Parameters
    ----------
    model : PreTrainedModel
    size : Size
    seed : int
    start : int
        Position of the first token, where the model can be told one.

    Returns
    -------
    list of Observed
    list of str
        What did not run, and why.
    """
    found: list[Observed] = []
    problems: list[str] = []
    parts = [(name, module) for name, module in model.named_modules() if isinstance(module, PreTrainedModel)]
    for name, part in parts:
        if name and any(one.layer.startswith(name + ".") for one in found):
            continue
        problem = ""
        for given in Inputs(part, size, seed, start).attempts():
            try:
                log = watch(part, model, given)
            except Exception as error:  # whatever it raises of inputs that are not its own
                problem = problem or first_line(error)
                continue
            seen = [one for work in _at_work(log) for one in _observed(log, *work, given)]
            if seen:
                found += seen
                break
        else:
            if problem:
                problems.append(f"{name or 'model'} does not run: {problem}")
    return found, problems


def _at_work(log: _Log) -> Iterator[tuple[Event, Event, _Softmax]]:
    """Every layer, the module of it that attends, and its softmax.

    A module that takes one sequence in pieces (the windows of an image) has a softmax a piece; together they are one
    softmax of the whole, in which no token sees another piece.
    """
    pieces: dict[int, tuple[Event, Event, list[_Softmax]]] = {}
    for softmax in log.softmaxes:
        around = [event for event in log.events if event.start < softmax.at < event.end]
        around.sort(key=lambda event: event.start)
        owners = [event for event in around if any(one.ndim > 1 for one in event.module.parameters())]
        layers = [event for event in owners if re.search(r"\.\d+$|^\d+$", event.name)]
        if not layers:
            continue
        attends, layer = owners[-1], layers[-1]
        if layer is attends and re.search(r"att\w*\.\d+$", attends.name) and len(layers) > 1:  # one of a layer's two
            layer = layers[-2]
        names = [type(event.module).__name__.lower() for event in around[around.index(layer) :]]
        if any("deformableattention" in name for name in names) or not any(
            "att" in name or "mla" in name for name in names
        ):
            continue
        pieces.setdefault(attends.start, (layer, attends, []))[2].append(softmax)
    for layer, attends, softmaxes in pieces.values():
        shapes = [tuple(one.scores.shape) for one in softmaxes]
        n = sum(shape[-1] for shape in shapes)
        if len(shapes) > 1 and {shape[0] for shape in shapes} == {1} and first_of(attends.inputs, 1, n) is not None:
            scores = _block_diagonal([one.scores for one in softmaxes], -torch.inf)
            attention = _block_diagonal([one.attention for one in softmaxes], 0.0)
            yield layer, attends, _Softmax(softmaxes[0].at, scores, attention)
        else:
            for softmax in softmaxes:
                yield layer, attends, softmax


def _block_diagonal(blocks: list[torch.Tensor], fill: float) -> torch.Tensor:
    """Blocks (1, H, n, n) as one of (1, H, sum of n, sum of n), `fill` elsewhere."""
    n = sum(block.shape[-1] for block in blocks)
    whole, start = torch.full((1, blocks[0].shape[1], n, n), fill), 0
    for block in blocks:
        stop = start + block.shape[-1]
        whole[:, :, start:stop, start:stop] = block
        start = stop
    return whole


def _observed(log: _Log, layer: Event, attends: Event, softmax: _Softmax, given: dict[str, Any]) -> Iterator[Observed]:
    """What one softmax was part of, a sequence at a time."""
    b, n, m = *_batch(softmax.scores), softmax.scores.shape[-1]
    scores, attention = (one.reshape(b, -1, n, m).float().numpy() for one in (softmax.scores, softmax.attention))
    if scores.shape[1] == 0:
        return
    inside = [event for event in log.events if layer.start < event.start and event.end < layer.end]
    mask = next((found for one in attends.inputs if (found := _mask_of(one, b, n, m)) is not None), None)
    streams, memories, norm = entering(layer, attends, inside, softmax.at, b, n, m)
    entered = around(layer, attends, inside, softmax.at, b, n, m)
    ran = [event for event in sorted(inside, key=lambda event: event.start) if _holds(event.module)]
    outputs = [out for event in (*inside, layer) if event.end > softmax.at for out in event.outputs[:1]]
    positions = given.get("position_ids")
    for which in range(min(b, BATCH)):
        yield Observed(
            layer.name, attends.name,
            tuple(one[which] for one in streams), tuple(one[which] for one in memories),
            tuple(one[which] for one in entered),
            None if positions is None or positions.shape[-1] != n else positions[0].numpy(),
            scores[which], attention[which], None if mask is None else mask[which],
            tuple(one[which] for one in (rows_of(out, b, n) for out in outputs[:24]) if one is not None), norm,
            tuple(event.name for event in ran if event.start < softmax.at),
            tuple(event.name for event in ran if event.start > softmax.at),
        )  # fmt: skip


def _holds(module: torch.nn.Module) -> bool:
    """Whether a module has parameters of its own, or is a norm."""
    norm = "norm" in type(module).__name__.lower() and not list(module.children())
    return norm or next(module.parameters(recurse=False), None) is not None


def _mask_of(given: torch.Tensor, b: int, n: int, m: int) -> np.ndarray | None:
    """What a module was given as a mask, (b, n, m): the same for all heads, and of two values at most."""
    if given.ndim != 4 or given.shape[1] != 1 or given.shape[0] not in (1, b) or len(given.unique()) > 2:
        return None
    if given.shape[2] not in (1, n) or given.shape[3] != m:
        return None
    return np.broadcast_to(given[:, 0].float().numpy(), (b, n, m))


def _batch(scores: torch.Tensor) -> tuple[int, int]:
    """(sequences, queries) of scores: with three axes the first is the heads' of one sequence."""
    if scores.ndim == 3:
        return 1, scores.shape[1]
    return int(np.prod(scores.shape[:-3])), scores.shape[-2]

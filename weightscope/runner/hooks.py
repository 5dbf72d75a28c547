"""Blocks of transformers' models, and the hooks that collect their activations."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

from weightscope.core.errors import CheckpointError
from weightscope.model.model import Model
from weightscope.model.rows.family import Family

OTHER_TOWER = re.compile(r"vision")  # in module names of towers next to the language model

# Function of a layer's index, its input, its attention's weights and the output that attention adds
# to the stream; a tensor that it returns replaces the output.
Show = Callable[[int, Any, Any, Any], Any]


def blocks_of(network: Any, model: Model) -> list[Any]:
    """transformers' module of every layer; one that layers share (ALBERT) is repeated."""
    modules = {f".{name}.": module for name, module in network.named_modules()}
    if model.family.tower != "vision":
        modules = {name: modules[name] for name in modules if not OTHER_TOWER.search(name)}
    layers = range(model.config.n_layers)

    @cache
    def by_end(parts: int) -> dict[str, Any]:
        """The first module with each last few parts of a name."""
        ends = {name: ".".join(name.split(".")[-parts - 1 :]) for name in modules}
        return {ends[name]: modules[name] for name in reversed(modules)}

    for row in _rows(model.family):
        places = [row.stored_name(model.config, index) for index in layers]
        blocks = [by_end(place.count(".")).get(place) for place in places]
        if None not in blocks:
            return blocks
    problem = f"transformers' {type(network).__name__} has no list of {len(layers)} layers"
    raise CheckpointError(problem)


def tower_of(network: Any, model: Model) -> Any:
    """The tower that the family names, or all of the network."""
    tower = getattr(network, f"{model.family.tower}_model", None) if model.family.tower else network
    if tower is None:
        name = type(network).__name__
        problem = f"transformers' {name} has no {model.family.tower} tower to run alone"
        raise CheckpointError(problem)
    return tower


def _rows(family: Family) -> tuple[Family, ...]:
    """The family's row as checkpoints have it and, if it differs, with transformers' names."""
    return (family, family.but(**family.in_transformers)) if family.in_transformers else (family,)


def _output_module(block: Any, family: Family) -> Any:
    """The module whose output attention adds to the stream: W_O, or LayerScale after it."""
    names = [row.output_module for row in _rows(family)]
    modules = dict(block.named_modules())
    return next((modules[name] for name in names if name in modules), None)


@contextmanager
def watched(
    blocks: Sequence[Any], model: Model, layers: Collection[int], show: Show
) -> Iterator[None]:
    """Within the block, a forward pass calls `show` for each of these layers."""
    with ExitStack() as stack:
        for block in {id(blocks[index]): blocks[index] for index in layers}.values():
            indices = [index for index, candidate in enumerate(blocks) if candidate is block]
            for handle in _Watch(model, indices, layers, show).attached_to(block):
                stack.callback(handle.remove)
        yield


class _Watch:
    """Hooks of one block, and the tensors that they have collected since it was called."""

    def __init__(
        self, model: Model, layers: list[int], wanted: Collection[int], show: Show
    ) -> None:
        self.model, self.wanted, self.show = model, wanted, show
        self.calls = iter(layers)  # layer by layer where several share the block
        self.layer = -1
        self.x: Any = None
        self.attention: Any = None
        self.output: Any = None
        self.shown = False

    def attached_to(self, block: Any) -> Iterator[Any]:
        """Handles of the hooks, by which they are removed."""
        yield block.register_forward_pre_hook(self.enter, with_kwargs=True)
        yield block.register_forward_hook(self.leave)
        output = _output_module(block, self.model.family)
        if output is not None:
            yield output.register_forward_hook(self.written)
        for module in block.modules():
            if "Attention" in type(module).__name__:
                yield module.register_forward_hook(self.attended)

    def enter(self, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.layer, self.shown = next(self.calls, -1), False
        self.x = args[0] if args else kwargs["hidden_states"]
        self.attention = self.output = None

    def written(self, module: Any, args: Any, output: Any) -> Any:
        """Keep what attention adds to the stream."""
        self.output = output
        return None if self.attention is None else self._show()

    def attended(self, module: Any, args: Any, returned: Any) -> Any:
        """A module that returns (output, weights, ...); W_O is in it, or comes after it."""
        weights = returned[1] if isinstance(returned, tuple) and len(returned) > 1 else None
        if self.attention is not None or getattr(weights, "ndim", 0) != 4:
            return None
        self.attention = weights
        new = None if self.output is None else self._show()
        if new is None:
            return None
        # The module may return the sum with the residual (BLOOM), so the difference is added to it.
        change = (new - self.output).reshape(returned[0].shape)
        return (returned[0] + change, *returned[1:])

    def leave(self, block: Any, args: Any, returned: Any) -> None:
        if not self.shown and self.layer in self.wanted:
            name = type(block).__name__
            problem = f"layer {self.layer}: transformers' {name} does not show its attention"
            raise CheckpointError(problem, file=self.model.name)

    def _show(self) -> Any:
        self.shown = True
        if self.layer not in self.wanted:
            return None
        new = self.show(self.layer, self.x, self.attention, self.output)
        return None if new is None else new.reshape(self.output.shape).to(self.output)

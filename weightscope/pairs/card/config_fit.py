"""Compare networks, tables and layers of a file with its config, as far as that can be done."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from weightscope.core.errors import counted
from weightscope.model.model import Model
from weightscope.model.rows.names import Tensors
from weightscope.pairs.identity.identity import is_buffer
from weightscope.report.findings import listed

INNER = ("intermediate_size", "n_inner", "ffn_dim", "inner_dim", "d_ff")  # keys of a width
OUTPUTS = ("down", "expert.down")  # roles of what a network writes with
OFFSET = 2  # rows of a position table before the first position: OPT's
NAMED = 3

Layer = tuple[str, int]  # a stack and a place in it
Held = frozenset[tuple[str, int | None, tuple[int, ...]]]  # role, expert and shape of each tensor


class ConfigFit(NamedTuple):
    """Layers that fit the config, and doubts about the rest."""

    fits: str
    doubts: str  # empty where all fits


def config_fit(model: Model) -> ConfigFit:
    """Compare all names, the shapes of each layer, widths of networks and position tables."""
    tensors = model.unchecked().tensors
    layers = _by_layer(tensors)
    doubts = [
        *_unnamed(tensors),
        *_uneven(layers),
        *_networks(model, tensors),
        *_positions(model, tensors),
    ]
    fits = f"{counted(len(layers), 'layer')} hold the same tensors in the same shapes"
    return ConfigFit(fits, "; ".join(doubts))


def _by_layer(tensors: Tensors) -> dict[Layer, Held]:
    held = defaultdict[Layer, set[tuple[str, int | None, tuple[int, ...]]]](set)
    for each in tensors:
        if each.stack is not None and each.layer is not None and not is_buffer(each):
            held[each.stack, each.layer].add((each.role, each.expert, each.shape))
    return {layer: frozenset(roles) for layer, roles in sorted(held.items())}


def _unnamed(tensors: Tensors) -> Iterator[str]:
    names = [each.name for each in tensors if not each.has_role and not is_buffer(each)]
    if names:
        yield f"no row names {listed(names, NAMED)}"


def _uneven(layers: Mapping[Layer, Held]) -> Iterator[str]:
    """The first layer of each stack that holds other tensors than most."""
    for stack in dict.fromkeys(stack for stack, _ in layers):
        within = {layer: held for layer, held in layers.items() if layer[0] == stack}
        usual, number = Counter(within.values()).most_common(1)[0]
        unusual = [(place, held) for (_, place), held in within.items() if held != usual]
        if unusual:
            place, held = unusual[0]
            roles = listed(sorted({role for role, *_ in usual ^ held}), NAMED)
            rest = counted(number, "other layer")
            yield f"layer {place} of {stack} has not the {roles} of {rest}"


def _networks(model: Model, tensors: Tensors) -> Iterator[str]:
    """Widths of networks that are none of the config's."""
    ends = [each for each in tensors if each.stack == tensors.own and each.role in OUTPUTS]
    if not ends:
        yield "no layer has a feed-forward network under a known name"
        return
    stated = [model.config.get(key) for key in INNER]
    sizes = [size for size in stated if type(size) is int]
    widths = {max(each.shape[-2:], key=lambda n: n != model.config.d_model) for each in ends}
    if sizes and not widths & {*sizes}:
        stored = listed([f"{width:,}" for width in sorted(widths)], NAMED)
        yield f"config.json has networks of {sizes[0]:,}, the file of {stored}"


def _positions(model: Model, tensors: Tensors) -> Iterator[str]:
    stated = model.config.n_positions
    tables = [each for each in tensors if each.role == "positions" and len(each.shape) == 2]
    for table in tables:
        if stated is not None and not 0 <= table.shape[0] - stated <= OFFSET:
            yield f"config.json has {stated:,} positions, the file {table.shape[0]:,}"

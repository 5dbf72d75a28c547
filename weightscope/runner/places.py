"""Where in transformers' models the blocks are, and what each block's attention returns."""

import re
from typing import Any

from weightscope.errors import CheckpointError
from weightscope.model import Model

# The module whose output attention adds to the stream, by its name in a block: W_O, or LayerScale after it.
PROJECTION = re.compile(
    r"(^|\.)(o_proj|out_proj|c_proj|out_lin|Wo|attn\.o|attention\.output\.dense"
    r"|(attention|self_attention|self_attn)\.dense)$"
)
LAYER_SCALE = re.compile(r"^layer_scale1$")
NOT_ATTENTION = re.compile(r"(^|\.)(mlp|ffn|feed_forward|experts|linear_attn)\.")


def blocks_of(network: Any, model: Model) -> list[Any]:
    """The layers in the order in which they are called; a block that several layers share (ALBERT) is listed once.

    Raises
    ------
    CheckpointError
        The network is not built of blocks as known here.
    """
    import torch

    lists = [(name, m) for name, m in network.named_modules() if isinstance(m, torch.nn.ModuleList)]
    if model.family.tower != "vision":
        lists = [(name, m) for name, m in lists if "vision" not in name]
    for _, found in lists:
        if len(found) == model.config.n_layers:
            return list(found)
    shared = [block for name, m in lists for block in m if name.endswith("albert_layers")]
    if shared:
        return shared
    raise CheckpointError(f"transformers' {type(network).__name__} has no list of {model.config.n_layers} layers")


def output_module(block: Any) -> Any:
    """The module of a block whose output is attention's addition to the residual stream; None in a block without."""
    named = [(name, m) for name, m in block.named_modules() if not NOT_ATTENTION.search(name)]
    for pattern in (LAYER_SCALE, PROJECTION):
        for name, module in named:
            if pattern.search(name):
                return module
    return None


def attention_modules(block: Any) -> list[Any]:
    """Modules of a block that may return attention weights beside their output."""
    return [m for m in block.modules() if "Attention" in type(m).__name__]


def tower_of(network: Any, model: Model) -> Any:
    """The tower that the family names, or all of the network."""
    return getattr(network, f"{model.family.tower}_model") if model.family.tower else network

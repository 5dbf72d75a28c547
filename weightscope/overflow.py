"""The error for results that overflow, naming the largest finite weight."""

from collections.abc import Iterable
from contextlib import suppress

import numpy as np

from weightscope.checkpoint import Tensor
from weightscope.errors import CheckpointError
from weightscope.model import Model

BLOCK_VALUES = 4 << 20  # values of a tensor read at a time


def largest_weight(tensors: Iterable[Tensor]) -> tuple[float, str]:
    """The largest finite magnitude in these tensors, and the tensor's name; (0, "") if none holds weights."""
    largest = (0.0, "")
    for tensor in tensors:
        with suppress(CheckpointError):  # not weights
            largest = max(largest, (_largest(tensor), tensor.name))
    return largest


def _largest(tensor: Tensor) -> float:
    if not tensor.shape:
        return 0.0
    rows = max(1, BLOCK_VALUES // max(1, int(np.prod(tensor.shape[1:]))))
    blocks = (np.abs(block) for _, block in tensor.unchecked(set()).blocks(rows))
    return max((float(np.where(np.isfinite(block), block, 0).max(initial=0)) for block in blocks), default=0.0)


def overflow(model: Model, what: str, layer: int | None = None, *, anywhere: bool = False) -> CheckpointError:
    """The error that `what` overflows, with the largest weight of the layer and embeddings, or of all tensors."""
    near = model.embedding_tensors + (model.attention_tensors(layer) if layer is not None else [])
    value, name = largest_weight(model.checkpoint.values() if anywhere else near)
    problem = f"{what} overflows: its largest weight is {value:.3g}, in {name}"
    return CheckpointError(f"{problem}; read that tensor again from its source", file=model.checkpoint.name)

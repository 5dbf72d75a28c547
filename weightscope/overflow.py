"""Finite weights too large to compute with: which they are, and the error that says so."""

from collections.abc import Iterable
from contextlib import suppress

import numpy as np

from weightscope.checkpoint import Tensor
from weightscope.errors import CheckpointError
from weightscope.model import Model

BLOCK_VALUES = 4 << 20  # of a tensor looked through at a time


def largest_weight(tensors: Iterable[Tensor]) -> tuple[float, str]:
    """The largest finite magnitude in those tensors that hold weights, and the tensor's name; (0, "") without any."""
    found = (0.0, "")
    for tensor in tensors:
        with suppress(CheckpointError):  # it holds no weights
            found = max(found, (_largest(tensor), tensor.name))
    return found


def _largest(tensor: Tensor) -> float:
    if not tensor.shape:
        return 0.0
    rows = max(1, BLOCK_VALUES // max(1, int(np.prod(tensor.shape[1:]))))
    blocks = (np.abs(block) for _, block in tensor.unchecked(set()).blocks(rows))
    return max((float(np.where(np.isfinite(block), block, 0).max(initial=0)) for block in blocks), default=0.0)


def overflow(model: Model, what: str, layer: int | None = None, *, anywhere: bool = False) -> CheckpointError:
    """The error that says that `what` left the range of its numbers, and which weights may have done it.

    Parameters
    ----------
    model : Model
    what : str
        What is not finite, such as "T^ee of head 3".
    layer : int, optional
        The layer it is computed from, beside the embeddings; none where it is of the embeddings alone.
    anywhere : bool
        It is computed from all that the checkpoint holds.
    """
    near = model.embedding_tensors + (model.attention_tensors(layer) if layer is not None else [])
    value, name = largest_weight(model.checkpoint.values() if anywhere else near)
    problem = f"{what} overflows: its largest weight is {value:.3g}, in {name}"
    return CheckpointError(f"{problem}; read that tensor again from its source", file=model.checkpoint.name)

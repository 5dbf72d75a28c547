"""A checkpoint read as it is, NaNs and infinities included, so that an audit can say which heads they reach."""

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any

import numpy as np

from weightscope.checkpoint import Checkpoint, Tensor
from weightscope.model import Model


class UncheckedTensor(Tensor):
    """A tensor that may hold NaN and infinity."""

    def _refuse_if_not_finite(self, block: np.ndarray, first_row: int) -> None:
        """What is broken is counted by whoever reads this."""


class UncheckedCheckpoint(Mapping[str, Tensor]):
    """The same checkpoint with unchecked tensors."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checked = checkpoint

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.checked[name]
        return UncheckedTensor(**vars(tensor))

    def __iter__(self) -> Iterator[str]:
        return iter(self.checked)

    def __len__(self) -> int:
        return len(self.checked)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.checked, name)


def lenient(model: Model) -> Model:
    """The same model, reading values that are not finite as they are: they reach the heads they belong to."""
    other = copy(model)
    other._last = None
    if not isinstance(model.checkpoint, UncheckedCheckpoint):
        other.checkpoint = UncheckedCheckpoint(model.checkpoint)  # type: ignore[assignment]
    return other


def count_not_finite(tensor: Tensor) -> int:
    """How many values of a tensor are NaN or infinite; 0 for dtypes that cannot be."""
    if tensor.dtype not in {"F16", "BF16", "F32", "F64"} or not tensor.shape:
        return 0
    unchecked = UncheckedTensor(**vars(tensor))
    rows = max(1, (4 << 20) // max(1, int(np.prod(tensor.shape[1:]))))
    return sum(int(np.count_nonzero(~np.isfinite(block))) for _, block in unchecked.blocks(rows))

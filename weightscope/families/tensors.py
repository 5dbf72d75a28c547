"""A checkpoint's tensors by the names a family's row uses, shapes checked as they are read."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from weightscope.checkpoint import Checkpoint, Tensor
from weightscope.errors import CheckpointError
from weightscope.half import Weights

# What BERT-era files call a LayerNorm's weight and bias.
LEGACY = {".weight": ".gamma", ".bias": ".beta"}


@dataclass(frozen=True)
class LayerTensors:
    """The tensors under one prefix, for instance those of one layer.

    Attributes
    ----------
    checkpoint : Checkpoint
    prefix : str
        Stands before every name asked for.
    needed_by : str
        Named in errors: the family and the sizes that set the shapes expected.
    lent : mapping of str
        Modules that stand under another prefix: those of keys and values that another layer makes.
    """

    checkpoint: Checkpoint
    prefix: str
    needed_by: str
    lent: Mapping[str, str] = field(default_factory=dict)

    def _full(self, name: str) -> str:
        return self.lent.get(name.rpartition(".")[0], self.prefix) + name

    def __contains__(self, name: str) -> bool:
        return self._full(name) in self.checkpoint

    def tensor(self, name: str, shape: tuple[int | None, ...]) -> Tensor:
        """The unread tensor; None in `shape` stands for any size.

        Raises
        ------
        CheckpointError
            It is not there, or has another shape.
        """
        full = self._full(name)
        module, dot, kind = full.rpartition(".")
        legacy = module + LEGACY.get(dot + kind, dot + kind)
        full = legacy if full not in self.checkpoint and legacy in self.checkpoint else full
        if full not in self.checkpoint:
            raise CheckpointError(f"is missing; {self.needed_by} needs it", file=self.checkpoint.name, tensor=full)
        tensor = self.checkpoint[full]
        if len(tensor.shape) != len(shape) or any(w not in (None, n) for w, n in zip(shape, tensor.shape, strict=True)):
            wanted = str(shape).replace("None", "any")
            problem = f"has shape {tensor.shape}; {self.needed_by} needs {wanted}"
            raise CheckpointError(problem, file=tensor.file.path, tensor=full)
        return tensor

    def read(self, name: str, shape: tuple[int | None, ...]) -> np.ndarray:
        """The tensor as float32; errors as for `tensor` and for reading."""
        return self.tensor(name, shape).read()

    def weights(self, name: str, shape: tuple[int | None, ...]) -> Weights:
        """The tensor as float32, or in half precision where it is stored so; errors as for `read`."""
        return self.tensor(name, shape).weights()

"""Bytes to tensors: checkpoints read straight into NumPy. Knows nothing of attention."""

from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.checkpoint.jsontext import read_json
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.checkpoint.source import resolve_folder
from weightscope.checkpoint.tensor import Tensor

__all__ = ["Checkpoint", "Tensor", "open_checkpoint", "read_json", "resolve_folder"]

"""Checkpoint files to NumPy tensors, without PyTorch. Knows nothing of attention."""

from weightscope.checkpoint.checkpoint import Checkpoint, Tensor
from weightscope.checkpoint.config import read_json
from weightscope.checkpoint.opening import open_checkpoint, resolve_folder

__all__ = ["Checkpoint", "Tensor", "open_checkpoint", "read_json", "resolve_folder"]

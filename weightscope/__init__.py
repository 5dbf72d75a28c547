"""What a transformer checkpoint's attention heads are, from the weights alone."""

from weightscope.attention.factored import Factored
from weightscope.errors import CheckpointError
from weightscope.model import Model, open_model

__all__ = ["CheckpointError", "Factored", "Model", "open_model"]
__version__ = "0.1.0"

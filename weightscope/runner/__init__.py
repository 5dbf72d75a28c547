"""What needs activations: a checkpoint's model run once by PyTorch, layer by layer handed on as plain arrays.

PyTorch and transformers are imported in this package only, and only when a model is loaded.
"""

from weightscope.runner.runner import Activations, Runner, open_runner

__all__ = ["Activations", "Runner", "open_runner"]

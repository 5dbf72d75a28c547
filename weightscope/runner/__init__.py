"""A checkpoint's model, run once with PyTorch: each layer's activations as plain arrays.

Only this package imports PyTorch and transformers, and only when a model is loaded.
"""

from weightscope.runner.runner import Activations, Intervention, Runner, losses_under, open_runner

__all__ = ["Activations", "Intervention", "Runner", "losses_under", "open_runner"]

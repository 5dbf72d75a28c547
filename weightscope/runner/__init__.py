"""Runs a checkpoint's model once with PyTorch and hands on each layer's activations as plain arrays.

Only this package imports PyTorch and transformers, and only when a model is loaded.
"""

from weightscope.runner.runner import Activations, Runner, open_runner

__all__ = ["Activations", "Runner", "open_runner"]

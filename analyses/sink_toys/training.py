"""How all toys are trained: AdamW at a constant rate on a stream of fresh batches."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weightscope.progress import bar

WEIGHT_DECAY = 1e-4


@dataclass(frozen=True)
class Size:
    """Sizes and schedule of a toy's training."""

    width: int
    tokens: int
    batch: int
    steps: int
    rate: float
    every: int
    """Steps between two looks at the model on the way."""


def seeded(seed: int) -> torch.Generator:
    """A generator for a run's inputs; the model's initialisation, drawn next, follows the same seed."""
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


def direction(width: int, generator: torch.Generator) -> Tensor:
    """A random unit vector that LayerNorm lets through: it takes out the mean of a token's coordinates.

    A direction with a mean of its own is partly hidden from a pre-norm layer: another difficulty than the tasks'.
    """
    drawn = torch.randn(width, generator=generator)
    return nn.functional.normalize(drawn - drawn.mean(), dim=0)


def train(
    model: nn.Module,
    loss: Callable[[], Tensor],
    steps: int,
    rate: float,
    label: str,
    cosine: bool = False,
    weight_decay: float = WEIGHT_DECAY,
) -> Iterator[int]:
    """Train step by step, yielding each step's number (from 1) after it, so that a caller can look at the model.

    Parameters
    ----------
    model : Module
    loss : callable
        Draws a batch and gives the model's loss on it.
    steps : int
    rate : float
        AdamW's learning rate.
    label : str
        What the progress bar says.
    cosine : bool
        Let the rate rise over a twentieth of the steps and then fall to nothing along a cosine; constant otherwise.
    weight_decay : float
    """
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=weight_decay, fused=True)
    for step in bar(range(1, steps + 1), label, "step", mininterval=1.0):
        if cosine:
            scheduled = min(20 * step / steps, 0.5 + 0.5 * math.cos(math.pi * step / steps))
            optimiser.param_groups[0]["lr"] = rate * scheduled
        optimiser.zero_grad(set_to_none=True)
        loss().backward()
        optimiser.step()
        yield step

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
    every: int  # Steps between two looks at the model on the way


def seeded(seed: int) -> torch.Generator:
    """A generator for a run's inputs; the model's initialisation, drawn next, follows the same seed."""
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


def direction(width: int, generator: torch.Generator) -> Tensor:
    """A random unit vector with mean zero, which LayerNorm leaves whole: it subtracts the mean of a token."""
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
    """Train step by step and yield the number of each step (from 1) after it, so that a caller can look at the model.

    `loss` draws a batch and returns the model's loss on it. With `cosine` the rate rises over a twentieth of the steps
    and then falls to zero along a cosine; otherwise it is constant.
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

"""How all toys are trained: AdamW at a constant rate on a stream of fresh batches, continued where it was stopped."""

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weightscope.core.files import Folder
from weightscope.core.progress import bar

WEIGHT_DECAY = 1e-4
SECONDS_BETWEEN_SAVES = 120


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
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def as_array(tensor: Tensor) -> np.ndarray:
    """A tensor of any device as a NumPy array."""
    return tensor.cpu().numpy()


def direction(width: int, generator: torch.Generator) -> Tensor:
    """A random unit vector with mean zero, which LayerNorm leaves whole: it subtracts the mean of a token."""
    drawn = torch.randn(width, generator=generator)
    return nn.functional.normalize(drawn - drawn.mean(), dim=0)


@dataclass
class Kept:
    """A training on disk: weights, optimiser, random state, and what the caller has noted on the way."""

    folder: Path
    name: str
    settings: dict[str, Any]  # a file with other settings is ignored
    generator: torch.Generator
    notes: tuple[list[Any], ...]  # grown by the caller after each step, restored in place

    @property
    def path(self) -> Path:
        return self.folder / f"{re.sub('[^a-z0-9.]+', '-', self.name.lower())}.pt"

    def load(self, model: nn.Module, optimiser: torch.optim.Optimizer) -> int:
        """Restore what was saved and return its step; 0 if there is nothing."""
        if not self.path.exists():
            return 0
        saved = torch.load(self.path, weights_only=True, map_location=torch.get_default_device())
        if saved["settings"] != self.settings:
            return 0
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        self.generator.set_state(saved["generator"].cpu())
        for notes, earlier in zip(self.notes, saved["notes"], strict=True):
            notes[:] = earlier
        return int(saved["step"])

    def save(self, step: int, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        """Write the file anew, whole."""
        with Folder(self.folder).open(self.path.name) as file:
            torch.save({
                "step": step, "settings": self.settings, "model": model.state_dict(), "notes": self.notes,
                "optimiser": optimiser.state_dict(), "generator": self.generator.get_state(),
            }, file)  # fmt: skip


def train(
    model: nn.Module,
    loss: Callable[[], Tensor],
    steps: int,
    rate: float,
    label: str,
    cosine: bool = False,
    weight_decay: float = WEIGHT_DECAY,
    kept: Kept | None = None,
) -> Iterator[int]:
    """Train step by step and yield the number of each step (from 1) after it, so that a caller can look at the model.

    `loss` draws a batch and returns the model's loss on it. With `cosine` the rate rises over a twentieth of the steps
    and then falls to zero along a cosine; otherwise it is constant. With `kept` the training goes on from the last step
    that was saved, and ends with the same weights as without an interruption.
    """
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=weight_decay, fused=True)
    done = kept.load(model, optimiser) if kept else 0
    saved = time.monotonic()
    for step in bar(range(done + 1, steps + 1), label, "step", mininterval=1.0):
        if cosine:
            scheduled = min(20 * step / steps, 0.5 + 0.5 * math.cos(math.pi * step / steps))
            optimiser.param_groups[0]["lr"] = rate * scheduled
        optimiser.zero_grad(set_to_none=True)
        loss().backward()
        optimiser.step()
        yield step
        if kept and (step == steps or time.monotonic() - saved > SECONDS_BETWEEN_SAVES):
            kept.save(step, model, optimiser)
            saved = time.monotonic()

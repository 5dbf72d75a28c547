"""A researcher's own model: plain PyTorch, no class of transformers, modules and config keys with their own names."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass
class ZephyrineConfig:
    vocab_size: int = 300
    width: int = 48
    n_blocks: int = 3
    n_heads: int = 4
    n_kv_heads: int = 2
    rope_theta: float = 500.0
    eps: float = 1e-5


class ScaleNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Mixer(nn.Module):
    """Attention that is not called so: rotated halves, two queries to a key."""

    def __init__(self, config: ZephyrineConfig) -> None:
        super().__init__()
        d, self.h, self.g = config.width, config.n_heads, config.n_kv_heads
        self.r, self.theta = d // self.h, config.rope_theta
        self.wq, self.wo = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.wk, self.wv = (nn.Linear(d, self.g * self.r, bias=False) for _ in "kv")

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[-2])[:, None] * self.theta ** (-torch.arange(0, self.r, 2) / self.r)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q @ k.transpose(-1, -2) / self.r**0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = (w(x).view(b, n, -1, self.r).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        k, v = (heads.repeat_interleave(self.h // self.g, 1) for heads in (self.turned(k), v))
        scores = self.scores(self.turned(q), k) + torch.full((n, n), -torch.inf).triu(1)
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))


class GainNorm(ScaleNorm):
    """The same; its parameter is not called weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps)
        del self.weight
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.gain


class Block(nn.Module):
    def __init__(self, config: ZephyrineConfig, mixer: type[Mixer], norm: type[ScaleNorm]) -> None:
        super().__init__()
        self.pre, self.mixer = norm(config.width, config.eps), mixer(config)
        self.up, self.down = nn.Linear(config.width, 96), nn.Linear(96, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mixer(self.pre(x))
        return x + self.down(torch.relu(self.up(x)))


class Zephyrine(nn.Module):
    mixer, norm = Mixer, ScaleNorm

    def __init__(self, config: ZephyrineConfig) -> None:
        super().__init__()
        self.config = config
        self.words = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config, self.mixer, self.norm) for _ in range(config.n_blocks))
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.head.weight = self.words.weight

    def forward(self, idx: torch.Tensor, targets: Any = None) -> torch.Tensor:
        x = self.words(idx)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class OfNumbers(Zephyrine):
    """The same, built of numbers rather than of a config; and it prints."""

    def __init__(
        self, vocab_size: int, width: int, n_blocks: int, n_heads: int, n_kv_heads: int, rope_theta: float, eps: float
    ) -> None:
        print("built")
        super().__init__(ZephyrineConfig(vocab_size, width, n_blocks, n_heads, n_kv_heads, rope_theta, eps))


@dataclass
class BriefConfig:
    """Names that do not say what they are."""

    V: int = 300
    D: int = 48
    L: int = 3
    H: int = 4
    G: int = 2
    wavelength: float = 700.0
    delta: float = 1e-5


class Brief(Zephyrine):
    def __init__(self, config: BriefConfig) -> None:
        c = config
        super().__init__(ZephyrineConfig(c.V, c.D, c.L, c.H, c.G, c.wavelength, c.delta))


class Gained(Zephyrine):
    norm = GainNorm


class Bent(Mixer):
    """What no row describes."""

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.sinh(super().scores(q, k) / 2)


class Bends(Zephyrine):
    mixer = Bent


class Dies(Zephyrine):
    def forward(self, idx: torch.Tensor, targets: Any = None) -> torch.Tensor:
        import os

        os._exit(3)

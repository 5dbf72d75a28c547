"""An architecture under names that no other has: one tensor in groups, an RMSNorm whose gains count from 1, neighbours
that turn."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


class NewcomerConfig(PreTrainedConfig):
    model_type = "newcomer"

    def __init__(
        self,
        stream_width: int = 48,
        n_blocks: int = 2,
        query_heads: int = 4,
        memory_groups: int = 2,
        rope_theta: float = 50.0,
        small_eps: float = 1e-5,
        vocab_size: int = 64,
        **more: Any,
    ) -> None:
        self.stream_width, self.n_blocks, self.query_heads = stream_width, n_blocks, query_heads
        self.memory_groups, self.rope_theta, self.small_eps = memory_groups, rope_theta, small_eps
        self.vocab_size = vocab_size
        super().__init__(**more)


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (1 + self.weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Attention(nn.Module):
    def __init__(self, config: NewcomerConfig) -> None:
        super().__init__()
        d, self.h, self.g = config.stream_width, config.query_heads, config.memory_groups
        self.r, self.theta = d // self.h, config.rope_theta
        self.joint = nn.Linear(d, (self.h + 2 * self.g) * self.r)
        self.back = nn.Linear(d, d, bias=False)

    def turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None] * self.theta ** (-torch.arange(0, self.r, 2) / self.r)
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1).flatten(-2)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        joint = self.joint(x).view(b, n, self.g, self.h // self.g + 2, self.r).permute(0, 2, 3, 1, 4)
        q, k, v = joint[:, :, :-2].flatten(1, 2), joint[:, :, -2], joint[:, :, -1]
        q, k = self.turned(q, positions), self.turned(k, positions)
        k, v = (heads.repeat_interleave(self.h // self.g, 1) for heads in (k, v))
        scores = q @ k.transpose(-1, -2) / self.r**0.5 + torch.full((n, n), -torch.inf).triu(1)
        return self.back((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))


class Block(nn.Module):
    def __init__(self, config: NewcomerConfig) -> None:
        super().__init__()
        self.ahead, self.mixing = Norm(config.stream_width, config.small_eps), Attention(config)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return x + self.mixing(self.ahead(x), positions)


class NewcomerModel(PreTrainedModel):
    config_class = NewcomerConfig
    base_model_prefix = "newcomer"

    def __init__(self, config: NewcomerConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.stream_width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_blocks))
        self.post_init()

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        positions = torch.arange(input_ids.shape[1]) if position_ids is None else position_ids[0]
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x, positions)
        return x

"""Attention of the toy models: the map from scores to weights comes from a table; gates and registers are options.

Equations: the two-sink-mechanisms paper, appendix C. The scores are S = Q K' / sqrt(r).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from analyses.toys.sinks.training import as_array
from weightscope.model.layers.factored import Factored
from weightscope.model.layers.maps import fold_layer_norm

CLIPPED_LOW, CLIPPED_HIGH = -0.03, 1.03  # gamma and zeta, as published with clipped softmax
POLYNOMIAL_POWER = 3


def softmax(scores: Tensor) -> Tensor:
    """exp(S_ij) / sum_j exp(S_ij) (eq. 23)."""
    return scores.softmax(dim=-1)


def clipped_softmax(scores: Tensor) -> Tensor:
    """clip((zeta - gamma) softmax(S) + gamma, 0, 1) (eqs 30-32): weights can be exactly 0 and exactly 1."""
    return ((CLIPPED_HIGH - CLIPPED_LOW) * softmax(scores) + CLIPPED_LOW).clamp(0, 1)


def pointwise(phi: Callable[[Tensor], Tensor], exponent: float) -> Callable[[Tensor], Tensor]:
    """The general family phi(S) / n^exponent, elementwise (eqs 36-37). Rows need not sum to 1; weights may be negative.

    ReLU attention is phi = max(., 0) with exponent 1 (eqs 33-34), polynomial attention S^3 with 1/2 (eq. 38).
    """
    return lambda scores: phi(scores) / scores.shape[-1] ** exponent


def sigmoid(scores: Tensor) -> Tensor:
    """1 / (1 + exp(-S - b)) with b = -ln n (eqs 40-41)."""
    return torch.sigmoid(scores - math.log(scores.shape[-1]))


WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": softmax,
    "clipped": clipped_softmax,
    "relu": pointwise(torch.relu, 1),
    "polynomial": pointwise(lambda scores: scores**POLYNOMIAL_POWER, 1 / 2),
    "sigmoid": sigmoid,
    "squared relu": pointwise(lambda scores: scores.relu() ** 2, 1),
    "gelu": pointwise(functional.gelu, 1),
    "softplus": pointwise(functional.softplus, 1),
    "identity": pointwise(lambda scores: scores, 1),
    "relu6": pointwise(functional.relu6, 1),
}


@dataclass(frozen=True)
class Options:
    """What can differ between two models of one size."""

    weights: str = "softmax"  # A row of WEIGHTS
    # None, "headwise" (one gate a head) or "elementwise" (one a coordinate of a head's output); eqs 24-26
    gate: str | None = None
    registers: int = 0  # Learned tokens appended to the sequence and discarded at the end; eqs 27-29


VARIANTS = {
    "softmax": Options(),
    "registers": Options(registers=4),
    "headwise gate": Options(gate="headwise"),
    "elementwise gate": Options(gate="elementwise"),
    "headwise gate + registers": Options(gate="headwise", registers=4),
    "elementwise gate + registers": Options(gate="elementwise", registers=4),
    "clipped softmax": Options(weights="clipped"),
    "ReLU": Options(weights="relu"),
    "polynomial": Options(weights="polynomial"),
    "sigmoid": Options(weights="sigmoid"),
    "squared ReLU": Options(weights="squared relu"),
    "GELU": Options(weights="gelu"),
    "softplus": Options(weights="softplus"),
    "identity": Options(weights="identity"),
    "ReLU6": Options(weights="relu6"),
}
GATES_AND_REGISTERS = [name for name, options in VARIANTS.items() if options.weights == "softmax"]


class Trace(NamedTuple):
    """Arrays of one attention layer on a batch; b sequences, h heads, n tokens, r head_dim."""

    before: np.ndarray  # The tokens the layer was given, (b, n, d)
    after: np.ndarray  # The same after the layer's output was added, (b, n, d)
    queries: np.ndarray  # (b, h, n, r)
    keys: np.ndarray  # (b, h, n, r)
    values: np.ndarray  # (b, h, n, r)
    attention: np.ndarray  # (b, h, n, n)
    updates: np.ndarray  # u_j = W_O v_j, (b, h, n, d): what keys offer, before any gate, which belongs to the query


class PreNormAttention(nn.Module):
    """LayerNorm and multi-head attention without biases; returns what the layer adds to the residual stream."""

    def __init__(self, width: int, heads: int, head_dim: int, options: Options) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.weights = WEIGHTS[options.weights]
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, heads * head_dim, bias=False) for _ in range(3))
        self.output = nn.Linear(heads * head_dim, width, bias=False)
        gates = {None: 0, "headwise": heads, "elementwise": heads * head_dim}[options.gate]
        self.gate = nn.Linear(width, gates, bias=False) if gates else None

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x)  # (b, n, d)
        q, k, v = (self._split(linear(z)) for linear in (self.query, self.key, self.value))  # (b, h, n, r)
        head_output = self._attention(q, k) @ v  # (b, h, n, r)
        if self.gate is not None:
            head_output = head_output * torch.sigmoid(self._split(self.gate(z)))  # eqs 24-26, at the query's place
        return self.output(head_output.transpose(1, 2).flatten(2))  # (b, n, d)

    @torch.no_grad()
    def trace(self, x: Tensor) -> Trace:
        """The layer's arrays for the tokens x, (b, n, d)."""
        z = self.norm(x)
        q, k, v = (self._split(linear(z)) for linear in (self.query, self.key, self.value))
        w_o = self.output.weight.T.unflatten(0, (self.heads, self.head_dim))  # (h, r, d)
        return Trace(*(as_array(t) for t in (x, x + self(x), q, k, v, self._attention(q, k), v @ w_o)))

    @torch.no_grad()
    def qk(self, head: int) -> Factored:
        """W_QK of a head with the LayerNorm folded in, as `weightscope.Head.qk` has it."""
        rows = slice(head * self.head_dim, (head + 1) * self.head_dim)
        gamma, beta = as_array(self.norm.weight), as_array(self.norm.bias)
        left, right = (
            fold_layer_norm(as_array(linear.weight[rows].T), np.zeros(self.head_dim), gamma, beta)[0]
            for linear in (self.query, self.key)
        )
        return Factored(left, right)

    def _attention(self, q: Tensor, k: Tensor) -> Tensor:
        return self.weights(q @ k.transpose(-1, -2) / math.sqrt(self.head_dim))  # (b, h, n, n)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (b, n, h * r) -> (b, h, n, r)


class Registers(nn.Module):
    """Learned tokens that are appended to every input before the first layer and discarded after the last."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(count, width) * 0.02)

    def append(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.tokens.expand(len(x), -1, -1)], dim=1)  # (b, n, d) -> (b, n + R, d)

    def discard(self, x: Tensor) -> Tensor:
        return x[:, : x.shape[1] - len(self.tokens)]


@torch.no_grad()
def traces(model: nn.Module, x: Tensor) -> list[Trace]:
    """The trace of each attention layer of a model on a batch, first layer first."""
    inputs: list[tuple[PreNormAttention, Tensor]] = []
    layers = [module for module in model.modules() if isinstance(module, PreNormAttention)]
    hooks = [layer.register_forward_pre_hook(lambda layer, given: inputs.append((layer, *given))) for layer in layers]
    model(x)
    for hook in hooks:
        hook.remove()
    return [layer.trace(given) for layer, given in inputs]
